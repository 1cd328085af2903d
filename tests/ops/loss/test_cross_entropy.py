import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

import jaxfused
from tests.cases.cross_entropy import CASES
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms


def plain_cross_entropy(
    logits,
    labels,
    weights,
    *,
    class_weights=None,
    label_smoothing=0.0,
    z_loss=0.0,
    ignore_index=None,
    reduction="mean",
):
    """Computes the loss in plain jax.numpy, with all arithmetic in the dtype of the logits."""
    counts, of_labels = jnp.ones(logits.shape[:-1], logits.dtype), None
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        if ignore_index is not None:
            counts = (labels != ignore_index).astype(logits.dtype)
        labels = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        if class_weights is not None:
            of_labels = labels @ class_weights.astype(logits.dtype)
    labels = (1 - label_smoothing) * labels + label_smoothing / logits.shape[-1]
    if class_weights is not None:
        labels = labels * class_weights.astype(logits.dtype)
    losses = -jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)
    losses = losses + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    counts = counts if weights is None else counts * weights
    total = jnp.sum(losses * counts)
    shares = counts * of_labels if of_labels is not None else counts
    result = {"mean": total / jnp.sum(shares), "sum": total, "none": losses * counts}[reduction]
    return result.astype(jnp.promote_types(logits.dtype, jnp.float32))


_CASES_AND_DTYPES = [(case, "float32") for case in CASES] + [
    (CASES[1], "bfloat16"),
    (CASES[2], "float16"),
]


@pytest.mark.parametrize(("case", "dtype"), _CASES_AND_DTYPES, ids=str)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    dtype = jnp.dtype(dtype)
    args = (case.logits(dtype), case.token_weights(dtype), case.labels(dtype))
    # Soft labels have a gradient, classes have none.
    arrays, classes = (args, None) if case.soft else (args[:2], args[2])

    def of(f):
        return lambda logits, weights, *soft: f(logits, *(soft or (classes,)), weights)

    assert_values_and_gradients(
        of(lambda z, q, w: jaxfused.softmax_cross_entropy(z, q, weights=w, **case.options)),
        of(lambda z, q, w: plain_cross_entropy(z, q, w, **case.options)),
        *arrays,
    )


@parametrize(("case", "dtype"), _CASES_AND_DTYPES, quick=(0, 2, 4))
def test_linear_is_as_accurate_as_jax_numpy(case, dtype):
    chunk_size = None if case is CASES[0] else 4
    dtype = jnp.dtype(dtype)
    labels = case.labels(dtype)
    arrays = (*case.linear_layer(dtype), case.token_weights(dtype))
    arrays = (*arrays, labels) if case.soft else arrays

    def ours(x, w, bias, weights, labels=labels):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, labels, bias, weights=weights, chunk_size=chunk_size, **case.options
        )

    def plain(x, w, bias, weights, labels=labels):
        logits = x @ w.astype(x.dtype)
        logits = logits if bias is None else logits + bias.astype(x.dtype)
        return plain_cross_entropy(logits, labels, weights, **case.options)

    assert_values_and_gradients(ours, plain, *arrays)


@settings(max_examples=3)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=3),
    classes=st.integers(1, 40),
    chunk_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_odd_shapes_against_optax(tokens, classes, chunk_size, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*tokens, 3)).astype(np.float32)
    w = rng.normal(size=(3, classes)).astype(np.float32)
    labels = rng.integers(classes, size=tuple(tokens))

    @jax.jit
    def losses(x, w, labels):
        logits = x @ w
        stock = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        ours = jaxfused.softmax_cross_entropy(logits, labels, reduction="none")
        chunked = jaxfused.linear_softmax_cross_entropy(
            x, w, labels, reduction="none", chunk_size=chunk_size
        )
        return stock, ours, chunked

    stock, ours, chunked = losses(x, w, labels)
    assert ours.shape == chunked.shape == tuple(tokens)
    np.testing.assert_allclose(ours, stock, atol=1e-5)
    np.testing.assert_allclose(chunked, stock, atol=1e-5)


def test_label_smoothing_and_soft_labels_are_those_of_optax():
    case = CASES[3]
    logits, labels = case.logits(jnp.float32), case.labels(jnp.float32)
    smooth = optax.smooth_labels(labels, 0.2)
    ours = jaxfused.softmax_cross_entropy(logits, labels, label_smoothing=0.2, reduction="none")
    np.testing.assert_allclose(ours, optax.softmax_cross_entropy(logits, smooth), rtol=1e-5)


def test_no_array_of_all_logits_exists():
    x, w = jnp.ones((24, 5)), jnp.ones((5, 1000))

    def loss(x, w):
        return jaxfused.linear_softmax_cross_entropy(x, w, jnp.arange(24), chunk_size=4)

    def largest(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from largest(inner)

    sizes = list(largest(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, w).jaxpr))
    # The gradient of w, which is larger than a chunk's logits, is the largest array.
    assert max(sizes) == w.size
    assert 4 * 1000 in sizes


def test_backward_keeps_logits_in_their_dtype():
    logits, labels = jnp.ones((6, 50), jnp.bfloat16), jnp.arange(6)
    _, vjp = jax.vjp(lambda z: jaxfused.softmax_cross_entropy(z, labels), logits)
    large = [a.dtype for a in jax.tree.leaves(vjp) if a.size >= logits.size]
    assert large == [jnp.bfloat16]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8])
def test_classes_that_do_not_exist_give_nan(dtype):
    logits = jnp.zeros((4, 7))
    labels = jnp.array([0, 6, 7, jnp.iinfo(dtype).min or 255]).astype(dtype)

    def losses(z, labels):
        return jaxfused.softmax_cross_entropy(z, labels, reduction="none")

    expected = np.array([False, False, True, True])

    @jax.jit
    def f(z, labels):
        y, vjp = jax.vjp(lambda z: losses(z, labels), z)
        return y, vjp(jnp.ones(4))[0]

    with pytest.raises(ValueError, match=r"labels hold 7, but there are 7 classes.*from 0 to 6"):
        losses(logits, labels)
    y, gradient = f(logits, labels)
    np.testing.assert_array_equal(np.isnan(y), expected)
    np.testing.assert_array_equal(np.isnan(gradient).all(axis=1), expected)


def test_small_integers_hold_labels_of_many_classes():
    labels = put([3, 255], jnp.uint8)
    losses = jaxfused.softmax_cross_entropy(
        jnp.zeros((2, 1000)), labels, ignore_index=255, reduction="none"
    )
    np.testing.assert_allclose(losses, [np.log(1000.0), 0.0], rtol=1e-6)


def test_ignored_tokens_have_no_gradient_even_where_logits_are_nan():
    logits = jnp.zeros((2, 3)).at[1].set(jnp.nan)
    loss, dlogits = jax.jit(
        jax.value_and_grad(
            lambda z: jaxfused.softmax_cross_entropy(z, jnp.array([0, -1]), ignore_index=-1)
        )
    )(logits)
    np.testing.assert_allclose(loss, np.log(3.0), rtol=1e-6)
    np.testing.assert_array_equal(dlogits[1], jnp.zeros(3))


@pytest.mark.parametrize("labels", [put([-1, -1]), jnp.zeros((0,), int)])
def test_mean_of_no_token_is_zero(labels):
    loss, dlogits = jax.jit(
        jax.value_and_grad(lambda z: jaxfused.softmax_cross_entropy(z, labels, ignore_index=-1))
    )(jnp.ones((len(labels), 3)))
    assert loss == 0.0
    np.testing.assert_array_equal(dlogits, jnp.zeros((len(labels), 3)))


@pytest.mark.parametrize("soft", [False, True])
def test_masked_classes(soft):
    logits = put([[0.0, -jnp.inf, 0.0]])
    labels = put([[0.5, 0.0, 0.5]]) if soft else put([2])
    loss, dlogits = jax.jit(jax.value_and_grad(jaxfused.softmax_cross_entropy))(logits, labels)
    np.testing.assert_allclose(loss, np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(dlogits, [[0.0 if soft else 0.5, 0.0, 0.0 if soft else -0.5]])


def test_common_offset_of_the_logits_costs_no_digits():
    logits, labels = put([[0.0, 1.0]]), put([0])

    def loss(z):
        return jaxfused.softmax_cross_entropy(z, labels)

    values = jax.jit(jax.value_and_grad(loss))
    for shifted, plain in zip(values(logits + 4096.0), values(logits), strict=True):
        np.testing.assert_allclose(shifted, plain, rtol=1e-6)


def test_large_logits():
    logits = put([[1e4, -1e4]])
    for label, loss in ((0, 0.0), (1, 2e4)):
        assert jaxfused.softmax_cross_entropy(logits, put([label])) == loss


@pytest.mark.parametrize("linear", [False, True])
def test_transforms(linear):
    case = CASES[1]
    labels, weights = case.labels(jnp.float32), case.token_weights(jnp.float32)
    options = dict(case.options, weights=weights)
    if not linear:
        assert_transforms(
            lambda z: jaxfused.softmax_cross_entropy(z, labels, **options),
            case.logits(jnp.float32),
        )
        return
    assert_transforms(
        lambda x, w, bias: jaxfused.linear_softmax_cross_entropy(
            x, w, labels, bias, chunk_size=8, **options
        ),
        *case.linear_layer(jnp.float32),
    )


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_derivatives(case):
    with jax.enable_x64(True):
        double = jnp.float64
        labels, weights = case.labels(double), case.token_weights(double)
        check_grads(
            jax.jit(
                lambda z, weights: jaxfused.softmax_cross_entropy(
                    z, labels, weights=weights, **case.options
                )
            ),
            (case.logits(double), weights),
            order=2 if case.soft else 1,
            modes="rev",
        )
        check_grads(
            jax.jit(
                lambda x, w: jaxfused.linear_softmax_cross_entropy(
                    x, w, labels, weights=weights, chunk_size=8, **case.options
                )
            ),
            case.linear_layer(double)[:2],
            order=1,
            modes="rev",
        )


# --- class weights --------------------------------------------------------------------------------

_TORCH_WEIGHTS = put([1.0, 2.0, 0.5, 3.0, 1.5], jnp.float32)
# Results of torch 2.13.0: the options, the loss, and its gradient to the first row of logits.
_TORCHS = [
    ({}, 1.8630445, [-0.0803865, 0.001282, 0.0040779, 0.050902, 0.0241246]),
    (
        dict(label_smoothing=0.1),
        1.9285083,
        [-0.0712097, -0.0026411, 0.0033226, 0.0479561, 0.022572],
    ),
    (
        dict(label_smoothing=0.1, reduction="sum"),
        19.2850838,
        [-0.7120965, -0.0264108, 0.0332261, 0.4795606, 0.2257205],
    ),
    (
        dict(label_smoothing=0.1, ignore_index=-100),
        1.8598001,
        [-0.1186828, -0.0044018, 0.0055377, 0.0799268, 0.0376201],
    ),
    (dict(soft=True), 2.7472038, [0.0736223, -0.0038345, 0.0139931, -0.0626209, -0.0211601]),
    (
        dict(soft=True, label_smoothing=0.1),
        2.8920975,
        [0.068157, -0.0097758, 0.0120146, -0.052785, -0.0176108],
    ),
]


def class_weighted(options):
    """Returns (logits, labels, options) of a case of torch."""
    options = dict(options)
    logits = put(np.random.RandomState(0).randn(6, 5) * 2, jnp.float32)
    if options.pop("soft", False):
        return logits, jax.nn.softmax(logits[::-1]), options
    ignored = "ignore_index" in options
    return logits, put([0, -100, 2, 3, 4, -100] if ignored else [0, 1, 2, 3, 4, 1]), options


@pytest.mark.parametrize(("options", "loss", "gradient"), _TORCHS, ids=str)
def test_class_weights_are_torchs(options, loss, gradient):
    logits, labels, options = class_weighted(options)

    def ours(logits):
        return jaxfused.softmax_cross_entropy(
            logits, labels, class_weights=_TORCH_WEIGHTS, **options
        )

    def chunked(logits):
        return jaxfused.linear_softmax_cross_entropy(
            logits, jnp.eye(5), labels, class_weights=_TORCH_WEIGHTS, chunk_size=4, **options
        )

    for f in (ours, chunked):
        value, dlogits = jax.value_and_grad(f)(logits)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        np.testing.assert_allclose(dlogits[0], gradient, atol=2e-7 * max(1.0, loss / 2))


_WEIGHTED_CASES = [
    (CASES[0], "float32"),
    (CASES[1], "float32"),
    (CASES[1], "bfloat16"),
    (CASES[2], "float16"),
    (CASES[3], "float32"),
]


@parametrize(("case", "dtype"), _WEIGHTED_CASES, quick=(1, 2, 4))
def test_class_weights_are_as_accurate_as_jax_numpy(case, dtype):
    dtype = jnp.dtype(dtype)
    weights = put(np.random.default_rng(5).uniform(0.2, 3.0, case.classes), dtype)
    labels = case.labels(dtype)

    def ours(logits, class_weights, token_weights):
        return jaxfused.softmax_cross_entropy(
            logits, labels, weights=token_weights, class_weights=class_weights, **case.options
        )

    def plain(logits, class_weights, token_weights):
        return plain_cross_entropy(
            logits, labels, token_weights, class_weights=class_weights, **case.options
        )

    assert_values_and_gradients(ours, plain, case.logits(dtype), weights, case.token_weights(dtype))


@parametrize(("case", "dtype"), _WEIGHTED_CASES, quick=(1,))
def test_linear_class_weights_are_as_accurate_as_jax_numpy(case, dtype):
    dtype = jnp.dtype(dtype)
    weights = put(np.random.default_rng(5).uniform(0.2, 3.0, case.classes), dtype)
    labels, options = case.labels(dtype), case.options

    def ours(x, w, bias, class_weights):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, labels, bias, class_weights=class_weights, chunk_size=4, **options
        )

    def plain(x, w, bias, class_weights):
        logits = x @ w.astype(x.dtype)
        logits = logits if bias is None else logits + bias.astype(x.dtype)
        return plain_cross_entropy(logits, labels, None, class_weights=class_weights, **options)

    assert_values_and_gradients(ours, plain, *case.linear_layer(dtype), weights)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_labels_out_of_range_and_infinite_logits(smoothing):
    loss = functools.partial(
        jaxfused.softmax_cross_entropy,
        class_weights=jnp.array([1.0, 2.0, 0.0]),
        label_smoothing=smoothing,
        ignore_index=-1,
        reduction="none",
    )
    # A class with weight 0 may have the logit -inf, and ignored tokens may have any logits.
    logits = put([[0.0, 1.0, -np.inf], [np.nan, 0.0, 0.0], [0.0, 1.0, 2.0]], jnp.float32)

    @jax.jit
    def losses_and_gradient(logits, labels):
        losses, vjp = jax.vjp(lambda z: loss(z, labels), logits)
        return losses, vjp(jnp.array([1.0, 1.0, 0.0]))[0]

    losses, dlogits = losses_and_gradient(logits, put([1, -1, 3]))
    assert np.isfinite(losses[0]) and losses[1] == 0 and np.isnan(losses[2])
    assert np.isfinite(dlogits[0]).all()
    np.testing.assert_array_equal(dlogits[1], 0)


def test_class_weights_under_vmap():
    logits, labels, options = class_weighted(dict(label_smoothing=0.1))
    several = jnp.stack([_TORCH_WEIGHTS, 2 * _TORCH_WEIGHTS[::-1]])

    def loss(class_weights):
        return jaxfused.softmax_cross_entropy(
            logits, labels, class_weights=class_weights, **options
        )

    mapped = jax.vmap(loss)(several)
    np.testing.assert_allclose(mapped, [loss(w) for w in several], rtol=1e-6)


@pytest.mark.parametrize(("options", "loss", "gradient"), _TORCHS, ids=str)
def test_class_weights_of_classes_spread_over_devices(options, loss, gradient):
    logits, labels, options = class_weighted(options)
    if soft := labels.ndim == 2:
        labels = labels.T

    # Each device has one class; the axis of vmap stands for that of the devices.
    def one(logits, weight, labels):
        return jaxfused.softmax_cross_entropy(
            logits[:, None],
            labels[:, None] if soft else labels,
            class_weights=weight[None],
            axis_name="classes",
            **options,
        )

    mapped = jax.vmap(one, (1, 0, 0 if soft else None), axis_name="classes")
    np.testing.assert_allclose(mapped(logits, _TORCH_WEIGHTS, labels), loss, rtol=1e-6)


_LOGITS = {"logits": jnp.ones((2, 3)), "labels": put([0, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.ones(())}, r"logits have shape \(\)"),
        ({"logits": jnp.ones((2, 0))}, r"logits have shape \(2, 0\)"),
        ({"logits": jnp.ones((2, 3), int)}, "logits has dtype int32"),
        ({"labels": put([0])}, r"labels has shape \(1,\), but .*\(2,\)"),
        ({"labels": jnp.ones((2, 4))}, r"labels has shape \(2, 4\), but soft labels .*\(2, 3\)"),
        ({"labels": jnp.ones((2, 3)), "ignore_index": 0}, "ignore_index=0 was passed with soft"),
        ({"labels": put([True, False])}, "labels have dtype bool"),
        ({"weights": jnp.ones((2, 1))}, r"weights has shape \(2, 1\).*\(2,\)"),
        (
            {"class_weights": jnp.ones(2)},
            r"class_weights has shape \(2,\), but .* 3 classes.*\(3,\)",
        ),
        ({"class_weights": jnp.ones(3, int)}, "class_weights has dtype int32"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"z_loss": "1"}, "z_loss is '1'"),
        ({"reduction": "batchmean"}, "reduction='batchmean' is not known"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0"),
        ({"logits_soft_cap": float("nan")}, "logits_soft_cap is nan"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap is inf"),
        ({"logits_soft_cap": "30"}, "logits_soft_cap is '30'"),
        ({"cotangent": "one"}, "cotangent='one' is not known"),
        ({"cotangent": jnp.ones(2)}, r"cotangent has shape \(2,\), but the result has shape \(\)"),
        ({"implementation": "cuda"}, "'cuda' cannot run here: it needs an NVIDIA GPU"),
        ({"implementation": "pallas"}, "there is no Pallas kernel of softmax_cross_entropy"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"^softmax_cross_entropy: .*{message}"):
        jaxfused.softmax_cross_entropy(**(_LOGITS | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones(())}, r"x has shape \(\)"),
        ({"w": jnp.ones((5, 3))}, r"w has shape \(5, 3\), but x has 4 features"),
        ({"w": jnp.ones((4, 0))}, "w has shape .*holds the classes"),
        ({"bias": jnp.ones(4)}, r"bias has shape \(4,\)"),
        ({"labels": put([0])}, r"labels has shape \(1,\)"),
        ({"class_weights": jnp.ones(4)}, r"class_weights has shape \(4,\).*\(3,\)"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"implementation": "pallas"}, "no Pallas kernel of linear_softmax_cross_entropy"),
    ],
)
def test_linear_errors(change, message):
    arguments = {"x": jnp.ones((2, 4)), "w": jnp.ones((4, 3)), "labels": put([0, 1])}
    with pytest.raises(ValueError, match=f"linear_softmax_cross_entropy: .*{message}"):
        jaxfused.linear_softmax_cross_entropy(**(arguments | change))


def test_class_weights_have_the_digits_of_float64():
    with jax.enable_x64(True):
        logits, weights = jnp.zeros((2, 3), jnp.float64), jnp.array([0.1, 0.2, 0.3])
        for smoothing in (0.0, 0.1):
            losses = jaxfused.softmax_cross_entropy(
                logits,
                jnp.array([0, 2]),
                class_weights=weights,
                label_smoothing=smoothing,
                reduction="none",
            )
            shares = (1 - smoothing) * np.array([0.1, 0.3]) + smoothing * 0.2
            np.testing.assert_allclose(losses, shares * np.log(3), rtol=1e-14)
