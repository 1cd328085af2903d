"""precision="fp8": linear, mlp, gated_mlp and qkv_projection in float8, compared with float64."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused.nnx.fp8 import Fp8History
from jaxfused.ops.fp8 import fp8_xla
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.tolerances import assert_accurate

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: np.float32(448.0), E5M2: np.float32(57344.0)}


def normal(seed, shape, dtype=jnp.float32, scale=1.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def dequantised(x, dtype) -> np.ndarray:
    """Returns the float64 values of a matrix after rounding to float8."""
    x = np.asarray(x, np.float32)
    scale = np.maximum(np.abs(x).max() / LARGEST[dtype], np.finfo(np.float32).tiny)
    inverse = np.float32(1.0) / scale
    values = np.clip(x * inverse, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    return values.astype(np.float64) * np.float64(scale)


def as_bfloat16(*arrays):
    """Returns quantised values in bfloat16, which differ from float8 and scale by the last bits."""
    return [put(array, jnp.float32).astype(jnp.bfloat16) for array in arrays]


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(0, 1))
def test_linear_is_the_product_of_the_quantised_values(dtype):
    x, w = normal(0, (3, 24, 48), dtype), normal(1, (48, 32))
    bias, dy = normal(2, (32,)), normal(3, (3, 24, 32), dtype)
    y, vjp = jax.vjp(lambda *a: jaxfused.linear(*a, precision="fp8"), x, w, bias)
    dx, dw, dbias = vjp(dy)
    xq, wq, dyq = dequantised(x, E4M3), dequantised(w, E4M3), dequantised(dy, E5M2)
    flat_x, flat_dy = xq.reshape(-1, 48), dyq.reshape(-1, 32)
    x16, w16, dy16 = as_bfloat16(xq, wq, dyq)
    plain_y = jnp.matmul(x16, w16) + bias.astype(jnp.bfloat16)
    assert_accurate("y", y, plain_y.astype(dtype), xq @ wq + np.asarray(bias, np.float64))
    assert_accurate("dx", dx, (dy16 @ w16.T).astype(dtype), dyq @ wq.T)
    plain_dw = x16.reshape(-1, 48).T @ dy16.reshape(-1, 32)
    assert_accurate("dw", dw, plain_dw.astype(jnp.float32), flat_x.T @ flat_dy)
    sums = np.asarray(dy, np.float64).reshape(-1, 32).sum(0)
    np.testing.assert_allclose(dbias, sums, rtol=2e-2, atol=2e-2)


def test_mlp_is_made_of_the_quantised_values():
    """A float64 MLP that quantises each product's operands, straight through, gives the same results."""
    x, w1, b1 = normal(0, (64, 32)), normal(1, (32, 48), scale=0.2), normal(2, (48,))
    w2, b2, dy = normal(3, (48, 16), scale=0.2), normal(4, (16,)), normal(5, (64, 16))
    f = lambda *a: jaxfused.mlp(*a, activation="silu", precision="fp8", save="inputs")  # noqa: E731
    y, vjp = jax.vjp(f, x, w1, b1, w2, b2)
    dx, dw1, db1, dw2, db2 = vjp(dy)
    xq, w1q, w2q = (dequantised(a, E4M3) for a in (x, w1, w2))
    z = (xq @ w1q + np.asarray(b1, np.float64)).astype(np.float32)
    hq = dequantised(jax.nn.silu(z), E4M3)
    np.testing.assert_allclose(y, hq @ w2q + np.asarray(b2), rtol=1e-2, atol=2e-2)
    dyq = dequantised(dy, E5M2)
    gate = 1 / (1 + np.exp(-z.astype(np.float64)))
    dz = dyq @ w2q.T * gate * (1 + z * (1 - gate))
    dzq = dequantised(dz, E5M2)
    for name, ours, truth in (
        ("dx", dx, dzq @ w1q.T),
        ("dw1", dw1, xq.T @ dzq),
        ("db1", db1, dz.sum(0)),
        ("dw2", dw2, hq.T @ dyq),
        ("db2", db2, np.asarray(dy, np.float64).sum(0)),
    ):
        # A value halfway between two float8 may round either way if sums have another order.
        error = np.linalg.norm(ours - truth) / np.linalg.norm(truth)
        assert error < 5e-3, f"{name}: {error}"


def mlp_operands(seed=0):
    return (
        normal(seed, (40, 32)),
        normal(seed + 1, (32, 64), scale=0.2),
        normal(seed + 2, (64,)),
        normal(seed + 3, (64, 32), scale=0.2),
        normal(seed + 4, (32,)),
    )


def gradients(f, *operands):
    def loss(*operands):
        return jnp.sum(jnp.sin(f(*operands)))

    return jax.jit(jax.value_and_grad(loss, tuple(range(len(operands)))))(*operands)


@pytest.mark.parametrize(
    ("save", "activation"), [("hidden", "relu2"), ("inputs", "relu2"), ("hidden", "silu")]
)
def test_what_is_saved_changes_no_bit(save, activation):
    """Only the derivative in 8 bits changes bits; relu2 and "inputs" do not have it."""

    def f(save):
        return lambda x, w1, b1, w2, b2: jaxfused.mlp(
            x, w1, b1, w2, b2, activation=activation, residual=x, precision="fp8", save=save
        )

    chex.assert_trees_all_equal(
        gradients(f(save), *mlp_operands()), gradients(f("preactivation"), *mlp_operands())
    )


@pytest.mark.parametrize("save", ["hidden", "preactivation", "inputs"])
def test_gated_mlp_is_near_float32(save):
    x, w_gate, _, w_down, b_down = mlp_operands()
    w_up = normal(9, w_gate.shape, scale=0.2)

    def f(precision):
        return lambda *a: jaxfused.gated_mlp(
            *a[:4], b_down=a[4], precision=precision, save=save if precision else "hidden"
        )

    operands = (x, w_gate, w_up, w_down, b_down)
    for ours, exact in zip(
        gradients(f("fp8"), *operands)[1], gradients(f(None), *operands)[1], strict=True
    ):
        assert np.linalg.norm(ours - exact) < 0.15 * np.linalg.norm(exact)


def test_stacked_gate_is_two_matrices():
    x, w_gate, _, w_down, _ = mlp_operands()
    w_up = normal(9, w_gate.shape, scale=0.2)
    apart = jaxfused.gated_mlp(x, w_gate, w_up, w_down, precision="fp8")
    stacked = jnp.concatenate([w_gate, w_up], axis=1)
    chex.assert_trees_all_equal(
        jaxfused.gated_mlp(x, stacked, None, w_down, precision="fp8"), apart
    )


def test_qkv_projection_is_near_float32():
    x, w, bias = normal(0, (2, 12, 32)), normal(1, (32, 64), scale=0.2), normal(2, (64,))
    scale, (cos, sin) = jnp.ones(8), jaxfused.rope_tables(jnp.arange(12), 8)

    def f(precision):
        return lambda x, w, bias: jnp.concatenate(
            jaxfused.qkv_projection(
                x,
                w,
                bias,
                heads=4,
                key_heads=2,
                q_scale=scale,
                k_scale=scale,
                cos=cos,
                sin=sin,
                precision=precision,
            ),
            axis=-2,
        )

    for ours, exact in zip(
        gradients(f("fp8"), x, w, bias)[1], gradients(f(None), x, w, bias)[1], strict=True
    ):
        assert np.linalg.norm(ours - exact) < 0.15 * np.linalg.norm(exact)


# --- numbers that are not ordinary ----------------------------------------------------------------


def test_zeros_stay_zeros():
    operands = tuple(jnp.zeros_like(a) for a in mlp_operands())
    f = lambda *a: jaxfused.mlp(*a, precision="fp8")  # noqa: E731
    y, vjp = jax.vjp(f, *operands)
    chex.assert_trees_all_equal(y, jnp.zeros_like(y))
    for gradient in vjp(jnp.zeros_like(y)):
        chex.assert_trees_all_equal(gradient, jnp.zeros_like(gradient))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_largest_value_saturates_and_tiny_ones_vanish(dtype):
    # Half of the largest number, because the last bit of a product may exceed the range.
    big = float(jnp.finfo(dtype).max) / 2
    x = jnp.zeros((16, 16), dtype).at[0, 0].set(big).at[1, 1].set(-big).at[2, 2].set(1e-4)
    y = jaxfused.linear(x, jnp.eye(16), precision="fp8", out_dtype=jnp.float32)
    np.testing.assert_allclose(y[0, 0], big, rtol=1e-3)
    np.testing.assert_allclose(y[1, 1], -big, rtol=1e-3)
    assert y[2, 2] == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["x", "w", "dy"])
def test_what_is_not_finite_makes_all_of_the_product_nan(bad, place):
    x, w, dy = normal(0, (16, 16)), normal(1, (16, 16)), normal(2, (16, 16))
    spoilt = {"x": x, "w": w, "dy": dy}
    spoilt[place] = spoilt[place].at[3, 5].set(bad)
    f = lambda x, w: jaxfused.linear(x, w, precision="fp8")  # noqa: E731
    y, vjp = jax.vjp(f, spoilt["x"], spoilt["w"])
    dx, dw = vjp(spoilt["dy"])
    for result, reads in ((y, "xw"), (dx, ("w", "dy")), (dw, ("x", "dy"))):
        expected = place in reads
        assert bool(jnp.isnan(result).all()) == expected
        assert bool(jnp.isnan(result).any()) == expected


def test_the_largest_magnitude_keeps_nan():
    x = put([1.0, -3.0, 2.0])
    for dtype in ("float32", "bfloat16", "float16"):
        assert fp8_xla.largest_magnitude(x.astype(dtype)) == 3.0
        spoilt = x.astype(dtype).at[1].set(jnp.nan)
        assert np.isnan(fp8_xla.largest_magnitude(spoilt, x))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_no_elements(shape):
    x, w = jnp.zeros(shape), jnp.ones((shape[1], 8))
    y, vjp = jax.vjp(lambda x, w: jaxfused.linear(x, w, precision="fp8"), x, w)
    chex.assert_trees_all_equal(y, jnp.zeros((shape[0], 8)))
    assert all(bool((g == 0).all()) for g in vjp(y))
    q, k, v = jaxfused.qkv_projection(
        x, jnp.ones((shape[1], 16)), heads=2, key_heads=1, precision="fp8"
    )
    chex.assert_trees_all_equal((q, k, v), tuple(jnp.zeros((shape[0], n, 4)) for n in (2, 1, 1)))


# --- transformations ------------------------------------------------------------------------------


def test_each_entry_of_a_batch_has_its_own_scale():
    x, w = normal(0, (3, 16, 32)) * put([1.0, 1e3, 1e-3])[:, None, None], normal(1, (32, 16))
    f = lambda x: jaxfused.linear(x, w, activation="gelu_tanh", precision="fp8")  # noqa: E731
    one = jax.jit(jax.value_and_grad(lambda x: f(x).sum()))
    batched = jax.jit(jax.vmap(one))(x)
    one_by_one = [one(entry) for entry in x]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    chex.assert_trees_all_close(batched, stacked, rtol=1e-6)


def test_checkpoint_and_scan():
    x, w1, b1, w2, b2 = mlp_operands()
    layer = lambda x: jaxfused.mlp(x, w1, b1, w2, b2, residual=x, precision="fp8")  # noqa: E731

    def loss(x, layer):
        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0].sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = gradient(x, layer), gradient(x, jax.checkpoint(layer))
    chex.assert_trees_all_close(again, plain, rtol=1e-3, atol=1e-4)


def test_a_step_is_traced_once():
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(x, w):
        return jax.grad(lambda w: jaxfused.linear(x, w, precision="fp8").sum())(w)

    for seed in range(3):
        step(normal(seed, (16, 32)), normal(seed, (32, 16)))


# --- modules --------------------------------------------------------------------------------------


def test_modules_of_nnx():
    x = normal(0, (2, 6, 32))
    for precision in (None, "fp8"):
        options = dict(rngs=nnx.Rngs(0), precision=precision)
        layers = (
            jaxfused.nnx.Linear(32, 32, **options),
            jaxfused.nnx.MLP(32, 64, **options),
            jaxfused.nnx.GatedMLP(32, 64, **options),
            jaxfused.nnx.TransformerBlock(32, num_heads=4, **options),
            jaxfused.nnx.MultiHeadAttention(4, 32, decode=False, **options),
        )
        results = [nnx.jit(lambda layer, x: layer(x))(layer, x) for layer in layers]
        if precision is None:
            exact = results
    for ours, truth in zip(results, exact, strict=True):
        assert not bool((ours == truth).all())
        assert np.linalg.norm(ours - truth) < 0.1 * np.linalg.norm(truth)


@pytest.mark.exhaustive
def test_modules_of_linen():
    x = normal(0, (2, 6, 32))
    layers = {
        jaxfused.linen.Dense: (32,),
        jaxfused.linen.MLP: (64,),
        jaxfused.linen.GatedMLP: (64,),
        jaxfused.linen.MultiHeadDotProductAttention: (4,),
    }
    for module, arguments in layers.items():
        plain, ours = (module(*arguments, precision=precision) for precision in (None, "fp8"))
        variables = jax.jit(plain.init)(jax.random.key(0), x)
        exact, result = jax.jit(plain.apply)(variables, x), jax.jit(ours.apply)(variables, x)
        assert not bool((result == exact).all())
        assert np.linalg.norm(result - exact) < 0.1 * np.linalg.norm(exact)


def test_a_module_of_both_apis_is_the_operator():
    x, w1, b1, w2, b2 = mlp_operands()
    layer = jaxfused.linen.MLP(64, precision="fp8")
    params = {"up": {"kernel": w1, "bias": b1}, "down": {"kernel": w2, "bias": b2}}
    expected = jaxfused.mlp(x, w1, b1, w2, b2, precision="fp8")
    chex.assert_trees_all_equal(layer.apply({"params": params}, x), expected)


@pytest.mark.exhaustive
def test_the_block_of_linen_trains():
    x = normal(0, (2, 6, 32))
    block = jaxfused.linen.TransformerBlock(num_heads=4, precision="fp8")
    variables = jax.jit(block.init)(jax.random.key(0), x)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(block.apply(v, x) ** 2)))(variables)
    chex.assert_tree_all_finite(gradient)
    assert isinstance(block, nn.Module)


# --- delayed scaling ------------------------------------------------------------------------------


def test_the_history_rolls():
    state, w = jaxfused.Fp8State.zeros("linear", calls=3), jnp.full((16, 16), 0.5)
    f = lambda x, w, state: jaxfused.linear(x, w, precision=state).sum()  # noqa: E731
    step = jax.jit(jax.grad(f, (1, 2)))
    for largest in (2.0, 5.0, 3.0, 1.0):
        dw, state = step(jnp.full((16, 16), largest), w, state)
    np.testing.assert_array_equal(state.history[0], [1.0, 3.0, 5.0])
    np.testing.assert_array_equal(state.history[1:], [[0.5] * 3, [1.0] * 3])
    np.testing.assert_allclose(dw, 16.0, rtol=2e-2)


def test_what_is_larger_than_its_history_saturates_once():
    state = jaxfused.Fp8State(put([[2.0], [1.0], [1.0]]))
    f = lambda x, state: jaxfused.linear(x, jnp.eye(16), precision=state)  # noqa: E731
    x = jnp.full((16, 16), 6.0)
    y, vjp = jax.vjp(f, x, state)
    np.testing.assert_allclose(y, 2.0, rtol=1e-5)
    _, state = vjp(jnp.ones_like(y))
    np.testing.assert_allclose(f(x, state), 6.0, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_was_not_finite_is_not_remembered(bad):
    """A skipped step whose gradients overflow does not spoil later ones."""
    state = jaxfused.Fp8State(put([[bad, 2.0], [1.0, 1.0], [bad, bad]]))
    x = jnp.ones((16, 16))
    y, vjp = jax.vjp(lambda x, s: jaxfused.linear(x, jnp.eye(16), precision=s), x, state)
    np.testing.assert_allclose(y, 1.0, rtol=1e-5)
    dx, state = vjp(jnp.full_like(y, 0.5))
    np.testing.assert_allclose(dx, 0.5, rtol=1e-5)
    np.testing.assert_array_equal(state.history[:, 0], [1.0, 1.0, 0.5])


@pytest.mark.parametrize("operator", ["mlp", "gated_mlp", "qkv_projection"])
def test_a_settled_history_is_current_scaling(operator):
    x, w1, b1, w2, _ = mlp_operands()
    calls = {
        "mlp": lambda x, w1, p: jaxfused.mlp(x, w1, b1, w2, precision=p, save="hidden"),
        "gated_mlp": lambda x, w1, p: jaxfused.gated_mlp(x, w1, w1[::-1], w2, precision=p),
        "qkv_projection": lambda x, w1, p: jnp.concatenate(
            jaxfused.qkv_projection(x, w1, heads=4, precision=p, key_heads=2), axis=-2
        ),
    }

    def loss(x, w1, precision):
        return jnp.sum(jnp.sin(calls[operator](x, w1, precision)))

    state = jaxfused.Fp8State.zeros(operator)
    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    for _ in range(5):
        (*gradients, state) = step(x, w1, state)
    now = jax.jit(jax.grad(lambda x, w1: loss(x, w1, "fp8"), (0, 1)))(x, w1)
    for ours, truth in zip(gradients, now, strict=True):
        assert np.linalg.norm(ours - truth) < 5e-3 * np.linalg.norm(truth)


@pytest.mark.exhaustive
def test_modules_of_nnx_remember():
    x = normal(0, (2, 6, 32))
    block = jaxfused.nnx.TransformerBlock(
        32, num_heads=4, precision="fp8_delayed", rngs=nnx.Rngs(0)
    )
    wrt = nnx.DiffState(0, (nnx.Param, Fp8History))
    step = nnx.jit(nnx.grad(lambda m: jnp.sum(jnp.sin(m(x))), argnums=wrt))
    for _ in range(3):
        gradients = step(block)
        nnx.update(block, nnx.filter_state(gradients, Fp8History))
    histories = jax.tree.leaves(nnx.state(block, Fp8History))
    assert sorted(h.shape for h in histories) == [(3, 16), (3, 16), (6, 16)]
    assert all(bool((h[:, 0] > 0).all()) for h in histories)
    now = jaxfused.nnx.TransformerBlock(32, num_heads=4, precision="fp8", rngs=nnx.Rngs(0))
    # The first calls used other scales and remembered other magnitudes, so roundings differ.
    expected, result = (nnx.jit(lambda m: m(x))(m) for m in (now, block))
    assert np.linalg.norm(result - expected) < 5e-2 * np.linalg.norm(expected)


@pytest.mark.exhaustive
def test_modules_of_linen_remember():
    x = normal(0, (2, 6, 32))
    block = jaxfused.linen.TransformerBlock(num_heads=4, precision="fp8_delayed", gated=True)
    variables = jax.jit(block.init)(jax.random.key(0), x)
    grad = jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(block.apply(v, x)))))
    for _ in range(3):
        histories = grad(variables)[OVERWRITE_WITH_GRADIENT]
        variables = {**variables, OVERWRITE_WITH_GRADIENT: histories}
    assert set(histories) == {"fp8_qkv", "fp8_project", "mlp"}
    now = jaxfused.linen.TransformerBlock(num_heads=4, precision="fp8", gated=True)
    expected = jax.jit(now.apply)({"params": variables["params"]}, x)
    # Roundings differ, as in the test above.
    assert np.linalg.norm(jax.jit(block.apply)(variables, x) - expected) < 5e-2 * np.linalg.norm(
        expected
    )


# --- errors ---------------------------------------------------------------------------------------


def test_what_is_refused():
    x, w1, b1, w2, b2 = mlp_operands()
    with pytest.raises(ValueError, match=r'linear: implementation="cuda" was named.*pass impl'):
        jaxfused.linear(x, w1, precision="fp8", implementation="cuda")
    with pytest.raises(ValueError, match=r"mlp: dropout_rate is not 0.*pass dropout_rate=0\.0"):
        jaxfused.mlp(
            x,
            w1,
            b1,
            w2,
            b2,
            dropout_rate=0.5,
            dropout_key=jax.random.key(0),
            precision="fp8",
        )
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"x has dtype float64.*pass x in"):
        jaxfused.linear(jnp.ones((2, 4)), jnp.ones((4, 4)), precision="fp8")
    with pytest.raises(
        ValueError, match=r'mlp: precision is a state.*pass Fp8State.zeros\("mlp"\)'
    ):
        jaxfused.mlp(x, w1, b1, w2, b2, precision=jaxfused.Fp8State.zeros("linear"))
    with pytest.raises(ValueError, match="no operator with a state; pass one of"):
        jaxfused.Fp8State.zeros("conv")
    with pytest.raises(ValueError, match=r"calls is 0.*pass 1 or more"):
        jaxfused.Fp8State.zeros("linear", calls=0)
    with pytest.raises(
        ValueError, match=r"only Linear .* remember.* an operator a jaxfused.Fp8State"
    ):
        jaxfused.linear(x, w1, precision="fp8_delayed")
    with pytest.raises(ValueError, match="pallas"):
        jaxfused.linear(x, w1, precision="fp8", implementation="pallas")
