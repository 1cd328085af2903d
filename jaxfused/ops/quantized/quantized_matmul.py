"""quantized_matmul: validation, choice of implementation, gradient."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.linear.input_gradient import input_gradient
from jaxfused.ops.linear.linear import check_affine, check_residual, resolve_out_dtype
from jaxfused.ops.linear.linear_stages import ActivationGradient
from jaxfused.ops.linear.weight_gradient import sum_rows
from jaxfused.ops.quantized import quantized_matmul_cuda, quantized_matmul_xla
from jaxfused.runtime import cuda_choice, sharding
from jaxfused.runtime.checks import as_arrays, check_activation, check_floating, python_numbers
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.other_arrays import converted, is_of_qwix
from jaxfused.runtime.quantized_array import (
    FORMATS,
    Layout,
    QuantizedArray,
    as_operand,
    assembled,
    of_each_column,
)
from jaxfused.runtime.roofline import is_modelled
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from pallas_kernels.gemm import quantized as pallas_quantized
from pallas_kernels.gemm.quantized import Packed
from pallas_kernels.gemm.small_m import MAX_ROWS, MAX_ROWS_QUANTIZED


@python_numbers
def quantized_matmul(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    scale_gradient: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A linear layer with quantised weights and, optionally, quantised inputs.

    .. math::
        y = \text{activation}(x w + \text{bias}) + \text{residual}

    Float x: the weights are dequantised to x's dtype, or with one scale a column their scales multiply
    the sums, which are in float32. Quantised x: with one scale a row of x and a column of w (or one for
    all) the values themselves are multiplied, integers with exact sums and float8 with sums in float32;
    otherwise both are dequantised, to out_dtype if that has 16 bits and else to float32, except by
    kernels of groups, which multiply the values. Bias and residual are added in float32.

    The weights are frozen: gradients go to x (where it is float), bias and residual, and with
    `scale_gradient` to the scales of w, whose gradients are zero otherwise. They are of both modes and
    any order where no kernel runs. With implementation "pallas" nothing of the weights' size is made,
    forward or backward; for the gradient of x, codes and groups of 32 are dequantised once more.

    The kernels read weights of layout "columns": integers, float8, and codes of 16 numbers, two in a
    uint8, with scales in float32 or float8_e8m0fnu. They run with float x of 16 bits, and with quantised
    x of more than 64 rows. Results or a residual in float32 are left to XLA from 129 rows on, which
    copies the weights in x's dtype, unless `implementation="pallas"` is passed. `implementation="cuda"`
    takes any number of rows, on GPUs from Turing on.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla"); or a
        `QuantizedArray` of that shape with axis -1, as `quantize_rows` makes it.
      w: a `QuantizedArray` of shape [D, F] with axis -2, as `quantize` makes it. A `qwix.QArray` is
        taken too, as x also; `jaxfused.quantization.from_qwix` has the layout of the kernels.
      bias: [F], of any float dtype, as is residual.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      residual: [..., F], is added after the activation.
      out_dtype: of y; by default the residual's dtype, else x's, else float32.
      scale_gradient: whether w.scale gets its gradient, for float x. The forward then keeps x.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., F].

    Raises:
      ValueError: shapes or dtypes do not fit, D is so large that int32 could overflow, or the named
        implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[127.0, 0.0], [1.0, -127.0]])
      >>> jaxfused.quantized_matmul(x, jaxfused.quantize(w), activation="relu")
      Array([[129.,   0.]], dtype=float32)
      >>> jaxfused.quantized_matmul(jaxfused.quantize_rows(x), jaxfused.quantize(w)).shape
      (1, 2)

    Source: Dettmers et al., "LLM.int8()", 2022, https://arxiv.org/abs/2208.07339
    """
    op = "quantized_matmul"
    bias, residual = as_arrays(bias, residual)
    check_floating(op, dict(bias=bias, residual=residual))
    check_activation(op, activation)
    if scale_gradient:
        _check_scale_has_gradient(op, w)
    exponents = _exponents(w)
    w = _operand(op, "w", w, -2, "quantize(w)")
    if isinstance(x, QuantizedArray) or is_of_qwix(x):
        x = _operand(op, "x", x, -1, "quantize_rows(x)")
        values: Any = x.values
        array: Any = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    else:
        x = values = array = jnp.asarray(x)
        check_floating(op, dict(x=x))
    w_like: Any = jax.ShapeDtypeStruct(w.shape, jnp.float32)
    check_affine(op, array, "w", w_like, "bias", bias)
    check_residual(op, residual, array, w.shape[1])
    _check_sums_fit(op, x, w)
    if scale_gradient and isinstance(x, QuantizedArray):
        raise ValueError(
            f"{op}: scale_gradient=True was passed with a quantised x, of which the weights' scales get"
            " no gradient; pass x as floats, or leave scale_gradient out."
        )
    out_dtype = jnp.dtype(resolve_out_dtype(op, out_dtype, array, residual))
    if _takes_reference(op, implementation, array, x, w):
        if sharding.is_explicit(values, *jax.tree.leaves(w)):
            x, w = _with_whole_sums(x, w)
        return quantized_matmul_xla.matmul(
            x,
            w,
            bias,
            residual,
            activation=activation,
            out_dtype=out_dtype,
            scale_gradient=scale_gradient,
        )
    options = _Options(
        activation,
        out_dtype,
        w.layout,
        w.dtype,
        w.columns_alike,
        w.codebook,
        x_dtype=None if isinstance(x, QuantizedArray) else x.dtype,
        residual_dtype=None if residual is None else residual.dtype,
        scale_gradient=scale_gradient,
    )
    rows = sharding.leading_axes(values.ndim - 1)
    scale, zero_point = of_columns(w)
    if exponents is not None and exponents.shape == w.scale.shape:
        scale = of_each_column(exponents, w.shape[1])
    arrays = sharding.align(
        (
            values,
            _of_rows(x) if isinstance(x, QuantizedArray) else None,
            w.values,
            scale,
            zero_point,
            bias,
            residual,
        ),
        operand_axes=(rows + "d", rows + "h", options.letters, "gf", "gf", "f", rows + "f"),
        whole=_WHOLE,
    )
    device = dispatch.current_device(values)
    return _quantized_matmul(Runner(implementation, device), options, *arrays)


def _with_whole_sums(
    x: jax.Array | QuantizedArray, w: QuantizedArray
) -> tuple[jax.Array | QuantizedArray, QuantizedArray]:
    """Returns operands of which types do not split the axis that the product sums over."""

    def whole(part: jax.Array, letters: str) -> Any:
        return sharding.align((part,), operand_axes=(letters,), whole="d")[0]

    rows = sharding.leading_axes(len(x.shape) - 1)
    letters = "df" if w.layout == "rows" else "dd"
    return (
        jax.tree.map(lambda part: whole(part, rows + "d"), x),
        jax.tree.map(lambda part: whole(part, letters), w),
    )


def _takes_reference(
    op: str,
    implementation: str | None,
    array: Any,
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
) -> bool:
    """Returns whether plain jax.numpy runs a product of any shape; `array` is x as floats."""
    why_xla = why_no_kernel_reads(w)
    if why_xla is None and isinstance(x, QuantizedArray) and w.codebook is not None:
        why_xla = "its kernels multiply codes of a codebook by float x: pass x.dequantize()"
    if (
        why_xla is None
        and isinstance(x, QuantizedArray)
        and (x.dtype not in _OF_8_BITS or not x.is_scaled)
    ):
        why_xla = "its kernels take symmetric x of 8 bits: pass jaxfused.quantize_rows(x)"
    missing = cuda_choice.missing(op, implementation)
    if why_xla is not None:
        missing = dict.fromkeys(("pallas", "cuda"), why_xla)
    values = x.values if isinstance(x, QuantizedArray) else x
    device = dispatch.current_device(values)
    return takes_reference(op, implementation, device, array, why_xla=why_xla, missing=missing)


_OF_8_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")


def why_no_kernel_reads(w: QuantizedArray) -> str | None:
    """Returns why no kernel reads these weights, or None."""
    if w.layout != "columns":
        return (
            "its kernels read weights whose columns are contiguous: pass"
            " jaxfused.quantize(w, layout='columns')"
        )
    if w.offset is not None:
        return "its kernels read no offsets, which w has"
    if w.codebook is not None:
        return _why_no_kernel_reads_codes(w)
    if w.dtype not in FORMATS or w.values.dtype == jnp.int4:
        return f"its kernels read int4 in words, int8 and float8, and w.values is {w.values.dtype}"
    if w.zero_point is not None and (
        w.zero_point.dtype != jnp.int8 or w.dtype not in ("int8", "int4")
    ):
        return "its kernels read zero points of int8 beside int8 and int4"
    if w.scale.dtype != jnp.float32:
        return f"its kernels read scales of float32, and w.scale is {w.scale.dtype}"
    return None


def _why_no_kernel_reads_codes(w: QuantizedArray) -> str | None:
    """Returns why no kernel reads these codes of a codebook, or None."""
    if w.values.dtype != jnp.uint8 or w.dtype != "uint4":
        return f"its kernels read codes of 4 bits, two in a uint8, and w has {w.dtype} codes"
    if w.zero_point is not None:
        return "its kernels read no zero points of codes"
    if w.scale.dtype != jnp.float32:
        return f"its kernels read scales of float32 and E8M0, and w.scale is {w.scale.dtype}"
    return None


def _exponents(w: Any) -> jax.Array | None:
    """Returns the bytes of a codebook's E8M0 scales, which kernels read as they are, or None."""
    if not isinstance(w, QuantizedArray) or w.codebook is None:
        return None
    if getattr(w.scale, "dtype", None) != jnp.float8_e8m0fnu:
        return None
    return jax.lax.bitcast_convert_type(jnp.asarray(w.scale), jnp.uint8)


def of_columns(w: QuantizedArray) -> tuple[jax.Array, jax.Array | None]:
    """Returns the weights' scale and zero point as [G, F], repeated where columns share one."""
    zero_point, columns = w.zero_point, w.shape[1]
    return (
        of_each_column(w.scale, columns),
        None if zero_point is None else of_each_column(zero_point, columns),
    )


def _of_rows(x: QuantizedArray) -> jax.Array:
    """Returns the scales of quantised x as [..., G], repeated where rows share one."""
    return jnp.broadcast_to(x.scale, (*x.shape[:-1], x.groups))


def _check_scale_has_gradient(op: str, w: Any) -> None:
    """Checks that the dtype of the scales, and so of their gradient, has fractions and signs."""
    if isinstance(w, QuantizedArray) and jnp.dtype(w.scale.dtype).itemsize < 2:
        raise ValueError(
            f"{op}: scale_gradient=True was passed with a w.scale of {w.scale.dtype}, which cannot hold"
            " a gradient; pass w with scale.astype(jnp.float32)."
        )


def _operand(op: str, name: str, array: Any, axis: int, remedy: str) -> QuantizedArray:
    """Returns the operand in the form that kernels read, after checks."""
    if is_of_qwix(array):
        array = converted(op, array, axis, packs=False)
    if not isinstance(array, QuantizedArray):
        raise ValueError(
            f"{op}: {name} is a {type(array).__name__}, but it has to be a QuantizedArray;"
            f" pass jaxfused.{remedy}."
        )
    read = as_operand(op, name, array)
    if array.axis != axis:
        raise ValueError(
            f"{op}: {name} was quantised along axis {array.axis}, but the product sums over axis"
            f" {axis}; pass jaxfused.{remedy}."
        )
    return read


def _check_sums_fit(op: str, x: jax.Array | QuantizedArray, w: QuantizedArray) -> None:
    """Checks that int32 can hold the sums of integer products without wrapping around."""
    if not (isinstance(x, QuantizedArray) and quantized_matmul_xla.sums_integers(x, w)):
        return
    largest = 1
    for q in (x, w):
        largest *= 128 if q.zero_point is None else 255
    limit = (2**31 - 1) // largest
    if w.shape[0] > limit:
        raise ValueError(
            f"{op}: w has {w.shape[0]} input features, but sums of more than {limit} products of"
            " these integers may not fit into int32; pass x as floats, or split the features."
        )


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """Static arguments of a call."""

    activation: str | None
    out_dtype: Any
    layout: Layout
    w_dtype: str
    columns_alike: int
    """Number of adjacent columns of w that share a scale."""
    codebook: tuple[float, ...] | None
    """The codebook that w's values are codes of."""
    x_dtype: Any
    """Dtype of x; None if x is quantised."""
    residual_dtype: Any
    scale_gradient: bool

    @property
    def letters(self) -> str:
        """Letters of the stored values' axes; "k" counts words of several numbers."""
        return "fk" if self.w_dtype in ("int4", "uint4") else "fd"

    def forward(self, *, save_preactivation: bool) -> "_Layer":
        """Returns the stage of the forward."""
        return (_Layer if self.x_dtype else _LayerOfBoth)(self, save_preactivation)

    def weights(self, values: jax.Array, scale: jax.Array, zero_point: Any) -> QuantizedArray:
        """Returns the weights, assembled from their arrays; bytes are the exponents of E8M0."""
        if scale.dtype == jnp.uint8:
            scale = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu).astype(jnp.float32)
        return assembled(values, scale, zero_point, -2, self.layout, codebook=self.codebook)

    def packed(self, values: Any, scale: Any, zero_point: Any) -> Packed:
        """Returns the weights in the form that kernels read, of their arrays."""
        return Packed(values, scale, zero_point, self.codebook)


class _Residuals(NamedTuple):
    w: QuantizedArray
    bias: jax.Array | None
    preactivation: jax.Array | None
    """Preactivation x @ w + bias in x's dtype, or float32 if x is quantised; None without an
    activation."""
    x: jax.Array | None
    """Input x, if the scales get a gradient."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="quantized_matmul")
def _quantized_matmul(run: Runner, options: _Options, x, x_scale, *weights_bias_residual):
    layer = options.forward(save_preactivation=False)
    y, _ = run(layer, x, x_scale, *weights_bias_residual)
    return y


def _quantized_matmul_fwd(run: Runner, options: _Options, x, x_scale, *weights_bias_residual):
    layer = options.forward(save_preactivation=options.activation is not None)
    y, preactivation = run(layer, x, x_scale, *weights_bias_residual)
    *weights, bias, _ = weights_bias_residual
    kept = x if options.scale_gradient else None
    return y, _Residuals(options.weights(*weights), bias, preactivation, kept)


def _quantized_matmul_bwd(run: Runner, options: _Options, saved: _Residuals, dy):
    dtype, bias = options.x_dtype or jnp.float32, saved.bias
    if saved.preactivation is None:
        dz, dbias = dy.astype(dtype), None if bias is None else sum_rows(dy, bias.dtype)
    else:
        gradient = ActivationGradient(str(options.activation), bias is not None)
        dz, sums = run(gradient, dy, saved.preactivation)
        dbias = None if bias is None else sums.astype(bias.dtype)
    dscale = None
    if saved.x is not None:
        dscale = quantized_matmul_xla.gradient_of_scale(saved.x, saved.w, dz)
    return (
        None if options.x_dtype is None else _input_gradient(run, options, saved.w, dz),
        None,
        None,
        dscale,
        None,
        dbias,
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_quantized_matmul.defvjp(_quantized_matmul_fwd, _quantized_matmul_bwd)


def _input_gradient(run: Runner, options: _Options, w: QuantizedArray, dz: jax.Array) -> jax.Array:
    """Returns the gradient of x, given dz in x's dtype."""
    weights = options.packed(w.values, w.scale, w.zero_point)
    reason = pallas_quantized.why_gradient_unsupported(
        compute_capability=run.device.compute_capability,
        dtype=dz.dtype,
        k=w.shape[0],
        w=weights,
    )
    # A kernel needs all of F on one device. If devices may split F, XLA's product adds their parts.
    in_one_piece = sharding.is_in_one_piece(dz, w.values)
    if reason is None and in_one_piece and run.implementation in (None, "pallas"):
        (dx,) = run(_InputGradient(options, w.shape[0]), dz, w.values, w.scale, w.zero_point)
        return dx
    if in_one_piece and quantized_matmul_xla.is_scaled_last(dz, w):
        return quantized_matmul_xla.input_gradient(w, dz)
    wide, dz = quantized_matmul_xla.dequantized_again(w, dz)
    return input_gradient(run, dz, wide, dz.dtype, None)


# --- kernels --------------------------------------------------------------------------------------


def cuda_configs(
    device: dispatch.Device, x: Any, w: Packed, *, products: int
) -> list[quantized_matmul_cuda.Config]:
    """Returns the configs of the CUDA kernel, predicted fastest first."""
    return quantized_matmul_cuda.candidates(
        x.shape,
        w,
        products=products,
        compute_capability=device.compute_capability,
        multiprocessors=device.multiprocessors,
    )


def product_why_not(
    device: dispatch.Device,
    x: Any,
    w: Packed,
    *,
    out_dtype: Any,
    residual: Any = None,
    products: int = 1,
) -> Mapping[str, str | None]:
    """Returns why each implementation cannot multiply float x [M, D] and quantised weights."""
    facts: dict[str, Any] = dict(
        compute_capability=device.compute_capability,
        x_dtype=x.dtype,
        out_dtype=out_dtype,
        residual_dtype=None if residual is None else residual.dtype,
        x_shape=x.shape,
        w=w,
    )
    return {
        "pallas": pallas_quantized.why_unsupported(**facts, products=products),
        "xla": None,
        "cuda": quantized_matmul_cuda.why_unsupported(**facts),
    }


_TILED_ROWS, _FEW_TILED_ROWS, _LONG_SUMS = 8192, 512, 2048
"""Most rows of x for the kernel that dequantises tiles of the weights: with sums of at least
`_LONG_SUMS` features, and with shorter ones, where its epilogue shows. The more rows there are, the
smaller is the part of XLA's time in which it dequantises."""
_WHOLE = "dkgh"
"""Letters of the summed axis D and its groups of scales, which devices may not split."""
_PADDED_WEIGHTS = 1_000_000
"""Fewest weights for a kernel where columns are padded, for which XLA copies operands and result."""
_SMALLEST_RESULT = 2**17
"""Fewest elements of the result of two quantised matrices for a kernel."""


@dataclass(frozen=True)
class _Layer:
    """Computes (activation(x @ w + bias) + residual, x @ w + bias if saved) of x [M, D] and w [D, F]."""

    options: _Options
    save_preactivation: bool

    @property
    def name(self) -> str:
        return "quantized_matmul forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(
            (ROWS + "d", ROWS + "h", self.options.letters, "gf", "gf", "f", ROWS + "f"),
            (ROWS + "f", ROWS + "f" if self.save_preactivation else None),
            whole=_WHOLE,
        )

    def why_not(
        self, device, x, x_scale, values, scale, zero_point, bias, residual
    ) -> Mapping[str, str | None]:
        del x_scale, bias
        w = self.options.packed(values, scale, zero_point)
        return product_why_not(device, x, w, out_dtype=self.options.out_dtype, residual=residual)

    def estimate(
        self, device, able, x, x_scale, values, scale, zero_point, bias, residual
    ) -> Estimate:
        del x_scale, bias
        residual_dtype = None if residual is None else residual.dtype
        rows, features = x.shape
        tiles = _TILED_ROWS if features >= _LONG_SUMS else _FEW_TILED_ROWS
        if not pallas_quantized.multiplies_tiles(1, (self.options.out_dtype, residual_dtype)):
            tiles = MAX_ROWS_QUANTIZED
        if rows > tiles:
            return Rule(("xla",), "its faster product makes up for dequantising the weights first")
        if "pallas" in able and is_modelled(device):
            w = self.options.packed(values, scale, zero_point)
            if w.n % w.grain and w.n * features < _PADDED_WEIGHTS:
                return Rule(
                    ("xla",), "padding its operands takes longer than dequantising the weights"
                )
            return Rule(("pallas", "xla"), "XLA dequantises the weights first")
        fast = cuda_choice.is_fast_for_weights(x.shape[0], x.shape[1], values.shape[0])
        return cuda_choice.rule("quantized_matmul", device, fast=fast)

    def configs(
        self, implementation, device, x, x_scale, values, scale, zero_point, bias, residual
    ) -> Sequence[Hashable]:
        del x_scale, bias
        w = self.options.packed(values, scale, zero_point)
        if implementation == "cuda":
            return cuda_configs(device, x, w, products=1)
        if implementation != "pallas":
            return ()
        return pallas_quantized.candidates(
            x,
            w,
            written=self._written(x.dtype),
            read=() if residual is None else (residual,),
            multiprocessors=device.multiprocessors,
        )

    def _written(self, x_dtype: Any) -> tuple[Any, ...]:
        """Returns the dtypes of the results."""
        return (self.options.out_dtype, *((x_dtype,) if self.save_preactivation else ()))

    def run(self, implementation, device, x, x_scale, *others, config=None) -> Results:
        *weights, bias, residual = others
        if implementation == "xla":
            return quantized_matmul_xla.layer(
                self._x(x, x_scale),
                self.options.weights(*weights),
                bias,
                residual,
                **self._keywords,
            )
        w = self.options.packed(*weights)
        return self._in_kernel(implementation, device, x, x_scale, w, bias, residual, config)

    def _x(self, x, x_scale) -> jax.Array | QuantizedArray:
        """Returns x in the form that XLA's `layer` takes: floats, or a `QuantizedArray`."""
        del x_scale
        return x

    def _in_kernel(self, implementation, device, x, x_scale, w, bias, residual, config) -> Results:
        del x_scale
        if implementation == "cuda":
            config = config or cuda_configs(device, x, w, products=1)[0]
            return quantized_matmul_cuda.forward(
                x, w, bias, residual, **self._keywords, config=config
            )
        return pallas_quantized.forward(
            *(x, w, bias, residual),
            **self._keywords,
            multiprocessors=device.multiprocessors,
            config=config,
        )

    @property
    def _keywords(self) -> dict[str, Any]:
        return dict(
            activation=self.options.activation,
            save_preactivation=self.save_preactivation,
            out_dtype=self.options.out_dtype,
        )

    batched = batched_rows


@dataclass(frozen=True)
class _LayerOfBoth(_Layer):
    """Computes the results of `_Layer` for quantised x (W8A8), with a float32 preactivation."""

    @property
    def name(self) -> str:
        return "quantized_matmul forward of both"

    def why_not(
        self, device, x, x_scale, values, scale, zero_point, bias, residual
    ) -> Mapping[str, str | None]:
        del bias
        facts: dict[str, Any] = dict(
            compute_capability=device.compute_capability,
            out_dtype=self.options.out_dtype,
            residual_dtype=None if residual is None else residual.dtype,
            x=x,
            x_scale=x_scale,
            w=Packed(values, scale, zero_point),
        )
        # XLA's product is faster than CUDA's on the only GPU where both were timed.
        return {
            "pallas": pallas_quantized.why_both_unsupported(**facts),
            "xla": None,
            "cuda": quantized_matmul_cuda.why_both_unsupported(**facts),
        }

    def estimate(
        self, device, able, x, x_scale, values, scale, zero_point, bias, residual
    ) -> Estimate:
        del x_scale, bias
        if x.shape[0] <= MAX_ROWS:
            return Rule(("xla",), "a kernel's tile has many more rows than x")
        if "pallas" not in able or not is_modelled(device):
            return None
        if x.shape[0] * values.shape[0] < _SMALLEST_RESULT:
            return Rule(("xla",), "the result has few tiles")
        return Rule(
            ("pallas", "xla"), "8-bit products take half the time, with scales in the epilogue"
        )

    def _bytes(self, residual: Any) -> tuple[int, int]:
        """Returns the bytes per element that the epilogue reads, and those that it writes."""
        read = 0 if residual is None else residual.dtype.itemsize
        return read, self.options.out_dtype.itemsize + (4 if self.save_preactivation else 0)

    def configs(
        self, implementation, device, x, x_scale, values, scale, zero_point, bias, residual
    ) -> Sequence[Hashable]:
        del x_scale, bias
        if implementation != "pallas":
            return ()
        w, activations = Packed(values, scale, zero_point), int(self.options.activation is not None)
        work = pallas_quantized.both_work(x, w, *self._bytes(residual), activations)
        return pallas_quantized.both_candidates(w, work, device.multiprocessors)

    def _x(self, x, x_scale) -> QuantizedArray:
        return assembled(x, x_scale, None, -1, "rows")

    def _in_kernel(self, implementation, device, x, x_scale, w, bias, residual, config) -> Results:
        operands = (x, x_scale, w, bias, residual)
        if implementation == "cuda":
            return quantized_matmul_cuda.both_forward(*operands, **self._keywords)
        return pallas_quantized.both_forward(
            *operands,
            **self._keywords,
            multiprocessors=device.multiprocessors,
            columns_alike=self.options.columns_alike,
            config=config,
        )


@dataclass(frozen=True)
class _InputGradient:
    """Computes (dz @ w^T,) from dz [M, F] and w [D, F]."""

    options: _Options
    features: int
    """Number D of input features of w."""

    @property
    def name(self) -> str:
        return "quantized_matmul input gradient"

    def axes(self, *operands) -> Axes:
        del operands
        whole = "f" + _WHOLE
        return Axes((ROWS + "f", self.options.letters, "gf", "gf"), (ROWS + "d",), whole=whole)

    def why_not(self, device, dz, values, scale, zero_point) -> Mapping[str, str | None]:
        reason = pallas_quantized.why_gradient_unsupported(
            compute_capability=device.compute_capability,
            dtype=dz.dtype,
            k=self.features,
            w=Packed(values, scale, zero_point),
        )
        # XLA comes first: it dequantises the weights, which takes more memory but less time.
        return {"xla": None, "pallas": reason}

    def configs(self, implementation, device, dz, values, scale, zero_point) -> Sequence[Hashable]:
        del values, scale, zero_point
        if implementation != "pallas":
            return ()
        return pallas_quantized.gradient_candidates(dz, self.features, device.multiprocessors)

    def run(self, implementation, device, dz, values, scale, zero_point, config=None) -> Results:
        if implementation == "pallas":
            dx = pallas_quantized.input_gradient(
                dz,
                Packed(values, scale, zero_point),
                self.features,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        else:
            w = self.options.weights(values, scale, zero_point)
            dx = quantized_matmul_xla.input_gradient(w, dz)
        return (dx,)

    batched = batched_rows
