"""The one way from an operator to its kernels.

An operator's custom_vjp hands each of its stages (its forward, its backward, ...) to a `Runner`.
What happens then is the same for all of them, from the outside in:

1. `jax.vmap`: the batch is folded into axes that the kernel has, or its entries run one by one.
2. Shards: `sharding.per_shard` runs the kernel on the part of the operands that a device holds.
3. Choice: which implementation runs is decided by the shapes that it will see, on that shard. What a
   stage takes and returns is the same for all implementations, XLA's included, so that each stage of
   an operator chooses for itself.
4. Lowering: the chosen kernel stands behind a `jax.jit` whose identity depends on the kernel, its
   options and its shapes alone. However often a program has it, it is traced and lowered once.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfused import cuda, dispatch, sharding
from jaxfused.ops.batching import batch_all, is_batched, one_by_one
from pallas_kernels import hopper

Operands = Sequence[jax.Array | None]
Results = tuple[jax.Array | None, ...]

ROWS = "."
"""Stands for the leading axes of an array in the letters of a kernel, which sees them as one axis."""


class Axes(NamedTuple):
    """The axes of a kernel's arrays by letters, as in `sharding.per_shard`, with `ROWS`."""

    operands: Sequence[str]
    results: Sequence[str | None]
    """None for a result that is None."""
    whole: str = ""
    """Letters that must not be split over devices."""


class Kernel(Protocol):
    """A stage of an operator, whatever implements it.

    It is a frozen dataclass of what is static: kernels that are equal compute the same. Operands may
    be None, and so may results.
    """

    @property
    def name(self) -> str:
        """The operator and its stage: "layer_norm forward"."""

    @property
    def axes(self) -> Callable[..., Axes]:
        """`axes(*operands)`: the letters of operands and results; only rank and absence may count."""

    @property
    def reasons(self) -> Callable[..., Mapping[str, str | None]]:
        """`reasons(device, *operands)`: why each implementation cannot run these very operands.

        Fastest first; None for one that can. The rows of the operands are one axis here, as in `run`.
        XLA always can; an implementation that leaves this stage to XLA is not listed.
        """

    @property
    def run(self) -> Callable[..., Results]:
        """`run(implementation, device, *operands)`: the results, by an implementation that can run."""

    @property
    def batched(self) -> Callable[..., Results | None]:
        """`batched(call, axis_size, in_batched, *operands)`: the batched results under `jax.vmap`.

        None where the entries of the batch have to run one by one. `call(kernel, *operands)` runs a
        kernel on operands that have taken the batch in.
        """


@dataclass(frozen=True)
class Runner:
    """Runs the kernels of an operator, by the implementation that its caller named or by the fastest."""

    implementation: str | None
    """The name, or None."""
    device: dispatch.Device
    """The device that the operator will run on."""

    def __call__(self, kernel: Kernel, *operands: jax.Array | None) -> Any:
        """The results of a kernel; the operands are arrays of any rank, or None.

        Raises:
          ValueError: the named implementation cannot run the shapes that the kernel sees.
        """
        return _Call(kernel, self).batchable(*operands)


_KERNEL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def takes_reference(
    op: str,
    implementation: str | None,
    device: dispatch.Device,
    x: jax.Array,
    *,
    why_xla: str | None = None,
) -> bool:
    """Whether a call of an operator is plain jax.numpy, whatever the shapes are.

    That is settled before the operator's custom_vjp, so that forward-mode differentiation works
    wherever no kernel can run: on this platform, or for the dtype of `x`; and where the operator
    leaves the call to XLA, for which `why_xla` gives the reason.
    """
    if x.dtype not in _KERNEL_DTYPES:
        why = f"kernels take float32, bfloat16 and float16, not {x.dtype}"
        reasons: dict[str, str | None] = {"pallas": why, "cuda": why}
    else:
        capability = device.compute_capability
        reasons = {
            "pallas": hopper.why_unfit(capability),
            "cuda": cuda.library.why_unfit(capability) or cuda.library.why_unavailable(),
        }
    if implementation is None and why_xla is not None:
        reasons = {name: reason or why_xla for name, reason in reasons.items()}
    reasons["xla"] = None
    chosen = dispatch.choose(op, implementation, reasons)
    if chosen == "xla":
        dispatch.record(dispatch.Choice(op, _shapes([x]), chosen, reasons))
    return chosen == "xla"


def reference_only(op: str, implementation: str | None, x: jax.Array) -> None:
    """Checks the name of an implementation of an operator that has no kernels yet."""
    reasons = {
        "pallas": f"there is no Pallas kernel of {op} yet",
        "cuda": f"there is no CUDA kernel of {op} yet",
        "xla": None,
    }
    chosen = dispatch.choose(op, implementation, reasons)
    dispatch.record(dispatch.Choice(op, _shapes([x]), chosen, reasons))


def _shapes(operands: Operands) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    return tuple(
        None if operand is None else jax.ShapeDtypeStruct(operand.shape, operand.dtype)
        for operand in operands
    )


def batched_rows(
    call: Callable[..., Results],
    kernel: Kernel,
    axis_size: int,
    in_batched: Sequence[Any],
    *operands: jax.Array | None,
) -> Results | None:
    """`Kernel.batched` of a kernel over rows: the batch becomes one more leading axis of the rows.

    Not where the batch reaches an operand that the rows share, or where rows are summed up.
    """
    axes = kernel.axes(*operands)
    over_rows = [ROWS in letters for letters in axes.operands]
    shared_is_batched = any(
        is_batched(batched) and not rows
        for batched, rows in zip(in_batched, over_rows, strict=True)
    )
    sums_rows = any(letters is not None and ROWS not in letters for letters in axes.results)
    if shared_is_batched or sums_rows:
        return None
    batched = batch_all(axis_size, in_batched, operands)
    return call(
        kernel,
        *(
            with_batch if rows else operand
            for with_batch, operand, rows in zip(batched, operands, over_rows, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Call:
    """All that is static in a call."""

    kernel: Kernel
    runner: Runner

    def batchable(self, *operands: jax.Array | None) -> Results:
        """The call with a rule for `jax.vmap`."""

        @custom_vmap
        def call(*operands):
            return self._per_shard(operands)

        @call.def_vmap
        def rule(axis_size, in_batched, *operands):
            results = self.kernel.batched(
                lambda kernel, *operands: replace(self, kernel=kernel).batchable(*operands),
                axis_size,
                in_batched,
                *operands,
            )
            if results is None:
                results = one_by_one(call, in_batched, operands)
            return results, jax.tree.map(lambda _: True, results)

        return call(*operands)

    def _per_shard(self, operands: Operands) -> Results:
        axes = self.kernel.axes(*operands)
        leading = sharding.leading_axes(_row_axes(operands, axes))

        def spelt(letters: str | None) -> str | None:
            return None if letters is None else letters.replace(ROWS, leading)

        return sharding.per_shard(
            _OnShard(self, in_own_module=False),
            operands,
            operand_axes=[letters.replace(ROWS, leading) for letters in axes.operands],
            result_axes=[spelt(letters) for letters in axes.results],
            whole=axes.whole,
            in_own_module=_OnShard(self, in_own_module=True),
        )


@dataclass(frozen=True)
class _OnShard:
    """The call on the part of the operands that a device holds."""

    call: _Call
    in_own_module: bool
    """Whether this is lowered into a module of its own, in which no `jax.jit` is found again."""

    def __call__(self, *operands: jax.Array | None) -> Results:
        call = self.call
        axes = call.kernel.axes(*operands)
        rows, matrices = _flatten_rows(operands, axes.operands)
        lower = _lowered_by_export if self.in_own_module else _lowered
        results = lower(call.kernel, self._choose(matrices), call.runner.device, *matrices)
        return tuple(
            result
            if result is None or letters is None or ROWS not in letters
            else result.reshape(
                *result.shape[: letters.index(ROWS)],
                *rows,
                *result.shape[letters.index(ROWS) + 1 :],
            )
            for result, letters in zip(results, axes.results, strict=True)
        )

    def _choose(self, operands: Operands) -> str:
        call = self.call
        # Without elements there is nothing for a kernel to do, and an empty launch is an error in CUDA.
        if any(operand is not None and operand.size == 0 for operand in operands):
            return "xla"
        reasons = call.kernel.reasons(call.runner.device, *operands)
        named = call.runner.implementation
        if named is not None and named not in reasons:
            named = "xla"
        operator = call.kernel.name.split(" ")[0]
        chosen = dispatch.choose(operator, named, reasons)
        dispatch.record(
            dispatch.Choice(
                call.kernel.name, _shapes(operands), chosen, dict(reasons), self.in_own_module
            )
        )
        return chosen


def _row_axes(operands: Operands, axes: Axes) -> int:
    """How many axes `ROWS` stands for."""
    return next(
        (
            operand.ndim - (len(letters) - 1)
            for operand, letters in zip(operands, axes.operands, strict=True)
            if operand is not None and ROWS in letters
        ),
        0,
    )


def _flatten_rows(
    operands: Operands, axes: Sequence[str]
) -> tuple[tuple[int, ...], list[jax.Array | None]]:
    """The shape of the rows, and the operands with one axis in the place of those."""
    rows: tuple[int, ...] = ()
    flat = []
    for operand, letters in zip(operands, axes, strict=True):
        if operand is not None and ROWS in letters:
            start = letters.index(ROWS)
            stop = operand.ndim - (len(letters) - start - 1)
            rows = operand.shape[start:stop]
            operand = operand.reshape(
                *operand.shape[:start], math.prod(rows), *operand.shape[stop:]
            )
        flat.append(operand)
    return rows, flat


# --- lowered once ---------------------------------------------------------------------------------


def _lowered(
    kernel: Kernel,
    implementation: str,
    device: dispatch.Device,
    *operands: jax.Array | None,
) -> Results:
    """`kernel.run`, lowered once for all places of a program that have it."""
    return _jitted(kernel.name)(kernel, implementation, device, *operands)


@functools.cache
def _jitted(name: str) -> Callable[..., Results]:
    """`kernel.run` behind a `jax.jit` that profiles know by the kernel's name."""

    def run(kernel, implementation, device, *operands):
        return kernel.run(implementation, device, *operands)

    run.__name__ = run.__qualname__ = "jaxfused_" + name.replace(" ", "_")
    return jax.jit(run, static_argnums=(0, 1, 2))


def _lowered_by_export(
    kernel: Kernel,
    implementation: str,
    device: dispatch.Device,
    *operands: jax.Array | None,
) -> Results:
    """The same in a module of its own, as XLA asks for one at each place that it partitions.

    The lowered text is kept and put into each of these modules.
    """
    # Only kernels take long to lower; and the interpreter's callbacks cannot be exported.
    if implementation == "xla" or jax.default_backend() != "gpu":
        return _lowered(kernel, implementation, device, *operands)
    present = [operand for operand in operands if operand is not None]
    exported = _exported(
        cast(Hashable, kernel),
        implementation,
        device,
        tuple(None if o is None else (o.shape, jnp.dtype(o.dtype)) for o in operands),
    )
    return exported.call(*present)


@functools.cache
def _exported(
    kernel: Kernel,
    implementation: str,
    device: dispatch.Device,
    operands: tuple[tuple[tuple[int, ...], Any] | None, ...],
) -> jax.export.Exported:
    def run(*present):
        remaining = iter(present)
        return kernel.run(
            implementation, device, *(None if o is None else next(remaining) for o in operands)
        )

    targets = ("mosaic_gpu_v2", *cuda.library.TARGETS)
    return jax.export.export(
        jax.jit(run),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in targets],
    )(*(jax.ShapeDtypeStruct(*operand) for operand in operands if operand is not None))
