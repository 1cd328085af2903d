import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
from jaxfused.semantics.activation import activate
from tests.against_float64 import assert_values_and_gradients
from tests.cases.group_norm import CASES
from tests.transforms import assert_transforms


def plain_group_norm(x, scale, bias, residual, *, num_groups, activation=None, epsilon=1e-6):
    """The norm as one writes it in jax.numpy, with all arithmetic in x's dtype."""
    images = jnp.moveaxis(x.reshape(*x.shape[:-1], num_groups, x.shape[-1] // num_groups), -2, 1)
    axes = tuple(range(2, images.ndim))
    mean, var = images.mean(axes, keepdims=True), images.var(axes, keepdims=True)
    y = jnp.moveaxis((images - mean) / jnp.sqrt(var + epsilon), 1, -2).reshape(x.shape)
    y = y if scale is None else y * scale.astype(x.dtype)
    y = y if bias is None else y + bias.astype(x.dtype)
    return activate(activation, y if residual is None else y + residual)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(CASES[1], "bfloat16"), (CASES[4], "float16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    options = dict(num_groups=case.num_groups, activation=case.activation)

    def ours(x, scale, bias, residual):
        return jaxfused.group_norm(x, scale, bias, residual=residual, **options)

    def plain(*args):
        return plain_group_norm(*args, **options)

    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(ours, plain, *args)
    assert jax.eval_shape(ours, *args).dtype == dtype


@settings(max_examples=3, deadline=None)
@given(
    batch=st.integers(1, 3),
    spatial=st.lists(st.integers(1, 7), max_size=3),
    groups=st.integers(1, 5),
    group_size=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_odd_shapes_against_flax(batch, spatial, groups, group_size, seed):
    rng = np.random.default_rng(seed)
    channels = groups * group_size
    x = rng.normal(scale=3.0, size=(batch, *spatial, channels)).astype(np.float32)
    scale, bias = rng.normal(size=(2, channels)).astype(np.float32)
    module = flax.linen.GroupNorm(num_groups=groups, epsilon=1e-2, use_fast_variance=False)

    @jax.jit
    def ours_and_stock(x, scale, bias):
        ours = jaxfused.group_norm(x, scale, bias, group_size=group_size, epsilon=1e-2)
        return ours, module.apply({"params": {"scale": scale, "bias": bias}}, x)

    np.testing.assert_allclose(*ours_and_stock(x, scale, bias), atol=2e-5, rtol=2e-5)


def test_variance_is_not_a_difference_of_means():
    x = 1e4 + jnp.array([1.0, -1.0] * 8).reshape(1, 16, 1)
    np.testing.assert_allclose(jaxfused.group_norm(x, num_groups=1), x - 1e4, rtol=1e-3)


def test_nan_stays_in_its_group():
    x = jnp.ones((2, 3, 4)).at[0, 1, 0].set(jnp.nan)
    y = jaxfused.group_norm(x, num_groups=2)
    np.testing.assert_array_equal(np.isnan(y[0]), [[True, True, False, False]] * 3)
    assert not np.isnan(y[1]).any()


def test_backward_keeps_x_in_its_dtype():
    x = jnp.ones((2, 8, 8), jnp.bfloat16)
    _, vjp = jax.vjp(lambda x: jaxfused.group_norm(x, num_groups=2, activation="silu"), x)
    large = [a.dtype for a in jax.tree.leaves(vjp) if a.size >= x.size]
    assert large == [jnp.bfloat16]


def test_transforms():
    x, scale, bias, residual = CASES[1].arguments(jnp.float32)
    assert_transforms(
        lambda x, scale, bias, residual: jaxfused.group_norm(
            x, scale, bias, num_groups=2, residual=residual, activation="gelu_tanh"
        ),
        x,
        scale,
        bias,
        residual,
    )


def test_derivatives_of_both_orders_and_modes():
    with jax.enable_x64(True):
        args = CASES[1].arguments(jnp.float64)
        check_grads(
            jax.jit(
                lambda x, scale, bias, residual: jaxfused.group_norm(
                    x, scale, bias, num_groups=2, residual=residual, activation="silu"
                )
            ),
            args,
            order=2,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones(4)}, r"x has shape \(4,\), but it needs a batch axis"),
        ({"x": jnp.ones((2, 3, 0))}, r"x has shape \(2, 3, 0\)"),
        ({"x": jnp.ones((2, 4), jnp.int32)}, "x has dtype int32"),
        ({"scale": jnp.ones(3)}, r"scale has shape \(3,\), but x has 4 channels .*\(4,\)"),
        ({"bias": jnp.ones(3)}, r"bias has shape \(3,\)"),
        ({"residual": jnp.ones((2, 4))}, r"residual has shape \(2, 4\).*\(2, 3, 4\)"),
        ({"num_groups": 3}, "num_groups is 3, but it must divide the 4 channels"),
        ({"num_groups": 2.0}, "num_groups is 2.0, .* pass an int of 1 or more"),
        ({"num_groups": None, "group_size": 0}, "group_size is 0"),
        ({"group_size": 2}, "num_groups=2 and group_size=2 were passed"),
        ({"num_groups": None}, "exactly one of them"),
        ({"epsilon": jnp.ones(())}, "epsilon is .*pass a Python float"),
        ({"activation": "tanh"}, "activation='tanh' is not known"),
        ({"implementation": "cuda"}, "there is no CUDA kernel of group_norm yet"),
        ({"implementation": "pallas"}, "there is no Pallas kernel of group_norm yet"),
        ({"implementation": "triton"}, "'triton' was passed"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"group_norm: .*{message}"):
        jaxfused.group_norm(**({"x": jnp.ones((2, 3, 4)), "num_groups": 2} | change))
