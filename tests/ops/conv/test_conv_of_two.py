"""conv of `jaxfused.Concatenated`: two arrays whose channels are concatenated."""

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import Concatenated, dispatch
from tests.cases.conv import Case
from tests.ops.conv.test_conv import dense_stand_ins, plain_conv
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.grids import parametrize
from tests.support.lowering import kernels, lowered
from tests.support.transforms import assert_transforms

__all__ = ["dense_stand_ins"]

CASES = (
    (64, Case((1, 6, 8, 80), (3, 3), 64, {"activation": "silu"}, True, (1, 6, 8, 64))),
    (64, Case((1, 5, 7, 128), (2, 3), 16, {"activation": "relu", "padding": "VALID"}, True)),
    (64, Case((2, 9, 80), (4,), 16, {"padding": [(3, 0)]})),
)
ONE_ARRAY = (
    (8, Case((1, 6, 8, 80), (3, 3), 64)),
    (64, Case((1, 6, 8, 128), (3, 3), 64, {"strides": 2})),
    (64, Case((1, 6, 8, 128), (1, 1), 64)),
)
"""Cases that are concatenated first: channels that split a step, strides, a window of one weight."""


def of_two(case, first, implementation=None):
    """Returns (ours, plain), functions of (first, second, w, bias, residual)."""

    def ours(a, b, w, bias, residual):
        x = Concatenated(a, b)
        return jaxfused.conv(
            x, w, bias, residual=residual, implementation=implementation, **case.options
        )

    def plain(a, b, *args):
        return plain_conv(jnp.concatenate((a, b), axis=-1), *args, **case.options)

    return ours, plain


def arguments(case, first, dtype):
    x, *others = case.arguments(dtype)
    return (x[..., :first], x[..., first:], *others)


@pytest.mark.parametrize(("first", "case"), [*CASES[:2], *ONE_ARRAY], ids=str)
def test_is_conv_of_the_concatenation(first, case):
    args = arguments(case, first, jnp.float32)
    ours, _ = of_two(case, first)
    options = case.options

    def concatenated(a, b, w, bias, residual):
        x = jnp.concatenate((a, b), axis=-1)
        return jaxfused.conv(x, w, bias, residual=residual, **options)

    np.testing.assert_array_equal(ours(*args), concatenated(*args))
    for of_pair, of_one in zip(
        *(jax.vjp(f, *args)[1](jnp.ones_like(ours(*args))) for f in (ours, concatenated)),
        strict=True,
    ):
        np.testing.assert_array_equal(of_pair, of_one)


@parametrize(("first", "case"), CASES, quick=(), ids=str)
def test_kernels_in_the_interpreter(first, case, interpreted_hopper):
    with dispatch.recorded() as choices:
        args = arguments(case, first, jnp.bfloat16)
        assert_values_and_gradients(*of_two(case, first, "pallas"), *args, cotangents=1)
    chosen = {choice.stage: choice.implementation for choice in choices}
    assert chosen["conv dense forward of two arrays"] == "pallas"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("first", "case"),
    [*CASES, (64, Case((3, 61, 64, 192), (3, 3), 64, {"activation": "silu"}, True))],
    ids=str,
)
def test_kernels_are_as_accurate_as_jax_numpy(first, case):
    args = arguments(case, first, jnp.bfloat16)
    assert_values_and_gradients(*of_two(case, first, "pallas"), *args, cotangents=2)


def test_nothing_is_concatenated(hopper):
    first, case = CASES[0][0], Case((4, 64, 64, 128), (3, 3), 64)
    args = jax.eval_shape(lambda: arguments(case, first, jnp.bfloat16)[:3])

    def conv(a, b, w):
        return of_two(case, first, "pallas")[0](a, b, w, None, None)

    assert kernels(conv, *args) == ["conv"]
    assert "stablehlo.concatenate" not in lowered(conv, *args)


@pytest.mark.parametrize(("first", "case"), ONE_ARRAY, ids=str)
def test_other_arrays_are_concatenated(first, case, hopper):
    args = jax.eval_shape(lambda: arguments(case, first, jnp.bfloat16)[:3])

    def conv(a, b, w):
        return of_two(case, first, "pallas")[0](a, b, w, None, None)

    assert kernels(conv, *args) == ["conv"]
    assert "stablehlo.concatenate" in lowered(conv, *args)


def test_transforms(dense_stand_ins):
    first, case = 64, Case((2, 4, 4, 72), (3, 3), 8, {"activation": "silu"}, True, (2, 4, 4, 8))
    assert_transforms(of_two(case, first, "pallas")[0], *arguments(case, first, jnp.float32))


@pytest.mark.parametrize("change", [dict(shape=(1, 5, 4, 3)), dict(dtype=jnp.bfloat16)])
def test_parts_have_to_fit(change):
    like = dict(shape=(1, 4, 4, 3), dtype=jnp.float32) | change
    x = Concatenated(jnp.ones((1, 4, 4, 2)), jnp.ones(**like))
    with pytest.raises(ValueError, match="differ in their channels alone"):
        jaxfused.conv(x, jnp.ones((3, 3, 5, 2)))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_layers_take_two_arrays(dtype):
    a, b = (jax.random.normal(jax.random.key(i), (2, 3, 6, 6, 4 * (i + 1))) for i in range(2))
    pair, x = Concatenated(a, b), jnp.concatenate((a, b), axis=-1)
    layer = jaxfused.nnx.ConvNormAct(
        12, 8, (3, 3), norm="group_norm", num_groups=2, dtype=dtype, rngs=flax.nnx.Rngs(0)
    )
    np.testing.assert_array_equal(layer(pair), layer(x))
    np.testing.assert_array_equal(layer.conv(pair), layer.conv(x))
    for module in (
        jaxfused.linen.Conv(8, (3, 3), dtype=dtype),
        jaxfused.linen.ConvNormAct(8, (3, 3), dtype=dtype, use_running_average=True),
    ):
        variables = module.init(jax.random.key(2), pair)
        np.testing.assert_array_equal(module.apply(variables, pair), module.apply(variables, x))
