"""jaxfused.optim compared with Optax: the same bits and state, in every wrapper."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxfused import optim
from jaxfused.optim.adam import adam_rule
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.optim_training import (
    assert_same_bits,
    exact_bias_correction,
    make_grads,
    make_params,
    optax_step,
)

LEARNING_RATE = 0.02
CASES = {
    "adam": ("adam", {}),
    "adam-nesterov-eps_root": ("adam", {"nesterov": True, "eps_root": 1e-6}),
    "adamw": ("adamw", {"weight_decay": 0.1}),
    "adamw-mu_dtype": ("adamw", {"mu_dtype": jnp.bfloat16, "b1": 0.8, "b2": 0.95}),
    "adamw-nesterov": ("adamw", {"nesterov": True}),
    "lion": ("lion", {}),
    "lion-mu_dtype": ("lion", {"mu_dtype": jnp.bfloat16}),
    "sgd": ("sgd", {}),
    "sgd-momentum": ("sgd", {"momentum": 0.9}),
    "sgd-nesterov-accumulator_dtype": (
        "sgd",
        {"momentum": 0.9, "nesterov": True, "accumulator_dtype": jnp.bfloat16},
    ),
    "lamb": ("lamb", {}),
    "lamb-weight_decay": ("lamb", {"weight_decay": 0.1}),
}
cases = pytest.mark.parametrize("name, options", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def exact_optax(monkeypatch):
    monkeypatch.setattr(optax.tree, "bias_correction", exact_bias_correction)


def train(tx, params, steps):
    step = optax_step(tx)
    state = tx.init(params)
    for i in range(steps):
        params, state = step(make_grads(params, i), state, params)
    return params, state


def assert_same_as_optax(train_with):
    """Asserts that `train_with(library)` gives the same bits with Optax's optimizers and with ours."""
    assert_same_bits(train_with(optim), train_with(optax))


# --- numbers --------------------------------------------------------------------------------------


@parametrize(("name", "options"), [*CASES.values()], quick=slice(None, None, 4))
def test_1000_steps(name, options):
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, 1000)
    assert_same_as_optax(
        lambda library: train(
            getattr(library, name)(schedule, **options), make_params(jnp.bfloat16), 1000
        )
    )


@pytest.mark.parametrize(
    "case", ["adam", "adamw-mu_dtype", "lion", "sgd-nesterov-accumulator_dtype", "lamb"]
)
def test_gradients_of_another_dtype(case):
    name, options = CASES[case]
    other = {jnp.dtype(jnp.float32): jnp.bfloat16, jnp.dtype(jnp.bfloat16): jnp.float32}

    def train_with(library):
        tx = getattr(library, name)(LEARNING_RATE, **options)
        params = make_params(jnp.bfloat16)
        step, state = optax_step(tx), tx.init(params)
        for i in range(10):
            grads = jax.tree.map(lambda g: g.astype(other[g.dtype]), make_grads(params, i))
            params, state = step(grads, state, params)
        return params, state

    assert_same_as_optax(train_with)


@pytest.mark.parametrize("name", ["adam", "lion", "sgd"])
def test_complex_parameters(name):
    params = {"z": put([1 + 2j, -3j, 0.5], jnp.complex64)}
    grads = {"z": put([2 - 1j, 1j, -1.0], jnp.complex64)}

    def train_with(library):
        tx = getattr(library, name)(LEARNING_RATE)
        state, p = tx.init(params), params
        for _ in range(5):
            updates, state = jax.jit(tx.update)(grads, state, p)
            p = optax.apply_updates(p, updates)
        return p, state

    assert_same_as_optax(train_with)


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb"])
def test_weight_decay_schedule(name):
    assert_same_as_optax(
        lambda library: train(
            getattr(library, name)(LEARNING_RATE, weight_decay=optax.linear_schedule(0.5, 0.0, 10)),
            make_params(),
            20,
        )
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adam", dict(b1=0.9, b2=0.99999)),
        ("adamw", dict(b1=0.999, b2=0.9999, weight_decay=0.1)),
        ("adam", dict(nesterov=True)),
        ("lamb", dict(b1=0.99, b2=0.99999, weight_decay=0.1)),
    ],
)
def test_is_as_near_to_float64_as_float32_allows(monkeypatch, name, options):
    """Optax's own float32 is off by up to 7e-4 of a step, because of its powers of the decays."""
    monkeypatch.undo()
    grads = [np.random.default_rng(i).normal(size=7) for i in range(20)]

    def moved(library, name, dtype, options):
        tx = getattr(library, name)(LEARNING_RATE, **options)
        start = jnp.asarray(np.linspace(0.5, 1, 7), dtype)
        params, state = start, tx.init(start)
        for g in grads:
            updates, state = tx.update(jnp.asarray(g, dtype), state, params)
            params = optax.apply_updates(params, updates)
        return np.float64(params) - np.float64(start)

    with jax.enable_x64(True):
        truth = moved(optax, name, jnp.float64, options)
    error = np.abs(moved(optim, name, jnp.float32, options) - truth).max()
    optaxs = np.abs(moved(optax, name, jnp.float32, options) - truth).max()
    unit = 2.0**-24  # parameters are near 1, and each step rounds one
    assert error <= min(20 * unit, 2 * optaxs + unit), (error, optaxs)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("array", [False, True])
def test_bias_corrections_keep_their_digits(decay, array):
    given = jnp.float32(decay) if array else decay
    for count in (1, 2, 10, 1000, 10**6):
        exact = -np.expm1(count * np.log(np.float64(given))) if decay else 1.0
        bias = adam_rule(given, 0.0, 0.0, 0.0).kernel.scalars(jnp.int32(count)).moment_weight
        np.testing.assert_allclose(1 / np.float64(bias), exact, rtol=4e-7)


@pytest.mark.parametrize("name", ["adam", "adamw", "adamw8bit"])
def test_unknown_nesterov(name):
    with pytest.raises(ValueError, match=f"^{name}: nesterov is 'dozat'; pass True"):
        getattr(optim, name)(0.1, nesterov="dozat")


MASKS = {
    "tree": {"dense": {"w": True, "b": False}, "rest": [True, False, None, optax.MaskedNode()]},
    "prefix": {"dense": False, "rest": True},
    "function": lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
    "none": {"dense": False, "rest": False},
}


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_weight_decay_mask(mask, schedule):
    weight_decay = optax.linear_schedule(0.5, 0.1, 4) if schedule else 0.5
    assert_same_as_optax(
        lambda library: train(
            library.adamw(LEARNING_RATE, weight_decay=weight_decay, mask=mask), make_params(), 5
        )
    )


def test_masked_parameters_do_not_decay():
    params = {"w": put([2.0]), "b": put([2.0])}
    tx = optim.adamw(0.5, weight_decay=0.5, mask={"w": True, "b": False})
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert (float(updates["w"][0]), float(updates["b"][0])) == (-0.5, 0.0)


@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "sgd", "lamb"])
def test_differentiates_as_optax(name):
    def outer_gradient(library):
        tx = getattr(library, name)(LEARNING_RATE, **({"eps_root": 1e-8} if "a" in name else {}))

        def loss(params):
            grads = jax.tree.map(lambda p: 2 * p, params)
            updates, _ = tx.update(grads, tx.init(params), params)
            return sum(map(jnp.sum, jax.tree.leaves(optax.apply_updates(params, updates))))

        return jax.jit(jax.grad(loss))({"w": jnp.arange(3.0), "zero": jnp.zeros(2)})

    assert_same_as_optax(outer_gradient)


# --- state ----------------------------------------------------------------------------------------


@cases
def test_state_restores_into_optax_and_back(name, options):
    schedule = optax.linear_schedule(LEARNING_RATE, 0.0, 100)
    theirs = getattr(optax, name)(schedule, **options)
    ours = getattr(optim, name)(schedule, **options)
    their_step, our_step = optax_step(theirs), optax_step(ours)
    params, expected = make_params(), make_params()
    state, expected_state = theirs.init(params), theirs.init(params)
    for i in range(12):
        grads = make_grads(params, i)
        step = our_step if i % 4 in (1, 2) else their_step
        params, state = step(grads, state, params)
        expected, expected_state = their_step(grads, expected_state, expected)
    assert_same_bits((params, state), (expected, expected_state))


def test_optax_finds_the_parameters_in_the_state():
    tx = optim.adamw(LEARNING_RATE, mask=MASKS["prefix"])
    state = tx.init(make_params())
    doubled = optax.tree_map_params(tx, lambda leaf: leaf + 1, state)
    assert float(doubled[0].mu["rest"][0]) == 1
    assert int(doubled[0].count) == 0


@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "sgd", "lamb"])
@pytest.mark.parametrize("empty", [{}, [], {"a": None}, optax.MaskedNode()])
def test_empty_trees(name, empty):
    tx = getattr(optim, name)(LEARNING_RATE)
    state = tx.init(empty)
    updates, new_state = tx.update(empty, state, empty)
    assert updates == empty
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


def test_parameter_without_gradient_keeps_its_moments():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    tx = optim.adam(LEARNING_RATE)
    updates, state = tx.update({"a": jnp.ones(2), "b": None}, tx.init(params), params)
    assert updates["b"] is None
    np.testing.assert_array_equal(state[0].mu["b"], np.zeros(3))


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb"])
def test_parameters_are_needed(name):
    tx = getattr(optim, name)(LEARNING_RATE)
    with pytest.raises(ValueError, match="pass update"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_parameters_are_not_needed(name):
    grads = put([1.0, -2.0])
    assert_same_as_optax(
        lambda library: (tx := getattr(library, name)(0.1)).update(grads, tx.init(grads))
    )


# --- wrappers -------------------------------------------------------------------------------------

WRAPPERS = {
    "chain": lambda library: optax.chain(
        optax.clip_by_global_norm(1.0), library.adamw(LEARNING_RATE), optax.ema(0.9)
    ),
    "multi_transform": lambda library: optax.multi_transform(
        {"a": library.adamw(LEARNING_RATE), "b": library.sgd(0.1, momentum=0.9)},
        {"dense": "a", "rest": "b"},
    ),
    "masked": lambda library: optax.masked(library.lamb(0.1), MASKS["prefix"]),
    "MultiSteps": lambda library: optax.MultiSteps(library.lion(LEARNING_RATE), 3),
    "apply_if_finite": lambda library: optax.apply_if_finite(library.adam(LEARNING_RATE), 2),
    "inject_hyperparams": lambda library: optax.inject_hyperparams(library.adamw)(
        optax.linear_schedule(0.1, 0.0, 10), b2=0.99, weight_decay=0.1
    ),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_wrappers(wrap):
    assert_same_as_optax(lambda library: train(wrap(library), make_params(), 7))


def test_extra_arguments_of_a_chain_are_ignored():
    tx = optax.chain(optim.sgd(0.5), optax.scale_by_polyak())
    params = jnp.array([1.0])
    updates, _ = tx.update(jnp.array([2.0]), tx.init(params), params, value=jnp.array(1.0))
    chex.assert_tree_all_finite(updates)


def test_train_state():
    def train_with(library):
        state = TrainState.create(
            apply_fn=None, params=make_params(), tx=library.adamw(LEARNING_RATE)
        )
        apply_gradients = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
        for i in range(5):
            state = apply_gradients(state, make_grads(state.params, i))
        return state.params, state.opt_state

    assert_same_as_optax(train_with)


def test_nnx_optimizer():
    def train_with(library):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, library.adamw(LEARNING_RATE), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model))

        for _ in range(5):
            step(model, optimizer, jnp.ones((4, 3)))
        assert isinstance(optimizer.tx, type(library.adamw(LEARNING_RATE)))
        return nnx.to_pure_dict(nnx.state(model)), jax.tree.leaves(optimizer.opt_state)

    assert_same_as_optax(train_with)
