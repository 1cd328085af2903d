import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import jaxfused
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms


def operands(shape=(5, 7), dtype=jnp.float32, soft=False, ignored=None, weights=False):
    rng = np.random.default_rng(0)
    logits = put(rng.normal(scale=3.0, size=shape), dtype)
    labels = rng.random(shape) if soft else rng.integers(2, size=shape)
    if ignored is not None:
        labels = np.where(rng.random(shape) < 0.3, ignored, labels)
    labels = put(labels, dtype if soft else jnp.int32)
    return logits, labels, put(rng.random(shape), dtype) if weights else None


def plain(
    logits,
    labels,
    weights,
    *,
    label_smoothing=0.0,
    focal_gamma=0.0,
    focal_alpha=None,
    ignore_index=None,
    reduction="mean",
):
    """Computes the loss in plain jax.numpy, with all arithmetic in the dtype of the logits."""
    counts = jnp.ones(logits.shape, logits.dtype)
    if ignore_index is not None:
        counts = (labels != ignore_index).astype(logits.dtype)
    t = labels.astype(logits.dtype) * (1 - label_smoothing) + label_smoothing / 2
    losses = -t * jax.nn.log_sigmoid(logits) - (1 - t) * jax.nn.log_sigmoid(-logits)
    p = jax.nn.sigmoid(logits)
    losses = losses * (p * (1 - t) + (1 - p) * t) ** focal_gamma
    if focal_alpha is not None:
        losses = losses * (focal_alpha * t + (1 - focal_alpha) * (1 - t))
    losses = jnp.where(counts == 0, 0, losses)
    counts = counts if weights is None else counts * weights
    total = jnp.sum(losses * counts)
    result = {"mean": total / jnp.sum(counts), "sum": total, "none": losses * counts}[reduction]
    return result.astype(jnp.promote_types(logits.dtype, jnp.float32))


OPTIONS = (
    (False, False, {}),
    (True, True, {"label_smoothing": 0.2, "reduction": "none"}),
    (False, True, {"ignore_index": -1, "focal_gamma": 2.0, "focal_alpha": 0.25}),
    (True, False, {"focal_gamma": 0.5, "reduction": "sum"}),
)


@parametrize(
    ("soft", "weights", "options", "dtype"),
    [(*options, dtype) for dtype in ("float32", "bfloat16") for options in OPTIONS],
    quick=(0, 1, 2, 3, 6),
)
def test_is_as_accurate_as_jax_numpy(soft, weights, options, dtype):
    ignored = options.get("ignore_index")
    logits, labels, w = operands((5, 7), jnp.dtype(dtype), soft, ignored, weights)
    arrays = (logits, w, labels) if soft else (logits, w)

    def of(f):
        return lambda z, w, *soft: f(z, *(soft or (labels,)), w)

    assert_values_and_gradients(
        of(lambda z, t, w: jaxfused.sigmoid_cross_entropy(z, t, weights=w, **options)),
        of(lambda z, t, w: plain(z, t, w, **options)),
        *arrays,
    )


def test_is_that_of_optax():
    logits, labels, _ = operands()
    ours = jaxfused.sigmoid_cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(ours, optax.sigmoid_binary_cross_entropy(logits, labels), rtol=1e-6)
    focal = jaxfused.sigmoid_cross_entropy(
        logits, labels, focal_gamma=2.0, focal_alpha=0.25, reduction="none"
    )
    stock = optax.sigmoid_focal_loss(logits, labels, alpha=0.25, gamma=2.0)
    np.testing.assert_allclose(focal, stock, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [bool, jnp.uint8, jnp.float16])
def test_labels_of_any_dtype(dtype):
    logits, labels, _ = operands()
    loss = jaxfused.sigmoid_cross_entropy(logits, labels.astype(dtype))
    np.testing.assert_allclose(loss, jaxfused.sigmoid_cross_entropy(logits, labels), rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_large_logits_and_what_is_ignored(gamma):
    logits = put([1e4, -1e4, 1e4, jnp.nan])
    labels = put([1, 1, 0, 2], jnp.uint8)

    def losses(z):
        return jaxfused.sigmoid_cross_entropy(
            z, labels, ignore_index=2, focal_gamma=gamma, reduction="none"
        )

    np.testing.assert_allclose(jax.jit(losses)(logits), [0.0, 1e4, 1e4, 0.0])
    gradient = jax.jit(jax.grad(lambda z: losses(z).sum()))(logits)
    np.testing.assert_allclose(gradient, [0.0, -1.0, 1.0, 0.0], atol=1e-6)
    nothing = jaxfused.sigmoid_cross_entropy(logits[3:], labels[3:], ignore_index=2)
    assert nothing == 0.0


def test_gradient_keeps_nothing_but_logits_and_labels():
    logits, labels, _ = operands((64, 8), jnp.bfloat16)
    _, vjp = jax.vjp(lambda z: jaxfused.sigmoid_cross_entropy(z, labels, focal_gamma=2.0), logits)
    large = {a.dtype for a in jax.tree.leaves(vjp) if a.size >= logits.size}
    assert large <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32), jnp.dtype(bool)}


def test_transforms():
    logits, labels, weights = operands(weights=True)
    assert_transforms(
        lambda z, w: jaxfused.sigmoid_cross_entropy(z, labels, weights=w, focal_gamma=1.5),
        logits,
        weights,
    )


def test_derivatives():
    with jax.enable_x64(True):
        logits, labels, weights = operands(dtype=jnp.float64, soft=True, weights=True)
        check_grads(
            jax.jit(
                lambda z, t, w: jaxfused.sigmoid_cross_entropy(z, t, weights=w, focal_gamma=2.0)
            ),
            (logits, labels, weights),
            order=2,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.ones((2, 3), int)}, "logits has dtype int32"),
        ({"labels": jnp.ones(2)}, r"labels has shape \(2,\), but .*\(2, 3\)"),
        ({"weights": jnp.ones((2, 1))}, r"weights has shape \(2, 1\)"),
        ({"labels": jnp.ones((2, 3)), "ignore_index": 0}, "ignore_index=0 was passed with labels"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"focal_alpha": -0.1}, "focal_alpha is -0.1"),
        ({"focal_gamma": -1.0}, "focal_gamma is -1.0"),
        ({"focal_gamma": "2"}, "focal_gamma is '2'"),
        ({"reduction": "batch"}, "reduction='batch' is not known"),
        ({"implementation": "cuda"}, "there is no CUDA kernel of sigmoid_cross_entropy yet"),
    ],
)
def test_errors(change, message):
    arguments = {"logits": jnp.ones((2, 3)), "labels": jnp.ones((2, 3), int)} | change
    with pytest.raises(ValueError, match=f"^sigmoid_cross_entropy: .*{message}"):
        jaxfused.sigmoid_cross_entropy(**arguments)
