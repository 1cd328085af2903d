"""Products in float8 for training: what linear, mlp and qkv_projection share where precision is "fp8".

Each matrix that is multiplied is quantised with one scale, its largest magnitude over the largest
number of its float8: e4m3 for what goes forward and for weights, e5m2 for gradients. The tensor cores
want the sums of a float8 product along the last axis of both operands. A gradient sums over the other
axis of what the forward has multiplied, and so the pass that quantises a matrix also writes it
transposed. The backward keeps these copies in place of the arrays.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import cuda, dispatch, reference, sharding
from jaxfused.ops.kernel_call import ROWS, Axes, Results, Runner
from jaxfused.quantization.quantized_array import FORMATS
from pallas_kernels.product import cost
from pallas_kernels.product import fp8 as pallas_fp8

FORWARD = jnp.dtype(jnp.float8_e4m3fn)
GRADIENT = jnp.dtype(jnp.float8_e5m2)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8State:
    """The largest magnitudes of past calls, by which the matrices of the next one are scaled.

    An operator whose `precision` is such a state scales each matrix by the largest of its history
    instead of reading it first (delayed scaling): what has become larger than that saturates, for once.
    Where nothing has been seen yet the scale is 1. What this call finds comes back as the state's
    cotangent: **its gradient is not a derivative but the next state**, and takes the state's place.
    Each call of an operator in a program has a state of its own.

    Attributes:
      history: [matrices, calls], float32, the last call first.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> state = jaxfused.Fp8State.zeros("linear", calls=4)
      >>> def loss(w, state):
      ...     return jaxfused.linear(jnp.full((2, 4), 3.0), w, precision=state).sum()
      >>> dw, state = jax.grad(loss, (0, 1))(jnp.full((4, 2), 5.0), state)
      >>> state.history[:, 0]
      Array([3., 5., 1.], dtype=float32)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433
    """

    history: jax.Array

    @classmethod
    def zeros(cls, operator: str, calls: int = 16) -> "Fp8State":
        """The state of an operator ("linear", "mlp", ...) that has not been called.

        Args:
          operator: its name.
          calls: how many calls are remembered.
        """
        if operator not in MATRICES:
            raise ValueError(
                f"Fp8State: {operator!r} is no operator with a state; pass one of {sorted(MATRICES)}."
            )
        return cls(jnp.zeros((len(MATRICES[operator]), calls), jnp.float32))

    def of(self, operator: str, matrix: str) -> jax.Array:
        """The history of a matrix, [calls]."""
        return self.history[MATRICES[operator].index(matrix)]

    def after(self, operator: str, found: Mapping[str, jax.Array]) -> "Fp8State":
        """The next state, of the magnitudes that a call has found."""
        newest = jnp.stack([found[matrix].reshape(()) for matrix in MATRICES[operator]])
        return Fp8State(jnp.concatenate([newest[:, None], self.history[:, :-1]], axis=1))


Precision = Literal["fp8"] | Fp8State
_OF_ONE_PRODUCT = ("x", "w", "dy")
_OF_TWO_PRODUCTS = ("x", "w1", "hidden", "w2", "dy", "dhidden")
MATRICES: Mapping[str, tuple[str, ...]] = {
    "linear": _OF_ONE_PRODUCT,
    "qkv_projection": _OF_ONE_PRODUCT,
    "mlp": _OF_TWO_PRODUCTS,
    "gated_mlp": _OF_TWO_PRODUCTS,
}
"""What the rows of a state are of, by operator."""


def is_fp8(precision: Any) -> bool:
    """Whether a caller's `precision` asks for products in float8."""
    if is_named(precision, DELAYED):
        raise ValueError(
            f'precision is "{DELAYED}", which is for modules, as these remember scales; pass an operator'
            " a jaxfused.Fp8State."
        )
    return isinstance(precision, Fp8State) or is_named(precision, "fp8")


DELAYED = "fp8_delayed"


def is_named(precision: Any, name: str) -> bool:
    """Whether a precision is that string; arrays are not compared."""
    return isinstance(precision, str) and precision == name


def state_of(op: str, precision: Any) -> Fp8State | None:
    """The state that a caller has passed as `precision`, or None.

    Raises:
      ValueError: it is of another operator.
    """
    if not isinstance(precision, Fp8State):
        return None
    history, wanted = precision.history, len(MATRICES[op])
    if history.ndim != 2 or history.shape[0] != wanted or history.shape[1] < 1:
        raise ValueError(
            f"{op}: precision is a state whose history has shape {history.shape}, but there are"
            f' {wanted} matrices with one call or more each; pass Fp8State.zeros("{op}").'
        )
    return precision


def runner(op: str, implementation: str | None, device: dispatch.Device, x: jax.Array) -> Runner:
    """The Runner of an operator in float8.

    Raises:
      ValueError: x is of another dtype than float8 products are made of, or the implementation has none.
    """
    if x.dtype not in DTYPES:
        raise ValueError(
            f'{op}: precision is "fp8" and x has dtype {x.dtype}, but float8 is made of float32,'
            " bfloat16 and float16; pass x in one of these, or leave precision out."
        )
    if implementation == "cuda":
        raise ValueError(
            f'{op}: implementation="cuda" was named and precision is "fp8", but CUDA C has no product of'
            ' float8; pass implementation=None, "pallas" or "xla".'
        )
    return Runner(implementation, device)


class Copies(NamedTuple):
    """A matrix [..., N] in float8: values times a scale."""

    values: Any
    """[..., N], or None."""
    transposed: Any
    """[N, ...], or None."""
    scale: jax.Array
    """A scalar."""
    largest: Any
    """[P]: magnitudes, the largest of which the scale is made of."""
    sums: Any = None
    """[N], float32, over all rows of the matrix before it was quantised; or None."""
    found: Any = None
    """[1], the largest magnitude, where the scale is of another; or None."""

    def kept(self, *names: str) -> "Copies":
        """What a backward needs: the scale, and what is named."""
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
    largest: jax.Array | None = None,
    history: jax.Array | None = None,
) -> Copies:
    """Matrices [..., N_i] in float8, side by side and with one scale.

    Args:
      dtype: FORWARD or GRADIENT.
      activation: is applied to them first.
      gated: there are two, and the activation of the first is multiplied by the second.
      straight: whether the values as they lie are wanted.
      transposes: whether the transposed ones are.
      sums: whether the matrices' sums over their rows are, as gradients of biases.
      largest: [P], magnitudes, the largest of which is that of what is quantised, where it is known;
        needed with an activation.
      history: [calls], of the matrix, by which it is scaled instead where there is one.
    """
    in_one_piece = sharding.is_in_one_piece(*matrices)
    padded = (*matrices, *[None] * (3 - len(matrices)))
    # Who knows the magnitudes has just written the matrices, and the cache holds what was written last.
    from_end = largest is not None
    found = largest
    observes = history is not None and largest is None and in_one_piece
    if history is not None:
        largest = _from_history(history, dtype)
        if found is None and not in_one_piece:
            found = reference.fp8.largest_magnitude(*matrices)[None]
    elif largest is None:
        if in_one_piece:
            (largest,) = run(_Largest(len(matrices)), *padded)
        else:
            largest = reference.fp8.largest_magnitude(*matrices)[None]
    assert largest is not None
    if history is None:
        largest = _of_all_shards(largest)
    stage = _Quantize(
        dtype,
        activation,
        gated,
        straight,
        transposes,
        sums,
        observes,
        len(matrices),
        in_one_piece,
        from_end,
    )
    values, transposed, scale, total, parts = run(stage, *padded, largest)
    if scale is None:
        scale = reference.fp8.scale_for(reference.fp8.largest_magnitude(largest), dtype)
    if history is not None:
        seen = found if parts is None else parts
        assert seen is not None
        found = _of_all_shards(reference.fp8.largest_magnitude(seen)[None])
    return Copies(values, transposed, scale.reshape(()), largest, total, found)


def copies_of(
    run: Runner, state: Fp8State | None, op: str, matrix: str, *arrays: jax.Array, **wanted: Any
) -> Copies:
    """`copies` of what MATRICES calls `matrix`, scaled by its history where there is a state."""
    history = None if state is None else state.of(op, matrix)
    return copies(run, *arrays, history=history, **wanted)


def _of_all_shards(largest: jax.Array) -> jax.Array:
    """In a shard_map that tracks what varies, the shards of a matrix have one scale as under jit."""
    names = tuple(sorted(sharding.varying(largest)))
    return jax.lax.pmax(largest, names) if names else largest


def _from_history(history: jax.Array, dtype: Any) -> jax.Array:
    """[1], the largest magnitude that has been seen, or that of scale 1."""
    largest = jnp.max(history, keepdims=True)
    return jnp.where(largest > 0.0, largest, FORMATS[jnp.dtype(dtype).name].largest)


def layer(
    run: Runner,
    op: str,
    x: Copies,
    w: Copies,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    activation: str | None = None,
    out_dtype: Any = None,
    narrow_dtype: Any,
    saves: bool = False,
    maximised: pallas_fp8.Maximised | None = None,
) -> Any:
    """(activation(z) + residual, z, maxima of rows) of z = x @ w + bias, of w's transposed copy.

    The arguments are those of `pallas_kernels.product.fp8.layer`.
    """
    # Devices that share the columns would add their maxima up; z is then read once more.
    observed = maximised if sharding.is_in_one_piece(x.values, w.transposed) else None
    stage = _Layer(op, activation, out_dtype, narrow_dtype, saves, observed)
    columns = w.transposed.shape[0]
    y, z, maxima = run(stage, x.values, w.transposed, _of_columns(x, w, columns), bias, residual)
    if maximised is not None and maxima is None:
        maxima = z if maximised == "value" else jnp.abs(z)
    return y, z, maxima


def hidden_magnitude(activation: str | None, maxima: jax.Array, up: Any = None) -> jax.Array:
    """[1], a bound of the magnitudes of a hidden layer, which is nowhere written.

    Args:
      activation: of the hidden layer.
      maxima: of the values that the activation reads; without one, of their magnitudes.
      up: of the magnitudes by which it is multiplied, where it is.
    """
    largest = reference.fp8.largest_activation(activation, maxima.astype(jnp.float32))
    if up is not None:
        largest = largest * reference.fp8.largest_magnitude(up)
    return largest[None]


def maximised_of(activation: str | None) -> pallas_fp8.Maximised:
    """Which maxima `hidden_magnitude` wants."""
    return "magnitude" if activation is None else "value"


def input_gradient(run: Runner, op: str, dy: Copies, w: Copies, dtype: Any) -> jax.Array:
    """The gradient dy @ w^T of x [..., D], in x's dtype, of dy [..., F] and w [D, F]."""
    stage = _Layer(f"{op} input gradient", None, dtype, dtype, False, None)
    dx, _, _ = run(stage, dy.values, w.values, _of_columns(dy, w, w.values.shape[0]), None, None)
    return dx


def weight_gradient(run: Runner, op: str, x: Copies, dy: Copies, dtype: Any) -> jax.Array:
    """The gradient x^T @ dy [D, F] of weights, of both transposed copies."""
    stage = _WeightGradient(op, dtype)
    (dw,) = run(stage, x.transposed, dy.transposed, _of_columns(x, dy, dy.transposed.shape[0]))
    return dw


class HiddenGradient(NamedTuple):
    """What comes of the gradient of a hidden layer, in z's dtype; None for what there is not."""

    dz: jax.Array
    dup: Any
    largest: jax.Array
    """[1], of the magnitudes of both."""


def hidden_gradient(
    run: Runner,
    op: str,
    dy: Copies,
    w: Copies,
    z: jax.Array,
    up: jax.Array | None,
    *,
    activation: str | None,
) -> HiddenGradient:
    """The gradients to z [..., F] and up, of which the hidden layer activation(z) [* up] was made."""
    observes = sharding.is_in_one_piece(dy.values, w.values)
    stage = _HiddenGradient(op, activation, observes)
    scale = _of_columns(dy, w, w.values.shape[0])
    dz, dup, max_dz, max_dup = run(stage, dy.values, w.values, scale, z, up)
    largest = [m for m in ((max_dz, max_dup) if observes else (dz, dup)) if m is not None]
    found = reference.fp8.largest_magnitude(*largest)[None]
    return HiddenGradient(dz, dup, found)


def _of_columns(a: Copies, b: Copies, columns: int) -> jax.Array:
    """The scale of a product, for each of its columns."""
    return jnp.full((columns,), a.scale * b.scale)


# --- kernels --------------------------------------------------------------------------------------


class _OneByOne:
    """A stage that has no axis for a batch: each entry's tensors have scales of their own."""

    def batched(self, call, axis_size, in_batched, *operands) -> None:
        """None: the entries run one after the other."""
        del call, axis_size, in_batched, operands


_BLOCKS = 2
"""Of the kernel that finds the largest magnitude, for each multiprocessor."""


@dataclass(frozen=True)
class _Largest(_OneByOne):
    """(magnitudes [P],) of matrices [M, N_i], which are in one piece."""

    matrices: int

    @property
    def name(self) -> str:
        return "fp8 largest magnitude"

    def axes(self, *operands) -> Axes:
        rows = sharding.leading_axes(operands[0].ndim - 1)
        return Axes([rows + letter for letter in "deg"], ("p",), whole=rows + "degp")

    def reasons(self, device, *operands) -> Mapping[str, str | None]:
        reason = cuda.library.why_unfit(device.compute_capability)
        reason = reason or cuda.library.why_dtype_unfit(operands[0].dtype)
        if len({operand.dtype for operand in operands if operand is not None}) > 1:
            reason = reason or "it takes arrays of one dtype"
        return _measured_first({"cuda": reason or cuda.library.why_unavailable(), "xla": None})

    def run(self, implementation, device, *operands) -> Results:
        arrays = [operand for operand in operands if operand is not None]
        blocks = _BLOCKS * max(1, device.multiprocessors)
        if implementation == "cuda":
            return (cuda.quantize.largest(arrays, blocks),)
        return (jnp.full((blocks,), reference.fp8.largest_magnitude(*arrays)),)


@dataclass(frozen=True)
class _Quantize(_OneByOne):
    """(values [M, N], values^T, scale [1], sums [N], found [Q]) of matrices [M, N_i], magnitudes [P]."""

    dtype: Any
    activation: str | None
    gated: bool
    straight: bool
    transposes: bool
    sums: bool
    observes: bool
    matrices: int
    returns_scale: bool
    """Devices that share the matrices would add the scale up."""
    from_end: bool

    @property
    def name(self) -> str:
        return "fp8 quantize"

    def axes(self, *operands) -> Axes:
        del operands
        # Side by side they have an axis of their own, which devices cannot split.
        apart = self.matrices > 1 and not self.gated
        sources = "deg" if apart else "ddd"
        columns = "c" if apart else "d"
        return Axes(
            (*(ROWS + source for source in sources), "p"),
            (
                ROWS + columns if self.straight else None,
                columns + ROWS if self.transposes else None,
                "s" if self.returns_scale else None,
                columns if self.sums else None,
                "q" if self.observes else None,
            ),
            whole="degcpsq" if apart else "psq",
        )

    def reasons(self, device, *operands) -> Mapping[str, str | None]:
        matrices = [operand for operand in operands[:-1] if operand is not None]
        reason = cuda.quantize.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=matrices[0].dtype,
            rows=matrices[0].shape[0],
            widths=[matrix.shape[1] for matrix in matrices],
            transposes=self.transposes,
        )
        return _measured_first({"cuda": reason, "xla": None})

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
        )
        if implementation == "cuda":
            keywords |= dict(observes=self.observes, from_end=self.from_end)
            values, transposed, scale, total, found = cuda.quantize.quantize(
                matrices, largest, **keywords
            )
        else:
            values, transposed, scale, total = reference.fp8.quantize(matrices, largest, **keywords)
            found = self._found(matrices) if self.observes else None
        return values, transposed, scale if self.returns_scale else None, total, found

    def _found(self, matrices: Sequence[jax.Array]) -> jax.Array:
        """As many magnitudes as the kernel finds."""
        columns = sum(matrix.shape[1] for matrix in matrices)
        tiles = cuda.quantize.tiles(matrices[0].shape[0], columns)
        return jnp.full((tiles,), reference.fp8.largest_magnitude(*matrices))


def _measured_first(reasons: dict[str, str | None]) -> dict[str, str | None]:
    unmeasured = dispatch.why_unmeasured("fp8 quantize") is not None
    return dispatch.preferring("xla", reasons) if unmeasured else reasons


def _product_reasons(
    device: dispatch.Device, x: Any, w: Any, others: Mapping[str, Any]
) -> dict[str, str | None]:
    """Why each implementation cannot multiply x [M, K] and w [N, K] in float8."""
    reason = pallas_fp8.why_unsupported(
        compute_capability=device.compute_capability,
        x_dtype=x.dtype,
        w_dtype=w.dtype,
        others=others,
        k=x.shape[1],
        n=w.shape[0],
    )
    return {"pallas": reason, "xla": None}


def _bytes(*dtypes: Any) -> int:
    return sum(jnp.dtype(dtype).itemsize for dtype in dtypes if dtype is not None)


@dataclass(frozen=True)
class _Layer(_OneByOne):
    """(activation(z) + residual, z, maxima [M]) of x [M, K], w [N, K] and scale [N]."""

    op: str
    activation: str | None
    out_dtype: Any
    narrow_dtype: Any
    saves: bool
    maximised: pallas_fp8.Maximised | None

    @property
    def name(self) -> str:
        return f"{self.op} in fp8"

    def axes(self, *operands) -> Axes:
        del operands
        rows = ROWS + "n"
        return Axes(
            (ROWS + "k", "nk", "n", "n", rows),
            (
                None if self.out_dtype is None else rows,
                rows if self.saves else None,
                None if self.maximised is None else ROWS,
            ),
            whole="k",
        )

    def reasons(self, device, x, w, scale, bias, residual) -> Mapping[str, str | None]:
        del scale
        others = {
            "bias": None if bias is None else bias.dtype,
            "residual": None if residual is None else residual.dtype,
            "the result": self.out_dtype,
            "what is saved": self.narrow_dtype,
        }
        return _product_reasons(device, x, w, others)

    def work(self, x, w, residual) -> cost.Work:
        return pallas_fp8.work(
            x,
            w,
            read_bytes=0 if residual is None else residual.dtype.itemsize,
            written_bytes=_bytes(self.out_dtype, self.narrow_dtype if self.saves else None),
            activations=int(self.activation is not None),
        )

    def configs(self, implementation, device, x, w, scale, bias, residual) -> Sequence[Hashable]:
        del scale, bias
        if implementation != "pallas":
            return ()
        return pallas_fp8.candidates(self.work(x, w, residual), device.multiprocessors)

    def run(self, implementation, device, x, w, scale, bias, residual, config=None) -> Results:
        keywords: dict[str, Any] = dict(
            activation=self.activation,
            out_dtype=self.out_dtype,
            narrow_dtype=self.narrow_dtype,
            saves=self.saves,
            maximised=self.maximised,
        )
        if implementation == "xla":
            return reference.fp8.layer(x, w, scale, bias, residual, **keywords)
        if config is None:
            work = self.work(x, w, residual)
            config = pallas_fp8.candidates(work, device.multiprocessors)[0]
        return pallas_fp8.layer(
            x,
            w,
            scale,
            bias,
            residual,
            **keywords,
            multiprocessors=device.multiprocessors,
            config=config,
        )


@dataclass(frozen=True)
class _HiddenGradient(_OneByOne):
    """(dz, dup, maxima [M] of both) of dy [M, K], w [N, K], scale [N], z and up [M, N]."""

    op: str
    activation: str | None
    maximises: bool

    @property
    def name(self) -> str:
        return f"{self.op} hidden gradient in fp8"

    def axes(self, dy, w, scale, z, up) -> Axes:
        del dy, w, scale, z
        rows, gated = ROWS + "n", up is not None
        return Axes(
            (ROWS + "k", "nk", "n", rows, rows),
            (
                rows,
                rows if gated else None,
                ROWS if self.maximises else None,
                ROWS if self.maximises and gated else None,
            ),
            whole="k",
        )

    def reasons(self, device, dy, w, scale, z, up) -> Mapping[str, str | None]:
        del scale, up
        return _product_reasons(device, dy, w, {"z": z.dtype})

    def work(self, dy, w, z, up) -> cost.Work:
        moved = z.dtype.itemsize * (1 if up is None else 2)
        activations = 0 if self.activation is None else 2
        return pallas_fp8.work(
            dy, w, read_bytes=moved, written_bytes=moved, activations=activations
        )

    def configs(self, implementation, device, dy, w, scale, z, up) -> Sequence[Hashable]:
        del scale
        if implementation != "pallas":
            return ()
        return pallas_fp8.hidden_candidates(self.work(dy, w, z, up), device.multiprocessors)

    def run(self, implementation, device, dy, w, scale, z, up, config=None) -> Results:
        keywords: dict[str, Any] = dict(activation=self.activation, maximise=self.maximises)
        if implementation == "xla":
            return reference.fp8.hidden_gradient(dy, w, scale, z, up, **keywords)
        if config is None:
            work = self.work(dy, w, z, up)
            config = pallas_fp8.hidden_candidates(work, device.multiprocessors)[0]
        return pallas_fp8.hidden_gradient(
            dy,
            w,
            scale,
            z,
            up,
            **keywords,
            multiprocessors=device.multiprocessors,
            config=config,
        )


@dataclass(frozen=True)
class _WeightGradient(_OneByOne):
    """(scale * x @ dy^T,) [K, N] of x [K, M], dy [N, M] and scale [N]."""

    op: str
    dtype: Any

    @property
    def name(self) -> str:
        return f"{self.op} weight gradient in fp8"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(("k" + ROWS, "n" + ROWS, "n"), ("kn",))

    def reasons(self, device, x, dy, scale) -> Mapping[str, str | None]:
        del scale
        return _product_reasons(device, x, dy, {"the gradient": self.dtype})

    def work(self, x, dy) -> cost.Work:
        return pallas_fp8.work(x, dy, read_bytes=0, written_bytes=_bytes(self.dtype))

    def configs(self, implementation, device, x, dy, scale) -> Sequence[Hashable]:
        del scale
        if implementation != "pallas":
            return ()
        return pallas_fp8.promoted_candidates(self.work(x, dy), device.multiprocessors)

    def run(self, implementation, device, x, dy, scale, config=None) -> Results:
        if implementation == "xla":
            return (reference.fp8.weight_gradient(x, dy, scale, out_dtype=self.dtype),)
        dw = pallas_fp8.weight_gradient(
            x,
            dy,
            scale,
            out_dtype=self.dtype,
            multiprocessors=device.multiprocessors,
            config=config,
        )
        return (dw,)
