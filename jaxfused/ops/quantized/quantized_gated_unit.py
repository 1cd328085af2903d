"""The gated unit of an MLP with quantised weights: both products in one pass over x."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.ops.quantized import quantized_matmul_cuda, quantized_matmul_xla
from jaxfused.ops.quantized.quantized_matmul import of_columns, why_no_kernel_reads
from jaxfused.ops.quantized.quantized_matmul_stages import cuda_configs, product_why_not
from jaxfused.runtime import cuda_choice, sharding
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.quantized_array import QuantizedArray, as_operand, assembled
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from pallas_kernels.gemm import quantized as pallas_quantized
from pallas_kernels.gemm.quantized import Packed
from pallas_kernels.gemm.small_m import MAX_ROWS


def gated_unit(
    x: jax.Array,
    gate: QuantizedArray,
    up: QuantizedArray,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    implementation: str | None,
) -> jax.Array:
    """Returns activation(x @ gate + b_gate) * (x @ up + b_up), [..., F], in x's dtype.

    The weights are frozen. They have layout "columns", one dtype and scales of one shape, and both or
    neither have zero points: see `why_apart`.
    """
    op = "quantized_matmul"
    gate, up = as_operand(op, "gate", gate), as_operand(op, "up", up)
    device = dispatch.current_device(x)
    unit = _Unit(activation, gate.dtype)
    run = Runner(implementation, device)
    operands: tuple[Any, ...] = (
        x,
        gate.values,
        *of_columns(gate),
        up.values,
        *of_columns(up),
        b_gate,
        b_up,
    )
    if takes_reference(op, implementation, device, x) or (
        implementation is None and unit.is_left_to_xla(run, *operands)
    ):
        return unit.by_reference(x, gate, up, b_gate, b_up)
    rows = sharding.leading_axes(x.ndim - 1)
    weights = (unit.letters, "gf", "gf")
    operands = sharding.align(
        operands,
        operand_axes=(rows + "d", *weights, *weights, "f", "f"),
        whole=_WHOLE,
    )
    return _gated_unit(run, unit, *operands)


def why_apart(gate: QuantizedArray, up: QuantizedArray) -> str | None:
    """Returns why the two weights cannot be multiplied in one pass, or None if they can."""
    gate, up = gate.as_read(), up.as_read()
    for name, of_gate, of_up in (
        ("dtype", gate.dtype, up.dtype),
        ("groups", gate.groups, up.groups),
        ("zero point", gate.zero_point is None, up.zero_point is None),
    ):
        if of_gate != of_up:
            return f"the weights differ in their {name}"
    if gate.codebook is not None or up.codebook is not None:
        return "no kernel multiplies two weights of codes in one pass"
    return why_no_kernel_reads(gate) or why_no_kernel_reads(up)


_WHOLE = "dkg"


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="gated_mlp", once=False)
def _gated_unit(run: Runner, unit: "_Unit", x, *weights_and_biases):
    (h,) = run(unit, x, *weights_and_biases)
    return h


def _gated_unit_fwd(run: Runner, unit: "_Unit", x, *weights_and_biases):
    return _gated_unit(run, unit, x, *weights_and_biases), (x, weights_and_biases)


def _gated_unit_bwd(run: Runner, unit: "_Unit", saved, dh):
    """Recomputes the preactivations by XLA; a barrier keeps XLA from saving the forward's."""
    (x, (*weights, b_gate, b_up)), dh = jax.lax.optimization_barrier((saved, dh))
    gate, up = unit.arrays(*weights)
    _, vjp = jax.vjp(
        lambda x, b_gate, b_up: unit.by_reference(x, gate, up, b_gate, b_up), x, b_gate, b_up
    )
    dx, db_gate, db_up = vjp(dh)
    return (dx, *(None for _ in weights), db_gate, db_up)


_gated_unit.defvjp(_gated_unit_fwd, _gated_unit_bwd)


@dataclass(frozen=True)
class _Unit:
    """Computes activation(x @ gate + b_gate) * (x @ up + b_up) from x [M, D] and weights [D, F]."""

    activation: str | None
    w_dtype: str

    @property
    def name(self) -> str:
        return "quantized_matmul gated unit"

    @property
    def letters(self) -> str:
        """Letters of the stored weights' axes: "k" counts packed words, "d" single values."""
        return "fk" if self.w_dtype == "int4" else "fd"

    def axes(self, *operands) -> Axes:
        del operands
        weights = (self.letters, "gf", "gf")
        return Axes((ROWS + "d", *weights, *weights, "f", "f"), (ROWS + "f",), whole=_WHOLE)

    def why_not(self, device, x, values, scale, zero_point, *others) -> Mapping[str, str | None]:
        del others
        w = Packed(values, scale, zero_point)
        return product_why_not(device, x, w, out_dtype=x.dtype, products=2)

    def estimate(self, device, able, x, values, *others) -> Estimate:
        del able, others
        # XLA comes first above MAX_ROWS rows, as for a single quantised product.
        if x.shape[0] > MAX_ROWS:
            return Rule(("xla",), "its faster product makes up for dequantising the weights first")
        fast = cuda_choice.is_fast_for_weights(x.shape[0], x.shape[1], values.shape[0])
        return cuda_choice.rule(device, fast=fast)

    def run(self, implementation, device, x, *weights_and_biases) -> Results:
        *weights, b_gate, b_up = weights_and_biases
        if implementation == "xla":
            return (self.by_reference(x, *self.arrays(*weights), b_gate, b_up),)
        gate, up = Packed(*weights[:3]), Packed(*weights[3:])
        operands = (x, gate, up, b_gate, b_up)
        if implementation == "cuda":
            config = cuda_configs(device, x, gate, products=2)[0]
            h = quantized_matmul_cuda.gated_forward(
                *operands, activation=self.activation, config=config
            )
        else:
            h = pallas_quantized.gated_forward(
                *operands, activation=self.activation, multiprocessors=device.multiprocessors
            )
        return (h,)

    def arrays(self, *weights: Any) -> tuple[QuantizedArray, QuantizedArray]:
        """Returns gate and up as QuantizedArrays, given the values, scale and zero point of each."""

        def array(values, scale, zero_point):
            return assembled(values, scale, zero_point, -2, "columns")

        return array(*weights[:3]), array(*weights[3:])

    def by_reference(self, x, gate, up, b_gate, b_up) -> jax.Array:
        """Returns the gated unit in plain jax.numpy."""
        unit = quantized_matmul_xla.gated_unit
        return unit(x, gate, up, b_gate, b_up, activation=self.activation)

    def is_left_to_xla(self, run: Runner, x: jax.Array, values: jax.Array, *others: Any) -> bool:
        """Returns whether XLA runs the forward; its preactivations are then saved for the gradient."""
        if not sharding.is_in_one_piece(x, values):
            return False
        choice = run.choice(self, x, values, *others)
        if choice.implementation != "xla":
            return False
        dispatch.record(choice._replace(kernel=None, stages=(choice,)))
        return True

    batched = batched_rows
