import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.loss import segmentation_loss_cuda
from jaxfused.ops.loss.segmentation_loss_xla import LossOptions, PixelOptions
from jaxfused.runtime import cuda_library
from tests.cases.segmentation_loss import CASES, Case
from tests.support.against_float64 import COTANGENTS, assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms

pytestmark = pytest.mark.exhaustive


def plain_loss(
    logits,
    labels,
    weights,
    *,
    cross_entropy_weight=1.0,
    dice_weight=1.0,
    smooth=1.0,
    tversky_alpha=0.5,
    tversky_beta=0.5,
    focal_gamma=0.0,
    ignore_index=None,
    reduction="mean",
):
    """Computes the loss image by image, with all arithmetic but the result in the logits' dtype."""
    dtype = logits.dtype
    if logits.ndim == labels.ndim:
        logits = jnp.stack([jnp.zeros_like(logits), logits], axis=-1)
        foreground = slice(1, 2)
    else:
        foreground = slice(None)
    counts = jnp.ones(labels.shape, dtype)
    if ignore_index is not None:
        counts = (labels != ignore_index).astype(dtype)
    counts = counts if weights is None else counts * weights

    def tversky(count, p, t):
        hits = 2 * jnp.sum(count * p * t) + smooth
        false_alarms, misses = jnp.sum(count * p * (1 - t)), jnp.sum(count * (1 - p) * t)
        return hits / (hits + 2 * tversky_alpha * false_alarms + 2 * tversky_beta * misses)

    images = []
    for z, label, count in zip(logits, labels, counts, strict=True):
        target = jax.nn.one_hot(label, z.shape[-1], dtype=dtype)
        losses = -jnp.sum(target * jax.nn.log_softmax(z), axis=-1)
        losses = losses * (1 - jnp.sum(target * jax.nn.softmax(z), axis=-1)) ** focal_gamma
        loss = cross_entropy_weight * jnp.sum(losses * count) / jnp.sum(count)
        p, t = jax.nn.softmax(z)[..., foreground], target[..., foreground]
        dices = jax.vmap(tversky, (None, -1, -1))(count, p, t)
        images.append(loss + dice_weight * (1 - dices.mean()))
    images = jnp.stack(images).astype(jnp.promote_types(dtype, jnp.float32))
    return {"mean": jnp.mean(images), "sum": jnp.sum(images), "none": images}[reduction]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(CASES[1], "bfloat16"), (CASES[3], "float16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    labels = case.labels()
    assert_values_and_gradients(
        lambda z, w: jaxfused.segmentation_loss(z, labels, weights=w, **case.options),
        lambda z, w: plain_loss(z, labels, w, **case.options),
        *case.arguments(jnp.dtype(dtype)),
    )


@settings(max_examples=3)
@given(
    pixels=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    classes=st.none() | st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_cross_entropy_alone_against_optax(pixels, classes, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=pixels if classes is None else (*pixels, classes)).astype(np.float32)
    labels = rng.integers(classes or 2, size=pixels)

    @jax.jit
    def losses(logits, labels):
        if classes is None:
            stock = optax.sigmoid_binary_cross_entropy(logits, labels)
        else:
            stock = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jaxfused.segmentation_loss(logits, labels, dice_weight=0.0), jnp.mean(stock)

    np.testing.assert_allclose(*losses(logits, labels), rtol=1e-5)


def test_dice_of_certain_predictions():
    labels = put([[[1, 1], [0, 0]], [[1, 1], [0, 0]]])
    predicted = put([[[1, 0], [1, 0]], [[1, 1], [0, 0]]])
    logits = 100.0 * (2.0 * predicted - 1.0)
    options = dict(cross_entropy_weight=0.0, smooth=1e-6, reduction="none")
    expected = [1 - 2 * 1 / (2 + 2), 0.0]
    binary = jaxfused.segmentation_loss(logits, labels, **options)
    np.testing.assert_allclose(binary, expected, atol=1e-6)
    classes = jaxfused.segmentation_loss(jnp.stack([-logits, logits], -1), labels, **options)
    np.testing.assert_allclose(classes, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [bool, jnp.uint8, jnp.float32])
def test_binary_labels_of_any_dtype(dtype):
    case = CASES[0]
    logits, labels = case.arguments(jnp.float32)[0], case.labels()
    loss = jaxfused.segmentation_loss(logits, labels.astype(dtype))
    np.testing.assert_allclose(loss, jaxfused.segmentation_loss(logits, labels), rtol=1e-6)


@pytest.mark.parametrize("classes", [None, 3])
def test_image_that_is_ignored_has_no_loss_and_no_gradient(classes):
    labels = np.array([[1] * 4, [255] * 4], np.uint8)
    logits = np.ones((2, 4) if classes is None else (2, 4, classes), np.float32)

    @jax.jit
    def f(logits):
        losses, vjp = jax.vjp(
            lambda logits: jaxfused.segmentation_loss(
                logits, labels, ignore_index=255, reduction="none"
            ),
            logits,
        )
        return losses, vjp(jnp.ones(2))[0]

    losses, dlogits = f(logits)
    assert losses[0] > 0
    np.testing.assert_allclose(losses[1], 0.0, atol=1e-6)
    np.testing.assert_array_equal(dlogits[1], np.zeros(logits.shape[1:]))


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4)])
def test_no_images_have_a_loss_of_0(shape):
    labels = jnp.zeros((0, 3), int)
    for reduction in ("mean", "sum"):
        assert jaxfused.segmentation_loss(jnp.zeros(shape), labels, reduction=reduction) == 0


def test_class_that_does_not_exist_gives_nan():
    labels = put([[0, 1], [1, 3]])
    f = functools.partial(jaxfused.segmentation_loss, jnp.zeros((2, 2, 3)), reduction="none")
    np.testing.assert_array_equal(np.isnan(jax.jit(f)(labels)), [False, True])


BAD_LABELS = [
    ([[0, 255, 255, 0]], "uint8", None, "labels hold 255, but they are shares.*mask > 127"),
    ([[0, 255, 2, 0]], "int32", 255, "labels hold 2,"),
    ([[0, -1, 1, 0]], "int8", None, "labels hold -1,"),
    ([[0.0, 255.0, 1.0, 0.5]], "float32", None, "labels hold 255,"),
    ([[0.0, -0.5, 1.0, 0.5]], "bfloat16", None, "labels hold -0.5,"),
]


@pytest.mark.parametrize(("labels", "dtype", "ignored", "message"), BAD_LABELS)
@pytest.mark.parametrize("loss", ["segmentation_loss", "sigmoid_cross_entropy"])
def test_masks_that_are_no_shares_raise_or_give_nan(loss, labels, dtype, ignored, message):
    labels = put(labels, dtype)
    f = functools.partial(getattr(jaxfused, loss), ignore_index=ignored)
    logits = jnp.where(labels > 0, 100.0, -100.0)
    with pytest.raises(ValueError, match=f"{loss}: {message}"):
        f(logits, labels)
    value, gradient = jax.jit(jax.value_and_grad(f))(logits, labels)
    assert np.isnan(value) and np.isnan(gradient).any()


def test_what_is_no_share_on_the_way_to_the_kernels(stand_ins):
    masks = put([[0, 255, 1, 0], [0, 1, 1, 0]], jnp.uint8)
    f = functools.partial(jaxfused.segmentation_loss, reduction="none", implementation="cuda")
    np.testing.assert_array_equal(np.isnan(jax.jit(f)(jnp.zeros((2, 4)), masks)), [True, False])


def test_one_hot_labels_are_refused_where_they_are_seen():
    classes = np.arange(32).reshape(2, 4, 4) % 3
    logits = jnp.zeros((2, 4, 4, 3))
    for one_hot in (np.eye(3, dtype=np.int32)[classes], np.eye(3, dtype=bool)[classes]):
        with pytest.raises(ValueError, match=r"are one-hot.*argmax"):
            jaxfused.segmentation_loss(logits, one_hot)
    assert np.isfinite(jaxfused.segmentation_loss(logits, classes))
    # Labels of several overlapping structures, and a volume of a few pixels.
    assert np.isfinite(jaxfused.segmentation_loss(logits, np.ones((2, 4, 4, 3), np.int32)))
    assert np.isfinite(jaxfused.segmentation_loss(jnp.zeros((1, 1, 2, 2)), np.eye(2)[None, None]))


def test_shares_may_be_off_by_a_rounding():
    labels = put([[1.0 + 1e-6, -1e-7, 0.3, 1.0]])
    assert np.isfinite(jaxfused.segmentation_loss(jnp.zeros((1, 4)), labels))


def test_transforms():
    case = CASES[2]
    labels = case.labels()
    assert_transforms(
        lambda z, w: jaxfused.segmentation_loss(z, labels, weights=w, **case.options),
        *case.arguments(jnp.float32),
    )


def test_derivatives_of_both_modes():
    case = CASES[1]
    labels = case.labels()
    with jax.enable_x64(True):
        check_grads(
            jax.jit(lambda z, w: jaxfused.segmentation_loss(z, labels, weights=w, **case.options)),
            case.arguments(jnp.float64),
            order=1,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.ones((2, 3, 4), int)}, "logits has dtype int32"),
        ({"labels": jnp.ones((2, 4), int)}, r"logits have shape \(2, 3, 4\) and labels \(2, 4\)"),
        ({"labels": jnp.ones(2, int)}, r"labels \(2,\)"),
        ({"logits": jnp.ones((2, 3, 1))}, r"pass logits\[..., 0\] for a binary mask"),
        ({"labels": jnp.ones((2, 3))}, "labels have dtype float32"),
        (
            {"logits": jnp.ones((2, 3)), "labels": jnp.ones((2, 3)), "ignore_index": 1},
            "ignore_index=1 was passed with labels of dtype float32",
        ),
        ({"weights": jnp.ones((2, 1))}, r"weights has shape \(2, 1\)"),
        ({"smooth": 0.0}, "smooth is 0.0"),
        ({"dice_weight": "1"}, "dice_weight is '1'"),
        ({"reduction": "batch"}, "reduction='batch' is not known"),
        ({"implementation": "cuda"}, "'cuda' cannot run here: it needs an NVIDIA GPU"),
        ({"implementation": "pallas"}, "there is no Pallas kernel of segmentation_loss"),
    ],
)
def test_errors(change, message):
    arguments = {"logits": jnp.ones((2, 3, 4)), "labels": jnp.ones((2, 3), int)} | change
    with pytest.raises(ValueError, match=f"segmentation_loss: .*{message}"):
        jaxfused.segmentation_loss(**arguments)


# --- the path over kernels ------------------------------------------------------------------------


@pytest.fixture
def stand_ins(hopper, monkeypatch):
    """Replaces the kernels by jax.numpy."""
    packed = jaxfused.ops.loss.segmentation_loss._packed_sums

    def forward(logits, labels, weights, *, compute_capability, multiprocessors, **options):
        assert compute_capability == hopper.compute_capability
        assert multiprocessors == hopper.multiprocessors
        return packed(PixelOptions(**options), logits, labels, weights)

    def backward(logits, labels, weights, cotangents, **options):
        _, vjp = jax.vjp(lambda z: packed(PixelOptions(**options), z, labels, weights), logits)
        return vjp(cotangents)[0]

    def losses_and_gradient(logits, labels, *, ignore_index, focal_gamma, constants, scale):
        given = {name: constants[name] for name in constants.keys() - {"tversky_rest"}}
        loss = LossOptions(**given)
        assert constants["tversky_rest"] == loss.tversky_rest

        def losses(z):
            sums = packed(PixelOptions(ignore_index, focal_gamma), z, labels, None)
            return jaxfused.ops.loss.segmentation_loss._losses_of_packed(sums, loss)

        values, vjp = jax.vjp(losses, logits)
        return values, *vjp(jnp.full_like(values, scale))

    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(segmentation_loss_cuda, "losses_and_gradient", losses_and_gradient)
    monkeypatch.setattr(segmentation_loss_cuda, "forward", forward)
    monkeypatch.setattr(segmentation_loss_cuda, "backward", backward)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_make_the_loss_of_the_reference(stand_ins, case):
    labels = case.labels()
    assert_values_and_gradients(
        lambda z, w: jaxfused.segmentation_loss(z, labels, weights=w, **case.options),
        lambda z, w: plain_loss(z, labels, w, **case.options),
        *case.arguments(jnp.float32),
        cotangents=2,
    )


def test_transforms_of_kernels(stand_ins):
    case = CASES[2]
    labels = case.labels()
    assert_transforms(
        lambda z, w: jaxfused.segmentation_loss(z, labels, weights=w, **case.options),
        *case.arguments(jnp.float32),
    )


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float32"])
def test_kernels_read_labels_as_they_are(stand_ins, dtype):
    case = CASES[0]
    logits, labels = case.arguments(jnp.float32)[0], case.labels().astype(dtype)
    with dispatch.recorded() as choices:
        loss = jaxfused.segmentation_loss(logits, labels)
    [choice] = choices
    assert choice.implementation == "cuda"
    assert choice.operands[1].dtype == dtype
    expected = jaxfused.segmentation_loss(logits, labels, implementation="xla")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_labels_of_a_float_dtype_have_a_gradient(stand_ins):
    case = CASES[0]
    logits = case.arguments(jnp.float32)[0]
    labels = jnp.abs(jnp.sin(logits))
    ours, plain = (
        jax.grad(lambda t, i=i: jaxfused.segmentation_loss(logits, t, implementation=i))(labels)
        for i in ("cuda", "xla")
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-8)


MANY_MASKS = (
    Case((17, 8, 9), None),
    Case((18, 5), None, options={"ignore_index": 255, "dice_weight": 0.5, "reduction": "sum"}),
    Case((20, 7), None, options={"focal_gamma": 2.0, "tversky_alpha": 0.3, "tversky_beta": 0.9}),
)


@parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in MANY_MASKS for dtype in ("float32", "bfloat16")],
    quick=(),
)
def test_many_masks_have_their_gradient_at_once(stand_ins, case, dtype):
    labels = case.labels()

    def ours(z):
        return jaxfused.segmentation_loss(z, labels, **case.options)

    logits, _ = case.arguments(jnp.dtype(dtype))
    with dispatch.recorded() as choices:
        jax.eval_shape(jax.grad(ours), logits)
    assert {choice.kernel.name for choice in choices} == {"segmentation_loss masks"}
    plain = lambda z: plain_loss(z, labels, None, **case.options)  # noqa: E731
    assert_values_and_gradients(ours, plain, logits, cotangents=2)


def test_the_gradient_of_many_masks_is_multiplied_only_by_what_is_not_1(stand_ins):
    case = MANY_MASKS[0]
    labels, (logits, _) = case.labels(), case.arguments(jnp.bfloat16)

    def gradient(factor):
        loss = lambda z: factor * jaxfused.segmentation_loss(z, labels)  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(logits).compile().as_text()

    # The stand-in for the kernel adds the same instructions to both.
    assert gradient(3.0).count(" multiply(") == gradient(1.0).count(" multiply(") + 1


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"weights": jnp.ones((17, 8, 9))}, "float32"),
        ({"reduction": "none"}, "float32"),
        ({}, "float16"),
    ],
    ids=["weights", "none", "float16"],
)
def test_masks_that_have_sums_and_gradient_apart(stand_ins, changes, dtype):
    case = MANY_MASKS[0]
    logits, _ = case.arguments(jnp.dtype(dtype))

    def loss(z):
        return jnp.sum(jaxfused.segmentation_loss(z, case.labels(), **changes))

    with dispatch.recorded() as choices:
        jax.eval_shape(jax.grad(loss), logits)
    names = {choice.kernel.name for choice in choices}
    assert names == {"segmentation_loss forward", "segmentation_loss backward"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_shard_s_masks_by_one_kernel_or_two(stand_ins, hopper, dtype):
    """Both ways give the same result; float16 represents a shard of few images."""
    case = MANY_MASKS[1]
    logits, _ = case.arguments(jnp.dtype(dtype))
    op = jaxfused.ops.loss.segmentation_loss
    masks = op._Masks(PixelOptions(255), LossOptions(dice_weight=0.5), scale=0.25)
    operands = op._flat_images(logits, case.labels(), None)[:2]
    ours, plain = (masks.run(name, hopper, *operands) for name in ("cuda", "xla"))
    chex.assert_trees_all_close(ours, plain, rtol=1e-5, atol=1e-7)


def test_transforms_of_many_masks(stand_ins):
    case = MANY_MASKS[0]
    labels, (logits, _) = case.labels(), case.arguments(jnp.float32)
    assert_transforms(lambda z: jaxfused.segmentation_loss(z, labels), logits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("labels_dtype", ["int32", "uint8"])
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.options.get("ignore_index") != -1),
        *MANY_MASKS,
        Case((20, 256, 256), None),
        Case((20, 300, 300), None),
        Case((20, 260, 260), None, options={"ignore_index": 255}),
        Case((2, 300, 301), None, options={"ignore_index": 255}),
        *(Case((2, 40, 41), classes) for classes in (2, 3, 7, 12, 21, 40, 100, 200)),
        Case((1, 50, 50), 19, weights=True, options={"focal_gamma": 2.0}),
    ],
    ids=str,
)
def test_kernels_on_a_gpu(case, labels_dtype, dtype):
    labels = case.labels().astype(labels_dtype)

    def ours(z, w):
        return jaxfused.segmentation_loss(
            z, labels, weights=w, implementation="cuda", **case.options
        )

    def of_draws(f):
        """Of several draws, as the rounding of one number, the loss, is luck."""
        return lambda *arguments: jax.lax.map(lambda a: f(*a), arguments)

    draws = [case.arguments(jnp.dtype(dtype), seed) for seed in range(COTANGENTS)]
    arguments = jax.tree.map(lambda *a: jnp.stack(a), *draws)

    def plain(z, w):
        # A sum over many pixels is beyond float16, which then is no reference.
        overflows = z.dtype == jnp.float16 and np.prod(case.pixels[1:]) > 2**14
        z = z.astype(jnp.float32) if overflows else z
        return plain_loss(z, labels, w, **case.options)

    assert_values_and_gradients(of_draws(ours), of_draws(plain), *arguments, cotangents=2)
    results = [jax.jit(jax.grad(lambda *a: ours(*a).sum()))(*draws[0]) for _ in range(2)]
    chex.assert_trees_all_equal(*results)
