"""quantize_rows: choice of implementation. `jaxfused.ops.quantize.quantize` has the public function."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.quantize import quantize_rows_cuda
from jaxfused.runtime import cuda_choice, rounding, sharding
from jaxfused.runtime.checks import as_dtype
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.quantized_array import FORMATS, QuantizedArray, assembled
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from pallas_kernels.rows import quantize as pallas_quantize
from pallas_kernels.rows.rounding import RowRounding


def check_row_dtype(op: str, argument: str, dtype: Any) -> str:
    """Returns the name of a dtype to which rows can be quantised."""
    as_dtype(op, argument, dtype)
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in FORMATS or name == "int4":
        raise ValueError(
            f"{op}: {argument} is {name!r}, but activations are quantised to a byte;"
            " pass 'int8', 'float8_e4m3fn' or 'float8_e5m2'."
        )
    return name


def quantize_rows(x: jax.Array, dtype: str, implementation: str | None) -> QuantizedArray:
    """Returns x [..., D] in one of FORMATS, with a scale for each row."""
    op = "quantize_rows"
    device = dispatch.current_device(x)
    if takes_reference(op, implementation, device, x):
        return _by_reference(x, dtype)
    rows = sharding.leading_axes(x.ndim - 1)
    (aligned,) = sharding.align((x,), operand_axes=(rows + "d",), whole="d")
    values, scale = Runner(implementation, device)(_Rows(dtype), aligned)
    return assembled(values, scale[..., None], None, -1, "rows")


def _by_reference(x: jax.Array, dtype: str) -> QuantizedArray:
    scale, _ = rounding.scales(x, dtype, axis=-1, groups=1, per_tensor=False, symmetric=True)
    return rounding.encode(x, dtype, scale, None, -1)


@dataclass(frozen=True)
class _Rows:
    """Computes (values [M, D], scale [M]) from rows x [M, D]."""

    dtype: str

    @property
    def name(self) -> str:
        return "quantize_rows forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "d",), (ROWS + "d", ROWS), whole="d")

    def why_not(self, device, x) -> Mapping[str, str | None]:
        rows, features = x.shape
        reason = pallas_quantize.why_unsupported(
            compute_capability=device.compute_capability,
            rows=rows,
            features=features,
            dtype=x.dtype,
        )
        of_cuda = quantize_rows_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            rows=rows,
            features=features,
            dtype=x.dtype,
        )
        return {"pallas": reason, "xla": None, "cuda": of_cuda}

    def estimate(self, device, able, x) -> Estimate:
        if "pallas" in able:
            return Rule(("pallas",), "a kernel reads x once, and XLA once more for the maxima")
        return cuda_choice.rule(device, fast=cuda_choice.is_fast_for_rows(*x.shape))

    def configs(self, implementation, device, x) -> Sequence[Hashable]:
        del device
        if implementation != "pallas":
            return ()
        rows, features = x.shape
        return pallas_quantize.candidates(rows, features, x.dtype.itemsize)

    def run(self, implementation, device, x, config: Any = None) -> Results:
        if implementation == "pallas":
            return pallas_quantize.forward(
                x,
                RowRounding(self.dtype, FORMATS[self.dtype].largest),
                multiprocessors=device.multiprocessors,
                config=config,
            )
        if implementation == "cuda":
            return quantize_rows_cuda.forward(x, FORMATS[self.dtype].storage)
        q = _by_reference(x, self.dtype)
        return q.values, q.scale[..., 0]

    batched = batched_rows
