"""The gradient of weights by itself: ragged rows, parts, clusters, several cotangents, sums of rows."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.product.weight_gradient import (
    WeightGradientConfig,
    weight_gradient,
)
from tests.grids import parametrize

SMALL = WeightGradientConfig(tile_m=64, tile_n=64, stages=2)


@dataclass(frozen=True)
class Case:
    rows: int
    features: int
    widths: tuple[int, ...]
    sums: bool = False
    config: WeightGradientConfig = SMALL
    dtype: str = "bfloat16"
    out_dtype: str = "float32"

    def operands(self):
        """Small integers, whose sums float32 holds in whatever order they are added."""
        rng = np.random.default_rng(0)
        return [
            jnp.asarray(rng.integers(-3, 4, size=(self.rows, width)), self.dtype)
            for width in (self.features, *self.widths)
        ]

    def run(self, x, *dys, multiprocessors=4):
        return weight_gradient(
            x,
            dys,
            out_dtype=self.out_dtype,
            sums_rows=self.sums,
            multiprocessors=multiprocessors,
            config=self.config,
        )

    def check(self):
        x, *dys = self.operands()
        dws, sums = jax.jit(self.run)(x, *dys)
        assert (sums is not None) == self.sums
        for index, dy in enumerate(dys):
            x64, dy64 = (np.asarray(a, np.float64) for a in (x, dy))
            expected = jnp.asarray(x64.T @ dy64, jnp.float32).astype(self.out_dtype)
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


@parametrize("case", INTERPRETED, quick=(1, 4))
def test_in_the_interpreter(case, interpreted_hopper):
    case.check()
