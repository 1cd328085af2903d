"""Quantised arrays of qwix and AQT, by stand-ins with their attributes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.quantization import CODEBOOKS, from_aqt, from_qwix
from tests.support.arrays import put


def of_qwix(values, scale, zero_point=None, qtype=None):
    return SimpleNamespace(
        qvalue=values, scale=scale, zero_point=zero_point, qtype=qtype or values.dtype
    )


def of_aqt(values, scales, bias=(), **others):
    given = dict(scale_t=None, tiling_state=None, sparsity_mask=None) | others
    return SimpleNamespace(qvalue=values, scale=scales, bias=list(bias), **given)


def drawn(features, columns=4, dtype=jnp.int4):
    return put(np.random.default_rng(0).integers(-7, 8, (features, columns)), dtype)


@pytest.mark.parametrize(("features", "layout"), [(256, "columns"), (6, "rows"), (5, "rows")])
def test_int4_of_qwix(features, layout):
    values, scale = drawn(features), put([[0.5, 1.0, 2.0, 4.0]])
    zero = put([[1, -2, 3, 0]], jnp.int4)
    array = of_qwix(values, scale, zero)
    found = from_qwix({"a": {"kernel": SimpleNamespace(array=array)}, "b": scale})
    kernel = found["a"]["kernel"]
    right = (np.asarray(values, np.float32) - np.asarray(zero, np.float32)) * np.asarray(scale)
    np.testing.assert_array_equal(kernel.dequantize(), right)
    assert (kernel.layout, kernel.dtype) == (layout, "int4") and found["b"] is scale
    x = np.random.default_rng(1).normal(size=(3, features)).astype(np.float32)
    y = jaxfused.quantized_matmul(x, array)
    np.testing.assert_allclose(y, x @ right, rtol=1e-5, atol=1e-4)


def test_groups_codes_and_quantised_inputs_of_qwix():
    codes = put(np.random.default_rng(0).integers(0, 16, (8, 4)), jnp.uint4)
    scale = put(2.0 ** np.arange(8).reshape(2, 4))
    found = from_qwix(of_qwix(codes, scale, qtype="nf4"))
    numbers = np.asarray(CODEBOOKS["nf4"], np.float32)[np.asarray(codes, int)]
    np.testing.assert_array_equal(found.dequantize(), numbers * np.repeat(scale, 4, 0))
    x = of_qwix(drawn(3, 8, jnp.int8), jnp.ones((3, 1)))
    y = jaxfused.quantized_matmul(x, found)
    np.testing.assert_allclose(y, np.asarray(x.qvalue, np.float32) @ found.dequantize(), rtol=1e-5)


def test_arrays_of_aqt():
    values = drawn(6, dtype=jnp.int8)
    scales = [put([[0.5, 1.0, 2.0, 4.0]]), put([[2.0]])]
    found = from_aqt([of_aqt(values, scales, bias=[jnp.ones((1, 1))])])[0]
    right = np.asarray(values, np.float32) * np.asarray(scales[0]) * 2 - 1
    np.testing.assert_array_equal(found.dequantize(), right)
    with pytest.raises(ValueError, match=r"from_aqt: .*pass jaxfused.quantize\(array.dequant"):
        from_aqt(of_aqt(values, scales, tiling_state="tiles"))


def test_trees_without_such_arrays():
    for convert, kind in ((from_qwix, "qwix.QArray"), (from_aqt, "QTensor")):
        with pytest.raises(ValueError, match=f"the tree has no {kind}"):
            convert({"kernel": jax.numpy.ones(3)})
