import functools

import jax
import jax.numpy as jnp
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.conv import depthwise_conv1d_cuda
from tests.cases.conv import CONV1D_CASES, CONV1D_KERNEL_CASES
from tests.ops.conv.test_conv import plain_conv
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

FORWARD, BACKWARD = "jaxfused_depthwise_conv1d", "jaxfused_depthwise_conv1d_backward"


@pytest.fixture
def stand_ins(with_library, monkeypatch):
    """Replaces the kernels by XLA, to test the operator around them."""

    def conv(x, w, bias, residual, *, padding, activation, multiprocessors):
        del multiprocessors
        options = dict(padding=[padding], feature_group_count=x.shape[-1], activation=activation)
        return plain_conv(x, w[:, None], bias, residual, **options)

    def gradient(x, w, bias, residual, dy, other, **options):
        present = [a for a in (bias, residual) if a is not None]

        def f(x, w, *rest):
            rest = iter(rest)
            added = [None if a is None else next(rest) for a in (bias, residual)]
            return conv(x, w, *added, **options)

        dx, dw, *rest = jax.vjp(f, x, w, *present)[1](dy)
        dbias = jnp.zeros(x.shape[-1]) if bias is None else rest[0]
        return (
            dx if other is None else dx + other,
            dw,
            dbias,
            None if residual is None else rest[-1],
        )

    monkeypatch.setattr(depthwise_conv1d_cuda, "conv", conv)
    monkeypatch.setattr(depthwise_conv1d_cuda, "gradient", gradient)


def functions(case, implementation):
    def ours(x, w, bias, residual):
        return jaxfused.conv(
            x, w, bias, residual=residual, implementation=implementation, **case.options
        )

    return ours, functools.partial(plain_conv, **case.options)


@pytest.mark.parametrize("case", CONV1D_CASES, ids=str)
def test_the_way_to_the_kernels(case, stand_ins):
    with dispatch.recorded() as choices:
        assert_values_and_gradients(*functions(case, "cuda"), *case.arguments(jnp.float32))
    chosen = {choice.stage: choice.implementation for choice in choices}
    assert chosen == {"conv depthwise 1d forward": "cuda", "conv depthwise 1d backward": "cuda"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CONV1D_CASES[:2], ids=str)
def test_xlas_form_of_the_stages(case, dtype, with_library, monkeypatch):
    monkeypatch.setattr(depthwise_conv1d_cuda, "why_unsupported", lambda **_: "it is not there")
    assert_values_and_gradients(*functions(case, None), *case.arguments(jnp.dtype(dtype)))


def test_transforms(stand_ins):
    case = CONV1D_CASES[0]
    assert_transforms(functions(case, "cuda")[0], *case.arguments(jnp.float32))


def test_what_is_launched(with_library):
    x, w, bias, residual = CONV1D_CASES[0].arguments(jnp.bfloat16)
    ours, _ = functions(CONV1D_CASES[0], None)
    assert kernels(ours, x, w, bias, residual) == [FORWARD]
    gradient = jax.grad(lambda *args: (ours(*args).astype(jnp.float32) ** 2).sum(), (0, 1, 2, 3))
    assert kernels(gradient, x, w, bias, residual) == [FORWARD, BACKWARD]


def test_the_returned_input_joins_the_gradient(stand_ins):
    case = CONV1D_CASES[0]
    x, w, bias, _ = case.arguments(jnp.float32)

    def total(implementation, x, w, bias):
        y, x, _ = conv_operator.run(
            x,
            w,
            bias,
            window=dict(padding="CAUSAL", feature_group_count=8),
            activation="silu",
            return_input=True,
            implementation=implementation,
        )
        return (y**2).sum() + (x**3).sum()

    ours, plain = (
        jax.grad(functools.partial(total, i), (0, 1, 2))(x, w, bias) for i in ("cuda", "xla")
    )
    for a, b in zip(ours, plain, strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5)


GOOD = dict(
    compute_capability=(9, 0),
    images=2,
    length=9,
    channels=4,
    taps=4,
    padding=(3, 0),
    dtype=jnp.bfloat16,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=(7, 0)), "this GPU has 7.0"),
        (dict(dtype=jnp.dtype("int8")), "x has dtype int8"),
        (dict(residual_dtype=jnp.float32), "residual float32"),
        (dict(taps=6), "no kernel of 6 taps"),
        (dict(padding=(4, 0)), "0 to 3 zeros"),
        (dict(length=2, padding=(0, 0)), "the result has -1 steps"),
        (dict(images=2**26), "less than 268435456 steps"),
    ],
)
def test_limits(with_library, change, reason):
    assert depthwise_conv1d_cuda.why_unsupported(**GOOD) is None
    assert reason in depthwise_conv1d_cuda.why_unsupported(**GOOD | change)


def test_windows_without_a_kernel_are_xlas(with_library):
    x = jnp.ones((2, 9, 4), jnp.bfloat16)
    for taps, stride in ((6, 1), (4, 2)):
        w = jnp.ones((taps, 1, 4), jnp.bfloat16)
        f = functools.partial(jaxfused.conv, feature_group_count=4, strides=stride)
        assert kernels(f, x, w) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", [*CONV1D_CASES, *CONV1D_KERNEL_CASES], ids=str)
def test_kernels_are_as_accurate_as_jax_numpy(case, dtype):
    ours, plain = functions(case, "cuda")
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(ours, plain, *args, cotangents=2)
