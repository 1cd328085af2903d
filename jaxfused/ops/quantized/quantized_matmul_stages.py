"""Kernel calls of quantized_matmul, forward and gradient, and the choice of implementation."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.quantized import few_rows_cuda, quantized_matmul_cuda, quantized_matmul_xla
from jaxfused.runtime import cuda_choice, product_regimes
from jaxfused.runtime.estimate import Estimate, Rule, always
from jaxfused.runtime.quantized_array import (
    Layout,
    QuantizedArray,
    assembled,
)
from jaxfused.runtime.roofline import is_modelled
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows
from pallas_kernels.gemm import quantized as pallas_quantized
from pallas_kernels.gemm.quantized import Packed
from pallas_kernels.gemm.small_m import MAX_ROWS, MAX_ROWS_QUANTIZED


@dataclass(frozen=True)
class Options:
    """Static arguments of a call of `quantized_matmul`."""

    activation: str | None
    out_dtype: Any
    layout: Layout
    w_dtype: str
    columns_alike: int
    """Number of adjacent columns of w that share a scale."""
    codebook: tuple[float, ...] | None
    """The floats that w's values are indices into; None if w holds integers or float8."""
    x_dtype: Any
    """Dtype of x; None if x is quantised."""
    residual_dtype: Any
    scale_gradient: bool

    @property
    def letters(self) -> str:
        """Letters of the stored weights' axes: "k" counts packed words, "d" single values."""
        return "fk" if self.w_dtype in ("int4", "uint4") else "fd"

    def forward(self, *, save_preactivation: bool) -> "Layer":
        """Returns the forward's kernel call, for float x or, if x is quantised, for W8A8."""
        return (Layer if self.x_dtype else LayerOfBoth)(self, save_preactivation)

    def weights(self, values: jax.Array, scale: jax.Array, zero_point: Any) -> QuantizedArray:
        """Returns the weights as a QuantizedArray; uint8 scales are E8M0 exponents."""
        if scale.dtype == jnp.uint8:
            scale = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu).astype(jnp.float32)
        return assembled(values, scale, zero_point, -2, self.layout, codebook=self.codebook)

    def packed(self, values: Any, scale: Any, zero_point: Any) -> Packed:
        """Returns the weights in the form that kernels read."""
        return Packed(values, scale, zero_point, self.codebook)


def cuda_configs(
    device: dispatch.Device, x: Any, w: Packed, *, products: int
) -> list[quantized_matmul_cuda.Config | few_rows_cuda.Config]:
    """Returns the configs of the CUDA kernels, predicted fastest first."""
    reason = few_rows_cuda.why_unsupported(device.compute_capability, x.shape, w)
    configs: list[Any] = [few_rows_cuda.Config()] if reason is None else []
    if w.codebook is not None:
        return configs
    return configs + quantized_matmul_cuda.candidates(
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
"""Rows of x up to which a kernel that dequantises tiles of the weights beats XLA: `_TILED_ROWS` with at
least `_LONG_SUMS` input features, `_FEW_TILED_ROWS` with fewer, where its epilogue takes longer than the
copies. With more rows, XLA's dequantisation is a smaller part of its time."""
WHOLE = "dkgh"
"""Letters of the summed axis D and its groups of scales, which devices may not split."""
_PADDED_WEIGHTS = 1_000_000
"""Number of weights from which a kernel saves more time than the copies take that pad its operands."""
_SMALLEST_RESULT = 2**18
"""Number of elements of a W8A8 result from which a kernel is chosen instead of XLA."""


@dataclass(frozen=True)
class Layer:
    """Computes (activation(x @ w + bias) + residual, x @ w + bias if saved) of x [M, D] and w [D, F]."""

    options: Options
    save_preactivation: bool

    @property
    def name(self) -> str:
        return "quantized_matmul forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(
            (ROWS + "d", ROWS + "h", self.options.letters, "gf", "gf", "f", ROWS + "f"),
            (ROWS + "f", ROWS + "f" if self.save_preactivation else None),
            whole=WHOLE,
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
            if "cuda" in able and w.codebook is not None and features >= _LONG_SUMS:
                return Rule(("cuda", "pallas", "xla"), "its warps look up codes without waiting")
            return Rule(("pallas", "xla"), "XLA dequantises the weights first")
        fast = cuda_choice.is_fast_for_weights(x.shape[0], x.shape[1], values.shape[0])
        return cuda_choice.rule(device, fast=fast)

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
class LayerOfBoth(Layer):
    """Computes the results of `Layer` for quantised x (W8A8), with a float32 preactivation."""

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
        is_short = x.shape[1] <= product_regimes.SPLIT_SUM
        if is_short and x.shape[0] * values.shape[0] < _SMALLEST_RESULT:
            return Rule(("xla",), "the result has few tiles of short sums")
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
class InputGradient:
    """Computes (dz @ w^T,) from dz [M, F] and w [D, F]."""

    options: Options
    features: int
    """Number D of input features of w."""

    @property
    def name(self) -> str:
        return "quantized_matmul input gradient"

    def axes(self, *operands) -> Axes:
        del operands
        whole = "f" + WHOLE
        return Axes((ROWS + "f", self.options.letters, "gf", "gf"), (ROWS + "d",), whole=whole)

    def why_not(self, device, dz, values, scale, zero_point) -> Mapping[str, str | None]:
        reason = pallas_quantized.why_gradient_unsupported(
            compute_capability=device.compute_capability,
            dtype=dz.dtype,
            k=self.features,
            w=Packed(values, scale, zero_point),
        )
        return {"xla": None, "pallas": reason}

    estimate = always(("xla",), "it dequantises the weights, which takes more memory but less time")

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
