"""qwix quantises every kernel of our layers, as of Flax's: int8 weights with or without int8 inputs."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

import jaxfused.linen
import jaxfused.nnx
from tests.flax.test_modules import normal
from tests.flax.test_watched_layers import CASES, LAYERS, LINEN, filled

CONVOLVES = (
    "Conv",
    "ConvTranspose",
    "ConvNormAct",
    "ResNetBlock",
    "ConvNeXtBlock",
    "SeparableConv",
)
"""Layers with convolutions, where qwix multiplies int8 weights only by int8 inputs."""


def provider(act_qtype):
    rule = qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype=act_qtype)
    return qwix.PtqProvider([rule])


def quantized(library, name, act_qtype):
    """Returns (the quantised model's result, the float one's, the dtypes of the kernels)."""
    options, shapes, residual = LAYERS[name]
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    more = {} if residual is None else {residual: normal(9, *shapes[0])}
    if library == "nnx":
        layer = getattr(jaxfused.nnx, name)(**options, rngs=flax.nnx.Rngs(0))
        flax.nnx.update(layer, filled(flax.nnx.state(layer, flax.nnx.Param)))
        small = qwix.quantize_model(layer, provider(act_qtype), *args, **more)
        results, params = (small(*args, **more), layer(*args, **more)), flax.nnx.state(small)
    else:
        layer = LINEN[name]
        variables = layer.init(jax.random.key(0), *args, **more)
        variables = {**variables, "params": filled(variables["params"])}
        small = qwix.quantize_model(layer, provider(act_qtype))
        abstract = jax.eval_shape(small.init, jax.random.key(0), *args, **more)
        params = qwix.quantize_params(variables["params"], abstract["params"])
        results = (
            small.apply({**variables, "params": params}, *args, **more),
            layer.apply(variables, *args, **more),
        )
    dtypes = {
        jax.tree_util.keystr(path): leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if "kernel" in jax.tree_util.keystr(path) and "scale" not in jax.tree_util.keystr(path)
    }
    return *results, dtypes


@pytest.mark.parametrize("act_qtype", [None, "int8"])
@pytest.mark.parametrize(("library", "name"), CASES)
def test_every_kernel_is_quantised(library, name, act_qtype):
    if act_qtype is None and name in CONVOLVES:
        pytest.skip("qwix asks for inputs of int8")
    actual, expected, dtypes = quantized(library, name, act_qtype)
    assert set(dtypes.values()) == {jnp.dtype("int8")}, dtypes
    error = jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)
    assert 0 < error < 0.05


@pytest.mark.parametrize("act_qtype", [None, "int8"])
def test_results_are_those_of_flaxs_layers(act_qtype):
    x = normal(0, 2, 5, 32)
    results = []
    for library in (flax.nnx, jaxfused.nnx):
        layer = library.MultiHeadAttention(2, 32, decode=False, rngs=flax.nnx.Rngs(0))
        results.append(qwix.quantize_model(layer, provider(act_qtype), x)(x))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)
