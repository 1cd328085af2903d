"""magnitude_pruning: how many are pruned and when, blocks, masks, dtypes, messages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfused
from tests.support.arrays import put


def drawn(*shape, dtype="float32"):
    return put(np.random.default_rng(0).normal(size=shape), dtype)


def test_the_smallest_are_pruned_by_the_schedule_and_stay_so():
    schedule = optax.polynomial_schedule(0.0, 0.8, power=3, transition_steps=4)
    opt = optax.chain(optax.sgd(1e-3), jaxfused.optim.magnitude_pruning(schedule, every=2))
    params = {"w": drawn(10, 10), "b": drawn(10)}
    state = opt.init(params)

    @jax.jit
    def step(params, state):
        updates, state = opt.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    zeros = []
    for index in range(6):
        before = params
        params, state = step(params, state)
        zeros.append(int((params["w"] == 0).sum()))
        if index == 2:
            moved = np.abs(before["w"] - 1e-3)
            kept = np.sort(moved.ravel())[zeros[-1] :]
            np.testing.assert_allclose(
                np.sort(np.abs(params["w"]).ravel())[zeros[-1] :], kept, rtol=1e-5
            )
    expected = [int(100 * float(schedule(i // 2 * 2)) + 1e-3) for i in range(6)]
    assert zeros == expected
    assert (params["b"] != 0).all()


def test_a_parameter_without_a_gradient_stays():
    opt = optax.chain(jaxfused.optim.sgd(0.1), jaxfused.optim.magnitude_pruning(0.5))
    params = {"w": drawn(4, 4), "frozen": drawn(4, 4)}
    gradients = {"w": drawn(4, 4), "frozen": None}
    updates, state = opt.update(gradients, opt.init(params), params)
    assert updates["frozen"] is None
    assert opt.update(gradients, state, params)[1][-1].kept["frozen"].all()
    assert opt.update({}, opt.init({}), {})[0] == {}


@pytest.mark.exhaustive
def test_blocks():
    opt = jaxfused.optim.magnitude_pruning(0.5, block_size=32)
    params = [drawn(3, 64, 96), drawn(64, 50)]
    updates, _ = opt.update(jax.tree.map(jnp.zeros_like, params), opt.init(params), params)
    pruned, whole = optax.apply_updates(params, updates)
    blocks = pruned.reshape(3, 2, 32, 3, 32).swapaxes(2, 3)
    assert int((jnp.abs(blocks).sum((-1, -2)) == 0).sum()) == 9
    assert (whole == params[1]).all()
    weight = jaxfused.BlockSparse.from_dense(pruned[0], 32)
    np.testing.assert_array_equal(weight.to_dense(), pruned[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_pruned_parameters_are_zero_in_every_dtype(dtypes):
    params, gradient = drawn(8, 8, dtype=dtypes[0]), drawn(8, 8, dtype=dtypes[1])
    opt = jaxfused.optim.magnitude_pruning(0.25, mask=True)
    updates, _ = opt.update(gradient, opt.init(params), params)
    assert int((optax.apply_updates(params, updates) == 0).sum()) == 16


@pytest.mark.parametrize("dtype, numbers", [("complex64", [9j, 2]), ("float64", [1 + 1e-9, 1])])
def test_magnitudes_have_the_digits_of_the_parameters(dtype, numbers):
    with jax.enable_x64(dtype == "float64"):
        params, opt = put(numbers, dtype), jaxfused.optim.magnitude_pruning(0.5, mask=True)
        updates, _ = opt.update(jnp.zeros_like(params), opt.init(params), params)
        np.testing.assert_array_equal(params + updates, put([numbers[0], 0], dtype))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(sparsity=1.5), "a number from 0 to 1"),
        (dict(sparsity=0.5, every=0), "every is 0"),
        (dict(sparsity=0.5, block_size=2.5), "block_size is 2.5"),
    ],
)
def test_messages(options, words):
    with pytest.raises(ValueError, match=words):
        jaxfused.optim.magnitude_pruning(**options)
    opt = jaxfused.optim.magnitude_pruning(0.5)
    with pytest.raises(ValueError, match="pass params"):
        opt.update(jnp.ones((2, 2)), opt.init(jnp.ones((2, 2))))
