"""Arrays of qwix and AQT as `QuantizedArray`, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import aqt_quantizer
from qwix._src.core import qarray

import jaxfused

W = jax.random.normal(jax.random.key(0), (256, 16))


@pytest.mark.parametrize("tile", [None, 32])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize(
    "dtype", ["int4", "int8", "float8_e4m3fn", "nf4", "mxfp4", "mxfp8", "int2"]
)
def test_arrays_of_qwix(dtype, method, tile):
    if (dtype.startswith("mx") and tile is None) or (
        method == "minmax" and dtype not in ("int4", "int8")
    ):
        pytest.skip("qwix has no such arrays")
    qtype = dtype if dtype in ("nf4", "mxfp4", "mxfp8", "int2") else getattr(jnp, dtype)
    tiles = {0: tile} if tile else {}
    how = qarray.HowToQuantize(
        qtype=qtype, channelwise_axes=[1], tiled_axes=tiles, calibration_method=method
    )
    array = qarray.quantize(W, how)
    right = np.asarray(qarray.dequantize(array), np.float32)
    found = jaxfused.quantization.from_qwix({"kernel": array})["kernel"]
    np.testing.assert_array_equal(found.dequantize(), right)
    x = jax.random.normal(jax.random.key(1), (3, 256))
    for w in (array, found):
        np.testing.assert_allclose(jaxfused.quantized_matmul(x, w), x @ right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_arrays_of_aqt(bits):
    array, _ = aqt_quantizer.quantizer_make(bits).quant(W, calibration_axes=[0])
    found = jaxfused.quantization.from_aqt([array, W])[0]
    np.testing.assert_array_equal(found.dequantize(), array.dequant())
