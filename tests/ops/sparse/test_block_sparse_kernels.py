"""Block-sparse products in Pallas: columns with any number of blocks, or none; both orders of blocks."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import block_sparse, block_sparse_weights
from pallas_kernels.gemm.matmul_config import MatmulConfig
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels


@dataclass(frozen=True)
class Case:
    rows: int
    block: int
    kept: tuple[tuple[int, ...], ...]
    """For each column of blocks the rows of blocks that are kept."""
    k_blocks: int = 4
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    transposed: bool = False
    config: MatmulConfig | None = None

    @property
    def count(self) -> int:
        return sum(map(len, self.kept))

    def operands(self) -> list[Any]:
        """Returns small integers, whose sums are exact; columns of a that meet no block are NaN."""
        rng = np.random.default_rng(0)
        a = rng.integers(-3, 4, size=(self.rows, self.k_blocks * self.block)).astype(np.float64)
        met = {row for column in self.kept for row in column}
        for row in set(range(self.k_blocks)) - met:
            a[:, row * self.block : (row + 1) * self.block] = np.nan
        blocks = rng.integers(-3, 4, size=(self.count, self.block, self.block)).astype(np.float64)
        places = [row for column in self.kept for row in column]
        order = rng.permutation(self.count)
        shuffled = np.empty_like(blocks)
        shuffled[order] = blocks.swapaxes(1, 2) if self.transposed else blocks
        indptr = np.cumsum([0, *map(len, self.kept)])
        entries = np.stack([order, places])
        self_dense = (put(a, self.dtype), put(shuffled, self.dtype))
        return [*self_dense, put(indptr, jnp.int32), put(entries, jnp.int32)]

    def expected(self, a: Any, blocks: Any, indptr: Any, entries: Any) -> np.ndarray:
        a, blocks = (np.asarray(x, np.float64) for x in (a, blocks))
        y = np.zeros((self.rows, len(self.kept) * self.block))
        for column in range(len(self.kept)):
            for entry in range(indptr[column], indptr[column + 1]):
                block = blocks[entries[0, entry]]
                k = slice(
                    int(entries[1, entry]) * self.block, (int(entries[1, entry]) + 1) * self.block
                )
                n = slice(column * self.block, (column + 1) * self.block)
                y[:, n] += a[:, k] @ (block.T if self.transposed else block)
        return y

    def run(self, multiprocessors: int, *operands: Any) -> jax.Array:
        return block_sparse.block_sparse_product(
            *operands,
            transposed=self.transposed,
            out_dtype=jnp.dtype(self.out_dtype or self.dtype),
            multiprocessors=multiprocessors,
            config=self.config,
        )

    def check(self, multiprocessors: int = 4) -> None:
        operands = self.operands()
        y = jax.jit(functools.partial(self.run, multiprocessors))(*operands)
        expected = put(self.expected(*map(np.asarray, operands)), jnp.float32).astype(y.dtype)
        np.testing.assert_array_equal(np.float32(y), np.float32(expected))


SMALL = MatmulConfig(64, 64, stages=3, ping_pong=False, epilogue_columns=64)
TALL = MatmulConfig(256, 32, stages=3, ping_pong=False, epilogue_columns=32, band=2)
KEPT = ((0, 3), (), (2,), (0, 2, 3))
INTERPRETED = (
    Case(150, 64, KEPT, config=SMALL),
    Case(600, 32, KEPT, config=TALL),
    Case(600, 32, KEPT, config=TALL, transposed=True, dtype="float16"),
    Case(300, 32, KEPT, config=MatmulConfig(64, 32, 3, ping_pong=False, epilogue_columns=32)),
    Case(70, 32, ((), (1,)), 2, out_dtype="float32"),
    Case(150, 64, KEPT, config=SMALL, transposed=True, dtype="float16"),
    Case(70, 64, ((), (1,)), 2, out_dtype="float32"),
    Case(130, 128, ((1,), (0, 1), ()), 2),
    Case(130, 128, ((1,), (0, 1), ()), 2, transposed=True),
)


@parametrize("case", INTERPRETED, quick=(0, 1))
def test_in_the_interpreter(case, interpreted_hopper):
    case.check()


@dataclass(frozen=True)
class WeightCase:
    rows: int
    block: int
    kept: tuple[tuple[int, ...], ...]
    """For each row of blocks the columns of blocks that are kept."""
    n_blocks: int = 4
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    config: MatmulConfig | None = None

    def check(self, multiprocessors: int = 4) -> None:
        rng = np.random.default_rng(0)
        widths = (len(self.kept) * self.block, self.n_blocks * self.block)
        x, dy = (rng.integers(-3, 4, size=(self.rows, n)) * 1.0 for n in widths)
        places = [column for row in self.kept for column in row]
        order = rng.permutation(len(places))
        indptr = np.cumsum([0, *map(len, self.kept)])
        dense = x.T @ dy
        expected = np.zeros((len(places), self.block, self.block))
        for row in range(len(self.kept)):
            for entry in range(indptr[row], indptr[row + 1]):
                k, n = row * self.block, places[entry] * self.block
                expected[order[entry]] = dense[k : k + self.block, n : n + self.block]
        out_dtype = jnp.dtype(self.out_dtype or self.dtype)
        run = functools.partial(
            block_sparse_weights.block_sparse_weights,
            block=self.block,
            out_dtype=out_dtype,
            multiprocessors=multiprocessors,
            config=self.config,
        )
        lists = put(indptr, jnp.int32), put(np.stack([order, places]), jnp.int32)
        dw = jax.jit(run)(put(x, self.dtype), put(dy, self.dtype), *lists)
        wanted = put(expected, jnp.float32).astype(out_dtype)
        np.testing.assert_array_equal(np.float32(dw), np.float32(wanted))


NARROW = MatmulConfig(64, 128, stages=3, ping_pong=False, epilogue_columns=64)
WEIGHTS = (
    WeightCase(150, 64, ((0, 1, 2, 3), (), (1,), (0, 1, 2, 3, 4, 6)), 7, config=NARROW),
    WeightCase(150, 128, ((0, 1, 2), (), (1,)), 3),
    WeightCase(60, 64, ((0,), (1, 2, 3)), out_dtype="float32", dtype="float16"),
    WeightCase(150, 32, ((0, 1, 2, 3), (), (1,), (0, 1, 2, 3, 4, 6)), 7),
    WeightCase(150, 32, ((0, 1, 2, 3), (1,), (5,)), 8, out_dtype="float32", dtype="float16"),
)


@parametrize("case", WEIGHTS, quick=(0, 3))
def test_gradient_of_weights_in_the_interpreter(case, interpreted_hopper):
    case.check()


def random_places(rows: int, columns: int, density: float) -> tuple[tuple[int, ...], ...]:
    """Returns the places that are kept in each row."""
    kept = np.random.default_rng(0).random((rows, columns)) < density
    return tuple(tuple(int(i) for i in np.flatnonzero(row)) for row in kept)


def work_of(block: int) -> block_sparse.Shape:
    return block_sparse.Shape(1000, 9 * block, 12 * block, block, kept=40)


LARGE = tuple(
    case
    for block in block_sparse.BLOCKS
    for out_dtype in ("bfloat16", "float32")
    for case in (
        *(
            Case(1000, block, random_places(9, 12, 0.4), 12, config=config, transposed=transposed)
            for config in block_sparse.candidates(work_of(block), jnp.bfloat16, jnp.bfloat16, 132)[
                ::4
            ]
            for transposed in (False, True)
            if out_dtype == "bfloat16"
        ),
        Case(1000, block, random_places(9, 12, 0.4), 12, out_dtype=out_dtype),
        *(
            WeightCase(
                1003, block, random_places(9, 12, 0.4), 12, out_dtype=out_dtype, config=config
            )
            for config in block_sparse_weights.candidates(
                work_of(block), jnp.bfloat16, out_dtype, 132
            )[::3]
        ),
    )
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INTERPRETED, *WEIGHTS, *LARGE], ids=str)
def test_on_a_gpu(case):
    case.check(jax.devices()[0].core_count)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*INTERPRETED[:2], WEIGHTS[0], WEIGHTS[3]], ids=str)
def test_threads_do_not_race(case, race_detector):
    case.check()


CONFIGS = tuple(
    Case(512, block, KEPT, config=config)
    for block in block_sparse.BLOCKS
    for config in block_sparse.candidates(work_of(block), jnp.bfloat16, jnp.bfloat16, 132)
)


@parametrize("case", CONFIGS, quick=())
def test_each_config_is_lowered(case):
    operands = case.operands()
    assert kernels(functools.partial(case.run, 132), *operands) == ["block_sparse_product"]
