"""layer_norm and rms_norm on every level, compared with their float64 truth."""

import functools
import itertools
import math
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import dispatch
from jaxfused.ops.norm import adaptive_norm, layer_norm, layer_norm_cuda, layer_norm_regimes
from pallas_kernels.rows import layer_norm as pallas_layer_norm
from pallas_kernels.rows import layer_norm_backward, layer_norm_configs
from tests.cases.layer_norm import CASES, DTYPES, OPTIONS, Case, Inputs, Results
from tests.conftest import HOPPER
from tests.support.arrays import put
from tests.support.choices import skip_where_it_cannot_run, why_not
from tests.support.grids import pairwise, parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

KERNELS = ("pallas", "cuda")
BENCHMARK_SHAPES = (
    (16384, 768),
    (16384, 1024),
    (8192, 4096),
    (16384, 8192),
    (4096, 16384),
    (50432, 768),
)

by_name = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_op = pytest.mark.parametrize("op", ("layer_norm", "rms_norm"))
on_gpu = pytest.mark.gpu
each_implementation = pytest.mark.parametrize(
    "implementation", ["xla", *(pytest.param(name, marks=on_gpu) for name in KERNELS)]
)


def skip_unless_supported(case: Case, dtype: str, implementation: str) -> None:
    call = functools.partial(case.call, implementation=implementation)
    skip_where_it_cannot_run(call, *case.shapes(dtype)[:5])


@functools.cache
def expectation(case: Case, dtype: str) -> tuple[Inputs, Results, Results]:
    """Returns inputs, plain results and truth, computed once for all implementations.

    The truth is computed on the CPU. The plain results are those of the device under test, because its
    own square roots and exponentials are part of the cost of low precision.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = case.inputs(dtype)
        truth = case.truth(inputs)
    return inputs, jax.jit(case.plain)(jax.device_put(inputs, jax.devices()[0])), truth


def check(case: Case, dtype: str, implementation: str) -> None:
    """Compares every result and gradient of one implementation with the truth."""
    inputs, plain, truth = expectation(case, dtype)
    inputs = jax.device_put(inputs, jax.devices()[0])
    actual = jax.jit(functools.partial(case.results, implementation=implementation))(inputs)
    for name in Results._fields:
        parts = (getattr(results, name) for results in (actual, plain, truth))
        if getattr(truth, name) is None:
            assert getattr(actual, name) is None
        else:
            assert_accurate(name, *parts)


# --- level 1: the reference -----------------------------------------------------------------------


def numpy_norm(case: Case, x, scale, bias, residual, pre_bias):
    """Computes the definition in NumPy, in float64."""
    erf = np.vectorize(math.erf, otypes=[np.float64])

    def elu(x, factor=1.0):
        return np.where(x > 0, x, factor * np.expm1(np.minimum(x, 0)))

    activations = {
        None: lambda x: x,
        "relu": lambda x: np.maximum(x, 0),
        "relu2": lambda x: np.maximum(x, 0) ** 2,
        "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "gelu_erf": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
        "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "relu6": lambda x: np.clip(x, 0, 6),
        "leaky_relu": lambda x: np.maximum(x, 0) + np.minimum(x, 0) / 100,
        "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
        "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "hard_sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
        "tanh": np.tanh,
        "hard_tanh": lambda x: np.clip(x, -1, 1),
        "softplus": lambda x: np.logaddexp(x, 0),
        "elu": elu,
        "selu": lambda x: 1.0507009873554805 * elu(x, 1.6732632423543773),
    }
    h = sum(a for a in (x, residual, pre_bias) if a is not None)
    u = activations[case.pre_activation](h)
    mean = u.mean(-1, keepdims=True) if case.op == "layer_norm" else 0
    variance = ((u - mean) ** 2).mean(-1, keepdims=True)
    y = (u - mean) / np.sqrt(variance + case.epsilon)
    y = y * (1 if scale is None else scale + case.scale_offset)
    return activations[case.activation](y + (0 if bias is None else bias)), h


@parametrize("case", OPTIONS, quick=slice(None, None, 2), ids=lambda case: case.name)
def test_reference_and_truth_are_the_definition(case):
    with jax.enable_x64(True):
        inputs = replace(case, parameter_dtype="float64").inputs("float64")
        arrays = [None if a is None else np.asarray(a) for a in inputs[:5]]
        y, h = numpy_norm(case, *arrays)
        truth = case.truth(inputs)
        ours = jax.jit(functools.partial(case.results, implementation="xla"))(inputs)
        np.testing.assert_allclose(ours.y, y, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(truth.y, y, rtol=1e-11, atol=1e-11)
        if case.residual:
            np.testing.assert_allclose(ours.next_residual, h, rtol=1e-12, atol=1e-12)
        for name, gradient in zip(ours._fields[2:], ours[2:], strict=True):
            if gradient is not None:
                np.testing.assert_allclose(
                    gradient, getattr(truth, name), rtol=1e-9, atol=1e-9, err_msg=name
                )


KERNEL_SHAPES = {"D64", "D64_one_tile", "D64_many_rows", "D768", "D1000", "D4096", "D16384"}
KERNEL_SHAPES |= {"rms_D128_many_rows", "rms_D768", "rms_D8192"}
"""Cases that differ only in a kernel's tiles, which the reference does not have."""


@parametrize(
    ("case", "dtype"),
    [
        (case, DTYPES[i % len(DTYPES)])
        for i, case in enumerate(CASES)
        if case.name not in KERNEL_SHAPES
    ],
    quick=slice(None, None, 5),
    ids=lambda value: getattr(value, "name", value),
)
def test_reference_is_accurate(case, dtype):
    check(case, dtype, "xla")


@parametrize("name", ["everything_odd", "rms_everything_odd", "one_axis"], quick=(0, 2))
def test_reference_gradients_in_both_modes_and_twice(name):
    case = replace(by_name[name], epsilon=1e-3)
    if case.shape != (33,):
        case = replace(case, shape=(2, 5))
    with jax.enable_x64(True):
        inputs = case.inputs("float64")
        present = [a is not None for a in inputs[:5]]

        @jax.jit
        def f(*arrays):
            arrays = iter(arrays)
            y, h = case.call(*(next(arrays) if p else None for p in present), implementation="xla")
            return y if h is None else (y, h)

        arrays = [a for a in inputs[:5] if a is not None]
        check_grads(f, arrays, order=2, modes=("fwd", "rev"), eps=1e-5)


@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(1, 7), max_size=2).map(tuple),
    features=st.integers(2, 131),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(("layer_norm", "rms_norm")),
    seed=st.integers(0, 2**31),
)
def test_statistics_of_the_result(shape, features, dtype, op, seed):
    x = np.random.default_rng(seed).normal(1, 3, (*shape, features)).astype(jnp.dtype(dtype))
    y = jax.jit(getattr(jaxfused, op), static_argnames="implementation")(x, implementation="xla")
    assert y.shape == x.shape and y.dtype == x.dtype
    y = np.asarray(y, np.float64)
    x = np.asarray(x, np.float64)
    power = x.var(-1) if op == "layer_norm" else (x**2).mean(-1)
    # The mean of `features` roundings, each at most half a unit at the largest |y| <= sqrt(D).
    unit = float(jnp.finfo(dtype).eps) * features**0.5
    np.testing.assert_allclose((y**2).mean(-1), power / (power + 1e-6), atol=4 * unit)
    if op == "layer_norm":
        # The mean's own rounding is divided by the deviation, which is small if two values are close.
        of_mean = float(jnp.finfo(jnp.float32).eps) * np.abs(x).max(-1) / np.sqrt(power + 1e-6)
        assert (np.abs(y.mean(-1)) <= unit + of_mean).all()


@pytest.mark.parametrize(
    ("op", "with_residual", "mean"),
    pairwise(["layer_norm", "rms_norm"], [False, True], [0.0, 1000.0]),
)
def test_statistics_that_xla_takes_apart(op, with_residual, mean):
    """XLA computes the statistics for a kernel's backward apart from the result."""
    random = np.random.default_rng(0)
    x = random.normal(mean, 3.0, (4, 75, 2051)).astype(np.float32)
    residual, pre_bias = random.normal(size=x.shape), random.normal(size=x.shape[-1])
    options = adaptive_norm.NormOptions(op, op == "layer_norm", 1e-6, 0.0, "relu", None)
    forward = layer_norm._Forward(options, save_statistics=True)
    operands = x, residual if with_residual else None, None, None, pre_bias
    arrays = [None if a is None else put(a, jnp.float32) for a in operands]
    y, total, *found = jax.jit(functools.partial(forward.run, "xla", HOPPER))(*arrays)
    u = x + np.float64(pre_bias.astype(np.float32)) if total is None else np.float64(total)
    u = np.maximum(u, 0.0)
    center = u.mean(-1) if op == "layer_norm" else np.zeros(u.shape[:-1])
    rstd = 1.0 / np.sqrt(np.mean((u - center[..., None]) ** 2, -1) + 1e-6)
    if op == "layer_norm":
        np.testing.assert_allclose(found[0], center, rtol=1e-6)
    else:
        assert found[0] is None
    np.testing.assert_allclose(found[1], rstd, rtol=4e-6)
    np.testing.assert_allclose(y, (u - center[..., None]) * rstd[..., None], rtol=1e-5, atol=2e-4)


@settings(max_examples=10)
@given(
    rows=st.integers(1, 5),
    features=st.integers(1, 67),
    dtype=st.sampled_from(DTYPES),
    with_pre_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_residual_form_is_the_norm_of_the_sum(rows, features, dtype, with_pre_bias, seed):
    case = Case("", (rows, features), residual=True, pre_bias=with_pre_bias)
    inputs = case.inputs(dtype, seed)
    y, h = jax.jit(functools.partial(case.call, implementation="xla"))(*inputs[:5])
    summands = (a for a in (inputs.x, inputs.pre_bias, inputs.residual) if a is not None)
    wide = [np.asarray(a, np.float32) for a in summands]
    np.testing.assert_array_equal(h, sum(wide[1:], wide[0]).astype(h.dtype))
    norm = jax.jit(functools.partial(jaxfused.layer_norm, implementation="xla"))
    same(y, norm(h, inputs.scale, inputs.bias))


@pytest.mark.parametrize("implementation", ["xla", pytest.param(None, marks=on_gpu)])
def test_statistics_are_those_of_the_sum_as_it_is_rounded(implementation):
    """With one feature the mean equals the value, so that the gradient of the scale is 0."""
    norm = functools.partial(jaxfused.layer_norm, implementation=implementation)
    x, residual = (jax.random.normal(jax.random.key(seed), (100, 1)) for seed in range(2))
    residual = residual.astype("bfloat16")

    @jax.jit
    def loss(scale):
        y, _ = norm(x, scale, jnp.ones(1), residual=residual)
        return jnp.sum(y * jnp.arange(100.0)[:, None])

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(1)), 0.0)


# --- every implementation, under every transformation ---------------------------------------------

TRANSFORMED = (
    replace(by_name["everything"], shape=(8, 256)),
    replace(by_name["rms_everything"], shape=(8, 256)),
)
each_transformed = pytest.mark.parametrize("case", TRANSFORMED, ids=lambda case: case.op)


def same(actual, expected):
    """Results are equal up to rounding, since only the order of summation may differ."""
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)


def batch_of(case: Case, batched: set[str], size: int = 3) -> tuple[Inputs, Inputs, list[Inputs]]:
    """Returns (stacked inputs, in_axes, entries); inputs not in `batched` are shared."""
    entries = [case.inputs("float32", seed) for seed in range(size)]
    shared = entries[0]
    entries = [
        shared._replace(**{name: getattr(entry, name) for name in batched}) for entry in entries
    ]
    stacked = shared._replace(
        **{name: put(np.stack([getattr(entry, name) for entry in entries])) for name in batched}
    )
    axes = Inputs(*(0 if name in batched else None for name in Inputs._fields))
    return stacked, axes, entries


def check_vmap(case: Case, batched: set[str], implementation: str) -> None:
    """Checks that results and gradients of a vmapped call equal those of the entries one by one."""
    stacked, axes, entries = batch_of(case, batched)
    results = functools.partial(case.results, implementation=implementation)
    actual = jax.jit(jax.vmap(results, in_axes=(axes,)))(stacked)
    one_by_one = jax.jit(functools.partial(case.results, implementation="xla"))
    same(actual, jax.tree.map(lambda *a: jnp.stack(a), *(one_by_one(e) for e in entries)))


def check_gradient_of_vmapped_loss(case: Case, implementation: str) -> None:
    """Checks that shared inputs get the sum of their gradients over the batch."""
    batched = {"x", "residual", "dy", "dnext_residual"}
    stacked, axes, _ = batch_of(case, batched)

    def loss(inputs, implementation):
        def entry(inputs):
            y, h = case.call(*inputs[:5], implementation=implementation)
            return jnp.sum(y * inputs.dy) + jnp.sum(h * inputs.dnext_residual)

        return jnp.sum(jax.vmap(entry, in_axes=(axes,))(inputs))

    actual = jax.jit(jax.grad(loss), static_argnums=1)(stacked, implementation)
    expected = jax.jit(jax.grad(loss), static_argnums=1)(stacked, "xla")
    same(actual, expected)


ROWS = {"x", "residual", "dy", "dnext_residual"}
each_batched = pytest.mark.parametrize(
    "batched",
    [ROWS, {"x"}, {"scale"}, {*ROWS, "bias", "pre_bias"}, {"dy"}],
    ids=["rows", "x", "scale", "rows_and_parameters", "dy"],
)


@each_implementation
@each_batched
def test_vmap(batched, implementation):
    check_vmap(TRANSFORMED[0], batched, implementation)


@each_implementation
def test_nested_vmap(implementation):
    case = TRANSFORMED[0]
    stacked, _, _ = batch_of(case, set(Inputs._fields[:1]), size=6)
    x = stacked.x.reshape(2, 3, *case.shape)

    def f(x, implementation):
        def loss(x, scale):
            y, _ = case.call(x, scale, *stacked[2:5], implementation=implementation)
            return jnp.sum(jnp.sin(y))

        return jax.vmap(jax.vmap(jax.grad(loss, (0, 1)), (0, None)), (0, None))(x, stacked.scale)

    f = jax.jit(f, static_argnums=1)
    same(f(x, implementation), f(x, "xla"))


@each_implementation
@each_transformed
def test_gradient_of_a_vmapped_loss(case, implementation):
    check_gradient_of_vmapped_loss(case, implementation)


@each_implementation
@each_transformed
def test_jit_checkpoint_and_scan(case, implementation):
    inputs = case.inputs("float32")

    def layer(h, _):
        y, h = case.call(inputs.x, *inputs[1:3], h, inputs.pre_bias, implementation=implementation)
        return h + 0.1 * y, jnp.sum(y)

    def loss(h, transform):
        h, sums = jax.lax.scan(transform(layer), h, length=3)
        return jnp.sum(jnp.sin(h)) + jnp.sum(sums)

    def by_hand(h):
        sums = 0.0
        for _ in range(3):
            h, total = layer(h, None)
            sums += total
        return jnp.sum(jnp.sin(h)) + sums

    expected = jax.value_and_grad(by_hand)(inputs.residual)
    for transform in (lambda f: f, jax.checkpoint):
        actual = jax.jit(jax.value_and_grad(loss), static_argnums=1)(inputs.residual, transform)
        same(actual, expected)


@each_implementation
def test_donation(implementation):
    case = TRANSFORMED[0]
    inputs = case.inputs("float32")
    expected = case.call(*inputs[:5], implementation=implementation)
    step = jax.jit(
        lambda x, residual: case.call(
            x, *inputs[1:3], residual, inputs.pre_bias, implementation=implementation
        ),
        donate_argnums=(0, 1),
    )
    x, residual = inputs.x.copy(), inputs.residual.copy()
    same(step(x, residual), expected)
    assert x.is_deleted() and residual.is_deleted()


@each_implementation
@each_op
def test_nan_and_infinity_stay_in_their_row(op, implementation):
    x = np.array(jax.random.normal(jax.random.key(0), (8, 256)))
    x[1, 3], x[2, 5], x[4, 7] = np.nan, np.inf, -np.inf
    f = getattr(jaxfused, op)
    y = np.asarray(f(put(x), jnp.ones(256), implementation=implementation))
    expected = np.asarray(f(put(x), jnp.ones(256), implementation="xla"))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 3, 5, 6, 7]]).all()


@each_implementation
@pytest.mark.parametrize("shape", [(0, 256), (3, 0, 256)])
def test_no_rows(shape, implementation):
    case = Case("", shape, residual=True, pre_bias=True)
    inputs = case.inputs("float32")
    results = case.results(inputs, implementation=implementation)
    assert results.y.shape == results.dx.shape == shape
    np.testing.assert_array_equal(results.dscale, jnp.zeros(256))


@each_implementation
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_large_mean_or_small_values(size, implementation):
    """The variance is taken of the deviations, so that the size of the mean does not cost accuracy."""
    x = put(np.random.default_rng(0).normal(size=(8, 256)), jnp.float32) * min(size, 1.0)
    y = jaxfused.layer_norm(x + size * (size > 1), epsilon=0.0, implementation=implementation)
    shifted = np.asarray(x + size * (size > 1), np.float64)
    expected = (shifted - shifted.mean(-1, keepdims=True)) / shifted.std(-1, keepdims=True)
    # The mean itself is rounded to float32: half a unit at 1e4, compared with deviations of 1.
    np.testing.assert_allclose(y, expected, atol=2e-3 if size > 1 else 1e-5)


@each_op
def test_small_gradients_of_float16_are_no_zeros(op):
    """`lax.reduce_precision` replaces numbers below float16's smallest normal one by 0."""
    rng = np.random.default_rng(0)
    x, residual, dy = (rng.standard_normal((5, 64)).astype(np.float16) for _ in range(3))
    dy *= np.float16(1e-5)

    def norm(x, residual):
        return getattr(jaxfused, op)(x, residual=residual, implementation="xla")[0]

    def gradient(x, residual, dy):
        return jax.vjp(norm, x, residual)[1](dy)

    wide = [a.astype(np.float32) for a in (x, residual, dy)]
    for ours, truth in zip(gradient(x, residual, dy), gradient(*wide), strict=True):
        np.testing.assert_allclose(ours, truth, atol=2 * jnp.finfo("float16").smallest_subnormal)


@each_op
@pytest.mark.parametrize("features", (2, 6, 64))
def test_gradient_along_the_normalised_values_is_rounded_once(op, features):
    """The parts of such a gradient cancel, so that each part's own rounding would be seen."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, features)).astype(jnp.bfloat16)
    dy = (x.astype(np.float32) / 2 + 0.1 * rng.standard_normal(x.shape)).astype(jnp.bfloat16)

    def gradient(x, dy):
        return jax.vjp(lambda x: getattr(jaxfused, op)(x, implementation="xla"), x)[1](dy)[0]

    ours, truth = gradient(x, dy), gradient(x.astype(np.float32), dy.astype(np.float32))
    np.testing.assert_allclose(ours.astype(np.float32), truth, rtol=2.0**-7)


# --- level 1: scales as transformers' families have them -------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_before_the_scale_has_the_bits_of_llama(dtype):
    """LlamaRMSNorm multiplies the rounded norm, Olmo2RMSNorm rounds the product."""
    random = np.random.RandomState(0)
    x, w = put(random.randn(64, 256) * 3, dtype), put(random.randn(256) * 0.3 + 1, dtype)

    @jax.jit
    def llama_and_olmo(x, w):
        wide, scale = x.astype(jnp.float32), w.astype(jnp.float32)
        v = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        bits = jnp.finfo(x.dtype)
        rounded = jax.lax.reduce_precision(v, bits.nexp, bits.nmant)
        return (scale * rounded).astype(x.dtype), (scale * v).astype(x.dtype)

    llama, olmo = llama_and_olmo(x, w)
    norm = jax.jit(jaxfused.rms_norm, static_argnames="round_before_scale")
    rounded = norm(x, w, round_before_scale=True)
    # Statistics summed in another order may change one value in a thousand by one step.
    assert np.mean(rounded != llama) < 1e-3
    assert np.mean(norm(x, w) != olmo) < 1e-3
    assert np.mean(rounded != olmo) > 0.1
    wide = x.astype(jnp.float32)
    np.testing.assert_allclose(norm(wide, w, round_before_scale=True), norm(wide, w), rtol=1e-6)
    for module, parameters in (
        (jaxfused.linen.RMSNorm(round_before_scale=True, dtype=dtype), {"scale": w}),
        (jaxfused.linen.LayerNorm(round_before_scale=True, dtype=dtype, use_bias=False), None),
    ):
        variables = {"params": parameters or {"scale": w}}
        operator = jaxfused.rms_norm if parameters else jaxfused.layer_norm
        np.testing.assert_array_equal(
            jax.jit(module.apply)(variables, x),
            jax.jit(lambda x, f=operator: f(x, w, round_before_scale=True))(x),
        )


@each_op
def test_a_scale_for_every_feature_of_groups(op):
    """Groups have their own statistics and a scale [G, D]: Mamba 2's gated norm, Qwen 4's group norm."""
    random = np.random.default_rng(0)
    x, cotangent = (random.normal(size=(2, 3, 4, 16)) for _ in range(2))
    scale, bias = random.normal(size=(4, 16)), random.normal(size=(4, 16))

    def expected(x, scale, bias):
        u = x - x.mean(-1, keepdims=True) if op == "layer_norm" else x
        return u / jnp.sqrt((u * u).mean(-1, keepdims=True) + 1e-6) * (scale + 1) + bias

    norm = functools.partial(getattr(jaxfused, op), scale_offset=1.0)
    with jax.enable_x64(True):
        y, vjp = jax.vjp(norm, x, scale, bias)
        truth, truth_vjp = jax.vjp(expected, x, scale, bias)
        np.testing.assert_allclose(y, truth, rtol=1e-11, atol=1e-11)
        for gradient, wanted in zip(vjp(cotangent), truth_vjp(cotangent), strict=True):
            np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-9)
    x, scale = put(x, "float32"), put(scale, "float32")
    y, h = norm(x, scale, residual=x)
    np.testing.assert_array_equal(h, x + x)
    q = norm(x, scale, quantize_rows="int8")
    assert q.shape == x.shape
    batched = jax.vmap(norm, in_axes=(0, None))(x, scale)
    np.testing.assert_allclose(batched, norm(x, scale), rtol=1e-6, atol=1e-6)
    with dispatch.assume(HOPPER):
        assert jax.eval_shape(norm, x, scale).shape == x.shape
        with pytest.raises(ValueError, match="one scale and bias for all groups"):
            jax.eval_shape(functools.partial(norm, implementation="pallas"), x, scale)
    with pytest.raises(ValueError, match=r"scale has shape \(3, 16\)"):
        norm(x, scale[:3])
    with pytest.raises(ValueError, match="scale or bias differs from group to group"):
        norm(x, scale, image_scale=x[:, 0, 0])


def test_offset_of_the_scale():
    """LayerNorm1P of Nemotron stores scale - 1."""
    x, scale, bias = (put(np.random.RandomState(i).randn(5, 16), "float32") for i in range(3))
    y = jaxfused.layer_norm(x, scale[0], bias[0], scale_offset=1.0)
    np.testing.assert_allclose(y, jaxfused.layer_norm(x, scale[0] + 1, bias[0]), atol=1e-6)
    module = jaxfused.linen.LayerNorm(scale_offset=1.0)
    variables = {"params": {"scale": scale[0], "bias": bias[0]}}
    np.testing.assert_allclose(module.apply(variables, x), y, atol=1e-6)
    nnx_module = jaxfused.nnx.LayerNorm(16, scale_offset=1.0, rngs=nnx.Rngs(0))
    nnx_module.scale[...], nnx_module.bias[...] = scale[0], bias[0]
    np.testing.assert_allclose(nnx_module(x), y, atol=1e-6)
    with pytest.raises(ValueError, match="scale_offset needs the operator"):
        module.apply(variables, x, mask=x > 0)


# --- level 1: what is refused ---------------------------------------------------------------------

X = np.zeros((2, 3, 768), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(scale=np.ones(512, np.float32)),
            "layer_norm: scale has shape (512,), but x has 768 features in its last axis;"
            " pass scale of shape (768,).",
        ),
        (dict(bias=np.ones((1, 768), np.float32)), "bias has shape (1, 768)"),
        (dict(pre_bias=np.ones((), np.float32)), "pre_bias has shape ()"),
        (dict(residual=np.ones((3, 768), np.float32)), "residual has shape (3, 768)"),
        (dict(residual=np.ones((2, 3, 768), int)), "residual has dtype int"),
        (dict(x=X.astype(np.int32)), "x has dtype int32"),
        (dict(x=X.astype(np.complex64)), "x has dtype complex64"),
        (dict(x=np.float32(1)), "x has shape ()"),
        (dict(x=np.zeros((2, 0), np.float32)), "x has shape (2, 0)"),
        (dict(activation="gelu"), "activation='gelu'"),
        (dict(pre_activation="swish"), "pre_activation='swish'"),
        (dict(epsilon=np.ones(2)), "epsilon"),
        (dict(implementation="triton"), "'triton'"),
        (dict(implementation="pallas"), "implementation='pallas' cannot run here"),
        (dict(implementation="cuda"), "implementation='cuda' cannot run here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError) as raised:
        jaxfused.layer_norm(**{"x": X, **arguments})
    assert message in str(raised.value)
    assert str(raised.value).startswith("layer_norm: ")
    assert str(raised.value).endswith(".")


# --- level 1: the Pallas kernels without a GPU ----------------------------------------------------

INTERPRETED = (
    Case("norm", (13, 256)),
    Case("four_rows", (4, 64), bias=False),
    Case("many_rows", (70, 128)),
    Case("row_per_cta", (5, 2048)),
    Case("one_row", (1, 256)),
    Case("three_rows", (3, 768), residual=True, pre_bias=True),
    replace(by_name["everything"], shape=(13, 256)),
    replace(by_name["rms_everything"], shape=(13, 256)),
    replace(by_name["everything"], name="everything_row_per_cta", shape=(3, 2048)),
    replace(by_name["everything_without_parameters"], shape=(8, 64)),
    replace(by_name["float32_parameters"], shape=(8, 128)),
    replace(by_name["rounded_everything"], shape=(13, 256)),
)


# One row per warp and one row per CTA, with every option of a norm.
@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", INTERPRETED, quick=(5, 6, 11), ids=lambda case: case.name)
def test_pallas_in_the_interpreter(case):
    check(case, "bfloat16", "pallas")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_hopper")
def test_pallas_float32_in_the_interpreter():
    check(replace(by_name["everything"], shape=(13, 256)), "float32", "pallas")


@pytest.fixture
def large(monkeypatch):
    """Makes the forward read arrays of every size directly, without a ring buffer."""
    monkeypatch.setattr(layer_norm_configs, "_DIRECT_BYTES", 0)


WITHOUT_RING = (
    Case("row_per_warp", (13, 768)),
    Case("rms_row_per_warp", (16, 256), op="rms_norm", bias=False),
    replace(by_name["bias_relu_norm"], shape=(9, 1024)),
    Case("row_per_cta", (5, 8192)),
    Case("rms_row_per_cta", (3, 8192), op="rms_norm", bias=False),
)
each_without_ring = parametrize("case", WITHOUT_RING, quick=(1, 4), ids=lambda case: case.name)


def check_that_it_has_no_ring(case: Case) -> None:
    vectors = case.scale + case.bias + case.pre_bias
    config = layer_norm_configs.forward_candidates(*case.shape, 2, 1, vectors)[0]
    assert config.slots == 0


@pytest.mark.usefixtures("interpreted_hopper", "large")
@each_without_ring
def test_pallas_without_a_ring_in_the_interpreter(case):
    check_that_it_has_no_ring(case)
    check(case, "bfloat16", "pallas")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector", "large")
@each_without_ring
def test_pallas_without_a_ring_does_not_race(case):
    case = replace(case, shape=(8, case.shape[1]))  # Only whole tiles, for the reason given below.
    check_that_it_has_no_ring(case)
    y, _ = case.call(*case.inputs("bfloat16")[:5], implementation="pallas")
    jax.block_until_ready(y)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector")
@pytest.mark.parametrize("features", [256, 2048])
def test_pallas_does_not_race(features):
    # Only whole tiles: the last tile of another matrix rewrites rows of its neighbour with the same
    # values, which the detector reports as a race.
    case = replace(by_name["everything"], shape=(8, features))
    jax.block_until_ready(case.results(case.inputs("bfloat16"), implementation="pallas"))


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("batched", [ROWS, {"scale"}], quick=(1,), ids=lambda b: "_".join(sorted(b)))
def test_pallas_vmap_in_the_interpreter(batched):
    check_vmap(TRANSFORMED[0], batched, "pallas")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_hopper")
def test_pallas_vmap_over_few_rows_in_the_interpreter():
    """Per-example gradients are right even if no example fills a tile."""
    check_vmap(Case("", (5, 64), residual=True, pre_bias=True), {*ROWS}, "pallas")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_hopper")
def test_pallas_gradient_of_a_vmapped_loss_in_the_interpreter():
    check_gradient_of_vmapped_loss(replace(TRANSFORMED[0], shape=(5, 64)), "pallas")


@pytest.mark.usefixtures("interpreted_hopper")
def test_pallas_vmap_over_single_rows_in_the_interpreter():
    check_vmap(Case("", (1, 256), residual=True), {*ROWS}, "pallas")


def kernel_calls(draw):
    """Returns (forward, backward, operands) of the Pallas kernels at a shape that they support.

    Returns None for other shapes. Shapes are those of shards and of rows folded by `vmap`: few rows, odd
    numbers of rows, and as many segments as rows.
    """
    rows_of_segment, segments = draw(st.integers(1, 40)), draw(st.sampled_from([1, 1, 2, 3, 17]))
    rows = rows_of_segment * segments
    step = draw(st.sampled_from([1, 8, 64, 256, 512]))
    features = step * draw(st.integers(1, 2048 // step if step < 256 else 16384 // step))
    dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
    residual, options = draw(st.booleans()), draw(st.booleans())
    why_not = pallas_layer_norm.why_unsupported(
        compute_capability=(9, 0),
        rows=rows,
        features=features,
        dtype=dtype,
        residual_dtype=dtype if residual else None,
        segments=segments,
    )
    if why_not is not None:
        assert why_not and not why_not.endswith(".")
        return None
    x = jax.ShapeDtypeStruct((rows, features), dtype)
    scale = jax.ShapeDtypeStruct((features,), dtype)
    extra = scale if options else None
    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    keywords = dict(
        subtract_mean=True,
        epsilon=1e-6,
        scale_offset=0.0,
        pre_activation="relu" if options else None,
        activation=None,
        multiprocessors=132,
    )
    forward = functools.partial(pallas_layer_norm.forward, save_statistics=True, **keywords)
    backward = functools.partial(layer_norm_backward.backward, segments=segments, **keywords)
    other = x if residual else None
    return (
        (forward, (x, scale, scale, other, extra)),
        (backward, (x, other, x, statistic, statistic, scale, scale, extra)),
    )


@settings(max_examples=30)
@given(st.data())
def test_pallas_traces_whatever_it_supports(data):
    for kernel, operands in kernel_calls(data.draw) or ():
        jax.eval_shape(kernel, *operands)


@pytest.mark.exhaustive
@settings(max_examples=6)
@given(st.data())
def test_pallas_lowers_whatever_it_supports(data):
    for kernel, operands in kernel_calls(data.draw) or ():
        jax.export.export(jax.jit(kernel), platforms=["cuda"])(*operands)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@parametrize("shape", [(50, 64), (300, 1024), (17, 2304), (3, 8192), (5, 16384)], quick=(2,))
def test_pallas_traces_every_candidate(shape, residual):
    rows, features = shape
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((features,), jnp.bfloat16)
    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    other = x if residual else None
    keywords = dict(
        subtract_mean=True,
        epsilon=1e-6,
        scale_offset=0.0,
        pre_activation=None,
        activation=None,
        multiprocessors=132,
    )
    forward_configs = layer_norm_configs.forward_candidates(*shape, 2, 1 + residual, 2)
    backward_configs = layer_norm_configs.backward_candidates(*shape, 2, 2 + residual, 1)
    assert forward_configs and backward_configs
    for config in forward_configs:
        forward = functools.partial(
            pallas_layer_norm.forward, save_statistics=True, config=config, **keywords
        )
        chex.assert_shape(jax.eval_shape(forward, x, scale, scale, other, None)[0], shape)
    for config in backward_configs:
        backward = functools.partial(
            layer_norm_backward.backward, segments=1, config=config, **keywords
        )
        operands = (x, other, x, statistic, statistic, scale, scale, None)
        chex.assert_shape(jax.eval_shape(backward, *operands)[0], shape)


@given(
    rows=st.integers(1, 10**6),
    features=st.integers(1, 20000),
    dtype=st.sampled_from(DTYPES),
    residual=st.booleans(),
)
@example(rows=4849, features=1, dtype="bfloat16", residual=False)
def test_a_rule_for_all_sizes(rows, features, dtype, residual):
    """Every norm has a first implementation, with a reason, whatever can run."""
    itemsize = jnp.dtype(dtype).itemsize
    for subtract_mean, able in itertools.product(
        (False, True), (["cuda", "xla"], ["pallas", "cuda", "xla"])
    ):
        norm = layer_norm_regimes.Norm(rows, features, itemsize, residual, subtract_mean)
        for rule in (
            layer_norm_regimes.forward(norm, able, saves_statistics=False),
            layer_norm_regimes.forward(norm, able, saves_statistics=True),
            layer_norm_regimes.backward(norm, able),
        ):
            assert {*rule.first} & {*able} and rule.why
            # A comparison of the two kernels is a reason only where both can run.
            assert rule.first != ("cuda",) or "pallas" in able


@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("segments", [1, 3])
def test_pallas_takes_no_rows(segments):
    x, d = jnp.ones((0, 64)), jnp.ones(64)
    keywords = dict(
        subtract_mean=True,
        epsilon=1e-6,
        scale_offset=0.0,
        pre_activation=None,
        activation=None,
    )
    for forward, backward, more in (
        (pallas_layer_norm.forward, layer_norm_backward.backward, dict(multiprocessors=4)),
        (layer_norm_cuda.forward, layer_norm_cuda.backward, {}),
    ):
        outputs = forward(x, d, d, x, None, save_statistics=True, **keywords, **more)[:4]
        assert [o.shape for o in outputs] == [(0, 64), (0, 64), (0,), (0,)]
        dx, dscale, dbias, dpre_bias = backward(
            x, x, x, *outputs[2:], d, d, None, segments=segments, **keywords, **more
        )
        assert dx.shape == x.shape and dpre_bias is None
        np.testing.assert_array_equal(dscale, jnp.zeros((segments, 64)))
        np.testing.assert_array_equal(dbias, jnp.zeros((segments, 64)))


def check_lowered(case, dtype):
    skip_unless_supported(case, dtype, "pallas")
    results = functools.partial(case.results, implementation="pallas")
    norm = ["layer_norm_forward", "layer_norm_backward"] if all(case.shape) else []
    assert kernels(results, case.shapes(dtype)) == norm


LOWERED = [case for case in CASES if case.shape[-1] % 64 == 0]


@pytest.mark.usefixtures("hopper")
@parametrize(
    ("case", "dtype"),
    [(case, DTYPES[i % len(DTYPES)]) for i, case in enumerate(LOWERED)],
    quick=slice(None, None, 7),
    ids=lambda value: getattr(value, "name", value),
)
def test_pallas_lowers_for_cuda(case, dtype):
    check_lowered(case, dtype)


@pytest.mark.usefixtures("hopper")
@parametrize(
    ("shape", "residual", "dtype"),
    pairwise(BENCHMARK_SHAPES, [True, False], ["bfloat16", "float32"]),
    quick=(0,),
)
def test_pallas_lowers_for_cuda_at_the_benchmarked_shapes(shape, residual, dtype, monkeypatch):
    monkeypatch.setattr(
        dispatch, "current_device", lambda *arrays: replace(HOPPER, multiprocessors=132)
    )
    case = Case("", shape, residual=residual, pre_bias=residual, pre_activation="relu")
    check_lowered(case, dtype)


# --- level 3: on a GPU ----------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("implementation", (*KERNELS, "xla"))
@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_accurate_on_gpu(case, dtype, implementation):
    skip_unless_supported(case, dtype, implementation)
    check(case, dtype, implementation)


STARTS_ANYWHERE = (
    *(1, 33, 65, 151, 257, 513, 769, 1001, 1309, 2001, 3023, 4095, 4097, 6002),
    *(8193, 9001, 9650, 14963, 16383, 20001),
)
"""Features of misaligned rows: each number of words per thread, and beyond."""


@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_rows_that_start_anywhere_on_gpu(residual, dtype):
    for features in STARTS_ANYWHERE:
        case = Case(f"D{features}", (13, features), residual=residual)
        skip_unless_supported(case, dtype, "cuda")
        check(case, dtype, "cuda")


LARGE = (
    *(Case(f"residual_{shape}", shape, residual=True, pre_bias=True) for shape in BENCHMARK_SHAPES),
    # Larger than the L2, and no multiple of a CTA's rows.
    Case("layer_norm_D768", (50435, 768)),
    Case("layer_norm_D8192", (5003, 8192)),
    Case("layer_norm_D16384", (2503, 16384)),
    Case("residual_D14963", (2304, 14963), residual=True),
    Case("rms_norm_D776", (60001, 776), op="rms_norm", bias=False),
    Case("rms_norm_D4096", (10007, 4096), op="rms_norm", bias=False),
    Case("bias_relu_norm_D5120", (9001, 5120), pre_bias=True, pre_activation="relu"),
)


@on_gpu
@pytest.mark.parametrize("implementation", (*KERNELS, None))
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_large_on_gpu(case, implementation):
    """At full size two runs give the same bits. The GPU computes the truth of sampled rows."""
    if implementation is not None:
        skip_unless_supported(case, "bfloat16", implementation)
    shapes, tree = jax.tree.flatten(case.shapes("bfloat16"))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    inputs = jax.tree.unflatten(
        tree, [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, shapes, strict=True)]
    )
    results = jax.jit(functools.partial(case.results, implementation=implementation))
    actual = results(inputs)
    chex.assert_trees_all_equal(actual, results(inputs))

    step = max(1, case.shape[0] // 256)

    def sampled(f):
        # Arrays in the closure would be constants, which take minutes to compile.
        def of_rows(inputs):
            return jax.tree.map(lambda a: a[::step] if a.ndim == 2 else a, f(inputs))

        return jax.jit(of_rows)(inputs)

    plain = sampled(case.plain)
    with jax.enable_x64(True):
        truth = sampled(functools.partial(case.evaluate, dtype=jnp.float64))
        truth = jax.tree.map(np.asarray, truth)
    actual = jax.tree.map(lambda a: a[::step] if a.ndim == 2 else a, actual)
    for name, *parts in zip(Results._fields, actual, plain, truth, strict=True):
        if parts[-1] is None:
            assert parts[0] is None
        else:
            assert_accurate(name, *parts)


@on_gpu
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", ["everything_odd", "rms_everything", "D4096", "bias_relu_norm"])
def test_same_bits_twice_on_gpu(name, implementation):
    case = replace(by_name[name], shape=(1003, by_name[name].shape[1]))
    skip_unless_supported(case, "bfloat16", implementation)
    inputs = case.inputs("bfloat16")
    results = jax.jit(functools.partial(case.results, implementation=implementation))
    first = results(inputs)
    for _ in range(5):
        chex.assert_trees_all_equal(results(inputs), first)


@on_gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_random_shapes_on_gpu(implementation):
    """Sizes outside the tables give the results of "xla" wherever the kernel supports them."""
    random = np.random.default_rng(0)
    tried = 0
    for _ in range(24):
        rows, multiple, times = (int(random.integers(1, n)) for n in (300, 4, 80))
        shape = rows, times * (1, 2, 64)[multiple - 1]
        case = Case("", shape, residual=bool(random.integers(2)), pre_bias=bool(random.integers(2)))
        call = functools.partial(case.call, implementation=implementation)
        if why_not(call, *case.shapes("float32")[:5]) is None:
            tried += 1
            check(case, "float32", implementation)
    assert tried >= 3
