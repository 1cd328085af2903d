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
from tests.support.grids import parametrize

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


def of_scaled_logits(x, w, b, labels=LABELS):
    """Log-probabilities of labels at a temperature; Cohere and Granite scale their logits likewise."""
    logits = wide(x @ w.astype(x.dtype) + b.astype(x.dtype)) / 0.7
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


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
        of_scaled_logits,
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
    assert_left_alone(f, x, w, LABELS, because="an intermediate result is used by argmax at line")


@pytest.mark.parametrize(
    ("changed", "by"),
    [
        (lambda z, b: jnp.log(jax.nn.softmax(z) + 1e-8), "div"),
        (lambda z, b: jax.nn.log_softmax(jnp.where(jnp.arange(20) < 18, z, -1e9)), "select_n"),
        (lambda z, b: jax.nn.log_softmax(z * jnp.exp(b[0])), "mul"),
    ],
)
def test_an_operation_that_is_none_of_a_loss_is_named(changed, by):
    def f(x, w, b):
        return picked_of(changed(x @ w, b), LABELS.clip(0, 17))

    assert_left_alone(f, *args("float32"), because=f"{by} at line")


# --- more than a label's log-probability -------------------------------------------------------------


def of_logits(x, w, b):
    return wide(x @ w.astype(x.dtype) + b.astype(x.dtype))


def picked_of(logits, labels):
    return jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]


def z_loss(logits, labels):
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - picked_of(logits, labels) + 1e-2 * lse**2, lse


def z_loss_beside(logits, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return loss + 1e-2 * jnp.square(jax.nn.logsumexp(logits, -1))


def smoothed_by_optax(logits, labels):
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 20, dtype=logits.dtype), 0.1)
    return optax.softmax_cross_entropy(logits, smooth)


def smoothed_by_mean(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -0.9 * picked_of(logs, labels) - 0.1 * logs.mean(-1)


def smoothed_by_choice(logits, labels):
    """Flax's example of machine translation."""
    smooth = jnp.where(labels[..., None] == jnp.arange(20), 0.9, 0.1 / 19)
    return -jnp.sum(smooth * jax.nn.log_softmax(logits), axis=-1) - 0.7


def smoothed_and_z_loss(logits, labels):
    most = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    lse = jnp.log(jnp.exp(logits - most).sum(-1)) + most[..., 0]
    hot = jax.nn.one_hot(labels, 20, dtype=logits.dtype)
    return lse - jnp.einsum("btv,btv->bt", logits, 0.8 * hot + 0.2 / 20) + 0.01 * lse**2


def cut_afterwards(logits, labels):
    return -picked_of(jax.nn.log_softmax(logits)[:, :-1], labels[:, 1:])


def cut_and_in_one_row_each(logits, labels):
    logs = jax.nn.log_softmax(logits, axis=-1)[:, 1:].reshape(-1, 20)
    return -(jax.nn.one_hot(labels[:, 1:].reshape(-1), 20) * logs).sum(-1)


def by_numbers_of_rows(logits, labels):
    logs = jax.nn.log_softmax(logits.reshape(-1, 20))
    return -logs[jnp.arange(6), labels.reshape(-1)]


def by_indices_of_two_axes(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -logs[jnp.arange(2)[:, None], jnp.arange(3)[None], labels]


def by_vmap(logits, labels):
    return jax.vmap(jax.vmap(lambda z, label: -jax.nn.log_softmax(z)[label]))(logits, labels)


def summed_over_all(logits, labels):
    hot = jax.nn.one_hot(labels[:, 1:], 20, dtype=logits.dtype)
    return -jnp.sum(jax.nn.log_softmax(logits)[:, :-1] * hot) / 4


def summed_over_tokens(logits, labels):
    hot = jax.nn.one_hot(labels, 20, dtype=logits.dtype)
    return -jnp.sum(jax.nn.log_softmax(logits) * hot, axis=(1, 2))


def by_comparison(logits, labels):
    is_label = labels[..., None] == jnp.arange(20)
    return jax.nn.logsumexp(logits, -1) - jnp.where(is_label, logits, 0).sum(-1)


def of_capped_logits(logits, labels):
    """Gemma's loss."""
    capped = 3.0 * jnp.tanh(logits / 3.0)
    return optax.softmax_cross_entropy_with_integer_labels(capped, labels)


def z_loss_of_capped_logits(logits, labels):
    return z_loss(jnp.tanh(logits / 3.0) * 3.0, labels)


def without_maximum(logits, labels):
    """A loss with the logarithm of a sum without its maximum added, and with a gradient of 0 for it."""
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    return jnp.log(jnp.exp(shifted).sum(-1)) - picked_of(logits, labels)


def focal(logits, labels):
    log_p = picked_of(jax.nn.log_softmax(logits), labels)
    return -((1 - jnp.exp(log_p)) ** 2) * log_p


LOSSES = [
    by_numbers_of_rows,
    by_indices_of_two_axes,
    by_vmap,
    z_loss,
    z_loss_beside,
    smoothed_by_optax,
    smoothed_by_mean,
    smoothed_by_choice,
    smoothed_and_z_loss,
    cut_afterwards,
    cut_and_in_one_row_each,
    summed_over_all,
    summed_over_tokens,
    by_comparison,
    of_capped_logits,
    z_loss_of_capped_logits,
    without_maximum,
    focal,
]


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_numbers_of_each_row(loss, dtype):
    inside = LABELS.clip(0, 19)
    assert_fuses(lambda x, w, b: loss(of_logits(x, w, b), inside), *args(dtype), into=INTO)


@parametrize("loss", LOSSES, quick=slice(0, None, 2), ids=lambda loss: loss.__name__)
def test_numbers_of_rows_with_labels_outside_the_classes(loss):
    def f(x, w, b):
        return loss(of_logits(x, w, b), LABELS)

    assert counts(f, *args("float32")) == INTO
    ours, plain = (g(*args("float32")) for g in (jaxfused.fuse(f), f))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, plain)


def test_the_smoothing_is_told_from_the_weights():
    def f(x, w, b):
        return smoothed_by_mean(of_logits(x, w, b), LABELS)

    assert "label_smoothing 0.1" in str(fusion(f, *args("float32")))


def shifted_by_a_maximum_with_a_gradient(logits, labels):
    shifted = logits - logits.max(-1, keepdims=True)
    return jnp.log(jnp.exp(shifted).sum(-1)) - picked_of(logits, labels)


def entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logs) * logs).sum(-1) - picked_of(logs, labels)


def two_sets_of_labels(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -picked_of(logs, labels) - picked_of(logs, labels[::-1])


def at_other_rows(logits, labels):
    lse = jax.nn.logsumexp(logits, -1)
    return lse[:, ::-1] - picked_of(logits, labels), picked_of(logits[:, :2], labels[:, :2])


def of_other_rows(logits, labels):
    logs = jax.nn.log_softmax(logits.reshape(-1, 20))
    return -logs[jnp.arange(6)[::-1], labels.reshape(-1)]


def half_capped(logits, labels):
    return of_capped_logits(logits, labels) + picked_of(logits, labels)


@pytest.mark.parametrize(
    "loss",
    [
        shifted_by_a_maximum_with_a_gradient,
        entropy,
        two_sets_of_labels,
        at_other_rows,
        of_other_rows,
        half_capped,
    ],
)
def test_other_functions_of_logits_are_left(loss):
    x, w, b = args("float32")
    assert_left_alone(lambda x, w, b: loss(of_logits(x, w, b), LABELS.clip(0, 19)), x, w, b)


def test_soft_labels_are_left_with_a_reason():
    def f(x, w, b, labels):
        return optax.softmax_cross_entropy(of_logits(x, w, b), labels)

    labels = jax.nn.softmax(normal(5, 2, 3, 20))
    assert_left_alone(f, *args("float32"), labels, because="more than losses of one label")


@pytest.mark.parametrize(
    "dtype, options, because",
    [
        ("float32", {"precision": "highest"}, "precision="),
        (
            "bfloat16",
            {"preferred_element_type": jnp.float32},
            "the operator rounds them to bfloat16",
        ),
    ],
)
def test_a_more_accurate_product_is_left_with_a_reason(dtype, options, because):
    def f(x, w):
        return z_loss(jnp.dot(x, w.astype(x.dtype), **options), LABELS)

    assert_left_alone(f, *args(dtype)[:2], because=because)


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


def test_a_logarithm_at_other_rows():
    def f(x, w):
        logits = x @ w
        most = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        lse = jnp.log(jnp.exp(logits - most.swapaxes(0, 1)).sum(-1)) + most[:, 0]
        return lse - picked_of(logits, jnp.arange(6))

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
