"""The cross-entropies' paths over kernels, which jax.numpy replaces where there is no GPU."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.ops.linear import cublaslt
from jaxfused.ops.loss import cross_entropy_cuda, cross_entropy_stages
from jaxfused.ops.loss import cross_entropy_xla as reference
from jaxfused.runtime import cuda_library
from tests.cases.cross_entropy import CASES, Case
from tests.ops.loss.test_cross_entropy import plain_cross_entropy
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.lowering import kernels, lowered
from tests.support.transforms import assert_transforms

pytestmark = pytest.mark.exhaustive


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


def stand_in_scale_rows(x, factors):
    return (x * factors[:, None]).astype(x.dtype)


def take_kernels_for_all_sizes(monkeypatch):
    for name in ("_SHORT_ROW_BYTES", "_FEW_BYTES"):
        monkeypatch.setattr(cross_entropy_stages, name, 0)


@pytest.fixture
def stand_ins(hopper, monkeypatch):
    """Takes kernels for rows of any length, and replaces them by jax.numpy."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cublaslt, "why_unavailable", lambda: "jax.numpy adds")
    take_kernels_for_all_sizes(monkeypatch)
    monkeypatch.setattr(cross_entropy_cuda, "forward", stand_in_forward)
    monkeypatch.setattr(cross_entropy_cuda, "backward", stand_in_backward)
    monkeypatch.setattr(cross_entropy_cuda, "scale_rows", stand_in_scale_rows)


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


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_soft_cap(stand_ins, case):
    labels, cap = case.labels(jnp.float32), 4.0

    def ours(cotangent, logits):
        return jaxfused.softmax_cross_entropy(
            logits, labels, logits_soft_cap=cap, cotangent=cotangent, **case.options
        )

    def plain(logits):
        capped = cap * jnp.tanh(logits / cap)
        return plain_cross_entropy(capped, labels, None, **case.options)

    for cotangent in (None, "any"):
        assert_values_and_gradients(
            functools.partial(ours, cotangent), plain, case.logits(jnp.float32), cotangents=2
        )
    reference = functools.partial(
        jaxfused.softmax_cross_entropy, logits_soft_cap=cap, implementation="xla", **case.options
    )
    assert_values_and_gradients(
        lambda z: reference(z, labels), plain, case.logits(jnp.float32), cotangents=2
    )


@pytest.mark.parametrize("linear", [False, True])
def test_soft_cap_of_a_linear_layer(stand_ins, linear):
    case = CASES[1]
    x, w, bias = case.linear_layer(jnp.float32)
    labels = case.labels(jnp.float32)

    def ours(x, w, bias, **options):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, labels, bias, logits_soft_cap=2.0, chunk_size=8, **options
        )

    def plain(x, w, bias):
        return plain_cross_entropy(2.0 * jnp.tanh((x @ w + bias) / 2.0), labels, None)

    options = {} if linear else {"implementation": "xla"}
    assert_values_and_gradients(functools.partial(ours, **options), plain, x, w, bias, cotangents=2)


def test_a_cotangent_for_each_token(stand_ins):
    logits = put(np.random.default_rng(0).normal(size=(4, 9)), jnp.float32)
    labels = put([1, 8, 0, 3])
    expected = put([1.0, -2.0, 0.0, 0.5])

    def vjp(**options):
        return jax.vjp(
            lambda z: jaxfused.softmax_cross_entropy(z, labels, reduction="none", **options), logits
        )[1]

    plain, ahead = vjp(implementation="xla"), vjp(cotangent=expected)
    np.testing.assert_allclose(*(f(expected)[0] for f in (plain, ahead)), rtol=1e-6, atol=1e-7)
    # A token with an expected cotangent of 0 has no gradient, so its actual cotangent is 0 here.
    others = put([3.0, 1.0, 0.0, -1.0])
    np.testing.assert_allclose(*(f(others)[0] for f in (plain, ahead)), rtol=1e-6, atol=1e-7)


def test_the_expected_cotangent_needs_no_correction(stand_ins, monkeypatch):
    factors = []

    def scale(x, factor):
        jax.debug.callback(lambda factor: factors.append(np.asarray(factor)), factor)
        return stand_in_scale_rows(x, factor)

    monkeypatch.setattr(cross_entropy_cuda, "scale_rows", scale)
    logits = put(np.random.default_rng(0).normal(size=(13, 31)), jnp.float32)
    weights = jnp.linspace(0.0, 3.0, 13)

    def loss(scale, expected, z):
        return scale * jaxfused.softmax_cross_entropy(
            z, jnp.arange(13), weights=weights, cotangent=expected
        )

    for scale_of_loss, expected in ((1.0, None), (1.0, 1.0), (3.0, 3.0), (0.1, 0.1)):
        jax.jit(jax.grad(functools.partial(loss, scale_of_loss, expected)))(logits)
    jax.effects_barrier()
    assert len(factors) == 4
    assert all((factor == 1.0).all() for factor in factors)


# --- lowered --------------------------------------------------------------------------------------

FORWARD, BACKWARD, SCALE = (
    f"jaxfused_{name}" for name in ("cross_entropy_forward", "cross_entropy_backward", "scale_rows")
)


@pytest.fixture
def loadable(hopper, built_library):
    """An H200, for which the library of kernels has been built."""


def loss_of(dtype="bfloat16", tokens=500, classes=1000, soft=False, **options):
    logits = jax.ShapeDtypeStruct((6, tokens, classes), dtype)
    labels = logits if soft else jax.ShapeDtypeStruct((6, tokens), jnp.int32)
    return functools.partial(jaxfused.softmax_cross_entropy, **options), logits, labels


@pytest.mark.parametrize(
    ("options", "launched"),
    [
        ({}, [FORWARD, SCALE]),
        (dict(cotangent="any"), [FORWARD, BACKWARD]),
        (dict(dtype="float16"), [FORWARD, BACKWARD]),
        (dict(dtype="float16", cotangent=1024.0), [FORWARD, SCALE]),
        (dict(dtype="float32", classes=100_003, soft=True, logits_soft_cap=30.0), [FORWARD, SCALE]),
        (dict(tokens=50), []),
        (dict(classes=10, tokens=10**6), []),
        (dict(classes=10, implementation="cuda"), [FORWARD, SCALE]),
        (dict(implementation="xla"), []),
    ],
    ids=str,
)
def test_what_is_launched(loadable, options, launched):
    f, *shapes = loss_of(**options)
    forward = [name for name in launched if name == FORWARD]
    assert kernels(f, *shapes) == forward
    assert kernels(jax.value_and_grad(f), *shapes) == launched
    assert kernels(jax.vmap(f), *shapes) == forward


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_a_linear_loss_of_no_token_launches_nothing(loadable, chunk_size):
    x = jax.ShapeDtypeStruct((2, 0, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 40), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((2, 0), jnp.int32)

    def loss(x, w, labels):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, labels, chunk_size=chunk_size, reduction="sum", implementation="cuda"
        )

    # The gradient of w is zero, and is still multiplied by the cotangent.
    assert set(kernels(jax.value_and_grad(loss, (0, 1)), x, w, labels)) <= {SCALE}


@pytest.mark.parametrize(
    ("options", "launched"),
    [
        (dict(chunk_size=10), [*3 * [FORWARD], *2 * [SCALE]]),
        (dict(), [FORWARD, *2 * [SCALE]]),
        (dict(chunk_size=16, cotangent="any"), [*2 * [FORWARD], *2 * [BACKWARD]]),
        # In a loop over many chunks, the first and the last are computed outside of it.
        (dict(chunk_size=2), [*2 * [FORWARD], *2 * [SCALE]]),
        (dict(chunk_size=4, cotangent="any"), [*8 * [FORWARD], *8 * [BACKWARD]]),
        (dict(chunk_size=3, cotangent="any"), [*2 * [FORWARD], *2 * [BACKWARD]]),
    ],
    ids=str,
)
def test_what_a_linear_loss_launches(loadable, monkeypatch, options, launched):
    take_kernels_for_all_sizes(monkeypatch)
    x = jax.ShapeDtypeStruct((6, 5, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((6, 5), jnp.int32)
    loss = functools.partial(jaxfused.linear_softmax_cross_entropy, **options)
    found = kernels(jax.value_and_grad(loss, (0, 1)), x, w, labels)
    assert sorted(found) == sorted(launched)


@pytest.mark.parametrize(
    ("options", "narrow"),
    [
        (dict(), True),
        (dict(sum_dtype=jnp.float32), False),
        (dict(weights=jnp.ones(30)), False),
        (dict(weights=jnp.ones(30), sum_dtype=jnp.bfloat16), True),
        (dict(cotangent="any"), False),
        (dict(chunk_size=7), False),
        (dict(chunk_size=30, sum_dtype=jnp.float32), True),
    ],
    ids=str,
)
def test_sums_of_the_gradient_of_w_are_float32_where_terms_may_cancel(loadable, options, narrow):
    """A single chunk needs no sums of chunks, and thus no float32 array."""
    x = jax.ShapeDtypeStruct((30, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((30,), jnp.int32)
    loss = functools.partial(jaxfused.linear_softmax_cross_entropy, **dict(chunk_size=10) | options)
    text = lowered(jax.grad(loss, (0, 1)), x, w, labels)
    # The kernel that scales the gradient afterwards uses float32 too.
    sums = re.search(r"(add|dot_general|custom_call).*tensor<16x1000xf32>", text)
    assert (sums is None) == narrow


def test_sums_in_16_bits_are_as_accurate_as_jax_numpy(stand_ins):
    case = Case((96,), 32, 40)
    labels = case.labels(jnp.bfloat16)
    x, w, _ = case.linear_layer(jnp.bfloat16)

    def ours(x, w):
        return jaxfused.linear_softmax_cross_entropy(x, w, labels, chunk_size=32)

    def plain(x, w):
        return plain_cross_entropy(x @ w, labels, None)

    assert_values_and_gradients(ours, plain, x, w)


def test_gradients_take_the_place_of_logits(loadable):
    """The kernels of a linear loss write in place, and so does the kernel that scales."""
    x = jax.ShapeDtypeStruct((30, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((30,), jnp.int32)
    for cotangent in (None, "any"):
        loss = functools.partial(jaxfused.linear_softmax_cross_entropy, cotangent=cotangent)
        text = lowered(jax.grad(loss, (0, 1)), x, w, labels)
        calls = [line for line in text.splitlines() if "custom_call @jaxfused" in line]
        gradients = [line for line in calls if "tensor<30x1000xbf16>" in line.split("->")[1]]
        assert len(gradients) == 1
        assert all("output_operand_alias<" in line for line in gradients)


def test_logits_are_kept_where_the_caller_has_them(loadable):
    f, *shapes = loss_of()
    text = lowered(jax.grad(f), *shapes)
    [forward] = [line for line in text.splitlines() if f"custom_call @{FORWARD}" in line]
    assert "output_operand_alias<" not in forward


def test_errors_of_named_implementations(hopper):
    logits, labels = jnp.ones((2, 3)), jnp.ones((2, 3))
    with pytest.raises(ValueError, match="soft labels are as large as the logits"):
        jaxfused.linear_softmax_cross_entropy(
            logits, jnp.ones((3, 3)), labels, implementation="cuda"
        )
    with pytest.raises(ValueError, match="there is no Pallas kernel of softmax_cross_entropy"):
        jaxfused.softmax_cross_entropy(logits, labels, implementation="pallas")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=None), "it needs an NVIDIA GPU"),
        (dict(compute_capability=(7, 0)), "7.5 or later, and this GPU has 7.0"),
        (dict(dtype=jnp.float64), "logits have dtype float64"),
        (dict(soft_dtype=jnp.float64), "labels have dtype float64"),
        (dict(features=2**30 + 1), "logits have 4 and 1073741825"),
    ],
)
def test_limits(change, reason):
    good = dict(compute_capability=(8, 0), rows=4, features=768, dtype=jnp.bfloat16)
    assert reason in cross_entropy_cuda.why_unsupported(**good | change)


@pytest.mark.parametrize("change", [dict(cluster=3), dict(threads=48), dict(threads=1024)])
def test_configs_validate_themselves(change):
    [name] = change
    with pytest.raises(ValueError, match=f"ForwardConfig: {name} must be"):
        cross_entropy_cuda.ForwardConfig(**change)


# --- on a GPU -------------------------------------------------------------------------------------

ON_GPU = (
    *CASES,
    # Rows per warp, block and cluster; misaligned rows; rows that exceed shared memory.
    Case((300,), 4, 1001),
    Case((2, 450), 4, 32000, options={"z_loss": 1e-4}),
    Case((70,), 4, 50257, weights=True, options={"label_smoothing": 0.1}),
    Case((9,), 4, 128256, options={"ignore_index": 7}),
    Case((3,), 4, 262144, weights=True),
    Case((2,), 4, 600_001),
    Case((40,), 4, 3001, soft=True, options={"logits_soft_cap": 5.0}),
    Case((40,), 4, 9000, options={"logits_soft_cap": 30.0, "reduction": "none"}),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cotangent", [0.5, "any"])
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_kernels_are_as_accurate_as_jax_numpy(case, cotangent, dtype):
    dtype = jnp.dtype(dtype)
    options = dict(case.options)
    cap = options.pop("logits_soft_cap", None)
    labels = case.labels(dtype)
    arrays = (case.logits(dtype), case.token_weights(dtype))
    arrays = (*arrays, labels) if case.soft else arrays

    def ours(logits, weights, labels=labels):
        return jaxfused.softmax_cross_entropy(
            logits,
            labels,
            weights=weights,
            logits_soft_cap=cap,
            cotangent=cotangent,
            implementation="cuda",
            **options,
        )

    def plain(logits, weights, labels=labels):
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return plain_cross_entropy(logits, labels, weights, **options)

    assert_values_and_gradients(ours, plain, *arrays, cotangents=2)
    results = [jax.jit(jax.value_and_grad(lambda *a: ours(*a).sum()))(*arrays) for _ in range(2)]
    chex.assert_trees_all_equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [-1, 1, 2, 4, 8])
@pytest.mark.parametrize("threads", [64, 256, 512])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_config_gives_the_same_gradient(cluster, threads, in_place):
    case = Case((700,), 4, 8191, options={"ignore_index": 3})
    logits, labels = case.logits(jnp.bfloat16), case.labels(jnp.bfloat16)
    classes = reference.classes_of(labels, 8191, reference.Options(ignore_index=3))
    coefficients = jnp.linspace(-1.0, 1.0, 700)
    constants = dict(label_smoothing=0.1, z_loss=1e-3, soft_cap=None)
    config = cross_entropy_cuda.ForwardConfig(cluster, threads)

    @jax.jit
    def ours(logits):
        return cross_entropy_cuda.forward(
            logits + 0, classes, None, coefficients, in_place=in_place, config=config, **constants
        )

    dlogits, statistics = ours(logits)
    expected, wanted = stand_in_forward(logits, classes, None, coefficients, **constants)
    counts = classes >= 0
    np.testing.assert_allclose(statistics[counts], wanted[counts], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        dlogits.astype(jnp.float32), expected.astype(jnp.float32), rtol=2.0**-7, atol=1e-6
    )


@pytest.mark.gpu
def test_nan_and_infinities_stay_where_the_reference_has_them():
    logits = np.random.default_rng(0).normal(size=(8, 5000)).astype(np.float32)
    logits[0, 3], logits[1, 4], logits[2], logits[3, 1:], logits[4, ::3] = (
        np.nan,
        np.inf,
        -np.inf,
        -np.inf,
        -np.inf,
    )
    logits[5] = np.finfo(np.float32).min
    labels = put([1, 1, 1, 0, 1, 1, 5000, -1])

    def results(implementation):
        def losses(z):
            return jaxfused.softmax_cross_entropy(
                z, labels, ignore_index=-1, reduction="none", implementation=implementation
            )

        value, vjp = jax.vjp(losses, logits)
        return value, *vjp(jnp.ones(8))

    for ours, plain in zip(results("cuda"), results("xla"), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
