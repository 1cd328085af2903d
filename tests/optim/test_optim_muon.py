"""jaxfused.optim.muon compared with Optax's: numbers up to rounding, the same state, few products."""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxfused import optim
from jaxfused.optim import newton_schulz
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.optim_training import make_grads, optax_step

# `optim.muon` is the function; this is its module.
muon_module = sys.modules[optim.muon.__module__]
NUMBERS = contrib.MuonDimensionNumbers
SHAPES = {
    "wide": (5, 7),
    "tall": (7, 5),
    "other": (12, 3),
    "layers": {"kernel": (3, 6, 10), "bias": (3, 10)},
    "conv": (3, 3, 2, 8),
    "none": None,
}


def make_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: put(rng.normal(size=shape), dtype),
        SHAPES,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def of_rank(tree):
    numbers = {2: NUMBERS(), 3: NUMBERS(1, 2), 4: NUMBERS((0, 1, 2), 3)}
    return jax.tree.map_with_path(
        lambda path, leaf: None if "bias" in str(path) else numbers.get(leaf.ndim), tree
    )


OF_A_PREFIX = {
    "wide": NUMBERS(1, 0),
    "tall": None,
    "other": NUMBERS(-2, -1),
    "layers": None,
    "conv": NUMBERS((2, 1), (0, -1)),
    "none": None,
}
CASES = [
    {},
    dict(muon_weight_dimension_numbers=of_rank, weight_decay=0.1, adam_weight_decay=0.05),
    dict(muon_weight_dimension_numbers=OF_A_PREFIX, nesterov=False, consistent_rms=0.2),
    dict(ns_coeffs="dion", preconditioning="aol"),
    dict(preconditioning="schatten", ns_steps=4, muon_weight_dimension_numbers=of_rank),
    dict(preconditioning="spectral", beta=0.8, eps=1e-4),
    dict(adaptive=True, adam_learning_rate=0.01, adam_b2=0.9),
    dict(ns_coeffs=((4.0, -6.8, 2.9), (2.8, -3.0, 1.2)), ns_steps=2),
    dict(weight_decay=0.1, weight_decay_mask=lambda t: jax.tree.map(lambda p: p.shape[0] > 5, t)),
]


def pair(**options):
    """Returns our muon and Optax's, which has one `nesterov` for all leaves."""
    schedule = optax.cosine_decay_schedule(0.02, 100)
    ours = optim.muon(schedule, adam_nesterov=options.get("nesterov", True), **options)
    return ours, contrib.muon(schedule, **options)


def train_both(options, params, steps, grads=make_grads):
    """Returns (parameters, state) of both after some steps; ours alternates `step` and `update`."""
    ours, theirs = pair(**options)
    our_update, their_update = optax_step(ours), optax_step(theirs)
    p, q = jax.tree.map(jnp.copy, params), params
    s, t = ours.init(p), theirs.init(q)
    chex.assert_trees_all_equal(s, t, strict=True)
    for i in range(steps):
        if i % 2:
            p, s = ours.step(grads(p, i), s, p)
        else:
            p, s = our_update(grads(p, i), s, p)
        q, t = their_update(grads(q, i), t, q)
    return (p, s), (q, t)


def assert_close(actual, expected, tolerance):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, actual),
        jax.tree.map(np.float64, expected),
        rtol=tolerance,
        atol=tolerance,
    )


@parametrize("options", CASES, quick=(1,), ids=lambda options: "-".join(options) or "default")
def test_as_optax(options):
    """Iterations enlarge small singular values, and their roundings, up to 480-fold."""
    assert_close(*train_both(options, make_params(), 6), 2e-5)


@pytest.mark.exhaustive
def test_momentum_of_16_bits():
    """Optax rounds after each operation of an iteration, and in another order."""
    options = dict(mu_dtype=jnp.bfloat16)
    assert_close(*train_both(options, make_params(), 4), 2e-5)
    actual, expected = train_both({}, make_params(jnp.bfloat16), 4)
    assert_close(actual, expected, 5e-2)


def least_squares(seed=0):
    """Returns a problem with two layers, whose gradients depend on the parameters.

    The targets have noise. So the last loss depends on the optimizer, not on roundings near 0.
    """
    rng = np.random.default_rng(seed)
    x = put(rng.normal(size=(1024, 12)), jnp.float32)
    truth = put(rng.normal(size=(12, 5)), jnp.float32)
    wanted = x @ truth + put(rng.normal(size=(1024, 5)), jnp.float32)
    params = {
        "up": put(rng.normal(size=(12, 16)), jnp.float32) / 4,
        "down": put(rng.normal(size=(16, 5)), jnp.float32) / 4,
        "bias": jnp.zeros(5),
    }

    @jax.jit
    def value_and_grad(params):
        def loss(params):
            y = jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]
            return jnp.mean((y - wanted) ** 2)

        return jax.value_and_grad(loss)(params)

    return params, value_and_grad


@pytest.mark.exhaustive
@parametrize("iteration_dtype", [None, jnp.bfloat16], quick=())
def test_1000_steps_lose_as_much(iteration_dtype):
    params, value_and_grad = least_squares()
    schedule = optax.cosine_decay_schedule(0.02, 1000)
    losses = []
    for tx in (optim.muon(schedule, iteration_dtype=iteration_dtype), contrib.muon(schedule)):
        p, state = jax.tree.map(jnp.copy, params), tx.init(params)
        step = optax_step(tx)
        curve = []
        for _ in range(1000):
            loss, grads = value_and_grad(p)
            curve.append(float(loss))
            p, state = step(grads, state, p)
        losses.append(curve)
    ours, theirs = np.array(losses)
    assert theirs[-1] < 0.2 * theirs[0]
    np.testing.assert_allclose(ours[-200:].mean(), theirs[-200:].mean(), rtol=1e-2)


def test_matrices_of_a_shape_are_one_batch():
    """Matrices of one shape are multiplied in one batch, with their transposes and stacks of layers.

    Square ones take three products per iteration. Wide ones take eleven for the first three iterations
    and seven for the last two; in each group two products are larger than Gram matrices.
    """
    shapes = [(8, 16), (16, 8), (4, 8, 16), (8, 16), (8, 8)]
    params = {str(i): jnp.ones(shape) for i, shape in enumerate(shapes)}
    tx = optim.muon(0.1, muon_weight_dimension_numbers=of_rank)
    program = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    assert str(program).count("dot_general[") == 3 * 5 + 11 + 7


@parametrize("dtype", ["float32", "bfloat16"], quick=(0,))
def test_iterations_at_once_are_as_accurate(dtype):
    """Wide matrices with singular values down to 1e-6: merged iterations compared with single ones."""
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.normal(size=(2, 32, 96)), full_matrices=False)
    x = put(u * np.logspace(0, -6, 32) @ v, jnp.float32)
    a, b, c = coefficients = (3.4445, -4.775, 2.0315)

    def one_by_one(x, dtype):
        x = x.astype(dtype)
        x = x / jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
        for _ in range(5):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    actual = newton_schulz.orthogonalize(
        [x], jnp.array(coefficients), 5, preconditioning="frobenius", eps=0.0, dtype=dtype
    )[0]
    with jax.enable_x64(True):
        truth = np.asarray(one_by_one(x, jnp.float64))
    of_plain = np.linalg.norm(np.asarray(one_by_one(x, dtype), np.float64) - truth)
    assert np.linalg.norm(np.asarray(actual, np.float64) - truth) <= 2 * of_plain


def test_batches_are_bounded(monkeypatch):
    monkeypatch.setattr(newton_schulz, "_MOST_ELEMENTS", 2 * 35)
    """Batches also have about the same size."""
    matrices = [jnp.ones((1, 5, 7))] * 5
    assert [len(batch) for batch in newton_schulz.batches(matrices)] == [1, 2, 2]
    assert [len(batch) for batch in newton_schulz.batches(matrices[:4])] == [2, 2]


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_matrices_become_nearly_orthogonal(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 24, 96))
    abc = jnp.array((3.4445, -4.775, 2.0315))
    options = dict(preconditioning="frobenius", eps=1e-8, dtype=dtype)
    (y,) = jax.jit(lambda x: newton_schulz.orthogonalize([x], abc, 5, **options))(x)
    assert y.dtype == x.dtype
    values = np.linalg.svd(y, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3


# --- other libraries' Muon ------------------------------------------------------------------------


def test_leaves_of_adam_are_as_in_adamw():
    """Nesterov momentum is off by default. With it, the first step is 1.47 times as long."""
    params = {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}
    grads = {"kernel": jnp.eye(4), "bias": jnp.array([1.0, -2.0, 0.5, 3.0])}
    adamw = optax.adamw(0.01, weight_decay=0.1)
    for options, like in (
        ({}, adamw),
        (dict(adam_nesterov=True), optax.nadamw(0.01, weight_decay=0.1)),
        (dict(eps=1e-4, adam_eps=1e-8), adamw),
    ):
        tx = optim.muon(0.01, adam_weight_decay=0.1, **options)
        updates, _ = tx.update(grads, tx.init(params), params)
        expected, _ = like.update(grads["bias"], like.init(params["bias"]), params["bias"])
        np.testing.assert_allclose(updates["bias"], expected, rtol=1e-6)


def numpy_orthogonal(x, norm, triples):
    x = x / norm
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(12, 7), (7, 12)])
def test_torchs_muon_in_float64(nesterov, rows, columns):
    """Follows torch 2.13, torch/optim/_muon.py.

    m.lerp_(g, 1 - beta), g.lerp(m, beta), max(norm, 1e-7). Our weights are transposed, [in, out], so
    that their columns are torch's rows.
    """
    lr, beta, decay, abc = 0.02, 0.95, 0.1, (3.4445, -4.775, 2.0315)
    tx = optim.muon(
        lr,
        nesterov=nesterov,
        bias_correction=False,
        clamp_norm=True,
        eps=1e-7,
        weight_decay=decay,
    )
    rng = np.random.default_rng(0)
    p = rng.normal(size=(rows, columns))
    ours, m = jnp.asarray(p, jnp.float32), np.zeros_like(p)
    state = tx.init(ours)
    for _ in range(3):
        g = rng.normal(size=p.shape)
        ours, state = tx.step(jnp.asarray(g, jnp.float32), state, ours)
        m = beta * m + (1 - beta) * g
        x = (1 - beta) * g + beta * m if nesterov else m
        x = numpy_orthogonal(x, max(np.linalg.norm(x), 1e-7), [abc] * 5)
        p = p - lr * decay * p - lr * np.sqrt(max(1, columns / rows)) * x
    np.testing.assert_allclose(ours, p, atol=2e-6)


def test_norms_are_clamped():
    """A norm of 5e-8 is replaced by 1e-7, where Optax divides by the sum of both."""
    g = 5e-8 * jnp.eye(2)[:1]
    for clamp, norm in ((True, 1e-7), (False, 1.5e-7)):
        tx = optim.muon(
            1.0, nesterov=False, eps=1e-7, clamp_norm=clamp, ns_steps=1, ns_coeffs=(1.0, 0.0, 0.0)
        )
        updates, _ = tx.update(g, tx.init(g), g)
        np.testing.assert_allclose(updates[0, 0], -np.sqrt(2) * 5e-8 / norm, rtol=1e-5)


def test_kerass_and_torchs_match_of_adams_root_mean_square():
    """The factor is 0.2 sqrt(max(rows, columns)): Keras' rms_rate, torch's "match_rms_adamw"."""
    g = put(np.random.default_rng(0).normal(size=(6, 10)), jnp.float32)
    plain, scaled = (optim.muon(1.0, consistent_rms=rms) for rms in (None, 0.2))
    u, v = (tx.update(g, tx.init(g), g)[0] for tx in (plain, scaled))
    np.testing.assert_allclose(v, 0.2 * np.sqrt(10) * u / np.sqrt(10 / 6), rtol=1e-6)


@pytest.mark.parametrize("name", ["standard", "dion", "quintic", "polar_express"])
@pytest.mark.parametrize("steps", [3, 5, 9])
def test_as_many_coefficients_as_iterations(name, steps):
    """Longer presets are cut after the last iteration; shorter ones repeat their last coefficients."""
    g = put(np.random.default_rng(0).normal(size=(6, 10)), jnp.float32)
    tx = optim.muon(1.0, ns_coeffs=name, ns_steps=steps, nesterov=False)
    state = tx.init(g)
    updates, _ = tx.update(g, state, g)
    coefficients = np.array(muon_module.PRESETS[name])
    triples = [coefficients] * steps
    if coefficients.ndim == 2:
        triples = [*coefficients, *[coefficients[-1]] * steps][:steps]
    expected = numpy_orthogonal(np.float64(g), np.linalg.norm(np.float64(g)), triples)
    np.testing.assert_allclose(updates, -np.sqrt(10 / 6) * expected, atol=2e-5)


def test_polar_express_is_close_to_orthogonal():
    g = put(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32)
    tx = optim.muon(1.0, ns_coeffs="polar_express", ns_steps=8)
    updates, _ = tx.update(g, tx.init(g), g)
    values = np.linalg.svd(updates, compute_uv=False) / np.sqrt(24 / 16)
    np.testing.assert_allclose(values, 1, atol=5e-3)


def test_kernels_of_convolutions_are_flattened():
    """As timm and pytorch-optimizer do with [O, I, H, W], they are flattened to [H W I, O]."""
    params = {"conv": jnp.ones((3, 3, 2, 8)), "dense": jnp.ones((4, 5)), "bias": jnp.ones(8)}
    grads = make_grads(params)
    flat = {**grads, "conv": grads["conv"].reshape(18, 8)}
    tx = optim.muon(0.1, muon_weight_dimension_numbers="flatten")
    plain = optim.muon(0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    expected, _ = plain.update(flat, plain.init(flat), flat)
    np.testing.assert_allclose(updates["conv"].reshape(18, 8), expected["conv"], atol=1e-6)
    np.testing.assert_allclose(updates["dense"], expected["dense"], atol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("options", [{}, dict(ns_coeffs="quintic", preconditioning="aol")])
def test_under_inject_hyperparams(jitted, options):
    """This holds also inside jit, where the number of iterations is traced."""
    params = {
        "w": put(np.random.default_rng(0).normal(size=(4, 10)), jnp.float32),
        "b": jnp.ones(3),
    }
    grads, plain = make_grads(params), optim.muon(0.02, **options)
    tx = optax.inject_hyperparams(optim.muon)(learning_rate=0.01, **options)
    state, expected = tx.init(params), plain.init(params)
    chex.assert_trees_all_equal(state.inner_state, expected)
    state.hyperparams["learning_rate"] = 0.02
    for update in [jax.jit(tx.update) if jitted else tx.update] * 2:
        updates, state = update(grads, state, params)
        wanted, expected = plain.update(grads, expected, params)
        chex.assert_trees_all_close(updates, wanted, atol=1e-5)
    state.hyperparams["ns_steps"] = jnp.asarray(3)
    updates, _ = (jax.jit(tx.update) if jitted else tx.update)(grads, state, params)
    fewer = optim.muon(0.02, **options, ns_steps=3)
    wanted, _ = fewer.update(grads, expected, params)
    chex.assert_trees_all_close(updates, wanted, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="has 2 triples, but ns_steps is 5; pass ns_steps=2"):
        optim.muon(0.1, ns_coeffs=[(1.0, 2.0, 3.0)] * 2)
    with pytest.raises(ValueError, match="ns_coeffs is 'cubic'; pass one of standard, dion"):
        optim.muon(0.1, ns_coeffs="cubic")
    with pytest.raises(ValueError, match=r"ns_coeffs has shape \(2,\); pass a triple"):
        optim.muon(0.1, ns_coeffs=(1.0, 2.0))
    with pytest.raises(ValueError, match="is 'flat'; pass None, 'flatten'"):
        optim.muon(0.1, muon_weight_dimension_numbers="flat")
    with pytest.raises(ValueError, match="preconditioning is 'none'; pass one of frobenius"):
        optim.muon(0.1, preconditioning="none")
    params = {"w": jnp.ones((2, 3))}
    for numbers, words in ((1, "has 1 for a leaf; pass Optax's"), (NUMBERS(0, 2), "axis 2 for a")):
        tx = optim.muon(0.1, muon_weight_dimension_numbers={"w": numbers})
        with pytest.raises(ValueError, match=words):
            tx.update(params, tx.init(params), params)
    tx = optim.muon(
        0.1, muon_weight_dimension_numbers=lambda t: jax.tree.map(lambda _: NUMBERS(0, 0), t)
    )
    with pytest.raises(
        ValueError, match=r"must differ, but .* has \(0,\) and \(0,\) of shape \(2, 3\)"
    ):
        tx.update(params, tx.init(params), params)
