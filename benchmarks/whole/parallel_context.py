"""Attention of one sequence on several GPUs and on one, a part of `python -m benchmarks parallel`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from benchmarks.run import timing

Row = dict[str, Any]

LENGTH, HEADS, KEY_HEADS, SIZE = 65536, 32, 8, 128
"""Tokens of the sequence, query heads, key heads, and features per head."""
WINDOW, DOCUMENTS = 8192, 16

MASKS: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "window, sinks, documents": dict(local_window_size=(WINDOW, 0)),
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "zigzag all_gather": dict(layout="zigzag", method="all_gather"),
    "zigzag ring": dict(layout="zigzag", method="ring"),
    "all_to_all": dict(method="all_to_all"),
}


def measure(save: Callable[[str, Row], None]) -> None:
    """Times attention and its gradients under each mask: on one device, and on all by each of WAYS."""
    for name, options in MASKS.items():
        operands = _operands(with_more=bool(options))
        alone = timing.steps(_runs(partial(_one, options), operands))
        for way, how in WAYS.items():
            every = _shared(options, how, operands)
            x = alone["milliseconds"] / every["milliseconds"]
            each = [alone["milliseconds"]]
            row = dict(model=name, variant=way, each=each, one=alone, all=every, x=x)
            save("context", row)


def _operands(*, with_more: bool) -> list[Any]:
    """Returns query, key, value, the output's cotangent, and segment ids and sinks or None."""
    shapes = [(1, LENGTH, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    if not with_more:
        return [*arrays, None, None]
    cuts = np.sort(np.random.default_rng(0).integers(0, LENGTH, DOCUMENTS - 1))
    segments = np.searchsorted(cuts, np.arange(LENGTH), side="right").astype(np.int32)[None]
    return [*arrays, jnp.asarray(segments), jnp.linspace(-1.0, 1.0, HEADS)]


def _one(options: Mapping[str, Any], query, key, value, dy, segments, sinks):
    """Returns the output and the gradients to query, key and value, computed on one device."""
    given = (
        {} if segments is None else dict(query_segment_ids=segments, key_value_segment_ids=segments)
    )

    def f(*qkv):
        return jaxfused.dot_product_attention(*qkv, is_causal=True, sinks=sinks, **given, **options)

    y, pullback = jax.vjp(f, query, key, value)
    return y, *pullback(dy)


def _all(
    options: Mapping[str, Any], how: Mapping[str, Any], query, key, value, dy, segments, sinks
):
    """Returns the output and the gradients to query, key and value, computed on all devices."""

    def f(*qkv):
        return jaxfused.context_parallel_attention(
            *qkv,
            axis_name="context",
            is_causal=True,
            segment_ids=segments,
            sinks=sinks,
            **how,
            **options,
        )

    y, pullback = jax.vjp(f, query, key, value)
    return y, *pullback(dy)


def _shared(options: Mapping[str, Any], how: Mapping[str, Any], operands: list[Any]) -> Row:
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("context",), axis_types=(AxisType.Auto,))
    order = slice(None)
    if how.get("layout") == "zigzag":
        order = jaxfused.zigzag_order(LENGTH, count)
    *tokens, sinks = operands
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P(None, "context"))
        put = [None if a is None else jax.device_put(a[:, order], split) for a in tokens]
        return timing.steps(_runs(partial(_all, options, how), [*put, sinks]))


def _runs(f: Callable[..., Any], operands: list[Any]) -> Callable[[int], None]:
    compiled = jax.jit(f).lower(*operands).compile()

    def run(count: int) -> None:
        for _ in range(count):
            results = compiled(*operands)
        jax.block_until_ready(results)

    return run
