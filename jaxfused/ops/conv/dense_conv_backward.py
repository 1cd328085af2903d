"""Backward operations of dense conv: dgrad, dgrad plus another gradient of x, and wgrad."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import dense_conv_regimes
from jaxfused.ops.conv.batched_images import batched_images
from jaxfused.ops.conv.dense_conv_forward import (
    Letters,
    Options,
    Windowed,
    call_of,
    reference,
    why_unsupported,
)
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.rectified import masked_gradient
from jaxfused.runtime.roofline import UNMODELLED, Passes, is_modelled
from jaxfused.runtime.runner import Axes, Results
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv import strided as pallas_strided
from pallas_kernels.conv import weight_gradient as pallas_weight_gradient
from pallas_kernels.conv.window import Window
from pallas_kernels.gemm.cost import Work


@dataclass(frozen=True)
class InputGradient(Windowed):
    """dgrad: computes (dx,) [B, *spatial, C] from w and dz, the gradient of y before its activation."""

    window: Window
    sizes: tuple[int, ...]
    precision: Any

    @property
    def name(self) -> str:
        return "conv dense input gradient"

    def axes(self, dz, w) -> Axes:
        letters = Letters(dz.ndim - 2)
        # dgrad sums over the features F, which stay unsharded: otherwise each device's partial sum of dx
        # would be rounded before the sums are added.
        return Axes((letters.result, letters.weights), (letters.images,), whole=letters.whole + "f")

    def call(self, device, dz, w, *others) -> pallas_conv.ConvCall:
        """Returns the kernel's shapes and window."""
        if self.window.is_strided:
            return pallas_strided.call_of(
                dz,
                w.shape[-2],
                window=self.window,
                sizes=self.sizes,
                multiprocessors=device.multiprocessors,
            )
        return call_of(device, self.window.transposed(), dz.shape[:-1], dz.dtype, w, flipped=True)

    def why_not(self, device, dz, w) -> Mapping[str, str | None]:
        if not self.window.is_strided:
            reason = why_unsupported(device, self.window.transposed(), dz, w)
        else:
            reason = pallas_strided.why_unsupported(
                compute_capability=device.compute_capability,
                dtypes={"dy": dz.dtype},
                channels=w.shape[-2],
                features=w.shape[-1],
                images=dz.shape[0],
                sizes=self.sizes,
                window=self.window,
            )
        return {"xla": None, "pallas": reason}

    def estimate(self, device, able: Collection[str], dz, w) -> Estimate:
        if self.window.is_pointwise:
            return Rule(("xla",), "nothing is fused with the product")
        if not self.window.is_strided or "pallas" not in able:
            return super().estimate(device, able, dz, w)
        products = math.prod(dz.shape[:-1]) * math.prod(w.shape)
        why = dense_conv_regimes.why_strided_cudnn(products, w.shape[-2])
        if why is not None:
            return Rule(("xla",), why)
        return Rule(("pallas",), f"the kernel makes blocks of dx, of {products:.0e} products")

    def configs(self, implementation: str, device: dispatch.Device, dz, w) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_conv.fitting(self.call(device, dz, w), written_bytes=dz.dtype.itemsize)

    def run(self, implementation, device, dz, w, config=None) -> Results:
        if implementation == "pallas" and self.window.is_strided:
            dx = pallas_strided.input_gradient(
                dz,
                w,
                window=self.window,
                sizes=self.sizes,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dx,)
        if implementation == "pallas":
            dx = pallas_conv.input_gradient(
                dz,
                w,
                window=self.window,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dx,)
        if self.window.is_pointwise:
            rows, weights = dz.reshape(-1, dz.shape[-1]), w.reshape(w.shape[-2:])
            dx = product("mf,cf->mc", rows, weights, out_dtype=dz.dtype, precision=self.precision)
            return (dx.reshape(*dz.shape[:-1], w.shape[-2]),)
        options = Options(self.window, None, self.precision)
        x = jnp.zeros_like(dz, shape=(dz.shape[0], *self.sizes, w.shape[-2]))
        return tuple(jax.vjp(lambda x: reference(options, x, w.astype(dz.dtype)), x)[1](dz))

    batched = batched_images


@dataclass(frozen=True)
class WeightGradient:
    """wgrad: computes float32 (dw,) [*kernel, C, F] from x and dz, y's gradient before activation."""

    window: Window
    precision: Any

    @property
    def name(self) -> str:
        return "conv dense weight gradient"

    def axes(self, x, dz) -> Axes:
        letters = Letters(x.ndim - 2)
        return Axes((letters.images, letters.result), (letters.weights,), whole=letters.whole)

    def why_not(self, device, x, dz) -> Mapping[str, str | None]:
        if pallas_weight_gradient.why_unsupported(self.window) is not None:
            return {"xla": None}
        return {"xla": None, "pallas": why_unsupported(device, self.window, x, self._like_w(x, dz))}

    def _like_w(self, x, dz) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.window.kernel, x.shape[-1], dz.shape[-1]), x.dtype)

    def estimate(self, device, able: Collection[str], x, dz) -> Estimate:
        if "pallas" not in able:
            return None
        call = call_of(device, self.window, x.shape[:-1], x.dtype, self._like_w(x, dz))
        return dense_conv_regimes.rule(call, of_weights=True) if is_modelled(device) else UNMODELLED

    def configs(self, implementation: str, device: dispatch.Device, x, dz) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_weight_gradient.fitting(
            x, dz, window=self.window, multiprocessors=device.multiprocessors
        )

    def run(self, implementation, device, x, dz, config=None) -> Results:
        if implementation == "pallas":
            dw = pallas_weight_gradient.weight_gradient(
                x,
                dz,
                window=self.window,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dw,)
        # In a `jax.shard_map` zeros made from x vary over the same mesh axes as x. The vjp of zeros that
        # do not would sum dw over the devices.
        options = Options(self.window, None, self.precision)
        w = jnp.zeros_like(x, shape=(*self.window.kernel, x.shape[-1], dz.shape[-1]))
        (dw,) = jax.vjp(lambda w: reference(options, x, w), w)[1](dz)
        return (dw.astype(accumulator_dtype(x.dtype)),)

    def batched(self, call, axis_size, in_batched, x, dz) -> None:
        return None


@dataclass(frozen=True)
class JoinedInputGradient(Windowed):
    """Computes dgrad + `other`, a second gradient of x, masked if x is the result y of a relu.

    `other` and y may be None. This is a class of its own so that the recorded timings of `InputGradient`
    stay valid.
    """

    gradient: InputGradient

    @property
    def name(self) -> str:
        return "conv dense joined input gradient"

    def axes(self, dz, w, other, y) -> Axes:
        axes = self.gradient.axes(dz, w)
        images = Letters(dz.ndim - 2).images
        return axes._replace(operands=(*axes.operands, images, images))

    def why_not(self, device, dz, w, other, y) -> Mapping[str, str | None]:
        window = self.gradient.window
        if window.is_strided:
            return {"xla": None}
        return {"xla": None, "pallas": why_unsupported(device, window.transposed(), dz, w, other)}

    def call(self, device, dz, w, *others) -> pallas_conv.ConvCall:
        """Returns the kernel's shapes and window."""
        return self.gradient.call(device, dz, w)

    def product(self, device, dz, w, other, y) -> tuple[Work, float]:
        streams = self.streams(dz, other, y)
        work = self.call(device, dz, w).as_product(**streams)
        # XLA writes dgrad's result, and a second kernel adds the other gradient to it.
        passes = Passes(bytes_of_element=streams["read_bytes"] + 2 * dz.dtype.itemsize)
        return work, passes.time(work.m * work.n)

    def streams(self, dz, other, y) -> dict[str, int]:
        read = sum(a.dtype.itemsize for a in (other, y) if a is not None)
        return dict(read_bytes=read, written_bytes=dz.dtype.itemsize, activations=0)

    def configs(
        self, implementation: str, device: dispatch.Device, dz, w, other, y
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        call = self.call(device, dz, w)
        return pallas_conv.fitting(call, **self.streams(dz, other, y))

    def run(self, implementation, device, dz, w, other, y, config=None) -> Results:
        if implementation == "pallas":
            dx = pallas_conv.input_gradient(
                dz,
                w,
                other=other,
                rectified=y,
                window=self.gradient.window,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dx,)
        alone = self.gradient.run(implementation, device, dz, w)[0]
        assert alone is not None
        return (joined_gradient(alone, other, y),)

    batched = batched_images


def joined_gradient(dx: jax.Array, other: jax.Array | None, y: jax.Array | None) -> jax.Array:
    """Returns dx plus `other`, masked if x is a relu's result y; `other` and y may be None."""
    dx = dx if other is None else dx + other.astype(dx.dtype)
    return dx if y is None else masked_gradient(dx, y)
