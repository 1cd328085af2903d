"""Layers that a mesh may split between its devices; without a mesh they are jaxfused's operators.

`examples.multi_gpu.mesh` sets the mesh while it traces a model. Layers that treat tokens separately need
no change: XLA splits them as their inputs and parameters are split.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfused
from examples.multi_gpu.metadata import is_named, names_of, with_paths, without_metadata
from examples.multi_gpu.rules import spec


def sizes() -> Mapping[str, int]:
    """Returns the sizes of the current mesh's axes; empty without a mesh."""
    return jax.sharding.get_abstract_mesh().shape


_LAYERS_GATHER: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "layers_gather", default=None
)


@contextlib.contextmanager
def layers_gather(options: Mapping[str, Any] | None) -> Iterator[None]:
    """Has `run_layer` within its block all-gather a layer's parameters, unless `options` is None.

    The options are arguments of `fsdp_layer`.
    """
    token = _LAYERS_GATHER.set(options)
    try:
        yield
    finally:
        _LAYERS_GATHER.reset(token)


def run_layer(
    f: Callable[..., Any],
    state: Any,
    *arrays: Any,
    batched: Sequence[bool],
    dtype: jax.typing.DTypeLike | None = None,
) -> Any:
    """Returns `f(state, *arrays)` of a layer; `layers_gather` has it all-gather its parameters.

    Args:
      f: function whose result for a batch entry depends on that entry alone.
      state: the parameters in Flax's containers, with the names of their axes.
      arrays: trees of arrays.
      batched: for each of `arrays`, whether its first axis is the batch; that of all results is.
      dtype: dtype to which `f` casts all parameters first; None if it casts none.
    """
    options = _LAYERS_GATHER.get()
    if options is None:
        return f(state, *arrays)
    rows = P(tuple(axis for axis in ("data", "fsdp") if sizes()[axis] > 1))
    specs = [
        spec(names_of(leaf), without_metadata(leaf).shape, sizes())
        for _, leaf in with_paths(state, is_named)
    ]
    return jaxfused.parallel.fsdp_layer(
        f,
        state,
        *arrays,
        param_specs=[P(*(entry and "fsdp" for entry in each)) for each in specs],
        in_specs=[rows if is_batched else P() for is_batched in batched],
        out_specs=rows,
        dtype=dtype,
        **options,
    )


def split_tokens(array: jax.Array) -> jax.Array:
    """Returns an array [B, T, ...], with B sharded over data and fsdp, and T over context."""
    if sizes().get("context", 1) == 1:
        return array
    return lax.with_sharding_constraint(array, spec(("batch", "length"), array.shape[:2], sizes()))


def zigzag(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays [B, T] in `jaxfused.zigzag_order`, which gives devices equal causal work.

    Causal `self_attention` expects tokens and their positions in this order. Without a context axis
    the arrays are returned unchanged.
    """
    devices = sizes().get("context", 1)
    if devices == 1:
        return arrays
    order = jaxfused.zigzag_order(arrays[0].shape[1], devices)
    return tuple(split_tokens(array[:, order]) for array in arrays)


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    is_causal: bool = False,
    **options: Any,
) -> jax.Array:
    """Returns attention of tokens [B, T, N, H] to those of their own sequence and segment."""
    if sizes().get("context", 1) == 1:
        return jaxfused.dot_product_attention(
            query,
            key,
            value,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            is_causal=is_causal,
            **options,
        )
    return jaxfused.context_parallel_attention(
        query,
        key,
        value,
        axis_name="context",
        spec=spec(("batch", "length", "heads"), key.shape[:3], sizes()),
        layout="zigzag" if is_causal else "contiguous",
        segment_ids=segment_ids,
        is_causal=is_causal,
        **options,
    )


def linear_cross_entropy(
    features: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int,
    reduction: Literal["mean", "sum", "none"],
    **options: Any,
) -> jax.Array:
    """Returns the cross-entropy of labels [B, T] by features [B, T, D] and a head [D, V].

    Where the vocabulary is split over devices, each computes only the logits of its columns of the head.
    """
    loss = functools.partial(
        jaxfused.linear_softmax_cross_entropy, ignore_index=ignore_index, **options
    )
    words = spec((None, "vocab"), head.shape, sizes())
    if words[1] is None:
        return loss(features, head, labels, reduction=reduction)
    tokens = spec(("batch", "length"), labels.shape, sizes())
    losses = jax.shard_map(
        functools.partial(loss, reduction="none", axis_name=words[1]),
        in_specs=(tokens, words, tokens),
        out_specs=tokens,
    )(features, head, labels)
    if reduction == "none":
        return losses
    count = jnp.maximum(jnp.sum(labels != ignore_index), 1) if reduction == "mean" else 1
    return jnp.sum(losses) / count
