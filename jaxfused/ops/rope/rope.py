"""rope: validation, choice of implementation, gradient. The angles are those of rope_tables.py."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxfused import dispatch
from jaxfused.ops.rope import rope_cuda, rope_xla
from jaxfused.ops.rope.rope_scaling import RopeScaling
from jaxfused.ops.rope.rope_tables import THETA, check_tables, tables_of
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_array,
    as_arrays,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import LeftToXla, takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import along_last_axis
from jaxfused.runtime.runner import Axes, Results, Runner, StageCall
from jaxfused.runtime.shapes import split_axis
from jaxfused.runtime.vmap import batch_all, is_batched
from pallas_kernels.rows import rope as pallas_rope


@python_numbers
def rope(
    q: jax.Array,
    k: jax.Array | None = None,
    *,
    positions: jax.Array | None = None,
    offset: int | jax.Array = 0,
    rotary_dim: int | None = None,
    theta: float = THETA,
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
      offset: the first position, a scalar or [...]: in a decoder, the number of cached tokens.
      rotary_dim: R, even, by default H.
      theta: the base of the frequencies.
      scaling: such as `YarnRope`; None for unscaled frequencies.
      cos: [T, R/2] or [..., T, R/2], with `sin`, in place of positions, offset, rotary_dim, theta and
        scaling. Where heads have angles of their own (by XLA), [T, N, R/2] or [..., T, N, R/2], in
        which axes before T may be 1; of q [B, T, N, H] with B = T = N, [T, N, R/2] is read as [B, T,
        R/2].
      sin: like `cos`.
      interleaved: whether a pair is (2 i, 2 i + 1) (GPT-J, RoFormer), else of both halves (GPT-NeoX).
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
    q, k, positions, cos, sin = as_arrays(q, k, positions, cos, sin)
    _validate(q, k)
    if cos is None and sin is None:
        rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
        if positions is None:
            start = as_array(offset)[..., None]
            positions = start + along_last_axis(jnp.arange(q.shape[-3]), start)
        elif _is_given(offset):
            raise ValueError(f"{op}: positions and offset were passed; pass one of them.")
        cos, sin = tables_of(op, positions, rotary_dim, theta, scaling)
    elif (
        positions is not None
        or rotary_dim is not None
        or scaling is not None
        or theta != THETA
        or _is_given(offset)
    ):
        raise ValueError(
            f"{op}: cos or sin was passed with what they are made from; pass cos and sin of the"
            " positions to rotate by alone, or positions or offset, rotary_dim, theta and scaling."
        )
    cos, sin = check_tables(op, q.shape, cos, sin)
    device = dispatch.current_device(q, k)
    run = Runner(implementation, device)
    why_xla: Callable[[], LeftToXla | None] | None = None
    missing = {}
    if cos.ndim == q.ndim:
        if k is not None and cos.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"{op}: cos has shape {cos.shape}, with angles of {cos.shape[-2]} heads, but k has"
                f" {k.shape[-2]}; rotate q and k in two calls, each with its own tables."
            )
        why = "the kernels rotate all heads of a position by the same angles"
        missing = {"pallas": why, "cuda": why}
    elif not interleaved and 2 * cos.shape[-1] == q.shape[-1]:
        why = (
            "XLA rotates halves of whole heads as fast as memory goes, and takes what stands around"
            " into the same kernel"
        )
        why_xla = functools.partial(run.left_to_xla, why, _stages(interleaved, q, k, cos, sin))
    if takes_reference(op, implementation, device, q, why_xla=why_xla, missing=missing):
        rotate = functools.partial(
            rope_xla.rotate,
            interleaved=interleaved,
            in_one_piece=sharding.is_in_one_piece(q),
        )
        q, k = rotate(q, cos, sin), None if k is None else rotate(k, cos, sin)
    else:
        cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
        q, k = _grouped(q, k)
        operands = sharding.align((q, k, cos, sin), operand_axes=_axes(q, cos), whole=_WHOLE)
        q, k = _rope(run, _Rotation(interleaved, False), *operands)
        q, k = ungrouped(q), None if k is None else ungrouped(k)
    return q if k is None else (q, k)


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


def _is_given(offset: int | jax.Array) -> bool:
    return not (isinstance(offset, int | np.integer) and offset == 0)


def _stages(interleaved: bool, *arrays: jax.Array | None) -> Iterator[StageCall]:
    """Yields the kernel calls of the rotation and of its gradient, each with its operands' shapes."""
    operands = sharding.eval_shape(
        lambda q, k, *tables: (*_grouped(q, k), *(t.astype(jnp.float32) for t in tables)), *arrays
    )
    yield _Rotation(interleaved, False), operands
    yield _Rotation(interleaved, True), operands


# --- gradient -------------------------------------------------------------------------------------

_WHOLE = "gkhr"
"""Letters of axes that devices must not split: heads of a group, features and pairs of a head."""


def _grouped(q: jax.Array, k: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns q [..., T, N, H] and k as [..., T, n, heads/n, H], with n the gcd of their head counts.

    Devices can split both along the axis n.
    """
    groups = math.gcd(q.shape[-2], 0 if k is None else k.shape[-2])

    def grouped(x):
        return split_axis(x, x.ndim - 2, groups, x.shape[-2] // groups)

    return grouped(q), None if k is None else grouped(k)


def _heads(x: Any) -> int:
    if x is None:
        return 0
    *_, groups, heads, _ = x.shape
    return groups * heads


def ungrouped(x: jax.Array) -> jax.Array:
    """Merges grouped heads [..., T, n, N/n, H] into [..., T, N, H]."""
    return x.reshape(*x.shape[:-3], math.prod(x.shape[-3:-1]), x.shape[-1])


@dataclass(frozen=True)
class _Rotation:
    """Rotates (q, k): grouped heads [..., T, n, N/n, H] by angles [..., T, R/2] or [T, R/2]."""

    interleaved: bool
    inverse: bool

    @property
    def name(self) -> str:
        return "rope"

    def axes(self, q, k, cos, sin) -> Axes:
        del sin
        axes = _axes(q, cos)
        return Axes(axes, (axes[0], None if k is None else axes[1]), _WHOLE)

    def why_not(self, device, q, k, cos, sin) -> Mapping[str, str | None]:
        del sin
        limits = dict(
            compute_capability=device.compute_capability,
            length=q.shape[-4],
            heads=_heads(q),
            key_heads=_heads(k),
            head_size=q.shape[-1],
            rotary_dim=2 * cos.shape[-1],
            interleaved=self.interleaved,
            dtype=q.dtype,
            k_dtype=q.dtype if k is None else k.dtype,
        )
        return {
            "pallas": pallas_rope.why_unsupported(**limits),
            "cuda": rope_cuda.why_unsupported(**limits),
            "xla": None,
        }

    def estimate(self, device, able, q, k, cos, sin) -> Estimate:
        del device, able, sin
        head = (q.shape[-1], 2 * cos.shape[-1], q.dtype.itemsize)
        in_cuda = rope_cuda.access_bytes(*head, interleaved=self.interleaved)
        if in_cuda < _XLA_BYTES and not self.interleaved:
            return Rule(("pallas", "xla"), "CUDA is slower than XLA with single 16-bit values")
        few = _FEW_BYTES_ALONE if k is None else _FEW_BYTES
        if q.size * q.dtype.itemsize <= few:
            return Rule(("pallas", "xla"), f"CUDA is no faster than XLA with {few} bytes or less")
        in_pallas = pallas_rope.access_bytes(_heads(q), _heads(k), *head)
        # Both kernels are limited by memory traffic, so the one whose threads move more bytes at a
        # time is faster.
        first = "cuda" if in_pallas < in_cuda else "pallas"
        return Rule((first,), f"accesses have {in_pallas} bytes in Pallas and {in_cuda} in CUDA")

    def run(self, implementation, device, q, k, cos, sin) -> Results:
        del device
        if implementation == "xla":
            return tuple(
                None if x is None else self.by_xla(ungrouped(x), cos, sin).reshape(x.shape)
                for x in (q, k)
            )
        rotate: Any = (
            functools.partial(rope_cuda.rotate, interleaved=self.interleaved)
            if implementation == "cuda"
            else pallas_rope.rotate
        )
        q_heads, k_heads = (
            None if x is None else x.reshape(-1, x.shape[-4], _heads(x), x.shape[-1])
            for x in (q, k)
        )
        cos, sin = (table.reshape(-1, *table.shape[-2:]) for table in (cos, sin))
        rotated = rotate(q_heads, k_heads, cos, sin, inverse=self.inverse)
        return tuple(
            None if x is None else y.reshape(x.shape) for x, y in zip((q, k), rotated, strict=True)
        )

    def by_xla(self, x, cos, sin) -> jax.Array:
        """Rotates x [..., T, N, H] in XLA.

        For interleaved pairs, the inverse rotation is faster as the transpose of the rotation.
        """
        rotate = functools.partial(rope_xla.rotate, cos=cos, sin=sin, interleaved=self.interleaved)
        if self.inverse and self.interleaved:
            return jax.linear_transpose(rotate, x)(x)[0]
        return rotate(x, sin=-sin if self.inverse else sin)

    def batched(self, call, axis_size, in_batched, q, k, cos, sin) -> Results | None:
        rows = q.shape[1 if is_batched(in_batched[0]) else 0 : -3]
        q, k = batch_all(axis_size, in_batched[:2], (q, k))
        return call(self, q, k, *batch_tables(axis_size, in_batched[2:], (cos, sin), rows))


_XLA_BYTES = 4
"""Bytes that a thread of XLA's kernel reads at a time from each half of a head."""
_FEW_BYTES = 2**16
"""Bytes of the queries up to which a kernel's launch takes longer than its reads."""
_FEW_BYTES_ALONE = 2**21
"""`_FEW_BYTES` for a call without keys, for which XLA launches one kernel instead of two."""


class _Residuals(NamedTuple):
    cos: jax.Array
    sin: jax.Array
    q_and_k: tuple[jax.Array, jax.Array | None] | None
    """q and k, saved only if cos or sin has a gradient; the gradients of q and k do not need them."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="rope", once=False)
def _rope(run: Runner, rotation: _Rotation, q, k, cos, sin):
    return run(rotation, q, k, cos, sin)


def _rope_fwd(run: Runner, rotation: _Rotation, q, k, cos, sin):
    perturbed = cos.perturbed or sin.perturbed
    q, k, cos, sin = (None if a is None else a.value for a in (q, k, cos, sin))
    saved = _Residuals(cos, sin, (q, k) if perturbed else None)
    # The forward calls the operator itself, so that JAX can differentiate the gradient too.
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
    """Returns the axis letters of grouped q, grouped k, cos and sin."""
    rows = sharding.leading_axes(q.ndim - 3)
    table_axes = rows[len(rows) - (table.ndim - 1) :] + "r"
    return rows + "ngh", rows + "nkh", table_axes, table_axes


def batch_tables(
    axis_size: int,
    in_batched: Sequence[Any],
    tables: Sequence[jax.Array],
    rows: tuple[int, ...],
) -> Sequence[jax.Array]:
    """Returns cos and sin for rows [axis_size, *rows] under `jax.vmap`, from those for `rows`.

    The tables get all axes of the batch, or none if all rows share the angles.
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
