"""quantized_conv: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.conv import conv_padding, dense_conv, dense_conv_forward, quantized_conv_xla
from jaxfused.ops.conv.batched_images import batched_images
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.activation import ARITHMETIC
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import LeftToXla, takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.quantized_array import QuantizedArray, as_operand, assembled
from jaxfused.runtime.roofline import is_modelled
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.scale_groups import of_each_column
from jaxfused.runtime.shapes import why_symbolic
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv.window import Window


@python_numbers
def quantized_conv(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None = None,
    *,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = 1,
    padding: conv_padding.Padding = "SAME",
    padding_mode: str = "zeros",
    input_dilation: int | Sequence[int] = 1,
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Convolution with quantised weights and, optionally, a quantised input.

    .. math::
        y = \text{activation}(\operatorname{conv}(x, w) + \text{bias} + \text{residual})

    Float x: the weights are dequantised to x's dtype, and `jaxfused.conv` takes both. Quantised x: the
    kernels convolve integers with exact sums, as does XLA on a CPU. Where a GPU has no kernel and
    out_dtype has 16 bits, both are dequantised to it, and `jaxfused.conv` takes them. Otherwise XLA
    convolves in float32: the stored numbers, if x has one scale (for each image or for all) and w one
    for each output channel, else the dequantised ones.

    The weights are frozen: gradients go to x, where it is float, to bias and to residual.

    Args:
      x: [B, *spatial, I], float32, bfloat16 or float16; or a `QuantizedArray` of that shape and axis -1,
        with a scale [1, ..., 1] or [B, 1, ..., 1]: the kernels read int8 with one scale.
      w: a `QuantizedArray` of shape [weights of the window * I / feature_group_count, O] with axis -2,
        as `quantize(kernel.reshape(-1, O), layout="rows")` makes it of Flax's [*kernel, I / groups,
        O]. Layout "columns" is transposed in each call.
      bias: [O], of any float dtype, as is residual.
      kernel_size: of each spatial axis, or of all.
      out_dtype: of y; by default x's, else float32.

    The other arguments are those of `jaxfused.conv`.

    Returns:
      y, [B, *spatial', O].

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> w = jaxfused.quantize(jnp.array([[1.0], [127.0], [1.0]]))  # a window of 3, 1 channel
      >>> x = jaxfused.quantize(jnp.array([[[0.0], [1.0], [127.0], [0.0]]]), axis=-1, per_tensor=True)
      >>> jaxfused.quantized_conv(x, w, kernel_size=3).ravel().round().astype(int).tolist()
      [1, 254, 16130, 127]

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2017, https://arxiv.org/abs/1712.05877
    """
    op = "quantized_conv"
    bias, residual = as_arrays(bias, residual)
    check_floating(op, dict(bias=bias, residual=residual))
    check_activation(op, activation)
    x, w, array, size = _operands(op, x, w, kernel_size, feature_group_count)
    if sharding.is_explicit(*jax.tree.leaves((x, w))):
        x = jax.tree.map(lambda part: resharding.split_by_batch((part,))[0], x)
        w = jax.tree.map(lambda part: resharding.split_by_batch((), (part,))[0], w)
    check_shape(op, "bias", bias, w.shape[-1:], f"w has {w.shape[-1]} output channels")
    geometry = conv_padding.geometry(
        op,
        array,
        size,
        strides=strides,
        padding=padding,
        padding_mode=padding_mode,
        input_dilation=input_dilation,
        kernel_dilation=kernel_dilation,
        feature_group_count=feature_group_count,
    )
    out_dtype = jnp.dtype(out_dtype or (jnp.float32 if isinstance(x, QuantizedArray) else x.dtype))
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"{op}: out_dtype is {out_dtype}, but the result is of floats; pass one.")

    def convolved(x: jax.Array) -> jax.Array:
        kernel = w.dequantize(x.dtype).reshape(*size, -1, w.shape[-1])
        y = conv_operator.convolved(
            op,
            x,
            jax.lax.stop_gradient(kernel),
            bias,
            activation=activation,
            residual=residual,
            implementation=implementation,
            options=geometry,
        ).y
        return y.astype(out_dtype)

    if not isinstance(x, QuantizedArray):
        return convolved(x)
    options: dict[str, Any] = dict(kernel_size=size, activation=activation, **geometry)
    device = dispatch.current_device(x.values)

    def run(residual: jax.Array | None) -> jax.Array:
        keywords: dict[str, Any] = dict(out_dtype=out_dtype, with_integers=_integers_in_xla(device))
        return quantized_conv_xla.conv(x, w, bias, residual, **keywords, **options)

    if residual is not None:
        shape = jax.eval_shape(run, None).shape
        check_shape(op, "residual", residual, shape, f"the result has shape {shape}")
    kernel_like = jax.ShapeDtypeStruct((*size, *_matrix(w, size)), jnp.int8)
    window = dense_conv.window_of(array, kernel_like, **geometry)
    missing = _missing(op, device, window, x, w, size, out_dtype, residual)
    runner = Runner(implementation, device)
    left = None
    if "pallas" not in missing:
        assert isinstance(window, Window)
        constants = _Options(window, activation, out_dtype, x.ndim == 3)
        left = functools.partial(
            _left_to_xla, runner, constants, x.values, kernel_like, bias, residual
        )
    if takes_reference(op, implementation, device, array, missing=missing, why_xla=left):
        if device.platform == "gpu" and out_dtype.itemsize == 2:
            return convolved(x.dequantize(out_dtype))
        return run(residual)
    assert isinstance(window, Window)
    scale = x.scale.reshape(()) * of_each_column(w.scale, w.shape[1])[0]
    scale = scale.astype(jnp.float32)
    weights = w.unpacked().reshape(*size, *_matrix(w, size))
    constants = _Options(window, activation, out_dtype, x.ndim == 3)
    return _quantized_conv(runner, constants, x.values, weights, scale, bias, residual)


def _missing(
    op: str,
    device: dispatch.Device,
    window: Window | str,
    x: QuantizedArray,
    w: QuantizedArray,
    size: tuple[int, ...],
    out_dtype: Any,
    residual: jax.Array | None,
) -> dict[str, str]:
    """Returns, for each implementation that has no kernel for these values, the reason."""
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    reason = _why_unsupported(device, window, x, w, size, out_dtype, residual)
    if reason is not None:
        missing["pallas"] = reason
    if sharding.is_explicit(x.values) or sharding.is_explicit(w.values):
        missing["pallas"] = (
            "JAX's own convolution refuses channels that are split under Explicit axes"
        )
    return missing


def _integers_in_xla(device: dispatch.Device) -> bool:
    """Returns whether XLA convolves integers; for GPUs it compiles only some windows and channels."""
    return device.platform == "cpu"


def _left_to_xla(
    run: Runner, options: "_Options", x: Any, w: Any, bias: Any, residual: Any
) -> LeftToXla | None:
    """Returns why XLA runs a call that names no implementation, or None if the kernel may be faster."""
    x, residual = sharding.eval_shape(
        lambda *arrays: tuple(map(dense_conv_forward.images, arrays)), x, residual
    )
    w = jax.ShapeDtypeStruct((*options.window.kernel, *w.shape[-2:]), w.dtype)
    why = _why_xla(options.window, x, w)
    if why is None:
        return None
    scale = jax.ShapeDtypeStruct(w.shape[-1:], jnp.float32)
    return run.left_to_xla(why, [(_Forward(options), (x, w, scale, bias, residual))])


def _why_xla(window: Window, x: Any, w: Any) -> str | None:
    """Returns why XLA runs a call that names no implementation, or None if the kernel is faster."""
    channels, features = w.shape[-2:]
    pixels, whole = dense_conv.pixels_of(window, x), dense_conv.TILE_FEATURES
    simple = set(window.kernel) == {_WINDOW} and set(window.strides) == set(window.dilation) == {1}
    if not simple or channels % whole or features % whole or pixels < _LEAST_PIXELS:
        return (
            f"the kernel was timed with windows of 3 x 3 and 3 x 3 x 3, multiples of {whole} channels"
            f" and at least {_LEAST_PIXELS} pixels, and this is a window of"
            f" {' x '.join(map(str, window.kernel))} with {channels} and {features} channels and"
            f" {pixels} pixels"
        )
    fewest = min(channels, features)
    if fewest < 2 * whole:
        return (
            f"with fewer than {2 * whole} channels the kernel takes longer than a convolution of"
            f" bfloat16, and there are {fewest}"
        )
    return None


_WINDOW, _LEAST_PIXELS = 3, 2**14
"""Window size along each axis, and fewest pixels of y, at which the kernel was timed against XLA."""


def _matrix(w: QuantizedArray, size: tuple[int, ...]) -> tuple[int, int]:
    """Returns the input channels of a group, and the output channels, of the weight matrix w."""
    return w.shape[0] // math.prod(size), w.shape[1]


def _operands(
    op: str, x: Any, w: Any, kernel_size: int | Sequence[int], groups: int
) -> tuple[Any, QuantizedArray, Any, tuple[int, ...]]:
    """Returns, checked, x, w, a float32 `jax.ShapeDtypeStruct` like x, and the window's size."""
    if not isinstance(w, QuantizedArray) or w.axis != -2 or w.ndim != 2:
        given = (
            f"axis {w.axis} and shape {w.shape}"
            if isinstance(w, QuantizedArray)
            else type(w).__name__
        )
        raise ValueError(
            f"{op}: w has to be a QuantizedArray of shape [weights of the window * channels, features]"
            f" and axis -2, but it has {given}; pass"
            " jaxfused.quantize(kernel.reshape(-1, features), layout='rows')."
        )
    w = as_operand(op, "w", w)
    if isinstance(x, QuantizedArray):
        x = as_operand(op, "x", x)
        batch = (1, *((1,) * (x.ndim - 1)))
        if x.axis != -1 or x.scale.shape not in (batch, (x.shape[0], *batch[1:])):
            raise ValueError(
                f"{op}: x has axis {x.axis} and a scale of shape {x.scale.shape}, but an output sums"
                f" over pixels and channels; pass one with axis -1 and a scale of shape {batch} or"
                f" {(x.shape[0], *batch[1:])}."
            )
        if x.zero_point is not None or x.offset is not None:
            added = "offsets" if x.zero_point is None else "zero points"
            raise ValueError(
                f"{op}: x has {added}, but the padding is of zeros that stand for 0; pass a"
                " symmetric one, such as jaxfused.quantize(x, axis=-1, per_tensor=True)."
            )
    else:
        x = jnp.asarray(x)
        check_floating(op, dict(x=x))
    array = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    size = (
        (kernel_size,) * (len(x.shape) - 2) if isinstance(kernel_size, int) else tuple(kernel_size)
    )
    taps = math.prod(size)
    if len(x.shape) < 3 or len(size) != len(x.shape) - 2 or taps < 1 or min(size) < 1:
        raise ValueError(
            f"{op}: kernel_size is {kernel_size!r}, but x has shape {x.shape}; pass x of shape [batch,"
            " ..., channels], and a positive size for each spatial axis."
        )
    channels, features = x.shape[-1], w.shape[1]
    if groups < 1 or channels % groups or features % groups:
        raise ValueError(
            f"{op}: feature_group_count is {groups}, but it must divide the {channels} input and the"
            f" {features} output channels; pass a common divisor."
        )
    if w.shape[0] != taps * channels // groups:
        raise ValueError(
            f"{op}: w has shape {w.shape}, but windows of {taps} weights over {channels} channels in"
            f" {groups} groups have {taps * channels // groups} numbers; pass w with that many rows."
        )
    integers = isinstance(x, QuantizedArray) and {x.dtype, w.dtype} <= {"int8", "int4"}
    limit = (2**31 - 1) // 128**2
    if integers and w.shape[0] > limit:
        raise ValueError(
            f"{op}: an output sums {w.shape[0]} products, but more than {limit} of these integers may"
            " not fit into int32; pass x as floats, or split the channels."
        )
    return x, w, array, size


def _why_unsupported(
    device: dispatch.Device,
    window: Window | str,
    x: QuantizedArray,
    w: QuantizedArray,
    size: tuple[int, ...],
    out_dtype: Any,
    residual: jax.Array | None,
) -> str | None:
    if isinstance(window, str):
        return f"the Pallas kernels of quantized_conv are dense, and {window}"
    if x.scale.size != 1 or w.groups != 1 or not w.is_scaled:
        return (
            "it takes one scale for all of x, and one for each output channel without zero points,"
            " offsets and codebooks"
        )
    channels, features = _matrix(w, size)
    return why_symbolic(x.values) or pallas_conv.why_quantized_unsupported(
        compute_capability=device.compute_capability,
        dtypes={"x": x.values.dtype, "w": jnp.int8 if w.dtype == "int4" else w.values.dtype},
        out_dtypes={
            "the result": out_dtype,
            "residual": None if residual is None else residual.dtype,
        },
        channels={"x": channels, "the result": features},
        sizes=x.shape[:-1],
        window=window,
    )


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    window: Window
    activation: str | None
    out_dtype: Any
    is_line: bool
    """True if x has one spatial axis; kernels get it as images of one row."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="quantized_conv", once=False)
def _quantized_conv(run: Runner, options: _Options, x, w, scale, bias, residual):
    letters = dense_conv_forward.Letters(len(options.window.kernel))
    operands = sharding.align(
        (
            dense_conv_forward.images(x),
            w.reshape(*options.window.kernel, *w.shape[-2:]),
            scale,
            bias,
            dense_conv_forward.images(residual),
        ),
        operand_axes=(letters.images, letters.weights, "f", "f", letters.result),
        whole=letters.whole,
    )
    (y,) = run(_Forward(options), *operands)
    return y[:, 0] if options.is_line else y


def _quantized_conv_fwd(run: Runner, options: _Options, x, w, scale, bias, residual):
    y = _quantized_conv(run, options, x, w, scale, bias, residual)
    return y, (x, w, scale, bias, residual)


def _quantized_conv_bwd(run: Runner, options: _Options, saved, dy):
    """Returns the gradients of bias and residual; XLA recomputes the activation's input."""
    x, w, scale, bias, residual = saved

    def again(bias, residual):
        y = _by_reference(options, x, w, scale, bias, residual, with_integers=False)
        return y[:, 0] if options.is_line else y

    dbias, dresidual = jax.vjp(again, bias, residual)[1](dy)
    return None, None, None, dbias, dresidual


_quantized_conv.defvjp(_quantized_conv_fwd, _quantized_conv_bwd)


def _by_reference(
    options: _Options,
    x,
    w,
    scale,
    bias,
    residual,
    *,
    with_integers: bool,
    floats: Any = jnp.float32,
) -> jax.Array:
    window = options.window
    return quantized_conv_xla.conv(
        assembled(
            dense_conv_forward.images(x),
            jnp.ones((1,) * (len(window.kernel) + 2)),
            None,
            -1,
            "rows",
        ),
        assembled(w.reshape(-1, w.shape[-1]), scale[None], None, -2, "rows"),
        bias,
        dense_conv_forward.images(residual),
        kernel_size=window.kernel,
        activation=options.activation,
        out_dtype=options.out_dtype,
        with_integers=with_integers,
        floats=floats,
        strides=window.strides,
        padding=window.padding,
        input_dilation=(1,) * len(window.kernel),
        kernel_dilation=window.dilation,
        feature_group_count=1,
    )


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """Computes (activation(scale * conv(x, w) + bias + residual),) of int8 x [B, *spatial, C] and w."""

    options: _Options

    @property
    def name(self) -> str:
        return "quantized_conv forward"

    def axes(self, x, w, scale, bias, residual) -> Axes:
        letters = dense_conv_forward.Letters(x.ndim - 2)
        return Axes(
            (letters.images, letters.weights, "f", "f", letters.result),
            (letters.result,),
            whole=letters.whole,
        )

    def why_not(self, device, x, w, scale, bias, residual) -> Mapping[str, str | None]:
        out = self.options.out_dtype
        reason = pallas_conv.why_quantized_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"x": x.dtype, "w": w.dtype},
            out_dtypes={
                "the result": out,
                "residual": None if residual is None else residual.dtype,
            },
            channels={"x": w.shape[-2], "the result": w.shape[-1]},
            sizes=x.shape[:-1],
            window=self.options.window,
        )
        return {"xla": None, "pallas": reason}

    def estimate(self, device, able: Collection[str], *operands) -> Estimate:
        if "pallas" not in able or not is_modelled(device):
            return None
        return Rule(("pallas",), "XLA convolves the integers in float32")

    def configs(
        self, implementation: str, device: dispatch.Device, x, w, scale, bias, residual
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        call = dense_conv_forward.call_of(device, self.options.window, x.shape[:-1], x.dtype, w)
        return pallas_conv.fitting(
            call,
            read_bytes=0 if residual is None else residual.dtype.itemsize,
            written_bytes=self.options.out_dtype.itemsize,
            activations=int(self.options.activation not in (None, *ARITHMETIC)),
        )

    def run(self, implementation, device, x, w, scale, bias, residual, config=None) -> Results:
        options = self.options
        if implementation == "pallas":
            y = pallas_conv.quantized_forward(
                x,
                w,
                scale,
                bias,
                residual,
                window=options.window,
                activation=options.activation,
                out_dtype=options.out_dtype,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (y,)
        # For a 16-bit result on GPUs, XLA convolves in bfloat16, which holds the 8-bit numbers exactly.
        narrow = device.platform == "gpu" and options.out_dtype.itemsize == 2
        keywords: dict[str, Any] = dict(with_integers=_integers_in_xla(device))
        keywords |= dict(floats=jnp.bfloat16) if narrow else {}
        return (_by_reference(options, x, w, scale, bias, residual, **keywords),)

    batched = batched_images
