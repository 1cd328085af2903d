"""jaxfused.optim's `step`: Optax's numbers in place, and the additions of a StepState."""

import functools
import os
import subprocess
import sys
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxfused import optim
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.optim_training import (
    assert_same_bits,
    exact_bias_correction,
    make_grads,
    make_params,
    optax_step,
)

OPTIMIZERS = {
    "adam": {},
    "adamw": {"weight_decay": 0.1},
    "lion": {},
    "sgd": {"momentum": 0.9},
    "lamb": {"weight_decay": 0.1},
    "adafactor": {"min_dim_size_to_factor": 4},
    "muon": {"nesterov": False},  # Optax uses the same Nesterov momentum for its Adam.
}


@pytest.fixture(autouse=True)
def exact_optax(monkeypatch):
    monkeypatch.setattr(optax.tree, "bias_correction", exact_bias_correction)


def of_optax(name):
    return optax.contrib.muon if name == "muon" else getattr(optax, name)


def two_trees(name):
    """Returns a tree twice, for both libraries; Optax's muon cannot take an empty matrix."""
    params, expected = make_params(), make_params()
    if name == "muon":
        for tree in (params, expected):
            tree["rest"][1] = jnp.zeros((3, 4, 2))
    return params, expected


optimizers = pytest.mark.parametrize("name, options", OPTIMIZERS.items())


def copy_of(tree):
    """Copies a tree that a test reads after a step has donated it."""
    return jax.tree.map(np.array, tree)


def assert_close(actual, expected, tolerance=1e-6):
    """Asserts equality up to a few roundings, for programs that XLA fuses differently."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


# --- Optax's numbers ------------------------------------------------------------------------------


# Other tests run a few steps of each optimizer.
@parametrize(("name", "options"), [*OPTIMIZERS.items()], quick=(1, 6))
def test_1000_steps(name, options):
    schedule = optax.cosine_decay_schedule(0.02, 1000)
    ours = getattr(optim, name)(schedule, **options)
    theirs = of_optax(name)(schedule, **options)
    their_step = optax_step(theirs)
    params, expected = two_trees(name)
    state, their_state = ours.init(params), theirs.init(expected)
    for i in range(1000):
        grads = make_grads(params, i)
        params, state = ours.step(grads, state, params)
        expected, their_state = their_step(grads, their_state, expected)
    if name == "muon":  # Its products are batched, and thus summed in another order.
        assert_close((params, state), (expected, their_state), 1e-5)
    else:
        assert_same_bits((params, state), (expected, their_state))


ADAFACTOR = [
    dict(min_dim_size_to_factor=4, momentum=0.9, dtype_momentum=jnp.bfloat16),
    dict(factored=False, clipping_threshold=None, multiply_by_parameter_scale=False),
    dict(weight_decay_rate=1e-3, weight_decay_mask=lambda t: jax.tree.map(lambda p: p.ndim > 1, t)),
    dict(learning_rate=None, decay_rate=0.9, decay_offset=-1, eps=1e-20),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ADAFACTOR)
def test_1000_steps_of_adafactor(options):
    options = {"learning_rate": optax.cosine_decay_schedule(0.02, 1000), **options}
    ours, theirs = optim.adafactor(**options), optax.adafactor(**options)
    their_step = optax_step(theirs)
    params, expected = make_params(), make_params()
    state, their_state = ours.init(params), theirs.init(expected)
    for i in range(1000):
        grads = make_grads(params, i)
        params, state = ours.step(grads, state, params)
        expected, their_state = their_step(grads, their_state, expected)
    assert_same_bits((params, state), (expected, their_state))


@optimizers
def test_clipping(name, options):
    ours = getattr(optim, name)(0.02, **options)
    theirs = optax.chain(optax.clip_by_global_norm(6.0), of_optax(name)(0.02, **options))
    their_step = optax_step(theirs)
    params, expected = two_trees(name)
    state, their_state = ours.init(params), theirs.init(expected)
    clipped = []
    for i in range(50):
        grads = jax.tree.map(lambda g, i=i: g * (i % 3) / 2, make_grads(params, i))
        clipped.append(float(optax.tree.norm(grads)) > 6.0)
        params, state = ours.step(grads, state, params, max_norm=6.0)
        expected, their_state = their_step(grads, their_state, expected)
    assert_close((params, state), (expected, their_state[1]))
    assert any(clipped) and not all(clipped)


def test_clipping_leaves_small_gradients_alone():
    tx = optim.sgd(1.0)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    grads = {"a": put([3.0, 0.0]), "b": put([4.0])}
    clipped, _ = tx.step(grads, tx.init(params), copy_of(params), max_norm=1.0)
    untouched, _ = tx.step(grads, tx.init(params), copy_of(params), max_norm=jnp.array(6.0))
    np.testing.assert_allclose(clipped["a"], [-0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [-0.8], rtol=1e-6)
    np.testing.assert_array_equal(untouched["a"], [-3.0, 0.0])


def test_the_norm_of_float16_gradients_does_not_overflow():
    tx = optim.sgd(1.0)
    params = jnp.zeros(2, jnp.float16)
    params, _ = tx.step(put([300.0, 400.0], jnp.float16), tx.init(params), params, max_norm=5)
    np.testing.assert_array_equal(params, np.array([-3.0, -4.0], np.float16))


def test_dtypes_stay():
    """Optax lets float32 gradients widen bfloat16 moments, which a step in place cannot do."""
    tx = optim.adamw(0.1)
    params = make_params(jnp.bfloat16)
    state = tx.init(params)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (params, state))
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    params, state = tx.step(grads, state, params)
    assert jax.tree.map(lambda leaf: leaf.dtype, (params, state)) == dtypes


def test_parameter_without_gradient_stays():
    tx = optim.adam(0.1)
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    params, state = tx.step({"a": jnp.ones(2), "b": None}, tx.init(params), params)
    np.testing.assert_array_equal(params["b"], np.ones(3))
    np.testing.assert_array_equal(state[0].nu["b"], np.zeros(3))
    assert float(params["a"][0]) != 1


@optimizers
@pytest.mark.parametrize("empty", [{}, {"a": None}])
def test_empty_trees(name, options, empty):
    tx = getattr(optim, name)(0.1, **options)
    state = tx.init_step(empty, ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8)
    params, state = tx.step(empty, state, empty, max_norm=1.0)
    assert params == state.ema == state.compute == empty
    assert int(state.skipped) == 0


def test_parameters_of_an_nnx_module():
    tx = optim.adamw(0.1)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    before = copy_of(nnx.state(model, nnx.Param))
    params = nnx.state(model, nnx.Param)
    state = tx.init(params)
    grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((4, 3))) ** 2))(model)
    params, state = tx.step(grads, state, params)
    nnx.update(model, params)
    expected, _ = optax_step(optax.adamw(0.1))(grads, optax.adamw(0.1).init(before), before)
    assert_same_bits(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(expected))


# --- one jitted function that donates -------------------------------------------------------------


def buffers_of(tree):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("extras", [False, True])
@optimizers
def test_step_donates(name, options, extras):
    tx = getattr(optim, name)(0.1, **options)
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    if extras:
        state = tx.init_step(params, ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8)
    else:
        state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    buffers = buffers_of((params, state))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of buffers that were donated in vain.
        new = tx.step(grads, state, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(grads))
    assert buffers_of(new) == buffers


def test_step_compiles_once():
    tx = optim.sgd(optax.linear_schedule(0.1, 0.0, 10))

    @chex.assert_max_traces(n=1)
    def update(grads, state, params):
        return tx.update(grads, state, params)

    counting = optim.FusedTransformation(tx.init, update)
    params = jnp.ones(3)
    state = counting.init_step(params, ema_decay=0.9, loss_scale=8)
    for max_norm in (1.0, 2.0, 3.0):
        params, state = counting.step(jnp.ones(3), state, params, max_norm=max_norm)


def test_inside_jit_and_scan():
    tx = optim.adamw(0.1)

    @jax.jit
    def train(params, state):
        def body(carry, i):
            params, state = carry
            grads = jax.tree.map(lambda p: p + i, params)
            return tx.step(grads, state, params, max_norm=1.0), None

        return jax.lax.scan(body, (params, state), jnp.arange(4))[0]

    params = make_params()
    state = tx.init_step(params, ema_decay=0.5, loss_scale=2.0)
    scanned, scanned_state = train(params, state)
    for i in range(4):
        grads = jax.tree.map(lambda p, i=i: p + i, params)
        params, state = tx.step(grads, state, params, max_norm=1.0)
    assert_close((scanned, scanned_state), (params, state))


# --- gradients that are not finite ----------------------------------------------------------------


@optimizers
def test_nonfinite_gradients_are_skipped(name, options):
    tx = getattr(optim, name)(optax.linear_schedule(0.1, 0.0, 10), **options)
    step = functools.partial(tx.step, max_norm=1.0, skip_nonfinite=True)
    params = make_params()
    state = tx.init(params)
    params, state = step(make_grads(params), state, params)
    before = copy_of((params, state))
    for bad in (np.nan, np.inf, -np.inf):
        grads = make_grads(params, 1)
        grads["dense"]["b"][32] = bad
        params, state = step(grads, state, params)
        assert_same_bits((params, state), before)

    # The next good step is as if there had been no bad ones.
    grads = make_grads(params, 1)
    after = step(grads, state, params)
    params, state = jax.tree.map(jnp.array, before)
    assert_same_bits(after, step(grads, state, params))
    assert not np.array_equal(after[0]["dense"]["w"], before[0]["dense"]["w"])


def test_nonfinite_gradients_are_taken_without_skip():
    tx = optim.sgd(0.1)
    params = jnp.ones(2)
    params, _ = tx.step(put([np.nan, 1.0]), tx.init(params), params)
    assert np.isnan(params[0]) and not np.isnan(params[1])


def test_step_state_counts_skipped_steps():
    tx = optim.adam(0.1)
    params = jnp.ones(2)
    state = tx.init_step(params, ema_decay=0.5, compute_dtype=jnp.bfloat16)
    before = copy_of((params, state))
    params, state = tx.step(put([np.nan, 1.0]), state, params, skip_nonfinite=True)
    assert int(state.skipped) == 1
    assert_same_bits(
        (params, state.optimizer, state.ema, state.compute),
        (before[0], before[1].optimizer, before[1].ema, before[1].compute),
    )


# --- loss scale -----------------------------------------------------------------------------------


def test_loss_scale_grows_and_halves():
    tx = optim.sgd(0.0)
    params = jnp.ones(1)
    state = tx.init_step(params, loss_scale=4.0, growth_interval=3)
    good, bad = jnp.ones(1), put([np.inf])
    history = []
    for grads in [good] * 3 + [good, bad] + [good] * 3 + [bad] * 5:
        params, state = tx.step(grads, state, params)
        history.append(float(state.loss_scale))
    assert history == [4, 4, 8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1]
    assert int(state.skipped) == 6
    assert state.loss_scale.dtype == jnp.float32


def test_loss_scale_stays_finite():
    tx = optim.sgd(0.0)
    params = jnp.ones(1)
    state = tx.init_step(params, loss_scale=2.0**126, growth_interval=1)
    for _ in range(3):
        params, state = tx.step(jnp.ones(1), state, params)
    assert float(state.loss_scale) == 2.0**127


@optimizers
def test_gradients_are_unscaled(name, options):
    tx = getattr(optim, name)(0.1, **options)
    params = make_params()
    plain, scaled = make_params(), make_params()
    plain_state, scaled_state = tx.init(params), tx.init_step(params, loss_scale=1024.0)
    for i in range(5):
        grads = make_grads(params, i)
        plain, plain_state = tx.step(grads, plain_state, plain, max_norm=1.0)
        scaled_grads = jax.tree.map(lambda g: 1024 * g, grads)
        scaled, scaled_state = tx.step(scaled_grads, scaled_state, scaled, max_norm=1.0)
    assert_close((scaled, scaled_state.optimizer), (plain, plain_state))


def test_float16_gradients_are_unscaled_in_float32():
    tx = optim.sgd(1.0)
    params = jnp.zeros(1)
    state = tx.init_step(params, compute_dtype=jnp.float16, loss_scale=2.0**15)
    tiny = 2.0**-30  # below float16's smallest number; 2**-15 when scaled
    params, state = tx.step(put([tiny * 2.0**15], jnp.float16), state, params)
    assert float(params[0]) == -tiny


# --- average and copy -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ema(dtype):
    tx = optim.sgd(0.5)
    params = {"w": put([1.0, -2.0, 3.0], dtype)}
    state = tx.init_step(params, ema_decay=0.9)
    ema = np.float64(params["w"])
    for i in range(20):
        params, state = tx.step(make_grads(params, i), state, params)
        ema = 0.9 * ema + 0.1 * np.float64(params["w"])
    assert state.ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.ema["w"], ema, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compute_dtype", [jnp.bfloat16, jnp.float32])
def test_compute_copy(compute_dtype):
    tx = optim.adamw(0.1)
    params = make_params()
    state = tx.init_step(params, compute_dtype=compute_dtype)
    for i in range(3):
        assert_same_bits(state.compute, jax.tree.map(lambda p: p.astype(compute_dtype), params))
        grads = make_grads(state.compute, i)
        params, state = tx.step(grads, state, params)
    assert params["dense"]["w"].dtype == jnp.float32
    assert int(state.skipped) == 0


def test_step_state_restores_from_a_checkpoint(tmp_path):
    tx = optim.adamw(0.1)
    params = {"w": jnp.ones((3, 2))}
    state = tx.init_step(params, ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8)
    params, state = tx.step({"w": jnp.ones((3, 2))}, state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        fresh = tx.init_step(params, ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8)
        restored = checkpointer.restore(tmp_path / "state", fresh)
    assert_same_bits(restored, state)


# --- errors ---------------------------------------------------------------------------------------


def test_state_of_another_optimizer():
    params = jnp.ones(2)
    with pytest.raises(ValueError, match=r"it lacks .*\.nu.* init\(params\)"):
        optim.adamw(0.1).step(params, optim.lion(0.1).init(params), jnp.ones(2))


def test_state_of_other_shapes():
    tx = optim.adamw(0.1)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        tx.step(jnp.ones(2), tx.init(jnp.ones(3)), jnp.ones(2))


@pytest.mark.parametrize("grads", [{"w": jnp.ones(3)}, {"w": jnp.ones(2), "v": jnp.ones(2)}, {}])
def test_gradients_of_other_places_or_shapes(grads):
    tx = optim.adamw(0.1)
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"grads have leaves .*in a tree like params"):
        tx.step(grads, tx.init(params), params)


def test_whether_to_skip_is_true_or_false():
    tx, params = optim.sgd(0.1), jnp.ones(2)
    with pytest.raises(ValueError, match=r"step: skip_nonfinite is 'yes'.* pass"):
        tx.step(params + 1, tx.init(params), params, skip_nonfinite="yes")
    tx.step(params + 1, tx.init(params), params, skip_nonfinite=jnp.array(True))


def test_gradients_of_integers():
    tx, params = optim.sgd(0.1), {"w": jnp.ones(2), "i": jnp.arange(2)}
    grads = {"w": jnp.ones(2), "i": np.zeros(2, jax.dtypes.float0)}
    with pytest.raises(ValueError, match=r"float0.* pass None"):
        tx.step(grads, tx.init(params), params)
    moved, _ = tx.step(grads | {"i": None}, tx.init(params), params)
    assert moved["i"].tolist() == [0, 1]


def test_an_array_in_two_places_cannot_be_donated():
    tx, shared = optim.sgd(0.1), jnp.ones(2)
    params = {"embedding": shared, "head": shared}
    with pytest.raises(ValueError, match=r"one array has two places.* pass copies"):
        tx.step(jax.tree.map(jnp.ones_like, params), tx.init(params), params)


@pytest.mark.parametrize("other", ["chain", "init_step", "raw"])
def test_update_names_the_state_that_it_needs(other):
    tx, params = optim.adamw(0.1), jnp.ones(2)
    state = {
        "chain": optax.chain(optax.clip(1.0), tx).init(params),
        "init_step": tx.init_step(params),
        "raw": [{"count": 0, "mu": params, "nu": params}, None, None],
    }[other]
    with pytest.raises(ValueError, match=r"update: the state is .* init\(params\)"):
        tx.update(params, state, params)


@pytest.mark.parametrize(
    "max_norm", [0, -1.0, np.nan, np.float32(-1), np.ones(2), jnp.ones(2), True, "1"]
)
def test_max_norm_must_be_positive(max_norm):
    tx = optim.sgd(0.1)
    params = jnp.ones(2)
    with pytest.raises(ValueError, match=r"max_norm is .* pass 1\.0"):
        tx.step(jnp.ones(2), tx.init(params), params, max_norm=max_norm)


@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 1.0},
        {"ema_decay": -0.1},
        {"loss_scale": 0.5},
        {"loss_scale": np.inf},
        {"loss_scale": 2.0, "growth_interval": 0},
        {"loss_scale": 2.0, "growth_interval": 2.5},
        {"loss_scale": "8"},
        {"ema_decay": "0.9"},
        {"compute_dtype": "int8"},
        {"compute_dtype": "half16"},
        {"rounding_seed": 1.5},
    ],
)
def test_init_step_arguments(options):
    (name, _), *_ = reversed(options.items())
    with pytest.raises(ValueError, match=f"init_step: {name} is .* pass "):
        optim.sgd(0.1).init_step(jnp.ones(2), **options)


# --- several devices ------------------------------------------------------------------------------

SHARDED_STEP = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxfused import optim
from tests.support.arrays import put
from tests.support.optim_training import assert_same_bits, make_grads, make_params, optax_step

mesh = jax.make_mesh((4, 2), ("data", "model"))
specs = {"w": P("data", "model"), "b": P("model"), "replicated": P()}
host = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32),
        "replicated": np.ones(3, np.float32)}
put = lambda tree: {k: jax.device_put(tree[k], NamedSharding(mesh, specs[k])) for k in tree}

for tx in (optim.adamw(0.1), optim.lamb(0.1)):
    params, single = put(host), jax.tree.map(jnp.array, host)
    shardings = jax.tree.map(lambda p: p.sharding, params)
    options = dict(ema_decay=0.9, compute_dtype=jnp.bfloat16, loss_scale=8.0)
    state, single_state = tx.init_step(params, **options), tx.init_step(single, **options)
    for i in range(3):
        grads = {k: v * (i + np.arange(v.size, dtype=np.float32).reshape(v.shape))
                 for k, v in host.items()}
        params, state = tx.step(put(grads), state, params, max_norm=1.0)
        single, single_state = tx.step(grads, single_state, single, max_norm=1.0)
    for tree in (params, state.ema, state.compute, state.optimizer[0].mu, state.optimizer[0].nu):
        for k in tree:
            assert tree[k].sharding.is_equivalent_to(shardings[k], tree[k].ndim), (k, tree[k])
    for k in host:
        np.testing.assert_allclose(params[k], single[k], rtol=1e-5)
        np.testing.assert_allclose(state.ema[k], single_state.ema[k], rtol=1e-5)
print("same")
"""


@pytest.mark.exhaustive
def test_sharded_parameters_keep_their_sharding():
    result = subprocess.run(
        [sys.executable, "-c", SHARDED_STEP],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "same\n", result.stderr
