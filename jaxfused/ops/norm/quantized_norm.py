"""layer_norm and rms_norm with a result that is quantised, row by row, in the pass that normalises.

The next product then reads a quantised operand. The public functions of `jaxfused.ops.norm.layer_norm`
call this file if `quantize_rows` is given.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.norm import layer_norm_xla
from jaxfused.ops.norm.adaptive_norm import NormOptions, Output
from jaxfused.ops.quantize.quantize_rows import quantize_rows
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.quantized_array import FORMATS, QuantizedArray, assembled
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from pallas_kernels.rows import layer_norm as pallas_layer_norm
from pallas_kernels.rows import layer_norm_configs as pallas_layer_norm_configs
from pallas_kernels.rows.rounding import RowRounding

QuantizedOutput = QuantizedArray | tuple[QuantizedArray, jax.Array]


def is_one_pass(implementation: str | None, device: dispatch.Device, x, residual) -> bool:
    """Returns whether one kernel normalises and quantises, instead of two kernels in sequence."""
    if implementation == "pallas":
        return True
    return implementation is None and _why_unsupported(device, x, residual) is None


def of_output(output: Output, dtype: str, implementation: str | None) -> QuantizedOutput:
    """Returns the norm's output, y [..., D] or (y, next_residual), with y quantised row by row."""
    y, next_residual = output if isinstance(output, tuple) else (output, None)
    q = quantize_rows(jax.lax.stop_gradient(y), dtype, implementation)
    return q if next_residual is None else (q, next_residual)


def run(
    options: NormOptions,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    dtype: str,
    implementation: str | None,
) -> QuantizedOutput:
    """Normalises and quantises x [..., D] in one kernel; the caller has validated the arguments."""
    device = dispatch.current_device(x, residual)
    axes = sharding.leading_axes(x.ndim - 1) + "d"
    operands = sharding.align(
        (x, residual, scale, bias, pre_bias), operand_axes=(axes, axes, "d", "d", "d"), whole="d"
    )
    values, row_scale, next_residual = _norm(
        Runner(implementation, device), options, dtype, *operands
    )
    q = assembled(values, row_scale[..., None], None, -1, "rows")
    return q if next_residual is None else (q, next_residual)


# --- gradient -------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), once=False)
def _norm(run: Runner, options: NormOptions, dtype: str, x, residual, scale, bias, pre_bias):
    return run(_Forward(options, dtype), x, residual, scale, bias, pre_bias)


def _norm_fwd(run: Runner, options: NormOptions, dtype: str, x, residual, scale, bias, pre_bias):
    results = _norm(run, options, dtype, x, residual, scale, bias, pre_bias)
    results = named(results, options.op, "output")
    return results, (jnp.zeros((0,), x.dtype), pre_bias)


def _norm_bwd(run: Runner, options: NormOptions, dtype: str, saved, cotangents):
    """Returns the gradients of x, residual and pre_bias: those of their sum, the next residual.

    The quantised values have no gradient.
    """
    del run, options, dtype
    no_x, pre_bias = saved
    dnext_residual = cotangents[2]
    if dnext_residual is None:
        return None, None, None, None, None
    dpre_bias = None
    if pre_bias is not None:
        rows = dnext_residual.reshape(-1, dnext_residual.shape[-1])
        dpre_bias = jnp.sum(rows, axis=0, dtype=jnp.float32).astype(pre_bias.dtype)
    return dnext_residual.astype(no_x.dtype), dnext_residual, None, None, dpre_bias


_norm.defvjp(_norm_fwd, _norm_bwd)


# --- kernel ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """Computes (quantised y, row scales, next_residual) from x, residual [rows, D] and vectors [D]."""

    options: NormOptions
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.options.op} quantised forward"

    def axes(self, x, residual, scale, bias, pre_bias) -> Axes:
        del x, scale, bias, pre_bias
        rows = ROWS + "d"
        return Axes(
            (rows, rows, "d", "d", "d"),
            (rows, ROWS, None if residual is None else rows),
            whole="d",
        )

    def why_not(self, device, x, residual, *vectors) -> Mapping[str, str | None]:
        del vectors
        return {"pallas": _why_unsupported(device, x, residual), "xla": None}

    def configs(self, implementation, device, x, residual, *vectors) -> Sequence[Hashable]:
        del device
        if implementation != "pallas":
            return ()
        rows, features = x.shape
        return pallas_layer_norm_configs.forward_candidates(
            rows,
            features,
            x.dtype.itemsize,
            matrices=1 if residual is None else 2,
            vectors=sum(vector is not None for vector in vectors),
        )

    def run(
        self, implementation, device, x, residual, scale, bias, pre_bias, config: Any = None
    ) -> Results:
        operands = (x, scale, bias, residual, pre_bias)
        keywords: dict[str, Any] = self.options.keywords()
        if implementation == "pallas":
            found = pallas_layer_norm.forward(
                *operands,
                **keywords,
                save_statistics=False,
                rounding=RowRounding(self.dtype, FORMATS[self.dtype].largest),
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return found.y, found.row_scale, found.next_residual
        y, next_residual = layer_norm_xla.norm(*operands, **keywords)
        q = quantize_rows(y, self.dtype, "xla")
        return q.values, q.scale[..., 0], next_residual

    batched = batched_rows


def _why_unsupported(device: dispatch.Device, x, residual) -> str | None:
    return pallas_layer_norm.why_unsupported(
        compute_capability=device.compute_capability,
        rows=x.size // x.shape[-1],
        features=x.shape[-1],
        dtype=x.dtype,
        residual_dtype=None if residual is None else residual.dtype,
    )
