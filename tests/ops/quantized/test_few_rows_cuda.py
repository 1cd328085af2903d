"""The CUDA C kernel of few rows and weights of 4 bits: limits, lowering, results on a GPU."""

import functools
import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from benchmarks.without_gpu.target import H200
from jaxfused import QuantizedArray, dispatch
from jaxfused.ops.quantized.quantized_gated_unit import gated_unit
from jaxfused.runtime.activation import ACTIVATIONS
from pallas_kernels import hopper
from tests.cases.quantized_matmul import Layer
from tests.ops.quantized.test_quantized_kernels import Codes
from tests.support.choices import chosen
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate


@dataclass(frozen=True)
class _Run:
    implementation: str | None = "cuda"

    def run(self, x, q, bias, residual):
        options = dict(activation=self.activation, implementation=self.implementation)
        return jaxfused.quantized_matmul(x, q, bias, residual=residual, **options)


@dataclass(frozen=True)
class Int4(_Run, Layer):
    """A product with int4 in words."""


@dataclass(frozen=True)
class OfCodes(_Run, Codes):
    """A product with codes of the codebook `dtype`."""


E8M0 = {"group_size": 32, "exponents": True}
GROUPS = ({"group_size": 32}, {"group_size": 64}, {"group_size": 128}, {"group_size": 384}, {})
CASES = (
    *(
        Int4(m=m, k=k, n=n, dtype="int4", options={**group, "symmetric": m % 2 > 0}, x_dtype=x)
        for m, (k, n), group, x in (
            (1, (1152, 80), GROUPS[0], "bfloat16"),
            (2, (768, 96), GROUPS[1], "float16"),
            (3, (1152, 84), GROUPS[3], "bfloat16"),
            (4, (1152, 48), GROUPS[2], "float16"),
            (1, (4736, 2116), GROUPS[2], "float16"),
            (2, (384, 16), GROUPS[0], "bfloat16"),
            (4, (640, 112), GROUPS[1], "bfloat16"),
            (1, (512, 36), GROUPS[4], "bfloat16"),
        )
    ),
    *(
        OfCodes(m=m, k=k, n=n, dtype=book, options=group, x_dtype=x)
        for m, (k, n), book, group, x in (
            (1, (1184, 80), "e2m1", E8M0, "bfloat16"),
            (2, (5152, 2128), "e2m1", E8M0, "float16"),
            (4, (1184, 48), "e2m1", E8M0, "bfloat16"),
            (1, (1152, 84), "nf4", GROUPS[1], "bfloat16"),
            (2, (1152, 36), "nf4", GROUPS[0], "float16"),
            (3, (1152, 84), "fp4", GROUPS[2], "bfloat16"),
            (4, (8896, 68), "nf4", GROUPS[1], "float16"),
            (1, (1152, 20), "nf4", GROUPS[4], "bfloat16"),
        )
    ),
)


# --- on any CPU -----------------------------------------------------------------------------------


@parametrize("case", CASES, quick=(4, 8), ids=str)
def test_lowers_to_one_kernel(case, built):
    with dispatch.assume(H200):
        assert kernels(case.run, *jax.eval_shape(case.operands)) == ["jaxfused_few_rows"]


def test_gradients_beside_the_kernel(built):
    x, q, bias, residual = jax.eval_shape(CASES[8].operands)

    def gradients(x, q, bias, residual):
        y, vjp = jax.vjp(lambda x, bias: CASES[8].run(x, q, bias, residual), x, bias)
        return vjp(y)

    with dispatch.assume(H200):
        found = kernels(gradients, x, q, bias, residual)
    assert found[:2] == ["jaxfused_few_rows", "jaxfused_bias_activation_backward"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (OfCodes(5, 256, 64, "nf4"), "at most 4 rows, and there are 5"),
        (OfCodes(1, 240, 64, "nf4"), "multiples of 32 numbers, and they have 240"),
        (OfCodes(1, 256, 64, "nf4", {"group_size": 16}), "groups of 32, 64 .* and they have 16"),
        (
            OfCodes(1, 256, 64, "e2m1", {"group_size": 64, "exponents": True}),
            "E8M0 scales of groups of 32, and they have 64",
        ),
        (OfCodes(1, 256, 72, "e2m1", E8M0), "in multiples of 16 beside .*, and there are 72"),
        (OfCodes(1, 256, 66, "nf4"), "in multiples of 4 beside .*, and there are 66"),
        (OfCodes(1, 256, 12, "nf4"), "16 to 524288 columns, .* and there are 12"),
    ],
    ids=str,
)
def test_what_it_refuses(case, reason, built):
    with (
        dispatch.assume(H200),
        pytest.raises(ValueError, match=f"'cuda' cannot run here: .*{reason}"),
    ):
        jax.eval_shape(case.run, *jax.eval_shape(case.operands))


GATED = (
    Int4(1, 4736, 2116, "int4", GROUPS[2]),
    Int4(3, 768, 80, "int4", {**GROUPS[0], "symmetric": False}, "float16"),
)


def gated(case, x, gate, up, bias):
    options = dict(activation=case.activation, implementation="cuda")
    return gated_unit(x, gate, up, bias, None, **options)


def test_a_gated_unit_lowers_to_one_kernel(built):
    x, q, bias, _ = jax.eval_shape(GATED[1].operands)
    with dispatch.assume(H200):
        assert kernels(functools.partial(gated, GATED[1]), x, q, q, bias) == ["jaxfused_few_rows"]


def test_what_does_not_fit_is_left_to_others(built):
    wide = OfCodes(5, 4096, 256, "nf4", {"group_size": 64}, implementation=None)
    for case in (wide, replace(wide, m=1, n=258), replace(wide, m=1, options={"group_size": 16})):
        with dispatch.assume(H200):
            found = chosen(case.run, *jax.eval_shape(case.operands))
        assert found != {"quantized_matmul forward": "cuda"}


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _on_hopper(request):
    """Skips a GPU's test where the kernel is not: other kernels multiply there."""
    if not request.node.get_closest_marker("gpu"):
        return
    if reason := hopper.why_unfit(dispatch.current_device().compute_capability):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_accurate_on_gpu(case):
    x, q, bias, residual = case.operands()
    run = jax.jit(case.run)
    y, again = run(x, q, bias, residual), run(x, q, bias, residual)
    plain = case.expected(x, q.dequantize(), bias, residual, x.dtype)["y"]
    with jax.enable_x64(True):
        wide = (np.asarray(q.dequantize(), np.float64), bias, residual)
        truth = case.expected(x.astype(jnp.float64), *wide, jnp.float64)["y"]
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(again, np.float32))
    assert_accurate("y", y, plain.astype(y.dtype), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GATED, ids=str)
def test_a_gated_unit_is_accurate_on_gpu(case):
    (x, gate, bias, _), (_, up, *_) = case.operands(), case.operands(1)
    h = jax.jit(functools.partial(gated, case))(x, gate, up, bias)

    def expected(dtype):
        of_gate, of_up = (np.asarray(w.dequantize(), np.float64) for w in (gate, up))
        y = case.expected(x, jnp.asarray(of_gate, dtype), bias, None, dtype)["y"]
        return y * jnp.matmul(x.astype(dtype), jnp.asarray(of_up, dtype))

    plain = expected(x.dtype)
    with jax.enable_x64(True):
        truth = expected(jnp.float64)
    assert_accurate("h", h, plain, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("name", (*ACTIVATIONS, "leaky_relu(0.2)"))
def test_every_activation_on_gpu(name):
    test_is_accurate_on_gpu(replace(CASES[10], activation=name))


@pytest.mark.gpu
def test_gradients_are_accurate_on_gpu():
    x, q, bias, residual = CASES[8].operands()

    def gradients(case):
        _, vjp = jax.vjp(lambda x, bias: case.run(x, q, bias, residual), x, bias)
        return vjp(jnp.ones(residual.shape, x.dtype))

    for ours, plain in zip(
        *(gradients(replace(CASES[8], implementation=name)) for name in ("cuda", "xla")),
        strict=True,
    ):
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (ours, plain)), rtol=0.02, atol=0.02
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("book", "x_dtype"), [*itertools.product(("e2m1", "nf4"), ("bfloat16", "float16"))]
)
def test_every_code_and_exponent_is_its_number_on_gpu(book, x_dtype):
    values = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (64, 1))
    bits = jnp.tile(jnp.arange(96, 160, dtype=jnp.uint8)[None], (16, 1))
    exponents = jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
    numbers = jaxfused.quantization.CODEBOOKS[book]
    w = QuantizedArray(values, exponents, None, -2, "columns", codebook=numbers)
    run = jax.jit(
        lambda x: jaxfused.quantized_matmul(x, w, out_dtype=jnp.float32, implementation="cuda")
    )
    rounded = np.asarray(jnp.asarray(numbers, x_dtype), np.float64)
    codes = np.stack([np.arange(256) % 16, np.arange(256) // 16], -1).ravel()
    right = rounded[codes][:, None] * 2.0 ** (np.arange(96, 160) - 127.0)
    for start in range(0, 512, 4):
        y = run(jnp.eye(4, 512, start, dtype=x_dtype))
        np.testing.assert_array_equal(np.asarray(y, np.float64), right[start : start + 4])


@pytest.mark.gpu
def test_zero_and_nan_stay_where_they_are_on_gpu():
    for case in (
        Int4(4, 512, 64, "int4", {"group_size": 128}),
        OfCodes(4, 512, 64, "nf4", GROUPS[1]),
    ):
        x, q, *_ = case.operands()
        x = x.at[1].set(0).at[3, 7].set(jnp.nan)
        q = replace(q, scale=q.scale.at[0, 3].set(jnp.nan).at[:, 5].set(0.0))
        y = jaxfused.quantized_matmul(x, q, implementation="cuda")
        expected = (np.arange(64)[None] == 3) | (np.arange(4)[:, None] == 3)
        np.testing.assert_array_equal(jnp.isnan(y), expected)
        np.testing.assert_array_equal(jnp.delete(y[1], 3), 0)
        np.testing.assert_array_equal(jnp.delete(y[:, 5], 3), 0)
