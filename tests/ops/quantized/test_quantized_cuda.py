"""CUDA C kernels of quantised products: limits, lowering, and results on a GPU."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfused
import jaxfused.nnx
from benchmarks.without_gpu.target import H200
from jaxfused import dispatch
from jaxfused.ops.quantized import quantized_matmul_cuda as kernel
from jaxfused.runtime import cuda_library
from jaxfused.runtime.activation import ACTIVATIONS
from pallas_kernels.gemm.quantized import Packed
from tests.cases.quantized_matmul import Layer
from tests.conftest import HOPPER
from tests.support.choices import chosen
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.tolerances import assert_accurate

TURING = dispatch.Device("gpu", "NVIDIA T4", (7, 5), 40)
AMPERE = dispatch.Device("gpu", "NVIDIA A100", (8, 0), 108)
ADA = dispatch.Device("gpu", "NVIDIA L4", (8, 9), 58)


@dataclass(frozen=True)
class Case(Layer):
    parts: int | None = None
    """Number of blocks that share the sums of a column, or None for the default."""

    @property
    def residual_dtype(self) -> str:
        return "bfloat16"

    def run(self, x, q, bias, residual, implementation="cuda"):
        return jaxfused.quantized_matmul(
            x,
            q,
            bias,
            activation=self.activation,
            residual=residual,
            out_dtype=jnp.bfloat16,
            implementation=implementation,
        )

    def kernel(self, x, q, bias, residual):
        """Runs the kernel itself, split over as many blocks as the case says."""
        scale, zero_point = (
            None if a is None else jnp.broadcast_to(a, (q.groups, self.n))
            for a in (q.scale, q.zero_point)
        )
        w = Packed(q.values, scale, zero_point)
        capability = dispatch.current_device().compute_capability
        configs = kernel.candidates(
            x.shape, w, products=1, compute_capability=capability, multiprocessors=108
        )
        config = next(c for c in configs if self.parts in (None, c.parts))
        y, z = kernel.forward(
            x,
            w,
            bias,
            residual,
            activation=self.activation,
            save_preactivation=True,
            out_dtype=jnp.bfloat16,
            config=config,
        )
        return {"y": y, "z": z}


WEIGHTS = (
    Case(1, 256, 72),
    Case(9, 528, 145, "int8", {"symmetric": False}, "float16"),
    Case(3, 1024, 80, "int8", {"group_size": 512, "symmetric": False}, parts=2),
    Case(5, 640, 33, "int8", {"group_size": 32}),
    Case(3, 272, 64, "float8_e4m3fn"),
    Case(8, 384, 66, "float8_e5m2", {"group_size": 128}, "float16"),
    Case(17, 384, 80, "int4", {"group_size": 128}),
    Case(33, 1152, 136, "int4", {"group_size": 32}, parts=2),
    Case(1, 1024, 65, "int4", {"group_size": 64, "symmetric": False}, "float16", parts=4),
    Case(8, 256, 71, "int4", plain=True, activation=None),
    Case(2, 256, 64, "int8", {"per_tensor": True}),
    Case(2, 16, 5),
    Case(64, 4096, 1024, "int4", {"group_size": 128, "symmetric": False}),
    Case(200, 400, 136),
    Case(130, 640, 200, "int4", {"group_size": 64, "symmetric": False}),
)
BOTH = (
    Case(130, 272, 200, "int8", x_dtype="int8"),
    Case(5, 16, 3, "int8", x_dtype="int8"),
    Case(129, 528, 129, "int8", x_dtype="int8", activation=None, plain=True),
    Case(200, 272, 136, "float8_e4m3fn", x_dtype="float8_e4m3fn"),
    Case(33, 144, 65, "float8_e5m2", x_dtype="float8_e5m2", activation="relu"),
    Case(140, 256, 137, "float8_e4m3fn", {"group_size": 128}, "float8_e4m3fn"),
    Case(70, 640, 72, "int8", {"group_size": 128}, "int8"),
)


# --- on any CPU -----------------------------------------------------------------------------------


@parametrize("case", (*WEIGHTS, *BOTH), quick=(6, 7, 15), ids=str)
def test_lowers_to_one_kernel(case, built):
    with dispatch.assume(ADA):
        target = "jaxfused_quantized_matmul" + ("_both" if case in BOTH else "")
        assert kernels(case.run, *jax.eval_shape(case.operands)) == [target]


def test_of_vmapped_rows_is_one_kernel(built):
    case = Case(3, 256, 64)
    x, q, bias, residual = jax.eval_shape(case.operands)
    run = jax.vmap(functools.partial(case.run), in_axes=(0, None, None, 0))
    stacked = (jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in (x, residual))
    x, residual = stacked
    with dispatch.assume(AMPERE):
        assert kernels(run, x, q, bias, residual) == ["jaxfused_quantized_matmul"]


def test_gradients_beside_the_kernel(built):
    case = Case(9, 256, 72, "int4", {"group_size": 64})
    x, q, bias, residual = jax.eval_shape(case.operands)

    def gradients(x, q, bias, residual):
        y, vjp = jax.vjp(lambda x, bias: case.run(x, q, bias, residual), x, bias)
        return vjp(y)

    with dispatch.assume(AMPERE):
        assert kernels(gradients, x, q, bias, residual) == [
            "jaxfused_quantized_matmul",
            "jaxfused_bias_activation_backward",
        ]


@pytest.mark.exhaustive
def test_gated_mlp_is_one_kernel_and_another(built):
    rule = jaxfused.QuantizationRule("", "int4", group_size=64, layout="columns")
    model = jaxfused.nnx.GatedMLP(
        128, 256, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation="cuda"
    )
    model = jaxfused.quantize_params(model, [rule])
    with dispatch.assume(AMPERE):
        found = kernels(model, jax.ShapeDtypeStruct((3, 128), jnp.bfloat16))
    assert found == ["jaxfused_quantized_matmul"] * 2


@pytest.mark.exhaustive
def test_a_module_quantises_its_inputs(built):
    rule = jaxfused.QuantizationRule("", "int8", input_dtype="int8", layout="columns")
    layer = jaxfused.nnx.Linear(
        128, 256, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation="cuda"
    )
    layer = jaxfused.quantize_params(layer, [rule])
    with dispatch.assume(AMPERE):
        found = kernels(layer, jax.ShapeDtypeStruct((3, 128), jnp.bfloat16))
    assert found == ["jaxfused_quantize_rows", "jaxfused_quantized_matmul_both"]


@pytest.mark.parametrize(("device", "implementation"), [(AMPERE, "cuda"), (H200, "pallas")])
def test_is_the_default_where_there_is_no_pallas_kernel(device, implementation, built):
    case = Case(9, 4096, 4096)
    run = functools.partial(case.run, implementation=None)
    with dispatch.assume(device):
        found = chosen(run, *jax.eval_shape(case.operands))
    assert found == {"quantized_matmul forward": implementation}


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        (Case(9, 264, 81), (HOPPER,)),
        (Case(9, 256, 80), (AMPERE,)),
        (Case(65, 4096, 4096), (AMPERE,)),
        (Case(9, 4096, 4096, x_dtype="int8"), (HOPPER, AMPERE)),
        (Case(300, 4096, 4096, x_dtype="int8"), (AMPERE,)),
    ],
)
def test_is_not_the_default_for_what_it_only_can(case, devices, built):
    run = functools.partial(case.run, implementation=None)
    for device in devices:
        with dispatch.assume(device):
            found = chosen(run, *jax.eval_shape(case.operands))
        assert found in ({f"quantized_matmul forward{of}": "xla"} for of in ("", " of both"))


@pytest.mark.parametrize(
    ("device", "case", "reason"),
    [
        (TURING, Case(9, 256, 80), "bfloat16 from compute capability 8.0 on, and this GPU has 7.5"),
        (
            AMPERE,
            Case(9, 256, 80, x_dtype="float32"),
            "x of bfloat16 and float16, and x is float32",
        ),
        (AMPERE, Case(9, 200, 80), "whole multiples of 16 bytes, and they have 200"),
        (
            AMPERE,
            Case(9, 256, 80, "int8", {"group_size": 16}),
            "groups of 32, 64 and multiples of 128, and they have 16",
        ),
        (
            AMPERE,
            Case(9, 256, 80, "float8_e4m3fn", x_dtype="float8_e4m3fn"),
            "float8 from compute capability 8.9 on, and this GPU has 8.0",
        ),
        (
            ADA,
            Case(9, 256, 80, "int8", {"symmetric": False}, "int8"),
            "symmetric weights, and they have zero points",
        ),
        (
            ADA,
            Case(9, 256, 80, "int8", {"group_size": 64}, "int8"),
            "or one for each 128 features of both, and these have 4 and 4 along 256",
        ),
        (ADA, Case(9, 200, 80, "int8", x_dtype="int8"), "multiples of 16 bytes, and they have 200"),
    ],
    ids=str,
)
def test_what_it_refuses(device, case, reason, built):
    with (
        dispatch.assume(device),
        pytest.raises(ValueError, match=f"'cuda' cannot run here: .*{reason}"),
    ):
        jax.eval_shape(case.run, *jax.eval_shape(case.operands))


@pytest.mark.parametrize(
    ("case", "built_for", "reason"),
    [
        (Case(9, 256, 80), ("75",), "code for compute capability 8.0 or later, .* built for 75;"),
        (Case(9, 256, 80, x_dtype="float16"), ("75",), None),
        (Case(9, 256, 80), ("80-real",), None),
        (
            Case(9, 256, 80, "float8_e4m3fn", x_dtype="float8_e4m3fn"),
            ("75-real", "80-real"),
            "code for compute capability 8.9 or later, .* built for 75-real, 80-real;",
        ),
    ],
    ids=str,
)
def test_code_for_earlier_gpus_lacks_what_they_cannot_do(
    case, built_for, reason, built, monkeypatch
):
    monkeypatch.setattr(cuda_library, "architectures", lambda: built_for)
    operands = jax.eval_shape(case.operands)
    with dispatch.assume(ADA):
        if reason is None:
            jax.eval_shape(case.run, *operands)
            return
        with pytest.raises(ValueError, match=f"'cuda' cannot run here: .*{reason}"):
            jax.eval_shape(case.run, *operands)


@pytest.mark.parametrize("device", [TURING, AMPERE])
@pytest.mark.parametrize("products", [1, 2])
@pytest.mark.parametrize("rows", [1, 9, 33, 64, 4096])
def test_configs_fit(device, products, rows):
    _, q, *_ = jax.eval_shape(Case(1, 4096, 1024, "int4", {"group_size": 128}).operands)
    configs = kernel.candidates(
        (rows, 4096),
        Packed(q.values, q.scale, None),
        products=products,
        compute_capability=device.compute_capability,
        multiprocessors=device.multiprocessors,
    )
    assert len(set(configs)) == len(configs) > 0
    # Shared memory of two stages: 8 warps' weights, scales and zero points, and rows of x of 320 bytes.
    most = {TURING: 64, AMPERE: 99}[device] * 1024
    for config in configs:
        of_x = config.sum_warps * config.row_tiles * 8 * 320
        assert 2 * (16384 + 2048 + 512 + of_x) <= most
        assert config.sum_warps * products <= 8


@pytest.mark.parametrize("device", [TURING, HOPPER])
def test_rows_lower_to_one_kernel(device, built):
    x = jax.ShapeDtypeStruct((2, 3, 100), jnp.bfloat16)
    with dispatch.assume(device):
        run = functools.partial(jaxfused.quantize_rows, implementation="cuda")
        assert kernels(lambda x: run(x).values, x) == ["jaxfused_quantize_rows"]
        expected = "pallas" if device is HOPPER else "cuda"
        x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
        found = chosen(lambda x: jaxfused.quantize_rows(x).values, x)
    assert found == {"quantize_rows forward": expected}


def test_weights_of_rows_are_refused():
    q = jaxfused.quantize(jnp.ones((256, 64)), layout="rows")
    with pytest.raises(ValueError, match=r"quantize\(w, layout='columns'\)"):
        jaxfused.quantized_matmul(jnp.ones((2, 256), "bfloat16"), q, implementation="cuda")


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_is_accurate_on_gpu(case):
    operands = case.operands()
    run = jax.jit(case.kernel)
    actual, again = run(*operands), run(*operands)
    x, q, bias, residual = operands
    plain = case.expected(x, q.dequantize(), bias, residual, x.dtype)
    with jax.enable_x64(True):
        wide = (np.asarray(q.dequantize(), np.float64), bias, residual)
        truth = case.expected(x.astype(jnp.float64), *wide, jnp.float64)
    for name, result in actual.items():
        np.testing.assert_array_equal(result, again[name])
        assert_accurate(name, result, plain[name].astype(result.dtype), truth[name])


@pytest.mark.gpu
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_of_both_is_accurate_on_gpu(case):
    if "float8" in case.x_dtype and dispatch.current_device().compute_capability < (8, 9):
        pytest.skip("the GPU does not multiply float8")
    x, q, bias, residual = case.operands()
    y = jax.jit(case.run)(x, q, bias, residual)
    factors = [np.asarray(a.dequantize(), np.float64) for a in (x, q)]
    plain = case.expected(
        *(jnp.asarray(a, jnp.bfloat16) for a in factors), bias, residual, jnp.bfloat16
    )
    with jax.enable_x64(True):
        truth = case.expected(*map(jnp.asarray, factors), bias, residual, jnp.float64)
    assert_accurate("y", y, plain["y"], truth["y"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", (*ACTIVATIONS, "leaky_relu(0.2)"))
def test_every_activation_on_gpu(name):
    test_is_accurate_on_gpu(Case(9, 256, 72, activation=name))
    test_of_both_is_accurate_on_gpu(Case(33, 144, 65, x_dtype="int8", activation=name))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_zero_and_nan_stay_where_they_are_on_gpu(dtype):
    case = Case(5, 256, 64, dtype, {} if dtype == "int8" else {"group_size": 128}, plain=True)
    x, q, *_ = case.operands()
    x = x.at[1].set(0).at[3, 7].set(jnp.nan)
    scale = q.scale.at[0, 3].set(jnp.nan).at[:, 5].set(0.0)
    q = jaxfused.QuantizedArray(q.values, scale, q.zero_point, q.axis, q.layout)
    y = jaxfused.quantized_matmul(x, q, implementation="cuda")
    expected = (np.arange(64)[None] == 3) | (np.arange(5)[:, None] == 3)
    np.testing.assert_array_equal(jnp.isnan(y), expected)
    np.testing.assert_array_equal(jnp.delete(y[1], 3), 0)
    np.testing.assert_array_equal(jnp.delete(y[:, 5], 3), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_is_the_same_number_on_gpu(dtype, x_dtype):
    bits = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (256, 1)).T
    # Column n has one nonzero entry, the byte n at feature n.
    values = jnp.where(jnp.eye(256, dtype=bool), bits, 0)
    values = jax.lax.bitcast_convert_type(values, jnp.dtype(dtype))
    q = jaxfused.QuantizedArray(values, jnp.ones((1, 256)), None, -2, "columns")
    y = jaxfused.quantized_matmul(
        jnp.ones((1, 256), x_dtype), q, out_dtype=jnp.float32, implementation="cuda"
    )
    np.testing.assert_array_equal(y[0], jnp.diagonal(values).astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(37, 768), (5, 4096), (9, 131), (6, 5003)], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
def test_rows_on_gpu(shape, dtype, x_dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[1], x[2, 3], x[3, 5], x[4] = 0, np.nan, np.inf, 2e-38
    x = jnp.asarray(x, x_dtype)
    q = jaxfused.quantize_rows(x, dtype, implementation="cuda")
    expected = jaxfused.quantize_rows(x, dtype, implementation="xla")
    np.testing.assert_allclose(q.scale, expected.scale, rtol=1e-6)
    np.testing.assert_array_equal(jnp.isnan(q.values), jnp.isnan(expected.values))
    # Half a unit in the last place, half of the smallest number, and the error of the division.
    relative, absolute = {
        "int8": (0.0, 0.5),
        "float8_e4m3fn": (2.0**-4, 2.0**-10),
        "float8_e5m2": (2.0**-3, 2.0**-17),
    }[dtype]
    finite = np.isfinite(q.scale[:, 0])
    values, scale, x = (np.asarray(a, np.float64)[finite] for a in (q.values, q.scale, x))
    units = x / scale
    error = np.abs(values - units)
    assert (error <= (absolute + relative * np.abs(units)) * (1 + 1e-5)).all()
    np.testing.assert_array_equal(np.asarray(q.values, np.float64)[~finite & (dtype == "int8")], 0)
