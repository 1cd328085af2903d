"""Checkpoints that real packages have written, read bit for bit: `make test-formats`."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxfused.quantization.checkpoints import safetensors_file
from tests.support.checkpoints import ULPS, layer_in, positive_zeros, weights_in

WRITTEN = Path(os.environ.get("WRITTEN_FORMATS", "build/formats/written"))


@pytest.mark.parametrize("folder", sorted(WRITTEN.glob("*")), ids=lambda folder: folder.name)
def test_weights_are_those_of_the_package(folder):
    layer = layer_in(folder)
    expected, _ = safetensors_file.read("test", folder / "expected.safetensors.of")
    right = positive_zeros(expected["weight"])
    weights = weights_in(layer, right.dtype)
    assert weights.shape == right.shape
    bits = f"i{right.dtype.itemsize}"
    distance = np.abs(weights.view(bits).astype(np.int64) - right.view(bits))
    distance = np.where(np.isnan(right) & np.isnan(weights), 0, distance)
    assert distance.max() <= ULPS.get(folder.name, 0), f"{(distance > 0).sum()} of {right.size}"
    if right.ndim == 2:
        x = np.eye(right.shape[-1], dtype=np.float32)
        product = np.asarray(replace(layer, bias=None)(x)).T
        wide = np.asarray(layer.dequantize()).T
        np.testing.assert_allclose(product, wide, rtol=1e-5, atol=1e-9)
