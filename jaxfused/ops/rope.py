"""rope and its tables of angles: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxfused import cuda, dispatch, reference, sharding
from jaxfused.ops.batching import batch_all, is_batched
from jaxfused.ops.kernel_call import Axes, Results, Runner, takes_reference
from jaxfused.ops.validation import check_floating, check_shape
from jaxfused.reference.promotion import along_last_axis
from jaxfused.semantics.rope_scaling import RopeScaling
from pallas_kernels.rows import rope as pallas_rope


def rope(
    q: jax.Array,
    k: jax.Array | None = None,
    *,
    positions: jax.Array | None = None,
    offset: int | jax.Array = 0,
    rotary_dim: int | None = None,
    theta: float = 10_000.0,
    scaling: RopeScaling | None = None,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    interleaved: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Rotary position embedding of queries and keys together.

    .. math::
        \begin{pmatrix} y_a \\ y_b \end{pmatrix} =
        \begin{pmatrix} \cos p \omega_i & -\sin p \omega_i \\ \sin p \omega_i & \cos p \omega_i
        \end{pmatrix} \begin{pmatrix} x_a \\ x_b \end{pmatrix}, \quad
        \omega_i = \theta^{-2 i / R}

    for position p and each pair i of the first R = `rotary_dim` features: (a, b) = (i, i + R/2), or
    (2 i, 2 i + 1) if `interleaved`. The other features stay as they are. Angles and arithmetic are
    in float32. The gradient is the rotation back.

    The angles are made from `positions` or `offset`, `rotary_dim`, `theta` and `scaling`; or they
    are given as `cos` and `sin`, from `rope_tables` or `axial_rope_tables`.

    Args:
      q: [..., T, N, H], float32, bfloat16 or float16 (float64 with implementation "xla").
      k: [..., T, K, H] with q's axes before the heads, or None.
      positions: [T] or [..., T], integers or floats; by default offset + 0, 1, 2, ...
      offset: the first position, a scalar or [...]: how far a decoder has come.
      rotary_dim: R, even, by default H.
      theta: the base of the frequencies.
      scaling: a `LinearRope`, `NTKRope`, `YarnRope` or `Llama3Rope`; None for none of them.
      cos: [T, R/2] or [..., T, R/2], with `sin` and in place of all that makes angles.
      sin: like `cos`.
      interleaved: whether a pair is two neighbours (GPT-J, RoFormer), else two halves (GPT-NeoX).
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      q rotated, of its shape and dtype; with `k` both.

    Raises:
      ValueError: shapes or dtypes do not fit, angles are given twice, or the named implementation
        cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> q, k = jnp.ones((2, 5, 8, 64)), jnp.ones((2, 5, 2, 64))
      >>> q, k = jaxfused.rope(q, k, offset=3)
      >>> q.shape, k.shape
      ((2, 5, 8, 64), (2, 5, 2, 64))

    Forward-mode differentiation needs `implementation="xla"`.

    Source: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864
    """
    op = "rope"
    q, k, positions, cos, sin = jax.tree.map(jnp.asarray, (q, k, positions, cos, sin))
    _validate(q, k)
    if cos is None and sin is None:
        rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
        if positions is None:
            start = jnp.asarray(offset)[..., None]
            positions = start + along_last_axis(jnp.arange(q.shape[-3]), start)
        elif not isinstance(offset, int) or offset != 0:
            raise ValueError(f"{op}: positions and offset were passed; pass one of them.")
        cos, sin = rope_tables(positions, rotary_dim, theta=theta, scaling=scaling)
    elif positions is not None or rotary_dim is not None or scaling is not None:
        raise ValueError(
            f"{op}: cos or sin was passed with what they are made from; pass cos and sin alone, or"
            " positions, rotary_dim and scaling."
        )
    check_tables(op, q.shape, cos, sin)
    device = dispatch.current_device(q, k)
    why_xla = None
    if not interleaved and 2 * cos.shape[-1] == q.shape[-1]:
        why_xla = (
            "XLA rotates halves of whole heads as fast as memory goes, and takes what stands around"
            " into the same kernel"
        )
    if takes_reference(op, implementation, device, q, why_xla=why_xla):
        rotate = functools.partial(
            reference.rope.rotate,
            interleaved=interleaved,
            in_one_piece=sharding.is_in_one_piece(q),
        )
        q, k = rotate(q, cos, sin), None if k is None else rotate(k, cos, sin)
    else:
        cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
        q, k = _grouped(q, k)
        operands = sharding.align((q, k, cos, sin), operand_axes=_axes(q, cos), whole=_WHOLE)
        q, k = _rope(Runner(implementation, device), _Rotation(interleaved, False), *operands)
        q, k = ungrouped(q), None if k is None else ungrouped(k)
    return q if k is None else (q, k)


def rope_tables(
    positions: jax.Array,
    rotary_dim: int,
    *,
    theta: float = 10_000.0,
    scaling: RopeScaling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The cosines and sines that `rope` takes: make them once where many layers share them.

    Args:
      positions: [..., T], integers or floats.
      rotary_dim: R, the number of features that rotate; even.
      theta: the base of the frequencies theta^(-2 i / R).
      scaling: a `LinearRope`, `NTKRope`, `YarnRope` or `Llama3Rope`; None for none of them.

    Returns:
      (cos, sin), each [..., T, R/2] of float32, times the scaling's attention factor.

    Raises:
      ValueError: rotary_dim is odd or not positive.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> cos, sin = jaxfused.rope_tables(jnp.arange(5), 64, scaling=jaxfused.LinearRope(4.0))
      >>> cos.shape
      (5, 32)

    Source: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864
    """
    _check_divides("rope_tables", rotary_dim, 2)
    scaling = RopeScaling() if scaling is None else scaling
    return reference.rope.tables(jnp.asarray(positions), rotary_dim, theta, scaling)


def axial_rope_tables(
    height: int, width: int, rotary_dim: int, *, theta: float = 100.0
) -> tuple[jax.Array, jax.Array]:
    r"""The cosines and sines that `rope` takes for an image's patches, row by row.

    Of the R/2 pairs the first R/4 turn by the row and the others by the column, pair i of either by
    :math:`\theta^{-4 i / R}` a patch.

    Args:
      height: of the image, in patches.
      width: of the image, in patches.
      rotary_dim: R, the number of features that rotate; a multiple of 4.
      theta: the base of the frequencies.

    Returns:
      (cos, sin), each [height * width, R/2] of float32.

    Raises:
      ValueError: rotary_dim is not a positive multiple of 4.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> cos, sin = jaxfused.axial_rope_tables(14, 14, 64)
      >>> jaxfused.rope(jnp.ones((1, 196, 12, 64)), cos=cos, sin=sin).shape
      (1, 196, 12, 64)

    Source: Heo et al., "Rotary Position Embedding for Vision Transformer", 2024,
    https://arxiv.org/abs/2403.13298
    """
    _check_divides("axial_rope_tables", rotary_dim, 4)
    return reference.rope.axial_tables(height, width, rotary_dim, theta)


def check_tables(
    op: str, shape: tuple[int, ...], cos: jax.Array | None, sin: jax.Array | None
) -> None:
    """Checks that cos and sin are both there and fit queries of `shape` [..., T, N, H]."""
    if cos is None or sin is None:
        raise ValueError(f"{op}: one of cos and sin was passed; pass both.")
    check_floating(op, {"cos": cos, "sin": sin})
    rows, head_size = shape[:-2], shape[-1]
    fits = cos.ndim >= 2 and 0 < 2 * cos.shape[-1] <= head_size
    if not fits or cos.shape[:-1] not in (rows[-1:], rows):
        raise ValueError(
            f"{op}: cos has shape {cos.shape}, but the angles of {rows} positions and heads of"
            f" {head_size} features are needed; pass cos of shape {(*rows[-1:], head_size // 2)},"
            f" with fewer features to rotate a part of the head, or with the axes {rows}."
        )
    check_shape(op, "sin", sin, cos.shape, f"cos has shape {cos.shape}")


def _validate(q, k) -> None:
    op = "rope"
    check_floating(op, {"q": q, "k": k})
    if q.ndim < 3:
        raise ValueError(
            f"{op}: q has shape {q.shape}, but positions and heads have axes of their own;"
            " pass q of shape (..., length, heads, head size)."
        )
    if k is not None:
        heads = k.shape[-2] if k.ndim >= 2 else 1
        shape = (*q.shape[:-2], heads, q.shape[-1])
        check_shape(op, "k", k, shape, f"q has shape {q.shape}, and they differ in heads only")


def _check_divides(op: str, rotary_dim: int, divisor: int) -> None:
    if rotary_dim <= 0 or rotary_dim % divisor:
        raise ValueError(
            f"{op}: rotary_dim is {rotary_dim}, but it is split into pairs;"
            f" pass a positive multiple of {divisor}."
        )


# --- gradient -------------------------------------------------------------------------------------

_WHOLE = "gkhr"
"""The axes that a device must have whole: of a group its heads, of a head its features and pairs."""


def _grouped(q: jax.Array, k: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The heads of q [..., T, N, H] as [..., T, n, N/n, H], and those of k with the same n.

    That is the axis by which devices can split both at once.
    """
    groups = math.gcd(q.shape[-2], 0 if k is None else k.shape[-2])

    def grouped(x):
        return x.reshape(*x.shape[:-2], groups, x.shape[-2] // groups, x.shape[-1])

    return grouped(q), None if k is None else grouped(k)


def ungrouped(x: jax.Array) -> jax.Array:
    """[..., T, n, N/n, H] as [..., T, N, H]."""
    return x.reshape(*x.shape[:-3], math.prod(x.shape[-3:-1]), x.shape[-1])


@dataclass(frozen=True)
class _Rotation:
    """(q, k) rotated: grouped heads [..., T, n, N/n, H] by angles of [..., T, R/2] or [T, R/2]."""

    interleaved: bool
    inverse: bool

    @property
    def name(self) -> str:
        return "rope"

    def axes(self, q, k, cos, sin) -> Axes:
        del sin
        axes = _axes(q, cos)
        return Axes(axes, (axes[0], None if k is None else axes[1]), _WHOLE)

    def reasons(self, device, q, k, cos, sin) -> Mapping[str, str | None]:
        del sin
        limits = dict(
            compute_capability=device.compute_capability,
            length=q.shape[-4],
            heads=math.prod(q.shape[-3:-1]),
            key_heads=0 if k is None else math.prod(k.shape[-3:-1]),
            head_size=q.shape[-1],
            rotary_dim=2 * cos.shape[-1],
            interleaved=self.interleaved,
            dtype=q.dtype,
            k_dtype=q.dtype if k is None else k.dtype,
        )
        reasons = {
            "pallas": pallas_rope.why_unsupported(**limits),
            "cuda": cuda.rope.why_unsupported(**limits),
            "xla": None,
        }
        head = (limits["head_size"], limits["rotary_dim"], q.dtype.itemsize)
        in_pallas = pallas_rope.access_bytes(limits["heads"], limits["key_heads"], *head)
        in_cuda = cuda.rope.access_bytes(*head, interleaved=self.interleaved)
        size = q.size * q.dtype.itemsize
        single_values = in_cuda < _XLA_BYTES and not self.interleaved
        little = size <= (_FEW_BYTES_ALONE if k is None else _FEW_BYTES)
        if single_values or little:
            # Single values of 16 bits take CUDA longer than XLA, and little data takes it no less.
            return {name: reasons[name] for name in ("pallas", "xla", "cuda")}
        # Both kernels only move data: whichever does so in larger pieces is the faster.
        return dispatch.preferring("cuda", reasons) if in_pallas < in_cuda else reasons

    def run(self, implementation, device, q, k, cos, sin) -> Results:
        del device
        if implementation == "xla":
            return tuple(
                None if x is None else self.by_xla(ungrouped(x), cos, sin).reshape(x.shape)
                for x in (q, k)
            )
        rotate: Any = (
            functools.partial(cuda.rope.rotate, interleaved=self.interleaved)
            if implementation == "cuda"
            else pallas_rope.rotate
        )
        q_heads, k_heads = (
            None
            if x is None
            else x.reshape(-1, x.shape[-4], math.prod(x.shape[-3:-1]), x.shape[-1])
            for x in (q, k)
        )
        cos, sin = (table.reshape(-1, *table.shape[-2:]) for table in (cos, sin))
        rotated = rotate(q_heads, k_heads, cos, sin, inverse=self.inverse)
        return tuple(
            None if x is None else y.reshape(x.shape) for x, y in zip((q, k), rotated, strict=True)
        )

    def by_xla(self, x, cos, sin) -> jax.Array:
        """Heads [..., T, N, H] rotated. XLA adds up neighbours' halves faster than it joins them."""
        rotate = functools.partial(
            reference.rope.rotate, cos=cos, sin=sin, interleaved=self.interleaved
        )
        if self.inverse and self.interleaved:
            return jax.linear_transpose(rotate, x)(x)[0]
        return rotate(x, sin=-sin if self.inverse else sin)

    def batched(self, call, axis_size, in_batched, q, k, cos, sin) -> Results | None:
        rows = q.shape[1 if is_batched(in_batched[0]) else 0 : -3]
        q, k = batch_all(axis_size, in_batched[:2], (q, k))
        return call(self, q, k, *batch_tables(axis_size, in_batched[2:], (cos, sin), rows))


_XLA_BYTES = 4
"""What XLA moves at a time, where it reads a head's halves."""
_FEW_BYTES = 2**16
"""Of the queries, which no kernel reads faster than it starts."""
_FEW_BYTES_ALONE = 3 * 2**19
"""Likewise where there are no keys, whose rotation is a second kernel in XLA."""


class _Residuals(NamedTuple):
    cos: jax.Array
    sin: jax.Array
    q_and_k: tuple[jax.Array, jax.Array | None] | None
    """Kept where the angles have gradients themselves: those of q and k need the angles alone."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rope(run: Runner, rotation: _Rotation, q, k, cos, sin):
    return run(rotation, q, k, cos, sin)


def _rope_fwd(run: Runner, rotation: _Rotation, q, k, cos, sin):
    perturbed = cos.perturbed or sin.perturbed
    q, k, cos, sin = (None if a is None else a.value for a in (q, k, cos, sin))
    saved = _Residuals(cos, sin, (q, k) if perturbed else None)
    # By the operator itself, so that a gradient has gradients.
    return _rope(run, rotation, q, k, cos, sin), saved


def _rope_bwd(run: Runner, rotation: _Rotation, saved: _Residuals, cotangents):
    cos, sin, q_and_k = saved
    dq, dk = (jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d for d in cotangents)
    dcos = dsin = None
    if q_and_k is not None:

        def rotated(cos, sin):
            return [None if x is None else rotation.by_xla(ungrouped(x), cos, sin) for x in q_and_k]

        _, vjp = jax.vjp(rotated, cos, sin)
        dcos, dsin = vjp([None if d is None else ungrouped(d) for d in (dq, dk)])
    back = replace(rotation, inverse=not rotation.inverse)
    return *_rope(run, back, dq, dk, cos, sin), dcos, dsin


_rope.defvjp(_rope_fwd, _rope_bwd, symbolic_zeros=True)


def _axes(q: jax.Array, table: jax.Array) -> tuple[str, str, str, str]:
    """The letters of grouped q and k and of both tables, for `sharding`."""
    rows = sharding.leading_axes(q.ndim - 3)
    table_axes = rows[len(rows) - (table.ndim - 1) :] + "r"
    return rows + "ngh", rows + "nkh", table_axes, table_axes


def batch_tables(
    axis_size: int,
    in_batched: Sequence[Any],
    tables: Sequence[jax.Array],
    rows: tuple[int, ...],
) -> Sequence[jax.Array]:
    """The tables for rows [axis_size, *rows], from those for a batch of `rows`.

    One axis for the batch, and all others too: angles are shared by all rows or by none.
    """
    if is_batched(in_batched):
        own = [
            t.reshape(axis_size, *[1] * (len(rows) + 2 - t.ndim), *t.shape[1:])
            for t in batch_all(axis_size, in_batched, tables)
        ]
        return [jnp.broadcast_to(t, (axis_size, *rows, t.shape[-1])) for t in own]
    if tables[0].ndim - 1 == len(rows) > 1:
        return batch_all(axis_size, in_batched, tables)
    return tables
