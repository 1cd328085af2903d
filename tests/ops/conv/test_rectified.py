"""Inputs that two layers read: one of them adds both gradients, and applies the mask of a relu."""

import math

import chex
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused.linen
import jaxfused.nnx
from jaxfused import dispatch
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.conv import dense_conv, dense_conv_backward
from jaxfused.ops.norm import batch_norm, group_norm
from jaxfused.runtime.rectified import Rectified
from tests.cases.conv import DENSE_CASES, DEPTHWISE_CASES, TILED_CASES, Case
from tests.flax.test_modules import linen_apply, nnx_apply, normal, shared_params
from tests.ops.conv.test_conv import dense_stand_ins, plain_conv, stand_ins, with_library
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

__all__ = ["dense_stand_ins", "stand_ins", "with_library"]

POINTWISE = Case((2, 5, 7, 64), (1, 1), 64, {"activation": "relu"}, bias=True)
JOINED_CASES = (
    Case((1, 5, 7, 64), (1, 1), 64, {}),
    POINTWISE,
    Case((2, 5, 8, 64), (3, 3), 64, {}),
    DENSE_CASES[2],
    DENSE_CASES[3],
    Case((2, 6, 8, 64), (1, 1), 64, {"strides": 2}),
)
JOINED_KERNEL_CASES = (
    Case((3, 57, 56, 64), (1, 1), 256, {}),
    Case((2, 28, 28, 512), (1, 1), 128, {"activation": "silu"}),
    Case((3, 33, 47, 64), (3, 3), 64, {}),
    Case((2, 16, 17, 128), (3, 3), 192, {}),
)


def rectified_arguments(case, dtype):
    x, *rest = case.arguments(dtype)
    return jax.nn.relu(x), *rest


def forked(case, implementation, *, rectified=True):
    """Returns functions that give the convolution and the handed-on input, for x >= 0."""

    def ours(x, w, bias, residual):
        window = dict(case.options)
        return conv_operator.run(
            Rectified(x) if rectified else x,
            w,
            bias,
            activation=window.pop("activation", None),
            window=window,
            residual=residual,
            return_input=True,
            implementation=implementation,
        )[:2]

    def plain(x, w, bias, residual):
        x = jnp.where(x > 0, x, jnp.zeros_like(x)) if rectified else x
        return plain_conv(x, w, bias, residual, **case.options), x

    return ours, plain


@pytest.mark.parametrize("rectified", [False, True])
def test_the_reference_is_as_accurate_as_jax_numpy(rectified):
    args = rectified_arguments(POINTWISE, jnp.float32)
    assert_values_and_gradients(*forked(POINTWISE, None, rectified=rectified), *args)


@parametrize("size", [1, 3], quick=(0,))
def test_the_kernel_in_the_interpreter(size, interpreted_hopper):
    """Operands are small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(0)
    dz, w, other, x = (
        put(rng.integers(-2, 3, size=shape), jnp.bfloat16)
        for shape in ((1, 5, 7, 64), (size, size, 64, 64), (1, 5, 7, 64), (1, 5, 7, 64))
    )
    padding = ((size // 2, size // 2),) * 2
    window = dense_conv.Window((size, size), padding, (1, 1), (1, 1))
    stage = dense_conv_backward.JoinedInputGradient(
        dense_conv_backward.InputGradient(window, (5, 7), None)
    )

    def run(implementation):
        @jax.jit
        def joined(*operands):
            return stage.run(implementation, interpreted_hopper, *operands)[0]

        return joined(dz, w, other, x)

    np.testing.assert_array_equal(run("pallas"), run("xla"))


@parametrize("case", JOINED_CASES, quick=())
def test_in_the_interpreter(case, interpreted_hopper):
    with dispatch.recorded() as choices:
        args = rectified_arguments(case, jnp.bfloat16)
        assert_values_and_gradients(*forked(case, "pallas"), *args, cotangents=1)
    chosen = {choice.stage: choice.implementation for choice in choices}
    if case.options.get("strides", 1) == 1:
        assert chosen["conv dense joined input gradient"] == "pallas"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize("case", [*JOINED_CASES, *JOINED_KERNEL_CASES], ids=str)
def test_on_a_gpu(case, rectified, dtype):
    args = rectified_arguments(case, jnp.dtype(dtype))
    ours, plain = forked(case, "pallas", rectified=rectified)
    assert_values_and_gradients(ours, plain, *args, cotangents=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*(c for c in DEPTHWISE_CASES if len(c.shape) == 4), TILED_CASES[-1]], ids=str
)
def test_depthwise_on_a_gpu(case):
    args = rectified_arguments(case, jnp.bfloat16)
    assert_values_and_gradients(*forked(case, "cuda"), *args, cotangents=2)


@pytest.mark.parametrize("case", [POINTWISE, JOINED_CASES[2], JOINED_CASES[5]], ids=str)
def test_the_way_to_the_dense_kernels(case, dense_stand_ins):
    assert_values_and_gradients(
        *forked(case, "pallas"), *rectified_arguments(case, jnp.float32), cotangents=2
    )


@pytest.mark.parametrize("case", DEPTHWISE_CASES[:2], ids=str)
def test_the_way_to_the_depthwise_kernels(case, stand_ins):
    assert_values_and_gradients(
        *forked(case, "cuda"), *rectified_arguments(case, jnp.float32), cotangents=2
    )


@pytest.mark.exhaustive
def test_transforms(dense_stand_ins, stand_ins):
    dense, depthwise = JOINED_CASES[2], DEPTHWISE_CASES[0]
    assert_transforms(forked(dense, "pallas")[0], *rectified_arguments(dense, jnp.float32))
    assert_transforms(forked(depthwise, "cuda")[0], *rectified_arguments(depthwise, jnp.float32))


@pytest.mark.exhaustive
def test_one_kernel_adds_and_masks(hopper):
    x = jax.ShapeDtypeStruct((64, 56, 56, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1, 1, 256, 64), jnp.bfloat16)

    def gradient(x, w):
        ours, _ = forked(Case((), (1, 1), 64, {}), "pallas")
        results, vjp = jax.vjp(lambda x: ours(x, w, None, None), x)
        return vjp(results)

    assert kernels(gradient, x, w) == ["conv", "conv_input_gradient"]


# --- norms ----------------------------------------------------------------------------------------


NORMS = dict(batch_norm=batch_norm, group_norm=group_norm)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_takes_the_gradient_as_masked(name, hopper, monkeypatch):
    """XLA computes the stages, on the path that leads to the kernels."""
    monkeypatch.setattr(jaxfused.runtime.cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(jaxfused.runtime.cuda_library, "architectures", lambda: ("90",))
    x, residual, dy = (normal(i, 4, 3, 3, 8) for i in range(3))
    groups = {} if name == "batch_norm" else {"num_groups": 2}

    def norm(x, residual, **options):
        results = NORMS[name].run(x, residual=residual, activation="relu", **groups, **options)
        return results[0] if isinstance(results, tuple) else results

    y, vjp = jax.vjp(norm, x, residual)
    _, open_vjp = jax.vjp(lambda *args: norm(*args, mask_gradient=False), x, residual)
    masked = jnp.where(y > 0, dy, 0)
    assert (masked != dy).any()
    chex.assert_trees_all_equal(open_vjp(masked), vjp(dy))
    np.testing.assert_array_equal(open_vjp(dy)[1], dy)


# --- modules --------------------------------------------------------------------------------------

D = 8


def chain(blocks, x, *, rectified):
    for block in blocks:
        x = block.rectified(x) if rectified else block(x)
    return x.array() if rectified else x


class Blocks(flax.nnx.Module):
    def __init__(self, rectified, **options):
        rngs = flax.nnx.Rngs(0)
        block = jaxfused.nnx.ResNetBlock
        self.block0 = block(4, D, strides=2, rngs=rngs, **options)
        self.block1 = block(4 * D, D, rngs=rngs, **options)
        self.rectified = rectified

    def __call__(self, x):
        return chain([self.block0, self.block1], x, rectified=self.rectified)


class LinenBlocks(flax.linen.Module):
    rectified: bool
    options: dict

    @flax.linen.compact
    def __call__(self, x):
        blocks = [
            jaxfused.linen.ResNetBlock(D, strides=2 - i, name=f"block{i}", **self.options)
            for i in range(2)
        ]
        return chain(blocks, x, rectified=self.rectified)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_blocks_that_mask_for_one_another(kind):
    options = dict(norm="group_norm", num_groups=2)
    x = normal(0, 2, 6, 5, 4)
    params = shared_params(Blocks(True, **options), LinenBlocks(True, options), x)

    def of(rectified):
        if kind == "nnx":
            return nnx_apply(Blocks(rectified, **options))
        return linen_apply(LinenBlocks(rectified, options))

    def results(f):
        y, vjp = jax.vjp(f, params, x)
        return y, vjp(jnp.cos(y))

    actual, expected = (jax.jit(lambda r=r: results(of(r)))() for r in (True, False))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_block_without_relu_has_nothing_to_mask():
    block = jaxfused.nnx.ResNetBlock(8, 2, activation="silu", rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"ResNetBlock: .* activation='silu'"):
        block.rectified(jnp.ones((1, 4, 4, 8)))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_what_is_handed_on_keeps_its_dtype(dtype):
    layer = jaxfused.nnx.Conv(4, 4, (1, 1), dtype=dtype, rngs=flax.nnx.Rngs(0))
    x = normal(0, 2, 3, 5, 5, 4)
    y, returned_input, _ = layer._run(x, return_input=True)
    assert y.shape == x.shape and y.dtype == (dtype or jnp.float32)
    np.testing.assert_array_equal(returned_input, x)


def saved_bytes(f, *args):
    """Returns the bytes that `f` saves between its forward and its backward."""
    saved = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in saved)


@pytest.mark.parametrize("strides", [1, 2])
def test_a_block_keeps_no_more_than_its_layers_read_and_return(with_library, strides):
    """Only each convolution's input, its output for the norm's gradient, and small arrays are saved."""
    images, pixels, width = 64, 56, 64
    block = flax.nnx.eval_shape(
        lambda: jaxfused.nnx.ResNetBlock(
            4 * width, width, strides=strides, dtype=jnp.bfloat16, rngs=flax.nnx.Rngs(0)
        )
    )
    graphdef, params, rest = flax.nnx.split(block, flax.nnx.Param, ...)
    x = jax.ShapeDtypeStruct((images, pixels, pixels, 4 * width), jnp.bfloat16)

    def run(params, rest, x):
        return flax.nnx.merge(graphdef, params, rest).rectified(Rectified(x)).values

    small = pixels // strides
    unit, smaller = (2 * images * p**2 * width for p in (pixels, small))
    # x; the first layer's convolution result and y; the same of the second; the last layer's result.
    expected = 4 * unit + 2 * unit + 2 * smaller + 4 * smaller
    expected += 4 * smaller if strides > 1 else 0  # The shortcut's x and result.
    saved = saved_bytes(run, params, rest, x)
    assert expected <= saved <= 1.01 * expected
