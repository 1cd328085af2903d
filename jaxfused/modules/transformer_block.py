"""The attention half of a TransformerBlock, with its norms, and the checks of the block's arguments."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.modules.attention import attend
from jaxfused.modules.linear import Kernel, KernelStandIn, linear, promoted
from jaxfused.modules.promotion import floating
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.ops.linear import qkv_projection
from jaxfused.ops.norm import layer_norm
from jaxfused.ops.rope import rope as rope_operator
from jaxfused.runtime.promotion import along_last_axis

Norm = Literal["layer_norm", "rms_norm"]


class HeadNorms(NamedTuple):
    """The norms of queries and keys over each head, with parameters [H]."""

    kind: Norm
    query_scale: jax.Array
    key_scale: jax.Array
    query_bias: jax.Array | None
    key_bias: jax.Array | None


class Rope(Protocol):
    """The part of nnx's or linen's `RotaryEmbedding` that a block uses."""

    interleaved: bool

    def tables(self, positions: jax.Array, head_size: int) -> tuple[jax.Array, jax.Array]:
        """Returns the cosines and sines of the positions' angles."""


def check_norm(norm: str) -> None:
    """Checks that `norm` names one of the norms of a block."""
    if norm not in ("layer_norm", "rms_norm"):
        raise ValueError(
            f"TransformerBlock: norm={norm!r} is not known; pass 'layer_norm' or 'rms_norm'."
        )


def head_norm(normalize_qk: bool | Norm) -> Norm | None:
    """Returns the norm of queries and keys that `normalize_qk` asks for; True is "rms_norm"."""
    if not isinstance(normalize_qk, str):
        return "rms_norm" if normalize_qk else None
    if normalize_qk not in ("layer_norm", "rms_norm"):
        raise ValueError(
            f"TransformerBlock: normalize_qk={normalize_qk!r} is not known; pass False, True,"
            " 'rms_norm' or 'layer_norm'."
        )
    return normalize_qk


def tables_of(
    rope: Rope | None,
    positions: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    length: int,
    head_size: int,
) -> tuple[jax.Array, jax.Array] | None:
    """Returns the cosines and sines of a call: `cos` and `sin`, else the tables of its positions."""
    if cos is None and sin is None:
        if rope is None:
            return None
        return rope.tables(jnp.arange(length) if positions is None else positions, head_size)
    if cos is None or sin is None or positions is not None:
        raise ValueError(
            "TransformerBlock: cos and sin are the rotation's tables, in place of positions; pass"
            " both and no positions, or positions alone."
        )
    return cos, sin


def check_rates(**rates: float) -> None:
    """Checks that each rate, the fraction to drop, is between 0 and 1."""
    for name, rate in rates.items():
        # The comparison rejects NaN too.
        if not 0.0 <= rate <= 1.0:
            raise ValueError(
                f"TransformerBlock: {name} must be in the range [0, 1], as it is the fraction to drop,"
                f" but it is {rate!r}; pass a number from 0 to 1."
            )


def head_size(features: int, num_heads: int, head_dim: int | None) -> int:
    """Returns the size of a head: the one requested, or the features divided by the number of heads."""
    if head_dim is not None:
        return head_dim
    if features % num_heads:
        raise ValueError(
            f"TransformerBlock: {features} features are not shared evenly by {num_heads} heads;"
            " pass head_dim, or a num_heads that divides the features."
        )
    return features // num_heads


def normalise(
    norm: Callable[..., Any],
    x: jax.Array,
    residual: jax.Array | None,
    pre_bias: jax.Array | None = None,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the norm of (x + pre_bias) gate + residual, and that sum, which is the residual stream.

    Without a residual, x is the stream and already contains the bias.
    """
    if residual is None:
        assert pre_bias is None and gate is None
        return norm(x), x
    return norm(x, residual=residual, pre_bias=pre_bias, gate=gate)


def scaled(branch: jax.Array, layer_scale: jax.Array | None) -> jax.Array:
    """Returns the branch times the scale of each feature, where there is one."""
    return branch if layer_scale is None else branch * along_last_axis(layer_scale, branch)


def self_attention(
    y: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
    norms: HeadNorms | None,
    tables: tuple[jax.Array, jax.Array] | None,
    *,
    interleaved: bool,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    mask: jax.Array | AttentionMask | None,
    segment_ids: jax.Array | None,
    is_causal: bool,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
    attention_implementation: AttentionImplementation | None,
) -> jax.Array:
    """Projects y [..., T, D] to heads and attends.

    Args:
      norms: the norms of queries and keys, if any.
      tables: the cosines and sines of the rotation, if any.

    The other arguments are those of `jaxfused.qkv_projection` and `jaxfused.dot_product_attention`.

    Returns:
      [..., T, num_heads * head size].
    """

    def norm(heads: jax.Array, scale: jax.Array, norm_bias: jax.Array | None) -> jax.Array:
        assert norms is not None
        function = getattr(layer_norm, norms.kind)
        bias = floating(norm_bias, y.dtype)
        return function(
            heads,
            floating(scale, y.dtype),
            bias,
            epsilon=epsilon,
            implementation=implementation,
        )

    kernel, bias = floating(kernel, y.dtype), floating(bias, y.dtype)
    cos, sin = (None, None) if tables is None else tables
    # The epilogue of the product supports RMSNorm, but not LayerNorm.
    in_epilogue = norms is None or norms.kind == "rms_norm"
    if isinstance(kernel, KernelStandIn):
        in_epilogue = False
        projected = linear(y, kernel, bias, precision=precision, implementation=implementation)
        groups = num_heads + 2 * num_kv_heads
        projected = projected.reshape(*y.shape[:-1], groups, projected.shape[-1] // groups)
        query, key, value = jnp.split(projected, (num_heads, num_heads + num_kv_heads), axis=-2)
    else:
        within = norms if in_epilogue else None
        query, key, value = qkv_projection.qkv_projection(
            y,
            kernel,
            bias,
            heads=num_heads,
            key_heads=num_kv_heads,
            q_scale=None if within is None else floating(within.query_scale, y.dtype),
            k_scale=None if within is None else floating(within.key_scale, y.dtype),
            epsilon=epsilon,
            cos=cos if in_epilogue else None,
            sin=sin if in_epilogue else None,
            interleaved=interleaved,
            precision=precision,
            implementation=implementation,
        )
    if not in_epilogue:
        if norms is not None:
            query = norm(query, norms.query_scale, norms.query_bias)
            key = norm(key, norms.key_scale, norms.key_bias)
        if tables is not None:
            query, key = rope_operator.rope(
                query,
                key,
                cos=cos,
                sin=sin,
                interleaved=interleaved,
                implementation=implementation,
            )
    attended = attend(
        query,
        key,
        value,
        mask=mask,
        segment_ids=segment_ids,
        is_causal=is_causal,
        implementation=attention_implementation,
    )
    return jax.lax.collapse(attended, attended.ndim - 2)


def project(
    attended: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
    *,
    drops: bool,
    dtype: Any,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output projection of the attention, and the bias that is still to be added to it.

    The next norm adds the bias together with the residual stream, and sums the bias's gradient in the
    same pass as the gradients of its own parameters. With `drops`, the bias is added here, because it is
    dropped with the rest of the branch.
    """
    branch = linear(
        promoted(attended, kernel, bias, dtype=dtype),
        kernel,
        bias if drops else None,
        precision=precision,
        implementation=implementation,
    )
    return branch, None if drops else bias
