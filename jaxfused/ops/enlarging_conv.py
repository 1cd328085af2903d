"""conv that enlarges: of x with zeros between its values, by windows that do not overlap.

Each value of the result is then made of one pixel of x and of one weight of the window for each
channel. So all weights together make a matrix product of the pixels, and the features of a pixel are
laid out as a block of pixels. The kernel writes them where they belong; XLA moves them after its
product.
"""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxfused import dispatch, reference, sharding
from jaxfused.ops.batching import is_batched, merged_images, unmerged_images
from jaxfused.ops.dense_conv import Letters, images, pointwise_gradients
from jaxfused.ops.kernel_call import Axes, Results, Runner
from jaxfused.ops.linear import ActivationGradient
from jaxfused.ops.product_choice import Passes, fastest_first, is_modelled, xla_time
from jaxfused.ops.weight_gradient import sum_rows
from jaxfused.reference.product import product
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv.window import Window

POINTWISE = Window((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1))


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
    """The block of pixels that each pixel of x makes, where a convolution does no more than that."""
    kernel = tuple(w.shape[:-2])
    disjoint = kernel == tuple(input_dilation) and set(strides) == set(kernel_dilation) == {1}
    if not disjoint or math.prod(kernel) == 1 or feature_group_count > 1 or 0 in x.shape[1:]:
        return None
    whole = tuple((k - 1, k - 1) for k in kernel)
    return kernel if not isinstance(padding, str) and tuple(padding) == whole else None


def why_unsupported(device: dispatch.Device, x: Any, w: Any, residual: Any = None) -> str | None:
    """None where the kernel can run it, x [B, H, W, C] and w [rows, columns, C, F], else why not."""
    if w.ndim != 4:
        return f"it enlarges along one axis or two, and x has {w.ndim - 2} spatial axes"
    return pallas_conv.why_enlarging_unsupported(
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
    """What `conv` computes, of x [B, *spatial, C] and w [*block, C, F]."""
    # A pixel of the result meets the weight that is as far from the window's other end.
    weights = jnp.flip(w, range(w.ndim - 2))
    weights = weights[None] if x.ndim == 3 else weights
    letters = Letters(weights.ndim - 2)
    # JAX would not join features that are split with the pixels of a block.
    explicit = sharding.is_explicit(x) or sharding.is_explicit(w)
    operands = sharding.align(
        (images(x), weights, bias, images(residual)),
        operand_axes=(letters.images, letters.weights, "f", letters.result),
        whole=letters.whole + "f" * explicit,
    )
    y = _enlarging(run, _Options(activation, precision), *operands)
    return y[:, 0] if x.ndim == 3 else y


def moved(features: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """[B, *spatial, block * F] as [B, *(spatial * block), F]."""
    batch, *sizes, _ = features.shape
    parts = features.reshape(batch, *sizes, *block, -1)
    axes = range(1, 1 + len(block))
    pairs = [axis for i in axes for axis in (i, i + len(block))]
    parts = parts.transpose(0, *pairs, parts.ndim - 1)
    return parts.reshape(batch, *(n * k for n, k in zip(sizes, block, strict=True)), -1)


def moved_back(y: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """[B, *(spatial * block), F] as [B, *spatial, block * F]."""
    batch, *enlarged, features = y.shape
    sizes = [n // k for n, k in zip(enlarged, block, strict=True)]
    pairs = (n for pair in zip(sizes, block, strict=True) for n in pair)
    parts = _cut(y, (batch, *pairs, features))
    axes = range(1, 1 + len(block))
    order = [*(2 * i - 1 for i in axes), *(2 * i for i in axes)]
    parts = parts.transpose(0, *order, parts.ndim - 1)
    return _cut(parts, (batch, *sizes, math.prod(block) * features))


def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of images in another shape; over Explicit axes images alone are split."""
    if not sharding.is_explicit(array):
        return array.reshape(shape)
    placed = jax.typeof(array).sharding
    spec = PartitionSpec(placed.spec[0], *(None,) * (len(shape) - 1))
    return jax.lax.reshape(array, shape, out_sharding=NamedSharding(placed.mesh, spec))


def _as_matrix(w: jax.Array) -> jax.Array:
    """Weights [*block, C, F] as a matrix [C, block * F]."""
    axes = w.ndim - 2
    return w.transpose(axes, *range(axes), axes + 1).reshape(w.shape[-2], -1)


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    activation: str | None
    precision: Any

    @property
    def keeps_preactivation(self) -> bool:
        """Whether the gradient reads what the activation is applied to; relu's reads the result."""
        return self.activation not in (None, "relu")


class _Residuals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    residual_like: jax.Array | None
    """Of the residual only its dtype matters: an array without elements."""
    z: jax.Array | None
    """What the activation is applied to, or a result of the same sign; None without one."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _enlarging(run: Runner, options: _Options, x, w, bias, residual):
    return run(_Forward(options, save_preactivation=False), x, w, bias, residual)[0]


def _enlarging_fwd(run: Runner, options: _Options, x, w, bias, residual):
    stage = _Forward(options, save_preactivation=options.keeps_preactivation)
    y, z = run(stage, x, w, bias, residual)
    like = None if residual is None else jnp.zeros_like(residual, shape=(0,))
    return y, _Residuals(x, w, bias, like, y if options.activation == "relu" else z)


def _enlarging_bwd(run: Runner, options: _Options, saved: _Residuals, dy):
    x, w, bias = saved.x, saved.w, saved.bias
    if saved.z is None:
        dz, dbias = dy, None if bias is None else sum_rows(dy, bias.dtype)
    else:
        gradient = ActivationGradient(str(options.activation), bias is not None)
        dz, sums = run(gradient, dy, saved.z)
        dbias = None if bias is None else sums.astype(bias.dtype)
    like = saved.residual_like
    dresidual = None if like is None else dz.astype(like.dtype)
    block = w.shape[:-2]
    matrix, restore = jax.vjp(_as_matrix, w)
    dx, dmatrix = pointwise_gradients(run, x, matrix, moved_back(dz, block), options.precision)
    return dx, *restore(dmatrix), dbias, dresidual


_enlarging.defvjp(_enlarging_fwd, _enlarging_bwd)


# --- kernel ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """(y, z) of x [B, *spatial, C], w [*block, C, F], bias and residual; z if it is saved."""

    options: _Options
    save_preactivation: bool

    @property
    def name(self) -> str:
        return "conv enlarging forward"

    def axes(self, x, w, bias, residual) -> Axes:
        letters = Letters(x.ndim - 2)
        saved = letters.result if self.save_preactivation else None
        return Axes(
            (letters.images, letters.weights, "f", letters.result),
            (letters.result, saved),
            whole=letters.whole,
        )

    def _call(self, device: dispatch.Device, x, w) -> pallas_conv.ConvCall:
        return pallas_conv.ConvCall(
            sizes=x.shape[:-1],
            channels=w.shape[-2],
            features=math.prod(w.shape[:2]) * w.shape[-1],
            window=POINTWISE,
            dtype=x.dtype,
            multiprocessors=device.multiprocessors,
            block=w.shape[:2],
        )

    def _streams(self, x, residual) -> dict[str, int]:
        """What the epilogue reads, writes and evaluates of an element."""
        return dict(
            read_bytes=0 if residual is None else residual.dtype.itemsize,
            written_bytes=x.dtype.itemsize * (1 + self.save_preactivation),
            activations=int(self.options.activation not in (None, "relu", "relu2")),
        )

    def reasons(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        reasons = {"pallas": why_unsupported(device, x, w, residual), "xla": None}
        if reasons["pallas"] is not None or not is_modelled(device):
            return dispatch.preferring("xla", reasons)
        call, streams = self._call(device, x, w), self._streams(x, residual)
        # XLA reads its product once more to move it, and does the rest in that pass.
        moving = Passes(
            bytes_of_element=streams["read_bytes"] + x.dtype.itemsize + streams["written_bytes"],
            evaluations=streams["activations"],
        )
        times = {
            "pallas": pallas_conv.predicted_time(call, **streams),
            "xla": xla_time(device, call.as_product(**streams), moving),
        }
        return fastest_first(reasons, times)

    def configs(
        self, implementation: str, device: dispatch.Device, x, w, bias, residual
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_conv.fitting(self._call(device, x, w), **self._streams(x, residual))

    def run(self, implementation, device, x, w, bias, residual, config=None) -> Results:
        block, matrix = w.shape[:-2], _as_matrix(w)
        if implementation == "pallas":
            return pallas_conv.forward(
                x,
                matrix[None, None],
                None if bias is None else jnp.tile(bias, math.prod(block)),
                residual,
                window=POINTWISE,
                activation=self.options.activation,
                save_preactivation=self.save_preactivation,
                multiprocessors=device.multiprocessors,
                config=config,
                block=block,
            )
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        precision = self.options.precision
        y = product("mc,cf->mf", rows, matrix, out_dtype=x.dtype, precision=precision)
        y = moved(y.reshape(*x.shape[:-1], matrix.shape[-1]), block)
        finish = functools.partial(reference.conv.finish, y, bias, residual)
        z = finish(activation=None) if self.save_preactivation else None
        return finish(activation=self.options.activation), z

    def batched(self, call, axis_size, in_batched, x, w, bias, residual) -> Results | None:
        if is_batched(in_batched[1:3]):
            return None
        merged = merged_images(axis_size, (in_batched[0], in_batched[3]), (x, residual))
        return unmerged_images(axis_size, call(self, merged[0], w, bias, merged[1]))
