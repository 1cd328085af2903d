"""dot_product_attention with any combination of its options."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from benchmarks.fuzz.problem import (
    DTYPES,
    How,
    Operand,
    Options,
    Problem,
    length,
    present,
    rng_of,
)
from benchmarks.run.draw import HEAD_SIZES, Draw
from jaxfused import masks

_MOST_LOGITS = 2**21


def draw_attention(draw: Draw) -> Options:
    most = draw.pick((16, 64, 300, 1100))
    queries = length(draw, most)
    keys = queries if draw.chance(0.6) else length(draw, most)
    if draw.chance(0.1):
        # Decoding: one token or a few, with many keys before them.
        queries, keys = draw.pick((1, 1, 1, 2, 8, 64)), length(draw, 32768)
    key_heads, group = draw.pick((1, 1, 2, 3, 4, 8)), draw.pick((1, 1, 1, 2, 3, 4, 7, 8))
    # Heads, then tokens, are reduced until there are at most `_MOST_LOGITS` logits.
    while key_heads * group * queries * keys > _MOST_LOGITS:
        key_heads, group = 1, max(1, group // 2)
        queries = min(queries, max(700, _MOST_LOGITS // 32768))
        keys = min(keys, max(700, _MOST_LOGITS // (group * queries)))
    most_batch = max(1, _MOST_LOGITS // max(1, key_heads * group * queries * keys))
    head_size = draw.pick(HEAD_SIZES) if draw.chance(0.8) else draw.size(1, 256)
    broadcast = ("1111", "b111", "1n11", "11ts", "1nts", "b1ts", "bnts", "ts", "111s", "b11s")
    options: Options = dict(
        batch=draw.pick((None, 0))
        if draw.chance(0.08)
        else draw.size(1, min(draw.pick((9, 9, 9, 64)), most_batch)),
        queries=queries,
        keys=keys,
        key_heads=key_heads,
        group=group,
        head_size=head_size,
        value_head_size=draw.pick((64, 128, 8, 40)) if draw.chance(0.1) else head_size,
        dtype=draw.pick(DTYPES),
        bias=draw.pick(broadcast) if draw.chance(0.25) else None,
        bias_dtype=draw.pick(("float32", "bfloat16", "float16")),
        mask=draw.pick(broadcast) if draw.chance(0.2) else None,
        scale=draw.pick((0.0, 0.125, 1.0)) if draw.chance(0.2) else None,
        is_causal=draw.chance(0.4),
        window=[draw.size(1, 40), draw.pick((0, 0, 5, 40))] if draw.chance(0.2) else None,
        soft_cap=draw.pick((2.0, 30.0)) if draw.chance(0.15) else None,
        segments=draw.between(1, 5) if draw.chance(0.2) else 0,
        query_lengths=draw.chance(0.1),
        key_lengths=draw.chance(0.2),
        sinks=draw.chance(0.15),
        dropout=draw.pick((0.1, 0.5)) if draw.chance(0.15) else 0.0,
        residual=draw.chance(0.15),
        offset=draw.pick(("bottom_right", "of each")) if draw.chance(0.25) else None,
        mask_object=draw.pick((*_MASK_OBJECTS, "heads")) if draw.chance(0.2) else None,
    )
    return options


_PLAIN: Options = dict(
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    window=None,
    soft_cap=None,
    segments=0,
    same_segments=False,
    query_lengths=False,
    key_lengths=False,
    fewest_keys=0,
    sinks=False,
    dropout=0.0,
    residual=False,
    offset=None,
    mask_object=None,
)
"""Values of options that a printed case may leave out. By them, queries and keys have separate segments,
and a sequence may have no keys."""

_MASK_OBJECTS: dict[str, Callable[[tuple[int, int]], masks.AttentionMask]] = {
    "local and global": lambda shape: masks.LocalMask(shape, (90, 20)) | masks.GlobalMask(shape, 3),
    "random": lambda shape: masks.RandomBlocksMask(shape, 2, 48) & ~masks.DilatedMask(shape, 9, 3),
    "chunks": lambda shape: masks.ChunkedCausalMask(shape, 70),
}


def _mask_object(o: Options) -> masks.AttentionMask:
    shape = (o["queries"], o["keys"])
    if o["mask_object"] != "heads":
        return _MASK_OBJECTS[o["mask_object"]](shape)
    kinds = [make(shape) for make in _MASK_OBJECTS.values()]
    heads = o["key_heads"] * o["group"]
    return masks.MultiHeadMask([kinds[head % len(kinds)] for head in range(heads)])


def attention(options: Options) -> Problem:
    o = _PLAIN | options
    batch, heads = o["batch"], o["key_heads"] * o["group"]
    lead = () if batch is None else (batch,)
    sizes = dict(b=batch or 0 if batch is not None else 1, n=heads, t=o["queries"], s=o["keys"])
    dtype = o["dtype"]
    operands = present(
        q=Operand((*lead, o["queries"], heads, o["head_size"]), dtype),
        k=Operand((*lead, o["keys"], o["key_heads"], o["head_size"]), dtype),
        v=Operand((*lead, o["keys"], o["key_heads"], o["value_head_size"]), dtype),
        bias=Operand(_shape(o["bias"], sizes), o["bias_dtype"]) if o["bias"] else None,
        sinks=Operand((heads,), "float32") if o["sinks"] else None,
    )
    return Problem(
        _attend(o),
        operands,
        _constants(o, sizes),
        tf32=dtype == "float32",
        noise=_rounded_output_noise(o),
    )


def _shape(axes: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(1 if axis == "1" else sizes[axis] for axis in axes)


def _constants(o: Options, sizes: dict[str, int]) -> dict[str, Any]:
    rng, constants = rng_of(o), {}
    has_batch, batch = o["batch"] is not None, sizes["b"]
    if o["mask"] and not o["mask_object"]:
        constants["mask"] = rng.random(_shape(o["mask"], sizes)) < 0.7
    if o["query_lengths"]:
        constants["query_seq_lengths"] = _lengths(rng, batch, 0, o["queries"])
    if o["key_lengths"]:
        constants["key_value_seq_lengths"] = _lengths(rng, batch, o["fewest_keys"], o["keys"])
    if o["segments"]:
        for name, size in (("query_segment_ids", "t"), ("key_value_segment_ids", "s")):
            ids = np.sort(rng.integers(0, o["segments"], (batch, sizes[size])), axis=1)
            constants[name] = (ids if has_batch else ids[0]).astype(np.int32)
        if o["same_segments"]:
            constants["key_value_segment_ids"] = constants["query_segment_ids"]
    if o["dropout"]:
        constants["dropout_key"] = np.asarray([7, o["data"] % 2**31], np.uint32)
    if o["offset"] == "of each":
        offsets = rng.integers(-o["queries"], o["keys"] + 1, (batch,))
        constants["query_offset"] = offsets.astype(np.int32)
    if o["bias"] and o["bias_dtype"] != "float16" and rng.random() < 0.3:
        # Some queries have such low logits that float32 has no digits for the logarithm of their sum.
        is_low = rng.random((*_shape(o["bias"], sizes)[:-1], 1)) < 0.3
        constants["low"] = np.where(is_low, np.float32(-1e9), np.float32(0))
    return constants


def _lengths(rng: np.random.Generator, batch: int, fewest: int, most: int) -> np.ndarray:
    return rng.integers(fewest, most + 1, (batch,)).astype(np.int32)


def _attend(o: Options) -> Any:
    def attend(operands: Any, constants: Any, how: How) -> Any:
        given = dict(constants)
        low, bias = given.pop("low", None), operands.get("bias")
        if low is not None:
            bias = bias + low.astype(bias.dtype)
        mask = _mask_object(o) if o["mask_object"] else given.pop("mask", None)
        if o["dropout"]:
            given["dropout_key"] = jax.random.wrap_key_data(given["dropout_key"])
            given["dropout_rate"] = o["dropout"]
        if o["offset"] == "bottom_right":
            given["query_offset"] = o["offset"]
        return jaxfused.dot_product_attention(
            operands["q"],
            operands["k"],
            operands["v"],
            bias,
            mask,
            scale=o["scale"],
            is_causal=o["is_causal"],
            local_window_size=None if o["window"] is None else tuple(o["window"]),
            logits_soft_cap=o["soft_cap"],
            sinks=operands.get("sinks"),
            return_lse=o["residual"],
            implementation=how.implementation,
            **given,
        )

    return attend


_UNIT_VECTORS = 256


def _rounded_output_noise(o: Options) -> Any:
    """Returns a function that estimates the error of gradients from reading the rounded output.

    The gradient of a logit is p (dp - delta), with delta = sum(dy * y) of a row. Where a row gives all
    of its weight to one key, dp and delta are equal, and only p times the rounding error of y remains.
    XLA's gradient reads dp and the weights in place of y, and has no such error.
    """
    attend = _attend(o | dict(dropout=0.0, residual=False))
    scale = o["head_size"] ** -0.5 if o["scale"] is None else o["scale"]
    # Four times the largest error of one rounding: to 16 bits, or of a float32 product to tf32.
    unit = 2 * max(float(jnp.finfo(o["dtype"]).eps), 2.0**-10)

    def noise(operands: Any, constants: Any, results: Any, cotangents: Any) -> dict[str, Any]:
        if cotangents is None:
            return {}
        q, k, y, dy = operands["q"], operands["k"], results[0], cotangents[0]
        given = {name: value for name, value in constants.items() if name != "dropout_key"}
        weights = _weights(lambda v: attend(operands | {"v": v}, given, How("xla", True)), k)
        row = unit * jnp.sqrt(jnp.sum((y * dy) ** 2, axis=-1))
        by_group = (*row.shape[:-1], o["key_heads"], o["group"])
        moved = weights * row[..., None]
        grouped = moved.reshape(*by_group, o["keys"])
        of_keys = jnp.einsum("...tkgs,...skh->...tkgh", grouped, jnp.abs(k))
        squares = jnp.einsum(
            "...tkgs,...tkgh->...skh", grouped**2, q.reshape(*by_group, q.shape[-1]) ** 2
        )
        found = {"q": scale * of_keys.reshape(q.shape), "k": scale * jnp.sqrt(squares)}
        left = (1.0 - weights.sum(-1)) * row
        if "bias" in operands:
            # A bias shared by all keys of a row sums their logits' gradients: minus the sink's gradient.
            shape = operands["bias"].shape
            shared = jnp.maximum(left[..., None], moved.sum(-1, keepdims=True))
            found["bias"] = _over_broadcast(shared if shape[-1:] == (1,) else moved, shape)
        if "sinks" in operands:
            found["sinks"] = jnp.sqrt(jnp.sum(left**2, axis=tuple(range(left.ndim - 1))))
        return found

    return noise


def _weights(attend: Any, k: jax.Array) -> jax.Array:
    """Returns the weights [..., queries, heads, keys]: attention's results for unit vectors as values.

    All unit vectors at once would take keys * keys numbers per head, so `attend` gets a few at a time.
    """
    keys = k.shape[-3]
    count = max(1, min(keys, _UNIT_VECTORS))

    def of_some(first: jax.Array) -> jax.Array:
        units = jnp.arange(keys)[:, None, None] == first + jnp.arange(count)
        return attend(jnp.broadcast_to(units.astype(jnp.float32), (*k.shape[:-1], count)))

    weights = jax.lax.map(of_some, jnp.arange(0, keys, count))
    weights = jnp.moveaxis(weights, 0, -2)
    *rows, runs, _ = weights.shape
    return weights.reshape(*rows, runs * count)[..., :keys]


def _over_broadcast(moved: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Adds errors over a bias's broadcast axes, by squares, because errors of rows are independent."""
    moved = jnp.moveaxis(moved, -2, -3)
    whole = (1,) * (4 - len(shape)) + shape
    moved = moved.reshape((1,) * (4 - moved.ndim) + moved.shape)
    broadcast = tuple(axis for axis in range(4) if whole[axis] == 1)
    return jnp.sqrt(jnp.sum(moved**2, axis=broadcast, keepdims=True)).reshape(shape)
