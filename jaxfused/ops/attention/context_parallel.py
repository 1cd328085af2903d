"""context_parallel_attention: attention over a sequence that is split over devices."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfused import dispatch
from jaxfused.ops.attention.attention import dot_product_attention
from jaxfused.ops.attention.attention_arguments import ranked, validate, window_of
from jaxfused.runtime import dropout_arguments, sharding
from jaxfused.runtime.checks import as_arrays, python_numbers
from jaxfused.runtime.dropout import Bits, dropout_seeds
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.mapped import over_mesh
from jaxfused.runtime.sharding import AxisName

Layout = Literal["contiguous", "zigzag"]
Method = Literal["all_gather", "all_to_all", "ring"]

_OP = "context_parallel_attention"


@python_numbers
def context_parallel_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: AxisName,
    spec: P | None = None,
    layout: Layout = "contiguous",
    method: Method | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""`dot_product_attention` of a sequence to itself, of which each device of a mesh axis has a part.

    .. math:: O = \text{dropout}(\text{softmax}(\text{scale} \cdot Q K^T + \text{mask})) V

    over all T tokens, where T is that of one device times the size n of the axis. Results and gradients
    are those of one device up to rounding, and repeat bit for bit.

    Methods, with the numbers that a device receives in the forward pass, for L = T / n tokens of a
    device, N query heads and K key heads of H features:

    - "all_gather": 2 (n - 1) L K H numbers; each device then holds all keys and values, and no more
      than its own queries. The gradients of keys and values return by a reduce-scatter in float32.
    - "ring": as many, one device's keys and values at a time, while a device attends to those received
      before. It holds two devices' keys and values, and the backward pass recomputes the forward pass.
      In the "contiguous" layout a window that ends at the query or before ends the ring early: after 1
      of 7 hops, if a device has as many tokens as the window.
    - "all_to_all": 2 (N + K) L H (n - 1) / n; each device attends with N / n heads over all tokens. The
      size of the axis must divide K.

    A causal mask leaves the first device of a "contiguous" layout less to do than the last, except by
    "all_to_all". In the "zigzag" layout device i has parts i and 2 n - 1 - i of 2 n equal parts of the
    sequence, and all devices compute equally much: put tokens and their positions in the order of
    `zigzag_order` where a batch is made.

    Args:
      query: [B, T, N, H], float32, bfloat16 or float16. Within `jax.shard_map` or `jax.pmap` over
        `axis_name` a device's own tokens; else, under `jax.jit`, all tokens.
      key: [B, T, K, H], of the query's dtype; N is a multiple of K.
      value: [B, T, K, V], of the query's dtype.
      axis_name: the mesh axis that splits the tokens, or a tuple of several.
      spec: how the query's axes are split outside of `jax.shard_map`, as P("data", "context"), where
        axes of the mesh are Auto; batch and heads may be. By default by `axis_name` alone. Types
        with Explicit axes state it themselves.
      layout: "contiguous" or "zigzag", the tokens' order.
      method: None for "all_to_all" where the size of the axis divides the heads, and "all_gather"
        elsewhere.
      scale: of the logits; by default 1 / sqrt(H).
      is_causal: a token attends to itself and those before it.
      local_window_size: (left, right), or one number for both: keys at most this far from a query.
      logits_soft_cap: keeps the logits within (-cap, cap).
      segment_ids: [B, T] integers; a token attends to those of its own segment.
      sinks: [N], one learned logit a head, which adds to the softmax's denominator only.
      dropout_rate: the fraction of probabilities to drop, as in `dot_product_attention`; the others
        are divided by the fraction that is kept.
      dropout_key: a `jax.random` key, needed where dropout_rate > 0, the same on all devices of
        `axis_name`. The probabilities that are dropped are those that `dot_product_attention` of the
        whole sequence drops with this key, whatever the method, the layout and the devices. Within
        `jax.shard_map` or `jax.pmap` fold into the key a device's index along other axes, which split
        batch or heads. Kernels run with dropout by "all_to_all", and by "all_gather" if L ("zigzag":
        L / 2) is a power of two. Elsewhere, and by "ring" always, "xla" runs, which writes the
        probabilities of a device's queries and the keys it holds.
      implementation: of `dot_product_attention`.

    Returns:
      The output, [B, T, N, V], split as the query is.

    Raises:
      ValueError: shapes, the axis or the method do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> n, auto = jax.device_count(), jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((n,), ("context",), axis_types=(auto,))
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16 * n, 4, 8))
      >>> with jax.set_mesh(mesh):
      ...     jaxfused.context_parallel_attention(q, k, v, axis_name="context", is_causal=True).shape[2:]
      (4, 8)

    Forward-mode differentiation needs `method="all_to_all"` and `implementation="xla"`.

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023,
    https://arxiv.org/abs/2310.01889; Jacobs et al., "DeepSpeed Ulysses", 2023,
    https://arxiv.org/abs/2309.14509; the zigzag order: Brandon et al., "Striped Attention", 2023,
    https://arxiv.org/abs/2311.09431, and the public code that followed it.
    """
    if segment_ids is not None:
        [segment_ids] = ranked(segment_ids)
    query, key, value, segment_ids, sinks = as_arrays(query, key, value, segment_ids, sinks)
    _check(query, key, value, segment_ids, sinks, layout, method)
    seeds = None
    words = dropout_arguments.dropout_words(_OP, dropout_rate, dropout_key)
    if words is not None:
        seeds = dropout_seeds(words, query.shape[0], query.shape[2])
    options = _Options(
        axis_name,
        layout,
        scale,
        is_causal,
        window_of(_OP, local_window_size),
        logits_soft_cap,
        dropout_rate,
        implementation,
    )
    operands = _Operands(query, key, value, segment_ids, sinks, seeds)
    mesh = sharding.mesh_to_map(_OP, axis_name, query)
    if mesh is None:
        return _on_a_device(options, method, operands)
    specs = _specs(options, spec, mesh, operands)
    return over_mesh(
        _on_a_device,
        (options, method),
        (operands,),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs.query,
    )


@python_numbers
def zigzag_order(length: int, devices: int) -> np.ndarray:
    """Returns the token at each position of the zigzag layout: int [length].

    Device i of n gets parts i and 2 n - 1 - i of 2 n equal ones, so that under a causal mask all
    compute equally much. `x[:, zigzag_order(T, n)]` has the order, and `x[:, numpy.argsort(order)]`
    undoes it.

    Args:
      length: tokens of a sequence, a multiple of 2 `devices`.
      devices: the size of the mesh axis that splits the tokens.

    Returns:
      The indices of the tokens.

    Raises:
      ValueError: the length is no multiple of 2 `devices`.

    Example:
      >>> import jaxfused
      >>> jaxfused.zigzag_order(8, 2)
      array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if devices < 1 or length < 0 or length % (2 * devices):
        raise ValueError(
            f"zigzag_order: length is {length} and devices is {devices}, but each device gets two equal"
            " parts; pass a length that is a multiple of twice the devices."
        )
    parts = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([parts[:devices], parts[: devices - 1 : -1]], axis=1).reshape(-1)


@dataclass(frozen=True)
class _Options:
    """Static arguments."""

    axis_name: AxisName
    layout: Layout
    scale: float | None
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    dropout_rate: float
    implementation: dispatch.Implementation | None

    def attend(self, query, key, value, offset, segments=None, key_segments=None, **kwargs: Any):
        """Returns attention to keys of which the first is `offset` tokens before the first query."""
        is_placed = self.is_causal or self.window is not None
        return dot_product_attention(
            query,
            key,
            value,
            scale=self.scale,
            is_causal=self.is_causal,
            local_window_size=self.window,
            query_offset=offset if is_placed else None,
            logits_soft_cap=self.soft_cap,
            query_segment_ids=segments,
            key_value_segment_ids=key_segments,
            dropout_rate=self.dropout_rate,
            implementation=self.implementation,
            **kwargs,
        )


class _Operands(NamedTuple):
    query: Any
    key: Any
    value: Any
    segment_ids: Any
    sinks: Any
    seeds: Any
    """Seeds [2, B, N] of dropout, of the whole batch and all heads outside of `jax.shard_map`."""


def _check(query, key, value, segment_ids, sinks, layout, method) -> None:
    for name, given, known in (("layout", layout, Layout), ("method", method, Method)):
        if given is not None and given not in get_args(known):
            raise ValueError(
                f"{_OP}: {name}={given!r} is not known; pass one of {get_args(known)}."
            )
    for name, array in dict(query=query, key=key, value=value).items():
        if array.ndim != 4:
            raise ValueError(
                f"{_OP}: {name} has shape {array.shape}; pass one of 4 axes, [batch, tokens, heads,"
                " features]."
            )
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{_OP}: query has {query.shape[1]} tokens and key {key.shape[1]}, but both are of the same"
            " sequence; pass as many."
        )
    validate(query, key, value, None, sinks, _OP)
    if segment_ids is None:
        return
    if segment_ids.shape != query.shape[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"{_OP}: segment_ids has shape {segment_ids.shape} and dtype {segment_ids.dtype}, but query"
            f" has {query.shape[:2]} of sequences and tokens; pass an integer for each token."
        )


def _specs(options: _Options, spec: P | None, mesh: Any, operands: _Operands) -> _Operands:
    """Returns the PartitionSpec of each operand."""
    name = options.axis_name
    tokens, size = operands.query.shape[1], sharding.devices_along(mesh, name)
    if tokens % size:
        raise ValueError(
            f"{_OP}: query has {tokens} tokens, and {name!r} has {size} devices; pad the sequence to a"
            " multiple of them."
        )
    if mesh.explicit_axes:
        batch, split_tokens, heads, _ = jax.typeof(operands.query).sharding.spec
        spec = P(batch, name if split_tokens is None else split_tokens, heads)
    split: list[Any] = [*(spec or P(None, name)), *(None,) * 4]
    batch, by, heads = split[:3]
    if sharding.names_of(by) != sharding.names_of(name):
        raise ValueError(
            f"{_OP}: the query's tokens are split by {by!r}, and axis_name is {name!r}; split its"
            f" second axis by {name!r}, as P(batch, {name!r})."
        )
    whole = P(batch, name, heads)
    for which, array in dict(query=operands.query, key=operands.key).items():
        sharding.check_split(_OP, which, array.shape, whole, mesh)
    segments = None if operands.segment_ids is None else P(batch, name)
    sinks = None if operands.sinks is None else P(heads)
    seeds = None if operands.seeds is None else P(None, batch, heads)
    return _Operands(whole, whole, whole, segments, sinks, seeds)


# --- on one device --------------------------------------------------------------------------------


def _on_a_device(options: _Options, method: Method | None, operands: _Operands) -> jax.Array:
    """Returns the output for a device's own tokens."""
    size = lax.axis_size(options.axis_name)
    tokens, heads = operands.query.shape[1], operands.query.shape[2]
    key_heads = operands.key.shape[2]
    if options.layout == "zigzag" and tokens % 2:
        raise ValueError(
            f"{_OP}: a device has {tokens} tokens, but the zigzag layout has two equal parts of them;"
            f" pass a multiple of {2 * size} tokens in all."
        )
    is_divisible = key_heads % size == 0 and heads % size == 0
    if method is None:
        method = "all_to_all" if is_divisible else "all_gather"
    if method == "all_to_all":
        if not is_divisible:
            raise ValueError(
                f"{_OP}: method is 'all_to_all', but {heads} query and {key_heads} key heads cannot be"
                f" split over {size} devices; pass method='all_gather' or 'ring'."
            )
        return _all_to_all(options, operands)
    if method == "ring":
        return _ring(options, *operands)
    return _all_gather(options, operands)


def _starts(options: _Options, device: Any, tokens: int) -> list[tuple[Any, slice]]:
    """Returns, for each contiguous run of a device's tokens, its first index and its slice."""
    if options.layout == "contiguous":
        return [(device * tokens, slice(0, tokens))]
    half = tokens // 2
    last = 2 * lax.axis_size(options.axis_name) - 1
    return [(device * half, slice(0, half)), ((last - device) * half, slice(half, tokens))]


def _in_order(options: _Options, gathered: jax.Array) -> jax.Array:
    """Reorders gathered tokens, axis 1, from the order of devices to that of the sequence."""
    if options.layout == "contiguous":
        return gathered
    # Slices, because the gradient of a gather by indices is a scatter.
    batch, tokens, *rest = gathered.shape
    size = lax.axis_size(options.axis_name)
    parts = gathered.reshape(batch, size, 2, tokens // (2 * size), *rest)
    halves = jnp.stack([parts[:, :, 0], parts[:, ::-1, 1]], axis=1)
    return halves.reshape(gathered.shape)


def _by_devices(options: _Options, in_order: jax.Array) -> jax.Array:
    """Reorders tokens, axis 1, from the order of the sequence to that of the devices that hold them."""
    if options.layout == "contiguous":
        return in_order
    batch, tokens, *rest = in_order.shape
    size = lax.axis_size(options.axis_name)
    halves = in_order.reshape(batch, 2, size, tokens // (2 * size), *rest)
    parts = jnp.stack([halves[:, 0], halves[:, 1, ::-1]], axis=2)
    return parts.reshape(in_order.shape)


def _all_gather(options: _Options, operands: _Operands) -> jax.Array:
    query, key, value, segments, sinks, seeds = operands
    key, value = (_in_order(options, _gathered(options.axis_name, a)) for a in (key, value))
    all_segments = None
    if segments is not None:
        whole = lax.all_gather(segments, options.axis_name, axis=1, tiled=True)
        all_segments = _in_order(options, whole)
    parts = []
    for start, part in _starts(options, lax.axis_index(options.axis_name), query.shape[1]):
        own = None if segments is None else segments[:, part]
        bits = None
        if seeds is not None:
            bits = Bits.of_queries(seeds, start, part.stop - part.start)
        given = (query[:, part], key, value, start, own, all_segments)
        parts.append(options.attend(*given, sinks=sinks, dropout_key=bits))
    return jnp.concatenate(parts, axis=1)


_REMEDY = "pass method='all_to_all' and implementation='xla'"


@functools.partial(kernel_gradient, nondiff_argnums=(0,), op=_OP, remedy=_REMEDY)
def _gathered(axis_name: AxisName, array: jax.Array) -> jax.Array:
    """Gathers the tokens of all devices; their gradients are summed in float32."""
    return lax.all_gather(array, axis_name, axis=1, tiled=True)


def _gathered_bwd(axis_name: AxisName, saved: None, cotangent: jax.Array) -> tuple[jax.Array]:
    wide = cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    own = lax.psum_scatter(wide, axis_name, scatter_dimension=1, tiled=True)
    return (own.astype(cotangent.dtype),)


_gathered.defvjp(lambda axis_name, array: (_gathered(axis_name, array), None), _gathered_bwd)


def _all_to_all(options: _Options, operands: _Operands) -> jax.Array:
    query, key, value, segments, sinks, seeds = operands
    name, size = options.axis_name, lax.axis_size(options.axis_name)

    # Devices are the first axis of what moves: XLA would transpose for another one before and after.
    def by_heads(array: jax.Array) -> jax.Array:
        batch, tokens, heads, features = array.shape
        apart = array.reshape(batch, tokens, size, heads // size, features)
        moved = lax.all_to_all(jnp.moveaxis(apart, 2, 0), name, 0, 0, tiled=True)
        whole = jnp.moveaxis(moved, 0, 1)
        return _in_order(options, whole.reshape(batch, size * tokens, heads // size, features))

    def by_tokens(array: jax.Array) -> jax.Array:
        batch, tokens, heads, features = array.shape
        apart = array.reshape(batch, size, tokens // size, heads, features)
        moved = lax.all_to_all(jnp.moveaxis(apart, 1, 0), name, 0, 0, tiled=True)
        whole = jnp.moveaxis(moved, 0, 2)
        return whole.reshape(batch, tokens // size, size * heads, features)

    if segments is not None:
        segments = _in_order(options, lax.all_gather(segments, name, axis=1, tiled=True))
    own = query.shape[2] // size
    first = lax.axis_index(name) * own
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, first, own)
    bits = None
    if seeds is not None:
        bits = Bits(lax.dynamic_slice_in_dim(seeds, first, own, axis=2))
    query, key, value = map(by_heads, (query, key, value))
    given = (query, key, value, None, segments, segments)
    output = options.attend(*given, sinks=sinks, dropout_key=bits)
    return by_tokens(_by_devices(options, output))


# --- ring -----------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0,), op=_OP, remedy=_REMEDY)
def _ring(options: _Options, query, key, value, segments, sinks, seeds) -> jax.Array:
    return _ring_fwd(options, query, key, value, segments, sinks, seeds)[0]


def _ring_fwd(options: _Options, query, key, value, segments, sinks, seeds):
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    like = query[..., :1] * 0
    out = like.astype(dtype) + jnp.zeros((*query.shape[:3], value.shape[-1]), dtype)
    lse = like[..., 0].astype(dtype) - 0.7 * float(jnp.finfo(jnp.float32).max)
    if sinks is not None:
        lse = jnp.maximum(lse, sinks.astype(dtype))

    def step(state, device, key, value, key_segments, _):
        merged = []
        for own, (out, lse) in zip(_parts(options, query, segments), state, strict=True):
            for part in _parts(options, key, key_segments, device):
                out, lse = _joined(
                    out,
                    lse,
                    *_of_part(
                        options,
                        own,
                        part,
                        seeds,
                        query[:, own.part],
                        key[:, part.part],
                        value[:, part.part],
                    ),
                )
            merged.append((out, lse))
        return merged, ()

    parts = [part for _, part in _starts(options, 0, query.shape[1])]
    state = [(out[:, part], lse[:, part]) for part in parts]
    state, _ = _around(options, step, state, key, value, segments, ())
    out = jnp.concatenate([o for o, _ in state], axis=1).astype(query.dtype)
    lse = jnp.concatenate([l for _, l in state], axis=1)
    return out, (query, key, value, segments, sinks, seeds, out, lse)


def _ring_bwd(options: _Options, saved, dout):
    query, key, value, segments, sinks, seeds, out, lse = saved
    dtype = lse.dtype
    # Row sums of dout * out, [B, T, N], which the softmax's derivative subtracts.
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)

    def step(dqueries, device, key, value, key_segments, gradients):
        sums = [list(g) for g in (dqueries, *gradients)]
        for i, own in enumerate(_parts(options, query, segments)):
            for j, part in enumerate(_parts(options, key, key_segments, device)):
                q, k = own.part, part.part
                attend = functools.partial(_of_part, options, own, part, seeds)
                (o, l), pullback = jax.vjp(attend, query[:, q], key[:, k], value[:, k])
                weight = jnp.exp(l - lse[:, q])
                do = weight[..., None] * dout[:, q].astype(dtype)
                dl = jnp.sum(do * o.astype(dtype), axis=-1) - weight * delta[:, q]
                found = pullback((do.astype(o.dtype), dl.astype(l.dtype)))
                for total, at, one in zip(sums, (i, j, j), found, strict=True):
                    total[at] += one.astype(dtype)
        return sums[0], tuple(sums[1:])

    zeros = [
        [(array[:, part.part] * 0).astype(dtype) for part in _parts(options, array, None)]
        for array in (query, key, value)
    ]
    dqueries, moved = _around(options, step, zeros[0], key, value, segments, tuple(zeros[1:]))
    dsinks = None
    if sinks is not None:
        dsinks = -jnp.sum(jnp.exp(sinks.astype(dtype) - lse) * delta, axis=(0, 1))
        mapped = tuple(sharding.varying(dsinks) - sharding.varying(sinks))
        dsinks = (lax.psum(dsinks, mapped) if mapped else dsinks).astype(sinks.dtype)
    gradients = (
        jnp.concatenate(parts, axis=1).astype(array.dtype)
        for parts, array in zip((dqueries, *moved), saved[:3], strict=True)
    )
    return (*gradients, None, dsinks, None)


_ring.defvjp(_ring_fwd, _ring_bwd)


class _Part(NamedTuple):
    """A run of a device's tokens that is contiguous in the sequence."""

    start: Any
    """Index in the sequence of the part's first token."""
    part: slice
    segments: Any


def _parts(options: _Options, array, segments, device=None) -> list[_Part]:
    device = lax.axis_index(options.axis_name) if device is None else device
    return [
        _Part(start, part, None if segments is None else segments[:, part])
        for start, part in _starts(options, device, array.shape[1])
    ]


def _of_part(options: _Options, own: _Part, part: _Part, seeds, query, key, value):
    bits = None
    if seeds is not None:
        bits = Bits(seeds, own.start.astype(jnp.uint32), part.start.astype(jnp.uint32))
    return options.attend(
        query,
        key,
        value,
        own.start - part.start,
        own.segments,
        part.segments,
        return_lse=True,
        dropout_key=bits,
    )


def _joined(out, lse, other, other_lse):
    """Returns (output, log-sum-exp) over two parts of the keys, from those over each part."""
    total = jnp.logaddexp(lse, other_lse)
    kept, added = jnp.exp(lse - total)[..., None], jnp.exp(other_lse - total)[..., None]
    return out * kept + other.astype(out.dtype) * added, total


def _around(options: _Options, step: Callable[..., Any], state, key, value, segments, moving):
    """Calls `step` with each device's keys and values in turn, which circulate in a ring.

    `moving`, the gradients that `step` adds to, circulates with them and ends on its own device. The
    ring ends early where a window does.
    """
    name, size = options.axis_name, lax.axis_size(options.axis_name)
    own = lax.axis_index(name)

    def passed_on(arrays: Any, shift: int = 1) -> Any:
        return lax.ppermute(arrays, name, [(i, (i + shift) % size) for i in range(size)])

    def body(carry, hop):
        state, parts, moving = carry
        # The next hop's arrays do not depend on this hop's attention: XLA may send them meanwhile.
        parts, moving = passed_on(parts), passed_on(moving)
        state, moving = step(state, (own - hop) % size, *parts, moving)
        return (state, parts, moving), None

    parts = (key, value, segments)
    state, moving = step(state, own, *parts, moving)
    reach = _reach(options, key.shape[1])
    if reach:
        hops = jnp.arange(1, reach + 1)
        (state, _, moving), _ = lax.scan(body, (state, parts, moving), hops, unroll=1)
        moving = passed_on(moving, -reach)
    return state, moving


def _reach(options: _Options, tokens: int) -> int:
    """Returns the number of hops of a ring after which keys that arrive are in no query's window."""
    last = lax.axis_size(options.axis_name) - 1
    window = options.window
    if options.layout != "contiguous" or window is None:
        return last
    left, right = window
    if right != 0 and not options.is_causal:
        return last
    return min(last, -(-left // tokens))
