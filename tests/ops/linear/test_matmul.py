"""The product with a traced epilogue, alone: operand orders, odd sizes, every form of epilogue."""

import functools
import re
from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import linear, mlp, tiled_product
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul import MatmulConfig, candidates, why_unsupported
from tests.support.against_float64 import assert_outputs
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels

SMALL = MatmulConfig(tile_m=64, tile_n=64, stages=2, epilogue_columns=32)
"""A config with little shared memory, so that small products have several tiles."""
WIDE = replace(SMALL, tile_n=192)
"""A config whose WGMMA takes all columns of a tile, where others take a block of 64."""
ORDERS = {
    "NN": {},
    "NT": {"b_transposed": True},
    "TN": {"a_transposed": True},
    "TT": {"a_transposed": True, "b_transposed": True},
}


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    order: str = "NN"
    terms: int = 1
    products: int = 1
    one_array: bool = False
    """True if b of all terms and products are blocks of one array."""
    epilogue: bool = False
    """True if the product of products plus bias and residual is returned, in two dtypes and summed."""
    config: MatmulConfig = SMALL
    dtype: str = "bfloat16"

    def operands(self, seed=0):
        """Returns small integers, whose sums are exact in float32 in any order.

        There is only one right result, so that a tolerance cannot hide a wrong element.
        """
        rng = np.random.default_rng(seed)

        def array(*shape, transposed=False):
            shape = shape[::-1] if transposed else shape
            return put(rng.integers(-3, 4, size=shape), self.dtype)

        a_transposed, b_transposed = (letter == "T" for letter in self.order)
        a = [array(self.m, self.k, transposed=a_transposed) for _ in range(self.terms)]
        b = [
            [array(self.k, self.n, transposed=b_transposed) for _ in range(self.products)]
            for _ in range(self.terms)
        ]
        bias = put(rng.integers(-9, 10, size=self.n), jnp.float32)
        return a, b, bias, array(self.m, self.n)

    def run(self, a, b, bias, residual, multiprocessors):
        if self.one_array:
            blocks = [list(row) for row in b]
            b = jnp.block(
                [list(r) for r in zip(*blocks, strict=True)] if "T" in self.order[1] else blocks
            )
        else:
            b = tuple(block for row in b for block in row)
        a = a[0] if self.terms == 1 else tuple(a)

        def epilogue(*products, bias=None, residual=None):
            y = functools.reduce(jnp.multiply, products)
            if not self.epilogue:
                return {"y": y}
            return {"y": y + bias + residual, "narrow": y + bias}

        product = FusedProduct(
            name="matmul",
            a=a,
            b=b,
            epilogue=epilogue,
            products=self.products,
            vectors={"bias": bias if self.epilogue else None},
            matrices={"residual": residual if self.epilogue else None},
            outputs={"y": jnp.float32} | ({"narrow": self.dtype} if self.epilogue else {}),
            column_sums=("narrow",) if self.epilogue else (),
            **ORDERS[self.order],
        )
        return product.run(multiprocessors=multiprocessors, config=self.config)

    def expected(self, a, b, bias, residual, dtype, narrow):
        """Computes the same in jax.numpy, with arithmetic in `dtype` and rounding to `narrow`."""
        a_transposed, b_transposed = (letter == "T" for letter in self.order)
        if dtype == jnp.float64:
            a, b = jax.tree.map(lambda x: x.astype(dtype), (a, b))
        a = [x.T if a_transposed else x for x in a]
        b = [[x.T if b_transposed else x for x in row] for row in b]
        products = [
            sum(jnp.dot(a[t], b[t][p], preferred_element_type=dtype) for t in range(self.terms))
            for p in range(self.products)
        ]
        y = functools.reduce(jnp.multiply, products)
        if not self.epilogue:
            return {"y": y}
        bias, residual = bias.astype(dtype), residual.astype(dtype)
        # XLA drops a mere cast if the sum casts back.
        kept = jnp.finfo(narrow)
        rounded = jax.lax.reduce_precision(y + bias, kept.nexp, kept.nmant).astype(narrow)
        sums = jnp.sum(rounded.astype(dtype), axis=0)
        return {"y": y + bias + residual, "narrow": rounded, "sum_narrow": sums}

    def check(self, multiprocessors=2):
        operands = self.operands()
        actual = jax.jit(functools.partial(self.run, multiprocessors=multiprocessors))(*operands)
        assert_outputs(actual, self.expected, operands, self.dtype)


INTERPRETED = (
    *(Case(192, 144, 128, order) for order in ORDERS),
    Case(200, 80, 144),
    Case(75, 80, 112, epilogue=True, dtype="float32"),
    Case(72, 64, 96, "NT", 1, 2, True, True, replace(SMALL, tile_n=128), "float32"),
    Case(3, 16, 16),
    Case(75, 64, 112, epilogue=True),
    Case(192, 128, 128, epilogue=True, dtype="float16"),
    Case(192, 128, 128, epilogue=True, config=replace(SMALL, read_slots=2, write_slots=2)),
    Case(192, 128, 128, epilogue=True, config=replace(SMALL, ping_pong=False)),
    Case(192, 128, 128, order="TN", config=replace(SMALL, ping_pong=False)),
    Case(192, 128, 128, config=replace(SMALL, cluster=2)),
    Case(192, 128, 128, epilogue=True, config=replace(SMALL, cluster=2, ping_pong=False)),
    *(
        Case(72, 64, 96, order, terms, products, one_array, True, replace(SMALL, tile_n=128))
        for order in ("NN", "NT")
        for terms, products in ((2, 1), (1, 2))
        for one_array in (False, True)
    ),
    # Sizes that are no multiples of 64: rows from 1 to 130, K from 24 to 200, columns from 8 to 200.
    Case(1, 24, 8),
    Case(5, 40, 24, epilogue=True),
    Case(17, 72, 40, "NT", epilogue=True),
    Case(130, 200, 136, epilogue=True, config=WIDE),
    Case(130, 72, 200, epilogue=True, config=replace(WIDE, pads_columns=True)),
    Case(136, 72, 200, "TN", config=WIDE),
    Case(136, 200, 72, "TT", config=WIDE),
    Case(130, 72, 136, epilogue=True, config=replace(WIDE, cluster=2)),
    Case(130, 72, 136, "NT", config=replace(WIDE, cluster=2)),
    Case(200, 72, 136, "TN", config=replace(SMALL, ping_pong=False)),
    Case(17, 12, 20, epilogue=True, dtype="float32"),
    # Forms of configs that `candidates` yields and no case above has.
    Case(130, 72, 136, "NT", epilogue=True, config=replace(WIDE, ping_pong=False, read_slots=2)),
    Case(130, 72, 72, epilogue=True, config=replace(SMALL, ping_pong=False, pads_columns=True)),
    *(
        Case(17, 40, 72, order, 2, 2, one_array, True, config)
        for order in ("NN", "NT")
        for one_array in (False, True)
        for config in (replace(SMALL, tile_n=128), replace(SMALL, tile_n=128, pads_columns=True))
    ),
)


# The quick cases: code that all operand orders share; rows that end within a tile; float32; a cluster
# without ping-pong; two terms of one array with two products.
@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", INTERPRETED, quick=(4, 14, 16, 22))
def test_accurate_in_the_interpreter(case):
    case.check(multiprocessors=4 if case.config.cluster > 1 else 2)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector")
@pytest.mark.parametrize("ping_pong", [True, False])
@pytest.mark.parametrize("n", [128, 136])
def test_no_races_in_the_interpreter(ping_pong, n):
    Case(136, 80, n, epilogue=True, config=replace(SMALL, ping_pong=ping_pong)).check()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector")
def test_no_races_where_a_tile_has_fewer_chunks_than_slots():
    Case(264, 32, 32, config=replace(SMALL, write_slots=2)).check()


def assert_lowers(name, f, *shapes):
    def shape(s):
        return None if s is None else jax.ShapeDtypeStruct(s, jnp.bfloat16)

    assert kernels(lambda *a: f(*a).run(multiprocessors=132), *map(shape, shapes))[-1] == name


@parametrize(
    ("m", "d", "f"),
    [(16384, 768, 3072), (16384, 1024, 4096), (8192, 4096, 14336), (77, 80, 48)],
    quick=(),
)
def test_default_configs_lower_for_cuda(m, d, f):
    layer = functools.partial(
        linear.layer, activation="gelu_tanh", save_preactivation=True, out_dtype=jnp.float32
    )
    assert_lowers("linear", layer, (m, d), (d, f), (f,), (m, f))
    assert_lowers(
        "hidden_gradient",
        functools.partial(mlp.hidden_gradient, activation="gelu_erf", sum_rows=True),
        (m, d),
        (f, d),
        (m, f),
    )
    assert_lowers(
        "gated_unit",
        functools.partial(mlp.gated_unit, activation="silu", save_preactivations=True),
        (m, d),
        (d, f),
        (d, f),
        (f,),
        (f,),
    )
    for returns_hidden in (True, False):
        gradient = functools.partial(
            mlp.gated_hidden_gradient,
            activation="silu",
            sum_rows=(True, True),
            returns_hidden=returns_hidden,
        )
        assert_lowers("gated_hidden_gradient", gradient, (m, d), (f, d), (m, f), (m, f))
    assert_lowers("gated_input_gradient", mlp.gated_input_gradient, (m, f), (m, f), (d, f), (d, f))


def work_of(case: Case) -> Work:
    fused = dict(read_bytes=2, written_bytes=6) if case.epilogue else dict(written_bytes=4)
    k_last = case.order[1] == "T"
    return Work(case.m, case.n, case.k, case.products, k_last=k_last, **fused)


@parametrize(
    "case",
    [
        Case(8448, 256, 3072),
        Case(16384, 768, 3080, epilogue=True),
        Case(512, 8192, 8192, "NT", epilogue=True),
        Case(4672, 768, 2688, products=2, epilogue=True),
        Case(4672, 768, 2696, products=2),
        Case(73728, 1280, 24),
        Case(75, 80, 56, "NT"),
    ],
    quick=(3,),
)
@parametrize("which", ["best", "each third"], quick=(0,))
def test_candidates_lower_for_cuda(case, which):
    shapes = jax.eval_shape(case.operands)
    configs = candidates(work_of(case), 132)
    assert len(set(configs)) == len(configs)
    fit = 0
    for config in configs if which == "best" else configs[::3]:
        run = functools.partial(replace(case, config=config).run, multiprocessors=132)
        try:
            assert kernels(run, *shapes) == ["matmul"]
        except ValueError as error:
            assert "shared memory" in str(error)
            continue
        fit += 1
        if which == "best":
            break
    assert fit


@pytest.mark.parametrize(
    ("work", "tiles"),
    [
        # One tile for each SM, instead of two tiles for a third of the SMs.
        (Work(512, 8192, 8192), (64, 256)),
        (Work(1568, 2048, 5456, read_bytes=2, activations=1), (64, 256)),
        (Work(8448, 3072, 4096, read_bytes=2, written_bytes=4, activations=2), (128, 192)),
        # The epilogue takes longer than the product.
        (Work(8448, 3072, 256, read_bytes=2, written_bytes=4, activations=2), (128, 128)),
    ],
)
def test_the_first_candidate_is_the_one_that_was_fastest(work, tiles):
    config = candidates(work, 132)[0]
    assert (config.tile_m, config.tile_n) == tiles


@pytest.mark.exhaustive
def test_slopes_lower_for_cuda():
    m, d, f = 16384, 768, 3072
    slope = functools.partial(mlp.hidden_and_slope, activation="gelu_erf")
    assert_lowers("hidden_and_slope", slope, (m, d), (d, f), (f,))
    gradient = functools.partial(mlp.hidden_gradient_by_slope, sum_rows=True)
    assert_lowers("hidden_gradient_by_slope", gradient, (m, d), (f, d), (m, f))


@parametrize("order", list(ORDERS), quick=(1, 2))
@parametrize("ping_pong", [True, False], quick=(0,))
@parametrize("cluster", [1, 2], quick=(0, 1))
def test_orders_lower_for_cuda(order, ping_pong, cluster):
    config = MatmulConfig(stages=3, ping_pong=ping_pong, cluster=cluster, epilogue_columns=32)
    case = Case(1024, 768, 1552, order, config=config)
    shapes = jax.eval_shape(case.operands)
    assert kernels(functools.partial(case.run, multiprocessors=132), *shapes) == ["matmul"]


@pytest.mark.parametrize("order", ["NN", "TT"])
@pytest.mark.parametrize(
    ("epilogue", "config"),
    [
        (False, MatmulConfig(stages=9, epilogue_columns=32)),
        (True, MatmulConfig(stages=6, epilogue_columns=32, read_slots=2, write_slots=3)),
        (True, MatmulConfig(stages=8, epilogue_columns=32, ping_pong=False)),
        (True, MatmulConfig(stages=9, epilogue_columns=32, cluster=2)),
    ],
)
def test_shared_memory_is_counted_as_mosaic_does(order, epilogue, config, monkeypatch):
    case = Case(1024, 768, 1552, order, epilogue=epilogue, config=config)
    shapes = jax.eval_shape(case.operands)

    def message():
        run = jax.jit(functools.partial(case.run, multiprocessors=132))
        with pytest.raises(ValueError, match="shared memory") as raised:
            jax.export.export(run, platforms=["cuda"])(*shapes)
        return str(raised.value)

    (ours,) = set(re.findall(r"(\d+) are needed", message()))
    monkeypatch.setattr(tiled_product, "SHARED_MEMORY_BYTES", 1 << 30)
    (mosaics,) = set(re.findall(r"[^_]smem_bytes=(\d+)", message()))
    assert ours == mosaics


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_m": 96}, "96 x 192"),
        ({"tile_n": 260}, "128 x 260"),
        ({"tile_n": 256}, "may have 24576 elements, got 128 x 256"),
        ({"stages": 0}, "stages must be at least 1"),
    ],
)
def test_config_validates_itself(change, message):
    with pytest.raises(ValueError, match=message):
        MatmulConfig(**change)


def test_epilogue_must_divide_a_tile():
    case = Case(64, 64, 96, products=2, config=MatmulConfig(epilogue_columns=64))
    with pytest.raises(ValueError, match=r"2 products share tile_n \(192\)"):
        case.check()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"compute_capability": (8, 0)}, "Hopper"),
        ({"compute_capability": None}, "Hopper"),
        ({"dtypes": {"x": jnp.float32}}, "it multiplies float32 as tf32"),
        ({"dtypes": {"x": jnp.float32}, "allows_tf32": True}, None),
        ({"dtypes": {"x": jnp.float64}, "allows_tf32": True}, "x has dtype float64"),
        ({"dtypes": {"x": jnp.float16, "residual": jnp.float64}}, "residual has dtype float64"),
        ({"features": {"x": 100}}, "multiples of 8 features, and x has 100"),
    ],
)
def test_limits(change, reason):
    limits = dict(
        compute_capability=(9, 0),
        dtypes={"x": jnp.dtype("bfloat16"), "residual": None},
        features={"x": 64, "the result": 48},
    )
    actual = why_unsupported(**(limits | change))
    assert actual is None if reason is None else reason in actual


# --- on a GPU -------------------------------------------------------------------------------------

DESIGNS = (
    MatmulConfig(),
    MatmulConfig(cluster=2, stages=3, epilogue_columns=32),
    MatmulConfig(tile_n=128, read_slots=2),
    MatmulConfig(tile_m=64, tile_n=256, stages=3, ping_pong=False),
)


@pytest.mark.gpu
@pytest.mark.parametrize("config", DESIGNS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_random_sizes_on_gpu(order, config):
    rng = np.random.default_rng(0)
    for epilogue in (False, True, True):
        m, k, n = (16 * int(rng.integers(1, 60)) for _ in range(3))
        m -= 0 if "T" in order[0] else int(rng.integers(16))
        config = replace(config, epilogue_columns=32, stages=3)
        Case(m, k, n, order, epilogue=epilogue, config=config).check(multiprocessors=132)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["NN", "NT"])
def test_float32_on_gpu(order):
    config = MatmulConfig(tile_n=128, stages=2, epilogue_columns=32)
    for m, k, n in ((75, 80, 112), (1003, 256, 1040)):
        case = Case(m, k, n, order, epilogue=True, config=config, dtype="float32")
        case.check(multiprocessors=132)


@pytest.mark.gpu
@pytest.mark.parametrize("config", DESIGNS, ids=str)
def test_same_bits_twice_on_gpu(config):
    case = Case(
        4100, 768, 1536, epilogue=True, config=replace(config, epilogue_columns=32, stages=3)
    )
    operands = case.operands()
    run = jax.jit(functools.partial(case.run, multiprocessors=132))
    first = run(*operands)
    for _ in range(5):
        chex.assert_trees_all_equal(run(*operands), first)


STREAMING = (
    MatmulConfig(stages=3, epilogue_columns=32, read_slots=2, write_slots=2),
    MatmulConfig(epilogue_columns=32),
    MatmulConfig(tile_n=128, epilogue_columns=32, read_slots=2, write_slots=2),
    MatmulConfig(tile_m=64, tile_n=256, epilogue_columns=32, write_slots=2),
)


@pytest.mark.gpu
@pytest.mark.parametrize("config", STREAMING, ids=str)
def test_every_number_of_large_streams_on_gpu(config):
    """A rare race, of one warp in 10^5, shows only in large matrices.

    The numbers are small integers, so that the result is exact to the bit.
    """

    def integers(seed, *shape, most):
        return jax.random.randint(jax.random.key(seed), shape, -most, most + 1).astype(jnp.bfloat16)

    rows, width, hidden = 25216, 1024, 4096
    dy, slope = integers(0, rows, width, most=1), integers(1, rows, hidden, most=2)
    w2 = integers(2, hidden, width, most=1)

    @jax.jit
    def kernel(dy, w2, slope):
        products = (
            mlp.hidden_gradient_by_slope(dy, w2, slope, sum_rows=True),
            mlp.hidden_gradient(dy, w2, slope, activation="relu", sum_rows=False),
        )
        first, second = (p.run(multiprocessors=132, config=config) for p in products)
        return first["dz"], first["sum_dz"], second["dz"], second["h"]

    @jax.jit
    def wrong(results):
        product = jnp.dot(dy, w2.T, preferred_element_type=jnp.float32)
        dz, sums, z, h = results
        positive = slope > 0
        wanted = (
            (dz, product * slope),
            (z, product * positive),
            (h, jnp.where(positive, slope, 0)),
        )
        counts = [jnp.sum(a != b.astype(a.dtype)) for a, b in wanted]
        return [*counts, jnp.sum(sums != jnp.sum(dz.astype(jnp.float32), axis=0))]

    for _ in range(10):
        assert [int(count) for count in wrong(kernel(dy, w2, slope))] == [0, 0, 0, 0]
