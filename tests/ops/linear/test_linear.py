import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.linear import bias_activation_cuda, cublaslt
from jaxfused.ops.linear.weight_gradient import sum_rows
from jaxfused.runtime import cuda_library
from jaxfused.runtime.activation import ACTIVATIONS, activate
from tests.cases.linear import CASES, KERNEL_CASES
from tests.cases.normal import normal
from tests.support.against_float64 import COTANGENTS, assert_values_and_gradients
from tests.support.choices import why_not
from tests.support.grids import parametrize
from tests.support.tensor_cores import product
from tests.support.transforms import assert_transforms


def plain_linear(x, w, bias, residual, activation):
    """Computes the layer in plain jax.numpy, with all arithmetic in x's dtype."""
    y = product(x, w.astype(x.dtype))
    y = y if bias is None else y + bias.astype(x.dtype)
    y = activate(activation, y)
    return y if residual is None else y + residual


@pytest.mark.parametrize("bias", [None, jnp.ones(50)], ids=["plain", "bias"])
def test_the_gradient_of_tied_weights_runs_on_a_cpu(bias):
    """XLA's CPU backend lacks a product of 16 bits into float32 with a transposed result."""
    x, embedding = jnp.ones((2, 8, 32), jnp.bfloat16), jnp.ones((50, 32))

    def loss(embedding):
        return jaxfused.linear(x, embedding.T, bias).astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(embedding), 16.0)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES]
    + [(case, dtype) for case in CASES[2:5] for dtype in ("bfloat16", "float16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    def ours(x, w, bias, residual):
        return jaxfused.linear(x, w, bias, activation=case.activation, residual=residual)

    def plain(x, w, bias, residual):
        return plain_linear(x, w, bias, residual, case.activation)

    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(ours, plain, *args)
    assert jax.eval_shape(ours, *args).dtype == dtype


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations_are_those_of_jax_nn(activation):
    x = jnp.linspace(-4.0, 4.0, 33)[:, None]
    stock: dict = {
        None: lambda x: x,
        "relu2": lambda x: jnp.where(x > 0, x * x, 0),
        "gelu_tanh": jax.nn.gelu,
        "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    }
    named = stock.get(activation) or getattr(jax.nn, activation)
    y = jaxfused.linear(x, jnp.ones((1, 1)), activation=activation)
    np.testing.assert_allclose(y, named(x), rtol=1e-6)


def test_gradient_of_a_float32_weight_keeps_the_float32_sums():
    x = jnp.ones((300, 1), jnp.bfloat16)
    dw = jax.grad(lambda w: jaxfused.linear(x, w, out_dtype=jnp.float32).sum())(jnp.ones((1, 1)))
    assert dw.dtype == jnp.float32
    # bfloat16 has 8 bits: beyond 256 it holds even numbers only.
    assert dw[0, 0] == 300.0
    x = x.at[0].set(2.0)
    dw = jax.grad(lambda w: jaxfused.linear(x, w, out_dtype=jnp.float32).sum())(jnp.ones((1, 1)))
    assert dw[0, 0] == 301.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_backward_keeps_the_preactivation_in_the_dtype_of_x(dtype):
    x, w = jnp.ones((6, 4), dtype), jnp.ones((4, 5), dtype)
    _, vjp = jax.vjp(lambda x, w: jaxfused.linear(x, w, activation="gelu_tanh"), x, w)
    kept = sorted((a.shape, a.dtype) for a in jax.tree.leaves(vjp))
    assert kept == [((4, 5), dtype), ((6, 4), dtype), ((6, 5), dtype)]


def test_out_dtype():
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    assert jaxfused.linear(x, w).dtype == jnp.bfloat16
    assert jaxfused.linear(x, w, residual=jnp.ones((2, 4))).dtype == jnp.float32
    y = jaxfused.linear(x, w, residual=jnp.ones((2, 4)), out_dtype=jnp.float16)
    assert y.dtype == jnp.float16


def test_transforms():
    case = CASES[2]
    x, w, bias, residual = case.arguments(jnp.float32)
    assert_transforms(
        lambda x, w, bias, residual: jaxfused.linear(
            x, w, bias, activation=case.activation, residual=residual
        ),
        x,
        w,
        bias,
        residual,
    )


def test_derivatives_of_both_orders_and_modes():
    with jax.enable_x64(True):
        args = jax.tree.map(lambda a: np.asarray(a, np.float64), CASES[2].arguments(jnp.float32))
        f = jax.jit(lambda *a: jaxfused.linear(*a[:3], activation="silu", residual=a[3]))
        check_grads(f, args, order=1, modes=["fwd"])
        check_grads(f, args, order=2, modes=["rev"])


def test_second_derivative_in_bfloat16():
    x, w = jnp.full((1, 2), 0.5, jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16)
    f = lambda x: jaxfused.linear(x, w, activation="relu2", implementation="xla").sum()  # noqa: E731
    hessian = jax.jacrev(jax.grad(f))(x).reshape(2, 2)
    np.testing.assert_array_equal(hessian.astype(jnp.float32), np.full((2, 2), 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones(())}, r"x has shape \(\)"),
        ({"x": jnp.ones((2, 3), jnp.int32)}, "x has dtype int32"),
        ({"w": jnp.ones((4, 5))}, r"w has shape \(4, 5\), but x has 3 features .*\(3, features\)"),
        ({"w": jnp.ones((3, 5, 1))}, r"w has shape \(3, 5, 1\)"),
        ({"bias": jnp.ones(4)}, r"bias has shape \(4,\), but w has 5 features .*\(5,\)"),
        ({"residual": jnp.ones((2, 4))}, r"residual has shape \(2, 4\).*\(2, 5\)"),
        ({"activation": "swish"}, "activation='swish' is not known"),
        ({"implementation": "triton"}, "'triton' was passed"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"linear: .*{message}"):
        jaxfused.linear(**({"x": jnp.ones((2, 3)), "w": jnp.ones((3, 5))} | change))


@pytest.mark.parametrize(
    ("implementation", "reason"), [("pallas", "a Hopper GPU"), ("cuda", "an NVIDIA GPU")]
)
def test_kernels_say_what_they_need(implementation, reason, monkeypatch):
    cpu = dispatch.Device("cpu", "cpu", None, 0)
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: cpu)
    x, w = jnp.ones((2, 3)), jnp.ones((3, 5))
    with pytest.raises(ValueError, match=f"linear: .* it needs {reason}"):
        jaxfused.linear(x, w, implementation=implementation)
    with pytest.raises(ValueError, match=f"mlp: .* it needs {reason}"):
        jaxfused.mlp(x, w, None, w.T, implementation=implementation)


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [
        (None, True),
        ("highest", False),
        ("tensorfloat32", True),
        (jax.lax.Precision.HIGHEST, False),
        (("default", "float32"), False),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, True),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, False),
        ("TF32_TF32_F32", True),
        ("F32_F32_F32", False),
    ],
)
def test_float32_is_multiplied_as_tf32_only_where_precision_allows_it(hopper, precision, allowed):
    x, w = jnp.ones((16, 16)), jnp.ones((16, 16))

    def why_not_pallas():
        options = dict(activation="relu", precision=precision, implementation="pallas")
        return why_not(lambda x, w: jaxfused.linear(x, w, **options), x, w)

    reason = why_not_pallas()
    assert reason is None if allowed else "as tf32" in reason
    for default in ("float32", "F32_F32_F32"):
        with jax.default_matmul_precision(default):
            assert (why_not_pallas() is None) == (allowed and precision is not None)


# --- kernels --------------------------------------------------------------------------------------


def check_kernel(case, dtype, implementation, cotangents=COTANGENTS):
    def ours(x, w, bias, residual):
        return jaxfused.linear(
            x,
            w,
            bias,
            activation=case.activation,
            residual=residual,
            implementation=implementation,
        )

    def plain(x, w, bias, residual):
        return plain_linear(x, w, bias, residual, case.activation)

    assert_values_and_gradients(
        ours, plain, *case.arguments(jnp.dtype(dtype)), cotangents=cotangents
    )


KERNEL_WAYS = (
    *((case, "bfloat16") for case in KERNEL_CASES),
    (KERNEL_CASES[0], "float16"),
    (KERNEL_CASES[0], "float32"),
)
each_kernel_case = pytest.mark.parametrize(("case", "dtype"), KERNEL_WAYS, ids=str)


# `make test` runs float32 with a residual. test_mlp.py has several tiles, the last of them partial.
@pytest.mark.usefixtures("interpreted_hopper")
@parametrize(("case", "dtype"), KERNEL_WAYS, quick=(5,))
def test_pallas_accurate_in_the_interpreter(case, dtype):
    check_kernel(case, dtype, "pallas", cotangents=1)


@pytest.mark.usefixtures("interpreted_hopper")
@parametrize("axes", [(0, None, None), (0, 0, 0)], quick=(0,))
def test_pallas_vmap_in_the_interpreter(axes):
    """Shared weights have a gradient from one product; else each batch entry has its own weights."""
    case = KERNEL_CASES[0]
    x, w, bias, _ = case.arguments(jnp.bfloat16)

    def gradients(x, w, bias, implementation):
        def loss(x, w, bias):
            y = jaxfused.linear(x, w, bias, activation="silu", implementation=implementation)
            return jnp.sum(y.astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, w, bias)

    batch = jax.tree.map(lambda a: jnp.stack([a, -a]), (x, w, bias))
    args = [b if axis == 0 else a for a, b, axis in zip((x, w, bias), batch, axes, strict=True)]
    pallas, xla = (
        jax.jit(jax.vmap(functools.partial(gradients, implementation=name), in_axes=axes))(*args)
        for name in ("pallas", "xla")
    )
    chex.assert_trees_all_close(pallas, xla, rtol=0.02, atol=0.1)


def stand_in_forward(
    product, up, bias, up_bias, residual, *, activation, out_dtype, save_preactivation
):
    assert product.ndim == 2 and up is up_bias is None
    assert residual is None or residual.dtype == out_dtype
    z = product if bias is None else (product + bias.astype(jnp.float32)).astype(product.dtype)
    y = activate(activation, z.astype(jnp.float32))
    y = y if residual is None else y + residual
    return y.astype(out_dtype), z if save_preactivation else None, None


@pytest.fixture
def gradient_calls(hopper, monkeypatch):
    """Replaces the kernels of implementation "cuda" by jax.numpy, and records the backward calls."""
    noted = []

    def backward(dy, z, up_z, *, activation, want_y, want_sums):
        assert dy.ndim == 2 and dy.dtype in (z.dtype, jnp.float32)
        assert up_z is None and not want_y
        noted.append(activation)
        _, vjp = jax.vjp(functools.partial(activate, activation), z.astype(jnp.float32))
        (dz,) = vjp(dy.astype(jnp.float32))
        return dz.astype(z.dtype), None, None, jnp.sum(dz, axis=0)[None] if want_sums else None

    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cublaslt, "why_unavailable", lambda: "there is none here")
    monkeypatch.setattr(bias_activation_cuda, "forward", stand_in_forward)
    monkeypatch.setattr(bias_activation_cuda, "backward", backward)
    return noted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", (*CASES[1:3], CASES[4], CASES[6], KERNEL_CASES[3]), ids=str)
def test_cuda_around_its_kernels(gradient_calls, case, dtype):
    check_kernel(case, dtype, "cuda")
    assert set(gradient_calls) == {case.activation} - {None}


@pytest.mark.parametrize("with_bias", [False, True])
def test_cuda_transforms(gradient_calls, with_bias):
    assert_transforms(
        lambda x, w, bias: jaxfused.linear(
            x, w, bias if with_bias else None, activation="silu", implementation="cuda"
        ),
        *CASES[2].arguments(jnp.float32)[:3],
    )
    assert gradient_calls


def test_cuda_gradient_of_a_result_of_another_dtype(gradient_calls):
    x, w, bias, _ = CASES[2].arguments(jnp.bfloat16)

    def dbias(implementation):
        options = dict(activation="silu", out_dtype=jnp.float16, implementation=implementation)
        return jax.grad(lambda b: jaxfused.linear(x, w, b, **options).sum().astype(float))(bias)

    np.testing.assert_array_equal(dbias("cuda"), dbias("xla"))
    assert gradient_calls == ["silu"]


@pytest.mark.gpu
@each_kernel_case
def test_pallas_accurate_on_gpu(case, dtype):
    check_kernel(case, dtype, "pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", (*CASES, *KERNEL_CASES), ids=str)
def test_cuda_accurate_on_gpu(case, dtype):
    check_kernel(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (2, 700, 1024)], ids=str)
def test_sums_of_rows_are_those_of_float32(shape, dtype):
    dy = normal(np.random.default_rng(0), jnp.dtype(dtype), *shape)
    sums = jax.jit(sum_rows, static_argnums=1)(dy, jnp.float32)
    expected = np.asarray(dy, np.float64).sum(axis=tuple(range(len(shape) - 1)))
    chex.assert_trees_all_close(sums, expected.astype(np.float32), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows, width", [(1, 215), (4, 271), (28, 512)])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradients_have_their_operands_dtypes(implementation, rows, width):
    """This holds for every implementation that the sizes select."""

    def loss(x, w, b):
        h = jaxfused.linear(x, w, b, activation="silu", implementation=implementation)
        h = h + jaxfused.mlp(x, w, b, w.T, b[:width], implementation=implementation) @ w
        return h @ w.T + jaxfused.gated_mlp(x, w, w, w.T, implementation=implementation)

    def gradients(x, w, b):
        y, vjp = jax.vjp(loss, x, w, b)
        return vjp(y)

    operands = (
        jax.ShapeDtypeStruct((rows, width), "bfloat16"),
        jax.ShapeDtypeStruct((width, 2 * width), "bfloat16"),
        jax.ShapeDtypeStruct((2 * width,), "bfloat16"),
    )
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)):
        chex.assert_trees_all_equal_shapes_and_dtypes(
            jax.eval_shape(gradients, *operands), operands
        )
