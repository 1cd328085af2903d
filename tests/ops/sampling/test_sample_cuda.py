"""The CUDA C kernel of sample: limits, lowering, and the same tokens as XLA's on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.ops.sampling import sample_cuda
from tests.ops.sampling.test_sample import drawn_rows
from tests.support.arrays import put
from tests.support.calls import have_library
from tests.support.choices import chosen
from tests.support.lowering import kernels

sample = functools.partial(jax.jit, static_argnames=("implementation", "logprobs"))(jaxfused.sample)


def options_of(rows, seed=0):
    """Returns options of which each row has its own."""
    rng = np.random.default_rng(seed)
    return dict(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0, 1e-4], rows).astype(np.float32),
        top_k=rng.choice([0, 0, 1, 5, 60, 10**6], rows).astype(np.int32),
        top_p=rng.choice([0.0, 0.05, 0.5, 0.93, 1.0, 1.0], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.5], rows).astype(np.float32),
        position=rng.integers(100, size=rows).astype(np.int32),
    )


def assert_same_tokens(logits, **options):
    rows = logits.shape[0]
    actual = sample(logits, jnp.arange(rows), implementation="cuda", **options)
    again = sample(logits, jnp.arange(rows), implementation="cuda", **options)
    expected = sample(logits, jnp.arange(rows), implementation="xla", **options)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual, again)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (1, "float32"),
        (3, "bfloat16"),
        (257, "float16"),
        (4099, "float32"),
        (4099, "bfloat16"),
        (17000, "float32"),
    ],
)
def test_tokens_are_those_of_xla(words, dtype):
    rows = 24 if words < 5000 else 8
    logits = drawn_rows(rows, words, dtype)
    assert_same_tokens(logits, **options_of(rows, seed=words))
    assert_same_tokens(logits)
    assert_same_tokens(logits, top_p=0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [50257, 128256, 262144])
def test_tokens_of_whole_vocabularies(request, words):
    if request.config.getoption("--emulated-cuda"):
        pytest.skip("the emulator takes minutes")
    rng = np.random.default_rng(words)
    for scale in (0.5, 3.0):
        for dtype in ("float32", "bfloat16"):
            logits = put(rng.normal(size=(64, words)) * scale, dtype)
            assert_same_tokens(logits, **options_of(64))
            assert_same_tokens(logits, top_p=0.9)
            assert_same_tokens(logits, top_k=50, top_p=0.95)


@pytest.mark.gpu
def test_rows_without_a_distribution_and_with_extreme_numbers():
    big = float(jnp.finfo(jnp.float32).max)
    rows = [
        [0.0, np.nan, 1.0],
        [-np.inf] * 3,
        [0.0, np.inf, 1.0],
        [-np.inf, -np.inf, -big],
        [-big] * 3,
        [big, -big, 0.0],
        [np.inf, -np.inf, np.inf],
        [0.0, -0.0, -np.inf],
    ]
    for words in (3, 9000):
        logits = np.full((len(rows), words), -np.inf)
        logits[:, -3:] = rows
        for options in (
            {},
            dict(temperature=0.0),
            dict(top_p=0.9),
            dict(top_k=2, top_p=0.5),
            dict(temperature=1e-30, min_p=0.1),
            dict(temperature=1e30),
        ):
            assert_same_tokens(put(logits, jnp.float32), **options)


@pytest.mark.gpu
def test_words_that_are_kept_are_drawn_as_often_as_they_are_likely():
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = put(np.tile(np.log(p), (3000, 1)), jnp.float32)
    tokens = sample(logits, jnp.arange(3000), top_p=0.8, implementation="cuda")
    counts = np.bincount(tokens, minlength=5)
    expected = 3000 * p[:3] / p[:3].sum()
    assert counts[3:].sum() == 0
    assert np.sum((counts[:3] - expected) ** 2 / expected) < 13.8  # 99.9 %, 2 degrees of freedom


@pytest.mark.gpu
def test_every_one_of_many_equal_logits_can_be_drawn():
    logits = jnp.zeros((64, 9000), jnp.bfloat16)
    tokens = np.asarray(sample(logits, jnp.arange(64), top_p=0.5, implementation="cuda"))
    assert len(np.unique(tokens)) >= 60 and tokens.min() < 500 and 4000 < tokens.max() < 4501


@pytest.mark.gpu
def test_min_p_keeps_words_that_are_seldom_the_best_of_all():
    # In a fifth of the rows the words of highest scores are others.
    logits = np.full((8, 3000), -0.75)
    logits[:, 7::30] = 0.0
    for options in (dict(min_p=0.5), dict(min_p=0.5, top_p=0.01), dict(min_p=1.0, top_k=50)):
        assert_same_tokens(put(logits, jnp.float32), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [5, 4099, 17000])
def test_log_probabilities_are_those_of_xla(words):
    for dtype in ("float32", "bfloat16"):
        logits = np.array(drawn_rows(8, words, dtype))
        logits[5], logits[6, 1], logits[7, 2] = -np.inf, np.nan, np.inf
        results = [
            sample(put(logits), jnp.arange(8), top_p=0.5, logprobs=4, implementation=implementation)
            for implementation in ("cuda", "xla")
        ]
        (token, actual), (expected_token, expected) = results
        np.testing.assert_array_equal(token, expected_token)
        np.testing.assert_array_equal(actual.top_tokens, expected.top_tokens)
        np.testing.assert_allclose(actual.top, expected.top, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(actual.chosen, expected.chosen, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
def test_it_runs_under_vmap_and_on_one_row():
    logits = drawn_rows(8, 300, jnp.float32).reshape(2, 4, 300)
    call = functools.partial(jaxfused.sample, top_p=0.7, implementation="cuda")
    keys = jnp.arange(8).reshape(2, 4)
    expected = jax.jit(functools.partial(call, implementation="xla"))(logits, keys)
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(logits, keys), expected)
    np.testing.assert_array_equal(jax.jit(call)(logits[0, 1], keys[0, 1]), expected[0, 1])


def test_a_gpu_runs_one_kernel_once_it_is_measured(hopper, monkeypatch):
    have_library(monkeypatch)
    logits, seeds = jnp.zeros((64, 128256)), jnp.arange(64)
    call = functools.partial(jaxfused.sample, top_p=0.9, top_k=50)
    assert chosen(call, logits, seeds)["sample forward"] == "cuda"
    assert kernels(call, logits, seeds) == ["jaxfused_sample"]
    with_logprobs = functools.partial(call, logprobs=20)
    assert kernels(with_logprobs, logits, seeds) == ["jaxfused_sample", "jaxfused_top_log_probs"]
    assert kernels(functools.partial(call, logprobs=65), logits, seeds) == ["jaxfused_sample"]


def test_it_says_what_it_does_not_take():
    fits = dict(compute_capability=(9, 0), rows=64, words=128256, dtype=jnp.float32)

    def why(**changes):
        return sample_cuda.why_unsupported(**fits | changes)

    assert "7.5" in why(compute_capability=(7, 0))
    assert "float64" in why(dtype=jnp.float64)
    assert "16777216 words" in why(words=2**25)
    assert "NVIDIA GPU" in why(compute_capability=None)
