"""The stages of gated_mlp: its hidden layer, the gradients of both its products, and of the input."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxfused.ops.linear import mlp_cuda, mlp_xla
from jaxfused.ops.linear.linear_stages import product_configs, product_estimate, weights_for
from jaxfused.ops.linear.mlp_stages import passes_of, product_keywords, why_not_of, work_of
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.product_choice import Passes
from jaxfused.runtime.product_xla import side_by_side, sums_side_by_side
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows
from pallas_kernels.gemm import cost
from pallas_kernels.gemm import mlp as pallas_mlp


def gate_axis_of(w_up: jax.Array | None) -> str:
    """Returns the letter of w_gate's last axis: "g" if it holds both, as a shard is not two halves."""
    return "g" if w_up is None else "f"


@dataclass(frozen=True)
class GatedUnit:
    """Computes (activation(gate) * up, gate, up) from x [M, D] and weights [D, F]; gate and up if saved.

    Without w_up, w_gate [D, 2 F] and b_gate [2 F] hold both.
    """

    activation: str | None
    saves_preactivations: bool
    precision: Any

    @property
    def name(self) -> str:
        return "gated_mlp gated unit"

    def axes(self, x, w_gate, w_up, b_gate, b_up) -> Axes:
        del x, w_gate, b_gate, b_up
        gate_axis = gate_axis_of(w_up)
        saved = (ROWS + "f",) * 2 if self.saves_preactivations else (None, None)
        return Axes(
            (ROWS + "d", "d" + gate_axis, "df", gate_axis, "f"), (ROWS + "f", *saved), whole="dg"
        )

    def work(self, x, w_gate, w_up, b_gate, b_up) -> cost.Work:
        del b_gate, b_up
        hidden = w_gate.shape[1] // (2 if w_up is None else 1)
        written = 3 if self.saves_preactivations else 1
        one = work_of(x, w_gate, hidden, written=written, activations=1)
        return replace(one, products=2, weights_apart=w_up is not None)

    def configs(self, implementation, device, x, w_gate, w_up, *biases) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_mlp.gated_forward_candidates(
            self.work(x, w_gate, w_up, *biases),
            stacked=w_up is None,
            save_preactivations=self.saves_preactivations,
            multiprocessors=device.multiprocessors,
        )

    def why_not(self, device, x, *parameters) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, x, self.work(x, *parameters))

    def estimate(self, device, able, x, w_gate, w_up, *biases) -> Estimate:
        work = self.work(x, w_gate, w_up, *biases)
        # XLA writes gate and up in any case, and again if they are the halves of one array.
        moved = 3 if w_up is not None or not self.saves_preactivations else 5
        passes = passes_of(work, self.activation, evaluations=1, matrices=moved)
        time = functools.partial(
            pallas_mlp.gated_forward_time,
            work,
            stacked=w_up is None,
            save_preactivations=self.saves_preactivations,
            multiprocessors=device.multiprocessors,
        )
        return product_estimate(device, able, x.dtype, work, passes, pallas_time=time)

    def run(self, implementation, device, x, w_gate, w_up, b_gate, b_up, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.gated_forward,
            "cuda": mlp_cuda.gated_forward,
            "xla": functools.partial(mlp_xla.gated_unit, converted=w_gate.dtype != x.dtype),
        }
        return functions[implementation](
            x,
            *(weights_for(implementation, w, x.dtype) for w in (w_gate, w_up)),
            b_gate,
            b_up,
            activation=self.activation,
            save_preactivations=self.saves_preactivations,
            **product_keywords(implementation, device, self.precision, config),
        )

    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class GatedHiddenGradient:
    """Computes (dgate, dup, h, row sums of dgate and dup) from dy [M, E], w_down, gate and up [M, F].

    h = activation(gate) * up is None unless `returns_hidden`.
    """

    activation: str | None
    sums_rows: tuple[bool, bool]
    returns_hidden: bool
    precision: Any
    joined: bool = False
    """True if dgate and dup are concatenated, as are their sums. The second results are then None."""

    @property
    def name(self) -> str:
        return "gated_mlp hidden gradient"

    def axes(self, *operands) -> Axes:
        del operands
        rows, columns = ROWS + "f", ("g", None) if self.joined else ("f", "f")
        return Axes(
            (ROWS + "e", "fe", rows, rows),
            (
                *(None if f is None else ROWS + f for f in columns),
                rows if self.returns_hidden else None,
                *(f if sums else None for f, sums in zip(columns, self.sums_rows, strict=True)),
            ),
            whole="ef" if self.joined else "e",
        )

    def work(self, dy, w_down, gate, up) -> cost.Work:
        del up
        activations = 0 if self.activation is None else 2
        written = 3 if self.returns_hidden else 2
        return work_of(
            dy,
            w_down,
            gate.shape[1],
            read=2,
            written=written,
            activations=activations,
            k_last=True,
        )

    def why_not(self, device, dy, w_down, gate, up) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, dy, self.work(dy, w_down, gate, up))

    def estimate(self, device, able, dy, w_down, gate, up) -> Estimate:
        work = self.work(dy, w_down, gate, up)
        evaluations = work.activations + sum(self.sums_rows)
        passes = passes_of(work, self.activation, evaluations=evaluations)
        return product_estimate(device, able, dy.dtype, work, passes)

    def run(self, implementation, device, dy, w_down, gate, up, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.gated_hidden_gradient,
            "cuda": mlp_cuda.gated_hidden_gradient,
            "xla": functools.partial(mlp_xla.gated_hidden_gradient, joined=self.joined),
        }
        results: Any = functions[implementation](
            dy,
            weights_for(implementation, w_down, dy.dtype),
            gate,
            up,
            activation=self.activation,
            sum_rows=self.sums_rows,
            returns_hidden=self.returns_hidden,
            **product_keywords(implementation, device, self.precision, config),
        )
        if implementation == "xla" or not self.joined:
            return results
        dgate, dup, h, db_gate, db_up = results
        sums = None if db_gate is None else sums_side_by_side([db_gate, db_up])
        return side_by_side([dgate, dup]), None, h, sums, None

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class GatedInputGradient:
    """Computes (dgate @ w_gate^T + dup @ w_up^T,) from cotangents [M, F] and weights [D, F]."""

    precision: Any
    finds_joined: bool = False
    """True if XLA computes dgate and dup, and so can write them concatenated."""

    @property
    def name(self) -> str:
        return "gated_mlp input gradient"

    def axes(self, dgate, dup, w_gate, w_up) -> Axes:
        del dgate, dup, w_gate
        gate_axis = gate_axis_of(w_up)
        whole = "" if gate_axis == "f" else "fg"
        return Axes((ROWS + "f", ROWS + "f", "d" + gate_axis, "df"), (ROWS + "d",), whole=whole)

    def work(self, dgate, dup, w_gate, w_up) -> cost.Work:
        del dup, w_up
        one = self._one_product(dgate, w_gate)
        return replace(one, k=2 * one.k, terms=2)

    def _one_product(self, dgate, w_gate) -> cost.Work:
        return work_of(dgate, w_gate, w_gate.shape[0], k_last=True)

    def why_not(self, device, dgate, dup, w_gate, w_up) -> Mapping[str, str | None]:
        del dup, w_up
        return why_not_of(device, self.precision, dgate, self._one_product(dgate, w_gate))

    def estimate(self, device, able, dgate, dup, w_gate, w_up) -> Estimate:
        del dup
        work = self._one_product(dgate, w_gate)
        if w_up is not None:
            # Two products, which XLA adds in a pass.
            passes = passes_of(work, None, matrices=3)
            return product_estimate(device, able, dgate.dtype, work, passes, terms=2)
        # One product. XLA concatenates the cotangents for it, unless the weights' gradient has.
        is_free = self.finds_joined or work.m <= work.n
        matrices = 0 if is_free else math.ceil(4 * work.k / work.n)
        passes = Passes(bytes_of_element=matrices * work.itemsize)
        return product_estimate(device, able, dgate.dtype, replace(work, k=2 * work.k), passes)

    def run(self, implementation, device, dgate, dup, w_gate, w_up, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.gated_input_gradient,
            "cuda": mlp_cuda.gated_input_gradient,
            "xla": mlp_xla.gated_input_gradient,
        }
        return functions[implementation](
            dgate,
            dup,
            *(weights_for(implementation, w, dgate.dtype) for w in (w_gate, w_up)),
            **product_keywords(implementation, device, self.precision, config),
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True
