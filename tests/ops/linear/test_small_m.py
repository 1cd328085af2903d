"""The product of few rows with a traced epilogue: odd sizes, orders of operands, clusters."""

import functools
from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from pallas_kernels.gemm import linear, mlp
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul import few_rows_candidates
from pallas_kernels.gemm.small_m import FewRowsConfig
from tests.support import mosaic_interpreter
from tests.support.against_float64 import assert_outputs
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

pytestmark = pytest.mark.exhaustive

SMALL = FewRowsConfig(tile_n=64, parts=2, stages=2)


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    config: FewRowsConfig = SMALL
    w_transposed: bool = False
    terms: int = 1
    products: int = 1
    one_array: bool = False
    """True if w of all terms and products are blocks of one array."""
    epilogue: bool = True
    """True if the product of products plus bias and residual is returned, in two dtypes and summed."""
    dtype: str = "bfloat16"
    w_dtype: str = ""
    """Dtype of w; empty for x's."""

    def operands(self, seed=0):
        """Returns small integers, whose sums are exact in float32 in any order."""
        rng = np.random.default_rng(seed)

        def array(*shape, dtype=self.dtype):
            return put(rng.integers(-3, 4, size=shape), dtype)

        x = [array(self.m, self.k) for _ in range(self.terms)]
        w_shape = (self.n, self.k) if self.w_transposed else (self.k, self.n)
        w_array = functools.partial(array, *w_shape, dtype=self.w_dtype or self.dtype)
        w = [[w_array() for _ in range(self.products)] for _ in range(self.terms)]
        bias = put(rng.integers(-9, 10, size=self.n), jnp.float32)
        return x, w, bias, array(self.m, self.n)

    def run(self, x, w, bias, residual):
        if self.one_array:
            rows = [list(r) for r in zip(*w, strict=True)] if self.w_transposed else w
            w = jnp.block([list(row) for row in rows])
        else:
            w = tuple(block for row in w for block in row)

        def epilogue(*products, bias=None, residual=None):
            y = functools.reduce(jnp.multiply, products)
            if not self.epilogue:
                return {"y": y}
            y = y if bias is None else y + bias
            return {"y": y + residual, "narrow": y}

        product = FusedProduct(
            name="matmul",
            a=x[0] if self.terms == 1 else tuple(x),
            b=w,
            epilogue=epilogue,
            products=self.products,
            vectors={"bias": bias if self.epilogue else None},
            matrices={"residual": residual if self.epilogue else None},
            outputs={"y": jnp.float32} | ({"narrow": self.dtype} if self.epilogue else {}),
            column_sums=("narrow",) if self.epilogue else (),
            b_transposed=self.w_transposed,
        )
        return product.run(multiprocessors=4, config=self.config)

    def expected(self, x, w, bias, residual, dtype, narrow):
        """Computes the same in jax.numpy, with arithmetic in `dtype` and rounding to `narrow`."""
        if dtype == jnp.float64:
            x, w = jax.tree.map(lambda a: a.astype(dtype), (x, w))
        elif self.w_dtype:
            w = jax.tree.map(lambda a: a.astype(self.dtype), w)
        w = [[block.T if self.w_transposed else block for block in row] for row in w]
        products = [
            sum(jnp.dot(x[t], w[t][p], preferred_element_type=dtype) for t in range(self.terms))
            for p in range(self.products)
        ]
        bias, residual = bias.astype(dtype), residual.astype(dtype)
        y = functools.reduce(jnp.multiply, products)
        if not self.epilogue:
            return {"y": y}
        y = y + bias
        # XLA drops a mere cast if the sum casts back.
        kept = jnp.finfo(narrow)
        rounded = jax.lax.reduce_precision(y, kept.nexp, kept.nmant).astype(narrow)
        sums = jnp.sum(rounded.astype(dtype), axis=0)
        return {"y": y + residual, "narrow": rounded, "sum_narrow": sums}

    def check(self):
        operands = self.operands()
        actual = jax.jit(self.run)(*operands)
        assert_outputs(actual, self.expected, operands, self.dtype)


C = FewRowsConfig
CASES = (
    Case(1, 24, 8, C(64, 1, 2)),
    Case(3, 200, 72, C(64, 4, 2), dtype="float16"),
    Case(8, 520, 136, C(64, 8, 2)),
    Case(17, 328, 200, C(128, 2, 3)),
    Case(24, 328, 264, C(256, 1, 2), epilogue=False),
    Case(33, 264, 136, C(128, 4, 4), w_transposed=True),
    Case(64, 192, 128, C(128, 2, 3)),
    Case(64, 136, 72, C(64, 1, 2), w_transposed=True),
    *(
        Case(17, 264, 96, C(64, parts, 2), w_transposed, terms, products, one_array)
        for parts, one_array in ((1, True), (4, False))
        for w_transposed in (False, True)
        for terms, products in ((2, 1), (1, 2))
    ),
)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", CASES, quick=(0, 1, 5, 6, 9, 12))
def test_accurate_in_the_interpreter(case):
    case.check()


CONVERTED = (
    Case(9, 200, 96, C(64, 2, 2), w_dtype="float32"),
    Case(17, 160, 200, C(128, 2, 3), True, 2, 1, w_dtype="float32", dtype="float16"),
    Case(8, 72, 160, C(64, 1, 2), products=2, one_array=True, w_dtype="float32"),
    # XLA first converts w if its rows cannot be copied in tiles.
    Case(8, 72, 72, C(64, 1, 2), w_dtype="float32"),
)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("case", CONVERTED, quick=(0, 1, 3))
def test_converts_weights_in_the_interpreter(case, monkeypatch):
    mosaic_interpreter.complete(monkeypatch)
    case.check()


@parametrize("case", CONVERTED, quick=(1, 2))
def test_converted_weights_lower_for_cuda(case):
    for config in (C(64, 2, 3), C(128, 1, 2)):
        run = replace(case, config=config).run
        assert kernels(run, *jax.eval_shape(case.operands)) == ["matmul_few_rows"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("race_detector")
@pytest.mark.parametrize("case", [CASES[3], CASES[5], CASES[11]], ids=str)
def test_no_races_in_the_interpreter(case):
    case.check()


@pytest.mark.usefixtures("interpreted_hopper")
def test_same_bits_twice_in_the_interpreter():
    """The parts of a cluster are added in a fixed order, whichever is ready first."""
    case = Case(9, 520, 72, C(64, 8, 2))
    x, w = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate(((9, 520), (520, 72)))
    )
    operands = ([x], [[w]], *case.operands()[2:])
    chex.assert_trees_all_equal(jax.jit(case.run)(*operands), jax.jit(case.run)(*operands))


@parametrize(
    ("case", "step"),
    [
        (Case(1, 768, 3072), 3),
        (Case(8, 5120, 2752), 3),
        (Case(24, 2752, 5120, w_transposed=True), 3),
        (Case(64, 4096, 1400, products=2), 8),
        (Case(64, 4096, 1400, products=2), 3),
        (Case(64, 24, 40, epilogue=False), 3),
    ],
    quick=(3,),
)
def test_candidates_lower_for_cuda(case, step):
    shapes = jax.eval_shape(case.operands)
    fused = dict(read_bytes=2, written_bytes=6) if case.epilogue else dict(written_bytes=4)
    work = Work(case.m, case.n, case.k, case.products, k_last=case.w_transposed, **fused)
    configs = few_rows_candidates(work, 132)
    assert len(set(configs)) == len(configs)
    fit = 0
    for config in configs[::step]:
        try:
            assert kernels(replace(case, config=config).run, *shapes) == ["matmul_few_rows"]
        except ValueError as error:
            assert "shared memory" in str(error)
            continue
        fit += 1
    assert fit


@pytest.mark.parametrize("m", [1, 24, 64])
def test_products_of_few_rows_take_this_kernel(m):
    def shape(*s):
        return jax.ShapeDtypeStruct(s, jnp.bfloat16)

    k, n = 2752, 5120

    def forward(*operands):
        layer = linear.layer(
            *operands, activation="gelu_tanh", save_preactivation=True, out_dtype=jnp.float32
        )
        return layer.run(multiprocessors=132)

    assert kernels(forward, shape(m, k), shape(k, n), shape(n), shape(m, n)) == ["linear_few_rows"]
    gated = functools.partial(
        mlp.gated_forward, activation="silu", save_preactivations=True, multiprocessors=132
    )
    for weights in ((shape(k, n), shape(k, n)), (shape(k, 2 * n), None)):
        assert kernels(gated, shape(m, k), *weights, None, None) == ["gated_unit_few_rows"]


def linear_loss(x, w, b):
    return jaxfused.linear(x, w, b, activation="silu", implementation="pallas")


def mlp_loss(x, w, b):
    return jaxfused.mlp(x, w, b, w.T, implementation="pallas")


def gated_loss(x, w, b):
    return jaxfused.gated_mlp(x, w, w[:, ::-1], w.T, b_gate=b, implementation="pallas")


LOSSES = {
    linear_loss: ["linear_few_rows", "input_gradient_few_rows"],
    mlp_loss: ["linear_few_rows"] * 2 + ["hidden_gradient_few_rows", "input_gradient_few_rows"],
    gated_loss: [
        "gated_unit_few_rows",
        "linear_few_rows",
        "gated_hidden_gradient_few_rows",
        "gated_input_gradient_few_rows",
    ],
}


OPERATORS = {linear_loss: "linear", mlp_loss: "mlp", gated_loss: "gated_mlp"}


@parametrize("loss", list(LOSSES), quick=(0, 2), ids=lambda loss: loss.__name__)
def test_operators_launch_it(loss):
    """All products use it except those of wgrad, which sum over few rows."""

    def gradients(x, w, b):
        y, vjp = jax.vjp(loss, x, w, b)
        return vjp(y)

    shapes = ((9, 2048), "bfloat16"), ((2048, 4096), "float32"), ((4096,), "bfloat16")
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)):
        found = kernels(gradients, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert [name for name in found if name.endswith("_few_rows")] == LOSSES[loss]


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("loss", list(LOSSES), quick=(1,), ids=lambda loss: loss.__name__)
def test_operators_are_accurate_in_the_interpreter(loss, monkeypatch):
    mosaic_interpreter.complete(monkeypatch)
    rng = np.random.default_rng(0)
    x = put(rng.normal(size=(9, 72)), jnp.bfloat16)
    w = put(rng.normal(size=(72, 96)) / 9, jnp.float32)
    b = put(rng.normal(size=96), jnp.bfloat16)

    def run(f, x, w, b):
        y, vjp = jax.vjp(f, x, w, b)
        return dict(zip(("y", "dx", "dw", "db"), (y, *vjp(jnp.ones_like(y))), strict=True))

    def plain(x, w, b):
        xla = functools.partial(getattr(jaxfused, OPERATORS[loss]), implementation="xla")
        if loss is linear_loss:
            return xla(x, w, b, activation="silu")
        if loss is mlp_loss:
            return xla(x, w, b, w.T)
        return xla(x, w, w[:, ::-1], w.T, b_gate=b)

    actual, expected = run(loss, x, w, b), run(plain, x, w, b)
    with jax.enable_x64(True):
        truth = run(plain, *(put(np.asarray(a, np.float64)) for a in (x, w, b)))
        truth = jax.tree.map(np.asarray, truth)
    for name, result in actual.items():
        assert_accurate(name, result, expected[name], truth[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_n": 96}, "must be 64, 128 or 256, got 96"),
        ({"parts": 3}, "must be 1, 2, 4 or 8, got 3"),
        ({"stages": 1}, "stages must be at least 2, got 1"),
    ],
)
def test_config_validates_itself(change, message):
    with pytest.raises(ValueError, match=message):
        FewRowsConfig(**change)


def test_rows_beyond_its_limit_are_refused():
    with pytest.raises(ValueError, match="takes at most 64 rows, got 65"):
        Case(65, 64, 64).check()


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*CASES, *CONVERTED), ids=str)
def test_accurate_on_gpu(case):
    case.check()


@pytest.mark.gpu
def test_random_sizes_on_gpu():
    rng = np.random.default_rng(0)
    for config in (C(64, 8, 4), C(64, 1, 6), C(128, 4, 3), C(256, 2, 2)):
        for m in (1, 8, 21, 40):
            k, n = (8 * int(rng.integers(70, 400)) for _ in range(2))
            Case(m, k, n, config, w_transposed=bool(rng.integers(2))).check()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [C(64, 8, 4), C(128, 2, 6)], ids=str)
def test_same_bits_twice_on_gpu(config):
    case = Case(24, 4096, 1536, config)
    operands = case.operands()
    run = jax.jit(case.run)
    first = run(*operands)
    for _ in range(5):
        chex.assert_trees_all_equal(run(*operands), first)
