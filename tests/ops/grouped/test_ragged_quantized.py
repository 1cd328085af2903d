"""ragged_dot with quantised matrices: truth, gradient of rows, kernels, stacks of layers."""

import functools
from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import QuantizedArray
from jaxfused.quantization import CODEBOOKS, QuantizedLayer
from pallas_kernels.gemm import grouped_quantized
from pallas_kernels.gemm.quantized import Packed
from pallas_kernels.gemm.quantized_tiles import QuantizedTilesConfig
from tests.support import mosaic_interpreter
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

Q = QuantizedTilesConfig
ROWS, GROUPS, K, N = 100, 3, 256, 208
SIZES = {0: (40, 0, 33), 1: (7, 50, 20, 13), 2: (5,) * 18}
"""Sizes of groups by the offset of the first one that has a matrix; the last ones take a table."""


@pytest.fixture
def interpreted(interpreted_hopper, monkeypatch):
    mosaic_interpreter.complete(monkeypatch)
    mosaic_interpreter.upcast_integers(monkeypatch)
    return interpreted_hopper


def experts(dtype, groups=GROUPS, k=K, n=N, *, exponents=False, **options):
    """Returns quantised matrices [E, K, N]; random codes where `dtype` names a codebook."""
    rng = np.random.default_rng(0)
    if dtype not in CODEBOOKS:
        floats = put(rng.normal(size=(groups, k, n)), "float32")
        return jaxfused.quantize(floats, dtype, **{"layout": "columns", **options})
    shape = (groups, k // options["group_size"], n)
    scale = put(rng.uniform(0.01, 0.05, shape), "float32")
    if exponents:
        bits = put(rng.integers(118, 124, shape), "uint8")
        scale = jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
    codes = put(rng.integers(0, 256, (groups, n, k // 2)), "uint8")
    return QuantizedArray(codes, scale, None, -2, "columns", codebook=CODEBOOKS[dtype])


def rows(dtype="bfloat16", width=K, seed=1):
    return put(np.random.default_rng(seed).normal(size=(ROWS, width)), dtype)


def with_gradient(f, x, dy):
    y, pull_back = jax.vjp(f, x)
    return y, *pull_back(dy.astype(y.dtype))


def check(f, x, w, dy, offset):
    """Compares f(x, w, dy), a result and a gradient, with dequantised matrices in float64."""
    sizes = SIZES[offset]
    plain = functools.partial(
        with_gradient,
        lambda x: jax.lax.ragged_dot(*_of_groups(x, w.dequantize(x.dtype), sizes, offset)),
    )
    x64, dy64, w64 = (np.asarray(a, np.float64) for a in (x, dy, w.dequantize()))
    y, dx = np.zeros(dy.shape), np.zeros(x.shape)
    ends = np.minimum(np.cumsum([0, *sizes]), ROWS)
    for e in range(len(w64)):
        part = slice(ends[offset + e], ends[offset + e + 1])
        y[part], dx[part] = x64[part] @ w64[e], dy64[part] @ w64[e].T
    names = ("y", "dlhs")
    for name, ours, simple, exact in zip(names, f(x, w, dy), plain(x, dy), (y, dx), strict=False):
        assert_accurate(name, ours, simple, exact)


def _of_groups(x, w, sizes, offset):
    """Returns operands of jax.lax.ragged_dot, with matrices of zeros for groups that have none."""
    before, after = offset, len(sizes) - offset - len(w)
    return x, jnp.pad(w, ((before, after), (0, 0), (0, 0))), put(sizes, "int32")


@parametrize(
    ("dtype", "options", "offset"),
    [
        ("int8", {}, 0),
        ("int4", dict(group_size=32), 1),
        ("int4", dict(layout="rows", group_size=64, symmetric=False), 2),
        ("float8_e4m3fn", dict(group_size=(128, 16)), 0),
        ("nf4", dict(group_size=64), 1),
        ("e2m1", dict(group_size=32, exponents=True), 2),
    ],
    quick=(1, 5),
)
@pytest.mark.parametrize("x_dtype", ["bfloat16"])
def test_truth(dtype, options, offset, x_dtype):
    w = experts(dtype, **options)

    @jax.jit
    def ours(x, w, dy):
        sizes = put(SIZES[offset], "int32")
        f = lambda x: jaxfused.ragged_dot(x, w, sizes, group_offset=offset)  # noqa: E731
        return with_gradient(f, x, dy)

    check(ours, rows(x_dtype), w, rows(x_dtype, N, 2), offset)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A launch of the kernel with a config of its own."""

    dtype: str
    options: dict
    config: QuantizedTilesConfig
    offset: int = 0
    x_dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.dtype}-{self.config.rows}-{self.offset}"

    def operands(self):
        return rows(self.x_dtype), experts(self.dtype, **self.options)

    def run(self, x, w):
        scale = w.scale
        if scale.dtype == jnp.float8_e8m0fnu:
            scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
        return grouped_quantized.forward(
            x,
            Packed(w.values, scale, w.zero_point, w.codebook),
            put(SIZES[self.offset], "int32"),
            jnp.int32(self.offset),
            out_dtype=x.dtype,
            multiprocessors=4,
            config=self.config,
        )

    def check(self):
        x, w = self.operands()
        dy = rows(self.x_dtype, N, 2)
        check(lambda x, w, dy: (jax.jit(self.run)(x, w),), x, w, dy, self.offset)


CASES = (
    Case("int8", {}, Q(32, 2, 2, 2)),
    Case("int4", dict(group_size=32), Q(64, 2, 2, 2), 1),
    Case("int8", dict(group_size=128, symmetric=False), Q(32, 1, 2, 2), 2),
    Case("e2m1", dict(group_size=32, exponents=True), Q(32, 2, 2, 0)),
    Case("nf4", dict(group_size=64), Q(64, 1, 2, 2), 1, "float16"),
    Case("float8_e4m3fn", {}, Q(32, 2, 2, 2), 2),
)


@pytest.mark.usefixtures("interpreted")
@parametrize("case", CASES, quick=(), ids=str)
def test_kernel_in_the_interpreter(case):
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_on_gpu(case):
    case.check()
    first, again = (jax.jit(case.run)(*case.operands()) for _ in range(2))
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (first, again)))


@parametrize("case", CASES, quick=(1,), ids=str)
def test_kernel_lowers_for_cuda(case):
    found = kernels(case.run, *jax.eval_shape(case.operands))
    assert found == ["grouped_quantized"]


@parametrize("kind", [("int4", dict(group_size=32)), ("e2m1", dict(group_size=32))], quick=(0,))
def test_lowered_for_cuda_with_a_kernel_for_each_product(kind, hopper):
    dtype, options = kind
    w = experts(dtype, **options)
    sizes = put(SIZES[0], "int32")

    def run(x, w, dy):
        return with_gradient(lambda x: jaxfused.ragged_dot(x, w, sizes), x, dy)

    assert kernels(run, rows(), w, rows(width=N)) == ["ragged_dot_quantized", "ragged_dot"]


# --- stacks ---------------------------------------------------------------------------------------


def layers(**options):
    w = experts("int4", group_size=64, **options)
    order = np.random.default_rng(3).permutation(K)
    bias = put(np.random.default_rng(4).normal(size=(GROUPS, N)), "float32")
    arrays = [jax.tree.map(lambda a, e=e: a[e], w) for e in range(GROUPS)]
    return [
        QuantizedLayer(array, put(order, "int32") if e else None, bias[e])
        for e, array in enumerate(arrays)
    ]


def test_stack_of_layers_multiplies_each_groups_rows():
    apart = layers()
    stacked = jaxfused.quantization.stack(apart)
    x, sizes = rows("float32"), (40, 0, 33)
    y = jax.jit(lambda layer, x: layer.of_groups(x, put(sizes, "int32")))(stacked, x)
    ends = np.cumsum([0, *sizes])
    for e, layer in enumerate(apart):
        part = slice(ends[e], ends[e + 1])
        chex.assert_trees_all_close(y[part], layer(x[part]), rtol=1e-5, atol=1e-4)
    assert not y[ends[-1] :].any()


def test_a_stack_takes_sizes_below_0_as_0():
    apart = layers()
    x = rows("float32")
    y = jaxfused.quantization.stack(apart).of_groups(x, put((-5, 30, 100), "int8"))
    chex.assert_trees_all_close(y[:30], apart[1](x[:30]), rtol=1e-5, atol=1e-4)
    chex.assert_trees_all_close(y[30:], apart[2](x[30:]), rtol=1e-5, atol=1e-4)


def test_layers_refuse_inputs_and_orders_that_do_not_fit():
    """A permutation would read some of the inputs, or NaN beyond them, without an error."""
    layer = layers()[1]
    stacked = jaxfused.quantization.stack(layers())
    wide = put(np.ones((4, K + 2)), "float32")
    for call in (layer, lambda x: stacked.of_groups(x, put((4, 0, 0), "int32"))):
        with pytest.raises(ValueError, match=f"x has shape .*pass x with {K} features"):
            call(wide)
    with pytest.raises(ValueError, match=r"of_groups: .* no stack of layers; pass the layers to"):
        layer.of_groups(wide[:, :K], put((4,), "int32"))
    with pytest.raises(ValueError, match=f"with_outputs: order .* there are {N} outputs; pass"):
        layer.with_outputs(put(np.zeros(N - 1), "int32"))


def test_stack_refuses_layers_of_other_forms():
    first, *others = layers()
    with pytest.raises(
        ValueError, match=r"stack: layers has a QuantizedArray; pass QuantizedLayers"
    ):
        jaxfused.quantization.stack([jaxfused.quantize(jnp.ones((4, 4)))])
    with pytest.raises(ValueError, match=r"stack: layers is empty; pass"):
        jaxfused.quantization.stack([])
    turned = replace(others[0], bias=None)
    with pytest.raises(ValueError, match=r"stack: layer 1 has .*, but layer 0 has .*; pass layers"):
        jaxfused.quantization.stack([first, turned])


def test_quantised_matrices_are_refused_with_a_remedy():
    x, sizes = rows(), put(SIZES[0], "int32")
    w = experts("int8")
    with pytest.raises(ValueError, match=r"transpose_rhs=True.*leave it out"):
        jaxfused.ragged_dot(x, w, sizes, transpose_rhs=True)
    turned = jaxfused.quantize(put(np.ones((GROUPS, K, N)), "float32"), axis=-1)
    with pytest.raises(ValueError, match=r"axis -1.*pass jaxfused.quantize"):
        jaxfused.ragged_dot(x, turned, sizes)


def test_outputs_in_the_order_of_the_next_layer():
    up = layers()[1]
    order = put(np.random.default_rng(5).permutation(N), "int32")
    x = rows("float32")
    y = up.with_outputs(order)(x)
    np.testing.assert_array_equal(y, jnp.take(up(x), order, axis=-1))


def test_perceptrons_of_quantised_experts():
    """One product for each weight; experts of a mixture, of which one weight is of floats."""
    gate, up, down = (
        experts("int8", 4, k, n, symmetric=s) for k, n, s in ((32, 64, 1), (32, 64, 0), (64, 32, 1))
    )
    x = rows("float32", 32)
    routes = jaxfused.router(rows("float32", 4), 2, normalise="sum")

    def run(x, *weights):
        return jaxfused.expert_mlp(x, *routes, *weights)

    y, pull_back = jax.vjp(lambda x: run(x, gate, up, down.dequantize()), x)
    floats = [w.dequantize() for w in (gate, up, down)]
    expected, expected_back = jax.vjp(lambda x: run(x, *floats), x)
    chex.assert_trees_all_close(
        (y, pull_back(y)), (expected, expected_back(y)), rtol=1e-4, atol=1e-2
    )
    with pytest.raises(
        ValueError, match=r"expert_mlp: transpose_weights=True.*w_gate.*leave it out"
    ):
        jaxfused.expert_mlp(x, *routes, gate, up, down, transpose_weights=True)
