"""The attention kernel over pages: lowering and interpreter, against NumPy in float64."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import paged
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask
from tests.support import mosaic_interpreter
from tests.support.grids import parametrize
from tests.support.lowering import kernels

KERNELS = ["attention_paged_forward", "attention_merge_parts"]


class Case(NamedTuple):
    """A call of the kernel; the lengths count the new tokens, of which the last `counts` are."""

    name: str
    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 4
    key_heads: int = 2
    head_size: int = 32
    value_size: int = 32
    page_size: int = 16
    pages_each: int = 6
    layout: paged.Layout = "PSKH"
    is_combined: bool = False
    counts: tuple[int, ...] | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    multiprocessors: int = 2
    is_whole: bool = False

    def arrays(self, dtype):
        random = np.random.default_rng(0)
        batch, pages = len(self.lengths), len(self.lengths) * self.pages_each + 3

        def normal(*shape):
            return jnp.asarray(random.normal(size=shape), dtype)

        query = normal(batch, self.queries, self.heads, self.head_size)
        if self.counts is not None:
            is_query = np.arange(self.queries) < np.array(self.counts)[:, None]
            query = jnp.where(is_query[..., None, None], query, jnp.nan)
        places = (pages, self.page_size, self.key_heads)
        key, value = normal(*places, self.head_size), normal(*places, self.value_size)
        table = random.permutation(pages)[: batch * self.pages_each].reshape(batch, -1)
        # Keys beyond a length must not count.
        place = np.arange(self.pages_each * self.page_size).reshape(1, -1, self.page_size)
        is_beyond = place >= np.array(self.lengths)[:, None, None]
        key, value = (
            x.at[table].set(jnp.where(is_beyond[..., None, None], jnp.nan, x[table]))
            for x in (key, value)
        )
        sinks = jnp.asarray(random.normal(size=self.heads), jnp.float32)
        return query, key, value, jnp.asarray(table, jnp.int32), sinks if self.has_sinks else None

    def run(self, query, key, value, table, sinks, config=None):
        if self.is_combined:
            places = key.shape[:2]
            both = jnp.stack([key, value], 3).reshape(*places, -1, self.head_size)
            pages = paged.Pages(both, None, table)
        elif self.layout == "KPSH":
            pages = paged.Pages(key.transpose(2, 0, 1, 3), value.transpose(2, 0, 1, 3), table)
        else:
            pages = paged.Pages(key, value, table)
        mask = BlockMask(
            self.queries,
            self.pages_each * self.page_size,
            is_causal=self.queries > 1,
            window=None if self.window is None else (self.window - 1, 0),
            has_query_offset=True,
            has_query_lengths=self.counts is not None,
            has_key_lengths=True,
        )
        lengths = jnp.asarray(self.lengths, jnp.int32)
        counts = None if self.counts is None else jnp.asarray(self.counts, jnp.int32)
        new = jnp.full_like(lengths, self.queries) if counts is None else counts
        return paged.forward(
            query,
            pages,
            Operands(
                sinks=sinks, query_lengths=counts, key_lengths=lengths, query_offset=lengths - new
            ),
            layout=self.layout,
            logits=Logits(0.2, mask, self.soft_cap, has_sinks=self.has_sinks),
            multiprocessors=self.multiprocessors,
            config=config,
            is_whole=self.is_whole,
        )

    def truth(self, query, key, value, table, sinks, dtype=np.float64):
        query, key, value = (np.asarray(x, dtype) for x in (query, key, value))
        output = np.zeros((*query.shape[:3], self.value_size), dtype)
        counts = self.counts or [self.queries] * len(self.lengths)
        for b, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            keys, values = (p[table[b]].reshape(-1, *p.shape[2:]) for p in (key, value))
            for t, n in np.ndindex(count, self.heads):
                stop = length - count + t + 1
                first = 0 if self.window is None else max(0, stop - self.window)
                seen, k = slice(first, max(0, stop)), n // (self.heads // self.key_heads)
                x = 0.2 * keys[seen, k] @ query[b, t, n]
                x = x if self.soft_cap is None else self.soft_cap * np.tanh(x / self.soft_cap)
                weights = np.exp(x)
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[n])))
                if total:
                    output[b, t, n] = weights @ values[seen, k] / total
        return output


CASES = (
    Case("pages of 16, and a sequence without tokens", (90, 5, 0), page_size=16),
    Case(
        "pages of 8 with heads first",
        (150, 70),
        queries=3,
        page_size=8,
        pages_each=20,
        layout="KPSH",
        counts=(3, 2),
        has_sinks=True,
        soft_cap=3.0,
    ),
    Case(
        "keys and values in one pool, window",
        (250, 130),
        queries=2,
        heads=2,
        key_heads=1,
        page_size=128,
        pages_each=2,
        is_combined=True,
        window=40,
    ),
    Case(
        "a cache in one piece",
        (101, 40),
        head_size=40,
        page_size=101,
        pages_each=1,
        multiprocessors=1,
    ),
    Case(
        "several tiles of rows",
        (101, 40),
        queries=17,
        heads=8,
        key_heads=1,
        page_size=64,
        pages_each=2,
        counts=(17, 3),
        multiprocessors=1,
    ),
    Case("whole rows a CTA", (90, 5, 0), queries=2, is_whole=True),
    Case("heads of 40", (41, 5), head_size=40, value_size=48, pages_each=4),
)


@parametrize("case", CASES, quick=(0,))
def test_interpreted(monkeypatch, case):
    mosaic_interpreter.prepare(monkeypatch)
    mosaic_interpreter.complete(monkeypatch)
    arrays = case.arrays(jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode():
        output = case.run(*arrays)
    np.testing.assert_allclose(
        np.asarray(output, np.float64), case.truth(*arrays), atol=6e-3, rtol=1e-2
    )


@pytest.mark.exhaustive
def test_other_sequences_do_not_count_where_a_cta_has_whole_rows(monkeypatch):
    mosaic_interpreter.prepare(monkeypatch)
    mosaic_interpreter.complete(monkeypatch)
    case = Case("", (90, 70, 33), page_size=64, pages_each=2, is_whole=True)
    arrays = case.arrays(jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode():
        whole = case.run(*arrays)
        alone = case._replace(lengths=(0, 70, 0)).run(*arrays)
    np.testing.assert_array_equal(np.asarray(alone[1]), np.asarray(whole[1]))


WIDE = (
    Case("usual", (90, 5), heads=8, head_size=128, value_size=128),
    Case("pages of 64", (90, 5), head_size=128, value_size=128, page_size=64),
    Case("whole rows a CTA", (90, 5), head_size=128, value_size=128, page_size=64, is_whole=True),
    Case(
        "heads of 256 and 80", (9, 5), 4, head_size=256, value_size=80, page_size=37, pages_each=1
    ),
    *CASES[1:3],
    CASES[-1],
)


@parametrize("case", WIDE, quick=(0, 6))
def test_lowers(case):
    assert kernels(case._replace(multiprocessors=132).run, *case.arrays(jnp.bfloat16)) == KERNELS


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(5))
def test_every_config_lowers(index):
    case = CASES[0]._replace(multiprocessors=132, page_size=64)
    arrays = case.arrays(jnp.float16)
    _, key, value, table, _ = arrays
    configs = paged.candidates(paged.Pages(key, value, table).sizes("PSKH"))
    if index < len(configs):
        run = functools.partial(case.run, config=configs[index])
        assert kernels(run, *arrays) == KERNELS


@pytest.mark.exhaustive
@pytest.mark.parametrize("kept", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_bytes_are_widened(monkeypatch, kept):
    """Beside the truth of what is kept, whose scales make tokens unequal."""
    mosaic_interpreter.prepare(monkeypatch)
    mosaic_interpreter.complete(monkeypatch)
    mosaic_interpreter.upcast_integers(monkeypatch)
    case = Case("", (100, 37), page_size=32, pages_each=4)
    query, key, value, table, _ = case.arrays(jnp.bfloat16)
    random = np.random.default_rng(1)
    scales = [jnp.asarray(random.uniform(0.1, 1.0, key.shape[:3]), jnp.float32) for _ in "kv"]
    is_beyond = jnp.isnan(key[..., 0])
    small = [(8 * jnp.nan_to_num(x)).astype(kept) for x in (key, value)]
    given = [jnp.where(is_beyond, jnp.nan, scale) for scale in scales]
    pages = paged.Pages(*small, table, *(jnp.moveaxis(scale, -1, 0) for scale in given))
    mask = BlockMask(1, 128, has_query_offset=True, has_key_lengths=True)
    lengths = jnp.asarray(case.lengths, jnp.int32)

    def run(query, pages):
        return paged.forward(
            query,
            pages,
            Operands(key_lengths=lengths, query_offset=lengths - 1),
            layout="PSKH",
            logits=Logits(0.2, mask),
            multiprocessors=2,
        )

    assert kernels(run, query, pages) == KERNELS
    with plgpu.force_gpu_interpret_mode():
        output = np.asarray(run(query, pages), np.float64)
    wide = [
        np.asarray(x, np.float64) * np.asarray(s, np.float64)[..., None]
        for x, s in zip(small, scales, strict=True)
    ]
    wanted = case.truth(query, *wide, table, None)
    np.testing.assert_allclose(output, wanted, atol=3e-2 * np.abs(wanted).max())
