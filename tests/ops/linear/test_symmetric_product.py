"""Symmetric products of many matrices: tiles on one side of the diagonal, odd sizes, the gradient."""

import functools
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfused import optim
from jaxfused.ops.linear.symmetric_product import symmetric_product
from pallas_kernels.gemm import symmetric
from pallas_kernels.gemm.matmul_config import MatmulConfig
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

COEFFICIENTS = (2.0, -3.0, 0.5)


@dataclass(frozen=True)
class Case:
    batch: int
    rows: int
    columns: int
    dtype: str = "float32"
    adds: bool = True
    """True if a I + b S is added."""
    two: bool = False
    """True if Y differs from X: it is X times a diagonal matrix."""
    is_factor: bool = False
    scales: bool = False
    """True if each product is multiplied by a scalar."""
    config: MatmulConfig | None = None

    def operands(self) -> list[Any]:
        """Returns small integers, whose sums are exact in float32 in any order."""
        rng = np.random.default_rng(0)
        x = rng.integers(-3, 4, size=(self.batch, self.rows, self.columns))
        half = rng.integers(-3, 4, size=(self.batch, self.rows, self.rows))
        s = np.tril(half) + np.tril(half, -1).mT
        return self.all_of(put(x, self.dtype), put(s, self.dtype))

    def all_of(self, x: Any, s: Any) -> list[Any]:
        """Returns x, y, S and the coefficients, with None for absent ones."""
        y = x * (jnp.arange(self.columns) % 3 - 1).astype(self.dtype) if self.two else None
        scales = 2.0 ** -jnp.arange(self.batch) if self.scales else None
        return [x, y, *([s, jnp.asarray(COEFFICIENTS)] if self.adds else [None, None]), scales]

    def check(self, multiprocessors: int = 4) -> None:
        run = functools.partial(
            symmetric.symmetric_product,
            is_factor=self.is_factor,
            multiprocessors=multiprocessors,
            config=self.config,
        )
        operands = self.operands()
        expected = put(by_definition(*operands, np.float64, np), jnp.float32)
        if self.is_factor:
            rounded = rounded_to_tf32(expected)
            assert (rounded != expected).any()
            expected = rounded
        np.testing.assert_array_equal(jax.jit(run)(*operands), expected.astype(self.dtype))


def by_definition(x, y, s, coefficients, scales, dtype, numpy=jnp):
    x, y, s, scales = (None if a is None else numpy.asarray(a, dtype) for a in (x, y, s, scales))
    z = x @ (x if y is None else y).mT
    if scales is not None:
        z = z * scales[:, None, None]
    if s is None:
        return z
    a, b, c = numpy.asarray(coefficients, dtype)
    return a * numpy.eye(z.shape[-1], dtype=dtype) + b * s + c * z


def rounded_to_tf32(x):
    """Rounds to 11 bits, and halfway cases away from zero."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(mantissa * 2**11 + np.copysign(0.5, mantissa)), exponent - 11)


WITHOUT_CLUSTERS = [c for c in symmetric.candidates(jnp.bfloat16) if c.cluster == 1]
INTERPRETED = (
    Case(2, 320, 72),
    Case(2, 320, 40, adds=False, scales=True),
    Case(1, 512, 72, "bfloat16", config=WITHOUT_CLUSTERS[0]),
    Case(1, 512, 40, "bfloat16", adds=False, two=True),
    Case(3, 128, 100, adds=False),
    Case(2, 192, 8, "float16", two=True, config=symmetric.candidates(jnp.float16)[-1]),
    Case(1, 640, 64, "bfloat16", adds=False),
    Case(2, 64, 200),
    Case(1, 128, 1000, is_factor=True),
)


@parametrize("case", INTERPRETED, quick=(8,))
def test_in_the_interpreter(case, interpreted_hopper):
    case.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", INTERPRETED[:2], ids=str)
def test_threads_do_not_race(case, race_detector):
    case.check()


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("tiles", range(1, 12))
def test_each_tile_on_one_side_of_the_diagonal_is_taken_once(tiles, cluster):
    """With clusters, squares of tiles are taken; those on the diagonal have one tile above it."""
    config = MatmulConfig(128, 128, cluster=cluster)
    launch = symmetric._launch((1, 128 * tiles, 64), jnp.bfloat16, config, 1)
    down, across = launch.product.tile_grid
    sides = -(-tiles // cluster)
    assert launch.product.sides == sides and across % cluster == 0
    places = [(r, c) for r in range(down) for c in range(across // cluster)]
    found = sorted(launch.product.fold(r, c) for r, c in places)
    assert found == [(i, j) for i in range(sides) for j in range(i + 1)]


@dataclass(frozen=True)
class BothWays:
    """A product of [B, M, K] with [B, N, K], by one config of `product_candidates`."""

    batch: int
    rows: int
    columns: int
    sums: int
    dtype: str = "float32"
    first_turned: int | None = None
    config: int = 0

    def check(self, multiprocessors: int = 4) -> None:
        """Checks products of small integers, transposed for some matrices if asked for."""
        rng = np.random.default_rng(0)
        x, y = (
            put(rng.integers(-3, 4, size=(self.batch, rows, self.sums)), self.dtype)
            for rows in (self.rows, self.columns)
        )
        scales = 2.0 ** -jnp.arange(self.batch)
        run = functools.partial(
            symmetric.product_both_ways,
            first_turned=self.first_turned,
            multiprocessors=multiprocessors,
            config=symmetric.product_candidates(jnp.dtype(self.dtype))[self.config],
        )
        result, turned = jax.jit(run)(x, y, scales)
        expected = np.float64(x) @ np.float64(y).mT * np.float64(scales)[:, None, None]
        expected = put(expected, self.dtype)
        last, first = self.batch, 0
        if self.first_turned is not None:
            last = first = self.first_turned
        np.testing.assert_array_equal(result[:last], expected[:last])
        np.testing.assert_array_equal(turned[first:], expected[first:].mT)


BOTH_WAYS = (
    BothWays(2, 192, 328, 40),
    BothWays(2, 128, 200, 72, config=1),
    BothWays(3, 256, 200, 64, "bfloat16", first_turned=1),
    BothWays(1, 64, 136, 24, "bfloat16", config=-1),
)


@parametrize("case", BOTH_WAYS, quick=(1,))
def test_both_ways_in_the_interpreter(case, interpreted_hopper):
    case.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_config_of_both_ways_lowers(dtype):
    x, y = (jax.ShapeDtypeStruct((3, rows, 2048), dtype) for rows in (2048, 5632))
    for config in symmetric.product_candidates(dtype):

        def run(x, y, config=config):
            return symmetric.product_both_ways(
                x, y, is_factor=True, multiprocessors=132, config=config
            )

        assert kernels(run, x, y) == ["product_both_ways"]


def test_nan_stays_when_it_is_rounded():
    """A GPU's own NaN has all bits set, so adding half a unit would overflow it."""
    bits = np.array([0x7FFFFFFF, 0x7FC00000, 0x7F800000, 0x3F801FFF], np.uint32)
    rounded = np.asarray(symmetric._rounded_to_tf32(jnp.asarray(bits.view(np.float32))))
    assert np.isnan(rounded[:2]).all() and np.isinf(rounded[2])
    assert rounded[3:].view(np.uint32) == 0x3F802000


LARGE = (
    Case(24, 1024, 4096, is_factor=True),
    Case(24, 1024, 1024, "bfloat16", two=True),
    Case(3, 4096, 11008, adds=False),
    Case(12, 768, 3072, "float16", adds=False),
)


@parametrize("case", LARGE, quick=())
def test_every_config_lowers(case):
    x = jax.ShapeDtypeStruct((case.batch, case.rows, case.columns), case.dtype)
    s = jax.ShapeDtypeStruct((case.batch, case.rows, case.rows), case.dtype)
    configs = symmetric.candidates(case.dtype)
    assert configs
    for config in configs:

        def run(x, s, config=config):
            return symmetric.symmetric_product(
                *case.all_of(x, s), is_factor=case.is_factor, multiprocessors=132, config=config
            )

        assert kernels(run, x, s) == ["symmetric_product"]


@pytest.mark.parametrize(
    ("capability", "shape", "dtype", "allows_tf32", "words"),
    [
        ((8, 0), (1, 128, 64), "bfloat16", True, "Hopper"),
        ((9, 0), (1, 128, 64), "float32", False, "as tf32"),
        ((9, 0), (1, 128, 64), "float64", True, "dtype float64"),
        ((9, 0), (1, 100, 64), "float32", True, "multiple of 64 rows"),
        ((9, 0), (1, 128, 66), "float32", True, "multiple of 16 bytes"),
        ((9, 0), (5, 192, 68), "float32", True, None),
    ],
)
def test_why_unsupported(capability, shape, dtype, allows_tf32, words):
    reason = symmetric.why_unsupported(
        compute_capability=capability,
        shape=shape,
        dtype=jnp.dtype(dtype),
        allows_tf32=allows_tf32,
    )
    assert reason is None if words is None else words in reason


# --- the operator ---------------------------------------------------------------------------------


def normal(case):
    x = jax.random.normal(jax.random.key(0), (case.batch, case.rows, case.columns), case.dtype)
    s = jax.random.normal(jax.random.key(1), (case.batch, case.rows, case.rows), case.dtype)
    return case.all_of(x / case.columns**0.5, (s + s.mT) / 2)


@parametrize(
    "case",
    [
        Case(2, 128, 72, "bfloat16"),
        Case(2, 65, 7, two=True),
        Case(2, 128, 8, adds=False, two=True),
        Case(2, 128, 8, adds=False, scales=True),
    ],
    quick=(1, 2),
)
def test_accurate_with_its_gradient(case, interpreted_hopper):
    """XLA computes it, and the kernel where it can run; the gradient is XLA's."""
    operands = normal(case)
    given = [index for index, operand in enumerate(operands) if operand is not None]
    weights = jax.random.normal(jax.random.key(2), (case.batch, case.rows, case.rows))

    def both(f):
        """Returns the result and the gradients of its weighted sum."""

        def loss(*present):
            every = [None] * len(operands)
            for index, operand in zip(given, present, strict=True):
                every[index] = operand
            z = f(*every)
            return jnp.sum(z.astype(weights.dtype) * weights), z

        present = [operands[index] for index in given]
        grads, z = jax.jit(jax.grad(loss, argnums=range(len(given)), has_aux=True))(*present)
        return [z, *grads]

    plain = both(lambda *o: by_definition(*o, jnp.float32).astype(case.dtype))
    with jax.enable_x64(True):
        truth = both(lambda *o: by_definition(*o, jnp.float64))
        truth = [np.asarray(t, np.float64) for t in truth]
    for name in ["xla"] if case.rows % 64 else ["xla", "pallas"]:

        def ours(x, y, s, coefficients, scales, name=name):
            return symmetric_product(
                x,
                y,
                matrix=s,
                coefficients=coefficients,
                scales=scales,
                implementation=name,
            )

        for index, (a, p, t) in enumerate(zip(both(ours), plain, truth, strict=True)):
            assert_accurate(f"{name} {index}", a, p.astype(a.dtype), t)


def test_refuses_what_no_kernel_can_run(hopper):
    with pytest.raises(ValueError, match="multiple of 64 rows"):
        symmetric_product(jnp.ones((1, 100, 64)), implementation="pallas")
    with pytest.raises(ValueError, match="no CUDA kernel"):
        symmetric_product(jnp.ones((1, 128, 64)), implementation="cuda")
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(ValueError, match="as tf32"),
    ):
        symmetric_product(jnp.ones((1, 128, 64)), implementation="pallas")


@pytest.mark.exhaustive
def test_muon_multiplies_half(hopper):
    """Only large matrices take kernels, which are lowered once for each form of product."""
    params = {"a": jnp.zeros((512, 1024)), "b": jnp.zeros((1024, 512)), "c": jnp.zeros((64, 64))}
    tx = optim.muon(0.1, ns_steps=5)
    found = kernels(tx.update, params, tx.init(params), params)
    assert found.count("symmetric_product") >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("case", BOTH_WAYS, ids=str)
def test_both_ways_on_a_gpu(case):
    case.check(jax.devices()[0].core_count)
    case.check(2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INTERPRETED, *LARGE], ids=str)
def test_on_a_gpu_twice_the_same(case):
    """Integers have one exact result; for other numbers two runs must agree bit for bit."""
    multiprocessors = jax.devices()[0].core_count
    case.check(multiprocessors)
    run = jax.jit(symmetric.symmetric_product, static_argnames=("multiprocessors", "config"))
    for config in symmetric.candidates(case.dtype):
        options = dict(multiprocessors=multiprocessors, config=config)
        y = run(*normal(case), **options)
        chex.assert_trees_all_equal(y, run(*normal(case), **options))


@pytest.mark.gpu
def test_muon_on_a_gpu():
    params = {"a": jnp.zeros((1024, 3072)), "b": jnp.zeros((3072, 1024))}
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.shape[0]), p.shape), params)
    ours, theirs = optim.muon(0.1), optax.contrib.muon(0.1)
    with jax.default_matmul_precision("highest"):
        exact, _ = jax.jit(theirs.update)(grads, theirs.init(params), params)
    plain, _ = jax.jit(theirs.update)(grads, theirs.init(params), params)
    actual, _ = jax.jit(ours.update)(grads, ours.init(params), params)
    for a, p, e in zip(*map(jax.tree.leaves, (actual, plain, exact)), strict=True):
        assert jnp.linalg.norm(a - e) <= 2 * jnp.linalg.norm(p - e)
