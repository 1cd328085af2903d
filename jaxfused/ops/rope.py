"""rope and its tables of angles: validation and choice of implementation."""

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.validation import check_floating, check_shape
from jaxfused.reference.rope import RopeScaling


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

    Source: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864
    """
    op = "rope"
    q, k, positions, cos, sin = jax.tree.map(jnp.asarray, (q, k, positions, cos, sin))
    _validate(q, k)
    if cos is None and sin is None:
        rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
        if positions is None:
            start = jnp.asarray(offset)
            positions = start[..., None] + jnp.arange(q.shape[-3])
        elif not isinstance(offset, int) or offset != 0:
            raise ValueError(f"{op}: positions and offset were passed; pass one of them.")
        cos, sin = rope_tables(positions, rotary_dim, theta=theta, scaling=scaling)
    elif positions is not None or rotary_dim is not None or scaling is not None:
        raise ValueError(
            f"{op}: cos or sin was passed with what they are made from; pass cos and sin alone, or"
            " positions, rotary_dim and scaling."
        )
    check_tables(op, q.shape, cos, sin)
    dispatch.choose(op, implementation, implementations(dispatch.current_device(q, k)))
    q = reference.rope.rotate(q, cos, sin, interleaved=interleaved)
    if k is None:
        return q
    return q, reference.rope.rotate(k, cos, sin, interleaved=interleaved)


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


def implementations(device: dispatch.Device) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run on `device`."""
    del device
    return {
        "pallas": "there is no Pallas kernel of rope yet",
        "cuda": "there is no CUDA kernel of rope yet",
        "xla": None,
    }


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
