"""Routers and experts against transformers' blocks and a loop over tokens; dropping, gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from tests.recorded import values
from tests.support.arrays import put
from tests.support.grids import parametrize

BLOCKS = values.load("experts.npz")
TOKENS, FEATURES, EXPERTS = 24, 32, 8
SIGMOID = dict(score="sigmoid", normalise="sum", epsilon=1e-20)
GROUPS = dict(groups=4, groups_kept=2, scale=2.5)
RULES = {
    "Mixtral": dict(normalise="sum"),
    "Qwen2-MoE": {},
    "Qwen3-MoE": dict(normalise="sum"),
    "DeepSeek-V2": dict(group_score="max", masked=0.0, **GROUPS),
    "DeepSeek-V3": SIGMOID | GROUPS,
    "GLM-4.5": SIGMOID,
    "Ernie 4.5": dict(normalise="sum", floor=1e-12),
    "Granite": dict(over="chosen"),
    "MiniMax-M2": dict(score="sigmoid", normalise="sum"),
    "Llama 4": dict(score="sigmoid"),
}


def routes_of(name):
    """Returns the rows of a block, its logits, and the routes that this package finds for them."""
    row = BLOCKS[name]
    x = row.input("x", (1, TOKENS, FEATURES))[0]
    gate = row["router.weight" if "router.weight" in row else "gate.weight"]
    bias = None
    if "gate.moe_statics.e_score_correction_bias" in row:
        bias = row["gate.moe_statics.e_score_correction_bias"][0]
    elif name in ("DeepSeek-V3", "GLM-4.5"):
        bias = 0.2 * row.input("gate.e_score_correction_bias", (EXPERTS,))
    elif name == "MiniMax-M2":
        bias = 0.2 * row.input("e_score_correction_bias", (EXPERTS,))
    logits = x @ gate.T
    k = 1 if name == "Llama 4" else 2
    return x, jaxfused.router(logits, k, bias=bias, **RULES[name])


@pytest.mark.parametrize("name", BLOCKS)
def test_routes_of_transformers(name):
    _, routes = routes_of(name)
    dense = np.zeros((TOKENS, EXPERTS), np.float32)
    np.put_along_axis(dense, np.asarray(routes.indices), np.asarray(routes.weights), axis=-1)
    np.testing.assert_allclose(dense, BLOCKS[name].results["weights"], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_transformers(name):
    row = BLOCKS[name]
    x, routes = routes_of(name)
    gain = row.options["gain"]
    gate_up, down = gain * row["experts.gate_up_proj"], gain * row["experts.down_proj"]
    is_llama = name == "Llama 4"
    gate, up = np.split(gate_up, 2, axis=2 if is_llama else 1)
    options = dict(weight_on="input") if is_llama else dict(transpose_weights=True)
    y = jaxfused.expert_mlp(x, *routes, gate, up, down, **options)
    shared = next(
        (n for n in ("shared_experts", "shared_expert") if f"{n}.up_proj.weight" in row), ""
    )
    if shared:
        layers = (row.kernel(f"{shared}.{n}_proj") for n in ("gate", "up", "down"))
        own = jaxfused.gated_mlp(x, *layers)
        if f"{shared}_gate.weight" in row:
            own = jax.nn.sigmoid(x @ row.kernel(f"{shared}_gate")) * own
        y = y + own
    np.testing.assert_allclose(y, row.results["y"], rtol=2e-4, atol=2e-5)


# --- experts --------------------------------------------------------------------------------------


def operands(k=2, dtype="float32"):
    rng = np.random.default_rng(0)
    x, *w = (
        put(0.5 * rng.normal(size=shape), dtype)
        for shape in ((10, 6), (4, 6, 16), (4, 6, 16), (4, 16, 6))
    )
    weights = put(rng.uniform(size=(10, k)), "float32")
    return x, weights, put(rng.integers(-1, 5, size=(10, k)), "int32"), *w


def by_tokens(x, weights, indices, gate, up, down, capacity=10**9):
    """Returns the sum over each token's experts, in float64."""
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x, weights, gate, up, down))
    y, taken = np.zeros(x.shape), np.zeros(len(up), int)
    for j in range(weights.shape[1]):
        for t, e in enumerate(np.asarray(indices)[:, j]):
            if 0 <= e < len(up) and taken[e] < capacity:
                taken[e] += 1
                z = x[t] @ gate[e]
                y[t] += weights[t, j] * ((z / (1 + np.exp(-z)) * (x[t] @ up[e])) @ down[e])
    return y


@pytest.mark.parametrize("capacity", [None, 2])
def test_experts_by_a_loop_over_tokens(capacity):
    args = operands()
    y = jaxfused.expert_mlp(*args, capacity=capacity)
    expected = by_tokens(*args, capacity=capacity or 10**9)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    cut = jaxfused.expert_mlp(
        args[0][None], *(a[None] for a in args[1:3]), *args[3:], capacity=capacity
    )
    np.testing.assert_allclose(cut[0], y, rtol=1e-6, atol=1e-6)


@parametrize("weight_on", ["output", "input"], quick=(0,))
def test_gradients(weight_on):
    x, weights, indices, *w = operands()
    f = jax.jit(
        lambda x, weights, *w: jaxfused.expert_mlp(x, weights, indices, *w, weight_on=weight_on)
    )
    check_grads(f, (x, weights, *w), order=1, modes=("rev",), atol=2e-2, rtol=2e-2)


def test_experts_without_a_gate_in_16_bits():
    x, weights, indices, _, up, down = operands(dtype="bfloat16")
    f = functools.partial(jaxfused.expert_mlp, activation="relu2")
    y = f(x, weights, indices, None, up, down)
    assert y.dtype == jnp.bfloat16
    wide = [a.astype(jnp.float32) for a in (up, down)]
    expected = f(x.astype(jnp.float32), weights, indices, None, *wide)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=0.05, atol=0.02)


def test_gradients_have_no_sums_into_places():
    """A GPU would add such sums in any order, so that results would differ from run to run."""
    x, weights, indices, *w = operands()
    loss = lambda x, weights: jnp.sum(jaxfused.expert_mlp(x, weights, indices, *w))  # noqa: E731
    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weights))
    assert "scatter-add" not in program.replace("scatter-add[\n", "scatter-add") or (
        # Counting the tokens of an expert adds integers.
        program.count("scatter-add") == 1
    )


# --- losses and options ---------------------------------------------------------------------------


def test_balance_loss_is_k_when_balanced_and_counts_what_is_kept():
    logits = jnp.zeros((2, 8, 4))
    for k in (1, 2):
        indices = (jnp.arange(16).reshape(2, 8, 1) + jnp.arange(k)) % 4
        chex.assert_trees_all_close(jaxfused.load_balancing_loss(logits, indices), float(k))
    one = jnp.zeros((2, 8, 1), jnp.int32)
    skewed = logits.at[..., 0].set(50.0)
    chex.assert_trees_all_close(jaxfused.load_balancing_loss(skewed, one), 4.0)
    mask = jnp.arange(8) < jnp.array([[4], [0]])
    half = jaxfused.load_balancing_loss(skewed, one + (1 - mask[..., None]), mask=mask)
    chex.assert_trees_all_close(half, 4.0)
    padded = jnp.where(mask[..., None], skewed, jnp.nan)
    f = jax.value_and_grad(functools.partial(jaxfused.load_balancing_loss, mask=mask))
    chex.assert_trees_all_equal(f(padded, one), f(skewed, one))
    axes = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((1, 1), ("a", "b"), axis_types=axes)):
        place = jax.reshard
        split = jaxfused.load_balancing_loss(
            place(skewed, jax.P("a", None, "b")), one, mask=place(mask, jax.P("b"))
        )
    assert split == f(skewed, one)[0]
    assert jaxfused.load_balancing_loss(logits, one, mask=jnp.zeros((2, 8), bool)) == 0.0


def test_router_options():
    logits = jnp.array([[1.0, 3.0, 2.0, -1.0]])
    capped = jaxfused.router(logits, 1, score="sigmoid", softcap=2.0, logit_scale=0.5)
    np.testing.assert_allclose(capped.weights, jax.nn.sigmoid(2 * jnp.tanh(0.75))[None, None])
    turned = jaxfused.router(logits, 1, bias=jnp.array([9.0, 0, 0, 0]), bias_on="logit")
    assert turned.indices.tolist() == [[0]]
    np.testing.assert_allclose(turned.weights, jax.nn.softmax(logits)[:, :1], rtol=1e-6)
    scaled = jaxfused.router(
        logits, 2, score="sqrt_softplus", expert_scale=jnp.array([1.0, 2.0, 3.0, 4.0]), scale=10.0
    )
    plain = jnp.sqrt(jax.nn.softplus(logits[0]))
    np.testing.assert_allclose(scaled.weights[0], [20 * plain[1], 30 * plain[2]], rtol=1e-6)
    ties = jaxfused.router(jnp.zeros((1, 6), jnp.bfloat16), 3)
    assert ties.indices.tolist() == [[0, 1, 2]] and ties.weights.dtype == jnp.float32


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_shares_of_scores_that_vanish(score):
    """Far below 0 a logistic is an exponential, and the root of softplus that of one."""
    z = np.array([-200.0, -201.0, -203.0, -500.0], np.float32)
    bias = jnp.array([9.0, 8.0, 7.0, 0.0])
    options = dict(score=score, bias=bias, normalise="sum")
    logits = np.where(np.arange(5) < 4, np.pad(z, (0, 1)), 0) if score == "softmax" else z
    if score == "softmax":
        options["bias"] = jnp.pad(bias, (0, 1), constant_values=-9.0)
    f = lambda logits: jaxfused.router(logits, 3, **options).weights  # noqa: E731
    exponents = z[:3].astype(float) * (0.5 if score == "sqrt_softplus" else 1.0)
    expected = np.exp(exponents - exponents.max())
    weights = jax.jit(f)(jnp.asarray(logits)[None])[0]
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda z: f(z)[0]))(jnp.asarray(logits))
    shares = expected / expected.sum()
    slope = exponents[0] / z[0] * shares[0] * (np.eye(3)[0] - shares)
    np.testing.assert_allclose(gradient, np.pad(slope, (0, len(logits) - 3)), rtol=1e-5, atol=1e-9)


def test_router_bias_has_no_gradient():
    logits, bias = jnp.array([[1.0, 3.0, 2.0]]), jnp.array([0.5, 0.0, 0.0])
    loss = lambda logits, bias: jaxfused.router(logits, 2, bias=bias).weights[0, 0]  # noqa: E731
    of_logits, of_bias = jax.grad(loss, (0, 1))(logits, bias)
    assert of_logits.any() and not of_bias.any()


L = jnp.zeros((3, 8))


def test_indices_of_one_byte_choose_among_more_experts_than_it_counts():
    experts = 300
    x, w = jnp.ones((2, 1)), jnp.arange(experts, dtype=jnp.float32)[:, None, None]
    for dtype, indices in (("uint8", [[3], [255]]), ("int8", [[3], [-1]])):
        indices = np.array(indices, dtype)
        y = jaxfused.expert_mlp(x, jnp.ones((2, 1)), indices, None, w, w * 0 + 1, activation=None)
        np.testing.assert_array_equal(y[:, 0], np.maximum(indices[:, 0], 0))
        logits = jnp.tile(jnp.arange(experts) / 100, (2, 1))
        np.testing.assert_array_equal(
            jaxfused.load_balancing_loss(logits, indices),
            jaxfused.load_balancing_loss(logits, indices.astype(np.int32)),
        )


def test_weights_of_no_expert_do_not_count():
    x, w = jnp.ones((2, 1)), jnp.ones((2, 1, 1))
    weights, indices = jnp.array([[1.0, jnp.nan], [jnp.nan, 2.0]]), jnp.array([[0, -1], [2, 1]])
    y = jaxfused.expert_mlp(x, weights, indices, None, w, w, activation=None)
    np.testing.assert_array_equal(y[:, 0], [1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxfused.router(L, 9), "router: k is 9, .* from 1 to 8"),
        (lambda: jaxfused.router(L, 3, groups=4), "router: k is 3, .* among 2 experts"),
        (lambda: jaxfused.router(L, 1, groups=3), "router: groups is 3, .* a divisor of 8"),
        (lambda: jaxfused.router(L, 1, groups_kept=2), "router: groups_kept is 2, .* 1 groups"),
        (lambda: jaxfused.router(L, 1, bias=L), "router: bias has shape"),
        (lambda: jaxfused.router(L, 1, softcap=0.0), "router: softcap is 0.0"),
        (lambda: jaxfused.router(L, 1, score="relu"), "router: score"),
        (lambda: jaxfused.router(L, 1, epsilon=-1.0), "router: epsilon is -1.0, .* sum of weights"),
        (lambda: jaxfused.router(L, 1, score="sigmoid", over="chosen"), "router: over='chosen'"),
        (
            lambda: jaxfused.load_balancing_loss(L, jnp.zeros((2, 1), int)),
            "load_balancing_loss: indices have shape",
        ),
        (
            lambda: jaxfused.expert_mlp(*operands(), capacity=0),
            "expert_mlp: capacity is 0; pass at least 1",
        ),
        (
            lambda: jaxfused.expert_mlp(*operands(), transpose_weights=True),
            r"expert_mlp: w_up has shape .* pass w_up of shape \(E, hidden, 6\)",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_any_number_of_tokens_is_exported():
    (tokens,) = jax.export.symbolic_shape("tokens")
    w_up, w_down = jnp.ones((4, 8, 16)), jnp.ones((4, 16, 8))

    def f(x):
        return jaxfused.expert_mlp(x, *jaxfused.router(x[:, :4], k=2), None, w_up, w_down)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)

    exported = jax.export.export(jax.jit(gradient))(jax.ShapeDtypeStruct((tokens, 8), jnp.float32))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)
    np.testing.assert_allclose(exported.call(x), gradient(x), rtol=1e-5)
