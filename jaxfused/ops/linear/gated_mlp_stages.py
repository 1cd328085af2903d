"""Operations of gated_mlp: its hidden layer, the gradients of gate and up, and that of the input."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxfused.ops.linear import linear_cuda, mlp_cuda, mlp_xla
from jaxfused.ops.linear.mlp_stages import passes_of, why_not_of
from jaxfused.runtime import cuda_choice, cuda_library, product_regimes
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.product_stage import ProductStage
from jaxfused.runtime.product_xla import side_by_side, sums_side_by_side
from jaxfused.runtime.roofline import Passes, is_modelled
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows
from pallas_kernels.gemm import cost
from pallas_kernels.gemm import linear as pallas_linear
from pallas_kernels.gemm import mlp as pallas_mlp
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.small_m import MAX_ROWS


def gate_axis_of(w_up: jax.Array | None) -> str:
    """Returns the letter of w_gate's last axis: "g" (never sharded) if it holds gate and up."""
    return "g" if w_up is None else "f"


@dataclass(frozen=True)
class GatedUnit(ProductStage):
    """Computes activation(gate) * up, and gate and up if saved, from x [M, D] and weights [D, F].

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

    def product(self, x, w_gate, w_up, b_gate, b_up) -> FusedProduct:
        return pallas_mlp.gated_unit(x, w_gate, w_up, b_gate, b_up, **self._options)

    def work(self, x, w_gate, w_up, *biases) -> cost.Work:
        del biases
        return super().work(x, w_gate, w_up, None, None)

    @property
    def _options(self) -> dict[str, Any]:
        return dict(activation=self.activation, save_preactivations=self.saves_preactivations)

    def configs(self, implementation, device, x, w_gate, w_up, *biases) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_mlp.gated_forward_candidates(
            self.work(x, w_gate, w_up, *biases),
            stacked=w_up is None,
            multiprocessors=device.multiprocessors,
        )

    def why_not(self, device, x, *parameters) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, x, self.work(x, *parameters))

    def estimate(self, device, able, x, w_gate, w_up, *biases) -> Estimate:
        del able
        work = self.work(x, w_gate, w_up, *biases)
        # XLA reads gate and up and writes activation(gate) * up. If gate and up are halves of one
        # product and are saved, XLA also copies each of them.
        copied = 2 if w_up is None and self.saves_preactivations else 0
        passes = passes_of(work, self.activation, evaluations=1, matrices=2 + 1 + copied)
        return product_regimes.estimate(device, work, passes.time(work.m * work.n))

    def run(self, implementation, device, x, w_gate, w_up, b_gate, b_up, config=None) -> Results:
        if implementation == "pallas":
            return pallas_mlp.gated_forward(
                *(x, w_gate, w_up, b_gate, b_up),
                **self._options,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        options = self._options | dict(precision=self.precision)
        weights = (None if w is None else w.astype(x.dtype) for w in (w_gate, w_up))
        operands: Any = (x, *weights, b_gate, b_up)
        if implementation == "cuda":
            return mlp_cuda.gated_forward(*operands, **options)
        return mlp_xla.gated_unit(*operands, **options, converted=w_gate.dtype != x.dtype)

    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class GatedHiddenGradient(ProductStage):
    """Computes (dgate, dup, h, sum of dgate, sum of dup) from dy [M, E], w_down, gate and up [M, F].

    h = activation(gate) * up is None unless `returns_hidden`. The sums [F] are over rows, for biases.
    """

    activation: str | None
    sums_rows: tuple[bool, bool]
    returns_hidden: bool
    precision: Any
    joined: bool = False
    """True if dgate and dup are returned as one array [M, 2 F], and their sums as one [2 F]. The results
    for dup are then None."""

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

    def product(self, dy, w_down, gate, up) -> FusedProduct:
        return pallas_mlp.gated_hidden_gradient(dy, w_down, gate, up, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return dict(
            activation=self.activation,
            sum_rows=self.sums_rows,
            returns_hidden=self.returns_hidden,
        )

    def why_not(self, device, dy, w_down, gate, up) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, dy, self.work(dy, w_down, gate, up))

    def estimate(self, device, able, dy, w_down, gate, up) -> Estimate:
        del able
        work = self.work(dy, w_down, gate, up)
        is_small = work.m > MAX_ROWS and work.m * work.n <= 2 * product_regimes.LARGE
        if self.joined and is_small and work.k >= product_regimes.SPLIT_SUM:
            return Rule(("xla",), "its products read one array, of dgate and dup, which XLA writes")
        evaluations = work.activations + sum(self.sums_rows)
        passes = passes_of(work, self.activation, evaluations=evaluations)
        if work.m > MAX_ROWS:
            # The kernel's epilogue reads gate and up and writes dgate, dup and perhaps h, in nearly the
            # time that XLA takes.
            passes = Passes(bytes_of_element=work.itemsize, launches=0)
        return product_regimes.estimate(device, work, passes.time(work.m * work.n))

    def run(self, implementation, device, dy, w_down, gate, up, config=None) -> Results:
        options = self._options | dict(precision=self.precision)
        if implementation == "xla":
            operands = (dy, w_down.astype(dy.dtype), gate, up)
            return mlp_xla.gated_hidden_gradient(*operands, **options, joined=self.joined)
        if implementation == "cuda":
            operands = (dy, w_down.astype(dy.dtype), gate, up)
            results: Any = mlp_cuda.gated_hidden_gradient(*operands, **options)
        else:
            results = self.in_pallas(device, dy, w_down, gate, up, config=config)
        if not self.joined:
            return results
        dgate, dup, h, db_gate, db_up = results
        sums = None if db_gate is None else sums_side_by_side([db_gate, db_up])
        return side_by_side([dgate, dup]), None, h, sums, None

    results = ("dgate", "dup", "h", "sum_dgate", "sum_dup")
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class GatedUnitGradient:
    """Computes (dgate, dup) from the cotangent dh of activation(gate) * up, gate and up, all [M, F]."""

    activation: str | None

    @property
    def name(self) -> str:
        return "gated_unit gradient"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "f",) * 3, (ROWS + "f",) * 2)

    def why_not(self, device, dh, gate, up) -> Mapping[str, str | None]:
        del dh, up
        reason = linear_cuda.why_unsupported(
            compute_capability=device.compute_capability, dtype=gate.dtype
        )
        return {"cuda": reason, "xla": None}

    def estimate(self, device, able, dh, gate, up) -> Estimate:
        del able, dh, up
        if not is_modelled(device):
            return None
        misaligned = gate.shape[1] * gate.dtype.itemsize % cuda_library.VECTOR_BYTES
        if misaligned or gate.size < cuda_choice.LEAST_VALUES:
            return Rule(("xla",), "rows are misaligned, or XLA starts sooner")
        return Rule(
            ("cuda",), "XLA evaluates it in the transposition of dh, if there is one, slower"
        )

    def run(self, implementation, device, dh, gate, up) -> Results:
        del device
        if implementation == "cuda":
            return mlp_cuda.gated_unit_gradient(dh, gate, up, activation=self.activation)
        dgate, dup, _ = mlp_xla.gated_unit_gradient(dh, gate, up, activation=self.activation)
        return dgate, dup

    results = ("dgate", "dup")
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class GatedInputGradient(ProductStage):
    """Computes (dgate @ w_gate^T + dup @ w_up^T,) from cotangents [M, F] and weights [D, F]."""

    precision: Any
    finds_joined: bool = False
    """True if XLA computed dgate and dup and wrote them as one array [M, 2 F]."""

    @property
    def name(self) -> str:
        return "gated_mlp input gradient"

    def axes(self, dgate, dup, w_gate, w_up) -> Axes:
        del dgate, dup, w_gate
        gate_axis = gate_axis_of(w_up)
        whole = "" if gate_axis == "f" else "fg"
        return Axes((ROWS + "f", ROWS + "f", "d" + gate_axis, "df"), (ROWS + "d",), whole=whole)

    def product(self, dgate, dup, w_gate, w_up) -> FusedProduct:
        return pallas_mlp.gated_input_gradient(dgate, dup, w_gate, w_up)

    def _one_product(self, dgate, w_gate) -> cost.Work:
        return pallas_linear.input_gradient(dgate, w_gate).work_beside_xla

    def why_not(self, device, dgate, dup, w_gate, w_up) -> Mapping[str, str | None]:
        del dup, w_up
        return why_not_of(device, self.precision, dgate, self._one_product(dgate, w_gate))

    def estimate(self, device, able, dgate, dup, w_gate, w_up) -> Estimate:
        del able, dup
        work = self._one_product(dgate, w_gate)
        work = replace(work, k=2 * work.k, terms=2)
        if w_up is not None:
            # XLA runs two products [M, D], and adds them in a separate pass.
            passes = passes_of(work, None, matrices=2 + 1)
        else:
            # XLA runs one product of the concatenated cotangents. Concatenating them is free if the
            # hidden gradient writes them so or the wgrad needs them so.
            is_free = self.finds_joined or work.m <= work.n
            copied = 0 if is_free else 2 * work.k / work.n
            passes = Passes(bytes_of_element=copied * work.itemsize)
        return product_regimes.estimate(device, work, passes.time(work.m * work.n))

    def run(self, implementation, device, dgate, dup, w_gate, w_up, config=None) -> Results:
        if implementation == "pallas":
            return self.in_pallas(device, dgate, dup, w_gate, w_up, config=config)
        of = mlp_cuda if implementation == "cuda" else mlp_xla
        weights = (None if w is None else w.astype(dgate.dtype) for w in (w_gate, w_up))
        return of.gated_input_gradient(dgate, dup, *weights, precision=self.precision)

    results = ("dx",)
    batched = batched_rows
    xla_takes_rows = True
