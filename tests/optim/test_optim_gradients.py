"""Gradients through steps, leaves without a gradient, and averages whose decay grows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfused import optim
from jaxfused.optim import ema
from tests.support import optimizer_kernels
from tests.support.grids import parametrize

ADAM = dict(learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-3, eps_root=1e-4)
HYPERPARAMETERS = {
    "adam": ADAM,
    "adamw": ADAM | dict(weight_decay=0.1),
    "adamw8bit": ADAM | dict(weight_decay=0.1),
    "lamb": ADAM | dict(weight_decay=0.1),
    "lion": dict(learning_rate=0.1, b1=0.9, b2=0.99, weight_decay=0.1),
    "sgd": dict(learning_rate=0.1, momentum=0.9),
    "adafactor": dict(learning_rate=0.1, decay_rate=0.8, momentum=0.9, weight_decay_rate=0.1),
    "muon": dict(learning_rate=0.1, beta=0.9, weight_decay=0.1, adam_b1=0.9, adam_weight_decay=0.1),
}
WITH_KERNELS = ("adam", "adamw", "adamw8bit", "lamb", "lion", "sgd")


@pytest.fixture
def stood_in(monkeypatch):
    """Makes steps take the kernels' path, with jax.numpy in the place of the kernels."""
    with optimizer_kernels.stood_in_for(monkeypatch):
        yield


def of_ours(name):
    ours = getattr(optim, name)
    return functools.partial(ours, nesterov=False) if name == "muon" else ours


def of_optax(name):
    if name == "muon":  # Optax uses nesterov for its Adam too, ours by default does not.
        return functools.partial(optax.contrib.muon, nesterov=False)
    return getattr(optax, "adamw" if name == "adamw8bit" else name)


def after_two_steps(tx, implementation=None):
    """Returns a number after two steps, the second of which starts from the first one's result."""
    params = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.linspace(1.0, 2.0, 3)}
    state = tx.init(params)
    for i in range(2):
        grads = jax.tree.map(lambda p, i=i: jnp.sin(p + i) + 0.3, params)
        if isinstance(tx, optim.FusedTransformation):
            params, state = tx.step(grads, state, params, implementation=implementation)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return sum(jnp.sum(jnp.sin(p)) for p in jax.tree.leaves(params))


def gradients(make, values, implementation=None):
    """Returns gradients to all hyperparameters, and to a value that the schedule closes over."""

    def scheduled(value):
        rest = {k: v for k, v in values.items() if k != "learning_rate"}
        return after_two_steps(make(lambda count: value / (1 + count), **rest), implementation)

    def of_all(values):
        return after_two_steps(make(**values), implementation)

    both = jax.jit(
        lambda values: (jax.grad(of_all)(values), jax.grad(scheduled)(values["learning_rate"]))
    )
    return both(values)


@parametrize(("name",), [(name,) for name in HYPERPARAMETERS], quick=(1, 3, 6))
def test_hyperparameters_have_gradients(name):
    values = HYPERPARAMETERS[name]
    expected = gradients(of_optax(name), values)
    actual = gradients(of_ours(name), values)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-3, atol=1e-6)
    assert abs(float(actual[0]["learning_rate"])) > 0.1


@parametrize(("name",), [(name,) for name in WITH_KERNELS], quick=(1, 5))
def test_hyperparameters_have_gradients_where_kernels_run(stood_in, name):
    values = HYPERPARAMETERS[name]
    expected = gradients(of_ours(name), values, "xla")
    actual = gradients(of_ours(name), values, "cuda")
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)
    assert abs(float(actual[0]["learning_rate"])) > 0.1


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_hyperparameters_are_mapped_where_kernels_run(stood_in, name):
    values = HYPERPARAMETERS[name]
    several = {k: jnp.array([v, 0.9 * v]) for k, v in values.items()}

    def loss(values):
        return after_two_steps(of_ours(name)(**values), "cuda")

    mapped = jax.jit(jax.vmap(loss))(several)
    for i in range(2):
        one = loss({k: float(v[i]) for k, v in several.items()})
        np.testing.assert_allclose(mapped[i], one, rtol=1e-5)


def test_a_gradient_that_is_zero_leaves_other_gradients_finite(stood_in):
    """The direction's derivative is infinite there, but the gradient of the rate does not need it."""

    def loss(learning_rate, implementation):
        tx, params = optim.adamw(learning_rate), jnp.ones(2)
        grads = jnp.array([0.0, 1.0])
        return tx.step(grads, tx.init(params), params, implementation=implementation)[0].sum()

    for implementation in ("cuda", "xla"):
        np.testing.assert_allclose(jax.grad(loss)(0.1, implementation), -1.0002, rtol=1e-5)


def test_the_decay_of_an_average_has_a_gradient(stood_in):
    def average(decay, implementation):
        tx, params = optim.sgd(1.0), jnp.zeros(1)
        state = tx.init_step(params, ema_decay=lambda updates: decay)
        for _ in range(2):
            step = functools.partial(tx.step, implementation=implementation)
            params, state = step(jnp.array([-1.0]), state, params)
        return state.ema[0]

    # The average of 1 and 2 is (1 - d) * 1 * d + (1 - d) * 2.
    for implementation in ("cuda", "xla"):
        np.testing.assert_allclose(jax.grad(average)(0.5, implementation), -2.0, rtol=1e-6)


# --- outside of jit -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
def test_a_gradient_outside_of_jit(name):
    def loss(scale):
        tx, params = of_ours(name)(0.1), jnp.ones(4)
        state = tx.init_step(params, ema_decay=0.5)
        for _ in range(2):
            params, state = tx.step(2 * scale * params, state, params)
        return params.sum() + state.ema.sum()

    eager = jax.grad(loss)(1.0)
    np.testing.assert_allclose(eager, jax.jit(jax.grad(loss))(1.0), rtol=1e-5, atol=1e-6)
    if name == "sgd":
        # p is (1 - 0.2 s)^n after n steps; the average is 1/4 + p_1 / 4 + p_2 / 2.
        np.testing.assert_allclose(eager, -0.32 * 4 * 1.5 - 0.05 * 4, rtol=1e-5)


def test_what_a_differentiated_function_closes_over_is_kept():
    tx = optim.sgd(0.1, momentum=0.9)
    params, grads = jnp.ones(4), jnp.ones(4)
    state = tx.init(params)
    jax.grad(lambda scale: tx.step(scale * grads, state, params)[0].sum())(1.0)
    jax.grad(lambda lr: optim.sgd(lr, 0.9).step(grads, state, params)[0].sum())(1.0)
    jax.vmap(lambda scale: tx.step(scale * grads, state, params)[0])(jnp.ones(2))

    def scheduled(value):
        tx = optim.sgd(lambda count: value / (1 + count), 0.9)
        return tx.step(grads, tx.init(params), params)[0].sum()

    assert jax.grad(scheduled)(1.0) == -4
    assert not params.is_deleted() and not state[0].trace.is_deleted()
    tx.step(grads, state, params)
    assert params.is_deleted()


# --- leaves without a gradient --------------------------------------------------------------------


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_leaves_without_a_gradient_stay(name):
    tx = of_ours(name)(0.1)
    # "w" has a gradient. Inner names repeat the outer ones, so that mistaken paths would show.
    params = {
        "w": jnp.ones((4, 4)),
        "v": jnp.ones((4, 4)),
        "b": jnp.ones(3),
        "inner": {"b": jnp.ones(3), "w": jnp.ones((2, 3))},
    }
    kept = jax.tree.map(lambda p: p.at[...].set(2.0), params)
    grads = {"w": jnp.ones((4, 4)), "v": None, "b": None, "inner": {"b": jnp.ones(3), "w": None}}
    state = tx.init(kept)
    updates, updated = tx.update(grads, state, kept)
    assert updates["v"] is updates["b"] is updates["inner"]["w"] is None
    assert jax.tree.structure(updated) == jax.tree.structure(state)
    before = jax.tree.map(np.array, state)
    new, new_state = tx.step(grads, state, kept, max_norm=1.0)
    for leaf in (new["v"], new["b"], new["inner"]["w"]):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, 2.0))
    assert (np.asarray(new["w"]) != 2).all() and (np.asarray(new["inner"]["b"]) != 2).all()
    # The leaves that moved do so as if the others did not exist.
    alone = {"w": jnp.full((4, 4), 2.0), "inner": {"b": jnp.full(3, 2.0)}}
    few = {"w": jnp.ones((4, 4)), "inner": {"b": jnp.ones(3)}}
    expected, _ = tx.step(few, tx.init(alone), alone, max_norm=1.0)
    np.testing.assert_array_equal(new["w"], expected["w"])
    moved = [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree.leaves_with_path(new_state), jax.tree.leaves(before), strict=True
        )
        if np.any(np.asarray(a) != b)
    ]
    assert not [path for path in moved if "'v'" in path or path.endswith(("mu['b']", "nu['b']"))]


def test_leaves_without_a_gradient_stay_in_a_transformation_of_the_users_own():
    theirs = optax.adafactor(0.1)
    tx = optim.FusedTransformation(theirs.init, theirs.update)
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    new, _ = tx.step({"a": jnp.ones(2), "b": None}, tx.init(params), params)
    np.testing.assert_array_equal(new["b"], np.ones(3))
    assert (np.asarray(new["a"]) != 1).all()


# --- averages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "values"),
    [
        (0.9, [0.1, 0.29, 0.561, 0.9049, 1.31441, 1.782969]),
        # By timm 1.0.31 (ModelEmaV3), torch 2.13.0 (AveragedModel) and diffusers 0.42.1 (EMAModel).
        (ema.CopyFirst(0.9), [1, 1.1, 1.29, 1.561, 1.9049, 2.31441]),
        (ema.PowerWarmup(0.9), [1, 1.630, 2.289, 2.968, 3.663, 4.371]),
        (ema.RationalWarmup(0.9), [1, 1.818, 2.705, 3.601, 4.501, 5.400]),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["cuda", "xla"])
def test_averages_warm_up(stood_in, implementation, decay, values):
    tx, params = optim.sgd(1.0), {"a": jnp.zeros(2), "b": None}
    state = tx.init_step(params, ema_decay=decay)
    for i, value in enumerate(values):
        if i == 2:  # A skipped step does not count as an update.
            bad = {"a": jnp.full(2, np.nan), "b": None}
            params, state = tx.step(
                bad, state, params, skip_nonfinite=True, implementation=implementation
            )
        grads = {"a": jnp.full(2, -1.0), "b": None}
        params, state = tx.step(grads, state, params, implementation=implementation)
        np.testing.assert_allclose(state.ema["a"], value, atol=1e-3)


def test_a_state_saved_without_a_count_has_none():
    """Checkpoints name the parts of a state, so a constant decay must not add a count."""
    tx, params = optim.sgd(1.0), jnp.zeros(1)
    names = ("optimizer", "ema", "compute", "loss_scale", "good_steps", "skipped", "rounding")

    def parts(decay):
        state = tx.init_step(params, ema_decay=decay)

        def is_part(part):
            return part is None or part is state.optimizer

        return [path[0].name for path, _ in jax.tree.leaves_with_path(state, is_leaf=is_part)]

    assert parts(0.9) == [*names]
    assert parts(ema.CopyFirst(0.9)) == [*names, "ema_updates"]


def test_a_growing_decay_compiles_once():
    tx, params = optim.sgd(1.0), jnp.zeros(1)
    traced = []

    def decay(updates):
        traced.append(updates)
        return jnp.minimum(0.9, updates / 10)

    state = tx.init_step(params, ema_decay=decay)
    traced.clear()
    for _ in range(4):
        params, state = tx.step(jnp.array([-1.0]), state, params)
    assert len(traced) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: ema.CopyFirst(1.0),
        lambda: ema.PowerWarmup(0.9, power=0),
        lambda: ema.RationalWarmup(-0.1),
        lambda: optim.sgd(1.0).init_step(jnp.zeros(1), ema_decay=lambda t: (t, t)),
        lambda: optim.sgd(1.0).init_step(jnp.zeros(1), ema_decay=lambda t: jnp.ones(3)),
    ],
)
def test_decays_that_cannot_be(make):
    with pytest.raises(ValueError, match=r"(decay|power) is .* pass"):
        make()


@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
def test_updates_in_strict_modes(name):
    """Promotion of dtypes is Optax's; leaves of zeros or without elements cause no division by zero."""
    params = {"w": jnp.ones((4, 8)), "zero": jnp.zeros((3,)), "none": jnp.zeros((0, 5))}
    grads = {"w": jnp.ones((4, 8), jnp.bfloat16), "zero": jnp.zeros((3,)), "none": params["none"]}
    tx = getattr(optim, name)(0.1)
    expected, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
    ):
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
