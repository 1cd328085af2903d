import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from jaxfused.ops.sampling import row_options, sample_xla
from jaxfused.ops.sampling.penalties import penalized
from jaxfused.ops.sampling.row_options import filters_of
from tests.cases.sample import kept_by_sorting, token_by_sorting
from tests.support.arrays import put

PROBABILITIES = (0.4, 0.3, 0.15, 0.1, 0.05)


@functools.partial(jax.jit, static_argnums=0)
def kept_words(names, logits, *values):
    """Returns which words [M, V] the options keep."""
    options = dict.fromkeys(("top_k", "top_p", "min_p")) | dict(zip(names, values, strict=True))
    temperature = jnp.ones(logits.shape[0]) * options.pop("temperature", 1.0)
    matrix, _ = filters_of("sample", logits, temperature, *options.values())
    filters = sample_xla.unpacked(matrix)
    row = sample_xla.row_of(logits, filters.inverse_temperature)
    weight = sample_xla.weight_of_top_k(row, filters)

    def of_word(word):
        return sample_xla.is_kept(row, filters, weight, jnp.full(logits.shape[0], word))[0]

    return jax.lax.map(of_word, jnp.arange(logits.shape[-1])).T


def kept(logits, **options):
    values = [put(np.asarray(value)) for value in options.values()]
    return np.asarray(kept_words(tuple(options), logits, *values))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "top_p",
            {0.39: 1, 0.4: 1, 0.41: 2, 0.7: 2, 0.71: 3, 0.85: 3, 0.851: 4, 0.95: 4, 0: 1, 1: 5},
        ),
        ("min_p", {0.1: 5, 0.25: 4, 0.375: 3, 0.3751: 2, 0.75: 2, 0.7501: 1, 1.0: 1, 0: 5}),
        ("top_k", {0: 5, 1: 1, 2: 2, 5: 5, 99: 5}),
    ],
)
def test_filters_keep_the_words_that_transformers_and_llama_cpp_keep(option, expected):
    values = np.asarray(list(expected), np.int32 if option == "top_k" else np.float32)
    logits = np.tile(np.log(np.float32(PROBABILITIES)), (len(values), 1))
    found = kept(put(logits), **{option: values})
    # The first words, since the probabilities fall.
    np.testing.assert_array_equal(
        found, np.arange(5) < np.asarray(list(expected.values()))[:, None]
    )


def test_of_equal_words_the_first_are_kept():
    found = kept(jnp.zeros((5, 8)), top_p=np.float32([0.1, 0.24, 0.25, 0.26, 0.5]))
    np.testing.assert_array_equal(found.sum(-1), [1, 2, 2, 3, 4])
    np.testing.assert_array_equal(found, np.sort(found, -1)[:, ::-1])
    np.testing.assert_array_equal(
        kept(put([[3.0, 2, 2, 2, 1]], jnp.float32), top_k=2), [[1, 1, 0, 0, 0]]
    )
    # The filters come after the temperature, and top_p shares out what top_k keeps.
    p = put([np.log(PROBABILITIES)], jnp.float32)
    for temperature, count in ((0.5, 2), (2.0, 4)):
        assert kept(p, temperature=temperature, top_p=0.8).sum() == count
    for temperature, count in ((0.5, 2), (2.0, 5)):
        assert kept(p, temperature=temperature, min_p=0.25).sum() == count
    assert kept(p, top_k=3, top_p=0.8).sum() == 2
    assert kept(p, top_p=0.8).sum() == 3


def drawn_rows(rows, words, dtype):
    """Returns rows with ties, with words that are excluded, wide ones and narrow ones."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(rows, words)) * np.geomspace(0.1, 30.0, rows)[:, None]
    logits[1::4] = np.round(logits[1::4])
    logits[2::4][rng.random((len(logits[2::4]), words)) < 0.3] = -np.inf
    logits[0] = 0.0
    return put(logits, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kept_set_is_that_of_a_sort(dtype):
    rng = np.random.default_rng(5)
    rows, words = 48, 331
    logits = drawn_rows(rows, words, dtype)
    options = dict(
        temperature=rng.choice([0.3, 1.0, 1.7], rows).astype(np.float32),
        top_k=rng.choice([0, 1, 7, 100, words, 10**6], rows),
        top_p=rng.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 1e-3, 0.3, 1.0], rows).astype(np.float32),
    )
    found = kept(logits, **options)
    undecided = 0
    for i, row in enumerate(np.asarray(logits, np.float32)):
        of_row = {name: float(values[i]) for name, values in options.items()}
        of_row["top_k"] = int(of_row["top_k"])
        # A sum that rounding brings to the other side of top_p would leave the set open.
        few, many = (kept_by_sorting(row, **of_row, slack=s) for s in (2.0**-19, -(2.0**-20)))
        if (few != many).any():
            undecided += 1
        else:
            np.testing.assert_array_equal(found[i], few, err_msg=f"row {i}: {of_row}")
    assert undecided <= 6


def test_tokens_are_those_of_a_sort_with_the_same_noise():
    rng = np.random.default_rng(7)
    rows, words = 64, 211
    logits = drawn_rows(rows, words, jnp.float32)
    options = dict(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0], rows).astype(np.float32),
        top_k=rng.choice([0, 1, 5, 60], rows),
        top_p=rng.choice([0.05, 0.5, 0.93, 1.0], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.01], rows).astype(np.float32),
    )
    seeds = put(rng.integers(2**32, size=(rows, 2)), jnp.uint32)

    @jax.jit
    def drawn(logits, seeds, temperature, **filters):
        filters, is_filtered = filters_of("sample", logits, temperature, **filters)
        tokens = sample_xla.sample(logits, seeds, filters, is_filtered=is_filtered)
        return tokens, sample_xla.gumbel(seeds, words)

    tokens, noise = drawn(logits, seeds, **options)
    for i in range(rows):
        of_row = {name: values[i] for name, values in options.items()}
        assert tokens[i] == token_by_sorting(logits[i], noise[i], **of_row), (i, of_row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draws_have_the_filtered_distribution(dtype):
    draws = 6000
    logits = np.tile(np.log(PROBABILITIES), (draws, 1))
    call = jax.jit(lambda logits, seeds: jaxfused.sample(logits, seeds, temperature=1.3, top_p=0.9))
    logits = put(logits, dtype)
    tokens = np.asarray(call(logits, jnp.arange(draws)))
    row = np.asarray(logits[0], np.float64)
    p = np.where(kept_by_sorting(row, temperature=1.3, top_p=0.9), np.exp(row / 1.3), 0.0)
    assert (p > 0).sum() == 4
    expected = draws * p / p.sum()
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[expected == 0].sum() == 0
    p_kept = expected > 0
    chi_square = np.sum((counts - expected)[p_kept] ** 2 / expected[p_kept])
    assert chi_square < 16.3  # the 99.9th percentile for 3 degrees of freedom


def test_noise_is_of_the_gumbel_distribution_and_differs_between_seeds():
    noise = np.asarray(
        jax.jit(sample_xla.gumbel, static_argnums=1)(put(np.eye(2), jnp.uint32), 2**16)
    )
    quantiles = np.array([0.001, 0.1, 0.5, 0.9, 0.999])
    for row in noise:
        below = [(row < -np.log(-np.log(q))).mean() for q in quantiles]
        np.testing.assert_allclose(below, quantiles, atol=4.0 / 2**8 / 2)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.02
    assert abs(np.corrcoef(noise[0, 1:], noise[0, :-1])[0, 1]) < 0.02


def test_every_one_of_many_equal_16_bit_logits_can_be_drawn():
    logits = jnp.zeros((64, 32000), jnp.bfloat16)
    tokens = np.asarray(jaxfused.sample(logits, jnp.arange(64)))
    assert len(np.unique(tokens)) >= 62
    assert tokens.min() < 2000 and tokens.max() > 30000
    assert 12000 < tokens.mean() < 20000


def test_a_row_does_not_depend_on_the_batch():
    rng = np.random.default_rng(11)
    logits, keys = (
        put(rng.normal(size=(6, 50)), jnp.float32),
        jax.random.split(jax.random.key(1), 6),
    )
    p = put(rng.random(6), jnp.float32)

    @jax.jit
    def call(logits, keys, p):
        return jaxfused.sample(logits, keys, position=3, top_p=p, top_k=9)

    tokens = call(logits, keys, p)
    order = np.array([4, 2, 2, 5])
    np.testing.assert_array_equal(call(logits[order], keys[order], p[order]), tokens[order])
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(logits, keys, p), tokens)
    np.testing.assert_array_equal(
        jax.vmap(call, in_axes=(None, 0, 0))(logits[0], keys, p)[0], tokens[0]
    )
    _, scanned = jax.lax.scan(lambda c, a: (c, call(*a)), 0, (logits, keys, p))
    np.testing.assert_array_equal(scanned, tokens)


def test_keys_seeds_positions_and_rows_give_other_noise():
    logits = jnp.zeros((4, 100000))
    sample = jax.jit(jaxfused.sample)
    drawn = [
        sample(logits, 3),
        sample(logits, 4),
        sample(logits, 3, position=1),
        sample(logits, jnp.arange(4) + 10, position=jnp.arange(4)),
        sample(logits.reshape(2, 2, -1), jnp.arange(2) + 20).ravel(),
        sample(logits, jax.random.key(7, impl="rbg")),
    ]
    assert len(np.unique(np.concatenate(drawn))) == 24
    # An integer is the seed of a key, and one key for all is one key for each.
    np.testing.assert_array_equal(sample(logits, jax.random.key(3)), drawn[0])
    np.testing.assert_array_equal(sample(logits[0], 3), drawn[0][0])
    np.testing.assert_array_equal(sample(logits[:1], jnp.arange(1) + 10), drawn[3][:1])


def test_integers_of_64_bits_are_not_those_of_32():
    logits, far = jnp.zeros((1, 100000)), [5, 2**31 + 5, 2**32 + 5, 2**40 + 5, 2**70 + 5]
    drawn = [int(jaxfused.sample(logits, 3, position=p)[0]) for p in far]
    assert len({*drawn}) == len(far) - 1 and drawn[0] == drawn[-1]
    of_arrays = [int(jaxfused.sample(logits, 3, position=np.array([p]))[0]) for p in far[:4]]
    assert of_arrays == drawn[:4]
    none, some = (
        jaxfused.sample(
            put([[2.0, 1.0]]), temperature=0.0, tokens=np.array([[t]]), presence_penalty=9.0
        ).tolist()
        for t in (2**32, 0)
    )
    assert (none, some) == ([0], [1])


def test_rows_without_a_distribution_have_no_token():
    big = float(jnp.finfo(jnp.float32).max)
    logits = put(
        [
            [0.0, np.nan, 1.0, 2.0],
            [-np.inf] * 4,
            [0.0, np.inf, 1.0, -np.inf],
            [-np.inf, -np.inf, -big, -np.inf],
            [-big] * 4,
            [0.0, -0.0, -np.inf, -np.inf],
        ],
        jnp.float32,
    )
    # In long rows XLA computes several values at a time.
    padded = put(np.pad(logits, ((0, 0), (0, 9000)), constant_values=-np.inf), jnp.float32)
    for options in ({}, dict(temperature=0.0), dict(top_p=0.9, top_k=3), dict(temperature=1e-30)):
        for rows in (logits, padded):
            tokens, logprobs = jaxfused.sample(rows, jnp.arange(6), logprobs=1, **options)
            assert tokens[:4].tolist() == [-1, -1, 1, 2]
            assert 0 <= tokens[4] <= 3 and 0 <= tokens[5] <= 1
            assert np.isnan(logprobs.chosen[:2]).all()


def test_the_largest_logit_at_temperature_0_and_at_small_ones():
    logits = put([[1.0, 3.0, 3.0, 2.0]] * 4, jnp.bfloat16)
    assert jaxfused.sample(logits, temperature=0.0).tolist() == [1, 1, 1, 1]
    temperature = put([0.0, 1e-6, 1e-38, 0.0], jnp.float32)
    tokens = jax.jit(jaxfused.sample)(logits, 5, temperature=temperature, min_p=0.5)
    assert tokens[0] == tokens[3] == 1 and set(tokens[1:3].tolist()) <= {1, 2}
    # Equal words share the draw at any temperature.
    many = jax.jit(lambda z: jaxfused.sample(z, 5, temperature=1e-6))(jnp.tile(logits, (50, 1)))
    assert 70 < (np.asarray(many) == 1).sum() < 130


PENALTIES = [
    (dict(repetition_penalty=1.5), [1.3333, -3, 0.5, 0, -0.5]),
    (dict(repetition_penalty=0.5), [4, -1, 0.5, 0, -0.5]),
    (dict(frequency_penalty=0.5), [1, -2.5, 0.5, -0.5, -0.5]),
    (dict(presence_penalty=0.5), [1.5, -2.5, 0.5, -0.5, -0.5]),
    (
        dict(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25),
        [0.0833, -3.75, 0.5, -0.75, -0.5],
    ),
]


@pytest.mark.parametrize(("penalties", "expected"), PENALTIES)
def test_penalties(penalties, expected):
    logits = jnp.asarray([[2.0, -2.0, 0.5, 0.0, -0.5]])
    named = dict.fromkeys(("repetition", "presence", "frequency"))
    named |= {name.removesuffix("_penalty"): value for name, value in penalties.items()}
    for tokens in ([0, 1, 3, 0], [-1, 0, 5, 1, 99, 3, 0, -100]):
        found = penalized("sample", logits, jnp.asarray([tokens]), None, **named)
        np.testing.assert_allclose(found, [expected], atol=1e-4)
    token = jaxfused.sample(logits, temperature=0.0, tokens=jnp.asarray([tokens]), **penalties)
    assert token == np.argmax(expected)


def test_a_prompt_is_for_the_repetition_penalty_alone():
    logits = put([[2.0, 1.5, 1.0]], jnp.float32)
    call = functools.partial(jaxfused.sample, logits, temperature=0.0, prompt=jnp.asarray([[0, 1]]))
    assert call(presence_penalty=5.0) == 0
    assert call(repetition_penalty=3.0) == 2
    assert call(repetition_penalty=3.0, tokens=jnp.asarray([[2]])) == 0
    assert call(repetition_penalty=put([1.4], jnp.float32)) == 0


def test_log_probabilities_are_those_of_the_logits_as_passed():
    logits = put([[1.0, 2.0, 2.0, -np.inf]], jnp.bfloat16)
    token, logprobs = jaxfused.sample(
        logits, temperature=0.0, tokens=jnp.asarray([[1]]), presence_penalty=9.0, logprobs=3
    )
    expected = jax.nn.log_softmax(logits.astype(jnp.float32))[0]
    assert token == 2 and logprobs.chosen.dtype == jnp.float32
    np.testing.assert_allclose(logprobs.chosen, expected[2:3], rtol=1e-6)
    assert logprobs.top_tokens.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(logprobs.top[0], expected[jnp.asarray([1, 2, 0])], rtol=1e-6)
    _, none = jaxfused.sample(logits, 1, logprobs=0)
    assert none.top.shape == (1, 0)


def test_it_runs_below_a_gradient():
    def loss(logits):
        token, logprobs = jaxfused.sample(logits, 3, top_p=0.5, logprobs=1)
        return jnp.sum(jax.nn.one_hot(token, 9) * logits) + jnp.sum(logprobs.chosen)

    logits = jnp.arange(18.0).reshape(2, 9)
    gradient = jax.jit(jax.grad(loss))(logits)
    assert gradient.sum() == 2  # Of the one-hot tokens: the log-probabilities have none.


def test_float64_logits_keep_their_bits():
    with jax.enable_x64(True):
        logits = jnp.asarray([[1.0, 1.0 + 1e-12, 0.0]], jnp.float64)
        assert jaxfused.sample(logits, temperature=0.0) == 1
        assert jaxfused.sample(logits, 2**40 + 1, top_k=1) == 1
        assert jaxfused.sample(logits, 7, top_k=2, top_p=0.4) == 1


def test_integers_of_64_bits():
    for top_k in (2**40, np.int64(2**32 + 1), np.full(1, 2**32 + 1)):
        assert row_options.of_rows("sample", "top_k", top_k, (1,), 0, math.inf) == 2**31 - 1
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for seed in (2**40 + 5, np.int64(2**40 + 5)):
                of_key = jax.random.key_data(jax.random.key(seed))
                np.testing.assert_array_equal(row_options._words_of("sample", seed), of_key)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_it_runs_over_a_mesh(axis_type):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(axis_type,))
    logits = put(np.random.default_rng(0).normal(size=(4, 300)), jnp.float32)
    seeds = jnp.arange(4)

    @jax.jit
    def call(logits, seeds):
        filters = dict(top_p=seeds / 10 + 0.5, top_k=50, min_p=0.01)
        # The prompt is split over nothing.
        history = dict(tokens=seeds[:, None], prompt=np.full((4, 2), 7), repetition_penalty=1.3)
        token, logprobs = jaxfused.sample(logits, seeds, **filters, **history, logprobs=2)
        return token, logprobs.top_tokens

    expected = call(logits, seeds)
    with jax.set_mesh(mesh):
        split = [jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (logits, seeds)]
        chex.assert_trees_all_equal(call(*split), expected)


X = jnp.zeros((2, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(), "key is None.*temperature=0.0"),
        (dict(temperature=put([0.0, 1.0], jnp.float32)), "key is None"),
        (dict(key=1.5), "key has dtype float32.*integer seeds"),
        (dict(key=jnp.zeros(3, int)), r"key has shape \(3,\).*rows of shape \(2,\)"),
        (
            dict(key=jax.random.PRNGKey(0)[None].repeat(2, 0)),
            r"key has shape \(2, 2\).*wrap_key_data",
        ),
        (dict(key=jax.random.PRNGKey(0)), r"key has shape \(2,\).*wrap_key_data.*seeds of int32"),
        (dict(key=1, temperature=-1.0), "temperature is -1.0.*0 or more"),
        (dict(key=1, temperature=np.nan), "temperature is nan"),
        (dict(key=1, temperature=np.inf), "temperature is inf"),
        (dict(key=1, temperature="1"), "temperature is .1., but it is a number or an array"),
        (dict(key=1, top_p=1.5), "top_p is 1.5.*0 to 1"),
        (dict(key=1, top_p=np.float32([0.5, -0.1])), "top_p is -0.1"),
        (dict(key=1, top_k=-1), "top_k is -1"),
        (dict(key=1, top_k=2.5), "top_k has dtype float32; pass integers"),
        (dict(key=1, min_p=2.0), "min_p is 2.0"),
        (dict(key=1, top_p=jnp.ones(3)), r"top_p has shape \(3,\).*rows of shape \(2,\)"),
        (dict(key=1, repetition_penalty=1.2), "repetition_penalty was passed without tokens"),
        (
            dict(key=1, repetition_penalty=0.0, tokens=jnp.zeros((2, 1), int)),
            "repetition_penalty is 0.0",
        ),
        (
            dict(key=1, presence_penalty=1.0, tokens=jnp.zeros((3, 1), int)),
            r"tokens has shape \(3, 1\).*filled up with -1",
        ),
        (dict(key=1, presence_penalty=1.0, tokens=X), "tokens has dtype float32"),
        (dict(key=1, logprobs=6), "logprobs is 6.*0 to 5"),
        (dict(key=1, implementation="pallas"), "no Pallas kernel"),
    ],
)
def test_errors_say_what_to_pass(options, words):
    with pytest.raises(ValueError, match="^sample: .*" + words):
        jaxfused.sample(X, **options)


def test_options_out_of_range_act_as_the_nearest_one_where_they_are_traced():
    logits = put([[0.0, 3.0, 1.0]], jnp.float32)
    call = jax.jit(lambda **options: jaxfused.sample(logits, 3, **options))
    assert call(temperature=-2.0) == 1
    assert call(temperature=jnp.nan) == 1
    assert call(top_p=-1.0) == 1
    assert call(min_p=4.0) == 1
    assert call(top_k=-7, top_p=9.0) == call()
