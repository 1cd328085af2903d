"""Forms of fp8 that no GPU has run yet: the slope kept in place of z, and scales as scalars."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch, reference
from pallas_kernels.product import fp8 as pallas_fp8
from pallas_kernels.product.mainloop import MatmulConfig
from tests import lowering
from tests.grids import parametrize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def normal(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


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
    return jax.value_and_grad(loss, tuple(range(5)))(*operands(), *more)


def relative(ours, truth):
    return np.linalg.norm(ours - truth) / np.linalg.norm(truth)


@parametrize("activation", ["gelu_tanh", "relu2", "relu", "silu", "gelu_erf"], quick=(0,))
def test_the_slope_makes_no_difference_that_float8_does_not(activation, monkeypatch):
    """Nearer to the gradient that reads z than that is to float32."""
    by_slope = everything(gradients("fp8", activation))
    monkeypatch.setattr(dispatch, "UNMEASURED", frozenset({"fp8 slope"}))
    by_z = everything(gradients("fp8", activation))
    exact = everything(gradients(None, activation))
    chex.assert_trees_all_close(by_slope[0], by_z[0], rtol=2e-2)
    for ours, z, truth in zip(by_slope[1], by_z[1], exact[1], strict=True):
        assert relative(ours, truth) <= 1.1 * relative(z, truth)
        assert relative(ours, z) <= relative(z, truth)


def test_scales_as_scalars_change_no_bit(monkeypatch):
    monkeypatch.setattr(dispatch, "UNMEASURED", frozenset())
    ours = everything(gradients("fp8", save="preactivation"))
    monkeypatch.setattr(dispatch, "UNMEASURED", frozenset({"fp8 scalars"}))
    chex.assert_trees_all_equal(ours, everything(gradients("fp8", save="preactivation")))


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "silu", "relu"])
def test_steps_reach_as_far_as_a_derivative(activation):
    z = jnp.linspace(-12.0, 12.0, 4801)
    _, slope = reference.fp8.value_and_slope(activation, z)
    form = pallas_fp8.slope_format(activation, jnp.bfloat16)
    assert form.dtype == jnp.int8
    assert np.abs(np.round(slope * form.steps)).max() <= 127


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


@parametrize(
    ("rows", "columns", "activation"), [(72, 40, "gelu_tanh"), (144, 72, "relu2")], quick=(0,)
)
def test_kernels_in_the_interpreter(rows, columns, activation, interpreted_hopper):
    x, w, dy, w2 = normal(
        1, (rows, 64), (columns, 64), (rows, 32), (columns, 32), dtype=jnp.float32
    )
    x, w, dy, w2 = x.astype(E4M3), w.astype(E4M3), dy.astype(E5M2), w2.astype(E4M3)
    (bias,) = normal(2, (columns,))
    scales = (jnp.full(1, 0.25), jnp.full(1, 0.5))
    form = pallas_fp8.slope_format(activation, jnp.bfloat16)
    config = MatmulConfig(64, 64, 3, True, epilogue_columns=32)
    launch = dict(multiprocessors=1, config=config)
    keywords = dict(activation=activation, dtype=jnp.bfloat16, slope=form, maximise=True)
    ours = pallas_fp8.hidden_and_slope(x, w, scales, bias, **keywords, **launch)
    h, slope, _ = reference.fp8.hidden_and_slope(x, w, scales, bias, **keywords)
    wide = lambda a: np.asarray(a, np.float32)  # noqa: E731
    np.testing.assert_allclose(wide(ours[0]), wide(h), rtol=1e-2, atol=1e-4)
    step = 1 if form.dtype == jnp.int8 else 0.05
    np.testing.assert_allclose(wide(ours[1]), wide(slope), atol=step, rtol=1e-2)
    np.testing.assert_array_equal(ours[2], np.abs(wide(ours[0])).max(axis=1))
    units = (*scales, jnp.full(1, 1.0 / form.steps))
    keywords = dict(dtype=jnp.bfloat16, maximise=True)
    dz, largest = pallas_fp8.hidden_gradient_by_slope(dy, w2, units, slope, **keywords, **launch)
    expected, _ = reference.fp8.hidden_gradient_by_slope(dy, w2, units, slope, **keywords)
    np.testing.assert_allclose(wide(dz), wide(expected), rtol=1e-2, atol=1e-4)
    np.testing.assert_array_equal(largest, np.abs(wide(dz)).max(axis=1))


def test_scalars_of_a_layer_in_the_interpreter(interpreted_hopper):
    x, w = (a.astype(E4M3) for a in normal(3, (80, 64), (72, 64)))
    scales = (jnp.full(1, 0.3), jnp.full(1, 0.7))
    options = pallas_fp8.LayerOptions(None, jnp.bfloat16, jnp.bfloat16, False, None)
    launch = dict(multiprocessors=interpreted_hopper.multiprocessors)
    columns = jnp.full(72, scales[0][0] * scales[1][0])
    ours, expected = (
        pallas_fp8.layer(x, w, scale, None, None, options, **launch)[0]
        for scale in (scales, columns)
    )
    np.testing.assert_array_equal(ours, expected)


def gradient_of_mlp(x, w1, b1, w2):
    y = jaxfused.mlp(x, w1, b1, w2, save="hidden", precision="fp8")
    return jnp.sum(y.astype(jnp.float32))


SHAPES = [((256, 128), jnp.bfloat16), ((128, 256), jnp.bfloat16), ((256,), jnp.bfloat16)]
SHAPES += [((256, 128), jnp.bfloat16)]


@pytest.mark.parametrize("gate", [(), ("fp8 slope",), ("fp8 scalars",)])
def test_what_a_gradient_launches(gate, hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "UNMEASURED", frozenset(gate))
    shapes = [jax.ShapeDtypeStruct(*shape) for shape in SHAPES]
    launched = set(lowering.kernels(jax.grad(gradient_of_mlp, (0, 1, 2, 3)), *shapes))
    common = {"jaxfused_largest", "jaxfused_quantize", "fp8_layer", "fp8_weight_gradient"}
    by_slope = {"fp8_hidden_and_slope", "fp8_hidden_gradient_by_slope"}
    assert launched == common | ({"fp8_hidden_gradient"} if gate == ("fp8 slope",) else by_slope)


@pytest.mark.gpu
@parametrize("rows", [128, 1040, 4096], quick=())
@parametrize("activation", ["gelu_tanh", "relu2", "silu"], quick=())
def test_gradients_by_slope_on_a_gpu(rows, activation):
    x, w1, b1, w2, b2 = normal(4, (rows, 256), (256, 512), (512,), (512, 128), (128,))
    arrays = [a.astype(jnp.bfloat16) for a in (x, w1 / 16, b1, w2 / 16, b2)]

    def loss(implementation):
        return lambda *a: jnp.sum(
            jnp.sin(
                jaxfused.mlp(
                    *a,
                    activation=activation,
                    save="hidden",
                    precision="fp8",
                    implementation=implementation,
                ).astype(jnp.float32)
            )
        )

    ours, again, xla = (
        jax.jit(jax.value_and_grad(loss(i), tuple(range(5))))(*arrays) for i in (None, None, "xla")
    )
    chex.assert_trees_all_equal(ours, again)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
        assert relative(np.float32(a), np.float32(b)) <= 2e-2
