"""8-bit moments and stochastic rounding: codes, random bits, and the effect on training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxfused import optim
from jaxfused.optim import eight_bit
from jaxfused.runtime import stochastic_rounding
from tests.support.arrays import put
from tests.support.optim_training import assert_same_bits


@functools.cache
def seeds():
    return stochastic_rounding.leaf_seeds(put([3, 1], jnp.uint32), 5, "second_moment")


# --- 8 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((4096,), (16,)),
        ((10, 512), (10, 2)),
        ((5, 12, 512), (5, 12, 2)),
        ((3, 3, 8, 96), (3, 3, 3)),
        ((96, 80), (30,)),
        ((10, 512, 1), (10, 2)),
        ((4095,), None),
        ((2048,), None),
        ((5000,), None),
    ],
)
def test_blocks(shape, scales):
    moment = eight_bit.zero_moment(jnp.zeros(shape), signed=True)
    if scales is None:
        assert moment is None
    else:
        assert (moment.codes.shape, moment.scales.shape) == (shape, scales)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_keep_values(signed):
    values = np.random.default_rng(0).normal(size=(32, 512)).astype(np.float32) ** 3
    values = values if signed else np.abs(values)
    values[0, :256] = 0
    moment = eight_bit.zero_moment(jnp.zeros((32, 512)), signed=signed)
    moment = eight_bit.encode(values, moment, seeds())
    decoded = np.asarray(eight_bit.decode(moment))
    blocks = values.reshape(-1, 256)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(moment.scales).reshape(-1, 1), largest)
    # The distance of the two codes between which stochastic rounding chooses.
    relative = np.abs(blocks) / np.maximum(largest, 1e-30)
    count, power = (127, 2) if signed else (255, 4)
    low = np.floor(count * relative ** (1 / power))
    distance = ((low + 1) ** power - low**power) / count**power
    error = np.abs(decoded.reshape(-1, 256) - blocks)
    assert np.all(error <= largest * (distance + 1e-6))
    assert not decoded[0, :256].any()
    # Decoded values keep their code, unless float32 rounding meets a random choice.
    again = eight_bit.encode(decoded, moment, seeds())
    np.testing.assert_allclose(again.scales, moment.scales, rtol=1e-6)
    assert np.mean(np.asarray(again.codes) != np.asarray(moment.codes)) < 1e-3


@pytest.mark.parametrize("signed", [True, False])
def test_moments_are_right_in_the_mean(signed):
    values = np.geomspace(1e-3, 1.0, 4096, dtype=np.float32).reshape(256, 16).T.reshape(-1)
    values = values * np.where(np.arange(4096) % 3 == 0, -1, 1) if signed else values
    moment = eight_bit.zero_moment(jnp.zeros(4096), signed=signed)

    @jax.jit
    def decoded(step):
        words = jnp.stack([jnp.uint32(9), step])
        array = "first_moment" if signed else "second_moment"
        return eight_bit.decode(
            eight_bit.encode(values, moment, stochastic_rounding.leaf_seeds(words, 0, array))
        )

    mean = np.mean([decoded(jnp.uint32(i)) for i in range(400)], axis=0)
    largest = np.abs(values).reshape(-1, 256).max(axis=1).repeat(256)
    relative = np.abs(values) / largest
    # About the distance of two codes; the mean of 400 draws is off by a fortieth of it.
    distance = largest * (2 / 127 * relative**0.5 if signed else 4 / 255 * relative**0.75)
    assert np.all(np.abs(mean - values) < 0.15 * distance)
    assert abs(np.mean((mean - values) / distance)) < 2e-3


def test_zeros_and_what_is_next_to_them():
    """1e-12 of a block's maximum becomes 0: rounding it up once in 65536 times would be far too much."""
    values = np.zeros(2**18, np.float32)
    values[::256] = 1.0
    values[1::2] = 1e-12
    first = eight_bit.zero_moment(jnp.zeros(2**18), signed=True)
    second = eight_bit.zero_moment(jnp.zeros(2**18), signed=False)
    codes = np.asarray(eight_bit.encode(values, first, seeds()).codes)
    assert not codes[1::2].any() and (codes[::256] == 127).all()
    # A second moment is a divisor, so that only zero has the code 0.
    codes = np.asarray(eight_bit.encode(values**2, second, seeds()).codes)
    assert (codes[1::2] == 1).all() and (codes[::256] == 255).all()
    assert not np.delete(codes[::2], np.s_[::128]).any()


@pytest.mark.parametrize(
    ("b1", "ratio", "least", "most"),
    [
        (0.9, 0.01, 0.95, 1.1),
        (0.99, 0.1, 0.95, 1.1),
        (0.99, 0.01, 0.95, 1.1),
        (0.9, 1e-6, 0.0, 1.1),
    ],
)
def test_small_gradients_in_a_block_move_as_far(b1, ratio, least, most):
    """Small gradients start after 100 steps, next to one of 1: rounding to nearest would ignore them."""

    def moved(make):
        tx, params = make(0.01, b1=b1, weight_decay=0.0), jnp.zeros((16, 256))

        def step(carry, i):
            params, state = carry
            grads = jnp.where(i < 100, 0.0, ratio) * jnp.ones((16, 256))
            return tx.step(grads.at[:, 0].set(1.0), state, params), None

        carry = (params, tx.init(params))
        (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(200)))(carry)
        return params[:, 1:]

    ours, theirs = moved(optim.adamw8bit), moved(optim.adamw)
    assert least < float(ours.mean() / theirs.mean()) < most
    # No value moves too far: a first moment that is rounded up is not divided by a second moment of 0.
    assert float(jnp.abs(ours).max()) < 4 * float(jnp.abs(theirs).max())


def test_a_value_that_is_not_finite_stays_in_its_block():
    values = np.ones(4096, np.float32)
    values[300] = np.nan
    moment = eight_bit.zero_moment(jnp.zeros(4096), signed=True)
    decoded = eight_bit.decode(eight_bit.encode(values, moment, seeds()))
    assert np.isnan(decoded[256:512]).all()
    np.testing.assert_array_equal(np.delete(decoded, np.s_[256:512]), 1)


def test_state_in_8_bits(tmp_path):
    params = {"w": jnp.ones((16, 512)), "b": jnp.ones(7)}
    tx = optim.adamw8bit(optax.linear_schedule(0.1, 0.0, 10))
    theirs = optax.adamw(optax.linear_schedule(0.1, 0.0, 10)).init(params)
    state = tx.init(params)
    coded = jax.tree.map(eight_bit.decode, state, is_leaf=eight_bit.is_coded)
    assert jax.tree.structure(coded) == jax.tree.structure(theirs)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((state[0].mu["w"], state[0].nu["w"])))
    assert nbytes == 2 * 16 * 512 * (1 + 4 / 256)
    params, state = tx.step(jax.tree.map(jnp.ones_like, params), state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        assert_same_bits(checkpointer.restore(tmp_path / "state", tx.init(params)), state)


# --- random rounding ------------------------------------------------------------------------------


def test_rounding_is_right_in_the_mean():
    x = np.random.default_rng(0).normal(size=512).astype(np.float32)

    @jax.jit
    def rounded(step):
        seeds = stochastic_rounding.leaf_seeds(jnp.stack([jnp.uint32(1), step]), 2, "parameter")
        halves = stochastic_rounding.random_halves(seeds, x.shape)
        return stochastic_rounding.round_to_bfloat16(x, halves)

    samples = np.stack([np.float32(rounded(jnp.uint32(i))) for i in range(500)])
    unit = np.abs(x) * 2.0**-7
    assert np.all(np.abs(samples - x) <= unit)
    assert np.all(np.abs(samples.mean(axis=0) - x) < 0.15 * unit)
    assert abs(np.mean((samples.mean(axis=0) - x) / unit)) < 4e-3


def test_what_bfloat16_has_is_not_rounded():
    x = np.array([0.0, -0.0, 1.5, -3.0, 2.0**-126, np.inf, -np.inf, np.nan], np.float32)
    most = jnp.full(x.shape, 0xFFFF, jnp.uint32)
    np.testing.assert_array_equal(np.float32(stochastic_rounding.round_to_bfloat16(x, most)), x)


def test_bits_differ_among_arrays_leaves_and_steps():
    def halves(seed, step, leaf, array):
        words = jnp.array([seed, step], jnp.uint32)
        seeds = stochastic_rounding.leaf_seeds(words, leaf, array)
        return np.asarray(stochastic_rounding.random_halves(seeds, (64, 64))).ravel()

    base = (7, 1, 3, "parameter")
    others = [
        (8, *base[1:]),
        (7, 2, *base[2:]),
        (7, 1, 4, "parameter"),
        (*base[:3], "first_moment"),
    ]
    a = halves(*base)
    assert abs(a.mean() / 65535 - 0.5) < 0.02
    for other in others:
        assert abs(np.corrcoef(a, halves(*other))[0, 1]) < 0.05
    np.testing.assert_array_equal(a, halves(*base))


def test_rounding_counts_steps_that_are_taken():
    tx = optim.sgd(1e-4)
    params = jnp.ones(8, jnp.bfloat16)
    state = tx.init_step(params, rounding_seed=9)
    for g, taken in ((1.0, 1), (np.nan, 1), (1.0, 2)):
        grads = jnp.full(8, g, jnp.bfloat16)
        params, state = tx.step(grads, state, params, skip_nonfinite=True)
        np.testing.assert_array_equal(state.rounding, [9, taken])


def test_small_steps_are_not_lost():
    tx, steps = optim.sgd(1.0), 200
    lost = kept = jnp.ones(4096, jnp.bfloat16)
    lost_state, kept_state = tx.init_step(lost), tx.init_step(kept + 0, rounding_seed=0)
    kept = kept + 0
    for _ in range(steps):
        grads = jnp.full(4096, 1e-4)
        lost, lost_state = tx.step(grads, lost_state, lost)
        kept, kept_state = tx.step(grads, kept_state, kept)
    assert np.all(np.float32(lost) == 1)
    assert abs(np.float32(kept).mean() - (1 - 1e-4 * steps)) < 1e-3


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_has_32_bits(seed):
    with pytest.raises(ValueError, match=r"rounding_seed is .* pass 0"):
        optim.sgd(0.1).init_step(jnp.ones(2), rounding_seed=seed)


# --- training -------------------------------------------------------------------------------------


def losses(tx, dtype, rounding_seed, steps):
    """Trains a small network on real digits, with noise so that the loss does not vanish."""
    from sklearn.datasets import load_digits  # takes more than a second to import

    digits = load_digits()
    images, labels = put(digits.data / 16, jnp.float32), put(digits.target)
    sizes = [(64, 256), (256, 256), (256, 10)]
    params = {}
    for i, (size, key) in enumerate(
        zip(sizes, jax.random.split(jax.random.key(0), 3), strict=True)
    ):
        w = jax.random.normal(key, size) * np.sqrt(2 / size[0])
        params |= {f"w{i}": w.astype(dtype), f"b{i}": jnp.zeros(size[1], dtype)}

    def loss(params, x, y):
        for i in range(3):
            w, b = (params[f"{name}{i}"].astype(jnp.float32) for name in "wb")
            x = (jax.nn.relu(x) if i else x) @ w + b
        return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(len(y)), y])

    def step(carry, i):
        params, state = carry
        some, noise = jax.random.split(jax.random.fold_in(jax.random.key(1), i))
        some = jax.random.randint(some, (128,), 0, len(labels))
        x = images[some] + jax.random.normal(noise, (128, 64)) / 2
        value, grads = jax.value_and_grad(loss)(params, x, labels[some])
        return tx.step(grads, state, params, max_norm=1.0), value

    state = tx.init_step(params, rounding_seed=rounding_seed)
    return jax.lax.scan(step, (params, state), jnp.arange(steps))[1]


@pytest.mark.exhaustive
@pytest.mark.long
def test_1000_steps_lose_as_much():
    def curve(*args):
        values = jax.jit(lambda: losses(*args, steps=1000))()
        return np.asarray(values).reshape(5, 200).mean(axis=1)

    expected = curve(optim.adamw(1e-3), jnp.float32, None)
    for tx, dtype, seed in (
        (optim.adamw8bit(1e-3), jnp.float32, None),
        (optim.adamw(1e-3), jnp.bfloat16, 0),
        (optim.adamw8bit(1e-3), jnp.bfloat16, 0),
    ):
        np.testing.assert_allclose(curve(tx, dtype, seed), expected, rtol=0.01)
    # With rounding to nearest, training in bfloat16 falls behind.
    assert curve(optim.adamw(1e-3), jnp.bfloat16, None)[-1] > 1.02 * expected[-1]
