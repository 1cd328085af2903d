"""Mean and variance of a convolution's result from its epilogue, and the batch norm that reads them."""

from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.norm import batch_norm
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv.conv import forward_and_statistics
from pallas_kernels.conv.product import ConvConfig
from pallas_kernels.conv.window import Window
from pallas_kernels.gemm.matmul import MatmulConfig
from tests.ops.conv.test_conv import dense_stand_ins, plain_conv
from tests.ops.norm.test_group_norm import stand_ins
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize

__all__ = ["dense_stand_ins", "stand_ins"]

SMALL = ConvConfig(tile_m=64, tile_n=64, stages=2, epilogue_columns=32)
PRODUCT = MatmulConfig(tile_m=64, tile_n=64, stages=2, epilogue_columns=32)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    features: int = 64
    kernel: tuple[int, ...] = (3, 3)
    padding: tuple[tuple[int, int], ...] = ((1, 1), (1, 1))
    strides: tuple[int, ...] = (1, 1)
    mean: float = 0.0
    """Constant added to every result; the standard deviation is about 1."""
    residual: bool = False
    config: ConvConfig | MatmulConfig | None = None
    dtype: str = "bfloat16"

    def check(self, multiprocessors):
        rng = np.random.default_rng(0)

        def array(*shape):
            return put(rng.normal(size=shape), self.dtype)

        ones = (1,) * len(self.kernel)
        window = Window(self.kernel, self.padding, self.strides, ones)
        result = (self.shape[0], *window.result(self.shape[1:-1]), self.features)
        fan_in = window.taps * self.shape[-1]
        w = array(*self.kernel, self.shape[-1], self.features) / np.sqrt(fan_in)
        y, mean, variance = jax.jit(
            lambda *args: forward_and_statistics(
                *args,
                window=window,
                activation=None,
                multiprocessors=multiprocessors,
                config=self.config,
            )
        )(
            array(*self.shape),
            w.astype(self.dtype),
            jnp.full(self.features, self.mean, jnp.float32),
            array(*result) if self.residual else None,
        )
        y = np.asarray(y, np.float64).reshape(-1, self.features)
        size = np.abs(y).max()
        np.testing.assert_allclose(mean, y.mean(0), rtol=0, atol=1e-6 * size)
        # The rounding error of the mean enters the variance squared.
        np.testing.assert_allclose(variance, y.var(0), rtol=2e-5, atol=10 * (1e-6 * size) ** 2)


POINTWISE = dict(kernel=(1, 1), padding=((0, 0), (0, 0)))
CASES = (
    Case((1, 9, 11, 64), mean=100.0, config=SMALL),
    Case((3, 5, 7, 64), 72, **POINTWISE, mean=1000.0, config=PRODUCT),
    Case((2, 8, 16, 64), residual=True, config=replace(SMALL, plan="rows")),
    Case((3, 8, 8, 64), config=replace(SMALL, tile_m=128, ping_pong=False)),
    Case((3, 8, 8, 64), 128, config=replace(SMALL, cluster=2)),
    Case((2, 9, 7, 64), strides=(2, 2), mean=-30.0, config=SMALL),
    Case((1, 3, 5, 8, 64), kernel=(3, 3, 3), padding=((1, 1),) * 3, strides=(1, 1, 1)),
    Case((2, 16, 16, 64), 128, **POINTWISE, config=replace(PRODUCT, tile_m=128, tile_n=128)),
    Case((2, 3, 5, 64), **POINTWISE, mean=5.0),
)
KERNEL_CASES = (
    Case((16, 56, 56, 64), 256, **POINTWISE, mean=10.0),
    Case((5, 57, 55, 256), 64, **POINTWISE),
    Case((16, 28, 28, 128), 128, residual=True),
    Case((16, 14, 14, 256), 256, mean=100.0),
    Case((16, 7, 7, 512), 512),
    Case((3, 33, 47, 64), 72, dtype="float16"),
)


@parametrize("case", CASES, quick=(0, 1))
def test_in_the_interpreter(case, interpreted_hopper):
    case.check(multiprocessors=2)


@pytest.mark.exhaustive
def test_threads_do_not_race(race_detector):
    CASES[0].check(multiprocessors=1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *KERNEL_CASES], ids=str)
def test_on_a_gpu(case):
    case.check(multiprocessors=132)


# --- the operator ---------------------------------------------------------------------------------


@pytest.fixture
def all_stand_ins(dense_stand_ins, stand_ins, monkeypatch):
    """Replaces the kernels of the convolution and of the norm by XLA."""

    def forward_and_statistics(*args, **options):
        y, _ = pallas_conv.forward(*args, save_preactivation=False, **options)
        axes = tuple(range(y.ndim - 1))
        return y, y.mean(axes), y.var(axes)

    monkeypatch.setattr(pallas_conv, "forward_and_statistics", forward_and_statistics)


@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_with_the_statistics_of_the_convolution(residual, all_stand_ins):
    rng = np.random.default_rng(0)

    def array(*shape):
        return put(rng.normal(size=shape), jnp.float32)

    added = array(2, 5, 6, 8) if residual else None
    args = array(2, 5, 6, 8), array(3, 3, 8, 8), array(8), array(8), added
    options = dict(activation="relu")

    def ours(x, w, scale, bias, added):
        y, x, statistics = conv_operator.run(
            x, w, window={}, return_input=True, statistics=True, implementation="pallas"
        )
        assert statistics is not None
        results = batch_norm.run(
            y, scale, bias, residual=added, statistics=statistics, implementation="cuda", **options
        )
        return *results, x

    def plain(x, w, scale, bias, added):
        y = plain_conv(x, w, None, None)
        mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
        y = (y - mean) / jnp.sqrt(var + 1e-5) * scale + bias
        return jax.nn.relu(y if added is None else y + added), mean, var, x

    assert_values_and_gradients(ours, plain, *args, cotangents=2)


def test_under_vmap_each_entry_has_its_own(all_stand_ins):
    rng = np.random.default_rng(0)
    x, w = (put(rng.normal(size=s), jnp.float32) for s in ((3, 2, 5, 6, 8), (1, 1, 8, 8)))

    def statistics(x):
        y, _, taken = conv_operator.run(x, w, window={}, statistics=True, implementation="pallas")
        return taken, (y.mean((0, 1, 2)), y.var((0, 1, 2)))

    chex.assert_trees_all_close(*jax.vmap(statistics)(x), rtol=1e-5, atol=1e-5)


def test_who_has_none_says_so():
    x, w = jnp.ones((2, 5, 5, 8)), jnp.ones((3, 3, 8, 8))
    y, returned_input, statistics = conv_operator.run(
        x, w, window={}, statistics=True, return_input=True
    )
    assert statistics is None and y.shape == returned_input.shape
    scale = jnp.ones(8)
    taken = jnp.zeros(8), jnp.zeros(8)
    # The plain operator computes its own statistics, so that JAX can differentiate them.
    chex.assert_trees_all_equal(
        batch_norm.run(y, scale, statistics=taken), jaxfused.batch_norm(y, scale)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(statistics=(jnp.ones(3), jnp.ones(4))), "the mean of statistics has shape"),
        (dict(mean=jnp.ones(4), var=jnp.ones(4)), "statistics were passed with mean and var"),
        (dict(axis_name="i"), "statistics were passed with axis_name='i'"),
    ],
)
def test_errors(change, message):
    arguments = dict(statistics=(jnp.ones(4), jnp.ones(4))) | change
    call = jax.vmap(lambda x: batch_norm.run(x, **arguments), axis_name="i")
    with pytest.raises(ValueError, match=f"batch_norm: {message}"):
        call(jnp.ones((1, 2, 4)))
