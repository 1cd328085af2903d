"""Operations of linear, and limits and costs of products that other operators share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.linear import linear_cuda, linear_xla
from jaxfused.runtime import cuda_choice, cuda_library, product_regimes
from jaxfused.runtime.activation import ARITHMETIC
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.product_stage import ProductStage
from jaxfused.runtime.product_xla import sum_written_rows
from jaxfused.runtime.roofline import Passes, is_modelled
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows
from pallas_kernels.gemm import linear as pallas_linear
from pallas_kernels.gemm import matmul as pallas_matmul
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul_config import ACCUMULATOR_ELEMENTS


def allows_tf32(precision: Any) -> bool:
    """Returns whether `precision` lets a product round float32 operands to tf32, XLA's default."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    preset = jax.lax.DotAlgorithmPreset
    if isinstance(precision, str) and precision in preset.__members__:
        precision = preset[precision]
    if isinstance(precision, preset | jax.lax.DotAlgorithm):
        return precision in (preset.DEFAULT, preset.TF32_TF32_F32)
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    lowest = (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH)
    return all(p is None or jax.lax.Precision(p) in lowest for p in pair)


@dataclass(frozen=True)
class Layer(ProductStage):
    """Computes (activation(z) + residual, z or None if it is not saved), where z = x @ w + bias.

    x is [M, D], w [D, F]. `mlp` and `gated_mlp` use this class for their layers too.
    """

    name: str
    activation: str | None
    out_dtype: Any
    save_preactivation: bool
    precision: Any

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(
            (ROWS + "d", "df", "f", ROWS + "f"),
            (ROWS + "f", ROWS + "f" if self.save_preactivation else None),
            parts="d",
        )

    def on_parts(self, names, call, x, w, bias, residual) -> Results:
        """Multiplies a device's shards of x's features D and of w's rows; adds the devices' products.

        Bias, activation and residual are applied to the sum.
        """
        product = Layer(self.name, None, x.dtype, False, self.precision)
        z, _ = call(product, x, w, None, None)
        return linear_xla.finish(
            jax.lax.psum(z, tuple(names)),
            bias,
            residual,
            activation=self.activation,
            out_dtype=self.out_dtype,
            save_preactivation=self.save_preactivation,
        )

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        del bias
        return product_why_not(
            device,
            self.precision,
            {"x": x, "residual": residual},
            {"x": x.shape[1], "the result": w.shape[1]},
            out_dtype=self.out_dtype,
        )

    def estimate(self, device, able, x, w, bias, residual) -> Estimate:
        work = self.work(x, w, bias, residual)
        # cuBLASLt was measured only for products of at least one tile per SM.
        large = work.m * work.n >= device.multiprocessors * ACCUMULATOR_ELEMENTS
        in_cublaslt = (
            "cuda" in able
            and large
            and linear_cuda.in_one_product(
                dtype=x.dtype,
                w_shape=w.shape,
                activation=self.activation,
                residual_dtype=None if residual is None else residual.dtype,
                out_dtype=self.out_dtype,
            )
        )
        passes = self._passes(x, bias, residual).time(work.m * work.n)
        return product_regimes.estimate(device, work, passes, in_cublaslt=in_cublaslt)

    def product(self, x, w, bias, residual) -> FusedProduct:
        return pallas_linear.layer(x, w, bias, residual, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return dict(
            activation=self.activation,
            out_dtype=self.out_dtype,
            save_preactivation=self.save_preactivation,
        )

    def _passes(self, x, bias, residual) -> Passes:
        """Returns the memory passes in which XLA adds bias, activation and residual to its product.

        There is none if XLA's product computes the whole epilogue.
        """
        in_product = linear_xla.sums_in_product(x, bias, residual, self.out_dtype)
        is_plain = self.activation is None and not self.save_preactivation
        if is_plain and (in_product or (bias is None and residual is None)):
            return Passes()
        only_relu = self.activation == "relu" and residual is None and not self.save_preactivation
        if only_relu and in_product:
            return Passes()  # XLA's product has an epilogue for relu.
        streams = (x.dtype, self.out_dtype, *(() if residual is None else (residual.dtype,)))
        return Passes(
            bytes_of_element=sum(jnp.dtype(dtype).itemsize for dtype in streams),
            evaluations=int(self.activation not in (None, *CHEAP_ACTIVATIONS)),
            slow=self.activation == "gelu_erf",
        )

    def run(self, implementation, device, x, w, bias, residual, config=None) -> Results:
        if implementation == "pallas":
            return self.in_pallas(device, x, w, bias, residual, config=config)
        layer = linear_cuda.forward if implementation == "cuda" else linear_xla.layer
        operands = (x, w.astype(x.dtype), bias, residual)
        return layer(*operands, **self._options, precision=self.precision)

    results = ("y", "preactivation")
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class ActivationGradient:
    """Computes dz [M, F], and dz summed over rows (float32 [F]), from dy and preactivation z [M, F]."""

    activation: str
    has_bias: bool

    @property
    def name(self) -> str:
        return "linear activation gradient"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "f", ROWS + "f"), (ROWS + "f", "f" if self.has_bias else None))

    def why_not(self, device, dy, z) -> Mapping[str, str | None]:
        del dy
        reason = linear_cuda.why_unsupported(
            compute_capability=device.compute_capability, dtype=z.dtype
        )
        return {"cuda": reason, "xla": None}

    def estimate(self, device, able, dy, z) -> Estimate:
        del able, dy
        if not is_modelled(device):
            return None
        if not self.has_bias:
            return Rule(
                ("xla",), "XLA evaluates the derivative as fast, and there is nothing to sum"
            )
        misaligned = z.shape[1] * z.dtype.itemsize % cuda_library.VECTOR_BYTES
        # XLA computes relu's derivative in the kernel that sums it.
        least = cuda_choice.LEAST_VALUES * (2 if self.activation == "relu" else 1)
        if misaligned or z.size < least:
            return Rule(("xla",), "rows are misaligned, or XLA starts sooner")
        return Rule(("cuda",), "CUDA C evaluates and sums faster than XLA")

    def run(self, implementation, device, dy, z) -> Results:
        del device
        if implementation == "cuda":
            return linear_cuda.activation_gradient(
                dy, z, activation=self.activation, sum_rows=self.has_bias
            )
        dz = linear_xla.activation_gradient(self.activation, dy, z, has_bias=self.has_bias)
        narrow = dz.astype(z.dtype)
        return narrow, sum_written_rows(
            narrow, of_relu=self.activation == "relu"
        ) if self.has_bias else None

    batched = batched_rows
    xla_takes_rows = True


def product_why_not(
    device: dispatch.Device,
    precision: Any,
    operands: Mapping[str, jax.Array | None],
    features: Mapping[str, int],
    *,
    out_dtype: Any = None,
) -> dict[str, str | None]:
    """Returns why each implementation cannot run a product with an epilogue, or None if it can.

    Args:
      device: the device that it would run on.
      precision: the product's precision.
      operands: operands whose dtypes matter, by name; "x" is multiplied.
      features: sizes of the product's summed and resulting axes, except rows.
      out_dtype: the result's dtype.
    """
    dtypes = {name: None if a is None else a.dtype for name, a in operands.items()}
    return {
        "pallas": pallas_matmul.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={**dtypes, "the result": out_dtype},
            features=dict(features),
            allows_tf32=allows_tf32(precision),
        ),
        "cuda": linear_cuda.why_unsupported(
            compute_capability=device.compute_capability, dtype=dtypes["x"]
        ),
        "xla": None,
    }


CHEAP_ACTIVATIONS = (*ARITHMETIC, "quick_gelu", "silu", "sigmoid")
"""Activations that XLA evaluates in less time than it takes to read their argument from memory."""
