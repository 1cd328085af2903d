"""The gradient of weights alone: odd rows, parts, clusters, several cotangents, sums of rows."""

import functools
from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm.cost import WeightWork
from pallas_kernels.gemm.weight_gradient import (
    WeightGradientConfig,
    fitting,
    weight_gradient,
    why_unsupported,
)
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels

SMALL = WeightGradientConfig(tile_m=64, tile_n=64, stages=2)


@dataclass(frozen=True)
class Case:
    rows: int
    features: int
    widths: tuple[int, ...]
    sums: bool = False
    config: WeightGradientConfig | None = SMALL
    dtype: str = "bfloat16"
    out_dtype: str = "float32"

    def operands(self):
        """Returns small integers, whose sums are exact in float32 in any order."""
        rng = np.random.default_rng(0)
        return [
            put(rng.integers(-3, 4, size=(self.rows, width)), self.dtype)
            for width in (self.features, *self.widths)
        ]

    def run(self, x, *dys, multiprocessors):
        return weight_gradient(
            x,
            dys,
            out_dtype=self.out_dtype,
            sums_rows=self.sums,
            multiprocessors=multiprocessors,
            config=self.config,
        )

    def check(self, multiprocessors=4):
        x, *dys = self.operands()
        run = functools.partial(self.run, multiprocessors=multiprocessors)
        dws, sums = jax.jit(run)(x, *dys)
        assert (sums is not None) == self.sums
        for index, dy in enumerate(dys):
            x64, dy64 = (np.asarray(a, np.float64) for a in (x, dy))
            expected = put(x64.T @ dy64, jnp.float32).astype(self.out_dtype)
            np.testing.assert_array_equal(
                np.asarray(dws[index], np.float32), np.asarray(expected, np.float32)
            )
            if sums is not None:
                np.testing.assert_array_equal(sums[index], dy64.sum(axis=0))


def config(**changes):
    return replace(SMALL, **changes)


INTERPRETED = (
    Case(200, 128, (64,)),
    Case(203, 136, (72,), sums=True, config=config(parts=2)),
    Case(392, 136, (128, 64), sums=True, config=config(parts=3)),
    Case(70, 72, (40, 136, 64), sums=True, config=config(tile_n=128, parts=2), dtype="float16"),
    Case(256, 128, (128,), sums=True, config=config(parts=2, cluster=2)),
    Case(333, 64, (64,), config=config(parts=4, cluster=2)),
    Case(200, 520, (64,), sums=True),
    Case(136, 264, (64,), sums=True),
    Case(264, 128, (128,), config=config(parts=2, cluster=2), out_dtype="bfloat16"),
    Case(
        130, 256, (72,), config=config(tile_m=128, tile_n=128, parts=4, cluster=4), dtype="float16"
    ),
    Case(3, 16, (8,), sums=True),
)


@parametrize("case", INTERPRETED, quick=(1,))
def test_in_the_interpreter(case, interpreted_hopper):
    case.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [INTERPRETED[2], INTERPRETED[4], INTERPRETED[8]], ids=str)
def test_threads_do_not_race(case, race_detector):
    case.check()


LARGE = (
    Case(38082, 128, (512, 512), sums=True),
    Case(11308, 2048, (384, 128, 128), sums=True, out_dtype="bfloat16"),
    Case(8448, 768, (384,), dtype="float16"),
    Case(1, 8, (8,), sums=True),
)


@parametrize("case", LARGE, quick=())
def test_every_config_lowers(case):
    shapes = [
        jax.ShapeDtypeStruct((case.rows, width), case.dtype)
        for width in (case.features, *case.widths)
    ]
    work = WeightWork(case.rows, case.features, case.widths, out_bytes=4, sums=case.sums)
    configs = fitting(work, 132)
    assert configs
    by_shape = {(c.tile_m, c.tile_n, c.cluster): c for c in reversed(configs)}
    for chosen in by_shape.values():
        run = functools.partial(replace(case, config=chosen).run, multiprocessors=132)
        assert kernels(run, *shapes) == ["weight_gradient"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(tile_m=32), "multiple of 64"),
        (dict(tile_n=320), "up to 256"),
        (dict(tile_m=128, tile_n=256), "24576 elements"),
        (dict(stages=0), "at least 1"),
        (dict(parts=3, cluster=2), "equal shares"),
        (dict(parts=4, cluster=4), "equal shares"),
    ],
)
def test_configs_that_no_kernel_has(changes, words):
    with pytest.raises(ValueError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("capability", "dtypes", "features", "words"),
    [
        ((8, 0), dict(x="bfloat16"), dict(x=64), "Hopper"),
        ((9, 0), dict(x="float32"), dict(x=64), "bfloat16 and float16"),
        ((9, 0), dict(x="bfloat16", dy="float16"), dict(x=64), "several dtypes"),
        ((9, 0), dict(x="bfloat16"), dict(x=60), "multiples of 8"),
        ((9, 0), dict(x="bfloat16", dy="bfloat16"), dict(x=64, dy=72), None),
    ],
)
def test_why_unsupported(capability, dtypes, features, words):
    reason = why_unsupported(
        compute_capability=capability,
        dtypes={name: jnp.dtype(dtype) for name, dtype in dtypes.items()},
        features=features,
    )
    assert reason is None if words is None else words in reason


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_on_a_gpu_twice_the_same(case):
    """Integers have one exact result; for other numbers two runs must agree bit for bit."""
    work = WeightWork(case.rows, case.features, case.widths, out_bytes=4, sums=case.sums)
    multiprocessors = jax.devices()[0].core_count
    x, *dys = case.operands()
    keys = jax.random.split(jax.random.key(0), 1 + len(dys))
    others = [
        jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, (x, *dys), strict=True)
    ]
    for chosen in fitting(work, multiprocessors)[:6]:
        own = replace(case, config=chosen)
        own.check(multiprocessors)
        run = jax.jit(functools.partial(own.run, multiprocessors=multiprocessors))
        chex.assert_trees_all_equal(run(*others), run(*others))
