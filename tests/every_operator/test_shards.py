"""Every operator with operands split over devices, under `jax.vmap` too: lowering and numbers.

Like tests/runtime/test_sharding.py, this file runs itself in a process with several devices.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
import jaxfused.nnx
from jaxfused import dispatch
from tests.support import eight_devices
from tests.support.calls import calls, have_library, two_experts
from tests.support.choices import choose_xla
from tests.support.eight_devices import DEVICES
from tests.support.grids import parametrize

on_eight_devices = pytest.mark.skipif(
    jax.device_count() != DEVICES or jax.default_backend() != "cpu",
    reason="runs in the process that test_on_eight_devices starts",
)
CPU = dispatch.Device("cpu", "", None, 0)
H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
FEW, MANY = 64, 8192
"""Numbers of rows. Each device has 8, for which products have a kernel of their own, or 1024."""
NAMES = list(calls())


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() == DEVICES, reason="this is that process")
@pytest.mark.exhaustive
@pytest.mark.parametrize("selection", ["not exhaustive", "exhaustive"])
def test_on_eight_devices(selection):
    eight_devices.assert_passes(__file__, selection)


def typed(mesh, specs, operands):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for spec, (shape, dtype, _) in zip(specs, operands, strict=True)
    ]


def lower(f, mesh, specs, operands):
    """Lowers a program for GPUs that need not be present."""
    with jax.set_mesh(mesh), dispatch.assume(H200):
        jax.jit(f).trace(*typed(mesh, specs, operands)).lower(lowering_platforms=("cuda",))


HOW = ("explicit", "auto", "shard_map", "shard_map unchecked")
GRID = list(itertools.product(NAMES, HOW, (FEW, MANY)))


@on_eight_devices
@parametrize(
    ("name", "how", "rows"),
    GRID,
    quick=[
        GRID.index(case)
        for case in (
            *((name, "shard_map", FEW) for name in ("linear", "batch_norm")),
            ("quantized_matmul", "explicit", FEW),
            ("layer_norm", "shard_map unchecked", FEW),
        )
    ],
)
def test_it_lowers_with_its_gradient(monkeypatch, name, how, rows):
    have_library(monkeypatch)
    call = calls(rows)[name]
    operands = (*call.operands, *call.others)
    specs = [P("d") if operand.has_batch else P() for operand in operands]
    axis_type = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(axis_type,))
    f = call.gradients
    if how.startswith("shard_map"):
        checked = how == "shard_map"

        def shard(*arrays):
            y, gradients = call.gradients(*arrays)
            return lax.pmean(y, "d") if call.is_mean else y, tuple(
                g if checked or operand.has_batch else lax.psum(g, "d")
                for g, operand in zip(gradients, call.operands, strict=True)
            )

        y_spec = P() if call.is_mean else P("d")
        f = jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=(y_spec, tuple(specs[: len(call.operands)])),
            check_vma=checked,
        )
    lower(f, mesh, specs, operands)


@on_eight_devices
@parametrize(
    ("name", "device"),
    list(itertools.product(NAMES, (H200, CPU))),
    quick=[2 * NAMES.index(name) + 1 for name in ("conv", "resize", "softmax_cross_entropy")],
)
def test_any_axis_may_be_split(monkeypatch, name, device):
    """Explicit axes that an operator cannot split are gathered, in its gradient too."""
    have_library(monkeypatch)
    call = calls(FEW)[name]
    operands = (*call.operands, *call.others)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    jax.clear_caches()
    for i, operand in enumerate(operands):
        for axis, size in enumerate(operand.shape):
            if (name, i, axis) == ("quantized_conv", 1, 2):
                continue  # The call itself merges that axis with others.
            specs = [P()] * len(operands)
            specs[i] = P(*[None] * axis, "d") if size % 2 == 0 else P()
            with jax.set_mesh(mesh), dispatch.assume(device):
                jax.eval_shape(call.gradients, *typed(mesh, specs, operands))


@on_eight_devices
@parametrize(
    ("name", "device"),
    list(itertools.product(NAMES, (H200, CPU))),
    quick=[2 * NAMES.index(name) + i for name, i in (("batch_norm", 0), ("mlp", 1))],
)
def test_parameters_may_be_fully_sharded(monkeypatch, name, device):
    """Explicit axes: rows and each parameter's axes are split over the same devices."""
    have_library(monkeypatch)
    call = calls(FEW)[name]
    operands = (*call.operands, *call.others)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    jax.clear_caches()
    for last in (0, 1):
        specs = []
        for operand in operands:
            even = (
                [0] if operand.has_batch else [i for i, n in enumerate(operand.shape) if n % 2 == 0]
            )
            # A parameter of two axes or more has its first or its last one split.
            axis = even[-last] if even and name != "quantized_conv" else None
            specs.append(P() if axis is None else P(*[None] * axis, "d"))
        with jax.set_mesh(mesh), dispatch.assume(device):
            jax.eval_shape(call.gradients, *typed(mesh, specs, operands))


FULLY_SHARDED = {
    "layer_norm": (
        lambda x, scale, bias, r, b: jaxfused.layer_norm(x, scale, bias, residual=r, pre_bias=b),
        ((4, 6, 12), (12,), (12,), (4, 6, 12), (12,)),
    ),
    "layer_norm of images": (
        lambda x, s, t, scale: jaxfused.layer_norm(x, scale, image_scale=s, image_shift=t),
        ((4, 6, 12), (4, 12), (4, 12), (12,)),
    ),
    "gated_mlp": (
        lambda x, g, u, d, b, c: jaxfused.gated_mlp(x, g, u, d, b_gate=b, b_down=c),
        ((4, 12), (12, 8), (12, 8), (8, 12), (8,), (12,)),
    ),
    "group_norm": (
        lambda x, scale, bias, s: jaxfused.group_norm(x, scale, bias, num_groups=3, image_scale=s),
        ((4, 6, 12), (12,), (12,), (4, 12)),
    ),
    "batch_norm": (
        lambda x, scale, bias, r: jaxfused.batch_norm(x, scale, bias, residual=r)[0],
        ((4, 6, 12), (12,), (12,), (4, 6, 12)),
    ),
    "attention with sinks": (
        lambda q, k, v, s: jaxfused.dot_product_attention(q, k, v, sinks=s, is_causal=True),
        ((4, 6, 4, 8), (4, 6, 1, 8), (4, 6, 1, 8), (4,)),
    ),
    "losses": (
        lambda x, w, c: jaxfused.linear_softmax_cross_entropy(
            x, w, jnp.argmax(x, -1), class_weights=c**2
        ),
        ((4, 6, 12), (12, 16), (16,)),
    ),
    "router": (
        lambda logits, b, e: jaxfused.router(logits, 2, bias=b, expert_scale=e).weights,
        ((4, 8), (8,), (8,)),
    ),
    "sigmoid_cross_entropy": (
        lambda x, w: jaxfused.sigmoid_cross_entropy(x, jnp.zeros(x.shape), weights=w**2),
        ((4, 8), (4, 8)),
    ),
    "fake_quantize": (
        lambda x: jaxfused.fake_quantize(x, "int4", axis=0, group_size=4),
        ((12, 6),),
    ),
    "attention with scales": (
        lambda q, k, s: jaxfused.dot_product_attention(q, k, k, scale=s),
        ((4, 6, 4, 8), (4, 6, 4, 8), (1, 4, 1, 6)),
    ),
    "prune24": (jaxfused.prune24, ((12, 6),)),
    "fold_batch_norm": (
        lambda w, mean, var, s: jaxfused.fold_batch_norm(w, mean=mean, var=var**2, norm_scale=s),
        ((12, 8), (8,), (8,), (8,)),
    ),
}


@on_eight_devices
@parametrize("name", FULLY_SHARDED, quick=range(len(FULLY_SHARDED)))
def test_fully_sharded_parameters_have_the_numbers_of_one_device(name):
    """The first operand, rows, is split along its first axis, and the others along their last one."""
    f, shapes = FULLY_SHARDED[name]
    operands = [0.3 * _float(*shape) for shape in shapes]
    run = jax.jit(
        jax.grad(
            lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*a))), range(len(shapes))
        )
    )
    expected = run(*operands)
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    specs = [P(("x", "y")), *[P(*[None] * (len(shape) - 1), "x") for shape in shapes[1:]]]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)
        ]
        actual = run(*placed)
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)


CONVOLUTIONS = {
    "depthwise": ((8, 8), (3, 3, 1, 8), dict(feature_group_count=8)),
    "groups": ((7, 6), (2, 3, 4, 6), dict(feature_group_count=2, strides=(2, 1), padding="VALID")),
    "dilated groups": (
        (5, 4),
        (3, 2, 2, 12),
        dict(
            feature_group_count=4,
            padding=((2, 1), (0, 3)),
            input_dilation=2,
            kernel_dilation=(1, 2),
        ),
    ),
    "one axis": ((9,), (4, 1, 8), dict(feature_group_count=8, padding="CAUSAL")),
    "dense": ((8, 8), (3, 3, 8, 8), {}),
}


@on_eight_devices
@parametrize("name", CONVOLUTIONS, quick=range(len(CONVOLUTIONS)))
@parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], quick=(1,))
def test_gradient_of_convolution_weights_on_a_mesh_of_several_axes(name, axis_type):
    """Stock gives the gradient times the devices of axes that do not split the images."""
    sides, kernel, options = CONVOLUTIONS[name]
    x, w = _float(4, *sides, 8), _float(*kernel)

    def run(*operands):
        f = jax.grad(lambda *a: jnp.sum(jnp.sin(jaxfused.conv(*a, **options))), (0, 1))
        return jax.jit(lambda *a: jax.jvp(f, a, a))(*operands)

    expected = run(x, w)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        for spec in (P("x"), P(None, "x") if sides == (8, 8) else P("y")):
            actual = run(jax.device_put(x, NamedSharding(mesh, spec)), w)
            chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-4)


GROUPED_HEADS = {
    "dot_product_attention": lambda q, k: jaxfused.dot_product_attention(q, k, k, is_causal=True),
    "rope": jaxfused.rope,
    "rope, interleaved": lambda q, k: jaxfused.rope(q, k, interleaved=True),
}


@on_eight_devices
@parametrize("name", GROUPED_HEADS, quick=range(len(GROUPED_HEADS)))
def test_query_heads_may_be_split_among_more_devices_than_there_are_key_heads(name):
    f, (q, k) = GROUPED_HEADS[name], (_float(2, 6, 8, 8), _float(2, 6, 2, 8))
    run = jax.jit(
        jax.grad(lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*a))), (0, 1))
    )
    expected = run(q, k)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    for device in (CPU, H200):
        jax.clear_caches()
        with jax.set_mesh(mesh), dispatch.assume(device):
            placed = [jax.device_put(q, NamedSharding(mesh, P(None, None, "x"))), k]
            if device == H200:
                jax.eval_shape(run, *placed)
                continue
            actual = run(*placed)
        chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)


def batched(operands, kind):
    """Returns (operands, specs, in_axes) with a batch of 4, which is split along "d".

    In an "ensemble" each entry has its own weights, and in "per example" all share them. For "whole" the
    batch is not split, but the rows of each entry are.
    """
    entries, inner = (None, "d") if kind == "whole" else ("d", "e")
    new, specs, axes = [], [], []
    for shape, dtype, has_batch in operands:
        is_mapped = has_batch or kind == "ensemble"
        lead = ((4,), (entries,)) if is_mapped else ((), ())
        new.append((lead[0] + shape, dtype, has_batch))
        specs.append(P(*lead[1], *((inner,) if has_batch else ())))
        axes.append(0 if is_mapped else None)
    return new, specs, tuple(axes)


KINDS = ("ensemble", "per example", "whole")
VMAPS = list(itertools.product(NAMES, KINDS))


def vmapped(call, in_axes, **options):
    def gradients(*arrays):
        return call.gradients(*arrays)[1]

    return jax.vmap(gradients, in_axes=in_axes, **options)


@on_eight_devices
@parametrize(
    ("name", "kind"),
    VMAPS,
    quick=[
        VMAPS.index(case)
        for case in (
            ("linear", "ensemble"),
            ("layer_norm", "ensemble"),
        )
    ],
)
def test_vmap_over_a_split_axis_lowers(monkeypatch, name, kind):
    have_library(monkeypatch)
    call = calls(rows=32)[name]
    operands, specs, in_axes = batched((*call.operands, *call.others), kind)
    if all(axis is None for axis in in_axes):
        pytest.skip("its operands are all shared")
    mesh = jax.make_mesh((4, 2), ("d", "e"))
    lower(vmapped(call, in_axes), mesh, specs, operands)


NUMBERS = list(
    itertools.product(NAMES, KINDS, (AxisType.Explicit, AxisType.Auto, "spmd_axis_name"))
)


@on_eight_devices
@parametrize(
    ("name", "kind", "axis_type"),
    NUMBERS,
    quick=[
        NUMBERS.index(case)
        for case in (
            ("linear", "ensemble", AxisType.Explicit),
            ("layer_norm", "ensemble", AxisType.Auto),
            ("dot_product_attention", "whole", AxisType.Explicit),
            ("linear_softmax_cross_entropy, any cotangent", "per example", AxisType.Explicit),
        )
    ],
)
def test_vmap_over_a_split_axis_has_the_numbers_of_one_device(monkeypatch, name, kind, axis_type):
    """The stages run in XLA, which replaces the kernels here."""
    call = calls(rows=16)[name]
    if "conv" in name and axis_type == AxisType.Explicit:
        pytest.skip("in float32 it is JAX's own convolution, which refuses that vmap")
    operands, specs, in_axes = batched((*call.operands, *call.others), kind)
    if all(axis is None for axis in in_axes):
        pytest.skip("its operands are all shared")
    random = np.random.default_rng(0)

    def array(operand):
        if jnp.issubdtype(operand[1], jnp.integer):
            return random.integers(0, 2, operand[0]).astype(np.int32)
        return (0.3 * random.standard_normal(operand[0])).astype(np.float32)

    arrays = [array(operand) for operand in operands]
    wanted = jax.jit(vmapped(call, in_axes))(*arrays)
    options = {}
    if axis_type == "spmd_axis_name":
        if kind == "whole":
            pytest.skip("no mesh axis splits the batch")
        options, axis_type = dict(spmd_axis_name="d"), AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(axis_type,) * 2)
    choose_xla(monkeypatch)
    jax.clear_caches()
    with jax.set_mesh(mesh), dispatch.assume(H200):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        actual = jax.jit(vmapped(call, in_axes, **options))(*placed)
    near = 2e-2 if "fp8" in name or "quantize" in name else 1e-4
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        a, b = np.float32(a), np.float32(b)
        assert np.linalg.norm(a - b) <= near * np.linalg.norm(b) + 1e-6
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, wanted)


def _float(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def _routes(x):
    """Returns weights and indices of two experts."""
    return jnp.stack([x.max(-1), x.min(-1)], -1), two_experts(x)


IN_XLA = {
    "expert_mlp": (
        lambda x, gate, down: jaxfused.expert_mlp(x, *_routes(x), gate, None, down),
        (_float(2, 8, 16), _float(4, 16, 64), _float(4, 32, 16)),
    ),
    "expert_mlp, capacity": (
        lambda x, up, down: jaxfused.expert_mlp(x, *_routes(x), None, up, down, capacity=3),
        (_float(16, 16), _float(4, 16, 32), _float(4, 32, 16)),
    ),
    "batched_lora": (
        lambda x, a, b: jaxfused.batched_lora(x, a, b, jnp.argmax(x, -1) - 8, base=x),
        (_float(8, 16), _float(4, 16, 4), _float(4, 4, 16)),
    ),
    "sparse24_matmul": (jaxfused.sparse24_matmul, (_float(8, 16), _float(16, 32))),
    "linear_softmax_cross_entropy": (
        lambda x, w: jaxfused.linear_softmax_cross_entropy(x, w, jnp.argmax(x, -1), chunk_size=3),
        (_float(2, 8, 16), _float(16, 24)),
    ),
    "avg_pool": (
        lambda x, w: jaxfused.avg_pool(x, 2, weights=w**2),
        (_float(2, 8, 8, 4), _float(2, 2)),
    ),
}


@on_eight_devices
@parametrize("name", IN_XLA, quick=(0, 3, 4, 5))
def test_every_axis_may_be_split_in_xla(name):
    f, operands = IN_XLA[name]

    def loss(*operands):
        y = f(*operands)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.grad(loss, range(len(operands)), has_aux=True))
    expected = run(*operands)
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, P(*"xyz"[: a.ndim]))) for a in operands]
        actual = run(*placed)
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)


SPARSE = np.array([[0, 3], [2, 1], [2, 5]])
PARTLY_MANUAL = {
    "batched_lora": (*IN_XLA["batched_lora"], P("x")),
    "sparse_matmul": (
        lambda b, data: jaxfused.sparse_matmul(BCOO((data, jnp.asarray(SPARSE)), shape=(4, 6)), b),
        (_float(6, 8), _float(3)),
        P(None, "x"),
    ),
}


@on_eight_devices
@parametrize("name", PARTLY_MANUAL, quick=range(len(PARTLY_MANUAL)))
@parametrize("others", [AxisType.Auto, AxisType.Explicit], quick=(1,))
def test_one_axis_of_a_mesh_may_be_manual(name, others):
    f, operands, spec = PARTLY_MANUAL[name]

    def loss(f):
        return jax.jit(
            jax.grad(lambda *operands: jnp.sum(jnp.sin(f(*operands))), range(len(operands)))
        )

    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto, others))
    with jax.set_mesh(mesh):
        specs = (spec, *[P()] * (len(operands) - 1))
        split = jax.shard_map(f, in_specs=specs, out_specs=spec, axis_names={"x"})
        actual = loss(split)(*map(jnp.asarray, operands))
    chex.assert_trees_all_close(jax.device_get(actual), loss(f)(*operands), rtol=1e-4, atol=1e-5)


@on_eight_devices
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("int4", dict(layout="columns", group_size=128)), ("int4", dict(group_size=64)), ("nf4", {})],
)
def test_split_weights_are_quantized_in_packed_groups(dtype, options):
    """More devices share the rows than there are groups, or words are stored column by column."""

    @jax.jit
    def run(w):
        return jaxfused.quantize(w, dtype, **options).dequantize()

    w = _float(256, 8)
    expected = run(w)
    mesh = jax.make_mesh((8,), ("x",))
    with jax.set_mesh(mesh):
        for spec in (P("x"), P(None, "x")):
            actual = run(jax.device_put(w, NamedSharding(mesh, spec)))
            chex.assert_trees_all_equal(jax.device_get(actual), expected)


@on_eight_devices
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("int4", dict(layout="columns", group_size=128)), ("float8_e4m3fn", {}), ("nf4", {})],
)
def test_values_and_scales_may_be_split_along_different_axes(dtype, options):
    """As an optimizer's or a checkpoint's rule that looks at each array alone splits them."""
    x, w = _float(4, 256), jaxfused.quantize(_float(256, 8), dtype, **options)
    run = jax.jit(lambda x, w: (w.dequantize(), jaxfused.quantized_matmul(x, w)))
    expected = run(x, w)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    for first in (True, False):
        specs = [P("x"), P(None, "x")][:: 1 if first else -1]
        with jax.set_mesh(mesh):
            leaves = [
                jax.device_put(a, NamedSharding(mesh, spec if len(a) % 2 == 0 else P(None, "x")))
                for a, spec in zip(jax.tree.leaves(w), specs, strict=True)
            ]
            placed = jax.tree.unflatten(jax.tree.structure(w), leaves)
            actual = run(jax.device_put(x, NamedSharding(mesh, P("x"))), placed)
        chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-3)


LAYERS = {
    "LinearGeneral": lambda rngs: jaxfused.nnx.LinearGeneral(16, (4, 8), rngs=rngs),
    "SparseLinear": lambda rngs: jaxfused.nnx.SparseLinear(16, 24, pattern="2:4", rngs=rngs),
    "MoE": lambda rngs: jaxfused.nnx.MoE(
        16,
        32,
        8,
        router=functools.partial(jaxfused.router, k=2),
        shared_features=16,
        use_shared_gate=True,
        rngs=rngs,
    ),
}


@on_eight_devices
@parametrize("name", LAYERS, quick=range(len(LAYERS)))
def test_layers_whose_parameters_the_devices_of_the_rows_share(name):
    """Explicit axes: each parameter is split along its last axis."""
    graphdef, params = nnx.split(LAYERS[name](nnx.Rngs(0)))
    run = jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(x)))))
    x = _float(8, 16)
    expected = run(params, x)
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])

    def put(a, axis):
        spec = P(*[None] * axis, "d") if a.shape[axis] % 2 == 0 else P()
        return jax.device_put(a, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        actual = run(jax.tree.map(lambda a: put(a, a.ndim - 1), params), put(x, 0))
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)


@on_eight_devices
def test_segments_of_a_split_sequence():
    q, k = _float(2, 8, 4, 8), _float(2, 8, 2, 8)
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2]] * 2)

    @jax.jit
    def run(q, k, ids):
        segments = dict(query_segment_ids=ids, key_value_segment_ids=ids)
        return jaxfused.dot_product_attention(q, k, k, is_causal=True, **segments)

    expected = run(q, k, ids)
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        actual = run(*(jax.device_put(a, NamedSharding(mesh, P("x", "y"))) for a in (q, k, ids)))
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)


@on_eight_devices
@parametrize("name", ["conv", "quantized_conv", "rope"], quick=range(2))
def test_kernels_lower_where_one_axis_of_a_mesh_is_manual(name):
    call = calls(rows=FEW, images=8)[name]
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = tuple(P("x") if o.has_batch else P() for o in call.operands)

    def run(*operands):
        split = jax.shard_map(call.f, in_specs=specs, out_specs=P("x"), axis_names={"x"})
        return split(*operands)

    lower(run, mesh, [P()] * len(specs), call.operands)


@on_eight_devices
def test_places_of_a_sparse_matrix_may_differ_between_devices():
    """Gradients of entries and b, which all devices have, are sums over devices."""
    places = jnp.asarray(np.concatenate([SPARSE, SPARSE[:, ::-1] % [4, 6]]))
    b, data = _float(6, 8), _float(3)

    def product(places, b, data):
        return jaxfused.sparse_matmul(BCOO((data, places), shape=(4, 6)), b)

    def gradients(f):
        return jax.jit(jax.grad(lambda b, data: jnp.sum(jnp.sin(f(b, data))), (0, 1)))(b, data)

    halves = [gradients(lambda *x, half=half: product(half, *x)) for half in jnp.split(places, 2)]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        split = jax.shard_map(product, in_specs=(P("x"), P(), P()), out_specs=P("x"))
        actual = gradients(lambda *x: split(places, *x))
    expected = jax.tree.map(jnp.add, *halves)
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)
