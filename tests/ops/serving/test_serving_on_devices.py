"""Caches and pages that are split over devices by heads or by sequences have the numbers of one device.

Like tests/every_operator/test_shards.py, this file runs itself in a process with several devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from tests.support import eight_devices
from tests.support.eight_devices import DEVICES
from tests.support.grids import parametrize

on_eight_devices = pytest.mark.skipif(
    jax.device_count() != DEVICES or jax.default_backend() != "cpu",
    reason="runs in the process that test_on_eight_devices starts",
)
each_kind = parametrize("kind", [AxisType.Explicit, AxisType.Auto], quick=(0, 1))


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() == DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


def tokens(*leading):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(*leading, heads, 16)), jnp.float32) for heads in (8, 4, 4)]


@on_eight_devices
@each_kind
@pytest.mark.parametrize("batch", [None, "b"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_cache(kind, batch, dtype):
    query, key, value = tokens(2, 3)
    sizes = dict(batch=2, length=8, key_heads=4, head_size=16, layers=2, dtype=dtype)

    def step(cache, query, key, value):
        cache = cache.append(key, value, layer=1)
        return cache.advance(3), cache.attend(query, layer=1)

    wanted = jax.jit(step)(jaxfused.KVCache.zeros(**sizes), query, key, value)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(kind,) * 2)

    def placed(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        cache = jax.tree.map(
            lambda a: placed(a, P(None, batch, None, "h") if a.ndim > 1 else P(batch)),
            jaxfused.KVCache.zeros(**sizes),
        )
        specs = [placed(a, P(batch, None, "h")) for a in (query, key, value)]
        before = cache.key.sharding
        actual = jax.jit(step, donate_argnums=0)(cache, *specs)
    assert actual[0].key.sharding.is_equivalent_to(before, 5)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@on_eight_devices
@each_kind
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_chosen_sequences_with_a_tree(kind, dtype):
    """Sequences by their index, ALiBi, sinks and a tree, where batch and heads are split."""
    query, key, value = tokens(2, 3)
    numbers, tree = jnp.linspace(0.1, 0.8, 8), jnp.tril(jnp.ones((2, 3, 3), bool))
    cache = jaxfused.KVCache.zeros(batch=2, length=8, key_heads=4, head_size=16, dtype=dtype)

    def step(cache, index, query, key, value, numbers, tree):
        cache = cache.append(key, value).advance(3, index)
        cache = cache.append(key, value, batch_index=index)
        given = dict(tree_mask=tree, alibi_slopes=numbers, sinks=numbers)
        attended = cache.attend(query, batch_index=index, local_window_size=(2, 0), **given)
        return attended, cache.advance(3, index).lengths

    arrays = (cache, jnp.array([1, 0], jnp.int32), query, key, value, numbers, tree)
    wanted = jax.jit(step)(*arrays)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(kind,) * 2)
    split = P("b", None, "h")
    specs = (jax.tree.map(lambda a: split if a.ndim > 1 else P("b"), cache), P("b"))
    specs = (*specs, split, split, split, P("h"), P("b"))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), arrays, specs
        )
        actual = jax.jit(step)(*placed)
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@on_eight_devices
@each_kind
@pytest.mark.parametrize("kept", ["float32", "int8"])
@pytest.mark.parametrize("pages", [None, "h"])
def test_pages_by_batch(kind, kept, pages):
    """Each device attends from its own sequences; pages that are split are gathered."""
    query = tokens(4)[0]
    rng = np.random.default_rng(1)
    pools = [jnp.asarray(rng.normal(size=(8, 4, 4, 16)), jnp.float32) for _ in "kv"]
    table = (jnp.array([7, 5, 0, 1]), jnp.array([[0, 2], [5, 1], [-1, 3], [7, 9]]))

    def f(query, *rest):
        k_pages, v_pages, lengths, table = rest
        if kept == "int8":
            k_pages, v_pages = (jaxfused.quantize(x, axis=-1) for x in (k_pages, v_pages))
        return jaxfused.paged_attention(query, k_pages, v_pages, lengths, table, layout="PSKH")

    def run(*arrays):
        return f(*arrays), jax.grad(lambda *a: jnp.sum(f(*a) ** 2))(*arrays)

    wanted = jax.jit(run)(query, *pools, *table)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(kind,) * 2)
    specs = (P("b"), P(pages), P(pages), P("b"), P("b"))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip((query, *pools, *table), specs, strict=True)
        ]
        actual = jax.jit(run)(*placed)
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@on_eight_devices
def test_rows_and_tables_that_are_split_are_gathered():
    query, key, value = tokens(8)
    pages = jnp.zeros((6, 4, 8, 16))
    table = (jnp.array([7, 5]), jnp.array([[0, 2], [5, 1]]), jnp.array([0, 3, 8]))

    def step(pages, query, key, value, *table):
        pages = jaxfused.append_to_pages(pages, key, value, *table)
        return pages, jaxfused.ragged_paged_attention(query, pages, *table)

    arrays = (pages, query, key, value, *table)
    wanted = jax.jit(step)(*arrays)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    specs = (P(), P("h"), P("b"), P(None, None, "h"), P("b"), P("b"), P())
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(arrays, specs, strict=True)
        ]
        actual = jax.jit(step)(*placed)
        split = jax.device_put(pages, NamedSharding(mesh, P("b")))
        with pytest.raises(ValueError, match="kv_pages are split as"):
            jax.jit(step)(split, *placed[1:])
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@on_eight_devices
@each_kind
def test_pages(kind):
    query, key, value = tokens(6)
    pages = jnp.zeros((6, 4, 8, 16))
    table = (jnp.array([7, 5]), jnp.array([[0, 2], [5, 1]]), jnp.array([0, 3, 6]))

    def step(pages, query, key, value):
        pages = jaxfused.append_to_pages(pages, key, value, *table)
        return pages, jaxfused.ragged_paged_attention(query, pages, *table)

    wanted = jax.jit(step)(pages, query, key, value)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, P(*[None] * (a.ndim - 2), "h")))
            for a in (pages, query, key, value)
        ]
        actual = jax.jit(step, donate_argnums=0)(*placed)
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
