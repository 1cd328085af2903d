"""The derivative of an activation, saved in 8 bits instead of the preactivation."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.ops.fp8 import fp8_operands, fp8_xla, mlp_fp8
from pallas_kernels.gemm import fp8 as pallas_fp8
from pallas_kernels.gemm.matmul_config import MatmulConfig
from tests.support import fp8_judge, lowering
from tests.support.arrays import put
from tests.support.grids import parametrize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def normal(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [put(rng.normal(size=shape), dtype) for shape in shapes]


def operands():
    x, w1, b1, w2, b2 = normal(0, (48, 64), (64, 96), (96,), (96, 32), (32,))
    return x, w1 / 8, b1, w2 / 8, b2


def gradients(precision, activation="gelu_tanh", save="hidden", implementation=None):
    def loss(*operands):
        y = jaxfused.mlp(
            *operands,
            activation=activation,
            save=save,
            precision=precision,
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(y))

    return loss


def everything(loss, *more):
    return jax.jit(jax.value_and_grad(loss, tuple(range(5))))(*operands(), *more)


def relative(ours, truth):
    return np.linalg.norm(ours - truth) / np.linalg.norm(truth)


@parametrize("activation", [*mlp_fp8.SLOPES, "relu2"], quick=(1,))
def test_the_slope_makes_no_difference_that_float8_does_not(activation, monkeypatch):
    """Compared with the gradient that reads z, the error is smaller than z's own against float32."""
    by_slope = everything(gradients("fp8", activation))
    monkeypatch.setattr(mlp_fp8, "SLOPES", ())
    by_z = everything(gradients("fp8", activation))
    exact = everything(gradients(None, activation))
    chex.assert_trees_all_close(by_slope[0], by_z[0], rtol=2e-2)
    for ours, z, truth in zip(by_slope[1], by_z[1], exact[1], strict=True):
        assert relative(ours, truth) <= 1.1 * relative(z, truth)
        assert relative(ours, z) <= relative(z, truth)


@pytest.mark.parametrize("activation", mlp_fp8.SLOPES)
def test_steps_reach_as_far_as_a_derivative(activation):
    z = jnp.linspace(-12.0, 12.0, 4801)
    _, slope = fp8_xla.value_and_slope(activation, z)
    assert np.abs(np.round(slope * fp8_operands.SLOPE_STEPS)).max() <= 127


@parametrize("place", range(5), quick=(0, 3))
def test_a_nan_reaches_all_that_is_computed_from_it(place):
    spoilt = list(operands())
    spoilt[place] = spoilt[place].at[0].set(jnp.nan)
    loss = gradients("fp8")
    y, vjp = jax.vjp(lambda *a: jaxfused.mlp(*a, save="hidden", precision="fp8"), *spoilt)
    dx, dw1, db1, dw2, _ = vjp(jnp.ones_like(y))
    assert bool(jnp.isnan(loss(*spoilt)))
    if place < 3:
        for gradient in (dx, dw1, db1, dw2):
            assert bool(jnp.isnan(gradient).all())


@pytest.mark.parametrize("calls", [1, 3])
def test_delayed_scaling_of_the_hidden_layer(calls):
    x, w1, b1, w2, b2 = operands()
    state = jaxfused.Fp8State.zeros("mlp", calls)

    def loss(w1, state):
        return jnp.sum(jaxfused.mlp(x, w1, b1, w2, b2, save="hidden", precision=state))

    for _ in range(2):
        dw1, state = jax.grad(loss, (0, 1))(w1, state)
    h = jax.nn.gelu(x @ w1 + b1)
    np.testing.assert_allclose(state.history[2, 0], jnp.abs(h).max(), rtol=5e-2)
    chex.assert_tree_all_finite(dw1)


@parametrize(("rows", "columns"), [(72, 40), (144, 80)], quick=(0,))
def test_gradient_by_slope_in_the_interpreter(rows, columns, interpreted_hopper):
    dy, w2 = normal(1, (rows, 32), (columns, 32))
    dy, w2 = dy.astype(E5M2), w2.astype(E4M3)
    # Of the derivative's rows, the bytes behind the last column are not read.
    pitch = fp8_xla.padded(columns)
    slope = put(np.random.default_rng(2).integers(-14, 127, (rows, pitch)), jnp.int8)
    config = MatmulConfig(64, 64, 3, True, epilogue_columns=32)
    units = (jnp.full(1, 0.25), jnp.full(1, 0.5), jnp.full(1, 1 / fp8_operands.SLOPE_STEPS))
    keywords = dict(dtype=jnp.bfloat16, maximise=True)
    product = pallas_fp8.hidden_gradient_by_slope(dy, w2, units, slope, **keywords)
    found = product.run(multiprocessors=1, config=config)
    dz, largest = found["dz"], found["max_dz"]
    expected = fp8_xla.run(product)["dz"]
    wide = lambda a: np.asarray(a, np.float32)  # noqa: E731
    np.testing.assert_allclose(wide(dz), wide(expected), rtol=1e-2, atol=1e-4)
    np.testing.assert_array_equal(largest.max(axis=0), np.abs(wide(dz)).max(axis=1))


def test_the_reference_quantises_with_a_slope():
    """The bytes are those of the derivative, and the values those of the activation."""
    (z,) = normal(4, (16, 48))
    largest = fp8_xla.largest_activation("silu", z)[None]
    keywords = dict(dtype=E4M3, gated=False, straight=True, transposes=False, sums=False)
    values, _, _, _, slope = fp8_xla.quantize(
        [z], largest, activation="silu", slope_steps=fp8_operands.SLOPE_STEPS, **keywords
    )
    h, derivative = fp8_xla.value_and_slope("silu", z)
    plain, *_ = fp8_xla.quantize([h], largest, activation=None, **keywords)
    chex.assert_trees_all_equal(values, plain)
    np.testing.assert_allclose(slope / fp8_operands.SLOPE_STEPS, derivative, atol=0.5 / 112 + 1e-6)


def test_scales_of_a_layer_in_the_interpreter(interpreted_hopper):
    x, w = (a.astype(E4M3) for a in normal(3, (80, 64), (72, 64)))
    options = pallas_fp8.LayerOptions(None, jnp.bfloat16, jnp.bfloat16, False, None)
    launch = dict(multiprocessors=interpreted_hopper.multiprocessors)
    apart, together = ((jnp.full(1, 0.5), jnp.full(1, 0.75)), (jnp.full(1, 0.375),))
    ours, expected = (
        pallas_fp8.layer(x, w, scales, None, None, options).run(**launch)["y"]
        for scales in (apart, together)
    )
    np.testing.assert_array_equal(ours, expected)
    xla = fp8_xla.run(pallas_fp8.layer(x, w, apart, None, None, options))["y"]
    np.testing.assert_allclose(np.float32(ours), np.float32(xla), rtol=1e-2, atol=1e-4)


def gradient_of_mlp(save, x, w1, b1, w2):
    y = jaxfused.mlp(x, w1, b1, w2, save=save, precision="fp8")
    return jnp.sum(y.astype(jnp.float32))


def launched_by_gradient(save, hidden):
    shapes = [(256, 128), (128, hidden), (hidden,), (hidden, 128)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    gradient = jax.grad(partial(gradient_of_mlp, save), (0, 1, 2, 3))
    return set(lowering.kernels(gradient, *operands))


@pytest.mark.exhaustive
@pytest.mark.parametrize("hidden", [40, 48])
def test_a_kernel_reads_a_slope_of_any_pitch(hidden, hopper):
    """40 bytes a row are no multiple of 16; its copy is padded."""
    assert "fp8_hidden_gradient_by_slope" in launched_by_gradient("preactivation", hidden)


@pytest.mark.usefixtures("built_library")
@pytest.mark.parametrize("save", ["hidden", "preactivation", "inputs"])
def test_what_a_gradient_launches(save, hopper):
    launched = launched_by_gradient(save, 256)
    common = {"jaxfused_largest", "jaxfused_quantize", "fp8_layer", "fp8_weight_gradient"}
    by_slope = "fp8_hidden_gradient" if save == "inputs" else "fp8_hidden_gradient_by_slope"
    assert launched == common | {by_slope}


@pytest.mark.gpu
@parametrize("rows", [128, 1040, 4096], quick=())
@parametrize("activation", ["gelu_tanh", "gelu_erf", "quick_gelu", "silu", "relu"], quick=())
def test_gradients_by_slope_on_a_gpu(rows, activation):
    arrays = fp8_judge.operands(rows)
    ours, again, xla = (
        jax.jit(fp8_judge.mlp_and_gradients(activation, implementation))(*arrays)
        for implementation in (None, None, "xla")
    )
    chex.assert_trees_all_equal(ours, again)
    assert not fp8_judge.excess(ours, xla, fp8_judge.truth(activation, arrays))


@pytest.mark.gpu
@parametrize("rows", [80, 1040, 4096], quick=())
def test_kernels_on_a_gpu(rows):
    differences = fp8_judge.kernel_differences(rows)
    assert max(differences.values()) <= 1.0, differences
