"""Activations of the CUDA C kernels, compared with float64 on a GPU or in the emulator."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.ops.linear import bias_activation_cuda
from jaxfused.runtime.activation import ACTIVATIONS, function_of
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.tolerances import assert_accurate

NAMES = (*ACTIVATIONS, "leaky_relu(0.2)")
DTYPES = ("float32", "bfloat16", "float16")
each_name = pytest.mark.parametrize("name", NAMES)


def value_and_derivative(name: str, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(function_of(name), (z,), (jnp.ones_like(z),))


@pytest.mark.gpu
@each_name
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_derivatives(name, dtype):
    """A row of ordinary values ends within a vector; far values, each compared alone, and NaN."""
    far = [6e4] if dtype == "float16" else [1e4, 1e18]
    near = put(np.linspace(-9.0, 9.0, 331)[None], dtype)
    for z in (
        near,
        *(put([[value]], dtype) for f in far for value in (f, -f)),
        put([[0.0]], dtype),
    ):
        y, *_ = forward(name, z)
        dz, again = backward(name, z)
        plain = jax.jit(functools.partial(value_and_derivative, name))(z)
        with jax.enable_x64(True):
            truth = jax.tree.map(np.asarray, value_and_derivative(name, np.float64(z)))
        assert_right("y", z, y, plain[0], truth[0])
        assert_right("y of the backward", z, again, plain[0], truth[0])
        assert_right("dz", z, dz, plain[1], truth[1])
    y, *_ = forward(name, put([[1.0, np.nan, 1.0]], dtype))
    np.testing.assert_array_equal(jnp.isnan(y), [[False, True, False]])


def assert_right(what, z, actual, plain, truth):
    """In 16 bits by the rule of all tests; in float32 up to the error of the GPU's exponential."""
    if z.dtype != jnp.float32:
        assert_accurate(what, actual, plain, truth)
        return
    scale = np.maximum(1.0, np.maximum(np.abs(z), np.abs(truth)))
    np.testing.assert_array_less(np.abs(actual - truth) / scale, 2e-6, what)


def forward(name: str, z: jax.Array) -> tuple[Any, ...]:
    return bias_activation_cuda.forward(
        z, None, None, None, None, activation=name, out_dtype=z.dtype, save_preactivation=False
    )


def backward(name: str, z: jax.Array) -> tuple[Any, Any]:
    options = dict(activation=name, want_y=True, want_sums=False)
    dz, _, y, _ = bias_activation_cuda.backward(jnp.ones_like(z), z, None, **options)
    return dz, y


class Call(NamedTuple):
    f: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "bfloat16"


def _depthwise(x, w, bias, **options):
    return jaxfused.conv(x, w, bias, feature_group_count=x.shape[-1], **options)


def _normalised_after(x, scale, bias, *, activation, **options):
    return jaxfused.layer_norm(x, scale, bias, pre_activation=activation, **options)


def _batch_norm(*args, **options):
    return jaxfused.batch_norm(*args, **options)[0]


CALLS = {
    "linear": Call(jaxfused.linear, ((37, 16), (16, 333), (333,))),
    "gated_mlp": Call(jaxfused.gated_mlp, ((37, 16), (16, 72), (16, 72), (72, 16))),
    "layer_norm": Call(jaxfused.layer_norm, ((37, 333), (333,), (333,))),
    "layer_norm, vectors": Call(jaxfused.layer_norm, ((5, 776), (776,), (776,)), "float16"),
    "layer_norm, long rows": Call(jaxfused.layer_norm, ((1, 5008), (5008,), (5008,)), "float32"),
    "norm after": Call(_normalised_after, ((37, 333), (333,), (333,))),
    "norm after, vectors": Call(_normalised_after, ((5, 776), (776,), (776,)), "float16"),
    "norm after, long rows": Call(_normalised_after, ((1, 5008), (5008,), (5008,)), "float32"),
    "group_norm": Call(
        functools.partial(jaxfused.group_norm, num_groups=10), ((2, 7, 5, 40), (40,), (40,))
    ),
    "batch_norm": Call(_batch_norm, ((3, 7, 5, 40), (40,), (40,))),
    "depthwise strips": Call(_depthwise, ((2, 5, 7, 6), (3, 3, 1, 6), (6,))),
    "depthwise tiles": Call(_depthwise, ((1, 9, 11, 24), (7, 7, 1, 24), (24,))),
    "depthwise 1d": Call(_depthwise, ((2, 70, 6), (4, 1, 6), (6,))),
}
"""Each kernel that applies an activation. Its last tile ends within a vector, a row or an image."""


@pytest.mark.gpu
@each_name
@pytest.mark.parametrize("call", CALLS)
def test_every_kernel(call, name):
    f, shapes, dtype = CALLS[call]
    rng = np.random.default_rng(0)
    # Sums of products of quarters are exact, so that no rounding moves one over a corner.
    arrays = [
        put(np.round(4 * rng.normal(size=s, scale=0.3 if i and len(s) > 1 else 1.5)) / 4, dtype)
        for i, s in enumerate(shapes)
    ]
    ours, plain = (functools.partial(f, activation=name, implementation=i) for i in ("cuda", "xla"))
    assert_values_and_gradients(ours, plain, *arrays, cotangents=2)
