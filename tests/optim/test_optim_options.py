"""Options of every optimizer: what is no number, switch or dtype is refused when it is made."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfused import optim

OPTIMIZERS = ("adafactor", "adam", "adamw", "adamw8bit", "lamb", "lion", "muon", "sgd")
NO_NUMBERS = (
    "a",
    [1, 2],
    object(),
    True,
    np.ones(3),
    jnp.ones(3),
    1j,
    float("nan"),
    np.inf,
    10**400,
)


def make(name, **options):
    return getattr(optim, name)(**{"learning_rate": 0.1, **options})


def options_of(name, wanted):
    parameters = inspect.signature(getattr(optim, name), eval_str=True).parameters
    return [option for option, parameter in parameters.items() if wanted(parameter)]


def takes_numbers(parameter):
    return "Array" in str(parameter.annotation) and parameter.annotation is not bool


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_numbers_are_refused(name):
    options = options_of(name, takes_numbers)
    assert {"learning_rate"} < set(options)
    for option in options:
        for value in NO_NUMBERS:
            with pytest.raises(ValueError, match=f"{name}: {option} is .*; pass a"):
                make(name, **{option: value})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_switches_and_no_dtypes_are_refused(name):
    for option in options_of(name, lambda p: p.annotation is bool):
        for value in (2, None, "yes", [True]):
            with pytest.raises(ValueError, match=f"{name}: {option} is .*; pass True or False"):
                make(name, **{option: value})
    for option in options_of(name, lambda p: "dtype" in p.name):
        for value in (1, "a", [1], jnp.ones(3)):
            with pytest.raises(ValueError, match=f"{name}: {option} is .*no dtype"):
                make(name, **{option: value})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("adam", "b1", 1.0),
        ("adamw", "b2", -0.1),
        ("lion", "b1", 1.5),
        ("muon", "beta", 1.0),
        ("muon", "adam_b1", np.float32(1.0)),
        ("adam", "eps", -1e-8),
        ("lamb", "eps_root", jnp.float32(-1.0)),
    ],
)
def test_numbers_out_of_range_are_refused(name, option, value):
    with pytest.raises(ValueError, match=f"{name}: {option} is"):
        make(name, **{option: value})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scalars_of_any_kind_are_one_number(name):
    """Python's, NumPy's and JAX's, also traced ones."""
    params = {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)}
    # muon's iterations would amplify what rounds of a gradient of low rank.
    grads = {"w": jnp.eye(8) + 0.1 * jnp.sin(params["w"])}

    def updates(rate):
        tx = make(name, learning_rate=rate)
        return tx.update(grads, tx.init(params), params)[0]["w"]

    expected = updates(0.5)
    for rate in (np.float64(0.5), np.float32(0.5), jnp.float32(0.5), np.array(0.5)):
        np.testing.assert_allclose(updates(rate), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(updates)(0.5), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        updates(optax.constant_schedule(0.5)), expected, rtol=1e-5, atol=1e-6
    )
    assert make(name, learning_rate=1).init(params) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mask={"w": True}), "mask is a PyTreeDef.* pass bools in a tree"),
        (dict(mask="w"), "mask has 'w'.* pass True"),
        (dict(mask={"w": np.ones(2, bool), "b": True}), r"mask has an array of shape \(2,\)"),
        (dict(learning_rate=lambda count: None), "schedule of learning_rate returned None"),
        (dict(weight_decay=lambda count: jnp.ones(2)), "schedule of weight_decay returned"),
        (dict(mu_dtype="int8"), "mu_dtype is int8, which holds no fractions"),
    ],
)
def test_masks_schedules_and_dtypes_are_refused_by_name(options, message):
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=message):
        tx = optim.adamw(**dict(learning_rate=0.1) | options)
        tx.update(params, tx.init(params), params)


def test_muon_takes_one_step_or_more():
    with pytest.raises(ValueError, match=r"muon: ns_steps is 0.* pass"):
        optim.muon(0.1, ns_steps=0)


def test_dtypes_under_inject_hyperparams():
    params = {"w": jnp.ones((4, 8))}
    make_tx = optax.inject_hyperparams(optim.adafactor, static_args="min_dim_size_to_factor")
    tx = make_tx(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9)
    assert optax.tree_utils.tree_get(tx.init(params), "ema")["w"].dtype == jnp.float32
    jax.eval_shape(tx.update, params, tx.init(params), params)
    tx = optax.inject_hyperparams(optim.adafactor)(0.1)
    with pytest.raises(ValueError, match=r"min_dim_size_to_factor is traced.* static_args"):
        jax.eval_shape(tx.update, params, tx.init(params), params)
    with pytest.raises(ValueError, match=r"adamw: mu_dtype is .*no dtype; pass its name"):
        optax.inject_hyperparams(optim.adamw)(0.1, mu_dtype=jnp.bfloat16).init(params)
