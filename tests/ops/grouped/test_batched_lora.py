"""batched_lora: a loop over rows, gradients, indices of sequences, messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from tests.support.arrays import put

D, RANK, F, ADAPTERS = 16, 8, 24, 3


def operands(shape=(4, 5), dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = ((*shape, D), (ADAPTERS, D, RANK), (ADAPTERS, RANK, F), (*shape, F))
    x, a, b, base = (put(0.5 * rng.normal(size=s), dtype) for s in shapes)
    return x, a, b, put(rng.integers(-1, ADAPTERS + 1, shape), "int32"), base


def by_rows(x, a, b, indices, base, scale):
    """Returns the sums of each row in float64."""
    y = np.array(base, np.float64)
    for place, index in np.ndenumerate(np.asarray(indices)):
        if 0 <= index < ADAPTERS:
            y[place] += scale[index] * (np.float64(x[place]) @ a[index] @ b[index])
    return y


def test_each_row_has_its_adapter():
    x, a, b, indices, base = operands()
    scale = jnp.array([0.5, 2.0, 1.0])
    y = jax.jit(jaxfused.batched_lora)(x, a, b, indices, base=base, scale=scale)
    np.testing.assert_allclose(y, by_rows(x, a, b, indices, base, scale), rtol=1e-5, atol=1e-5)


def test_indices_of_sequences_and_16_bits():
    x, a, b, indices, base = operands(dtype="bfloat16")
    y = jaxfused.batched_lora(x, a, b, indices[:, 0], base=base, scale=2.0)
    assert y.dtype == jnp.bfloat16
    of_rows = np.broadcast_to(np.asarray(indices)[:, :1], indices.shape)
    expected = by_rows(x, a, b, of_rows, base, [2.0] * ADAPTERS)
    np.testing.assert_allclose(np.float32(y), expected, rtol=2e-2, atol=4e-2)


@pytest.mark.exhaustive
def test_gradients():
    x, a, b, indices, base = operands()
    f = jax.jit(
        lambda *args: jaxfused.batched_lora(*args[:3], indices, base=args[3], scale=args[4])
    )
    check_grads(f, (x, a, b, base, jnp.array([0.5, 2.0, 1.0])), 1, ("rev",), atol=2e-2, rtol=2e-2)


X, A, B, INDICES, BASE = operands()


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((X, A[:, :3], B, INDICES), {}, r"a has shape .* pass a of shape \(adapters, 16, rank\)"),
        ((X, A, B[:2], INDICES), {}, r"b has shape .* pass b of shape \(3, 8, features\)"),
        ((X, A, B, INDICES * 1.0), {}, "indices have .* dtype float32"),
        ((X, A, B, INDICES[:3]), {}, r"indices have shape .* of shape \(4, 5\), or of its first"),
        ((X, A, B, INDICES), dict(base=BASE[:2]), "base has shape"),
        ((X, A, B, INDICES), dict(scale=jnp.ones(2)), "scale has shape .* 3 adapters"),
        ((X, A, B, INDICES), dict(implementation="cuda"), "no CUDA kernel"),
    ],
)
def test_messages(args, options, message):
    with pytest.raises(ValueError, match=f"batched_lora: .*{message}"):
        jaxfused.batched_lora(*args, **options)
