"""Forward operations of dense conv: of one array, of two arrays, and with statistics of the result."""

import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import conv_xla, dense_conv_regimes
from jaxfused.ops.conv.batched_images import batched_images
from jaxfused.ops.linear.linear_stages import CHEAP_ACTIVATIONS
from jaxfused.ops.norm import batch_norm_xla
from jaxfused.runtime import product_regimes
from jaxfused.runtime.activation import ARITHMETIC, SLOPE_OF_RESULT
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.roofline import Passes, is_modelled
from jaxfused.runtime.runner import Axes, Results
from jaxfused.runtime.shapes import why_symbolic
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv.window import Window
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.small_m import MAX_ROWS


def why_unsupported(
    device: dispatch.Device, window: Window | str, x: Any, w: Any, residual: Any = None
) -> str | None:
    """Returns None if the kernels can run a convolution of this window, else the reason."""
    if isinstance(window, str):
        return f"the Pallas kernels of conv are dense, and {window}"
    return why_symbolic(x, w) or pallas_conv.why_unsupported(
        compute_capability=device.compute_capability,
        dtypes={"x": x.dtype, "residual": None if residual is None else residual.dtype},
        channels={"x": w.shape[-2], "the result": w.shape[-1]},
        sizes=x.shape[:-1],
        window=window,
    )


def images(x: Any) -> Any:
    """Returns x [B, L, C] as images of one row, [B, 1, L, C]; arrays of more axes are unchanged."""
    return x[:, None] if x is not None and has_one_axis(x) else x


def weights_of_images(x: Any, w: Any) -> Any:
    """Returns w, with a leading axis of 1 added if x has one spatial axis."""
    return w[None] if has_one_axis(x) else w


def has_one_axis(x: Any) -> bool:
    """Returns whether x [B, *spatial, C] has one spatial axis."""
    return len(x.shape[1:-1]) == 1


@dataclass(frozen=True)
class Options:
    """Static arguments of a convolution's forward and backward."""

    window: Window
    activation: str | None
    precision: Any

    @property
    def keeps_preactivation(self) -> bool:
        """True if the backward reads the activation's input: its derivative does not follow from y."""
        return self.activation not in (None, *SLOPE_OF_RESULT)


@dataclass(frozen=True)
class Letters:
    """One letter for each axis of a convolution's operands; equal letters are sharded alike (`Axes`)."""

    axes: int

    @property
    def images(self) -> str:
        return "b" + "dhw"[-self.axes :] + "c"

    @property
    def two_images(self) -> tuple[str, str]:
        """Axis letters of the two arrays [B, *spatial, channels] whose concatenation is x."""
        spatial = "b" + "dhw"[-self.axes :]
        return spatial + "x", spatial + "y"

    @property
    def weights(self) -> str:
        return "ijk"[-self.axes :] + "cf"

    @property
    def result(self) -> str:
        return "b" + "tuv"[-self.axes :] + "f"

    @property
    def whole(self) -> str:
        return "dhwcxyijktuv"


class AsProduct:
    """Mixin of stages that are a matrix product; `product_regimes` estimates whether a kernel is faster.

    Its method `product` returns the product, and the microseconds of XLA's passes after it.
    """

    def estimate(self: Any, device, able: Collection[str], *operands) -> Estimate:
        if "pallas" not in able:
            return None
        return product_regimes.estimate(device, *self.product(device, *operands))


class Windowed(AsProduct):
    """Mixin of convolutions: 1 x 1 windows are judged as products, others by `dense_conv_regimes`."""

    def estimate(self: Any, device, able: Collection[str], *operands) -> Estimate:
        call = self.call(device, *operands)
        if "pallas" not in able or not is_modelled(device):
            return super().estimate(device, able, *operands)
        if not call.window.is_pointwise:
            return dense_conv_regimes.rule(call)
        work, passes = self.product(device, *operands)
        if work.k < product_regimes.LINE:
            return Rule(("xla",), f"memory bounds a product of {work.k} channels in XLA too")
        # With more channels than a step of the kernel's sum, small results are the kernel's too.
        several = work.m > MAX_ROWS and MAX_ROWS < work.k <= product_regimes.SPLIT_SUM
        return product_regimes.estimate(device, work, passes, several=several or None)


@dataclass(frozen=True)
class Forward(Windowed):
    """Computes y and the activation's input z, or None, of x [B, *spatial, C], w [*kernel, C, F]."""

    options: Options
    save_preactivation: bool

    @property
    def name(self) -> str:
        return "conv dense forward"

    def axes(self, x, w, bias, residual) -> Axes:
        letters = Letters(x.ndim - 2)
        saved = letters.result if self.save_preactivation else None
        return Axes(
            (letters.images, letters.weights, "f", letters.result),
            (letters.result, saved),
            whole=letters.whole,
        )

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        window = self.options.window
        return {"xla": None, "pallas": why_unsupported(device, window, x, w, residual)}

    def call(self, device, x, w, *others) -> pallas_conv.ConvCall:
        """Returns the kernel's shapes and window."""
        return call_of(device, self.options.window, x.shape[:-1], x.dtype, w)

    def product(self, device, x, w, bias, residual) -> tuple[Work, float]:
        """Returns the matrix product of a 1 x 1 window, and microseconds of XLA's passes after it."""
        work = self.call(device, x, w).as_product(**self.streams(x, residual))
        return work, self._passes(x, bias, residual).time(work.m * work.n)

    def _passes(self, x, bias, residual) -> Passes:
        """Returns the passes over memory that XLA adds after its product, for a 1 x 1 window."""
        streams = self.streams(x, residual)
        if bias is not None or self.options.activation is not None:
            return Passes(
                bytes_of_element=streams["read_bytes"]
                + x.dtype.itemsize
                + streams["written_bytes"],
                evaluations=int(self.options.activation not in (None, *CHEAP_ACTIVATIONS)),
                slow=self.options.activation == "gelu_erf",
            )
        return Passes()

    def streams(self, x, residual) -> dict[str, int]:
        """Returns, per element of y, the epilogue's bytes read and written, and its activations."""
        return dict(
            read_bytes=0 if residual is None else residual.dtype.itemsize,
            written_bytes=x.dtype.itemsize * (1 + self.save_preactivation),
            activations=int(self.options.activation not in (None, *ARITHMETIC)),
        )

    def configs(
        self, implementation: str, device: dispatch.Device, x, w, bias, residual
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        call = call_of(device, self.options.window, x.shape[:-1], x.dtype, w)
        return pallas_conv.fitting(call, **self.streams(x, residual))

    def run(self, implementation, device, x, w, bias, residual, config=None) -> Results:
        options = self.options
        if implementation == "pallas":
            return pallas_conv.forward(
                x,
                w,
                bias,
                residual,
                window=options.window,
                activation=options.activation,
                save_preactivation=self.save_preactivation,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        convolve = functools.partial(reference, options, x, w, bias, residual)
        y = convolve(activation=options.activation)
        return y, convolve(activation=None) if self.save_preactivation else None

    batched = batched_images


@dataclass(frozen=True)
class ForwardOfTwo(Windowed):
    """Computes `Forward` of two arrays, joined along channels; a kernel reads both without a copy."""

    alone: Forward

    @property
    def name(self) -> str:
        return "conv dense forward of two arrays"

    def axes(self, first, second, w, bias, residual) -> Axes:
        axes = self.alone.axes(first, w, bias, residual)
        two = Letters(first.ndim - 2).two_images
        return axes._replace(operands=(*two, *axes.operands[1:]))

    def call(self, device, first, second, w, *others) -> pallas_conv.ConvCall:
        call = call_of(device, self.alone.options.window, first.shape[:-1], first.dtype, w)
        return replace(call, first_channels=first.shape[-1])

    def why_not(self, device, first, second, w, bias, residual) -> Mapping[str, str | None]:
        whole = jax.ShapeDtypeStruct((*first.shape[:-1], w.shape[-2]), first.dtype)
        return self.alone.why_not(device, whole, w, bias, residual)

    def product(self, device, first, second, w, bias, residual) -> tuple[Work, float]:
        whole = jax.ShapeDtypeStruct((*first.shape[:-1], w.shape[-2]), first.dtype)
        work, passes = self.alone.product(device, whole, w, bias, residual)
        concatenation = Passes(bytes_of_element=2 * first.dtype.itemsize)
        return work, passes + concatenation.time(work.m * work.k)

    def configs(
        self, implementation: str, device: dispatch.Device, first, second, w, bias, residual
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        streams = self.alone.streams(first, residual)
        return pallas_conv.fitting(self.call(device, first, second, w), **streams)

    def run(self, implementation, device, first, second, w, bias, residual, config=None) -> Results:
        x = (first, second) if implementation == "pallas" else jnp.concatenate((first, second), -1)
        return self.alone.run(implementation, device, x, w, bias, residual, config=config)

    batched = batched_images


@dataclass(frozen=True)
class ForwardWithStatistics(Windowed):
    """Computes (y, mean, variance) from x [B, *spatial, C], w [*kernel, C, F], bias and residual.

    Mean and variance [F] are those of y over all pixels, in float32.
    """

    options: Options

    @property
    def name(self) -> str:
        return "conv dense forward with statistics"

    @property
    def _alone(self) -> Forward:
        return Forward(self.options, save_preactivation=False)

    def axes(self, x, w, bias, residual) -> Axes:
        axes = self._alone.axes(x, w, bias, residual)
        return axes._replace(results=(axes.results[0], "f", "f"), whole=axes.whole + "b")

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        return self._alone.why_not(device, x, w, bias, residual)

    def call(self, device, x, w, *others) -> pallas_conv.ConvCall:
        return self._alone.call(device, x, w)

    def product(self, device, x, w, bias, residual) -> tuple[Work, float]:
        streams = self._alone.streams(x, residual)
        work = self.call(device, x, w).as_product(**streams)
        # XLA's statistics read the result once more; the kernel merges the statistics of its tiles.
        read = streams["read_bytes"] + x.dtype.itemsize * (1 + (residual is not None))
        return work, Passes(bytes_of_element=read).time(work.m * work.n)

    def configs(
        self, implementation: str, device: dispatch.Device, x, w, bias, residual
    ) -> Sequence[Hashable]:
        return self._alone.configs(implementation, device, x, w, bias, residual)

    def run(self, implementation, device, x, w, bias, residual, config=None) -> Results:
        if implementation == "pallas":
            return pallas_conv.forward_and_statistics(
                x,
                w,
                bias,
                residual,
                window=self.options.window,
                activation=self.options.activation,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        y, _ = self._alone.run(implementation, device, x, w, bias, residual)
        assert y is not None
        statistics = batch_norm_xla.batch_statistics(y, axis_name=None, axis_index_groups=None)
        return y, *statistics

    def batched(self, call, axis_size, in_batched, x, w, bias, residual) -> None:
        return None


def call_of(
    device: dispatch.Device, window: Window, sizes, dtype, w, *, flipped: bool = False
) -> pallas_conv.ConvCall:
    """Returns the shapes, window and dtype of a convolution of x [*sizes, C] with w [*kernel, C, F]."""
    channels, features = w.shape[-2:]
    return pallas_conv.ConvCall(
        sizes=tuple(sizes),
        channels=features if flipped else channels,
        features=channels if flipped else features,
        window=window,
        dtype=dtype,
        multiprocessors=device.multiprocessors,
        flipped=flipped,
    )


def reference(options: Options, x, w, bias=None, residual=None, activation=None) -> jax.Array:
    """Returns activation(conv(x, w) + bias + residual) by XLA: x [B, *spatial, C], w [*kernel, C, F]."""
    window = options.window
    if window.is_pointwise:
        rows, weights = x.reshape(-1, x.shape[-1]), w.reshape(w.shape[-2:])
        y = product("mc,cf->mf", rows, weights, out_dtype=x.dtype, precision=options.precision)
        y = y.reshape(*x.shape[:-1], w.shape[-1])
        return conv_xla.finish(y, bias, residual, activation=activation)
    return conv_xla.conv(
        x,
        w,
        bias,
        residual,
        strides=window.strides,
        padding=window.padding,
        input_dilation=(1,) * len(window.kernel),
        kernel_dilation=window.dilation,
        feature_group_count=1,
        activation=activation,
        precision=options.precision,
    )
