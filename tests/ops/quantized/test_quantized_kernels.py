"""Kernels of quantised products and of row quantisation, in the interpreter and lowered for CUDA."""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfused
import jaxfused.nnx
from benchmarks.without_gpu.target import H200
from jaxfused import QuantizedArray, dispatch
from jaxfused.ops.quantize.quantize_codes import CODE_FORMATS
from jaxfused.runtime.packing import pack_words
from jaxfused.runtime.quantized_array import FORMATS
from jaxfused.runtime.scale_groups import of_each_column
from pallas_kernels.gemm import quantized
from pallas_kernels.gemm.matmul_config import MatmulConfig
from pallas_kernels.gemm.quantized import Packed
from pallas_kernels.gemm.quantized_tiles import QuantizedTilesConfig
from pallas_kernels.gemm.small_m import QuantizedConfig
from pallas_kernels.rows import quantize as rows_kernel
from pallas_kernels.rows import rounding
from tests.cases.quantized_matmul import Layer
from tests.support import mosaic_interpreter
from tests.support.arrays import put
from tests.support.choices import chosen
from tests.support.grids import parametrize
from tests.support.lowering import kernels, lowered
from tests.support.tolerances import assert_accurate

C, T, Q = QuantizedConfig, MatmulConfig, QuantizedTilesConfig


@pytest.fixture
def interpreted(interpreted_hopper, monkeypatch):
    """Adds products with operands in registers to `interpreted_hopper`."""
    mosaic_interpreter.complete(monkeypatch)
    mosaic_interpreter.upcast_integers(monkeypatch)
    return interpreted_hopper


def packed(q):
    """Returns the weights as kernels read them; the scales of E8M0 are bytes."""
    scale = q.scale
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return Packed(q.values, scale, q.zero_point, q.codebook)


@dataclass(frozen=True)
class Case(Layer):
    config: Any = None

    @classmethod
    def of(cls, m, k, n, config, *layer, **options):
        return cls(m, k, n, *layer, config=config, **options)

    def run(self, x, q, bias, residual):
        y, z = quantized.forward(
            x,
            packed(q),
            bias,
            residual,
            activation=self.activation,
            save_preactivation=True,
            out_dtype=x.dtype,
            multiprocessors=4,
            config=self.config,
        )
        return {"y": y, "z": z}

    def check(self):
        x, q, bias, residual = self.operands()
        actual = jax.jit(self.run)(x, q, bias, residual)
        plain = self.expected(x, q.dequantize(), bias, residual, x.dtype)
        with jax.enable_x64(True):
            wide = (np.asarray(q.dequantize(), np.float64), bias, residual)
            truth = self.expected(x.astype(jnp.float64), *wide, jnp.float64)
        for name, result in actual.items():
            assert_accurate(name, result, plain[name].astype(result.dtype), truth[name])


FEW_ROWS = (
    Case.of(1, 256, 72, C(64, 2, 2)),
    Case.of(9, 512, 144, C(64, 4, 2), "int8", {"symmetric": False}, "float16"),
    Case.of(9, 1024, 80, C(64, 2, 3, 256), "int8", {"group_size": 512, "symmetric": False}),
    Case.of(3, 272, 64, C(64, 1, 3), "float8_e4m3fn"),
    Case.of(8, 384, 64, C(64, 1, 2), "float8_e5m2", {"group_size": 128}, "float16"),
    Case.of(17, 384, 80, C(64, 1, 2), "int4", {"group_size": 128}),
    Case.of(33, 640, 136, C(128, 4, 2), "int4", {"group_size": 32}),
    Case.of(
        1, 512, 64, C(64, 2, 2, 256), "int4", {"group_size": 64, "symmetric": False}, "float16"
    ),
    Case.of(8, 256, 72, C(64, 1, 2, 256), "int4"),
    Case.of(5, 256, 80, C(64, 1, 2), "int4", {"symmetric": False}, activation=None, plain=True),
    Case.of(2, 256, 64, C(64, 1, 2), "int8", {"per_tensor": True}),
    Case.of(100, 384, 72, C(64, 2, 2), "int8", {"group_size": 128}),
    Case.of(3, 256, 67, C(64, 2, 2), "int8", {"symmetric": False}),
)
MANY_ROWS = (
    Case.of(130, 400, 200, Q(64, 2, 2)),
    Case.of(70, 256, 200, Q(32, 1, 2, 2), "int4", {"group_size": 32}),
    Case.of(130, 512, 328, Q(128, 3, 2), "int4", {"group_size": 128}),
    Case.of(
        130,
        256,
        200,
        Q(64, 2, 2),
        "int4",
        {"group_size": 64, "symmetric": False},
        activation=None,
    ),
    Case.of(70, 384, 200, Q(96, 2, 2, 3), "float8_e4m3fn"),
    Case.of(70, 384, 136, Q(96, 2, 2, 3), "float8_e5m2", {"group_size": 128}, "float16"),
    Case.of(
        70, 384, 136, Q(96, 2, 2, 3), "int8", {"group_size": 128, "symmetric": False}, "float16"
    ),
    Case.of(70, 256, 67, Q(96, 2, 2, 3), "int8", plain=True),
    # The last columns have smaller tiles: 4 SMs compute 3 x 5 and then 5 tiles, and 2 x 4 and then 7.
    Case.of(130, 272, 728, Q(64, 2, 2, 3, tail_rows=32)),
    Case.of(200, 256, 584, Q(128, 2, 2, tail_rows=32), "int4", {"group_size": 32}, activation=None),
)


@dataclass(frozen=True)
class Codes(Case):
    """A product with weights that are codes of the codebook `dtype`."""

    def operands(self, seed=0):
        group = self.options.get("group_size", self.k)
        rng, shape = np.random.default_rng(seed), (self.k // group, self.n)
        values = put(rng.integers(0, 256, (self.n, self.k // 2)), jnp.uint8)
        if self.options.get("exponents"):
            exponents = put(rng.integers(118, 124, shape), jnp.uint8)
            scale = jax.lax.bitcast_convert_type(exponents, jnp.float8_e8m0fnu)
        else:
            scale = put(rng.uniform(0.01, 0.05, shape), jnp.float32)
        book = jaxfused.quantization.CODEBOOKS[self.dtype]
        q = QuantizedArray(values, scale, None, -2, "columns", codebook=book)
        x, residual = (
            put(rng.normal(size=(self.m, columns)), self.x_dtype) for columns in (self.k, self.n)
        )
        return x, q, put(rng.normal(size=self.n), jnp.float32), residual


CODES = (
    Codes.of(3, 256, 72, C(64, 2, 2), "e2m1", {"group_size": 32, "exponents": True}),
    Codes.of(9, 352, 72, C(64, 2, 2), "e2m1", {"group_size": 16}),
    Codes.of(9, 512, 144, C(128, 1, 3), "nf4", {"group_size": 64}),
    Codes.of(9, 512, 144, C(64, 1, 3), "nf4", {"group_size": 64}, "float16"),
    Codes.of(9, 512, 144, C(64, 1, 3), "fp4", {"exponents": True}),
    Codes.of(70, 352, 200, Q(96, 2, 2, 3), "e2m1", {"group_size": 32, "exponents": True}),
    Codes.of(70, 512, 200, Q(64, 1, 3), "nf4", {"group_size": 128}),
    Codes.of(70, 512, 200, Q(128, 3, 2), "nf4", {"group_size": 16}, "float16"),
)
LARGE = (
    Case.of(530, 1280, 392, Q(256, 2, 3, 4), "int4", {"group_size": 32}),
    Case.of(300, 1024, 648, Q(128, 3, 3, 4), "int8", {"group_size": 64}),
    Codes.of(270, 1632, 200, Q(256, 2, 3, 3), "e2m1", {"group_size": 32, "exponents": True}),
)
TILES = (
    Case.of(130, 400, 200, T(128, 192, 3, epilogue_columns=32)),
    Case.of(200, 256, 264, T(64, 128, 3, False, epilogue_columns=32), "int4", {"group_size": 128}),
    Case.of(
        140,
        384,
        144,
        T(64, 128, 4, epilogue_columns=32),
        "int4",
        {"group_size": 64, "symmetric": False},
    ),
    Case.of(70, 272, 200, T(64, 64, 3, epilogue_columns=32), "float8_e4m3fn", plain=True),
    Case.of(70, 256, 67, T(64, 128, 4, epilogue_columns=32), "int4", {"group_size": 128}),
)


@pytest.mark.usefixtures("interpreted")
@parametrize("case", FEW_ROWS, quick=(7,), ids=str)
def test_few_rows_are_accurate_in_the_interpreter(case):
    case.check()


@pytest.mark.usefixtures("interpreted")
@parametrize("case", (*MANY_ROWS, *CODES, *TILES), quick=(1,), ids=str)
def test_tiles_are_accurate_in_the_interpreter(case):
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*MANY_ROWS, *CODES, *LARGE), ids=str)
def test_tiles_and_codes_are_accurate_on_gpu(case):
    case.check()
    operands = case.operands()
    first, again = (jax.jit(case.run)(*operands)["y"] for _ in range(2))
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (first, again)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize("book", ["e2m1", "nf4"])
def test_every_code_and_exponent_is_its_number_on_gpu(rows, book):
    values = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (64, 1))
    bits = jnp.tile(jnp.arange(96, 160, dtype=jnp.uint8)[None], (16, 1))
    exponents = jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
    numbers = jaxfused.quantization.CODEBOOKS[book]
    w = QuantizedArray(values, exponents, None, -2, "columns", codebook=numbers)
    for start in range(0, 512, rows):
        x = jnp.eye(rows, 512, start, dtype=jnp.bfloat16)
        y = jaxfused.quantized_matmul(x, w, implementation="pallas")
        right = w.dequantize(jnp.bfloat16)[start : start + rows]
        np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (y, right)))


@parametrize("case", (*FEW_ROWS, *MANY_ROWS, *CODES, *TILES, *LARGE), quick=(5, 21), ids=str)
def test_kernels_lower_for_cuda(case):
    operands = jax.eval_shape(case.operands)
    suffix = {T: "", Q: "_tiles", C: "_few_rows"}[type(case.config)]
    assert kernels(case.run, *operands) == ["quantized_linear" + suffix]


@parametrize(
    ("dtype", "m"),
    [(d, m) for m in (1, 64) for d in ("int8", "int4", "float8_e4m3fn")],
    quick=(),
)
def test_configs_of_few_rows_lower_for_cuda(dtype, m):
    options = {"group_size": 128} if dtype == "int4" else {}
    case = Case.of(m, 4096, 1024, None, dtype, options)
    x, q, *others = jax.eval_shape(case.operands)
    packed = Packed(q.values, q.scale, q.zero_point)
    matrix = jax.ShapeDtypeStruct((m, 1024), jnp.bfloat16)
    configs = quantized.candidates(
        x, packed, written=(jnp.float32,), read=(matrix,), multiprocessors=132
    )
    assert len(set(configs)) == len(configs) > 8
    for config in configs[::8]:
        run = replace(case, config=config).run
        assert kernels(run, x, q, *others) == ["quantized_linear_few_rows"]


@parametrize("dtype", ["int8", "int4"], quick=())
def test_configs_of_many_rows_lower_for_cuda(dtype):
    """At a size whose last tiles have few rows, so that many of their pieces fit into shared memory."""
    options = {"group_size": 32} if dtype == "int4" else {}
    case = Case.of(256, 3584, 18944, None, dtype, options)
    x, q, *others = jax.eval_shape(case.operands)
    packed = Packed(q.values, q.scale, q.zero_point)
    configs = quantized.candidates(
        x, packed, written=(x.dtype, x.dtype), read=(x,), multiprocessors=132
    )
    tiles = [config for config in configs if isinstance(config, Q)]
    assert min(config.tail_rows for config in tiles) < max(config.tail_rows for config in tiles)
    for config in tiles:
        run = replace(case, config=config).run
        assert kernels(run, x, q, *others) == ["quantized_linear_tiles"]


# --- a gated unit ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreted")
@parametrize(("dtype", "options"), [("int4", {"group_size": 128}), ("int8", {})], quick=(), ids=str)
def test_gated_unit_in_the_interpreter(dtype, options):
    rng = np.random.default_rng(0)
    x = put(rng.normal(size=(9, 256)), jnp.bfloat16)
    gate, up = (
        jaxfused.quantize(
            put(rng.normal(size=(256, 72)) / 16, jnp.float32),
            dtype,
            layout="columns",
            **options,
        )
        for _ in range(2)
    )
    b_gate, b_up = (put(rng.normal(size=72), jnp.float32) for _ in range(2))

    @jax.jit
    def run(x, gate, up):
        packed = (Packed(q.values, q.scale, q.zero_point) for q in (gate, up))
        return quantized.gated_forward(
            x, *packed, b_gate, b_up, activation="silu", multiprocessors=4, config=C(64, 2, 2)
        )

    def plain(x, gate, up, dtype):
        x, gate, up = (jnp.asarray(a, dtype) for a in (x, gate, up))
        return jax.nn.silu(x @ gate + b_gate.astype(dtype)) * (x @ up + b_up.astype(dtype))

    weights = gate.dequantize(), up.dequantize()
    with jax.enable_x64(True):
        wide = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, *weights))
        truth = np.asarray(plain(*wide, jnp.float64))
    assert_accurate("h", run(x, gate, up), plain(x, *weights, jnp.bfloat16), truth)


@parametrize("layout", ["columns", "rows"], quick=())
def test_gated_mlp_of_quantized_kernels(layout, interpreted):
    rng = np.random.default_rng(0)
    x = put(rng.normal(size=(2, 3, 128)), jnp.bfloat16)
    rule = jaxfused.QuantizationRule("", "int4", group_size=64, layout=layout)

    def run(x, implementation):
        model = jaxfused.nnx.GatedMLP(
            128, 256, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation=implementation
        )
        y, vjp = jax.vjp(jaxfused.quantize_params(model, [rule]), x)
        return y, *vjp(y)

    actual, expected = (jax.jit(run, static_argnums=1)(x, name) for name in (None, "xla"))
    stages = chosen(functools.partial(run, implementation=None), x)
    wanted = {"columns": "pallas", "rows": None}[layout]
    assert stages.get("quantized_matmul gated unit") == wanted
    for a, b in zip(actual, expected, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        np.testing.assert_allclose(a, b, atol=3e-2 * np.abs(b).max())


# --- the gradient of x -----------------------------------------------------------------------------


GRADIENTS = (
    Case.of(130, 400, 200, T(128, 128, 3, epilogue_columns=32)),
    Case.of(200, 384, 136, T(64, 128, 3, False, epilogue_columns=32), "int4", {"group_size": 128}),
    Case.of(
        70,
        256,
        144,
        T(64, 256, 3, epilogue_columns=32),
        "int4",
        {"group_size": 64, "symmetric": False},
    ),
    Case.of(9, 272, 72, None, "float8_e4m3fn"),
    # The scales, about 5e-6, are subnormal in float16.
    Case.of(9, 272, 72, None, "float8_e5m2", x_dtype="float16"),
)


def gradient(case, dz, q):
    return quantized.input_gradient(
        dz,
        Packed(q.values, q.scale, q.zero_point),
        case.k,
        multiprocessors=4,
        config=case.config,
    )


@pytest.mark.usefixtures("interpreted")
@parametrize("case", GRADIENTS, quick=(4,), ids=str)
def test_gradient_in_the_interpreter(case):
    _, q, _, residual = case.operands()
    dz = residual.astype(case.x_dtype)
    wide = np.asarray(q.dequantize(), np.float64)
    plain = jnp.matmul(dz, q.dequantize(dz.dtype).T)
    dx = jax.jit(functools.partial(gradient, case))(dz, q)
    assert_accurate("dx", dx, plain, np.asarray(dz.astype(jnp.float32), np.float64) @ wide.T)


@parametrize("case", GRADIENTS, quick=(), ids=str)
def test_gradient_lowers_for_cuda(case):
    _, q, _, dz = jax.eval_shape(case.operands)
    run = functools.partial(gradient, case)
    assert kernels(run, dz, q) == ["quantized_input_gradient"]


# --- quantised x ----------------------------------------------------------------------------------


def both(m, k, n, dtype, group_size=None):
    rng = np.random.default_rng(0)
    x, w = (put(rng.normal(size=size), jnp.float32) for size in ((m, k), (k, n)))
    of_rows = group_size[0] if isinstance(group_size, tuple) else group_size
    q = jaxfused.quantize(x, dtype, axis=-1, group_size=of_rows)
    return q, jaxfused.quantize(w / k**0.5, dtype, group_size=group_size, layout="columns")


def multiply_both(x, w, *, activation=None, config=None):
    return quantized.both_forward(
        x.values,
        x.scale,
        Packed(w.values, of_each_column(w.scale, w.shape[1]), None),
        None,
        None,
        activation=activation,
        save_preactivation=False,
        out_dtype=jnp.bfloat16,
        multiprocessors=4,
        columns_alike=w.columns_alike,
        config=config,
    )[0]


BOTH = (
    (130, 272, 200, "int8", None, T(128, 192, 2, epilogue_columns=32)),
    (200, 272, 136, "float8_e4m3fn", None, T(64, 128, 2, False, epilogue_columns=32)),
    (140, 256, 136, "float8_e4m3fn", 128, T(64, 128, 2, False, epilogue_columns=32)),
    (70, 384, 72, "int8", 128, T(64, 64, 3, False, epilogue_columns=32)),
    (300, 256, 200, "int8", 128, T(64, 64, 2, False, epilogue_columns=32)),
    (140, 384, 320, "int8", (128, 64), T(64, 192, 2, False, epilogue_columns=32)),
    (70, 256, 256, "float8_e4m3fn", (128, 128), T(64, 192, 2, False, epilogue_columns=32)),
    (70, 200, 67, "int8", None, T(64, 128, 2, False, epilogue_columns=32)),
)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize(("m", "k", "n", "dtype", "group_size", "config"), BOTH, quick=(2,))
def test_quantized_inputs_in_the_interpreter(m, k, n, dtype, group_size, config):
    x, w = both(m, k, n, dtype, group_size)
    y = jax.jit(functools.partial(multiply_both, config=config))(x, w)
    factors = [np.asarray(q.dequantize(), np.float64) for q in (x, w)]
    plain = jnp.matmul(*(jnp.asarray(a, jnp.bfloat16) for a in factors))
    assert_accurate("y", y, plain, np.matmul(*factors))


@parametrize(("m", "k", "n", "dtype", "group_size", "config"), BOTH, quick=())
def test_quantized_inputs_lower_for_cuda(m, k, n, dtype, group_size, config):
    operands = jax.eval_shape(functools.partial(both, m, k, n, dtype, group_size))
    for chosen_config in (config, None):
        run = functools.partial(multiply_both, activation="silu", config=chosen_config)
        assert kernels(run, *operands) == ["quantized_product"]


@parametrize("dtype", ("int8", "float8_e4m3fn"), quick=())
def test_float32_results_of_quantized_inputs_fit_into_shared_memory(dtype):
    x, w = jax.eval_shape(functools.partial(both, 2048, 4096, 14336, dtype))

    def run(x, w):
        return quantized.both_forward(
            x.values,
            x.scale,
            Packed(w.values, w.scale, None),
            None,
            None,
            activation="silu",
            save_preactivation=False,
            out_dtype=jnp.float32,
            multiprocessors=132,
        )[0]

    assert kernels(run, x, w) == ["quantized_product"]


# --- rows -----------------------------------------------------------------------------------------


def row_rounding(dtype):
    return rounding.RowRounding(dtype, FORMATS[dtype].largest)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("shape", [(37, 768), (8, 4096), (9, 128)], quick=(2,), ids=str)
@parametrize("dtype", tuple(rounding.DTYPES), quick=(0, 1))
def test_rows_in_the_interpreter(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[1], x[2, 3], x[3, 5], x[4] = 0, np.nan, np.inf, 1e-38
    x = jnp.asarray(x, jnp.bfloat16)
    values, scale = rows_kernel.forward(x, row_rounding(dtype), multiprocessors=4)
    expected = jaxfused.quantize_rows(x, dtype)
    np.testing.assert_array_equal(scale, expected.scale[:, 0])
    units = jnp.abs(values.astype(jnp.float32) - expected.values.astype(jnp.float32))
    # A quotient nearly halfway between two numbers may round to either.
    np.testing.assert_array_equal(jnp.isnan(values), jnp.isnan(expected.values))
    assert jnp.nanmax(units) <= (1 if dtype == "int8" else 0)
    assert (units > 0).mean() < 1e-3


@parametrize("dtype", tuple(rounding.DTYPES), quick=(1,))
@parametrize("features", [512, 4096, 16384], quick=(0,))
def test_rows_lower_for_cuda(dtype, features):
    def run(x):
        return rows_kernel.forward(x, row_rounding(dtype), multiprocessors=132)

    x = jax.ShapeDtypeStruct((4096, features), jnp.bfloat16)
    assert kernels(run, x) == ["quantize_rows"]


# --- the operators --------------------------------------------------------------------------------


def loss(x, q, bias, residual, implementation=None):
    y = jaxfused.quantized_matmul(
        x, q, bias, activation="silu", residual=residual, implementation=implementation
    )
    return y


OPERANDS = (
    ("int4", {"group_size": 128}, None),
    ("int8", {"symmetric": False}, None),
    ("float8_e4m3fn", {}, None),
    ("int8", {}, "int8"),
    ("float8_e4m3fn", {}, "float8_e4m3fn"),
)


def operands(dtype, options, x_dtype, m=9, k=256, n=80):
    case = Case.of(m, k, n, None, dtype, options)
    x, q, bias, residual = case.operands()
    return (x if x_dtype is None else jaxfused.quantize_rows(x, x_dtype)), q, bias, residual


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize(
    ("of_x", "of_w"),
    [
        (dict(per_tensor=True), {}),
        (dict(group_size=128), dict(group_size=(128, 64))),
        (dict(group_size=128), dict(group_size=(128, 24))),
    ],
    quick=(0,),
)
def test_scales_that_rows_or_columns_share(of_x, of_w):
    rng = np.random.default_rng(0)
    x, w = (put(rng.normal(size=size), jnp.float32) for size in ((3, 5, 256), (256, 192)))
    x = jaxfused.quantize(x, axis=-1, **of_x)
    w = jaxfused.quantize(w, layout="columns", **of_w)
    actual, expected = (
        jax.jit(functools.partial(jaxfused.quantized_matmul, implementation=implementation))(x, w)
        for implementation in ("pallas", "xla")
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


@parametrize(("dtype", "options", "x_dtype"), OPERANDS, quick=(1,))
def test_gradients_through_the_kernels_in_the_interpreter(
    dtype, options, x_dtype, interpreted, monkeypatch
):
    x, q, bias, residual = operands(dtype, options, x_dtype)

    def run(implementation, x, bias, residual):
        f = functools.partial(loss, implementation=implementation)
        if x_dtype is not None:
            y, vjp = jax.vjp(lambda bias, residual: f(x, q, bias, residual), bias, residual)
            return y, *vjp(y)
        y, vjp = jax.vjp(lambda *args: f(args[0], q, *args[1:]), x, bias, residual)
        return y, *vjp(y)

    actual = jax.jit(functools.partial(run, "pallas"))(x, bias, residual)
    expected = jax.jit(functools.partial(run, "xla"))(x, bias, residual)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


@pytest.mark.parametrize(("dtype", "options", "x_dtype"), OPERANDS)
def test_what_a_call_of_few_rows_takes(dtype, options, x_dtype):
    large = jax.eval_shape(lambda: operands(dtype, options, x_dtype, k=4096, n=4096))
    with dispatch.assume(H200):
        taken = chosen(loss, *large)
    # XLA multiplies few rows of quantised x.
    assert set(taken.values()) == {"pallas" if x_dtype is None else "xla"}


@pytest.mark.exhaustive
def test_backward_of_many_rows_reads_the_quantized_weights(hopper):
    x, q, bias, residual = jax.eval_shape(lambda: operands("int4", {"group_size": 128}, None, 200))

    def gradients(x, q, bias, residual):
        f = functools.partial(loss, implementation="pallas")
        y, vjp = jax.vjp(lambda x, bias: f(x, q, bias, residual), x, bias)
        return vjp(y)

    assert kernels(gradients, x, q, bias, residual) == [
        "quantized_linear_tiles",
        "quantized_input_gradient",
    ]
    # XLA's program for the same would contain the weights as floats.
    shape = re.compile(r"tensor<256x80x(bf16|f32)>")
    assert not shape.search(lowered(gradients, x, q, bias, residual))


MXFP4 = {"group_size": 32, "exponents": True}


@pytest.mark.usefixtures("interpreted")
@parametrize("rows", [3, 70], quick=())
def test_products_of_codes_and_their_gradients(rows):
    x, q, bias, residual = Codes.of(rows, 256, 72, None, "e2m1", MXFP4).operands()

    def run(x, q, bias, residual, implementation):
        f = functools.partial(loss, implementation=implementation)
        y, vjp = jax.vjp(lambda *floats: f(floats[0], q, *floats[1:]), x, bias, residual)
        return y, *vjp(y)

    actual, expected = (
        jax.jit(run, static_argnums=4)(x, q, bias, residual, name) for name in ("pallas", "xla")
    )
    for a, b in zip(actual, expected, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


def test_what_kernels_of_codes_and_of_many_rows_leave_to_xla(hopper):
    def refused(case, words, **options):
        x, q, *_ = jax.eval_shape(case.operands)
        with pytest.raises(ValueError, match=f"'pallas' cannot run here: .*{words}"):
            jax.eval_shape(functools.partial(jaxfused.quantized_matmul, **options), x, q)

    named = dict(implementation="pallas")
    refused(Codes.of(9, 240, 72, None, "nf4"), "a row has 240 numbers", **named)
    refused(Codes.of(9, 256, 72, None, "nf4", {"group_size": 8}), "16, 32, 64 and", **named)
    wide = dict(out_dtype=jnp.float32, **named)
    refused(Codes.of(70, 256, 72, None, "nf4"), "with more than 64 rows", **wide)
    refused(Case.of(70, 256, 72, None, "int4", {"group_size": 32}), "groups of 32", **wide)
    x, q, *_ = jax.eval_shape(Codes.of(9, 256, 72, None, "e2m1", MXFP4).operands)
    x8 = jax.eval_shape(jaxfused.quantize_rows, x)
    with pytest.raises(ValueError, match=r"float x: pass x\.dequantize"):
        jax.eval_shape(functools.partial(jaxfused.quantized_matmul, **named), x8, q)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k": 64, "dtype": "int8"}, r"sums of at least 128 numbers \(K\), and they have 64"),
        ({"k": 200, "dtype": "int8"}, "whole multiples of 16 bytes, and a row has 200"),
        (
            {"options": {"group_size": 16}},
            "groups of 32, 64 and multiples of 128, and they have 16",
        ),
        ({"x_dtype": "float32"}, "x of bfloat16 and float16, and x is float32"),
    ],
)
def test_what_the_kernel_of_few_rows_leaves_to_xla(change, reason, hopper):
    case = replace(Case.of(9, 256, 80, None, "int4"), **change)
    x, q, bias, residual = jax.eval_shape(case.operands)
    with pytest.raises(ValueError, match=f"'pallas' cannot run here: .*{reason}"):
        jax.eval_shape(functools.partial(loss, implementation="pallas"), x, q, bias, residual)
    assert chosen(loss, x, q, bias, residual) == {"quantized_matmul forward": "xla"}


@pytest.mark.parametrize(
    ("features", "dtype", "options", "reason"),
    [
        (256, "int8", {"layout": "rows"}, r"quantize\(w, layout='columns'\)\. "),
        (144, "int4", {}, "w and x padded to a multiple of 128 inputs"),
    ],
)
def test_weights_of_rows_are_left_to_xla(hopper, features, dtype, options, reason):
    q = jaxfused.quantize(jnp.ones((features, 64)), dtype, **options)
    assert q.layout == "rows"
    with pytest.raises(ValueError, match=reason):
        jaxfused.quantized_matmul(jnp.ones((2, features), "bfloat16"), q, implementation="pallas")


@pytest.mark.parametrize("dtype", [*FORMATS, *CODE_FORMATS])
def test_kernels_read_weights_as_quantize_makes_them(hopper, dtype):
    w = jax.eval_shape(lambda: jaxfused.quantize(jnp.ones((256, 64)), dtype, axis=0))
    x = jax.ShapeDtypeStruct((2, 256), jnp.bfloat16)
    assert chosen(jaxfused.quantized_matmul, x, w) == {"quantized_matmul forward": "pallas"}


@pytest.mark.usefixtures("interpreted")
def test_zero_and_nan_scales():
    x, q, _, _ = Case.of(3, 256, 64, None, "int4", {"group_size": 128}).operands()
    scale = q.scale.at[0, 3].set(jnp.nan).at[:, 5].set(0.0)
    y = jaxfused.quantized_matmul(x, replace(q, scale=scale), implementation="pallas")
    np.testing.assert_array_equal(jnp.isnan(y), np.arange(64)[None] == [[3]] * 3)
    np.testing.assert_array_equal(y[:, 5], jnp.zeros(3, x.dtype))


def test_words_are_in_the_order_of_instructions():
    values = jax.random.randint(jax.random.key(0), (256,), -8, 8, jnp.int8)
    words = np.asarray(pack_words(values[None]))[0].astype(np.int64)
    for k in range(256):
        block, run, half, thread, odd = k // 128, k % 128 // 16, k % 16 // 8, k % 8 // 2, k % 2
        nibble = 4 * odd + 2 * (run % 2) + half
        word = words[16 * block + 4 * thread + run // 2]
        assert (word >> (4 * nibble)) & 15 == values[k] + 8
