"""Quantises the operands of float8 products, each with one scale.

The scale of a matrix is its largest magnitude over the largest number of its float8: e4m3 for
activations and weights, e5m2 for gradients. Tensor cores sum a float8 product along the last axis of
both operands. dgrad and wgrad sum over the other axis of an operand of the forward, so that the pass
that quantises a matrix also writes it transposed. The forward saves these copies instead of the arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.fp8 import fp8_xla, quantize_cuda
from jaxfused.ops.fp8.fp8 import Fp8State
from jaxfused.runtime import cuda_library, sharding
from jaxfused.runtime.activation import BOUNDED_FROM_ABOVE
from jaxfused.runtime.quantized_array import FORMATS
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner
from jaxfused.runtime.vmap import OneByOne

FORWARD = jnp.dtype(jnp.float8_e4m3fn)
GRADIENT = jnp.dtype(jnp.float8_e5m2)
SLOPE_STEPS = 112.0
"""Int8 value that represents a derivative of 1. In steps of 1/112, the derivatives of all activations
but relu2 fit into an int8, with a finer step than the float8 to which the gradient is rounded later."""


class Copies(NamedTuple):
    """A matrix [..., N] quantised to float8: its values, their transpose, and the scale of both."""

    values: Any
    """Float8 [..., N], or None. Zeros may pad the last axis to a multiple of `fp8_xla.PITCH`."""
    transposed: Any
    """Float8 transpose [N, ...], or None. If unsharded, [N, all rows], padded likewise."""
    scale: jax.Array
    """Scale of the values, a float32 scalar."""
    largest: Any
    """A float32 vector of any length, whose maximum determines the scale."""
    sums: Any = None
    """Sums over all rows of the matrix before quantisation, float32 [N], or None."""
    found: Any = None
    """Largest magnitude [1] of the matrix, for its history; None if it has no history."""
    slope: Any = None
    """Derivative of the activation, int8 in steps of 1 / SLOPE_STEPS, shaped like `values`; or None."""

    def kept(self, *names: str) -> "Copies":
        """Returns the Copies to save for the backward: only its scale, magnitudes and fields `names`."""
        wanted = {"scale", "largest", "found", *names}
        fields: Any = {name: a if name in wanted else None for name, a in self._asdict().items()}
        return Copies(**fields)


def copies(
    run: Runner,
    *matrices: jax.Array,
    dtype: Any = FORWARD,
    activation: str | None = None,
    gated: bool = False,
    straight: bool = True,
    transposes: bool = True,
    sums: bool = False,
    slope: bool = False,
    largest: jax.Array | None = None,
    history: jax.Array | None = None,
) -> Copies:
    """Returns matrices [..., N_i] in float8, concatenated along the last axis and with one scale.

    Args:
      dtype: FORWARD or GRADIENT.
      activation: an activation that is applied to them first.
      gated: whether the activation of the first of two matrices is multiplied by the second.
      straight: whether to return the values untransposed.
      transposes: whether to return the values transposed.
      sums: whether to return the sums over rows, which are gradients of biases.
      slope: whether to return the activation's derivative.
      largest: magnitudes [P], whose maximum is the largest magnitude to quantise, or a bound of it, if
        known; needed with an activation.
      history: past magnitudes [calls] of the matrix, which then determine its scale.
    """
    in_one_piece = sharding.is_in_one_piece(*matrices)
    padded = (*matrices, *[None] * (3 - len(matrices)))
    if history is not None:
        fitting = _from_history(history, dtype)
    elif largest is not None:
        fitting = _of_all_shards(largest)
    else:
        fitting = _of_all_shards(largest_of(run, *matrices))
    stage = _Quantize(
        dtype,
        activation,
        gated,
        straight,
        transposes,
        sums,
        SLOPE_STEPS if slope else None,
        observes=history is not None and largest is None and in_one_piece,
        matrices=len(matrices),
        returns_scale=in_one_piece,
        pads=in_one_piece,
        # `largest` comes from the kernel that has just written the matrix, whose last rows are in the
        # L2.
        from_end=largest is not None,
    )
    values, transposed, scale, total, parts, derivative = run(stage, *padded, fitting)
    if scale is None:
        scale = fp8_xla.scale_for(fp8_xla.largest_magnitude(fitting), dtype)
    found = None
    if history is not None:
        observed = [seen for seen in (largest, parts) if seen is not None] or matrices
        found = _of_all_shards(fp8_xla.largest_magnitude(*observed)[None])
    return Copies(values, transposed, scale.reshape(()), fitting, total, found, derivative)


def copies_of(
    run: Runner, state: Fp8State | None, op: str, matrix: str, *arrays: jax.Array, **wanted: Any
) -> Copies:
    """Quantises an operator's matrix by `copies`, scaled by its history if there is a state."""
    history = None if state is None else state.of(op, matrix)
    return copies(run, *arrays, history=history, **wanted)


def largest_of(run: Runner, *arrays: jax.Array, activation: str | None = None) -> jax.Array:
    """Returns a vector whose maximum is the largest magnitude of arrays [..., N_i].

    With an activation, the maximum bounds its magnitude at arguments no larger than the arrays'.
    """
    if sharding.is_in_one_piece(*arrays):
        stage = _Largest(len(arrays), activation)
        return run(stage, *arrays, *[None] * (3 - len(arrays)))[0]
    return _largest_by_xla(arrays, activation)[None]


def _of_all_shards(largest: jax.Array) -> jax.Array:
    """Returns `largest`, maximised over the axes of a shard_map, so that all shards share a scale."""
    names = tuple(sorted(sharding.varying(largest)))
    return jax.lax.pmax(largest, names) if names else largest


def _from_history(history: jax.Array, dtype: Any) -> jax.Array:
    """Returns the largest magnitude [1] in the history; if it is empty, the one that gives scale 1.

    Magnitudes that are not finite are ignored. A step with too large a loss scale may have caused them,
    and they do not predict the next call.
    """
    largest = jnp.max(jnp.where(jnp.isfinite(history), history, 0.0), keepdims=True)
    return jnp.where(largest > 0.0, largest, FORMATS[jnp.dtype(dtype).name].largest)


# --- kernels --------------------------------------------------------------------------------------


_BLOCKS, _BLOCK_BYTES = 2, 2**16
"""Largest number of blocks per SM of the kernel that finds the largest magnitude, and least number of
bytes that each block reads. Every block that quantises a tile reads the results of all of them."""


@dataclass(frozen=True)
class _Largest(OneByOne):
    """Computes (vector,) for a vector whose maximum is the largest magnitude of matrices [M, N_i]."""

    matrices: int
    activation: str | None

    @property
    def name(self) -> str:
        return "fp8 largest magnitude"

    def axes(self, *operands) -> Axes:
        rows = sharding.leading_axes(operands[0].ndim - 1)
        return Axes([rows + letter for letter in "deg"], ("p",), whole=rows + "degp")

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        reason = cuda_library.why_unfit(device.compute_capability)
        reason = reason or cuda_library.why_dtype_unfit(operands[0].dtype)
        if len({operand.dtype for operand in operands if operand is not None}) > 1:
            reason = reason or "it takes arrays of one dtype"
        return {"cuda": reason or cuda_library.why_unavailable(), "xla": None}

    def run(self, implementation, device, *operands) -> Results:
        arrays = [operand for operand in operands if operand is not None]
        if implementation == "xla":
            return (_largest_by_xla(arrays, self.activation)[None],)
        filled = -(-sum(array.nbytes for array in arrays) // _BLOCK_BYTES)
        blocks = max(1, min(_BLOCKS * device.multiprocessors, filled))
        least = BOUNDED_FROM_ABOVE.get(str(self.activation), 0.0)
        return (quantize_cuda.largest(arrays, blocks, self.activation, least),)


def _largest_by_xla(arrays: Sequence[jax.Array], activation: str | None) -> jax.Array:
    """Returns a scalar: the arrays' largest magnitude or, with an activation, a bound of its results."""
    if activation is None:
        return fp8_xla.largest_magnitude(*arrays)
    (maxima,) = arrays
    return fp8_xla.largest_activation(activation, maxima.astype(jnp.float32))


@dataclass(frozen=True)
class _Quantize(OneByOne):
    """Computes (values, transpose, scale, sums over rows, tiles' maxima, derivative); some are None."""

    dtype: Any
    activation: str | None
    gated: bool
    straight: bool
    transposes: bool
    sums: bool
    slope_steps: float | None
    observes: bool
    matrices: int
    returns_scale: bool
    """True if the kernel returns the scale. False if sharded: it would be summed over devices."""
    pads: bool
    """True if zeros pad each row. False for sharded matrices: zeros would lie between the shards."""
    from_end: bool

    @property
    def name(self) -> str:
        return "fp8 quantize"

    def axes(self, *operands) -> Axes:
        del operands
        # The columns of concatenated matrices get a separate axis letter, which devices cannot split.
        apart = self.matrices > 1 and not self.gated
        sources = "deg" if apart else "ddd"
        columns = "c" if apart else "d"
        return Axes(
            (*(ROWS + source for source in sources), "p"),
            (
                ROWS + columns if self.straight else None,
                columns + ("m" if self.pads else ROWS) if self.transposes else None,
                "s" if self.returns_scale else None,
                columns if self.sums else None,
                "q" if self.observes else None,
                ROWS + columns if self.slope_steps is not None else None,
            ),
            whole="degcpsqm" if apart else "psqm",
        )

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        matrices = [operand for operand in operands[:-1] if operand is not None]
        reason = quantize_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=matrices[0].dtype,
            widths=[matrix.shape[1] for matrix in matrices],
        )
        if not self.pads:
            reason = reason or self._why_ragged(matrices)
        return {"cuda": reason, "xla": None}

    def _why_ragged(self, matrices: Sequence[jax.Array]) -> str | None:
        """Returns why the kernel cannot write these matrices without padding; None if it can."""
        widths = [matrix.shape[1] for matrix in matrices]
        columns = widths[0] if self.gated else sum(widths)
        for length in (columns, *([matrices[0].shape[0]] if self.transposes else [])):
            if length != fp8_xla.padded(length):
                return (
                    f"of matrices split over devices it writes rows of multiples of {fp8_xla.PITCH} "
                    f"numbers, and one has {length}"
                )
        return None

    def run(self, implementation, device, *operands) -> Results:
        del device
        *matrices, largest = (operand for operand in operands if operand is not None)
        keywords: dict[str, Any] = dict(
            dtype=self.dtype,
            activation=self.activation,
            gated=self.gated,
            straight=self.straight,
            transposes=self.transposes,
            sums=self.sums,
            slope_steps=self.slope_steps,
        )
        if implementation == "cuda":
            keywords |= dict(observes=self.observes, from_end=self.from_end)
            values, transposed, scale, total, slope, found = quantize_cuda.quantize(
                matrices, largest, **keywords
            )
        else:
            values, transposed, scale, total, slope = fp8_xla.quantize(
                matrices, largest, **keywords, pads=self.pads
            )
            found = self._found(matrices) if self.observes else None
        return values, transposed, scale if self.returns_scale else None, total, found, slope

    def _found(self, matrices: Sequence[jax.Array]) -> jax.Array:
        """Returns the largest magnitude, repeated to the shape of the kernel's result."""
        columns = sum(matrix.shape[1] for matrix in matrices)
        tiles = quantize_cuda.tiles(matrices[0].shape[0], columns)
        return jnp.full((tiles,), fp8_xla.largest_magnitude(*matrices))
