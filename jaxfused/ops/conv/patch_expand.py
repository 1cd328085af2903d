"""Transposed convolution with a stride equal to its window: `conv` of a dilated x, without overlap.

Each value of the result then depends on one pixel of x, and on one weight of the window for each
channel. So a product of x's pixels with all weights gives each pixel's block of output pixels as a
row. The kernel's epilogue writes the block to y; XLA moves it in a pass after its product.
"""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxfused import dispatch
from jaxfused.ops.conv import conv_xla
from jaxfused.ops.conv.dense_conv import Residuals, gradients_after, pointwise_gradients, saved_of
from jaxfused.ops.conv.dense_conv_forward import (
    AsProduct,
    Forward,
    Letters,
    Options,
    images,
    weights_of_images,
)
from jaxfused.runtime import sharding
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.roofline import Passes
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.shapes import why_symbolic
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv.window import Window
from pallas_kernels.gemm.cost import Work


def block_of(
    x: Any,
    w: Any,
    *,
    strides: tuple[int, ...],
    padding: str | Sequence[tuple[int, int]],
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    feature_group_count: int,
) -> tuple[int, ...] | None:
    """Returns the size of the block of y that a pixel of x gives, or None for other convolutions."""
    kernel = tuple(w.shape[:-2])
    disjoint = kernel == tuple(input_dilation) and set(strides) == set(kernel_dilation) == {1}
    if not disjoint or math.prod(kernel) == 1 or feature_group_count > 1 or 0 in x.shape[1:]:
        return None
    whole = tuple((k - 1, k - 1) for k in kernel)
    return kernel if not isinstance(padding, str) and tuple(padding) == whole else None


def why_unsupported(device: dispatch.Device, x: Any, w: Any, residual: Any = None) -> str | None:
    """Returns None if the kernel can run x [B, H, W, C] and w [rows, columns, C, F], else why not."""
    if w.ndim != 4:
        return f"it enlarges along one axis or two, and x has {w.ndim - 2} spatial axes"
    return why_symbolic(x, w) or pallas_conv.why_enlarging_unsupported(
        compute_capability=device.compute_capability,
        dtypes={"x": x.dtype, "residual": None if residual is None else residual.dtype},
        channels={"x": w.shape[-2], "the result": w.shape[-1]},
        sizes=x.shape[:-1],
        block=w.shape[:2],
    )


def enlarging_conv(
    run: Runner,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    precision: Any,
) -> jax.Array:
    """Returns the transposed convolution of x [B, *spatial, C] with w [*block, C, F], with epilogue."""
    # w is flipped: pixel i of a block of k pixels is the product with the window's weight k - 1 - i.
    weights = weights_of_images(x, jnp.flip(w, range(w.ndim - 2)))
    letters = Letters(weights.ndim - 2)
    # JAX cannot merge a sharded feature axis with the pixels of a block.
    explicit = sharding.is_explicit(x) or sharding.is_explicit(w)
    operands = sharding.align(
        (images(x), weights, bias, images(residual)),
        operand_axes=(letters.images, letters.weights, "f", letters.result),
        whole=letters.whole + "f" * explicit,
    )
    window = Window.pointwise(weights.ndim - 2)
    y = _enlarging(run, Options(window, activation, precision), *operands)
    return y[:, 0] if x.ndim == 3 else y


def moved(features: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Moves features [B, *spatial, block * F] to pixels [B, *(spatial * block), F]."""
    batch, *sizes, columns = features.shape
    count = columns // math.prod(block)
    parts = features.reshape(batch, *sizes, *block, count)
    axes = range(1, 1 + len(block))
    pairs = [axis for i in axes for axis in (i, i + len(block))]
    parts = parts.transpose(0, *pairs, parts.ndim - 1)
    return parts.reshape(batch, *(n * k for n, k in zip(sizes, block, strict=True)), count)


def moved_back(y: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Moves pixels [B, *(spatial * block), F] back to features [B, *spatial, block * F]."""
    batch, *enlarged, features = y.shape
    sizes = [n // k for n, k in zip(enlarged, block, strict=True)]
    pairs = (n for pair in zip(sizes, block, strict=True) for n in pair)
    parts = _cut(y, (batch, *pairs, features))
    axes = range(1, 1 + len(block))
    order = [*(2 * i - 1 for i in axes), *(2 * i for i in axes)]
    parts = parts.transpose(0, *order, parts.ndim - 1)
    return _cut(parts, (batch, *sizes, math.prod(block) * features))


def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes an array of images; under Explicit axes only the axis of images stays sharded."""
    if not sharding.is_explicit(array):
        return array.reshape(shape)
    placed = jax.typeof(array).sharding
    spec = PartitionSpec(placed.spec[0], *(None,) * (len(shape) - 1))
    return jax.lax.reshape(array, shape, out_sharding=NamedSharding(placed.mesh, spec))


def _as_matrix(w: jax.Array) -> jax.Array:
    """Returns weights [*block, C, F] as a matrix [C, block * F]."""
    axes = w.ndim - 2
    return w.transpose(axes, *range(axes), axes + 1).reshape(w.shape[-2], -1)


# --- gradient -------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="conv")
def _enlarging(run: Runner, options: Options, x, w, bias, residual):
    stage = _Enlarging(Forward(options, save_preactivation=False))
    return run(stage, x, w, bias, residual)[0]


def _enlarging_fwd(run: Runner, options: Options, x, w, bias, residual):
    stage = _Enlarging(Forward(options, save_preactivation=options.keeps_preactivation))
    y, z = run(stage, x, w, bias, residual)
    return y, saved_of(options, x, w, bias, residual, y, z)


def _enlarging_bwd(run: Runner, options: Options, saved: Residuals, dy):
    dz, dbias, dresidual = gradients_after(run, options, saved, dy)
    matrix, restore = jax.vjp(_as_matrix, saved.w)
    gathered = moved_back(dz, saved.w.shape[:-2])
    dx, dmatrix = pointwise_gradients(run, saved.x, matrix, gathered, options.precision)
    return dx, *restore(dmatrix), dbias, dresidual


_enlarging.defvjp(_enlarging_fwd, _enlarging_bwd)


# --- kernel ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Enlarging(AsProduct):
    """Computes a transposed convolution with w [*block, C, F], where each pixel of x becomes a block."""

    alone: Forward

    @property
    def name(self) -> str:
        return "conv enlarging forward"

    def axes(self, x, w, bias, residual) -> Axes:
        return self.alone.axes(x, w, bias, residual)

    def _call(self, device: dispatch.Device, x, w) -> pallas_conv.ConvCall:
        return pallas_conv.ConvCall(
            sizes=x.shape[:-1],
            channels=w.shape[-2],
            features=math.prod(w.shape[:2]) * w.shape[-1],
            window=self.alone.options.window,
            dtype=x.dtype,
            multiprocessors=device.multiprocessors,
            block=w.shape[:2],
        )

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        return {"xla": None, "pallas": why_unsupported(device, x, w, residual)}

    def product(self, device, x, w, bias, residual) -> tuple[Work, float]:
        """Returns the matrix product, and the microseconds of XLA's passes after it."""
        streams = self.alone.streams(x, residual)
        work = self._call(device, x, w).as_product(**streams)
        # XLA moves the product's pixels to y in a second pass, which also applies the epilogue.
        moving = Passes(
            bytes_of_element=streams["read_bytes"] + x.dtype.itemsize + streams["written_bytes"],
            evaluations=streams["activations"],
        )
        return work, moving.time(work.m * work.n)

    def configs(
        self, implementation: str, device: dispatch.Device, x, w, bias, residual
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_conv.fitting(self._call(device, x, w), **self.alone.streams(x, residual))

    def run(self, implementation, device, x, w, bias, residual, config=None) -> Results:
        block, matrix = w.shape[:-2], _as_matrix(w)
        if implementation == "pallas":
            return pallas_conv.forward(
                x,
                matrix[None, None],
                None if bias is None else jnp.tile(bias, math.prod(block)),
                residual,
                window=self.alone.options.window,
                activation=self.alone.options.activation,
                save_preactivation=self.alone.save_preactivation,
                multiprocessors=device.multiprocessors,
                config=config,
                block=block,
            )
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        precision = self.alone.options.precision
        y = product("mc,cf->mf", rows, matrix, out_dtype=x.dtype, precision=precision)
        y = moved(y.reshape(*x.shape[:-1], matrix.shape[-1]), block)
        finish = functools.partial(conv_xla.finish, y, bias, residual)
        z = finish(activation=None) if self.alone.save_preactivation else None
        return finish(activation=self.alone.options.activation), z

    def batched(self, call, axis_size, in_batched, x, w, bias, residual) -> Results | None:
        return self.alone.batched(
            lambda _, *operands: call(self, *operands), axis_size, in_batched, x, w, bias, residual
        )
