"""Training around frozen weights: gradients to scales, layers with a LoRA, and memory."""

import re

import chex
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused.modules.linear import LoRAKernel
from jaxfused.runtime.quantized_array import QuantizedArray
from tests.flax.test_modules import normal
from tests.support.grids import parametrize

D, F, R = 32, 48, 4


def with_scale(w, scale):
    return QuantizedArray(w.values, scale, w.zero_point, w.axis, w.layout)


@parametrize(
    ("features", "dtype", "options"),
    [
        (64, "int8", {}),
        (64, "int4", dict(group_size=16, symmetric=False)),
        (256, "int4", dict(group_size=32, layout="columns", symmetric=False)),
        (1536, "int8", dict(layout="columns")),
        (1280, "int4", dict(group_size=640, layout="columns")),
        (1026, "int8", dict(symmetric=False)),
        (521, "float8_e4m3fn", {}),
        (64, "float8_e5m2", dict(per_tensor=True)),
        (64, "int8", dict(group_size=(32, 16), symmetric=False)),
        (256, "int4", dict(group_size=(128, 8), layout="columns")),
    ],
    quick=(2, 3),
)
def test_gradient_of_scales(features, dtype, options):
    w = jaxfused.quantize(normal(0, features, F), dtype, **options)
    x, dy = normal(1, 2, 3, features), normal(2, 2, 3, F)

    def loss(scale, x, matmul):
        return jnp.vdot(jax.nn.silu(matmul(x, with_scale(w, scale))), dy)

    def ours(x, w):
        return jaxfused.quantized_matmul(x, w, scale_gradient=True)

    def plain(x, w):
        return jnp.matmul(x, w.dequantize(), precision="highest")

    actual, expected = (
        jax.jit(jax.grad(lambda s, x, f=f: loss(s, x, f), (0, 1)))(w.scale, x)
        for f in (ours, plain)
    )
    assert actual[0].shape == w.scale.shape
    chex.assert_trees_all_close(
        actual, expected, rtol=2e-4, atol=2e-4 * float(jnp.abs(expected[0]).max())
    )
    frozen = jax.grad(lambda s: loss(s, x, jaxfused.quantized_matmul))(w.scale)
    np.testing.assert_array_equal(frozen, jnp.zeros_like(w.scale))


def test_gradient_of_scales_is_of_float_inputs():
    w, x = jaxfused.quantize(normal(0, D, F)), jaxfused.quantize_rows(normal(1, 2, D))
    with pytest.raises(ValueError, match="scale_gradient=True was passed with a quantised x"):
        jaxfused.quantized_matmul(x, w, scale_gradient=True)


def wrapped(mlp, names, *, own_class=False, seed=5):
    """Puts a LoRA, whose two factors are random, around some of the layers of a module."""
    mlp = flax.nnx.clone(mlp)
    for i, name in enumerate(names):
        layer = getattr(mlp, name)
        sizes = (layer.in_features, layer.out_features)
        if own_class:
            lora = flax.nnx.LoRALinear(*sizes, lora_rank=R, rngs=flax.nnx.Rngs(seed + i))
            lora.kernel, lora.bias = layer.kernel, layer.bias
            factors = lora.lora
        else:
            lora = factors = flax.nnx.LoRA(
                sizes[0], R, sizes[1], base_module=layer, rngs=flax.nnx.Rngs(seed + i)
            )
        factors.lora_b[...] = 0.3 * normal(seed + i, R, sizes[1])
        setattr(mlp, name, lora)
    return mlp


def merged(mlp, names):
    """Returns the module with its low-rank products added to the kernels."""
    mlp = flax.nnx.clone(mlp)
    for name in names:
        lora = getattr(mlp, name)
        base = lora.base_module
        base.kernel[...] += lora.lora_a[...] @ lora.lora_b[...]
        setattr(mlp, name, base)
    return mlp


@parametrize(
    ("gated", "names"),
    [(False, ("up", "down")), (True, ("gate", "up", "down")), (False, ("down",)), (True, ("up",))],
    quick=(0, 3),
)
def test_lora_in_a_perceptron_is_the_perceptron_of_the_sums(gated, names):
    make = jaxfused.nnx.GatedMLP if gated else jaxfused.nnx.MLP
    mlp = make(D, F, use_bias=True, rngs=flax.nnx.Rngs(0))
    lora = wrapped(mlp, names)
    x, residual = normal(1, 3, D), normal(2, 3, D)
    y, expected = (m(x, residual=residual) for m in (lora, merged(lora, names)))
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
    assert not np.allclose(y, mlp(x, residual=residual), atol=1e-2)
    gradients = flax.nnx.grad(
        lambda m: m(x).var(), argnums=flax.nnx.DiffState(0, flax.nnx.LoRAParam)
    )
    found = flax.nnx.to_pure_dict(gradients(lora))
    assert set(found) == set(names)
    chex.assert_tree_all_finite(found)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found))
    of_class = wrapped(mlp, names, own_class=True)
    for name in names:
        getattr(of_class, name).lora.lora_a[...] = getattr(lora, name).lora_a[...]
    np.testing.assert_allclose(of_class(x, residual=residual), y, rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_lora_in_a_block_and_around_quantised_layers():
    block = jaxfused.nnx.TransformerBlock(
        D, 4, hidden_features=F, gated=True, rngs=flax.nnx.Rngs(0)
    )
    x = normal(1, 2, 5, D)
    quantised = jaxfused.quantize_params(block, "int8")
    for model in (block, quantised):
        lora = wrapped(model, ("qkv", "project"))
        lora.mlp = wrapped(model.mlp, ("gate", "up", "down"))
        y = lora(x)
        kernels = flax.nnx.clone(block)
        for parent, names in (("", ("qkv", "project")), ("mlp", ("gate", "up", "down"))):
            of, to = (getattr(m, parent) if parent else m for m in (lora, kernels))
            for name in names:
                factors, layer = getattr(of, name), getattr(to, name)
                base = factors.base_module.kernel.get_value()
                base = base if isinstance(base, jax.Array) else base.array.dequantize()
                layer.kernel[...] = base + factors.lora_a[...] @ factors.lora_b[...]
        np.testing.assert_allclose(y, kernels(x), rtol=2e-4, atol=2e-4)
    # A layer that is quantised later keeps its LoRA, of either of Flax's classes.
    for own_class in (False, True):
        lora = flax.nnx.clone(block)
        lora.mlp = wrapped(block.mlp, ("up",), own_class=own_class)
        later = jaxfused.quantize_params(lora, "int8")
        assert isinstance(later.mlp.up, flax.nnx.LoRA)
        assert isinstance(later.mlp.up.base_module, jaxfused.nnx.QuantizedLinear)
        assert jnp.linalg.norm(later(x) - lora(x)) < 0.05 * jnp.linalg.norm(lora(x))
        calibrated = jaxfused.calibrate(lora, "int8", [x])
        assert len(calibrated.report.layers) == 5


def test_lora_in_a_tree_of_linen():
    linen = jaxfused.linen.MLP(F)
    x = normal(1, 3, D)
    params = linen.init(jax.random.key(0), x)["params"]
    a, b = normal(2, D, R), normal(3, R, F)
    up = params["up"] | dict(kernel=LoRAKernel(params["up"]["kernel"], a, b))
    total = params["up"] | dict(kernel=params["up"]["kernel"] + a @ b)
    y, expected = (linen.apply({"params": params | dict(up=layer)}, x) for layer in (up, total))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    wrong = params["up"] | dict(kernel=LoRAKernel(jnp.ones((D, F + 1)), a, b))
    with pytest.raises(ValueError, match=r"LoRAKernel has shape \(32, 49\)"):
        linen.apply({"params": params | dict(up=wrong)}, x)


def test_a_perceptron_with_lora_drops_as_without():
    options = dict(dropout_rate=0.5, use_bias=True)
    mlp = jaxfused.nnx.MLP(D, F, rngs=flax.nnx.Rngs(0, dropout=1), **options)
    lora = wrapped(mlp, ("up", "down"))
    x = normal(1, 3, D)
    dropped = flax.nnx.jit(lambda m: m(x, deterministic=False, rngs=flax.nnx.Rngs(dropout=7)))
    y, expected = (dropped(m) for m in (lora, merged(lora, ("up", "down"))))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(y, lora(x, deterministic=True), atol=1e-2)


def test_refuses_what_it_would_pass_over():
    class Other(flax.nnx.Module):
        def __call__(self, x):
            return x

    mlp = jaxfused.nnx.MLP(D, F, rngs=flax.nnx.Rngs(0))
    mlp.up = Other()
    with pytest.raises(TypeError, match=r"Other cannot stand for one.*nnx\.LoRALinear"):
        mlp(normal(0, 2, D))
    mlp.up = flax.nnx.LoRA(D, R, F, rngs=flax.nnx.Rngs(0))
    with pytest.raises(TypeError, match="LoRA cannot stand for one"):
        mlp(normal(0, 2, D))
    base = jaxfused.nnx.Linear(D, F, rngs=flax.nnx.Rngs(0))
    mlp.up = flax.nnx.LoRA(
        D, R, F, base_module=base, promote_dtype=lambda *a, **k: a, rngs=flax.nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="promote_dtype of its own"):
        mlp(normal(0, 2, D))


@pytest.mark.exhaustive
@parametrize("rows", [128, 16], quick=(1,))
def test_training_a_lora_makes_nothing_of_the_weights_size(hopper, rows):
    """This holds for forward and gradient on a GPU, and with gradients to the scales."""
    features, hidden, rank = 1024, 384, 8
    w = jaxfused.quantize(normal(0, features, hidden), "int4", group_size=64, layout="columns")
    a, b = (
        normal(1, features, rank, dtype=jnp.bfloat16),
        normal(2, rank, hidden, dtype=jnp.bfloat16),
    )
    x = normal(3, rows, features, dtype=jnp.bfloat16)

    def loss(x, a, b, scale):
        frozen = jaxfused.quantized_matmul(
            x,
            with_scale(w, scale),
            residual=(x @ a) @ b,
            scale_gradient=True,
            implementation="pallas",
        )
        return frozen.astype(jnp.float32).var()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    text = jax.export.export(gradient, platforms=["cuda"])(x, a, b, w.scale).mlir_module()
    assert "mosaic_gpu" in text
    size = features * hidden
    for shape in re.findall(r"tensor<((?:\d+x)+)(?:bf16|f16|f32|i8)>", text):
        count = np.prod([int(n) for n in shape.split("x") if n])
        assert count < size, shape


@parametrize("gated", [False, True], quick=())
def test_training_loras_of_a_perceptron_makes_nothing_of_the_weights_size(hopper, gated):
    make = jaxfused.nnx.GatedMLP if gated else jaxfused.nnx.MLP
    names = ("gate", "up", "down") if gated else ("up", "down")
    size = 1024
    mlp = make(size, size, dtype=jnp.bfloat16, implementation="pallas", rngs=flax.nnx.Rngs(0))
    rules = [jaxfused.QuantizationRule("", "int4", group_size=64, layout="columns")]
    lora = wrapped(jaxfused.quantize_params(mlp, rules), names)
    trained, rest = flax.nnx.split_state(flax.nnx.state(lora), flax.nnx.LoRAParam, ...)
    graphdef = flax.nnx.graphdef(lora)

    def loss(trained, rest, x):
        y = flax.nnx.merge(graphdef, trained, rest)(x)
        return y.astype(jnp.float32).var()

    x = normal(3, 128, size, dtype=jnp.bfloat16)
    program = jax.export.export(jax.jit(jax.grad(loss)), platforms=["cuda"])(trained, rest, x)
    text = program.mlir_module()
    assert "quantized_input_gradient" in text and "quantized_linear" in text
    for shape in re.findall(r"tensor<((?:\d+x)+)(?:bf16|f16|f32|i8)>", text):
        assert np.prod([int(n) for n in shape.split("x") if n]) < size * size, shape
