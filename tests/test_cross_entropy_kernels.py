"""The paths of the cross-entropies over kernels, which jax.numpy stands in for where there is no GPU."""

import jax.numpy as jnp
import pytest

import jaxfused
from jaxfused import cuda
from jaxfused.reference import cross_entropy as reference
from tests.against_float64 import assert_values_and_gradients
from tests.cases.cross_entropy import CASES
from tests.test_cross_entropy import plain_cross_entropy
from tests.transforms import assert_transforms


def stand_in_forward(logits, classes, soft, coefficients, *, in_place=False, **constants):
    assert logits.ndim == 2
    options = reference.Options(
        constants["label_smoothing"], constants["z_loss"], None, constants["soft_cap"]
    )
    labels = classes if soft is None else soft
    statistics = reference.row_statistics(logits, labels, options)
    packed = jnp.stack(statistics, axis=-1)
    if coefficients is None:
        return None, packed
    pulls = reference.pulls_of(statistics, coefficients, logits.shape[1], options)
    cap = constants["soft_cap"]
    dlogits = reference.row_gradients(logits, labels, statistics, pulls, cap)
    return dlogits.astype(logits.dtype), packed


def stand_in_backward(logits, classes, soft, statistics, pulls, *, soft_cap, in_place=False):
    labels = classes if soft is None else soft
    statistics = reference.Statistics(*jnp.unstack(statistics, axis=-1))
    pulls = reference.Pulls(*jnp.unstack(pulls, axis=-1))
    return reference.row_gradients(logits, labels, statistics, pulls, soft_cap).astype(logits.dtype)


def stand_in_scale(x, factors):
    return (x * factors[:, None]).astype(x.dtype)


@pytest.fixture
def stand_ins(hopper, monkeypatch):
    """Kernels are called for rows of any length, and jax.numpy computes what they would."""
    monkeypatch.setattr(cuda.library, "why_unavailable", lambda: None)
    monkeypatch.setattr(jaxfused.ops.cross_entropy, "_FEW_BYTES", 0)
    monkeypatch.setattr(cuda.cross_entropy, "forward", stand_in_forward)
    monkeypatch.setattr(cuda.cross_entropy, "backward", stand_in_backward)
    monkeypatch.setattr(cuda.cross_entropy, "scale_rows", stand_in_scale)


@pytest.mark.parametrize("cotangent", [None, 0.5, "any"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_as_accurate_as_jax_numpy(stand_ins, case, cotangent):
    labels = case.labels(jnp.float32)
    arrays = (case.logits(jnp.float32), case.token_weights(jnp.float32))
    arrays = (*arrays, labels) if case.soft else arrays

    def ours(logits, weights, labels=labels):
        return jaxfused.softmax_cross_entropy(
            logits, labels, weights=weights, cotangent=cotangent, **case.options
        )

    def plain(logits, weights, labels=labels):
        return plain_cross_entropy(logits, labels, weights, **case.options)

    assert_values_and_gradients(ours, plain, *arrays, cotangents=2)


@pytest.mark.parametrize("cotangent", [None, 0.5, "any"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.soft], ids=str)
def test_linear_is_as_accurate_as_jax_numpy(stand_ins, case, cotangent):
    labels = case.labels(jnp.float32)
    arrays = (*case.linear_layer(jnp.float32), case.token_weights(jnp.float32))

    def ours(x, w, bias, weights):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, labels, bias, weights=weights, cotangent=cotangent, chunk_size=4, **case.options
        )

    def plain(x, w, bias, weights):
        logits = x @ w if bias is None else x @ w + bias
        return plain_cross_entropy(logits, labels, weights, **case.options)

    assert_values_and_gradients(ours, plain, *arrays, cotangents=2)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("cotangent", [None, "any"])
def test_transforms(stand_ins, linear, cotangent):
    case = CASES[1]
    labels, weights = case.labels(jnp.float32), case.token_weights(jnp.float32)
    options = dict(case.options, weights=weights, cotangent=cotangent)
    if linear:
        assert_transforms(
            lambda x, w, bias: jaxfused.linear_softmax_cross_entropy(
                x, w, labels, bias, chunk_size=8, **options
            ),
            *case.linear_layer(jnp.float32),
        )
    else:
        assert_transforms(
            lambda z: jaxfused.softmax_cross_entropy(z, labels, **options),
            case.logits(jnp.float32),
        )
