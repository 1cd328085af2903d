"""jaxfused.optim.muon against Optax's: numbers up to rounding, the same state, and few products."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxfused import optim
from jaxfused.optim import newton_schulz
from tests.arrays import put
from tests.grids import parametrize
from tests.optim_training import make_grads, optax_step

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
    schedule = optax.cosine_decay_schedule(0.02, 100)
    return optim.muon(schedule, **options), contrib.muon(schedule, **options)


def train_both(options, params, steps, grads=make_grads):
    """Returns (parameters, state) of both after some steps, ours by turns of `step` and `update`."""
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
    """Iterations raise small singular values up to 480-fold, and roundings with them."""
    assert_close(*train_both(options, make_params(), 6), 2e-5)


@pytest.mark.exhaustive
def test_momentum_of_16_bits():
    """Optax rounds after each operation of an iteration, and by other orders of operations."""
    options = dict(mu_dtype=jnp.bfloat16)
    assert_close(*train_both(options, make_params(), 4), 2e-5)
    actual, expected = train_both({}, make_params(jnp.bfloat16), 4)
    assert_close(actual, expected, 5e-2)


def least_squares(seed=0):
    """A problem with two layers, whose gradients depend on the parameters.

    With noise in what is to be learned, the last loss depends on the optimizer, not on how a rounding
    turned its way close to 0.
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
    """For all of them, transposed ones and stacks of layers included.

    Three products an iteration where they are square; where they are wide, eleven for the first three
    iterations and seven for the last two, of which two each are not of the size of Gram matrices.
    """
    shapes = [(8, 16), (16, 8), (4, 8, 16), (8, 16), (8, 8)]
    params = {str(i): jnp.ones(shape) for i, shape in enumerate(shapes)}
    tx = optim.muon(0.1, muon_weight_dimension_numbers=of_rank)
    program = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    assert str(program).count("dot_general[") == 3 * 5 + 11 + 7


@parametrize("dtype", ["float32", "bfloat16"], quick=(0,))
def test_iterations_at_once_are_as_accurate(dtype):
    """Of wide matrices whose singular values go down to nothing, against one iteration after another."""
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
        [x], [coefficients] * 5, preconditioning="frobenius", eps=0.0, dtype=dtype
    )[0]
    with jax.enable_x64(True):
        truth = np.asarray(one_by_one(x, jnp.float64))
    of_plain = np.linalg.norm(np.asarray(one_by_one(x, dtype), np.float64) - truth)
    assert np.linalg.norm(np.asarray(actual, np.float64) - truth) <= 2 * of_plain


def test_batches_are_bounded(monkeypatch):
    monkeypatch.setattr(newton_schulz, "_MOST_ELEMENTS", 2 * 35)
    matrices = [jnp.ones((1, 5, 7))] * 5
    assert [len(batch) for batch in newton_schulz._batches(matrices)] == [2, 2, 1]


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_matrices_become_nearly_orthogonal(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 24, 96))
    rows = [(3.4445, -4.775, 2.0315)] * 5
    options = dict(preconditioning="frobenius", eps=1e-8, dtype=dtype)
    (y,) = jax.jit(lambda x: newton_schulz.orthogonalize([x], rows, **options))(x)
    assert y.dtype == x.dtype
    values = np.linalg.svd(y, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3


def test_refusals():
    with pytest.raises(ValueError, match="preconditioning is 'none'; pass one of frobenius"):
        optim.muon(0.1, preconditioning="none")
    tx = optim.muon(
        0.1, muon_weight_dimension_numbers=lambda t: jax.tree.map(lambda _: NUMBERS(0, 0), t)
    )
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(
        ValueError, match=r"must differ, but .* has \(0,\) and \(0,\) of shape \(2, 3\)"
    ):
        tx.update(params, tx.init(params), params)
