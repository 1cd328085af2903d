"""The path from operators to kernels: choices, shapes, and that each kernel is lowered once."""

import functools
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused import dispatch
from jaxfused.explanation import traced
from jaxfused.ops.attention import attention_stages
from jaxfused.ops.linear import (
    gated_mlp_stages,
    input_gradient,
    linear_stages,
    mlp_stages,
    qkv_projection_stages,
    weight_gradient,
)
from jaxfused.ops.norm import layer_norm
from jaxfused.ops.rope import rope
from jaxfused.runtime import lowering, runner, vmap
from pallas_kernels.attention.logits import saved_length
from tests.support.arrays import put
from tests.support.choices import choose_xla, chosen, why_not
from tests.support.grids import parametrize

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
BF16 = jnp.bfloat16
D, F, HEADS = 128, 256, 2


@pytest.fixture
def h200():
    with dispatch.assume(H200):
        yield H200


# --- lowered once ---------------------------------------------------------------------------------


def kernels_lowered(f, *args) -> int:
    """Returns the number of kernels in a jitted function's lowered text, not of their calls."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"custom_call @mosaic_gpu", text))


def block(x, w):
    """Computes a Transformer block without its projections: five operators."""
    heads = x.reshape(*x.shape[:-1], HEADS, -1)
    x = x + jaxfused.dot_product_attention(heads, heads, heads, implementation="pallas").reshape(
        x.shape
    )
    y = jaxfused.layer_norm(x, implementation="pallas")
    return jaxfused.mlp(y, w, None, w.T, residual=x, implementation="pallas")


def loss(depth, layer, x, w):
    for _ in range(depth):
        x = layer(x, w)
    return jnp.sum(x.astype(jnp.float32))


def scanned(depth, x, w):
    x, _ = lax.scan(lambda x, _: (block(x, w), None), x, None, length=depth)
    return jnp.sum(x.astype(jnp.float32))


PROGRAMS = {
    "forward": lambda depth: functools.partial(loss, depth, block),
    "gradient": lambda depth: jax.grad(functools.partial(loss, depth, block), (0, 1)),
    "checkpoint": lambda depth: jax.grad(
        functools.partial(loss, depth, jax.checkpoint(block)), (0, 1)
    ),
    "vmap": lambda depth: jax.grad(
        functools.partial(loss, depth, jax.vmap(block, in_axes=(0, None))), (0, 1)
    ),
    "scan": lambda depth: jax.grad(functools.partial(scanned, depth), (0, 1)),
}


@parametrize("name", list(PROGRAMS), quick=(0,))
def test_a_kernel_is_lowered_once_however_often_it_is_called(h200, name):
    program = PROGRAMS[name]
    x = jax.ShapeDtypeStruct((4, 64, D), BF16)
    if name == "vmap":
        x = jax.ShapeDtypeStruct((2, 4, 64, D), BF16)
    w = jax.ShapeDtypeStruct((D, F), BF16)
    of_two_layers = kernels_lowered(program(2), x, w)
    assert of_two_layers > 0
    assert kernels_lowered(program(4), x, w) == of_two_layers


@parametrize("manual", (False, True), quick=())
def test_a_kernel_is_lowered_once_on_many_devices(h200, manual):
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, spec))

    def program(depth):
        gradient = jax.grad(functools.partial(loss, depth, block), (0, 1))
        if not manual:
            return gradient
        return jax.shard_map(
            gradient, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())
        )

    arguments = array(P("data"), 32, 64, D), array(P(), D, F)
    of_two_layers = kernels_lowered(program(2), *arguments)
    assert of_two_layers > 0
    assert kernels_lowered(program(4), *arguments) == of_two_layers


def test_a_layer_is_traced_once(h200):
    """Equal layers with equal shapes are traced once, also across calls of `jax.jit`."""
    traces = []

    class Counted(linear_stages.Layer):
        def run(self, *args):
            traces.append(args)
            return super().run(*args)

    x, w = jnp.ones((16, 32)), jnp.ones((32, 16))
    run = runner.Runner(None, H200)
    for _ in range(3):
        layer = Counted("a layer", None, jnp.dtype("float32"), False, None)
        jax.jit(lambda x, w, layer=layer: run(layer, x, w, None, None)).trace(x, w)
    assert len(traces) == 1


def test_what_xla_partitions_is_lowered_once(h200, monkeypatch):
    """XLA requests a module for each use in the program, and the lowered text is reused."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jnp.ones((64, D), BF16)
    forward = layer_norm._Forward(
        layer_norm.NormOptions("layer_norm", True, 1e-6, 0.0, None, None), save_statistics=False
    )
    by_pallas = lowering.Chosen(forward, "pallas", None, H200)
    lowering._exported.cache_clear()
    for _ in range(12):
        program = jax.make_jaxpr(
            lambda x: lowering.in_own_module(by_pallas, x, None, None, None, None)[0]
        )(x)
        assert "call_exported" in str(program)
    assert lowering._exported.cache_info().misses == 1


@chex.assert_max_traces(n=1)
def _norm_traced_once(x):
    return jaxfused.layer_norm(x)


def test_equal_calls_are_one_trace_and_each_is_recorded(h200, monkeypatch):
    stages, forward = [], layer_norm._Forward.run
    monkeypatch.setattr(
        layer_norm._Forward, "run", lambda *args, **how: stages.append(1) or forward(*args, **how)
    )
    x = jax.ShapeDtypeStruct((4096, D), BF16)

    def twice(x):
        return jaxfused.layer_norm(jaxfused.layer_norm(x))

    for batch in ((), (2,), ()):
        program = jax.vmap(twice) if batch else twice
        with dispatch.recorded() as choices:
            jax.eval_shape(
                lambda x, f=program: f(x), jax.ShapeDtypeStruct((*batch, *x.shape), BF16)
            )
        assert [c.stage for c in choices][-2:] == ["layer_norm forward"] * 2
    assert len(stages) == 2


def test_a_kernel_lies_few_calls_below_its_operator(h200):
    """Functions of this repository on the stack of `plgpu.kernel` are those of docs/kernels/call.md."""
    root = Path(jaxfused.__file__).parents[1]
    page = (root / "docs/kernels/call.md").read_text()
    documented = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    launch, stacks = plgpu.kernel.__code__, []

    def walk(frame, event, argument):
        if event == "call" and frame.f_code is launch:
            stack = [f.f_code for f, _ in traceback.walk_stack(frame.f_back)][::-1]
            own = [
                c
                for c in stack
                if c.co_filename.startswith((f"{root}/jaxfused/", f"{root}/pallas_"))
            ]
            stacks.append([(c.co_filename[len(f"{root}/") :], c.co_qualname) for c in own])

    x, scale = jax.ShapeDtypeStruct((4096, D), BF16), jax.ShapeDtypeStruct((D,), BF16)
    norm = functools.partial(jaxfused.layer_norm, implementation="pallas")
    sys.setprofile(walk)
    try:
        jax.jit(norm).trace(x, scale, scale)
    finally:
        sys.setprofile(None)
    [stack] = stacks
    assert [(file, name.partition(".<locals>")[0]) for file, name in stack] == documented
    assert len(stack) <= 12 and len({file for file, _ in stack}) <= 7


def test_a_call_under_other_settings_is_traced_anew(h200):
    x = jax.ShapeDtypeStruct((8, D), jnp.float32)
    w = jax.ShapeDtypeStruct((D, F), jnp.float32)
    layer = functools.partial(jaxfused.linear, activation="gelu_tanh")

    def text():
        return (
            jax.jit(lambda x, w: layer(x, w))
            .trace(x, w)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )

    before = text()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in text()
    assert text() == before


def test_jit_of_an_operator_traces_once():
    chex.clear_trace_counter()
    f = jax.jit(_norm_traced_once)
    for _ in range(3):
        f(jnp.ones((2, 8)))


# --- choice ---------------------------------------------------------------------------------------


def test_the_choice_is_made_on_the_rows_of_a_whole_batch(h200):
    """The kernel gets all rows that `jax.vmap` maps over, not single rows."""
    x = jax.ShapeDtypeStruct((64, 768), BF16)
    norm = functools.partial(jaxfused.layer_norm, implementation="pallas")
    assert why_not(jax.vmap(norm), x) is None


@pytest.mark.parametrize("rows", (0, 8, 16, 24, 40))
@pytest.mark.parametrize("features", (768, 257))
def test_shards_of_any_size_have_an_implementation(h200, rows, features):
    """Each of eight devices has 0, 1, 2, 3 or 5 rows; the kernels' own limits decide."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((rows, features), BF16, sharding=sharding)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jaxfused.layer_norm(x).astype(jnp.float32)))(x)

    seen = jaxfused.explain(gradient, x).calls
    assert [choice.operands[0].shape[0] for choice, _ in seen] == ([rows // 8] * 2 if rows else [])
    jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("spec", (P("data"), P(None, "data"), P()))
def test_a_choice_in_advance_is_that_of_the_shard(h200, spec):
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((64, 8, 768), BF16, sharding=NamedSharding(mesh, spec))
    [(choice, _)] = traced(jaxfused.layer_norm, x)[0]
    assert runner.Runner(None, h200).choice(choice.kernel, x, *choice.operands[1:]) == choice
    assert choice.operands[0].shape == (64 * 8 // (8 if spec else 1), 768)


def test_a_choice_in_advance_is_of_the_named_implementation(h200):
    kernel, operands = KERNELS[0]
    assert runner.Runner("xla", h200).choice(kernel, *operands).source == "named"
    cpu = dispatch.Device("cpu", "cpu", None, 0)
    with pytest.raises(ValueError, match="implementation='pallas' cannot run here"):
        runner.Runner("pallas", cpu).choice(kernel, *operands)


@pytest.mark.parametrize("head_axis", (None, "data"))
@pytest.mark.parametrize("rotary_dim", (16, 32, 64))
def test_rope_of_one_head_a_device(h200, head_axis, rotary_dim):
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    spec = P(None, None, head_axis) if head_axis else P(None, "data")
    q = jax.ShapeDtypeStruct((2, 64, 8, 64), BF16, sharding=NamedSharding(mesh, spec))
    rotate = functools.partial(jaxfused.rope, rotary_dim=rotary_dim)
    jax.jit(rotate).trace(q, q).lower(lowering_platforms=("cuda",))


def test_a_named_kernel_raises_on_the_shard_that_it_cannot_run(h200):
    x = jax.ShapeDtypeStruct((64, 100_000), BF16)
    sentence = why_not(functools.partial(jaxfused.layer_norm, implementation="pallas"), x)
    assert sentence.startswith("layer_norm: implementation='pallas' cannot run here: ")


def test_forward_mode_works_where_xla_is_all_there_is():
    for f, args in (
        (jaxfused.layer_norm, (jnp.ones((4, 8)),)),
        (jaxfused.dot_product_attention, (jnp.ones((1, 4, 2, 8)),) * 3),
        (jaxfused.mlp, (jnp.ones((4, 8)), jnp.ones((8, 16)), None, jnp.ones((16, 8)))),
    ):
        f = functools.partial(jax.jvp, lambda x, f=f, args=args: f(x, *args[1:]))
        chex.assert_tree_all_finite(f((args[0],), (args[0],)))


def test_explain_says_what_runs_after_the_function_was_traced_before(h200):
    f = jax.jit(jaxfused.layer_norm)
    x = jax.ShapeDtypeStruct((64, 768), BF16)
    f.trace(x)
    for _ in range(2):
        assert list(chosen(f, x)) == ["layer_norm forward"]


# --- one contract for all implementations ---------------------------------------------------------


def ones(shape, dtype=jnp.float32):
    """Returns NumPy's ones: jax.numpy would compile a program per shape in each pytest process."""
    return np.ones(shape, dtype)


def kernels_and_operands():
    """Yields every kernel of every operator, with the operands that its operator passes."""
    x, w, b = ones((64, D), BF16), ones((D, F), BF16), ones(F, BF16)
    h, dy = ones((64, F), BF16), ones((64, D), BF16)
    statistic, vector = ones(64), ones(D, BF16)
    for op, subtract_mean in (("layer_norm", True), ("rms_norm", False)):
        norm = layer_norm.NormOptions(op, subtract_mean, 1e-6, 0.0, None, "silu")
        mean = statistic if subtract_mean else None
        for residual in (None, x):
            for save in (False, True):
                yield layer_norm._Forward(norm, save), (x, residual, vector, vector, None)
            yield (
                layer_norm._Backward(norm, 0),
                (
                    *(dy, residual, x, mean, statistic),
                    *(vector, vector, None),
                ),
            )
    for activation in (None, "gelu_tanh"):
        for save in (False, True):
            layer = linear_stages.Layer("linear forward", activation, jnp.dtype(BF16), save, None)
            yield layer, (x, w, b, h)
    yield linear_stages.ActivationGradient("silu", True), (h, h)
    yield mlp_stages.HiddenAndSlope("silu", None), (x, w, b)
    yield mlp_stages.HiddenGradientBySlope(True, None), (dy, w.T, h)
    yield mlp_stages.HiddenGradient("silu", True, None), (dy, w.T, h)
    for save in (False, True):
        yield gated_mlp_stages.GatedUnit("silu", save, None), (x, w, w, b, b)
        yield (
            gated_mlp_stages.GatedUnit("silu", save, None),
            (x, np.concatenate([w, w], 1), None, None, None),
        )
        yield (
            gated_mlp_stages.GatedHiddenGradient("silu", (True, False), save, None),
            (dy, w.T, h, h),
        )
    yield gated_mlp_stages.GatedInputGradient(None), (h, h, w, w)
    q = ones((2, 64, 2, 1, 64), BF16)
    angles = ones((64, 16))
    yield rope._Rotation(False, False), (q, q, angles, angles)
    options = qkv_projection_stages.Options(64, 1e-6, 0.0, False, None)
    x3 = ones((2, 64, D), BF16)
    weights = [ones((D, 2, heads, 64), BF16) for heads in (2, 1, 1)]
    cos = ones((64, 32))
    for save in (False, True):
        yield (
            qkv_projection_stages.Forward(options, save),
            (
                *(x3, *weights, None, None, None),
                *(ones(64), ones(64), cos, cos),
            ),
        )
    yield (
        qkv_projection_stages.InputGradient(options),
        (
            *(ones((2, 64, *w.shape[1:]), BF16) for w in weights),
            *weights,
        ),
    )
    of_one = replace(options, one_array=(2, 2))
    w = (ones((D, 8 * 64), BF16), None, None)
    vectors = (ones(8 * 64, BF16), None, None, ones(64), ones(64), cos, cos)
    yield qkv_projection_stages.Forward(of_one, True), (x3, *w, *vectors)
    dys = (ones((2, 64, 2, heads, 64), BF16) for heads in (2, 1, 1))
    yield qkv_projection_stages.InputGradient(of_one), (*dys, *w)
    heads = attention_stages.Options(True, None, 0.125, None, 0.0)
    for length in (64, 100):
        query = ones((2, length, 2, 2, 64), BF16)
        key = query[:, :, :, 0]
        arrays = attention_stages.Arrays(query, key, key).operands()
        yield attention_stages.Forward(heads), arrays
        lse = ones((2, 2, 2, saved_length(length)))
        yield attention_stages.Backward(heads), (query, lse, query, lse, *arrays)
    of_weights = functools.partial(weight_gradient.WeightGradients, "gated_mlp", precision=None)
    for dtype, sums_rows in ((jnp.dtype(BF16), False), (jnp.dtype("float32"), True)):
        yield of_weights(dtype, count=1, sums_rows=sums_rows, side_by_side=False), (x, h)
        yield of_weights(dtype, count=2, sums_rows=sums_rows, side_by_side=True), (x, h, h)
        joined = of_weights(
            dtype, count=2, sums_rows=sums_rows, side_by_side=sums_rows, joined=True
        )
        yield joined, (x, h, h)
    yield input_gradient.InputGradient(None), (h, ones((D, F), BF16))


KERNELS = list(kernels_and_operands())


@pytest.mark.parametrize(
    ("kernel", "operands"), KERNELS, ids=[kernel.name.replace(" ", "_") for kernel, _ in KERNELS]
)
def test_implementations_return_the_same_shapes_and_dtypes(h200, kernel, operands):
    """Implementations agree on lengths, so that a forward of one can precede a backward of another."""

    def of(implementation):
        return jax.eval_shape(lambda *args: kernel.run(implementation, H200, *args), *operands)

    wanted = of("xla")
    for implementation, reason in kernel.why_not(H200, *operands).items():
        if reason is None:
            chex.assert_trees_all_equal_shapes_and_dtypes(of(implementation), wanted)
    axes = kernel.axes(*operands)
    assert [letters is None for letters in axes.results] == [y is None for y in wanted]


@pytest.mark.parametrize("residual", (False, True))
@pytest.mark.parametrize("op", (jaxfused.layer_norm, jaxfused.rms_norm))
def test_the_norms_stages_in_xla_are_the_gradient_of_the_reference(h200, monkeypatch, op, residual):
    """Single stages run in XLA next to kernels if no kernel supports their shapes."""
    choose_xla(monkeypatch)
    keys = jax.random.split(jax.random.key(0), 6)
    x, stream, dy, dstream = (jax.random.normal(key, (3, 5, 24)) for key in keys[:4])
    scale, bias = (jax.random.normal(key, (24,)) for key in keys[4:])

    def results(implementation):
        def f(x, scale, bias, stream):
            y = op(
                x,
                scale,
                bias,
                residual=stream if residual else None,
                pre_bias=bias,
                pre_activation="gelu_tanh",
                activation="silu",
                implementation=implementation,
            )
            return y if residual else (y, stream)

        @jax.jit
        def values_and_gradients(*operands):
            y, vjp = jax.vjp(f, *operands)
            return y, vjp((dy, dstream))

        return values_and_gradients(x, scale, bias, stream)

    chex.assert_trees_all_close(results(None), results("xla"), rtol=2e-5, atol=2e-5)
    batched = jax.vmap(lambda x: op(x, scale, bias, activation="silu"))
    chex.assert_trees_all_close(
        jax.jit(jax.grad(lambda x: jnp.sum(batched(x) * dy)))(x),
        jax.jit(
            jax.grad(
                lambda x: jnp.sum(op(x, scale, bias, activation="silu", implementation="xla") * dy)
            )
        )(x),
        rtol=2e-5,
        atol=2e-5,
    )


@pytest.mark.parametrize("save", ("hidden", "preactivation", "inputs"))
@pytest.mark.parametrize("gated", (False, True, "stacked"))
def test_the_mlps_stages_in_xla_are_the_gradient_of_the_reference(h200, monkeypatch, save, gated):
    choose_xla(monkeypatch)
    random = np.random.default_rng(0)

    def array(*shape):
        return put(random.standard_normal(shape), jnp.float32)

    x, residual = array(3, 5, 8), array(3, 5, 8)
    if gated:
        w = [array(8, 32), None] if gated == "stacked" else [array(8, 16), array(8, 16)]
        f = functools.partial(jaxfused.gated_mlp, x, *w, array(16, 8), residual=residual)
        arrays = dict(b_gate=array(w[0].shape[1]), b_down=array(8))
    else:
        f = functools.partial(jaxfused.mlp, x, array(8, 16), residual=residual)
        arrays = dict(b1=array(16), w2=array(16, 8), b2=array(8))

    def gradients(implementation):
        def loss(arrays):
            return jnp.sum(jnp.sin(f(**arrays, save=save, implementation=implementation)))

        return jax.jit(jax.value_and_grad(loss))(arrays)

    chex.assert_trees_all_close(gradients(None), gradients("xla"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"logits_soft_cap": 3.0}), ids=str)
def test_attentions_stages_in_xla_are_the_gradient_of_the_reference(h200, monkeypatch, options):
    choose_xla(monkeypatch)
    random = np.random.default_rng(0)
    q, k, v, bias = (
        put(random.standard_normal(shape), jnp.float32)
        for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (1, 4, 5, 7))
    )

    def gradients(implementation):
        def loss(q, k, v, bias):
            y = jaxfused.dot_product_attention(
                q,
                k,
                v,
                bias,
                sinks=jnp.ones(4),
                key_value_seq_lengths=jnp.array([7, 3]),
                dropout_rate=0.25,
                dropout_key=jax.random.key(1),
                implementation=implementation,
                **options,
            )
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, bias)

    chex.assert_trees_all_close(gradients(None), gradients("xla"), rtol=1e-4, atol=1e-4)


def empty_calls():
    """Yields calls of every operator with an axis of size 0."""
    for b, t, s in ((0, 5, 5), (2, 0, 5), (2, 0, 0), (0, 0, 0)):
        q, k = ones((b, t, 4, 16), BF16), ones((b, s, 2, 16), BF16)
        yield jaxfused.dot_product_attention, (q, k, k)
        yield functools.partial(jaxfused.rope, rotary_dim=8), (q, q[:, :, :2])
        x = ones((b, t, 32), BF16)
        yield jaxfused.layer_norm, (x, ones(32))
        yield functools.partial(jaxfused.rms_norm, residual=x), (x, ones(32))
        yield (
            functools.partial(jaxfused.linear, activation="relu"),
            (*(x, ones((32, 16), BF16), ones(16, BF16)),),
        )
        w = ones((32, 64), BF16)
        yield jaxfused.mlp, (x, w, ones(64, BF16), w.T, ones(32, BF16))
        yield jaxfused.gated_mlp, (x, w, w, w.T)
        yield (
            functools.partial(jaxfused.qkv_projection, heads=2, q_scale=ones(16)),
            (*(x, ones((32, 96), BF16)),),
        )


@pytest.mark.parametrize("call", list(empty_calls()), ids=lambda call: str(call[1][0].shape))
def test_empty_operands_give_empty_results_and_zero_gradients(h200, call):
    f, arguments = call

    @jax.jit
    def gradients(*arguments):
        results, vjp = jax.vjp(f, *arguments)
        return vjp(results)

    for x, dx in zip(arguments, gradients(*arguments), strict=True):
        assert dx.shape == x.shape and not np.any(np.float32(dx))


def test_images_without_pixels_in_a_batch():
    (images,) = vmap.merged_images(2, [False], [jnp.ones((3, 0, 5))])
    assert images.shape == (6, 0, 5)
    (results,) = vmap.unmerged_images(2, [images])
    assert results.shape == (2, 3, 0, 5)
