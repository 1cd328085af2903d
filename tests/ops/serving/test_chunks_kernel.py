"""The attention kernel for chunks over pages: lowering and interpreter, against NumPy in float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import chunks
from pallas_kernels.attention.pages import Layout, Pages
from tests.support import mosaic_interpreter
from tests.support.grids import parametrize
from tests.support.lowering import kernels


class Case(NamedTuple):
    """A ragged batch: rows of each sequence, and its keys with those of these rows."""

    name: str
    counts: tuple[int, ...]
    keys: tuple[int, ...]
    rows: int
    heads: int = 4
    key_heads: int = 2
    head_size: int = 64
    page_size: int = 16
    pages_each: int = 12
    layout: Layout = "PSKH"
    is_combined: bool = False
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    config: chunks.ForwardConfig | None = None

    def arrays(self, dtype):
        random = np.random.default_rng(0)
        batch, pages = len(self.keys), len(self.keys) * self.pages_each + 3

        def normal(*shape):
            return jnp.asarray(random.normal(size=shape), dtype)

        query = normal(self.rows, self.heads, self.head_size)
        places = (pages, self.page_size, self.key_heads, self.head_size)
        key, value = normal(*places), normal(*places)
        table = random.permutation(pages)[: batch * self.pages_each].reshape(batch, -1)
        # Keys beyond a length must not count.
        place = np.arange(self.pages_each * self.page_size).reshape(1, -1, self.page_size)
        is_beyond = place >= np.array(self.keys)[:, None, None]
        key, value = (
            x.at[table].set(jnp.where(is_beyond[..., None, None], jnp.nan, x[table]))
            for x in (key, value)
        )
        sinks = jnp.asarray(random.normal(size=self.heads), jnp.float32)
        return query, key, value, jnp.asarray(table, jnp.int32), sinks

    def sequences(self):
        end = np.cumsum(self.counts)
        keys = np.array(self.keys)
        arrays = (end - self.counts, end, keys - end, keys)
        return chunks.Sequences(*(x.astype(np.int32) for x in arrays))

    def run(self, query, key, value, table, sinks):
        if self.is_combined:
            both = jnp.stack([key, value], 3).reshape(*key.shape[:2], -1, self.head_size)
            pages = Pages(both, None, table)
        elif self.layout == "KPSH":
            pages = Pages(key.transpose(2, 0, 1, 3), value.transpose(2, 0, 1, 3), table)
        else:
            pages = Pages(key, value, table)
        return chunks.forward(
            *(query, pages, self.sequences()),
            layout=self.layout,
            scale=0.2,
            soft_cap=self.soft_cap,
            window=self.window,
            sinks=sinks if self.has_sinks else None,
            multiprocessors=2,
            config=self.config,
        )

    def expected(self, query, key, value, table, sinks):
        query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
        output, group = np.zeros_like(query), self.heads // self.key_heads
        for b, (begin, end, offset, keys) in enumerate(zip(*self.sequences(), strict=True)):
            k, v = (x[table[b]].reshape(-1, *x.shape[2:])[:keys] for x in (key, value))
            for row in range(begin, min(end, self.rows)):
                seen = slice(
                    0 if self.window is None else max(0, row + offset + 1 - self.window),
                    row + offset + 1,
                )
                for n in range(self.heads if keys else 0):
                    logits = 0.2 * k[seen, n // group] @ query[row, n]
                    if self.soft_cap is not None:
                        logits = self.soft_cap * np.tanh(logits / self.soft_cap)
                    weights = np.exp(logits)
                    total = weights.sum() + (np.exp(float(sinks[n])) if self.has_sinks else 0)
                    output[row, n] = weights @ v[seen, n // group] / total
        return output


CASES = [
    # A tile of 64 rows of the batch with decodes before it, two whole sequences, an empty one, and
    # part of another; rows of no sequence at the end.
    Case("several", (0, 3, 30, 0, 50, 1), (9, 3, 170, 20, 60, 40), 90),
    Case("window", (40, 30), (150, 190), 70, window=50, has_sinks=True, layout="KPSH"),
    Case("one head each", (20, 45), (0, 100), 65, heads=2, soft_cap=3.0, head_size=128),
    Case("one pool", (70,), (130,), 70, heads=8, is_combined=True, page_size=64, pages_each=3),
    Case("blocks of 64", (70,), (130,), 70, config=chunks.ForwardConfig(key_block=64, stages=2)),
]  # fmt: skip


@parametrize("case", CASES, quick=(0,), ids=lambda case: case.name)
def test_in_the_interpreter(monkeypatch, case):
    mosaic_interpreter.prepare(monkeypatch)
    mosaic_interpreter.complete(monkeypatch)
    arrays = case.arrays(jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode():
        output = case.run(*arrays)
    wanted = case.expected(*arrays)
    np.testing.assert_allclose(np.asarray(output, np.float32), wanted, atol=1e-2, rtol=1e-2)


@parametrize("case", CASES, quick=(1,), ids=lambda case: case.name)
def test_lowers(case):
    assert kernels(case.run, *case.arrays(jnp.bfloat16)) == ["attention_chunks_forward"]


def test_a_plan_has_each_tiles_sequences_and_the_longest_tile_first():
    sequences = CASES[0].sequences()
    plan = jax.jit(lambda *s: chunks.Plan.of(chunks.Sequences(*s), 3, 32, None))(*sequences)
    np.testing.assert_array_equal(plan.first, [1, 2, 4])
    np.testing.assert_array_equal(plan.count, [2, 2, 2])
    np.testing.assert_array_equal(plan.following[:5], [1, 2, 4, 4, 5])
    assert sorted(np.asarray(plan.order)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [(dict(group=3), "1, 2, 4"), (dict(dtype=jnp.float32), "float32"), (dict(), None)],
)
def test_says_why_it_cannot_run(change, message):
    pages = Pages(*[jnp.zeros((4, 16, 2, 64), jnp.bfloat16)] * 2, jnp.zeros((1, 2), jnp.int32))
    given = dict(compute_capability=(9, 0), dtype=jnp.bfloat16, group=4, sizes=pages.sizes("PSKH"))
    reason = chunks.why_unsupported(**given | change)
    assert reason is None if message is None else message in reason
