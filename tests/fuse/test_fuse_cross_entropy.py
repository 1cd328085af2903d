"""fuse finds the loss of a product whose logits would fill the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfused
from jaxfused.fusion.recognisers import cross_entropy
from tests.support.arrays import put
from tests.support.fused import assert_fuses, assert_left_alone, counts, fusion, normal, wide

LABELS = put([[3, 0, 19], [7, -1, 25]])
INTO = {"linear_softmax_cross_entropy": 1}


@pytest.fixture(autouse=True)
def few_logits_are_many(monkeypatch):
    monkeypatch.setattr(cross_entropy, "FEWEST_LOGITS", 1)


def of_optax(x, w, b, labels=LABELS):
    logits = wide(x @ w.astype(x.dtype) + b.astype(x.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def by_one_hot(x, w, b, labels=LABELS):
    logits = wide(x @ w.astype(x.dtype) + b.astype(x.dtype))
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 20, dtype=logits.dtype), -1)


def without_bias(x, w, b, labels=LABELS):
    logits = wide(x @ w.astype(x.dtype))
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    return (
        -jnp.sum(log_probabilities * jax.nn.one_hot(labels, 20, dtype=logits.dtype), axis=-1) + b[0]
    )


def by_gathering(x, w, b, labels=LABELS):
    logits = wide(x @ w.astype(x.dtype) + b.astype(x.dtype))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def of_the_next_token(x, w, b, labels=LABELS):
    logits = wide(x @ w.astype(x.dtype) + b.astype(x.dtype))[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels[:, 1:])


def of_one_row_for_each_token(x, w, b, labels=LABELS):
    logits = (x @ w.astype(x.dtype) + b.astype(x.dtype))[:, 1:].reshape(-1, 20)
    labels = labels[:, 1:].reshape(-1)
    return optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)


def args(dtype):
    return normal(0, 2, 3, 8, dtype=dtype), normal(1, 8, 20), normal(2, 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "loss",
    [
        of_optax,
        by_one_hot,
        without_bias,
        by_gathering,
        of_the_next_token,
        of_one_row_for_each_token,
    ],
)
def test_the_loss_of_a_product(loss, dtype):
    inside = LABELS.clip(0, 19)
    assert_fuses(lambda *args: loss(*args, labels=inside).mean(), *args(dtype), into=INTO)


@pytest.mark.parametrize("loss", [of_optax, by_one_hot, by_gathering, of_the_next_token])
def test_labels_outside_the_classes_give_what_they_gave(loss):
    """In Optax, negative labels count from the end, large ones give NaN, and one-hot rows are 0."""
    assert counts(loss, *args("float32"), LABELS) == INTO
    ours, plain = (f(*args("float32"), LABELS) for f in (jaxfused.fuse(loss), loss))
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_logits_that_are_used_elsewhere_are_kept():
    def f(x, w, labels):
        logits = x @ w
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits.argmax(-1)

    x, w, _ = args("float32")
    assert_left_alone(f, x, w, LABELS, because="an intermediate result is used")


def test_a_smoothed_loss_is_left_with_a_reason():
    def f(x, w):
        smooth = optax.smooth_labels(jax.nn.one_hot(LABELS, 20), 0.1)
        return optax.softmax_cross_entropy(x @ w, smooth)

    assert_left_alone(f, *args("float32")[:2], because="one label for each row")


@pytest.mark.parametrize("cut", [np.s_[..., :-1], np.s_[:, :-1, ::2]])
def test_some_classes_alone_are_no_logits_of_the_product(cut):
    def f(x, w, labels):
        return optax.softmax_cross_entropy_with_integer_labels((x @ w)[cut], labels[:, :2])

    x, w, _ = args("float32")
    x = x if cut[-1].step else x[:, :2]
    assert counts(f, x, w, LABELS) == {}


def test_few_logits_are_kept(monkeypatch):
    monkeypatch.setattr(cross_entropy, "FEWEST_LOGITS", 2**24)
    assert "few enough to be kept" in str(fusion(of_optax, *args("float32"), LABELS))


def without_maximum(logits, most, shifted):
    return jnp.log(jnp.exp(shifted).sum(-1))


def at_other_rows(logits, most, shifted):
    return jnp.log(jnp.exp(logits - most.swapaxes(0, 1)).sum(-1)) + most[:, 0]


@pytest.mark.parametrize("lse", [without_maximum, at_other_rows])
def test_a_logarithm_that_is_not_of_the_whole_sum(lse):
    def f(x, w):
        logits = x @ w
        most = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        picked = jnp.take_along_axis(logits, jnp.arange(6)[:, None], axis=-1)[:, 0]
        return lse(logits, most, logits - most) - picked

    assert counts(f, normal(0, 6, 8), normal(1, 8, 6)) == {}


def test_a_number_less_an_array_is_no_shifted_array():
    def f(x):
        return jnp.log(jnp.exp(1.5 - x).sum(-1))

    assert_left_alone(f, normal(0, 6, 8))


def test_logarithms_of_probabilities_at_other_rows():
    def f(x, w):
        logits = x @ w
        shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        logs = shifted - jnp.log(jnp.exp(shifted).sum(-1))[None]
        return -(logs * jax.nn.one_hot(jnp.arange(6), 6)).sum(-1)

    assert counts(f, normal(0, 6, 8), normal(1, 8, 6)) == {}
