"""The CUDA C kernels of caches and pages: limits, lowering, and on a GPU the numbers of XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxfused
from jaxfused import KVCache, dispatch
from jaxfused.ops.serving import append_cuda, cached_attention_cuda
from jaxfused.runtime import cuda_library
from tests.support.arrays import put
from tests.support.calls import have_library
from tests.support.grids import parametrize
from tests.support.lowering import kernels

APPEND, ATTEND = "jaxfused_append", "jaxfused_cached_attention"
LENGTHS, LONG = np.array([0, 33, 70], np.int32), np.array([5, 650], np.int32)


def cache_of(dtype="int8", lengths=LENGTHS, **options):
    sizes = dict(batch=len(lengths), length=90, key_heads=2, head_size=64)
    cache = KVCache.zeros(**{**sizes, "dtype": dtype, **options})
    return dataclasses.replace(cache, lengths=put(lengths))


def drawn(seed, *shape, dtype=jnp.bfloat16):
    return put(np.random.default_rng(seed).normal(size=shape), dtype)


def per_head(*shape):
    scale = np.full(shape, 0.03, np.float32)
    return dict(key_scale=scale, value_scale=scale)


def equal_bits(actual, expected, most_differing=0.0):
    """Asserts that leaves are equal but for a share of them, which may be rounded the other way."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.mean(a != b) <= most_differing
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1 if b.max() > 16 else 1e-5)


APPENDS = {
    "bfloat16": (cache_of("bfloat16", value_size=40), 5, {}),
    "float32": (cache_of("float32", head_size=24), 3, dict(counts=put([2, 0, 3]))),
    "int8": (cache_of(), 30, {}),
    "float8_e5m2": (cache_of("float8_e5m2"), 2, {}),
    "layers": (cache_of("float8_e4m3fn", layers=3), 2, dict(layer=-1)),
    "sequences": (cache_of(layers=2), 2, dict(layer=0, batch_index=put([2, -3]))),
    "scales of heads": (cache_of(layers=2, **per_head(2, 2)), 2, dict(layer=1)),
    "ring": (cache_of(length=6, window=4), 13, dict(counts=put([13, 2, 9]))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", APPENDS)
def test_tokens_are_appended_as_by_xla(name):
    cache, tokens, options = APPENDS[name]
    batch = len(options.get("batch_index", LENGTHS))
    key, value = (
        drawn(i, batch, tokens, 2, kept.shape[-1])
        for i, kept in enumerate((cache.key, cache.value))
    )

    @functools.partial(jax.jit, static_argnums=0)
    def f(implementation, cache, key, value):
        return cache.append(key, value, implementation=implementation, **options)

    # In int8 a tie may be rounded the other way where XLA multiplies by a reciprocal.
    equal_bits(*(f(name, cache, key, value) for name in ("cuda", "xla")), most_differing=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_keys_are_rotated_where_they_are_appended(rotary_dim, interleaved):
    cache = cache_of("float32")
    key, value = drawn(0, 3, 4, 2, 64), drawn(1, 3, 4, 2, 64)
    tables = jaxfused.rope_tables(cache.positions(4), rotary_dim)
    new = cache.append(key, value, cos=tables[0], sin=tables[1], interleaved=interleaved)
    rotated = jaxfused.rope(
        key, cos=tables[0], sin=tables[1], interleaved=interleaved, implementation="xla"
    )
    expected = cache.append(rotated, value, implementation="xla")
    # The products of the rotation may be fused with the sum, and so rounded once less.
    equal_bits(new, expected, most_differing=0.01)


PAGES_WRITTEN = [
    ("bfloat16", "PSKH", False),
    ("float32", "KPSH", False),
    ("float16", "PSKH", True),
    ("int8", "PSKH", False),
    ("float8_e4m3fn", "KPSH", False),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kept", "layout", "is_one_array"), PAGES_WRITTEN)
def test_pages_are_written_as_by_xla(kept, layout, is_one_array):
    """A ragged batch with a page outside the pool, rows of no sequence and a full table."""
    sizes = (12, 4, 2, 40) if layout == "PSKH" else (2, 12, 4, 40)
    if is_one_array:
        pages = jnp.zeros((12, 4, 4, 40), kept)
    elif kept in ("int8", "float8_e4m3fn"):
        pages = tuple(jaxfused.quantize(jnp.zeros(sizes), kept, axis=-1) for _ in range(2))
    else:
        pages = (jnp.zeros(sizes, kept), jnp.zeros(sizes, kept))
    table = put(np.array([[7, 2, 11], [5, -1, 99], [4, 12, 1], [0, 2, 8]], np.int32))
    lengths, bounds = put(np.array([11, 7, 0, 14], np.int32)), put([1, 6, 11, 11, 15])
    key, value = drawn(0, 17, 2, 40), drawn(1, 17, 2, 40)

    @functools.partial(jax.jit, static_argnums=0)
    def f(implementation, pages, count):
        options = dict(layout=layout, implementation=implementation)
        return jaxfused.append_to_pages(pages, key, value, lengths, table, bounds, count, **options)

    for count in (None, put([2])):
        equal_bits(*(f(name, pages, count) for name in ("cuda", "xla")), most_differing=1e-3)


READS = {
    "floats": (cache_of("bfloat16"), 3, 8, dict(sinks=np.linspace(-1, 1, 8))),
    "int8": (cache_of(), 1, 8, {}),
    "float8_e4m3fn": (cache_of("float8_e4m3fn"), 3, 8, dict(sinks=np.linspace(-1, 1, 8))),
    "layers": (cache_of("bfloat16", layers=3), 1, 4, dict(layer=-2, local_window_size=20)),
    "sequences": (cache_of("bfloat16"), 2, 4, dict(batch_index=put([2, -3]))),
    "soft cap": (
        cache_of("float8_e5m2", layers=2, head_size=128),
        2,
        4,
        dict(layer=1, logits_soft_cap=5.0, local_window_size=(30, 0)),
    ),
    "counts": (cache_of(), 4, 4, dict(counts=put([4, 0, 2]))),
    "ring": (cache_of(length=40, window=40), 1, 4, {}),
    "scales of heads": (cache_of(**per_head(2)), 2, 12, {}),
    # With so many places the keys of all sequences are divided among the GPU's warps together.
    "many places": (cache_of("bfloat16", length=13000), 3, 8, dict(sinks=np.linspace(-1, 1, 8))),
    "many places of int8": (cache_of(length=13000), 1, 4, {}),
    # Several blocks of a cluster share the keys of a sequence, here on a GPU of four SMs too.
    "cluster": (cache_of("bfloat16", LONG, length=700, key_heads=1), 1, 4, {}),
    "cluster of 16 queries": (
        cache_of("float8_e4m3fn", LONG, length=700, key_heads=1, head_size=128),
        4,
        4,
        dict(sinks=np.linspace(-1, 1, 4), counts=put([4, 3])),
    ),
    "cluster of a window": (
        cache_of("bfloat16", LONG, length=700, key_heads=1),
        2,
        20,
        dict(local_window_size=300),
    ),
}


def filled(cache, layer):
    """Returns the cache with drawn tokens up to 4 beyond its lengths."""
    batch, capacity, heads, size = cache.key.shape[-4:]
    tokens = min(int(cache.lengths.max()) + 4, capacity)
    key, value = drawn(2, batch, tokens, heads, size), drawn(3, batch, tokens, heads, size)
    empty = dataclasses.replace(cache, lengths=jnp.zeros_like(cache.lengths))
    full = empty.append(key, value, implementation="xla", **layer)
    return dataclasses.replace(full, lengths=cache.lengths)


@pytest.fixture
def ampere():
    """Skips a test on GPUs without the kernel's instructions."""
    if dispatch.current_device().compute_capability < (8, 0):
        pytest.skip("the kernel needs compute capability 8.0")


@pytest.mark.gpu
@pytest.mark.parametrize("name", READS)
def test_a_cache_is_read_in_place(ampere, name):
    cache, tokens, heads, options = READS[name]
    cache = filled(cache, {k: v for k, v in options.items() if k == "layer"})
    batch = len(options.get("batch_index", cache.lengths))
    query = drawn(4, batch, tokens, heads, cache.key.shape[-1])
    if "counts" in options:
        is_query = np.arange(tokens) < np.asarray(options["counts"])[:, None]
        query = jnp.where(is_query[..., None, None], query, jnp.nan)

    @functools.partial(jax.jit, static_argnums=0)
    def f(implementation, cache, query):
        return cache.attend(query, implementation=implementation, **options)

    actual, again, expected = (f(name, cache, query) for name in ("cuda", "cuda", "xla"))
    np.testing.assert_array_equal(actual, again)
    actual, expected = (np.asarray(a, np.float32) for a in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["float16", "int8", "float8_e4m3fn"])
def test_numbers_are_those_of_float64(ampere, kept):
    """The error is below what rounding to float16 makes of such queries, whose logits reach 40."""
    batch, length, heads, size = 2, 300, 8, 128
    rng = np.random.default_rng(0)
    query = rng.normal(size=(batch, 1, heads, size)) * np.exp(rng.normal(size=(heads, 1)))
    query = put(3 * query, jnp.float16)
    cache = KVCache.zeros(batch=batch, length=length, key_heads=1, head_size=size, dtype=kept)
    key, value = (drawn(i, batch, length, 1, size, dtype=jnp.float16) for i in (1, 2))
    cache = cache.append(key, value, implementation="xla")
    cache = dataclasses.replace(cache, lengths=put(np.full(batch, length - 1, np.int32)))
    attend = jax.jit(lambda cache, query: cache.attend(query, implementation="cuda"))
    actual = np.asarray(attend(cache, query), np.float64)

    def kept_in_float64(numbers, scale):
        numbers = numbers if scale is None else jax.lax.bitcast_convert_type(numbers, cache.dtype)
        numbers = np.asarray(numbers, np.float64)[:, :, 0]
        return numbers if scale is None else numbers * np.asarray(scale, np.float64)

    key, value = map(
        kept_in_float64, (cache.key, cache.value), (cache.key_scale, cache.value_scale)
    )
    logits = np.einsum("bqh,bsh->bqs", np.asarray(query, np.float64)[:, 0], key) / np.sqrt(size)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("bqs,bsh->bqh", weights, value)[:, None]
    assert np.sqrt(np.mean((actual - expected) ** 2)) < 6e-4 * np.sqrt(np.mean(expected**2))


def pages_of(kept, page_size, layout, lengths, key_heads=2, size=64):
    """Returns pools of keys and values in any order, and a table with ids of no page behind the last."""
    rng = np.random.default_rng(5)
    count = -(-max(lengths) // page_size)
    table = rng.permutation(len(lengths) * count).reshape(-1, count).astype(np.int32)
    used = np.arange(count)[None] * page_size < np.asarray(lengths)[:, None]
    pools = [drawn(i, table.size, page_size, key_heads, size) for i in (6, 7)]
    if layout == "KPSH":
        pools = [jnp.moveaxis(pool, 2, 0) for pool in pools]
    if kept != "bfloat16":
        pools = [jaxfused.quantize(pool, kept, axis=-1) for pool in pools]
    return *pools, put(lengths), put(np.where(used, table, 10**6))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kept", "page_size", "layout", "tokens", "heads", "options"),
    [
        ("bfloat16", 8, "PSKH", 1, 8, {}),
        ("bfloat16", 16, "KPSH", 3, 10, dict(sliding_window=40)),
        ("int8", 24, "PSKH", 1, 4, dict(sinks=np.linspace(-1, 1, 4, dtype=np.float32))),
        ("float8_e4m3fn", 8, "KPSH", 2, 6, dict(attn_logits_soft_cap=5.0)),
    ],
)
def test_pages_are_read_in_place(ampere, kept, page_size, layout, tokens, heads, options):
    pages = pages_of(kept, page_size, layout, [100, 1, 0, 77, 33])
    query = drawn(8, 5, tokens, heads, 64)

    @functools.partial(jax.jit, static_argnums=0)
    def f(implementation, query, *pages):
        options_of_all = dict(layout=layout, scale=0.125, implementation=implementation)
        return jaxfused.paged_attention(query, *pages, **options_of_all, **options)

    actual, again, expected = (f(name, query, *pages) for name in ("cuda", "cuda", "xla"))
    np.testing.assert_array_equal(actual, again)
    actual, expected = (np.asarray(a, np.float32) for a in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-2)


def step(cache, query, key, value):
    cache = cache.append(key, value)
    return cache.advance(query.shape[1]), cache.attend(query)


@pytest.mark.parametrize(
    ("dtype", "head_size", "tokens", "names"),
    [
        ("int8", 64, 1, [APPEND, ATTEND]),
        ("float8_e4m3fn", 128, 4, [APPEND, ATTEND]),
        ("int8", 64, 5, [APPEND, "attention"]),
        ("int8", 32, 1, [APPEND, "attention"]),
        ("bfloat16", 64, 1, [APPEND, "attention"]),
    ],
)
def test_a_step_launches(with_library, dtype, head_size, tokens, names):
    cache = cache_of(dtype, head_size=head_size)
    arrays = [drawn(0, 3, tokens, heads, head_size) for heads in (8, 2, 2)]
    launched = kernels(step, cache, *arrays)
    for name, start in zip(launched, names, strict=False):
        assert name.startswith(start)
    assert len(launched) == 2 or names[-1] == "attention"


@pytest.mark.parametrize(("kept", "page_size"), [("bfloat16", 16), ("int8", 64)])
def test_small_pages_and_bytes_are_read_by_cuda(with_library, kept, page_size):
    pages = pages_of(kept, page_size, "PSKH", [100, 70])
    query = drawn(8, 2, 8, 64)

    def f(query, *pages):
        return jaxfused.paged_attention(query, *pages, layout="PSKH")

    assert kernels(f, query, *pages) == [ATTEND]
    # This kernel divides the keys of all sequences together.
    alike = functools.partial(jaxfused.paged_attention, layout="PSKH", batch_invariant=True)
    launched = kernels(alike, query, *pages)
    assert launched[0] == "attention_paged_forward"


def test_a_cache_is_not_read_in_place_where_sequences_must_not_depend_on_each_other(with_library):
    cache = cache_of("int8", head_size=64)
    query = drawn(0, 3, 1, 8, 64)
    assert kernels(lambda cache, query: cache.attend(query), cache, query) == [ATTEND]
    launched = kernels(lambda cache, q: cache.attend(q, batch_invariant=True), cache, query)
    assert ATTEND not in launched


A100 = dispatch.Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108)
H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)


@parametrize(
    ("device", "batch", "places", "tokens", "in_place"),
    [
        (H200, 64, 32768, 1, True),
        (H200, 64, 8192, 1, False),
        (A100, 1, 1024, 1, True),
        (H200, 1, 65536, 1, False),
        (H200, 1, 512, 1, False),
        (H200, 1, 1024, 1, True),
        (H200, 1, 4096, 1, True),
        (H200, 8, 512, 1, True),
        (H200, 8, 512, 4, False),
        (H200, 64, 32768, 512, False),
    ],
    quick=slice(3),
)
def test_which_caches_of_floats_are_read_in_place(
    monkeypatch, device, batch, places, tokens, in_place
):
    have_library(monkeypatch)
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("80", "90"))
    kept = jax.ShapeDtypeStruct((batch, places, 8, 128), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((batch, tokens, 32, 128), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def attend(query, key, value, lengths, **options):
        return KVCache(key, value, lengths).attend(query, **options)

    with dispatch.assume(device):
        assert (ATTEND in kernels(attend, query, kept, kept, lengths)) == in_place
        alike = functools.partial(attend, batch_invariant=True)
        assert ATTEND not in kernels(alike, query, kept, kept, lengths)


@pytest.mark.parametrize(
    ("batch", "stage"), [(512, "KVCache.attend forward"), (64, "dot_product_attention forward")]
)
def test_the_sequences_of_one_device_count(monkeypatch, batch, stage):
    """A device has 64 of 512 sequences on 8 devices, and 8 of 64."""
    have_library(monkeypatch)
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("90",))
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def arrays(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    kept, query = arrays(batch, 32768, 8, 128), arrays(batch, 1, 32, 128)
    with dispatch.assume(H200), jax.sharding.use_abstract_mesh(mesh):
        explanation = jaxfused.explain(
            lambda query, *cache: KVCache(*cache).attend(query),
            query,
            kept,
            kept,
            arrays(batch, dtype=jnp.int32),
        )
    [(choice, _)] = explanation.calls
    assert choice.stage == stage


GOOD = dict(
    compute_capability=(9, 0),
    dtype=jnp.bfloat16,
    kept=jnp.int8,
    rows=4,
    head_size=128,
    value_size=128,
    page_size=16,
    most_pages=8,
    is_combined=False,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(), None),
        (dict(compute_capability=None), "needs an NVIDIA GPU"),
        (dict(compute_capability=(7, 5)), "compute capability 8.0 or later"),
        (dict(dtype=jnp.float32), "queries must have 16 bits"),
        (dict(kept=jnp.float16), "the cache their dtype or 8 bits"),
        (dict(is_combined=True), "must lie in two arrays"),
        (dict(head_size=96, value_size=96), "64 or 128 columns, got 96 and 96"),
        (dict(rows=65), "from 1 to 64 queries, got 65"),
        (dict(page_size=12), "a multiple of 8 tokens, got 12"),
        (dict(page_size=2**28), "too many places"),
    ],
    ids=str,
)
def test_limits_of_attention(with_library, change, reason):
    found = cached_attention_cuda.why_unsupported(**{**GOOD, **change})
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(), None),
        (dict(dtype=jnp.float64), "keys have dtype float64"),
        (dict(value_dtype=jnp.float32), "keys and values of one dtype"),
        (dict(kept=jnp.float64), "not float64"),
        (dict(columns=520), "at most 512 columns"),
        (dict(places=2**30), "too many places"),
    ],
    ids=str,
)
def test_limits_of_append(with_library, change, reason):
    good = dict(
        compute_capability=(9, 0),
        dtype=jnp.bfloat16,
        value_dtype=jnp.bfloat16,
        kept=jnp.int8,
        columns=128,
        places=100,
    )
    found = append_cuda.why_unsupported(**{**good, **change})
    assert found is None if reason is None else reason in found
