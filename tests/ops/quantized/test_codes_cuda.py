"""The CUDA C kernel of few rows and 4-bit codes: limits, lowering, choice, and results on a GPU."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from benchmarks.without_gpu.target import H200
from jaxfused import QuantizedArray, dispatch
from jaxfused.ops.quantized import codes_matmul_cuda as kernel
from jaxfused.runtime import cuda_library
from jaxfused.runtime.activation import activate
from pallas_kernels.gemm.quantized import Packed
from tests.support.arrays import put
from tests.support.choices import chosen
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

AMPERE = dispatch.Device("gpu", "NVIDIA A100", (8, 0), 108)


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    book: str = "e2m1"
    group: int = 32
    exponents: bool = True
    units: int | None = None
    """Units of 16 columns of a block, or None for the default."""
    x_dtype: str = "bfloat16"

    def operands(self):
        rng, shape = np.random.default_rng(0), (self.k // self.group, self.n)
        values = put(rng.integers(0, 256, (self.n, self.k // 2)), jnp.uint8)
        if self.exponents:
            scale = rng.integers(116, 124, shape)
            scale[0, :2] = 0, 1
            scale = jax.lax.bitcast_convert_type(put(scale, jnp.uint8), jnp.float8_e8m0fnu)
        else:
            scale = put(rng.uniform(0.01, 0.05, shape), jnp.float32)
        book = jaxfused.quantization.CODEBOOKS[self.book]
        q = QuantizedArray(values, scale, None, -2, "columns", codebook=book)
        x = put(rng.normal(size=(self.m, self.k)), self.x_dtype)
        return x, q, put(rng.normal(size=self.n), jnp.float32)

    def run(self, x, q, bias, implementation="cuda"):
        return jaxfused.quantized_matmul(
            x, q, bias, activation="gelu_tanh", implementation=implementation
        )

    def kernel(self, x, q, bias):
        scale = q.scale
        if self.exponents:
            scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
        w = Packed(q.values, scale, None, q.codebook)
        configs = kernel.candidates(w, multiprocessors=132)
        config = next(c for c in configs if self.units in (None, c.units))
        options = dict(activation="gelu_tanh", save_preactivation=True, out_dtype=jnp.bfloat16)
        y, z = kernel.forward(x, w, bias, None, **options, config=config)
        return {"y": y, "z": z}


CASES = (
    Case(1, 1024, 48),
    Case(3, 1056, 80, units=3),
    Case(16, 4128, 304, units=9),
    Case(16, 2112, 240, "nf4", 64, False, units=7),
    Case(9, 1024, 64, "fp4", 1024, False, units=4),
    Case(8, 9216, 64, "e2m1", 128, units=2),
)


@pytest.fixture
def built(monkeypatch):
    """Pretends that the CUDA library is loaded; nothing in it is called."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "register", lambda: None)
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("80-real", "90-real"))


def test_lowers_to_one_kernel(built):
    with dispatch.assume(H200):
        case = CASES[3]
        assert kernels(case.run, *jax.eval_shape(case.operands)) == ["jaxfused_codes_matmul"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(1, 4096, 8192), "cuda"),
        (Case(16, 4096, 8192, "nf4", 64, False), "cuda"),
        (Case(17, 4096, 8192), "pallas"),
        (Case(1, 4096, 8192, group=16, exponents=False), "pallas"),
    ],
)
def test_is_the_default_for_few_rows_on_hopper(case, name, built):
    run = functools.partial(case.run, implementation=None)
    with dispatch.assume(H200):
        found = chosen(run, *jax.eval_shape(case.operands))
    assert found == {"quantized_matmul forward": name}


@pytest.mark.parametrize(
    ("device", "case", "reason"),
    [
        (AMPERE, Case(1, 256, 64), "codes from compute capability 9.0 on, and this GPU has 8.0"),
        (H200, Case(17, 256, 64), "codes with at most 16 rows, and there are 17"),
        (H200, Case(1, 256, 64, x_dtype="float16"), "codes by bfloat16, and x is float16"),
        (H200, Case(1, 256, 72), "32 features and 16 columns, and there are 256 and 72"),
        (H200, Case(1, 256, 64, group=16), "times a power of two, and they have 16"),
    ],
)
def test_what_it_refuses(device, case, reason, built):
    with (
        dispatch.assume(device),
        pytest.raises(ValueError, match=f"'cuda' cannot run here: .*{reason}"),
    ):
        jax.eval_shape(case.run, *jax.eval_shape(case.operands))


@pytest.mark.parametrize(("n", "units"), [(13824, 7), (18944, 9), (4096, 2), (16, 1), (40960, 7)])
def test_blocks_fill_the_sms(n, units):
    w = Packed(jax.ShapeDtypeStruct((n, 64), jnp.uint8), jax.ShapeDtypeStruct((4, n), jnp.uint8))
    assert kernel.candidates(w, multiprocessors=132)[0].units == units


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_accurate_on_gpu(case):
    x, q, bias = case.operands()
    run = jax.jit(case.kernel)
    actual, again = run(x, q, bias), run(x, q, bias)

    def expected(dtype, w):
        z = jnp.matmul(x.astype(dtype), w, preferred_element_type=dtype) + bias.astype(dtype)
        return {"y": activate("gelu_tanh", z), "z": z}

    plain = expected(jnp.bfloat16, q.dequantize(jnp.bfloat16))
    with jax.enable_x64(True):
        truth = expected(jnp.float64, np.asarray(q.dequantize(), np.float64))
    for name, result in actual.items():
        np.testing.assert_array_equal(result, again[name])
        assert_accurate(name, result, plain[name].astype(result.dtype), truth[name])


@pytest.mark.gpu
@pytest.mark.parametrize("book", ["e2m1", "nf4"])
def test_every_code_and_exponent_is_its_number_on_gpu(book):
    values = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (64, 1))
    bits = jnp.tile(jnp.arange(0, 256, 4, dtype=jnp.uint8)[None], (16, 1))
    bits = bits.at[:, 5].set(255)  # NaN
    exponents = jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
    numbers = jaxfused.quantization.CODEBOOKS[book]
    w = QuantizedArray(values, exponents, None, -2, "columns", codebook=numbers)
    book = np.asarray(numbers, np.float32).astype(jnp.bfloat16).astype(np.float32)
    scale = np.asarray(exponents.astype(jnp.float32))
    for start in range(0, 512, 16):
        x = jnp.eye(16, 512, start, dtype=jnp.bfloat16)
        y = jaxfused.quantized_matmul(x, w, out_dtype=jnp.float32, implementation="cuda")
        codes = np.arange(start, start + 16)
        codes = (codes // 2 >> codes % 2 * 4) & 15
        np.testing.assert_array_equal(y, book[codes][:, None] * scale[start // 32])
