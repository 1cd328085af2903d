"""Kernels of float8 products, in Mosaic's interpreter and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.ops.fp8 import fp8_xla, mlp_fp8, quantize_cuda
from jaxfused.runtime.activation import ACTIVATIONS, BOUNDED_FROM_ABOVE, activate
from pallas_kernels.gemm import fp8 as pallas_fp8
from pallas_kernels.gemm.matmul_config import MatmulConfig
from tests.support import fp8_judge, lowering
from tests.support.arrays import put
from tests.support.grids import parametrize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def arrays(seed, *shapes, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def both_gradients(f, *operands):
    """Returns (value, gradients) of f(implementation, *operands) by the kernels and by XLA."""
    results = []
    for implementation in ("pallas", "xla"):

        def loss(*operands, implementation=implementation):
            return jnp.sum(jnp.sin(f(implementation, *operands).astype(jnp.float32)))

        everything = tuple(range(len(operands)))
        results.append(jax.jit(jax.value_and_grad(loss, everything))(*operands))
    return results


def assert_alike(ours, xla):
    """Asserts closeness up to the order of sums, which rounds some float8 to a neighbour."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b) + 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [80, 144])
def test_mlp_in_the_interpreter(rows, interpreted_hopper):
    x, w1, w2 = arrays(0, (rows, 64), (64, 96), (96, 48))
    b1, b2, residual = arrays(1, (96,), (48,), (rows, 48))

    def f(implementation, x, w1, b1, w2, b2, residual):
        return jaxfused.mlp(
            x,
            w1,
            b1,
            w2 / 8,
            b2,
            residual=residual,
            save="hidden",
            precision="fp8",
            implementation=implementation,
        )

    assert_alike(*both_gradients(f, x, w1 / 8, b1, w2, b2, residual))


@pytest.mark.exhaustive
def test_gated_mlp_in_the_interpreter(interpreted_hopper):
    x, w_gate, w_up, w_down = arrays(2, (80, 64), (64, 96), (64, 96), (96, 48))

    def f(implementation, x, w_gate, w_up, w_down):
        return jaxfused.gated_mlp(
            x, w_gate, w_up, w_down, precision="fp8", implementation=implementation
        )

    assert_alike(*both_gradients(f, x, w_gate / 8, w_up / 8, w_down / 8))


# `make test` runs the smallest case that uses one block.
@parametrize("activation", [None, "gelu_tanh"], quick=(0,))
@parametrize(("rows", "d", "f"), [(72, 64, 48), (37, 40, 24)], quick=(1,))
def test_linear_in_the_interpreter(rows, d, f, activation, interpreted_hopper):
    """Also where neither the features nor the rows are whole multiples of 16."""
    x, w, bias, residual = arrays(3, (2, rows, d), (d, f), (f,), (2, rows, f))

    def layer(implementation, x, w, bias, residual):
        return jaxfused.linear(
            x,
            w,
            bias,
            activation=activation,
            residual=residual,
            precision="fp8",
            implementation=implementation,
        )

    assert_alike(*both_gradients(layer, x, w / 8, bias, residual))


@pytest.mark.exhaustive
def test_qkv_projection_in_the_interpreter(interpreted_hopper):
    x, w, bias = arrays(4, (2, 40, 64), (64, 64), (64,))

    def f(implementation, x, w, bias):
        q, k, v = jaxfused.qkv_projection(
            x, w, bias, heads=2, key_heads=1, precision="fp8", implementation=implementation
        )
        return jnp.concatenate([q, k, v], axis=-2)

    assert_alike(*both_gradients(f, x, w / 8, bias))


@parametrize(("length", "steps"), [(384, 4), (640, 4), (256, 1), (512, 4)], quick=(1,))
def test_promoted_sums_in_the_interpreter(length, steps, interpreted_hopper):
    x, dy = arrays(5, (64, length), (80, length))
    x, dy = x.astype(E4M3), dy.astype(E5M2)
    scales = (jnp.full(1, 0.5), jnp.full(1, 1.75))
    product = pallas_fp8.weight_gradient(x, dy, scales, out_dtype=jnp.float32, promoted_steps=steps)
    config = MatmulConfig(64, 64, 3, False, epilogue_columns=32)
    ours = product.run(multiprocessors=interpreted_hopper.multiprocessors, config=config)["dw"]
    truth = (np.asarray(x, np.float64) @ np.asarray(dy, np.float64).T) * 0.875
    np.testing.assert_allclose(ours, truth, rtol=1e-4, atol=1e-3)


def test_maxima_of_rows_in_the_interpreter(interpreted_hopper):
    """Neither rows nor columns beyond the last one count."""
    x, w = arrays(6, (80, 64), (72, 64))
    x, w = x.astype(E4M3), w.astype(E4M3)
    bias = jnp.full(72, 3.0)
    for maximised in ("value", "magnitude"):
        options = pallas_fp8.LayerOptions(None, None, jnp.bfloat16, True, maximised)
        operands = (x, w, (jnp.ones(1), jnp.ones(1)), bias, None, options)
        product = pallas_fp8.layer(*operands)
        found = product.run(multiprocessors=interpreted_hopper.multiprocessors)
        xla = fp8_xla.run(product)
        np.testing.assert_array_equal(found["z"], xla["z"])
        np.testing.assert_array_equal(found["max_z"].max(axis=0), xla["max_z"][0])


# --- lowered --------------------------------------------------------------------------------------


def gradient_of_mlp(precision):
    def f(x, w1, b1, w2):
        y = jaxfused.mlp(x, w1, b1, w2, save="hidden", precision=precision)
        return jnp.sum(y.astype(jnp.float32))

    return jax.grad(f, (0, 1, 2, 3))


SHAPES = [(256, 128), (128, 256), (256,), (256, 128)]


@pytest.mark.usefixtures("built_library")
def test_what_a_gradient_launches(hopper):
    launched = lowering.kernels(gradient_of_mlp("fp8"), *arrays(0, *SHAPES))
    assert set(launched) == {
        "jaxfused_largest",
        "jaxfused_quantize",
        "fp8_layer",
        "fp8_hidden_gradient_by_slope",
        "fp8_weight_gradient",
    }


@pytest.mark.usefixtures("built_library")
def test_features_of_no_multiple_of_16_launch_the_same(hopper):
    """A matrix of 5776 x 3192 has 3192 = 199.5 * 16 features."""
    operands = arrays(0, (250, 136), (136, 264), (264,), (264, 136))
    launched = lowering.kernels(gradient_of_mlp("fp8"), *operands)
    expected = lowering.kernels(gradient_of_mlp("fp8"), *arrays(0, *SHAPES))
    assert set(launched) == set(expected)


@pytest.mark.usefixtures("built_library")
def test_delayed_scaling_reads_nothing_for_a_scale(hopper):
    state = jaxfused.Fp8State.zeros("mlp")
    launched = lowering.kernels(gradient_of_mlp(state), *arrays(0, *SHAPES))
    # That one pass checks that the hidden layer is finite, which the derivative's bytes cannot tell.
    assert "jaxfused_quantize" in launched and launched.count("jaxfused_largest") == 1


def test_widths_that_no_kernel_takes_are_left_to_xla(hopper):
    x, w = arrays(0, (64, 40), (40, 20))
    f = lambda x, w: jaxfused.linear(x, w, precision="fp8")  # noqa: E731
    assert "fp8_layer" not in lowering.kernels(f, x, w)
    with pytest.raises(ValueError, match="a multiple of 8 columns"):
        jaxfused.linear(x, w, precision="fp8", implementation="pallas")


@parametrize(
    ("m", "k", "n"),
    [(16384, 1024, 4096), (25216, 4096, 1024), (128, 768, 768), (80, 64, 96)],
    quick=(),
)
@parametrize("residual", [None, "float32"], quick=(1,))
def test_default_configs_fit_into_shared_memory(m, k, n, residual, hopper):
    shape = jax.ShapeDtypeStruct
    x, w, dy = (shape(s, d) for s, d in (((m, k), E4M3), ((n, k), E4M3), ((m, k), E5M2)))
    scale, vector = shape((1,), jnp.float32), shape((n,), jnp.float32)
    z = shape((m, n), jnp.bfloat16)

    def layer(x, w, scale, bias, residual=None):
        options = pallas_fp8.LayerOptions("gelu_tanh", jnp.float32, jnp.bfloat16, True, "value")
        product = pallas_fp8.layer(x, w, (scale, scale), bias, residual, options)
        config = pallas_fp8.candidates(product.work, 132)[0]
        return product.run(multiprocessors=132, config=config)

    others = [] if residual is None else [shape((m, n), jnp.float32)]
    assert lowering.kernels(layer, x, w, scale, vector, *others) == ["fp8_layer"]

    def gradient(dy, w, scale, z, up):
        options = dict(activation="silu", maximise=True)
        product = pallas_fp8.hidden_gradient(dy, w, (scale, scale), z, up, **options)
        config = pallas_fp8.hidden_candidates(product.work, 132)[0]
        return product.run(multiprocessors=132, config=config)

    assert lowering.kernels(gradient, dy, w, scale, z, z) == ["fp8_hidden_gradient"]


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@parametrize("out", [E4M3, E5M2], quick=())
@parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], quick=())
@parametrize("widths", [(80,), (208,), (48, 80, 16), (72,), (40, 16, 8)], quick=())
@parametrize("rows", [144, 1040, 149], quick=())
def test_quantised_bits_on_a_gpu(rows, widths, dtype, out):
    matrices = [3 * a for a in arrays(7, *((rows, width) for width in widths), dtype=dtype)]
    keywords = dict(
        dtype=out, activation=None, gated=False, straight=True, transposes=True, sums=True
    )
    for largest in (jnp.ones(1), jnp.linspace(1.0, 9.0, 264), put([jnp.inf])):
        for from_end in (False, True):
            ours = quantize_cuda.quantize(
                matrices, largest, observes=True, from_end=from_end, **keywords
            )
            expected = fp8_xla.quantize(matrices, largest, **keywords)
            for a, b in zip(ours[:3], expected[:3], strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
            np.testing.assert_allclose(ours[3], expected[3], rtol=1e-4, atol=1e-2)
            assert ours[5].max() == fp8_xla.largest_magnitude(*matrices)
    found = quantize_cuda.largest(matrices, 264)
    assert found.max() == fp8_xla.largest_magnitude(*matrices)


@pytest.mark.gpu
@parametrize("activation", ["gelu_tanh", "gelu_erf", "quick_gelu", "silu", "relu"], quick=())
@parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], quick=())
@parametrize(("rows", "width"), [(144, 208), (1040, 1024), (149, 72)], quick=())
def test_quantised_slope_on_a_gpu(rows, width, dtype, activation):
    """A byte differs by at most one, and only where the formula is halfway between two bytes."""
    (z,) = arrays(7, (rows, width), dtype=dtype)
    z = 3 * z
    largest = fp8_xla.largest_activation(activation, z.astype(jnp.float32))[None]
    keywords = dict(dtype=E4M3, activation=activation, gated=False, straight=True)
    keywords |= dict(transposes=True, sums=False, slope_steps=112.0)
    ours = quantize_cuda.quantize([z], largest, **keywords)
    expected = fp8_xla.quantize([z], largest, **keywords)
    values, transposed, expected_values = (
        np.asarray(a, np.float32) for a in (ours[0], ours[1], expected[0])
    )
    np.testing.assert_array_equal(transposed[:, :rows], values[:, :width].T)
    assert not transposed[:, rows:].any() and not values[:, width:].any()
    np.testing.assert_array_equal(ours[2], expected[2])
    np.testing.assert_allclose(values, expected_values, rtol=2**-3, atol=2**-9)
    assert np.mean(values != expected_values) < 2e-3
    off = np.abs(np.asarray(ours[4], np.int32) - np.asarray(expected[4], np.int32))
    assert off.max() <= 1 and off.mean() < 2e-3
    bounds = quantize_cuda.largest([z], 264, activation, BOUNDED_FROM_ABOVE.get(activation, 0.0))
    np.testing.assert_allclose(bounds.max(), largest[0], rtol=1e-5)


@pytest.mark.gpu
@parametrize("activation", [*ACTIVATIONS, "leaky_relu(0.2)"], quick=())
def test_quantised_activations_on_a_gpu(activation):
    """Columns and rows beyond the matrix are zeros, where an activation of 0 is not 0."""
    (z,) = arrays(7, (149, 72), dtype=jnp.bfloat16)
    largest = fp8_xla.largest_activation(activation, jnp.abs(3 * z).astype(jnp.float32))[None]
    keywords = dict(dtype=E4M3, activation=activation, gated=False, straight=True)
    keywords |= dict(transposes=True, sums=False)
    ours = quantize_cuda.quantize([3 * z], largest, observes=True, **keywords)
    expected = fp8_xla.quantize([3 * z], largest, **keywords)
    for a, b in zip(ours[:2], expected[:2], strict=True):
        a, b = (np.asarray(values, np.float32) for values in (a, b))
        np.testing.assert_allclose(a, b, rtol=2**-3, atol=2**-9)
        assert np.mean(a != b) < 2e-3
    exact = jnp.abs(activate(activation, (3 * z).astype(jnp.float32))).max()
    np.testing.assert_allclose(ours[5].max(), exact, rtol=1e-5)


@pytest.mark.gpu
@parametrize("rows", [128, 1040, 4096], quick=())
@parametrize("precision", ["fp8", "state"], quick=())
@parametrize("activation", ["gelu_tanh", "relu2"], quick=())
def test_gradients_on_a_gpu(rows, precision, activation, monkeypatch):
    monkeypatch.setattr(mlp_fp8, "SLOPES", ())
    precision = jaxfused.Fp8State(jnp.full((6, 4), 4.0)) if precision == "state" else precision
    operands = fp8_judge.operands(rows)
    ours, again, xla = (
        jax.jit(fp8_judge.mlp_and_gradients(activation, implementation, precision))(*operands)
        for implementation in (None, None, "xla")
    )
    for a, b in zip(ours, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert not fp8_judge.excess(ours, xla, fp8_judge.truth(activation, operands))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [384, 16384])
def test_promoted_sums_on_a_gpu(length):
    """The result is as exact as a bfloat16 product of the same values that returns bfloat16."""
    x, dy = arrays(10, (128, length), (256, length))
    x, dy = x.astype(E4M3), dy.astype(E5M2)
    ones = jnp.ones(1), jnp.ones(1)
    product = pallas_fp8.weight_gradient(x, dy, ones, out_dtype=jnp.float32)
    config = pallas_fp8.promoted_candidates(product.work, 132)[0]
    ours = product.run(multiprocessors=132, config=config)["dw"]
    truth = np.asarray(x, np.float64) @ np.asarray(dy, np.float64).T
    plain = x.astype(jnp.bfloat16) @ dy.astype(jnp.bfloat16).T
    error, allowed = (np.abs(np.asarray(a, np.float64) - truth).max() for a in (ours, plain))
    assert error <= 2 * allowed
