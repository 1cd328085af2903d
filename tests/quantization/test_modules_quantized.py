"""Quantised layers of nnx and linen agree, and are close to the original layers."""

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import QuantizationRule
from tests.flax.test_modules import normal, params_of
from tests.support.grids import parametrize

D = 32
FORMATS = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")


def dequantized(tree):
    """Returns the tree with dequantised kernels."""
    return jax.tree.map(
        lambda leaf: (
            leaf.array.dequantize() if isinstance(leaf, jaxfused.QuantizedKernel) else leaf
        ),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, jaxfused.QuantizedKernel),
    )


def state_of(module):
    return flax.nnx.to_pure_dict(flax.nnx.state(module))


@pytest.mark.parametrize("kernel_dtype", FORMATS)
def test_layers_are_the_product_with_the_dequantised_kernel(kernel_dtype):
    options = dict(kernel_dtype=kernel_dtype, group_size=8, activation="silu")
    nnx = jaxfused.nnx.QuantizedLinear(D, 5, rngs=flax.nnx.Rngs(0), **options)
    nnx.bias[...] = normal(3, 5)
    params = state_of(nnx)
    linen = jaxfused.linen.QuantizedDense(5, **options)
    x, residual = normal(0, 4, D), normal(1, 4, 5)
    y = nnx(x, residual=residual)
    kernel = params["kernel"].array
    assert kernel.dtype == kernel_dtype and kernel.groups == D // 8
    assert kernel.layout == ("rows" if kernel_dtype == "int4" else "columns")
    expected = jax.nn.silu(x @ kernel.dequantize() + params["bias"]) + residual
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(linen.apply({"params": params}, x, residual=residual), y)
    fresh = linen.init(jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
    # Dense accepts a quantised kernel.
    dense = jaxfused.linen.Dense(5, activation="silu")
    np.testing.assert_array_equal(dense.apply({"params": params}, x, residual=residual), y)


def test_quantised_inputs():
    nnx = jaxfused.nnx.QuantizedLinear(
        D, 5, input_dtype="int8", dtype=jnp.bfloat16, rngs=flax.nnx.Rngs(0)
    )
    x = normal(0, 4, D, dtype=jnp.bfloat16)
    y = nnx(x)
    assert y.dtype == jnp.bfloat16
    kernel = nnx.kernel.get_value().array
    rows = jaxfused.quantize_rows(x)
    expected = (rows.dequantize() @ kernel.dequantize()).astype(jnp.bfloat16)
    np.testing.assert_allclose(
        np.float32(y), np.float32(expected), rtol=float(jnp.finfo(jnp.bfloat16).eps)
    )
    unquantised = x.astype(jnp.float32) @ kernel.dequantize()
    assert not np.array_equal(np.float32(y), np.float32(unquantised.astype(jnp.bfloat16)))


RULES = [
    QuantizationRule("mlp/(up|gate)$", "int4", group_size=(16, 8)),
    QuantizationRule("project$", None),
    QuantizationRule("", "int8", input_dtype="int8"),
]


@parametrize("gated", [False, True], quick=())
def test_quantize_params_of_a_block(gated):
    options = dict(hidden_features=D, gated=gated, normalize_qk=True, num_kv_heads=2)
    block = jaxfused.nnx.TransformerBlock(
        D, 4, rope=jaxfused.nnx.RotaryEmbedding(), rngs=flax.nnx.Rngs(0), **options
    )
    linen = jaxfused.linen.TransformerBlock(4, rope=jaxfused.linen.RotaryEmbedding(), **options)
    params = params_of(block)
    x = normal(0, 2, 5, D)
    call, apply = flax.nnx.jit(lambda block, x: block(x)), jax.jit(linen.apply)
    before = call(block, x)

    quantised = jaxfused.quantize_params(block, RULES)
    tree = jaxfused.quantize_params(params, RULES)
    np.testing.assert_array_equal(call(block, x), before)
    chex.assert_trees_all_equal(state_of(quantised), tree, strict=True)
    assert tree["mlp"]["up"]["kernel"].array.dtype == "int4"
    assert tree["mlp"]["down"]["kernel"].input_dtype == "int8"
    assert isinstance(tree["project"]["kernel"], jax.Array)

    np.testing.assert_array_equal(apply({"params": tree}, x), call(quantised, x))
    # If inputs are not quantised, the block equals that with dequantised kernels.
    weights_only = [QuantizationRule("", "int4")]
    tree = jaxfused.quantize_params(params, weights_only)
    np.testing.assert_allclose(
        call(jaxfused.quantize_params(block, weights_only), x),
        apply({"params": dequantized(tree)}, x),
        rtol=2e-5,
        atol=2e-5,
    )


def test_quantize_params_reaches_lists_and_shared_layers():
    class Model(flax.nnx.Module):
        def __init__(self, rngs):
            self.first = flax.nnx.Linear(D, D, rngs=rngs)
            self.layers = flax.nnx.List([self.first, flax.nnx.Linear(D, D, rngs=rngs)])
            self.norm = flax.nnx.LayerNorm(D, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.norm(x + self.first(x))

    model = Model(flax.nnx.Rngs(0))
    quantised = jaxfused.quantize_params(model, "int8")
    assert quantised.first is quantised.layers[0]
    assert isinstance(quantised.layers[1], jaxfused.nnx.QuantizedLinear)
    assert isinstance(model.first, flax.nnx.Linear)
    x = normal(0, 3, D)
    y = flax.nnx.jit(lambda m, x: m(x))(quantised, x)
    np.testing.assert_allclose(y, model(x), atol=0.1)
    assert not np.array_equal(y, model(x))
    # Kernels are frozen, so only the bias has a gradient.
    gradients = flax.nnx.grad(lambda m: m(x).var())(quantised)
    assert set(flax.nnx.to_pure_dict(gradients)["first"]) == {"bias"}


def test_scanned_layers():
    stack = flax.nnx.vmap(lambda rngs: jaxfused.nnx.Linear(D, D, rngs=rngs))
    layers = stack(flax.nnx.Rngs(0).split(3))
    quantised = jaxfused.quantize_params(layers, "int4")
    x = normal(0, 2, D)
    scan = flax.nnx.scan(
        lambda x, layer: layer(x), in_axes=(flax.nnx.Carry, 0), out_axes=flax.nnx.Carry
    )
    expected = x
    for kernel in quantised.kernel.get_value().array.dequantize():
        expected = expected @ kernel
    np.testing.assert_allclose(scan(x, quantised), expected, rtol=1e-4, atol=1e-5)


def test_root_layer_and_nothing_else():
    layer = flax.nnx.Linear(D, 4, use_bias=False, rngs=flax.nnx.Rngs(0))
    assert jaxfused.quantize_params(layer, "int8").bias is None
    attention = flax.linen.MultiHeadDotProductAttention(2)
    params = attention.init(jax.random.key(0), jnp.ones((1, 5, 8)))
    with pytest.raises(ValueError, match=r"decides over no layer.*: none"):
        jaxfused.quantize_params(params, "int8")


@pytest.mark.parametrize(
    ("arguments", "rules", "message"),
    [
        (
            {},
            [QuantizationRule("", "int8"), QuantizationRule("up", "int4")],
            "'up' decides over no",
        ),
        ({}, [QuantizationRule("head", "int8")], "'head' decides over no layer.*''"),
        ({}, "int3", "'int3' is not known"),
        ({}, [QuantizationRule("", "int8", group_size=7)], "group_size is 7"),
        (dict(precision="highest"), "int8", "because precision is given"),
        (dict(dot_general=lambda *a, **k: None), "int8", "because dot_general is given"),
    ],
)
def test_refuses(arguments, rules, message):
    layer = flax.nnx.Linear(D, 4, rngs=flax.nnx.Rngs(0), **arguments)
    with pytest.raises(ValueError, match=message):
        jaxfused.quantize_params(layer, rules)


def test_refuses_what_is_no_model():
    with pytest.raises(TypeError, match="is a ArrayImpl"):
        jaxfused.quantize_params(jnp.ones(3), "int8")


def test_dense_refuses_a_kernel_of_another_shape():
    params = jaxfused.quantize_params({"kernel": normal(0, D, 4)}, "int8")
    with pytest.raises(ValueError, match=r"shape \(32, 4\).*\(32, 5\)"):
        jaxfused.linen.Dense(5, use_bias=False).apply({"params": params}, normal(1, 2, D))
    with pytest.raises(ValueError, match="precision='highest'"):
        dense = jaxfused.linen.Dense(4, use_bias=False, precision="highest")
        dense.apply({"params": params}, normal(1, 2, D))


@parametrize(
    ("size", "options"),
    [
        ((3, 3), dict(strides=2, use_bias=False)),
        ((3, 3), dict(feature_group_count=8)),
        ((1, 1), {}),
        ((3,), dict(padding="CAUSAL")),
    ],
    quick=(0, 1),
)
@pytest.mark.parametrize("input_dtype", [None, "int8"])
def test_quantised_convolutions(size, options, input_dtype):
    conv = jaxfused.nnx.Conv(8, 16, size, rngs=flax.nnx.Rngs(0), activation="relu", **options)
    rules = [QuantizationRule("", "int8", input_dtype=input_dtype)]
    quantised = jaxfused.quantize_params(conv, rules)
    x = normal(0, 2, 3, *(9,) * len(size), 8)
    run = flax.nnx.jit(lambda m, x: m(x))
    y, expected = run(quantised, x), run(conv, x)
    assert y.shape == expected.shape and y.dtype == expected.dtype
    assert jnp.linalg.norm(y - expected) < 0.02 * jnp.linalg.norm(expected)
    array = quantised.kernel.get_value().array
    assert array.shape == (np.prod(conv.kernel.shape[:-1]), 16) and array.dtype == "int8"
    assert array.layout == ("rows" if np.prod(size) > 1 else "columns")
    plain = flax.nnx.Conv(8, 16, size, rngs=flax.nnx.Rngs(0), **options)
    of_flax = jaxfused.quantize_params(plain, rules)
    np.testing.assert_array_equal(jax.nn.relu(run(of_flax, x)), y)
    params = params_of(conv)
    linen = jaxfused.linen.Conv(16, size, activation="relu", **options)
    tree = jaxfused.quantize_params(params, rules)
    np.testing.assert_array_equal(jax.jit(linen.apply)({"params": tree}, x), y)
    gradient = flax.nnx.jit(flax.nnx.grad(lambda m, x: m(x).sum(), argnums=1))(quantised, x)
    assert np.abs(gradient).max() > 0 or input_dtype
    with pytest.raises(ValueError, match="QuantizedKernel has shape"):
        jaxfused.linen.Conv(17, size, **options).apply({"params": tree}, x)


def test_batch_norm_is_folded_into_the_scales():
    x = normal(0, 2, 9, 9, 8)
    layer = jaxfused.nnx.ConvNormAct(8, 16, (3, 3), rngs=flax.nnx.Rngs(0))
    layer.norm.scale[...] = normal(1, 16)  # of both signs
    layer.norm.bias[...], layer.norm.mean[...] = normal(2, 16), normal(3, 16)
    layer.norm.var[...] = jnp.exp(normal(4, 16))
    residual = normal(5, 2, 9, 9, 16)
    expected = layer(x, residual=residual, use_running_average=True)
    quantised = jaxfused.quantize_params(layer, [QuantizationRule("", "int8", input_dtype="int8")])
    y = quantised(x, residual=residual, use_running_average=True)
    assert jnp.linalg.norm(y - expected) < 0.02 * jnp.linalg.norm(expected)
    # The result is as if the norm had been folded before.
    kernel, bias = jaxfused.fold_batch_norm(
        layer.conv.kernel[...],
        mean=layer.norm.mean[...],
        var=layer.norm.var[...],
        norm_scale=layer.norm.scale[...],
        norm_bias=layer.norm.bias[...],
    )
    before = jaxfused.nnx.Conv(8, 16, (3, 3), activation="relu", rngs=flax.nnx.Rngs(0))
    before.kernel[...], before.bias[...] = kernel, bias
    before = jaxfused.quantize_params(before, [QuantizationRule("", "int8", input_dtype="int8")])
    np.testing.assert_allclose(y, before(x, residual=residual), rtol=1e-4, atol=1e-4)

    linen = jaxfused.linen.ConvNormAct(16, (3, 3), use_running_average=True)
    statistics = dict(mean=layer.norm.mean[...], var=layer.norm.var[...])
    norm = dict(scale=layer.norm.scale[...], bias=layer.norm.bias[...])
    params = {"conv": {"kernel": layer.conv.kernel[...]}, "norm": norm}
    tree = jaxfused.quantize_params(params, [QuantizationRule("conv", "int8", input_dtype="int8")])
    variables = {"params": tree, "batch_stats": {"norm": statistics}}
    np.testing.assert_array_equal(linen.apply(variables, x, residual=residual), y)
    np.testing.assert_array_equal(
        quantised(x), layer.norm(quantised.conv(x))
    )  # In training, the norm uses the batch's statistics after the convolution.


def test_convolutions_refuse_what_is_not_plain():
    conv = flax.nnx.Conv(4, 4, (3, 3), precision="highest", rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"convolution of 4 and 4 channels .* precision is given"):
        jaxfused.quantize_params(conv, "int8")
    tree = jaxfused.quantize_params(
        params_of(flax.nnx.Conv(4, 4, (3, 3), rngs=flax.nnx.Rngs(0))), "int8"
    )
    with pytest.raises(ValueError, match="precision='highest' was passed with a quantised"):
        jaxfused.linen.Conv(4, (3, 3), precision="highest").apply(
            {"params": tree}, normal(0, 1, 5, 5, 4)
        )
