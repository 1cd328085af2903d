"""Grouped products in Pallas: groups of any sizes, empty ones, rows of no group, both layouts."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from pallas_kernels.gemm import grouped, grouped_weight_gradient
from pallas_kernels.gemm.cost import WeightWork, Work
from pallas_kernels.gemm.matmul_config import MatmulConfig
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels

PING_PONG = MatmulConfig(64, 128, stages=3, epilogue_columns=64)
SHARED = MatmulConfig(64, 128, stages=3, ping_pong=False, epilogue_columns=64, write_slots=2)


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    rows: int
    k: int = 72
    n: int = 136
    dtype: str = "bfloat16"
    config: MatmulConfig | None = PING_PONG
    transposed: bool = False
    offset: int = 0
    groups: int | None = None
    """Groups that are multiplied, where they are not all."""
    products: int = 1
    out_dtype: str | None = None

    @property
    def work(self) -> Work:
        return Work(
            self.rows,
            self.n,
            self.k,
            self.products,
            k_last=self.transposed,
            groups=self.groups or len(self.sizes),
        )

    def operands(self) -> list[Any]:
        """Returns small integers, whose sums are exact; rows of no group are NaN."""
        rng = np.random.default_rng(0)
        a = rng.integers(-3, 4, size=(self.rows, self.k)).astype(np.float64)
        columns = self.products * self.n
        b = rng.integers(-3, 4, size=(self.work.groups, self.k, columns)).astype(np.float64)
        first, last = self.bounds()
        a[:first] = a[last:] = np.nan
        if self.transposed:
            b = b.swapaxes(1, 2)
        sizes = put(self.sizes, jnp.int32), put(self.offset, jnp.int32)
        return [put(a, self.dtype), put(b, self.dtype), *sizes]

    def bounds(self) -> tuple[int, int]:
        """Returns the first row that is multiplied, and the one after the last."""
        ends = np.minimum(np.cumsum([0, *self.sizes]), self.rows)
        return ends[self.offset], ends[self.offset + self.work.groups]

    def expected(self, a: Any, b: Any) -> Any:
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        b = b.swapaxes(1, 2) if self.transposed else b
        y = np.zeros((self.rows, b.shape[2]))
        ends = np.minimum(np.cumsum([0, *self.sizes]), self.rows)
        for group, matrix in enumerate(b):
            rows = slice(ends[self.offset + group], ends[self.offset + group + 1])
            y[rows] = a[rows] @ matrix
        if self.products == 2:
            y = y[:, : self.n] - y[:, self.n :]
        return y

    def run(self, multiprocessors: int, a: Any, b: Any, *sizes: Any) -> jax.Array:
        product = grouped.GroupedProduct(
            name="grouped_product",
            a=[a],
            b=[b],
            b_transposed=self.transposed,
            products=self.products,
            epilogue=lambda y, *others: {"y": y - others[0] if others else y},
            outputs={"y": jnp.dtype(self.out_dtype or self.dtype)},
        )
        return product.run(*sizes, multiprocessors=multiprocessors, config=self.config)["y"]

    def check(self, multiprocessors: int = 4) -> None:
        a, b, sizes, offset = self.operands()
        y = jax.jit(functools.partial(self.run, multiprocessors))(a, b, sizes, offset)
        expected = put(self.expected(a, b), jnp.float32).astype(y.dtype)
        np.testing.assert_array_equal(y, expected)


INTERPRETED = (
    Case((37, 0, 64, 91), 192),
    Case((70, 5, 129), 256, config=SHARED),
    Case((0, 0, 200, 30, 3, 0), 233, transposed=True),
    Case((1, 1, 0, 7), 16, n=64, k=64),
    Case((40, 30, 20, 60, 10), 200, offset=1, groups=3),
    Case((40, 300), 200, dtype="float16", config=SHARED),
    Case((50, 60), 110, products=2, n=64),
    Case((50, 60), 120, products=2, n=64, transposed=True, config=SHARED),
    Case((0, 0), 70),
    Case((64,), 100, out_dtype="float32", config=MatmulConfig(64, 128, 3, epilogue_columns=32)),
)


@parametrize("case", INTERPRETED, quick=(4,))
def test_in_the_interpreter(case, interpreted_hopper):
    case.check()


@dataclass(frozen=True)
class WeightCase:
    sizes: tuple[int, ...]
    rows: int
    k: int = 72
    n: int = 192
    dtype: str = "bfloat16"
    config: MatmulConfig | None = None
    offset: int = 0
    groups: int | None = None
    out_dtype: str | None = None

    def check(self, multiprocessors: int = 4) -> None:
        """Checks sums of small integers; the last group's rows and those of no group are NaN."""
        rng = np.random.default_rng(0)
        x, dy = (rng.integers(-3, 4, size=(self.rows, n)) * 1.0 for n in (self.k, self.n))
        groups = self.groups or len(self.sizes)
        ends = np.minimum(np.cumsum([0, *self.sizes]), self.rows)
        for array in (x, dy):
            array[: ends[self.offset]] = array[ends[self.offset + groups - 1] :] = np.nan
        out_dtype = jnp.dtype(self.out_dtype or self.dtype)
        bounds = zip(ends[self.offset :], ends[self.offset + 1 :][:groups], strict=False)
        expected = np.stack([x[a:b].T @ dy[a:b] for a, b in bounds])
        run = functools.partial(
            grouped_weight_gradient.grouped_weight_gradient,
            groups=groups,
            out_dtype=out_dtype,
            multiprocessors=multiprocessors,
            config=self.config,
        )
        sizes, offset = put(self.sizes, jnp.int32), put(self.offset, jnp.int32)
        dw = jax.jit(run)(put(x, self.dtype), put(dy, self.dtype), sizes, offset)
        wanted = put(expected, jnp.float32).astype(out_dtype)
        np.testing.assert_array_equal(np.float32(dw), np.float32(wanted))


SUMMED = MatmulConfig(64, 128, stages=3, ping_pong=False, epilogue_columns=64, write_slots=2)
WEIGHTS = (
    WeightCase((37, 0, 64, 91), 192, config=SUMMED),
    WeightCase((130, 5, 70, 20), 230, n=136, config=SUMMED),
    WeightCase((40, 30, 20, 60, 10), 200, offset=1, groups=3, dtype="float16"),
    WeightCase((200, 64), 264, k=264, n=64),
    WeightCase((0, 70, 0), 71, out_dtype="float32"),
)


@parametrize("case", WEIGHTS, quick=(0,))
def test_gradient_of_weights_in_the_interpreter(case, interpreted_hopper):
    case.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [INTERPRETED[0], INTERPRETED[4], WEIGHTS[0]], ids=str)
def test_threads_do_not_race(case, race_detector):
    case.check()


def one_of_each_tile(configs):
    """Returns the first config of each tile."""
    return list({(c.tile_m, c.tile_n, c.ping_pong): c for c in reversed(configs)}.values())


OUTPUTS = {"y": jnp.bfloat16}
CONFIGS = one_of_each_tile(grouped.candidates(Work(512, 256, 128, groups=4), OUTPUTS, 132))


@parametrize("config", CONFIGS, quick=())
def test_each_config_is_lowered(config):
    case = Case((100,) * 4, 512, 128, 256, config=config)
    assert kernels(functools.partial(case.run, 132), *case.operands()) == ["grouped_product"]


LARGE = tuple(
    replace(case, config=config)
    for case in (
        Case((0, 700, 1, 63, 900, 64, 127, 300, 0, 400), 3000, 520, 392),
        Case((400, 300, 200, 0, 600), 2000, 512, 512, transposed=True, offset=1, groups=3),
    )
    for config in one_of_each_tile(grouped.candidates(case.work, OUTPUTS, 132))
)
LARGE_WEIGHTS = tuple(
    replace(case, config=config)
    for case in (
        WeightCase((0, 700, 1, 63, 900, 64, 127, 300, 0, 400), 3000, 520, 392),
        WeightCase((400, 300, 200, 0, 600), 2001, 512, 512, offset=1, groups=3),
    )
    for config in one_of_each_tile(
        grouped_weight_gradient.candidates(
            WeightWork(case.rows, case.k, (case.n,), out_bytes=2), 10, jnp.bfloat16, 132
        )
    )
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INTERPRETED, *LARGE, *WEIGHTS, *LARGE_WEIGHTS], ids=str)
def test_on_a_gpu(case):
    case.check(jax.devices()[0].core_count)


@pytest.mark.gpu
def test_on_a_gpu_twice_the_same():
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (
        jax.random.normal(k, (4096, n), jnp.bfloat16)
        for k, n in zip(keys, (768, 2048), strict=False)
    )
    w = jax.random.normal(keys[2], (16, 768, 2048), jnp.bfloat16)
    ends = jnp.sort(jax.random.randint(keys[0], (15,), 0, 4096))
    sizes = jnp.diff(ends, prepend=0, append=4000)

    @jax.jit
    def run(x, w, dy):
        y, pull_back = jax.vjp(lambda x, w: jaxfused.ragged_dot(x, w, sizes), x, w)
        return y, *pull_back(dy)

    chex.assert_trees_all_equal(run(x, w, dy), run(x, w, dy))
