import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
from jaxfused.ops.norm import batch_norm_xla
from jaxfused.runtime.activation import activate
from jaxfused.runtime.promotion import accumulator_dtype
from tests.cases.batch_norm import CASES, Case
from tests.ops.norm.test_group_norm import BACKWARD, FORWARD, SLAB, stand_ins
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

pytestmark = pytest.mark.exhaustive

__all__ = ["stand_ins"]


def plain_normalise(x, scale, bias, residual, mean, var, activation):
    y = (x - mean.astype(x.dtype)) / jnp.sqrt(var.astype(x.dtype) + 1e-5)
    y = y if scale is None else y * scale.astype(x.dtype)
    y = y if bias is None else y + bias.astype(x.dtype)
    return activate(activation, y if residual is None else y + residual)


@pytest.mark.parametrize("rows", [1, 63, 65, 50_000])
@pytest.mark.parametrize("first", ["like the others", "zeros", "far off", "middle far off"])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_moments_in_one_pass_are_accurate_whatever_some_rows_are(rows, first, mean):
    random = np.random.default_rng(0)
    x = (mean + random.normal(size=(rows, 7))).astype(np.float32)
    x[:, 0] = mean
    if first in ("zeros", "far off"):
        x[: -(-rows // 64)] = 0.0 if first == "zeros" else -1e4
    elif first != "like the others":
        x[rows // 2] = -1e4
    found = batch_norm_xla.row_moments(put(x))
    truth = x.mean(0, dtype=np.float64), x.var(0, dtype=np.float64)
    spread = np.sqrt(truth[1])
    of_far_off = 1e-7 * np.abs(x).max(0) if first == "middle far off" else 0.0
    np.testing.assert_array_less(
        np.abs(found[0] - truth[0]), 1e-6 * (np.abs(truth[0]) + 8 * spread) + of_far_off + 1e-12
    )
    # Both terms of the difference may be this many times as large, each with a few float32 roundings.
    times = rows if first == "middle far off" else 16
    np.testing.assert_array_less(
        np.abs(found[1] - truth[1]), max(16, times) * 5e-7 * truth[1] + 1e-12
    )


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(CASES[0], "bfloat16"), (CASES[3], "float16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    assert_values_and_gradients(*ours_and_plain(case, None), *case.arguments(jnp.dtype(dtype)))
    assert_values_and_gradients(
        lambda x, scale, bias, residual, mean, var: jaxfused.batch_norm(
            x, scale, bias, mean=mean, var=var, residual=residual, activation=case.activation
        ),
        lambda *args: plain_normalise(*args, case.activation),
        *case.arguments(jnp.dtype(dtype)),
        *case.statistics(jnp.dtype(dtype)),
    )


def ours_and_plain(case, implementation):
    def ours(x, scale, bias, residual):
        return jaxfused.batch_norm(
            x,
            scale,
            bias,
            residual=residual,
            activation=case.activation,
            implementation=implementation,
        )

    def plain(x, scale, bias, residual):
        axes = tuple(range(x.ndim - 1))
        mean, var = x.mean(axes), x.var(axes)
        y = plain_normalise(x, scale, bias, residual, mean, var, case.activation)
        dtype = accumulator_dtype(x.dtype)
        return y, mean.astype(dtype), var.astype(dtype)

    return ours, plain


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_way_to_the_kernels(case, stand_ins):
    assert_values_and_gradients(*ours_and_plain(case, "cuda"), *case.arguments(jnp.float32))


def test_transforms_of_the_way_to_the_kernels(stand_ins):
    case = CASES[0]
    assert_transforms(ours_and_plain(case, "cuda")[0], *case.arguments(jnp.float32))


def test_one_kernel_each_way(with_library):
    x = jax.ShapeDtypeStruct((4, 9, 9, 64), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((64,), jnp.float32)

    def f(x, scale, bias):
        y, *_ = jaxfused.batch_norm(x, scale, bias, activation="relu", implementation="cuda")
        return y.astype(jnp.float32).sum()

    assert kernels(f, x, scale, scale) == [SLAB]
    assert kernels(jax.grad(f, (0, 1, 2)), x, scale, scale) == [SLAB, BACKWARD]
    large = jax.ShapeDtypeStruct((40, 99, 99, 64), jnp.bfloat16)
    assert kernels(f, large, scale, scale) == [FORWARD]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case((16, 14, 14, 256), activation="relu"),
        Case((32, 112, 112, 64), residual=True, activation="relu"),
        Case((300, 2048), activation="silu", parameter_dtype="float32"),
        Case((64, 7, 49, 128), residual=True, activation="silu"),
        Case((9, 31, 21, 128), activation="gelu_tanh", parameter_dtype="float32"),
        Case((1, 67, 64), residual=True),
    ],
    ids=str,
)
def test_kernels_are_as_accurate_as_jax_numpy(case, dtype):
    if case.shape[-1] % 2 and dtype != "float32":
        pytest.skip("there is no kernel for this shape")
    ours, plain = ours_and_plain(case, "cuda")
    assert_values_and_gradients(ours, plain, *case.arguments(jnp.dtype(dtype)), cotangents=2)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_row_is_its_own_mean(implementation, dtype):
    x = np.arange(1, 17).reshape(1, 16).astype(dtype)
    y, mean, var = jaxfused.batch_norm(x, implementation=implementation)
    np.testing.assert_array_equal(y, np.zeros_like(x))
    np.testing.assert_array_equal(mean, x[0])
    np.testing.assert_array_equal(var, np.zeros(16))


@settings(max_examples=3)
@given(
    batch=st.integers(1, 5),
    spatial=st.lists(st.integers(1, 7), max_size=3),
    channels=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_odd_shapes_against_flax(batch, spatial, channels, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(scale=3.0, size=(batch, *spatial, channels)).astype(np.float32)
    scale, bias = rng.normal(size=(2, channels)).astype(np.float32)
    module = flax.linen.BatchNorm(momentum=0.0, epsilon=1e-2, use_fast_variance=False)
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": np.zeros(channels), "var": np.zeros(channels)},
    }
    stock, updated = jax.jit(
        lambda x: module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    )(x)
    y, mean, var = jax.jit(lambda x: jaxfused.batch_norm(x, scale, bias, epsilon=1e-2))(x)
    np.testing.assert_allclose(y, stock, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(mean, updated["batch_stats"]["mean"], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(var, updated["batch_stats"]["var"], atol=1e-5, rtol=1e-5)


def test_statistics_over_a_mapped_axis_are_those_of_the_whole_batch():
    x, scale, bias, residual = CASES[0].arguments(jnp.float32)
    parts = (
        jax.random.normal(jax.random.key(3), (4, *x.shape)) + jnp.arange(4.0)[:, None, None, None]
    )
    residuals = jnp.stack([residual] * 4)

    def norm(x, residual, scale, bias, **options):
        return jaxfused.batch_norm(x, scale, bias, residual=residual, activation="silu", **options)

    def each(parts, scale, bias):
        return jax.vmap(
            lambda x, r: norm(x, r, scale, bias, axis_name="devices"), axis_name="devices"
        )(parts, residuals)

    def whole(parts, scale, bias):
        folded = parts.reshape(-1, *x.shape[1:])
        y, mean, var = norm(folded, residuals.reshape(folded.shape), scale, bias)
        return y.reshape(parts.shape), *(jnp.stack([s] * 4) for s in (mean, var))

    def assert_same(actual, expected):
        chex.assert_trees_all_close(actual, expected, atol=1e-5, rtol=1e-5)

    def loss(f):
        return lambda *args: jnp.sum(jnp.sin(f(*args)[0]))

    args = (parts, scale, bias)
    assert_same(each(*args), whole(*args))
    assert_same(*(jax.grad(loss(f), argnums=(0, 1, 2))(*args) for f in (each, whole)))


def test_axis_index_groups_reach_pmean():
    text = str(
        jax.make_jaxpr(
            lambda x: jaxfused.batch_norm(
                x, axis_name="devices", axis_index_groups=[[0, 1], [2, 3]]
            )[1],
            axis_env=[("devices", 4)],
        )(jnp.ones((2, 3)))
    )
    assert "axis_index_groups=((0, 1), (2, 3))" in text


def test_backward_keeps_x_in_its_dtype():
    x = jnp.ones((4, 8, 8), jnp.bfloat16)
    _, vjp = jax.vjp(lambda x: jaxfused.batch_norm(x, activation="silu"), x)
    large = {(a.shape, a.dtype) for a in jax.tree.leaves(vjp) if a.size >= x.size}
    assert large == {(x.shape, jnp.dtype(jnp.bfloat16))}


def test_transforms():
    x, scale, bias, residual = CASES[0].arguments(jnp.float32)
    assert_transforms(
        lambda x, scale, bias, residual: jaxfused.batch_norm(
            x, scale, bias, residual=residual, activation="gelu_tanh"
        ),
        x,
        scale,
        bias,
        residual,
    )


def test_derivatives_of_both_orders_and_modes():
    with jax.enable_x64(True):
        check_grads(
            jax.jit(
                lambda x, scale, bias, residual: jaxfused.batch_norm(
                    x, scale, bias, residual=residual, activation="silu"
                )
            ),
            CASES[0].arguments(jnp.float64),
            order=2,
        )


@pytest.mark.parametrize("layer", ["linear", "conv", "conv_without_bias", "no_parameters"])
def test_fold_batch_norm_gives_what_the_norm_gives(layer):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (2, 5, 5, 3))
    w = jax.random.normal(keys[1], (3, 6) if layer == "linear" else (3, 3, 3, 6))
    bias = None if layer == "conv_without_bias" else jax.random.normal(keys[2], (6,))
    apply = jaxfused.linear if layer == "linear" else jaxfused.conv
    mean, var = CASES[3].statistics(jnp.float32)
    scale, shift = jax.random.normal(keys[3], (2, 6))
    if layer == "no_parameters":
        scale = shift = None
    expected = jaxfused.batch_norm(
        apply(x, w, bias), scale, shift, mean=mean, var=var, epsilon=1e-3
    )
    folded = jaxfused.fold_batch_norm(
        w, bias, mean=mean, var=var, norm_scale=scale, norm_bias=shift, epsilon=1e-3
    )
    np.testing.assert_allclose(apply(x, *folded), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 6), (3, 6)])
@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_fold_batch_norm_into_a_transposed_convolution(inputs, outputs, transpose_kernel):
    rng = np.random.default_rng(0)
    shape = (2, 2, outputs, inputs) if transpose_kernel else (2, 2, inputs, outputs)
    w, x = (rng.normal(size=s).astype(np.float32) for s in (shape, (2, 5, 5, inputs)))
    bias, mean, scale, shift = rng.normal(size=(4, outputs)).astype(np.float32)
    norm = dict(mean=mean, var=rng.uniform(0.5, 2.0, outputs).astype(np.float32))
    options = dict(strides=2, transpose_kernel=transpose_kernel)
    y = jaxfused.conv_transpose(x, w, bias, **options)
    expected = jaxfused.batch_norm(y, scale, shift, **norm)
    folded = jaxfused.fold_batch_norm(
        w, bias, norm_scale=scale, norm_bias=shift, transpose_kernel=transpose_kernel, **norm
    )
    assert folded[0].shape == shape
    actual = jaxfused.conv_transpose(x, *folded, **options)
    np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=2e-5)


def test_fold_batch_norm_keeps_dtypes():
    w, bias = jnp.ones((3, 2), jnp.bfloat16), jnp.ones(2)
    statistics = dict(mean=jnp.zeros(2), var=jnp.ones(2))
    folded = jaxfused.fold_batch_norm(w, bias, **statistics)
    assert [a.dtype for a in folded] == [jnp.bfloat16, jnp.float32]
    assert jaxfused.fold_batch_norm(w, **statistics)[1].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones(())}, "x is a scalar"),
        ({"x": jnp.ones((2, 4), jnp.int32)}, "x has dtype int32"),
        ({"scale": jnp.ones(3)}, r"scale has shape \(3,\), but x has 4 channels .*\(4,\)"),
        ({"var": jnp.ones(3), "mean": jnp.ones(4)}, r"var has shape \(3,\)"),
        ({"var": jnp.ones(4)}, "only var was passed"),
        ({"mean": jnp.ones(4)}, "only mean was passed"),
        ({"mean": jnp.ones(4), "var": jnp.ones(4), "axis_name": "i"}, "axis_name='i' was passed"),
        ({"axis_index_groups": [[0]]}, "without the axis"),
        ({"residual": jnp.ones((2, 4))}, r"residual has shape \(2, 4\).*\(2, 3, 4\)"),
        ({"epsilon": "small"}, "epsilon is 'small'.*pass a Python float"),
        ({"activation": "swish"}, "activation='swish' is not known"),
        ({"implementation": "cuda"}, "it needs an NVIDIA GPU"),
        ({"implementation": "cuda", "axis_name": "i"}, "it takes the statistics of one device"),
        (
            {"implementation": "cuda", "mean": jnp.ones(4), "var": jnp.ones(4)},
            "arithmetic of single values",
        ),
        ({"implementation": "pallas"}, "there is no Pallas kernel of batch_norm"),
    ],
)
def test_errors(change, message):
    arguments = {"x": jnp.ones((2, 3, 4))} | change
    call = jax.vmap(lambda _: jaxfused.batch_norm(**arguments), axis_name="i")
    with pytest.raises(ValueError, match=f"batch_norm: .*{message}"):
        call(jnp.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": jnp.ones(())}, "w is a scalar"),
        ({"w": jnp.ones((3, 4), jnp.int8)}, "w has dtype int8"),
        ({"bias": jnp.ones(3)}, r"bias has shape \(3,\), but w has 4 output channels"),
        ({"norm_scale": jnp.ones(3)}, r"norm_scale has shape \(3,\)"),
        ({"w": jnp.ones((2, 2, 4, 3))}, r"last axis, unless transpose_kernel=True says"),
        ({"w": jnp.ones(4), "transpose_kernel": True}, r"w is of shape \(4,\); pass w .* channels"),
    ],
)
def test_fold_errors(change, message):
    arguments = {"w": jnp.ones((3, 4)), "mean": jnp.ones(4), "var": jnp.ones(4)} | change
    with pytest.raises(ValueError, match=f"fold_batch_norm: .*{message}"):
        jaxfused.fold_batch_norm(**arguments)
