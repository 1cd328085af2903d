"""Operators with sharded inputs: no gather, one sum over the shards, the numbers of one device.

Stand-ins replace the kernels. They loop over rows, which XLA cannot partition either: outside of shards
it would gather their operands. The devices must exist before JAX starts, so this file runs itself in a
process of its own.
"""

import functools
import itertools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.conv import depthwise_conv_cuda, patch_expand
from jaxfused.ops.linear import (
    qkv_projection,
    qkv_projection_stages,
    qkv_projection_xla,
)
from jaxfused.ops.linear import weight_gradient as weight_gradient_operator
from jaxfused.ops.norm import (
    adaptive_norm,
    group_norm_cuda,
    group_norm_slab_cuda,
    group_norm_xla,
    layer_norm,
    layer_norm_xla,
)
from jaxfused.ops.pool import max_pool_cuda, max_pool_xla, upsample_cuda
from jaxfused.ops.rope import rope, rope_xla
from jaxfused.runtime import cuda_library, product_regimes, runner, sharding
from jaxfused.runtime.rectified import Rectified
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv import weight_gradient as pallas_weight_gradient
from pallas_kernels.gemm.fused_product import FusedProduct
from tests.ops.loss import test_cross_entropy_kernels as cross_entropy_stand_ins
from tests.support import eight_devices
from tests.support.arrays import put
from tests.support.eight_devices import DEVICES
from tests.support.grids import parametrize

on_eight_devices = pytest.mark.skipif(
    jax.device_count() != DEVICES or jax.default_backend() != "cpu",
    reason="runs in the process that test_on_eight_devices starts",
)
AXES = ("data", "sequence")
ROWS, SHARED = P(*AXES), P()
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() == DEVICES, reason="this is that process")
@parametrize("selection", ["not exhaustive", "exhaustive"], quick=(0,))
def test_on_eight_devices(selection):
    eight_devices.assert_passes(__file__, selection)


# --- stand-ins ------------------------------------------------------------------------------------


def stand_in_forward(
    x, scale, bias, residual, pre_bias, *, save_statistics, multiprocessors, config, **options
):
    del multiprocessors, config

    def norm(row):
        x, residual = row
        return layer_norm_xla.norm(x, scale, bias, residual, pre_bias, **options)

    y, next_residual = lax.map(norm, (x, residual))
    h = x if residual is None else next_residual
    mean = h.mean(-1)
    return (
        y,
        next_residual,
        mean if save_statistics else None,
        lax.rsqrt(h.var(-1) + options["epsilon"]) if save_statistics else None,
    )


def stand_in_backward(
    dy,
    dnext_residual,
    h,
    mean,
    rstd,
    scale,
    bias,
    pre_bias,
    *,
    segments,
    multiprocessors,
    config,
    **options,
):
    del mean, rstd, multiprocessors, config

    def norm(h, scale, bias, pre_bias):
        # With a residual, h already contains pre_bias, whose gradient is then that of h.
        return layer_norm_xla.norm(h, scale, bias, None, pre_bias, **options)[0]

    def gradients(row):
        dy, h, dnext = row
        if dnext_residual is None:
            return jax.vjp(norm, h, scale, bias, pre_bias)[1](dy)
        dx, dscale, dbias, _ = jax.vjp(norm, h, scale, bias, None)[1](dy)
        return dx + dnext, dscale, dbias, None if pre_bias is None else dx + dnext

    dnext = jnp.zeros_like(h) if dnext_residual is None else dnext_residual
    dx, *parameters = lax.map(gradients, (dy, h, dnext))
    return dx, *(
        None if p is None else p.reshape(segments, -1, p.shape[-1]).sum(1) for p in parameters
    )


@pytest.fixture
def stand_ins(hopper, monkeypatch):
    monkeypatch.setattr(layer_norm.pallas_layer_norm, "forward", stand_in_forward)
    monkeypatch.setattr(layer_norm.pallas_layer_norm_backward, "backward", stand_in_backward)


# --- layer_norm -----------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: jax.Array
    residual: jax.Array
    dy: jax.Array
    scale: jax.Array
    bias: jax.Array
    pre_bias: jax.Array


def inputs(shape=(4, 8, 64)) -> Inputs:
    random = np.random.default_rng(0)
    rows = (random.standard_normal(shape).astype(np.float32) for _ in range(3))
    parameters = (random.standard_normal(shape[-1:]).astype(np.float32) for _ in range(3))
    return Inputs(*rows, *parameters)


def specs(rows: P, parameters: P = SHARED) -> Inputs:
    return Inputs(rows, rows, rows, parameters, parameters, parameters)


def loss_and_gradients(implementation, inputs):
    """Returns (y, gradients of a scalar loss to x, residual, scale, bias, pre_bias)."""

    def loss(x, residual, scale, bias, pre_bias):
        y, h = jaxfused.layer_norm(
            x,
            scale,
            bias,
            residual=residual,
            pre_bias=pre_bias,
            activation="silu",
            implementation=implementation,
        )
        return jnp.sum(y * inputs.dy + jnp.sin(h)), y

    x, residual, _, *parameters = inputs
    gradients, y = jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(x, residual, *parameters)
    return y, *gradients


kernel = functools.partial(loss_and_gradients, "pallas")


@functools.cache
def expected(shape=(4, 8, 64)):
    return jax.jit(functools.partial(loss_and_gradients, "xla"))(inputs(shape))


def make_mesh(*types: AxisType):
    return jax.make_mesh((2, 4), AXES, axis_types=types)


def place(mesh, specs, arrays):
    return jax.tree.map(lambda s, a: jax.device_put(a, NamedSharding(mesh, s)), specs, arrays)


def results_and_text(f, *args):
    """Compiles `f` once; returns its results and its program."""
    compiled = jax.jit(f).lower(*args).compile()
    return compiled(*args), compiled.as_text()


def count(collective: str, text: str) -> int:
    return len(re.findall(rf"= \S+.* {collective}(-start)?\(", text))


def check_alike(
    results, axis_type, specs, arrays, *, chosen="pallas", gathers=False, tolerance=2e-4
):
    """Asserts that `results(implementation, *arrays)` of split arrays are XLA's of whole ones."""
    placed = place(make_mesh(axis_type, axis_type), specs, arrays)
    actual, text = results_and_text(functools.partial(results, chosen), *placed)
    assert (count("all-gather", text) > 0) == gathers
    expected = jax.jit(functools.partial(results, "xla"))(*arrays)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def check(f, arguments, *, gathers: bool = False, shape=(4, 8, 64)):
    """Asserts one device's numbers, one sum for all parameters, and gathers only if allowed."""
    results, text = results_and_text(f, arguments)
    assert (count("all-gather", text) > 0) == gathers
    for actual, wanted in zip(results, expected(shape), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)
    return text


def manual(mesh, names, check_vma):
    """Returns loss and gradients, computed inside a shard_map over `names`."""
    rows, shared = P(*names), P()

    def shard(inputs):
        y, dx, dresidual, *parameters = kernel(inputs)
        # With check_vma, gradients of replicated values are summed already.
        return y, dx, dresidual, *(p if check_vma else lax.psum(p, names) for p in parameters)

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(specs(rows),),
        out_specs=(rows, rows, rows, shared, shared, shared),
        axis_names=set(names),
        check_vma=check_vma,
    )


@on_eight_devices
def test_the_stand_ins_are_opaque_to_xla(stand_ins):
    arguments = place(make_mesh(AxisType.Auto, AxisType.Auto), ROWS, inputs().x)
    norm = functools.partial(
        layer_norm_xla.norm,
        **layer_norm.NormOptions("", True, 0, 0, None, None).keywords(),
    )
    whole = lambda x: lax.map(lambda row: norm(row, None, None, None, None)[0], x)  # noqa: E731
    _, text = results_and_text(lambda x: whole(x.reshape(-1, 64)), arguments)
    assert count("all-gather", text) > 0


@on_eight_devices
@parametrize(
    ("axis_type", "set_mesh"), list(itertools.product(AXIS_TYPES, (False, True))), quick=(1, 2)
)
def test_jit(stand_ins, axis_type, set_mesh):
    mesh = make_mesh(axis_type, axis_type)
    arguments = place(mesh, specs(ROWS), inputs())
    if set_mesh:
        with jax.set_mesh(mesh):
            text = check(kernel, arguments)
    else:
        text = check(kernel, arguments)
    # The sums of dscale, dbias and dpre_bias are one all-reduce.
    assert count("all-reduce", text) == 1


@on_eight_devices
@parametrize(
    ("check_vma", "axis_type"), list(itertools.product((True, False), AXIS_TYPES)), quick=(1, 2)
)
def test_shard_map(stand_ins, check_vma, axis_type):
    mesh = make_mesh(axis_type, axis_type)
    check(manual(mesh, AXES, check_vma), place(mesh, specs(ROWS), inputs()))


@on_eight_devices
def test_gradient_of_a_shard_map(stand_ins):
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)

    def loss(x, scale):
        norm = functools.partial(jaxfused.layer_norm, implementation="pallas")
        shards = jax.shard_map(norm, mesh=mesh, in_specs=(ROWS, P()), out_specs=ROWS)
        return jnp.sum(jnp.sin(shards(x, scale)))

    def plain(x, scale):
        return jnp.sum(jnp.sin(jaxfused.layer_norm(x, scale, implementation="xla")))

    x, scale = inputs().x, inputs().scale
    actual = jax.jit(jax.grad(loss, (0, 1)))(x, scale)
    for a, b in zip(actual, jax.jit(jax.grad(plain, (0, 1)))(x, scale), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@on_eight_devices
def test_pmap(stand_ins):
    def shard(inputs):
        y, dx, dresidual, *parameters = kernel(inputs)
        return y, dx, dresidual, *(lax.psum(p, "i") for p in parameters)

    batch = Inputs(0, 0, 0, None, None, None)
    mapped = jax.pmap(shard, axis_name="i", in_axes=(batch,), out_axes=(0, 0, 0, None, None, None))
    split = inputs()
    split = Inputs(*(a.reshape(8, 4, 64) for a in split[:3]), *split[3:])
    for actual, wanted in zip(mapped(split), expected(), strict=True):
        np.testing.assert_allclose(actual.reshape(wanted.shape), wanted, rtol=2e-5, atol=2e-5)


@on_eight_devices
@parametrize(
    ("axis_type", "parameters"),
    list(itertools.product(AXIS_TYPES, (P("sequence"), SHARED))),
    quick=(0, 3),
)
def test_statistics_of_split_features_are_summed(stand_ins, axis_type, parameters):
    """The exchange has a few numbers per row and sums for parameters, but no activations."""
    mesh = make_mesh(axis_type, axis_type)
    placed = place(mesh, specs(P("data", None, "sequence"), parameters), inputs())
    # The type of a replicated parameter makes its gradient replicated too.
    gathers = axis_type == AxisType.Explicit and parameters == SHARED
    text = check(functools.partial(loss_and_gradients, None), placed, gathers=gathers)
    assert all(line.count("f32[64]") for line in text.splitlines() if " all-gather(" in line)
    rows, features = 4 // 2 * 8, 64 // (4 if parameters else 1)
    numbers_of_rows = 2 + 2  # The mean, then the variance; and two means of the backward.
    assert sum(reduced_bytes(text)) <= 4 * (numbers_of_rows * rows + 3 * features)


@on_eight_devices
@parametrize("axis_type", AXIS_TYPES, quick=(1,))
def test_split_features_are_gathered_for_a_kernel_that_is_named(stand_ins, axis_type):
    mesh = make_mesh(axis_type, axis_type)
    placed = place(mesh, specs(P("data", None, "sequence"), P("sequence")), inputs())
    check(kernel, placed, gathers=True)


@on_eight_devices
def test_operands_sharded_unlike_each_other(stand_ins):
    mesh = make_mesh(AxisType.Explicit, AxisType.Explicit)
    unlike = specs(ROWS)._replace(residual=P(None, "data"), scale=P("sequence"))
    placed = place(mesh, unlike, inputs())
    check(kernel, placed, gathers=True)
    # A gradient has the sharding of its array.
    _, dx, dresidual, dscale, _, _ = jax.eval_shape(kernel, placed)
    assert dx.sharding.spec == P("data", "sequence", None)
    assert dresidual.sharding.spec == P(None, "data", None)
    assert dscale.sharding.spec == P("sequence")


@on_eight_devices
@parametrize("check_vma", (True, False), quick=(0,))
def test_auto_axes_beside_manual_ones_are_gathered_and_no_others(stand_ins, check_vma):
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    f = manual(mesh, ("data",), check_vma)
    check(f, place(mesh, specs(P("data")), inputs()))
    check(f, place(mesh, specs(ROWS), inputs()), gathers=True)


@on_eight_devices
def test_auto_axes_beside_explicit_ones(stand_ins):
    mesh = make_mesh(AxisType.Explicit, AxisType.Auto)
    check(kernel, place(mesh, specs(P("data")), inputs()))


@on_eight_devices
def test_rows_that_do_not_divide(stand_ins):
    """XLA pads uneven shards, and sums over rows must not include the padding."""
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    shape = (5, 3, 64)

    def uneven(arguments):
        spread = NamedSharding(mesh, P("sequence"))
        return kernel(jax.tree.map(lambda a: lax.with_sharding_constraint(a, spread), arguments))

    arguments = jax.tree.map(jnp.asarray, inputs(shape))
    for actual, wanted in zip(jax.jit(uneven)(arguments), expected(shape), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)


@on_eight_devices
@parametrize("axis_type", AXIS_TYPES, quick=(0,))
def test_vmap_scan_and_checkpoint(stand_ins, axis_type):
    mesh = make_mesh(axis_type, axis_type)
    # With this width, the kernel supports the two rows that a device has of one batch entry.
    unplaced = inputs((4, 8, 256))
    placed = place(mesh, ROWS, unplaced.x)
    scale = place(mesh, P(), unplaced.scale)

    def loss(norm, x, scale):
        def layer(x, _):
            return jax.vmap(jax.checkpoint(lambda row: norm(row, scale)))(x) + x, None

        return jnp.sum(jnp.sin(lax.scan(layer, x, None, length=3)[0]))

    def gradients(implementation):
        norm = functools.partial(jaxfused.layer_norm, implementation=implementation)
        return jax.grad(functools.partial(loss, norm), (0, 1))

    actual, text = results_and_text(gradients("pallas"), placed, scale)
    assert count("all-gather", text) == 0
    wanted = jax.jit(gradients("xla"))(unplaced.x, unplaced.scale)
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# --- layer_norm with parameters of each image -----------------------------------------------------


@pytest.fixture
def adaptive_stand_ins(hopper, monkeypatch):
    """Replaces the kernels of a norm with parameters per image by loops over images."""
    gradients = layer_norm_xla.gradients

    def forward(x, scale, bias, residual, pre_bias, *, gate, segments, save_statistics, **options):
        assert save_statistics
        del options["multiprocessors"], options["config"]

        def norm(image):
            x, scale, bias, residual, pre_bias, gate = image
            return layer_norm_xla.norm_and_statistics(
                x, scale, bias, residual, pre_bias, gate=gate, **options
            )

        x, residual = (a.reshape(segments, -1, a.shape[-1]) for a in (x, residual))
        found = lax.map(norm, (x, scale, bias, residual, pre_bias, gate))
        return tuple(a.reshape(-1, *a.shape[2:]) for a in found)

    def backward(dy, dnext, h, mean, rstd, x, *vectors, segments, **options):
        del options["multiprocessors"], options["config"]

        def gradient(image):
            *rows, vectors = image
            vectors = (None if v is None else v[None] for v in vectors)
            found = gradients(*rows, *vectors, segments=1, **options)
            return *found[:2], *(None if v is None else v[0] for v in found[2:])

        rows = (a.reshape(segments, -1, *a.shape[1:]) for a in (dy, dnext, h, mean, rstd, x))
        dx, dresidual, *sums = lax.map(gradient, (*rows, vectors))
        return dx.reshape(h.shape), dresidual.reshape(h.shape), *sums

    monkeypatch.setattr(adaptive_norm.pallas_layer_norm, "forward", forward)
    monkeypatch.setattr(adaptive_norm.pallas_layer_norm_backward, "gradients", backward)


@on_eight_devices
@parametrize("axis_type", AXIS_TYPES, quick=(0,))
@parametrize("rows", (P("data"), P("data", "sequence")), quick=(1,))
def test_norm_with_parameters_of_each_image(adaptive_stand_ins, axis_type, rows):
    random = np.random.default_rng(0)
    x, residual, dy = random.standard_normal((3, 4, 16, 64)).astype(np.float32)
    images = random.standard_normal((3, 4, 64)).astype(np.float32)

    def gradients(implementation, x, residual, images, dy):
        def loss(x, residual, images):
            scale, shift, gate = images
            y, h = jaxfused.layer_norm(
                x,
                image_scale=scale,
                image_shift=shift,
                gate=gate,
                residual=residual,
                implementation=implementation,
            )
            return jnp.sum(y * dy + jnp.sin(h))

        return jax.grad(loss, (0, 1, 2))(x, residual, images)

    wanted = jax.jit(functools.partial(gradients, "xla"))(x, residual, images, dy)
    mesh = make_mesh(axis_type, axis_type)
    placed = place(mesh, (rows, rows, P(None, rows[0]), rows), (x, residual, images, dy))
    actual, text = results_and_text(functools.partial(gradients, "pallas"), *placed)
    assert count("all-gather", text) == 0
    # Images with split rows need one sum over their devices; whole images need none.
    assert count("all-reduce", text) == (1 if "sequence" in rows else 0)
    for a, w in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, w, rtol=2e-5, atol=2e-5)


# --- rope -----------------------------------------------------------------------------------------


def stand_in_rotate(q, k, cos, sin, *, inverse):
    def rotate(x):
        angles = (jnp.broadcast_to(t, (*x.shape[:2], t.shape[-1])) for t in (cos, sin))
        return lax.map(lambda row: rope_xla.rotate(*row, interleaved=False), (x, *angles))

    sin = -sin if inverse else sin
    return rotate(q), rotate(k)


@on_eight_devices
@parametrize(
    ("axis_type", "split", "angles"),
    list(itertools.product(AXIS_TYPES, ("length", "heads"), ("shared", "own"))),
    quick=(1, 6),
)
def test_rope(monkeypatch, hopper, axis_type, split, angles):
    spec = P("data", "sequence") if split == "length" else P("data", None, "sequence")
    offset = 0 if angles == "shared" else np.arange(4)
    monkeypatch.setattr(rope.pallas_rope, "rotate", stand_in_rotate)

    def rotated_and_gradients(implementation, q, k):
        def loss(q, k):
            q, k = jaxfused.rope(q, k, offset=offset, implementation=implementation)
            return jnp.sum(jnp.sin(q)) + jnp.sum(k**2), (q, k)

        return jax.grad(loss, (0, 1), has_aux=True)(q, k)

    q, k = jax.random.normal(jax.random.key(0), (2, 4, 16, 4, 64))
    ours = functools.partial(rotated_and_gradients, "pallas")
    placed = [place(make_mesh(axis_type, axis_type), spec, x) for x in (q, k)]
    actual, text = results_and_text(ours, *placed)
    assert count("all-gather", text) == 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        actual,
        jax.jit(functools.partial(rotated_and_gradients, "xla"))(q, k),
    )


# --- linear ---------------------------------------------------------------------------------------


def stand_in(product, *, multiprocessors, config):
    """Runs a `FusedProduct` row by row, in a loop that XLA's partitioner leaves as it is."""
    del multiprocessors, config
    vectors = {name: v for name, v in product.vectors.items() if v is not None}
    matrices = {name: m for name, m in product.matrices.items() if m is not None}
    bs = product.b if isinstance(product.b, tuple) else (product.b,)

    def of_row(operands):
        terms, matrices = operands
        sums = [
            sum(
                b @ term if product.b_transposed else term @ b
                for term, b in zip(terms, bs[i :: product.products], strict=True)
            )
            for i in range(product.products)
        ]
        results = product.epilogue(*sums, **vectors, **matrices)
        return {name: results[name].astype(dtype) for name, dtype in product.outputs.items()}

    found = lax.map(of_row, (product.terms, matrices))
    return found | {f"sum_{name}": found[name].sum(0) for name in product.column_sums}


@pytest.fixture
def products_by_row(hopper, monkeypatch):
    monkeypatch.setattr(FusedProduct, "run", stand_in)


@on_eight_devices
@parametrize(
    ("axis_type", "split"), list(itertools.product(AXIS_TYPES, ("rows", "columns"))), quick=(1, 2)
)
def test_linear(products_by_row, axis_type, split):
    def gradients(implementation, *arguments):
        def loss(x, w, bias):
            return jnp.sum(jnp.sin(jaxfused.linear(x, w, bias, implementation=implementation)))

        return jax.grad(loss, (0, 1, 2))(*arguments)

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 8, 32), (32, 64), (64,)
    arguments = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    mesh = make_mesh(axis_type, axis_type)
    of_columns = P("data"), P(None, "sequence"), P("sequence")
    specs = (ROWS, SHARED, SHARED) if split == "rows" else of_columns
    placed = [place(mesh, s, a) for s, a in zip(specs, arguments, strict=True)]
    ours = functools.partial(gradients, "pallas")
    actual, text = results_and_text(ours, *placed)
    assert count("all-gather", text) == 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        actual,
        jax.jit(functools.partial(gradients, "xla"))(*arguments),
    )


# --- tensor parallel: hidden features are split ---------------------------------------------------


WIDTH, HIDDEN = 64, 256
UP, DOWN = P(None, "sequence"), P("sequence")
PERCEPTRONS = {
    "mlp": dict(
        w1=((WIDTH, HIDDEN), UP),
        b1=((HIDDEN,), DOWN),
        w2=((HIDDEN, WIDTH), DOWN),
        b2=((WIDTH,), SHARED),
    ),
    "gated_mlp": dict(
        w_gate=((WIDTH, HIDDEN), UP),
        w_up=((WIDTH, HIDDEN), UP),
        w_down=((HIDDEN, WIDTH), DOWN),
        b_gate=((HIDDEN,), DOWN),
        b_down=((WIDTH,), SHARED),
    ),
}


def reduced_bytes(text: str) -> list[int]:
    """Returns the bytes of each all-reduce of a program, the largest first."""
    found = []
    for line in text.splitlines():
        if re.search(r"= \S+.* all-reduce(-start)?\(", line):
            result = line.split("=", 1)[1].split("all-reduce")[0]
            sizes = re.findall(r"f32\[([0-9,]*)\]", result)
            found.append(sum(4 * int(np.prod([int(n) for n in s.split(",") if n])) for s in sizes))
    return sorted(found, reverse=True)


@on_eight_devices
@parametrize(
    ("axis_type", "op"),
    [(axis_type, op) for axis_type in AXIS_TYPES for op in PERCEPTRONS],
    quick=(1, 2),
)
def test_perceptron_with_split_hidden_features(products_by_row, axis_type, op):
    """Each device multiplies its hidden features: one sum per direction, and no gathered weight."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    arguments = {
        name: 0.1 * jax.random.normal(next(keys), shape)
        for name, (shape, _) in PERCEPTRONS[op].items()
    }
    x, residual = (jax.random.normal(next(keys), (4, 8, WIDTH)) for _ in range(2))

    def apply(implementation, x, residual, arguments):
        f = functools.partial(getattr(jaxfused, op), residual=residual)
        return f(x, **arguments, implementation=implementation)

    def gradients(implementation, *args):
        loss = lambda *args: jnp.sum(jnp.sin(apply(implementation, *args)))  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(*args)

    mesh = make_mesh(axis_type, axis_type)
    specs = {name: spec for name, (_, spec) in PERCEPTRONS[op].items()}
    rows = P("data")
    placed = place(mesh, (rows, rows, specs), (x, residual, arguments))
    others = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    result = 4 // 2 * 8 * WIDTH * 4

    y, text = results_and_text(functools.partial(apply, "pallas"), *placed)
    assert not any(count(other, text) for other in others)
    assert reduced_bytes(text) == [result]
    np.testing.assert_allclose(y, apply("xla", x, residual, arguments), rtol=1e-4, atol=1e-4)

    actual, text = results_and_text(functools.partial(gradients, "pallas"), *placed)
    assert not any(count(other, text) for other in others)
    # Returns the result, the gradient of x, and each device's part of the parameters' gradients.
    parameters = sum(
        4 * int(np.prod(shape)) // (4 if "sequence" in str(spec) else 1)
        for shape, spec in PERCEPTRONS[op].values()
    )
    assert sum(reduced_bytes(text)) <= 2 * result + parameters
    wanted = jax.jit(functools.partial(gradients, "xla"))(x, residual, arguments)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), actual, wanted
    )


@on_eight_devices
@parametrize(
    ("dtype", "op"),
    [(dtype, op) for dtype in (np.float32, jnp.bfloat16) for op in PERCEPTRONS],
    quick=(2,),
)
def test_reference_of_split_hidden_features(op, dtype):
    """With Explicit axes, plain jax.numpy must state the sharding of the sum."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    arguments = {
        name: (0.1 * jax.random.normal(next(keys), shape)).astype(dtype)
        for name, (shape, _) in PERCEPTRONS[op].items()
    }
    x = jax.random.normal(next(keys), (4, 8, WIDTH), dtype)

    def gradients(x, arguments):
        f = getattr(jaxfused, op)
        loss = lambda x, arguments: jnp.sum(f(x, **arguments).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(x, arguments)

    specs = {name: spec for name, (_, spec) in PERCEPTRONS[op].items()}
    mesh = make_mesh(AxisType.Explicit, AxisType.Explicit)
    placed = place(mesh, (P("data"), specs), (x, arguments))
    actual, text = results_and_text(gradients, *placed)
    assert count("all-gather", text) == 0
    tolerance = 1e-4 if dtype == np.float32 else 0.05

    def near(a, b):
        a, b = (np.asarray(z, np.float32) for z in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())

    jax.tree.map(near, actual, jax.jit(gradients)(x, arguments))


@on_eight_devices
@parametrize("axis_type", AXIS_TYPES, quick=(1,))
@parametrize("activation", (None, "silu"), quick=(1,))
def test_linear_sums_over_split_features(products_by_row, axis_type, activation):
    """The projection after split heads adds bias, activation and residual once, after the sum."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((4, 8, HIDDEN), (HIDDEN, WIDTH), (WIDTH,), (4, 8, WIDTH))
    arguments = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]

    def apply(implementation, x, w, bias, residual):
        options = dict(activation=activation, residual=residual, implementation=implementation)
        return jaxfused.linear(x, w, bias, **options)

    def gradients(implementation, *args):
        loss = lambda *args: jnp.sum(jnp.sin(apply(implementation, *args)))  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2, 3))(*args)

    mesh = make_mesh(axis_type, axis_type)
    specs = (P("data", None, "sequence"), P("sequence"), SHARED, P("data"))
    placed = [place(mesh, s, a) for s, a in zip(specs, arguments, strict=True)]
    y, text = results_and_text(functools.partial(apply, "pallas"), *placed)
    assert (count("all-gather", text), count("all-reduce", text)) == (0, 1)
    np.testing.assert_allclose(y, apply("xla", *arguments), rtol=1e-4, atol=1e-4)
    actual, text = results_and_text(functools.partial(gradients, "pallas"), *placed)
    assert count("all-gather", text) == 0
    wanted = jax.jit(functools.partial(gradients, "xla"))(*arguments)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), actual, wanted
    )


# --- qkv_projection -------------------------------------------------------------------------------


def stand_in_projection(
    x, weights, biases, scales, cos, sin, *, head_size, epsilon, scale_offset, **options
):
    del options
    rows = jnp.arange(len(x)) % len(cos)

    def finish(y, scale, cos, sin):
        heads = y.reshape(1, -1, head_size)
        return qkv_projection_xla.finish(
            heads,
            scale,
            cos[None],
            sin[None],
            epsilon=epsilon,
            scale_offset=scale_offset,
            interleaved=False,
        ).ravel()

    def project(row):
        x, cos, sin = row
        q, k, v = (x @ w + b for w, b in zip(weights, biases, strict=True))
        return finish(q, scales[0], cos, sin), finish(k, scales[1], cos, sin), v, q, k

    return lax.map(project, (x, cos[rows], sin[rows]))


def stand_in_input_gradient(dys, weights, *, multiprocessors, config):
    del multiprocessors, config
    return (lax.map(lambda dys: sum(d @ w.T for d, w in zip(dys, weights, strict=True)), dys),)


def stand_in_weight_gradient(x, dys, *, out_dtype, sums_rows, multiprocessors, config):
    del multiprocessors, config
    wide = [dy.astype(jnp.float32) for dy in dys]
    dws = lax.map(lambda column: [column @ dy for dy in wide], x.T.astype(jnp.float32))
    sums = [dy.sum(0) for dy in wide] if sums_rows else None
    return [dw.astype(out_dtype) for dw in dws], sums


@on_eight_devices
@parametrize(
    ("split", "axis_type"),
    list(itertools.product(("length", "heads"), AXIS_TYPES)),
    # A test below covers projections to split heads.
    quick=(0,),
)
def test_qkv_projection(monkeypatch, hopper, split, axis_type):
    kernels = qkv_projection_stages.pallas_qkv_projection
    monkeypatch.setattr(kernels, "forward", stand_in_projection)
    monkeypatch.setattr(kernels, "input_gradient", stand_in_input_gradient)
    gradients_of_weights = weight_gradient_operator.pallas_weight_gradient
    monkeypatch.setattr(gradients_of_weights, "weight_gradient", stand_in_weight_gradient)
    cos, sin = jaxfused.rope_tables(jnp.arange(8), 32)

    def heads_and_gradients(implementation, *arguments):
        def loss(x, w, bias, q_scale, k_scale):
            heads = jaxfused.qkv_projection(
                x,
                w,
                bias,
                heads=8,
                key_heads=4,
                q_scale=q_scale,
                k_scale=k_scale,
                cos=cos,
                sin=sin,
                implementation=implementation,
            )
            return sum(jnp.sum(jnp.sin(y)) for y in heads), heads

        return jax.grad(loss, (0, 1, 2, 3, 4), has_aux=True)(*arguments)

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (4, 8, 32), (32, 512), (512,), (32,), (32,)
    arguments = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]
    of_x = P("data", "sequence") if split == "length" else P("data")
    of_w = P() if split == "length" else P(None, "sequence")
    mesh = make_mesh(axis_type, axis_type)
    placed = [
        place(mesh, s, a) for s, a in zip((of_x, of_w, P(), P(), P()), arguments, strict=True)
    ]
    ours = functools.partial(heads_and_gradients, "pallas")
    actual, text = results_and_text(ours, *placed)
    if split == "length":
        assert count("all-gather", text) == 0
    wanted = jax.jit(functools.partial(heads_and_gradients, "xla"))(*arguments)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        a, b = np.float32(a), np.float32(b)
        # The tolerance allows a few roundings to bfloat16.
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)


def collectives(text):
    """Returns sorted (kind, bytes of all results) of a compiled program's collective operations."""
    sizes = {"f32": 4, "bf16": 2}
    found = []
    for results, kind in re.findall(
        r"= (\(?[a-z]+\d+\[[^=]*?) (all-\w+|reduce-scatter)(?:-start)?\(", text
    ):
        arrays = re.findall(r"([a-z]+\d+)\[([\d,]*)\]", results)
        elements = [np.prod([int(n) for n in shape.split(",") if n]) for _, shape in arrays]
        found.append((kind, sum(sizes[d] * n for (d, _), n in zip(arrays, elements, strict=True))))
    return sorted(found)


@on_eight_devices
@pytest.mark.parametrize(
    ("x_spec", "dy_spec", "shard"),
    (
        (P(AXES), P(AXES), (3, 32, 64)),
        (P("data", "sequence"), P("data", "sequence"), (12, 32, 64)),
        (P("data"), P("data", None, "sequence"), (12, 32, 16)),
    ),
    ids=("data parallel", "rows of both axes", "columns too"),
)
def test_gradients_of_weights_run_on_shards(monkeypatch, hopper, x_spec, dy_spec, shard):
    """The collectives are at most those of stock's product, and nothing is gathered."""
    seen = []

    def kernel(x, dys, **options):
        seen.append((*x.shape, *(dy.shape[1] for dy in dys)))
        return stand_in_weight_gradient(x, dys, **options)

    monkeypatch.setattr(weight_gradient_operator.pallas_weight_gradient, "weight_gradient", kernel)
    rng = np.random.default_rng(0)
    x, dy = (
        put(rng.integers(-3, 4, size=(8, 3 if "sequence" not in x_spec else 12, n)))
        for n in (32, 64)
    )
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    run = runner.Runner(None, hopper)
    # So small a product is faster in XLA than in a kernel, so the choice is overridden.
    monkeypatch.setattr(product_regimes, "of_weights", lambda *args, **options: None)

    def ours(x, dy):
        (dw,), sums = weight_gradient_operator.weight_gradients(
            run, "linear", x, (dy,), jnp.float32, None, sums_rows=True
        )
        return dw, sums[0]

    def stock(x, dy):
        dw = jnp.einsum("btd,btf->df", x, dy, preferred_element_type=jnp.float32)
        return dw, dy.astype(jnp.float32).sum((0, 1))

    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    placed = [place(mesh, spec, a) for spec, a in ((x_spec, x), (dy_spec, dy))]
    actual, text = results_and_text(ours, *placed)
    wanted, stock_text = results_and_text(stock, *placed)
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert seen[-1] == shard
    # The product and the sums may be reduced together or apart; stock reduces along one axis at a time.
    moved, by_stock = (sum(size for _, size in collectives(t)) for t in (text, stock_text))
    assert moved <= by_stock, (collectives(text), collectives(stock_text))
    assert {kind for kind, _ in collectives(text)} == {"all-reduce"}


@on_eight_devices
def test_gradients_of_weights_beside_manual_axes_are_left_to_the_partitioner(monkeypatch, hopper):
    monkeypatch.setattr(product_regimes, "of_weights", lambda *args, **options: None)
    x, dy = (jnp.ones((16, 8, n), jnp.bfloat16) for n in (32, 64))
    run = runner.Runner(None, hopper)

    def gradient(x, dy):
        (dw,), _ = weight_gradient_operator.weight_gradients(
            run, "linear", x, (dy,), jnp.float32, None
        )
        return lax.psum(dw, "data")

    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    rows = P("data")
    partly_manual = jax.shard_map(
        gradient, mesh=mesh, in_specs=(rows, rows), out_specs=P(), axis_names={"data"}
    )
    placed = [place(mesh, P("data", "sequence"), a) for a in (x, dy)]
    actual, text = results_and_text(partly_manual, *placed)
    assert count("all-gather", text) == 0
    np.testing.assert_array_equal(actual, np.full((32, 64), 128.0))


# --- per_shard ------------------------------------------------------------------------------------


@on_eight_devices
@parametrize("axis_type", AXIS_TYPES, quick=(1,))
def test_projections_of_split_heads(monkeypatch, hopper, axis_type):
    """Kernels [D, N, H] of attention modules: each device projects to its own heads."""

    def forward(x, weights, biases, scales, cos, sin, **options):
        del scales, cos, sin, options
        project = lambda x: tuple(x @ w + b for w, b in zip(weights, biases, strict=True))  # noqa: E731
        return *lax.map(project, x), None, None

    kernels = qkv_projection_stages.pallas_qkv_projection
    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "input_gradient", stand_in_input_gradient)
    gradients_of_weights = weight_gradient_operator.pallas_weight_gradient
    monkeypatch.setattr(gradients_of_weights, "weight_gradient", stand_in_weight_gradient)
    keys = jax.random.split(jax.random.key(0), 7)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    x = normal(keys[0], (4, 8, 64))
    heads = (8, 4, 4)
    weights = [0.02 * normal(k, (64, n, 32)) for k, n in zip(keys[1:], heads, strict=False)]
    biases = [0.1 * normal(k, (n, 32)) for k, n in zip(keys[4:], heads, strict=True)]

    def gradients(implementation, x, weights, biases):
        def loss(x, weights, biases):
            projected = qkv_projection.separate_projections(
                x, weights, biases, precision=None, implementation=implementation
            )
            return sum(jnp.sum(jnp.sin(heads.astype(jnp.float32))) for heads in projected)

        return jax.value_and_grad(loss, (0, 1, 2))(x, weights, biases)

    mesh = make_mesh(axis_type, axis_type)
    split = (P("data"), [P(None, "sequence")] * 3, [P("sequence")] * 3)
    placed = place(mesh, split, (x, weights, biases))
    actual, text = results_and_text(functools.partial(gradients, "pallas"), *placed)
    assert count("all-gather", text) == 0
    wanted = jax.jit(functools.partial(gradients, "xla"))(x, weights, biases)

    def near(a, b):
        """Asserts closeness up to roundings to bfloat16 in another order."""
        a, b = (np.asarray(z, np.float32) for z in (a, b))
        np.testing.assert_allclose(a, b, atol=2**-6 * np.abs(b).max())

    jax.tree.map(near, actual, wanted)


def opaque_product(x, w):
    return lax.map(lambda row: row @ w, x), None


@on_eight_devices
@parametrize(
    ("axis_type", "split"),
    list(itertools.product(AXIS_TYPES, ("columns", "contraction"))),
    quick=(0, 3),
)
def test_a_product_with_split_weights(axis_type, split):
    x_spec, w_spec, sums = dict(
        columns=(P("data"), P(None, "sequence"), 0),
        contraction=(P("data", "sequence"), P("sequence"), 1),
    )[split]
    mesh = make_mesh(axis_type, axis_type)
    x, w = inputs().x[0], inputs().x[1].T
    x_placed, w_placed = place(mesh, x_spec, x), place(mesh, w_spec, w)

    def product(x, w):
        return sharding.per_shard(
            opaque_product, (x, w), operand_axes=("mk", "kn"), result_axes=("mn", None)
        )[0]

    actual, text = results_and_text(product, x_placed, w_placed)
    assert (count("all-gather", text), count("all-reduce", text)) == (0, sums)
    for result in (actual, product(x_placed, w_placed)):
        np.testing.assert_allclose(result, x @ w, rtol=1e-5, atol=1e-5)


def test_equal_functions_compile_once(monkeypatch):
    traces = []

    def double(x):
        traces.append(x.shape)
        return (x * 2,)

    # Several devices, where a call outside of jit is compiled by itself.
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    for _ in range(3):
        sharding.per_shard(double, (jnp.ones(3),), operand_axes=("m",), result_axes=("m",))
    compiled = len(traces)
    sharding.per_shard(double, (jnp.ones(3),), operand_axes=("m",), result_axes=("m",))
    assert len(traces) == compiled


# --- losses ---------------------------------------------------------------------------------------


def row_by_row(stand_in):
    """Returns the stand-in in a form that XLA cannot partition."""

    def kernel(*operands, **options):
        present = [operand for operand in operands if operand is not None]

        def of_row(row):
            remaining = iter(row)
            given = (None if o is None else next(remaining)[None] for o in operands)
            return jax.tree.map(lambda a: a[0], stand_in(*given, **options))

        return lax.map(of_row, present)

    return kernel


@pytest.fixture
def loss_stand_ins(hopper, monkeypatch):
    monkeypatch.setattr(jaxfused.runtime.cuda_library, "why_unavailable", lambda: None)
    cross_entropy_stand_ins.take_kernels_for_all_sizes(monkeypatch)
    for name in ("forward", "backward", "scale_rows"):
        stand_in = getattr(cross_entropy_stand_ins, f"stand_in_{name}")
        monkeypatch.setattr(jaxfused.ops.loss.cross_entropy_cuda, name, row_by_row(stand_in))


CLASSES = 40


def losses_and_gradients(implementation, cotangent, logits, labels, weights, **more):
    def loss(logits, weights):
        return jaxfused.softmax_cross_entropy(
            logits,
            labels,
            weights=weights,
            label_smoothing=0.1,
            z_loss=1e-2,
            ignore_index=-1,
            logits_soft_cap=8.0,
            cotangent=cotangent,
            implementation=implementation,
            **more,
        )

    value, gradients = jax.value_and_grad(loss, (0, 1))(logits, weights)
    return value, *gradients


def loss_inputs():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3.0, size=(4, 8, CLASSES)).astype(np.float32)
    labels = rng.integers(-1, CLASSES, (4, 8)).astype(np.int32)
    return logits, labels, rng.random((4, 8)).astype(np.float32)


def linear_loss_inputs():
    rng = np.random.default_rng(1)
    x, w, bias = (
        rng.normal(size=shape).astype(np.float32) for shape in ((4, 8, 6), (6, CLASSES), (CLASSES,))
    )
    return x, w, bias, loss_inputs()[1]


def assert_near(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), actual, expected
    )


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("cotangent", (None, "any"))
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_cross_entropy_of_sharded_tokens(loss_stand_ins, axis_type, cotangent):
    mesh = make_mesh(axis_type, axis_type)
    arguments = [place(mesh, ROWS, a) for a in loss_inputs()]
    ours = functools.partial(losses_and_gradients, "cuda", cotangent)
    actual, text = results_and_text(ours, *arguments)
    assert count("all-gather", text) == 0
    expected = jax.jit(functools.partial(losses_and_gradients, "xla", cotangent))
    assert_near(actual, expected(*loss_inputs()))


@on_eight_devices
@parametrize("axis_type", AXIS_TYPES, quick=(0,))
def test_class_weights_of_sharded_tokens(loss_stand_ins, axis_type):
    def gradients(implementation, logits, labels, weights, class_weights):
        def loss(logits, class_weights):
            options = dict(weights=weights, class_weights=class_weights, ignore_index=-1)
            options["implementation"] = implementation
            smoothed = jaxfused.softmax_cross_entropy(
                logits, labels, label_smoothing=0.1, **options
            )
            return smoothed + jaxfused.softmax_cross_entropy(logits, labels, **options)

        return jax.value_and_grad(loss, (0, 1))(logits, class_weights)

    class_weights = np.linspace(0.5, 3.0, CLASSES, dtype=np.float32)
    mesh = make_mesh(axis_type, axis_type)
    arguments = [place(mesh, ROWS, a) for a in loss_inputs()]
    actual, text = results_and_text(
        functools.partial(gradients, "cuda"), *arguments, place(mesh, SHARED, class_weights)
    )
    assert count("all-gather", text) == 0
    expected = jax.jit(functools.partial(gradients, "xla"))
    assert_near(actual, expected(*loss_inputs(), class_weights))


@on_eight_devices
@parametrize(
    ("check_vma", "implementation"),
    list(itertools.product((True, False), ("cuda", "xla"))),
    quick=(0, 3),
)
def test_cross_entropy_of_classes_spread_over_devices(loss_stand_ins, check_vma, implementation):
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    split = P("data", None, "sequence")
    shards = jax.shard_map(
        functools.partial(
            jaxfused.softmax_cross_entropy,
            label_smoothing=0.1,
            z_loss=1e-2,
            ignore_index=-1,
            logits_soft_cap=8.0,
            reduction="none",
            axis_name="sequence",
            implementation=implementation,
        ),
        mesh=mesh,
        in_specs=(split, P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    def loss(logits, labels):
        losses = shards(logits, labels)
        return jnp.mean(jnp.sin(losses)), losses

    logits, labels, _ = loss_inputs()
    labels[1, 1] = CLASSES
    actual, text = results_and_text(jax.grad(loss, has_aux=True), logits, labels)
    assert count("all-gather", text) == 0

    def plain(logits):
        losses = jaxfused.softmax_cross_entropy(
            logits,
            labels,
            label_smoothing=0.1,
            z_loss=1e-2,
            ignore_index=-1,
            logits_soft_cap=8.0,
            reduction="none",
            implementation="xla",
        )
        return jnp.mean(jnp.sin(losses)), losses

    assert_near(actual, jax.jit(jax.grad(plain, has_aux=True))(logits))


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("implementation", ("cuda", "xla"))
def test_a_device_whose_classes_are_all_masked(loss_stand_ins, implementation):
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    logits, labels, _ = loss_inputs()
    logits[:, :, : CLASSES // 4] = -np.inf
    labels[:] = CLASSES - 1

    def loss(logits, **options):
        return jaxfused.softmax_cross_entropy(logits, labels, **options)

    shards = jax.shard_map(
        functools.partial(loss, axis_name="sequence", implementation=implementation),
        mesh=mesh,
        in_specs=P(None, None, "sequence"),
        out_specs=P(),
    )
    actual = jax.jit(jax.value_and_grad(shards))(logits)
    assert_near(actual, jax.jit(jax.value_and_grad(loss))(logits))
    assert np.isfinite(actual[1]).all()


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("implementation", ("cuda", "xla"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_linear_cross_entropy_of_classes_spread_over_devices(
    loss_stand_ins, implementation, reduction, weighted, smoothing
):
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    x, w, bias, labels = linear_loss_inputs()
    # Larger losses, and their sines, would cancel in sums more than rounding to float32 allows.
    class_weights = np.linspace(0.1, 0.6, CLASSES, dtype=np.float32) if weighted else None
    options = dict(label_smoothing=smoothing, ignore_index=-1, reduction=reduction)
    by_tokens = P("data") if reduction == "none" else P()

    def loss(x, w, bias, labels, class_weights, **more):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, labels, bias, class_weights=class_weights, **options, **more
        )

    shards = jax.shard_map(
        functools.partial(loss, axis_name="sequence", chunk_size=3, implementation=implementation),
        mesh=mesh,
        in_specs=(
            *(by_tokens, P(None, "sequence"), P("sequence"), by_tokens),
            P("sequence") if weighted else None,
        ),
        out_specs=by_tokens,
    )

    def gradients(f):
        def total(x, w, bias):
            losses = f(x, w, bias, labels, class_weights)
            return jnp.sum(jnp.sin(losses)), losses

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)

    actual, text = results_and_text(gradients(shards), x, w, bias)
    assert count("all-gather", text) == 0
    plain = functools.partial(loss, implementation="xla")
    assert_near(actual, jax.jit(gradients(plain))(x, w, bias))


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("cotangent", (None, "any"))
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_linear_cross_entropy_of_sharded_tokens(loss_stand_ins, axis_type, cotangent):
    def gradients(implementation, x, w, bias, labels):
        def loss(x, w, bias):
            return jaxfused.linear_softmax_cross_entropy(
                x,
                w,
                labels,
                bias,
                ignore_index=-1,
                chunk_size=3,
                cotangent=cotangent,
                implementation=implementation,
            )

        return jax.value_and_grad(loss, (0, 1, 2))(x, w, bias)

    x, w, bias, labels = linear_loss_inputs()
    mesh = make_mesh(axis_type, axis_type)
    placed = [
        place(mesh, s, a)
        for s, a in zip((ROWS, SHARED, SHARED, ROWS), (x, w, bias, labels), strict=True)
    ]
    actual, text = results_and_text(functools.partial(gradients, "cuda"), *placed)
    assert count("all-gather", text) == 0
    assert_near(actual, jax.jit(functools.partial(gradients, "xla"))(x, w, bias, labels))


def lowered_losses(cotangent):
    """Returns f(logits, labels, x, w, images, masks) to three losses and their gradients."""

    def losses(logits, labels, x, w, images, masks):
        def of_logits(logits):
            return jaxfused.softmax_cross_entropy(
                logits, labels, cotangent=cotangent, implementation="cuda"
            )

        def of_layer(x, w):
            return jaxfused.linear_softmax_cross_entropy(
                x, w, labels, cotangent=cotangent, implementation="cuda"
            )

        def of_images(images):
            return jaxfused.segmentation_loss(images, masks, implementation="cuda")

        values = [
            jax.value_and_grad(of_logits)(logits),
            jax.value_and_grad(of_layer, (0, 1))(x, w),
            jax.value_and_grad(of_images)(images),
        ]
        return [value for value, _ in values], [gradient for _, gradient in values]

    return losses


@pytest.mark.parametrize("cotangent", (None, "any"))
@pytest.mark.parametrize("manual", (False, True), ids=("explicit", "shard_map"))
def test_kernels_of_losses_lower_for_many_gpus_without_one(hopper, cotangent, manual):
    if missing := jaxfused.runtime.cuda_library.why_unavailable():
        pytest.skip(missing)
    mesh = AbstractMesh((2, 4), AXES, axis_types=(AxisType.Explicit,) * 2)

    def array(spec, dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    of_images = P(AXES)
    arguments = (
        array(ROWS, "bfloat16", 8, 16, 1000),
        array(ROWS, "int32", 8, 16),
        array(ROWS, "bfloat16", 8, 16, 64),
        array(SHARED, "bfloat16", 64, 1000),
        array(of_images, "bfloat16", 8, 16, 16),
        array(of_images, "uint8", 8, 16, 16),
    )
    f = whole = lowered_losses(cotangent)
    if manual:

        def shard(*arguments):
            losses, gradients = whole(*arguments)
            return lax.pmean(losses, AXES), gradients

        f = jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=(ROWS, ROWS, ROWS, SHARED, of_images, of_images),
            out_specs=(SHARED, [ROWS, (ROWS, SHARED), of_images]),
        )
    program = jax.export.export(
        jax.jit(f),
        platforms=["cuda"],
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(name)
            for name in jaxfused.runtime.cuda_library.TARGETS
        ],
    )(*arguments).mlir_module()
    names = ["cross_entropy_forward", "segmentation_loss"]
    names.append("scale_rows" if cotangent is None else "cross_entropy_backward")
    for name in names:
        assert f"@jaxfused_{name}(" in program
    # Each device has 16 rows and one image.
    assert "tensor<16x1000xbf16>" in program
    assert "tensor<1x256x1xbf16>" in program


@parametrize(
    ("implementation", "manual"),
    list(itertools.product(("pallas", "cuda"), (False, True))),
    quick=(1, 2),
)
def test_kernels_lower_for_many_gpus_without_one(hopper, implementation, manual):
    """The real kernels are lowered for the shards of eight GPUs that need not be present."""
    missing = jaxfused.runtime.cuda_library.why_unavailable() if implementation == "cuda" else None
    if missing is not None:
        pytest.skip(missing)
    mesh = AbstractMesh((2, 4), AXES, axis_types=(AxisType.Explicit,) * 2)

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    rows, parameter = array(ROWS, 64, 128, 768), array(SHARED, 768)
    arguments = Inputs(rows, rows, rows, parameter, parameter, parameter)
    f = functools.partial(loss_and_gradients, implementation)
    if manual:
        f = jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(specs(ROWS),),
            out_specs=(ROWS, ROWS, ROWS, SHARED, SHARED, SHARED),
        )
    target = dict(pallas="mosaic_gpu_v2", cuda="jaxfused_layer_norm_")[implementation]
    exported = jax.export.export(
        jax.jit(f),
        platforms=["cuda"],
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(name)
            for name in ("mosaic_gpu_v2", *jaxfused.runtime.cuda_library.TARGETS)
        ],
    )(arguments)
    assert exported.nr_devices == DEVICES
    # Each device has 32 x 32 rows.
    assert target in exported.mlir_module()
    assert "tensor<1024x768xbf16>" in exported.mlir_module()


# --- group_norm -----------------------------------------------------------------------------------


@pytest.fixture
def group_norm_stand_ins(hopper, monkeypatch):
    """Replaces the kernels by loops over images, which XLA cannot partition."""

    def forward(
        x, residual, scale, bias, *, groups, save_statistics, epsilon, activation, **options
    ):
        del residual, save_statistics, options
        y, mean, rstd, variance = lax.map(
            lambda image: group_norm_xla.norm_and_statistics(
                image[None],
                None,
                scale[0],
                bias[0],
                num_groups=groups,
                epsilon=epsilon,
                activation=activation,
            ),
            x,
        )
        return y[:, 0], mean[:, 0], rstd[:, 0], variance[:, 0]

    def backward(dy, x, residual, mean, rstd, scale, bias, *_, groups, activation, **options):
        del residual, options

        def gradient(image):
            dy, x, mean, rstd = (a[None] for a in image)
            dx, _, dscale, dbias = group_norm_xla.gradient(
                dy, x, None, mean, rstd, scale[0], bias[0], num_groups=groups, activation=activation
            )
            return dx[0], dscale[0], dbias[0]

        dx, dscale, dbias = lax.map(gradient, (dy, x, mean, rstd))
        return dx, None, dscale, dbias

    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("90",))
    for module in (group_norm_cuda, group_norm_slab_cuda):
        monkeypatch.setattr(module, "forward", forward)
    monkeypatch.setattr(group_norm_cuda, "backward", backward)


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize(
    ("images", "parameters", "gathers"),
    [
        (P(AXES), P(), False),
        (P("data", None, "sequence"), P("sequence"), False),
        (P("data", "sequence"), P(), True),
    ],
    ids=("batch", "channels", "pixels"),
)
def test_group_norm(group_norm_stand_ins, axis_type, images, parameters, gathers):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 8, 12, 64)).astype(np.float32)
    scale, bias = rng.normal(size=(2, 64)).astype(np.float32)

    def results(implementation, x, dy, scale, bias):
        def f(x, scale, bias):
            return jaxfused.group_norm(
                x, scale, bias, num_groups=8, activation="silu", implementation=implementation
            )

        y, vjp = jax.vjp(f, x, scale, bias)
        return y, vjp(dy)

    # With Explicit axes, y has the kernel's sharding: its pixels are not split.
    cotangent = P("data") if gathers else images
    check_alike(
        results,
        axis_type,
        (images, cotangent, parameters, parameters),
        (x, dy, scale, bias),
        chosen="cuda",
        gathers=gathers,
        tolerance=2e-5,
    )


# --- depthwise convolution and pooling --------------------------------------------------------------


@pytest.fixture
def image_stand_ins(hopper, monkeypatch):
    """Replaces the kernels by loops over images, which XLA cannot partition."""

    def convolve(window, x, w):
        return lax.conv_general_dilated(
            x,
            w[:, :, None],
            (window.stride,) * 2,
            window.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=x.shape[-1],
        )

    def conv(x, w, bias, residual, *, window, activation, save_preactivation, config, turned=False):
        w = w[::-1, ::-1] if turned else w
        z = lax.map(lambda image: convolve(window, image[None], w)[0], x)
        z = z if bias is None else z + bias
        z = z if residual is None else z + residual
        y = z if activation is None else jnp.maximum(z, 0)
        return y, z if save_preactivation else None

    def weight_gradient(x, dy, *, window, multiprocessors, config):
        del multiprocessors, config
        w = jnp.zeros_like(x, shape=(*window.kernel, x.shape[-1]))

        def gradient(image):
            x, dy = (a[None] for a in image)
            return jax.vjp(lambda w: convolve(window, x, w), w)[1](dy)[0]

        return lax.map(gradient, (x, dy)).sum(0), lax.map(lambda a: a.sum((0, 1)), dy).sum(0)

    def pool(window):
        return dict(window=window.size, strides=window.strides, padding=window.padding)

    def max_pool(x, *, window, save_places):
        y, places = lax.map(
            lambda image: max_pool_xla.pool_and_places(image[None], **pool(window)), x
        )
        return y[:, 0], places[:, 0] if save_places else None

    def max_pool_gradient(dy, places, *, size, window):
        return lax.map(
            lambda a: max_pool_xla.gradient(a[0][None], a[1][None], size=size, **pool(window))[0],
            (dy, places),
        )

    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("90",))
    monkeypatch.setattr(depthwise_conv_cuda, "conv", conv)
    monkeypatch.setattr(depthwise_conv_cuda, "weight_gradient", weight_gradient)
    monkeypatch.setattr(max_pool_cuda, "forward", max_pool)
    monkeypatch.setattr(max_pool_cuda, "backward", max_pool_gradient)


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize("kernels", (True, False), ids=("kernels", "stages"))
@pytest.mark.parametrize(
    ("images", "weights"),
    [(P(AXES), P()), (P("data", None, None, "sequence"), P(None, None, None, "sequence"))],
    ids=("batch", "channels"),
)
def test_depthwise_and_pooling(image_stand_ins, monkeypatch, axis_type, images, weights, kernels):
    """If there are no kernels, the reference computes the same stages."""
    if not kernels:
        for module in (depthwise_conv_cuda, max_pool_cuda, upsample_cuda):
            monkeypatch.setattr(module, "why_unsupported", lambda **_: "it is not there")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 6, 6, 16)).astype(np.float32)
    w = rng.normal(size=(3, 3, 1, 16)).astype(np.float32)
    size = 3 if kernels else 6
    dy = rng.normal(size=(8, size, size, 16)).astype(np.float32)

    def results(implementation, x, w, dy):
        def f(x, w):
            y, x, _ = conv_operator.run(
                x,
                w,
                window=dict(feature_group_count=16),
                activation="relu",
                return_input=True,
                implementation=implementation,
            )
            y = jaxfused.max_pool(y, 2, strides=2, implementation=implementation)
            # There is no stand-in for upsample, because XLA can split it.
            return y if kernels else jaxfused.upsample(y, implementation=implementation), x

        y, vjp = jax.vjp(f, x, w)
        return y, vjp((dy, jnp.cos(x)))

    chosen = "cuda" if kernels else None
    specs = (images, weights, images)
    check_alike(results, axis_type, specs, (x, w, dy), chosen=chosen, tolerance=2e-5)


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_means_and_cells_of_images(axis_type):
    """Operators that XLA runs do not gather the batch."""
    x = np.random.default_rng(0).normal(size=(8, 7, 6, 5)).astype(np.float32)

    def results(x):
        def f(x):
            padded = dict(strides=2, padding=1, count_include_pad=False)
            return (
                jaxfused.avg_pool(x, 2, strides=2),
                jaxfused.avg_pool(x, 3, **padded),
                jaxfused.avg_pool(x, 3, weights=np.arange(1.0, 10.0).reshape(3, 3), **padded),
                jaxfused.max_pool(x, 2, strides=2, ceil_mode=True),
                jaxfused.global_avg_pool(x),
                jaxfused.spatial_pyramid_pool(x, (1, 2), "max"),
                jaxfused.spatial_pyramid_pool(x, (1, 2), "avg"),
            )

        y, vjp = jax.vjp(f, x)
        return y, vjp(jax.tree.map(jnp.cos, y))

    mesh = make_mesh(axis_type, axis_type)
    actual, text = results_and_text(results, place(mesh, P(AXES), x))
    assert count("all-gather", text) == count("all-reduce", text) == 0
    chex.assert_trees_all_close(
        jax.device_get(actual), jax.device_get(jax.jit(results)(x)), rtol=2e-5, atol=2e-5
    )


# --- dense convolution ----------------------------------------------------------------------------


@pytest.fixture
def dense_stand_ins(hopper, monkeypatch):
    """Replaces the kernels by loops over images, which XLA cannot partition, for any dtype."""

    def convolve(x, w, window):
        return lax.conv_general_dilated(
            x, w, window.strides, window.padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def forward(x, w, bias, residual, *, window, activation, save_preactivation, block=(1, 1), **_):
        del residual
        x = jnp.concatenate(x, axis=-1) if isinstance(x, tuple) else x
        z = lax.map(lambda image: convolve(image[None], w, window)[0], x) + bias
        z = patch_expand.moved(z, block)
        return jnp.maximum(z, 0), z if save_preactivation else None

    def input_gradient(dy, w, *, window, other=None, rectified=None, **_):
        turned = jnp.flip(w, (0, 1)).swapaxes(2, 3)
        dx = lax.map(lambda dy: convolve(dy[None], turned, window.transposed())[0], dy)
        return dx if other is None else jnp.where(rectified > 0, dx + other, 0)

    def weight_gradient(x, dz, *, window, **_):
        w = jnp.zeros_like(x, shape=(*window.kernel, x.shape[-1], dz.shape[-1]))

        def gradient(image):
            x, dz = (a[None] for a in image)
            return jax.vjp(lambda w: convolve(x, w, window), w)[1](dz)[0]

        return lax.map(gradient, (x, dz)).sum(0)

    monkeypatch.setattr(pallas_conv, "why_unsupported", lambda **_: None)
    monkeypatch.setattr(pallas_conv, "forward", forward)
    monkeypatch.setattr(pallas_conv, "input_gradient", input_gradient)
    monkeypatch.setattr(pallas_weight_gradient, "weight_gradient", weight_gradient)


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize(
    ("images", "weights", "result"),
    [
        (P(AXES), P(), P(AXES)),
        (P("data"), P(None, None, None, "sequence"), P("data", None, None, "sequence")),
    ],
    ids=("batch", "features"),
)
def test_dense_convolution(dense_stand_ins, axis_type, images, weights, result):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 6, 6, 16)).astype(np.float32)
    w = rng.normal(size=(3, 3, 16, 32)).astype(np.float32)
    bias = rng.normal(size=32).astype(np.float32)
    dy = rng.normal(size=(8, 6, 6, 32)).astype(np.float32)

    def results(implementation, x, w, bias, dy):
        def f(x, w, bias):
            return conv_operator.run(
                Rectified(x),
                w,
                bias,
                window={},
                activation="relu",
                return_input=True,
                implementation=implementation,
            )[:2]

        y, vjp = jax.vjp(f, x, w, bias)
        return y, vjp((dy, jnp.cos(x)))

    specs = (images, weights, P(*weights[-1:]), result)
    # The gradient to x sums over all features.
    check_alike(results, axis_type, specs, (x, w, bias, dy), gathers=weights != P())


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_dense_convolution_of_two_arrays(dense_stand_ins, axis_type):
    rng = np.random.default_rng(0)
    shapes = (8, 6, 6, 32), (8, 6, 6, 16), (3, 3, 48, 16), (16,), (8, 6, 6, 16)
    arrays = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)

    def results(implementation, first, second, w, bias, dy):
        def f(first, second, w, bias):
            x = jaxfused.Concatenated(first, second)
            return jaxfused.conv(x, w, bias, activation="relu", implementation=implementation)

        y, vjp = jax.vjp(f, first, second, w, bias)
        return y, vjp(dy)

    check_alike(results, axis_type, (P(AXES), P(AXES), P(), P(), P(AXES)), arrays)


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_transposed_convolution(dense_stand_ins, axis_type):
    rng = np.random.default_rng(0)
    shapes = (8, 3, 4, 16), (2, 2, 16, 32), (32,), (8, 6, 8, 32)
    arrays = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)

    def results(implementation, x, w, bias, dy):
        def f(x, w, bias):
            return jaxfused.conv_transpose(
                x, w, bias, strides=2, activation="relu", implementation=implementation
            )

        y, vjp = jax.vjp(f, x, w, bias)
        return y, vjp(dy)

    check_alike(results, axis_type, (P(AXES), P(), P(), P(AXES)), arrays)


@pytest.mark.exhaustive
@on_eight_devices
@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize("pool", ("token", "mean"))
def test_the_example_trains_on_a_mesh(axis_type, pool):
    from flax import nnx

    from examples.vit.model import MODELS, VisionTransformer

    model = VisionTransformer(
        MODELS["vit-digits"], image_size=8, channels=1, classes=10, pool=pool, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(model)
    images = jax.random.normal(jax.random.key(0), (8, 8, 8, 1))

    def gradients(state, images):
        loss = lambda state: jnp.sum(jnp.cos(1 + nnx.merge(graph, state)(images)))  # noqa: E731
        return jax.value_and_grad(loss)(state)

    wanted = jax.jit(gradients)(state, images)
    mesh = make_mesh(axis_type, axis_type)
    with jax.set_mesh(mesh):
        placed = jax.device_put(state, NamedSharding(mesh, P()))
        actual = jax.jit(gradients)(placed, jax.device_put(images, NamedSharding(mesh, P("data"))))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, wanted
    )


# --- float8 ---------------------------------------------------------------------------------------


def fp8_operands():
    # Shards differ in their largest magnitudes, so that scales per shard would change results.
    random = np.random.default_rng(1)
    x = random.standard_normal((4, 8, 32)).astype(np.float32)
    x *= np.linspace(0.1, 30.0, 4, dtype=np.float32)[:, None, None]
    shapes = ((32, 64), (64,), (64, 32), (32,))
    return x, *(0.2 * random.standard_normal(shape).astype(np.float32) for shape in shapes)


def fp8_gradients(x, w1, b1, w2, b2):
    """Returns (y, gradients) of an mlp, followed by a projection and a linear layer."""

    def loss(x, w1, b1, w2, b2):
        y = jaxfused.mlp(x, w1, b1, w2, b2, residual=x, precision="fp8", save="hidden")
        # The mesh axes divide the heads. For fewer heads, XLA splits a mesh axis, which the specs of
        # JAX's custom partitioning cannot express.
        q, k, v = jaxfused.qkv_projection(y, w1, b1, heads=8, key_heads=4, precision="fp8")
        heads = jnp.concatenate([q, k, v], axis=-2).reshape(*y.shape[:-1], -1)
        y = jaxfused.linear(heads, w2, b2, activation="silu", precision="fp8")
        return jnp.sum(jnp.sin(y)), y

    gradients, y = jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(x, w1, b1, w2, b2)
    return y, *gradients


@functools.cache
def fp8_on_one_device():
    return jax.jit(fp8_gradients)(*fp8_operands())


def assert_same_fp8(actual):
    for a, b in zip(actual, fp8_on_one_device(), strict=True):
        # The order of a sum may choose between neighbouring float8.
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b)


@on_eight_devices
@parametrize(
    ("axis_type", "spec"),
    list(itertools.product(AXIS_TYPES, (P("data"), P("data", "sequence")))),
    quick=(1,),
)
def test_fp8_has_one_scale_for_all_shards(axis_type, spec):
    mesh = make_mesh(axis_type, axis_type)
    placed = place(mesh, (spec, *[SHARED] * 4), fp8_operands())
    results, text = results_and_text(lambda a: fp8_gradients(*a), placed)
    assert_same_fp8(results)
    assert count("all-reduce", text) > 0


@on_eight_devices
@parametrize("axis_type", AXIS_TYPES, quick=(1,))
def test_fp8_of_split_weights(axis_type):
    mesh = make_mesh(axis_type, axis_type)
    specs = (P("data"), P(None, "sequence"), P("sequence"), P("sequence"), SHARED)
    placed = place(mesh, specs, fp8_operands())
    assert_same_fp8(jax.jit(lambda a: fp8_gradients(*a))(placed))


@on_eight_devices
def test_fp8_in_a_shard_map():
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    f = jax.shard_map(
        fp8_gradients,
        mesh=mesh,
        in_specs=(P("sequence"), *[SHARED] * 4),
        out_specs=(P("sequence"), P("sequence"), *[SHARED] * 4),
        axis_names={"data", "sequence"},
    )
    assert_same_fp8(jax.jit(f)(*fp8_operands()))
