"""KVCache.attend and paged_attention with many options at once, against attention of NumPy's float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import KVCache
from tests.support.arrays import put
from tests.support.grids import parametrize

PLACES = 40
NEAR = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
ALL = dict(window=4, cap=5.0, sinks=True, alibi=True)
GROUPED = dict(heads=3, key_heads=1)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of `tokens` new tokens of sequences that have `lengths` tokens before."""

    tokens: int
    lengths: tuple[int, ...] = (0, 5, 20)
    heads: int = 4
    key_heads: int = 4
    head_size: int = 16
    value_size: int | None = None
    dtype: str = "float32"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    tree: bool = False
    starts: tuple[int, ...] | None = None
    places: int = PLACES
    """Places of a sequence, or the tokens of its pages."""

    def __str__(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed)

    def draw(self, rng, *shape):
        """Returns random numbers of the step's dtype, as an array of float64."""
        return np.asarray(put(rng.normal(size=shape), self.dtype), np.float64)

    def options(self, rng):
        """Returns the arrays tree_mask [B, T, T], alibi_slopes [N] and sinks [N], or None for each."""
        batch, tokens = len(self.lengths), self.tokens
        tree = np.tril(rng.random((batch, tokens, tokens)) < 0.5) | np.eye(tokens, dtype=bool)
        slopes, sinks = np.abs(rng.normal(size=self.heads)), rng.normal(size=self.heads)
        return (
            tree if self.tree else None,
            np.float32(slopes) if self.alibi else None,
            np.float32(sinks) if self.sinks else None,
        )

    def attended(self, query, key, value, tree, slopes, sinks):
        """Returns the output [B, T, N, V] over key and value [B, places, K, ...], in float64."""
        batch, tokens, heads, size = query.shape
        output = np.zeros((batch, tokens, heads, value.shape[-1]))
        for b, t, n in np.ndindex(batch, tokens, heads):
            before, k = self.lengths[b], n // (heads // self.key_heads)
            depth = np.arange(tokens) if tree is None else tree[b].sum(axis=1) - 1
            new = np.arange(min(before + tokens, self.places)) - before
            number = np.clip(new, 0, tokens - 1)
            is_seen = (new < 0) | (number <= t if tree is None else tree[b, t, number])
            back = depth[t] - np.where(new < 0, new, depth[number])
            if self.window is not None:
                is_seen &= back < self.window
            if self.starts is not None:
                is_seen &= new + before >= self.starts[b]
            logits = key[b, : new.size, k] @ query[b, t, n] / np.sqrt(size)
            if self.cap is not None:
                logits = self.cap * np.tanh(logits / self.cap)
            if slopes is not None:
                logits = logits - np.float64(slopes[n]) * back
            weights = np.where(is_seen, np.exp(logits), 0.0)
            total = weights.sum() + (0.0 if sinks is None else np.exp(np.float64(sinks[n])))
            output[b, t, n] = weights @ value[b, : new.size, k] / (total or 1.0)
        return output


STEPS = (
    Step(16, **GROUPED, head_size=80, tree=True, **ALL),
    *(Step(tokens, **GROUPED, head_size=80, **ALL) for tokens in (1, 3, 16)),
    Step(4, **GROUPED, head_size=96, dtype="float16", tree=True, **ALL),
    Step(4, heads=6, key_heads=2, head_size=112, dtype="bfloat16", window=4, cap=5.0, sinks=True),
    # Tokens past the last place are dropped.
    Step(4, (39, 38, 60), heads=6, key_heads=2),
    Step(4, (39, 38, 60), window=3),
    Step(4, (39, 38, 60), tree=True, alibi=True),
    Step(16, (0, 3), places=8),
    Step(4, (6, 9, 7), starts=(2, 9, 0), tree=True, alibi=True, window=5),
    Step(4, (6, 9, 7), starts=(2, 12, 0)),
    *(
        Step(2, heads=8, key_heads=1, head_size=size, value_size=values, window=7, sinks=True)
        for size, values in ((320, 320), (384, 384), (512, 512), (576, 512), (192, 128))
    ),
    Step(1, heads=8, key_heads=1, head_size=512, dtype="bfloat16", alibi=True),
)


@parametrize("step", STEPS, quick=(0,))
def test_of_a_cache(step):
    rng = np.random.default_rng(0)
    batch, places = len(step.lengths), step.places
    value_size = step.value_size or step.head_size
    query = step.draw(rng, batch, step.tokens, step.heads, step.head_size)
    key, new_key, value, new_value = (
        step.draw(rng, batch, count, step.key_heads, size)
        for size in (step.head_size, value_size)
        for count in (places, step.tokens)
    )
    tree, slopes, sinks = step.options(rng)
    window = None if step.window is None else (step.window - 1, 0)

    @jax.jit
    def attended(query, key, value, new_key, new_value, tree, slopes, sinks):
        cache = KVCache(
            key,
            value,
            put(step.lengths, jnp.int32),
            None if step.starts is None else put(step.starts, jnp.int32),
        )
        more = dict(tree_mask=tree, alibi_slopes=slopes, sinks=sinks)
        return cache.append(new_key, new_value).attend(
            query, local_window_size=window, logits_soft_cap=step.cap, **more
        )

    arrays = (put(a, step.dtype) for a in (query, key, value, new_key, new_value))
    output = attended(*arrays, tree, slopes, sinks)
    for b, before in enumerate(step.lengths):
        kept = max(0, min(step.tokens, places - before))
        key[b, before : before + kept] = new_key[b, :kept]
        value[b, before : before + kept] = new_value[b, :kept]
    expected = step.attended(query, key, value, tree, slopes, sinks)
    np.testing.assert_allclose(output, expected, rtol=0, atol=NEAR[step.dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["KPSH", "PSKH"])
@pytest.mark.parametrize(
    "step", [step for step in STEPS if step.starts is None and step.places == PLACES], ids=str
)
def test_of_pages(step, layout):
    rng = np.random.default_rng(0)
    batch, page = len(step.lengths), 8
    lengths = np.minimum(step.lengths, PLACES - step.tokens)
    step = dataclasses.replace(step, lengths=tuple(lengths.tolist()))
    table = rng.permutation(2 * batch * PLACES // page)[: batch * PLACES // page]
    table = table.reshape(batch, PLACES // page)
    query = step.draw(rng, batch, step.tokens, step.heads, step.head_size)
    pools = [
        step.draw(rng, 2 * table.size, page, step.key_heads, size)
        for size in (step.head_size, step.value_size or step.head_size)
    ]
    tree, slopes, sinks = step.options(rng)
    given = pools if layout == "PSKH" else [np.moveaxis(pool, 2, 0) for pool in pools]
    output = jax.jit(
        lambda *arrays: jaxfused.paged_attention(
            *arrays,
            put(lengths + step.tokens, jnp.int32),
            put(table, jnp.int32),
            scale=step.head_size**-0.5,
            attn_logits_soft_cap=step.cap,
            sliding_window=step.window,
            layout=layout,
            tree_mask=tree,
            alibi_slopes=slopes,
            sinks=sinks,
        )
    )(*(put(a, step.dtype) for a in (query, *given)))
    key, value = (pool[table].reshape(batch, PLACES, *pool.shape[2:]) for pool in pools)
    expected = step.attended(query, key, value, tree, slopes, sinks)
    np.testing.assert_allclose(output, expected, rtol=0, atol=NEAR[step.dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(4, 3, 4, 4, 1, 2, 4, 4), (1,) * 26], ids=len)
@pytest.mark.parametrize("starts", [None, (2, 0)])
def test_a_ring_goes_round_several_times(sizes, starts):
    rng, window = np.random.default_rng(0), 5
    query, key, value = (put(rng.normal(size=(2, 26, n, 16))) for n in (3, 1, 1))
    cache = KVCache.zeros(
        batch=2, length=8, key_heads=1, head_size=16, dtype="float32", window=window, starts=starts
    )

    @jax.jit
    def step(cache, query, key, value):
        cache = cache.append(key, value)
        return cache.advance(query.shape[1]), cache.attend(query)

    outputs, first = [], 0
    for size in sizes:
        cache, output = step(cache, *(a[:, first : first + size] for a in (query, key, value)))
        outputs.append(output)
        first += size
    whole = Step(26, (0, 0), **GROUPED, window=window, starts=starts)
    arrays = (np.asarray(a, np.float64) for a in (query, key, value))
    expected = whole.attended(*arrays, None, None, None)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, rtol=0, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_a_batch_of_caches(dtype):
    """Under vmap a step with a tree, ALiBi, sinks, a cap and a window is that of each cache."""
    rng = np.random.default_rng(0)
    query, key, value = (put(rng.normal(size=(3, 2, 2, n, 16))) for n in (3, 1, 1))
    cache = KVCache.zeros(batch=2, length=8, key_heads=1, head_size=16, dtype=dtype)
    numbers, tree = np.float32([0.5, 0.1, 0.3]), np.tril(np.ones((2, 2, 2), bool))

    def step(query, key, value):
        kept = cache.append(key, value)
        more = dict(logits_soft_cap=3.0, local_window_size=(1, 0), tree_mask=tree)
        return kept, kept.attend(query, alibi_slopes=numbers, sinks=numbers, **more)

    together = jax.jit(jax.vmap(step))(query, key, value)
    each = [jax.jit(step)(*arrays) for arrays in zip(query, key, value, strict=True)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=0, atol=2e-5)
