"""quantize_params of Linen's trees: stacks, partitioned parameters, windows, and unchanged leaves."""

import warnings

import flax.linen as nn
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxfused
import jaxfused.linen as ours
import jaxfused.nnx
from jaxfused import Calibration, Fold, QuantizationRule, QuantizedKernel
from tests.flax.test_modules import normal

D = 32


def is_kernel(leaf):
    return isinstance(leaf, QuantizedKernel)


def floats_of(tree, params):
    """Returns the parameters with the dequantised kernels of a tree."""
    return jax.tree.map(
        lambda q, w: q.array.dequantize().reshape(w.shape) if isinstance(q, QuantizedKernel) else w,
        nn.meta.unbox(tree),
        nn.meta.unbox(params),
        is_leaf=is_kernel,
    )


def assert_quantised(model, args, count, rules="int8", **options):
    """Asserts that all kernels are quantised, and that the model computes with their values."""
    variables = model.init(jax.random.key(0), *args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = jaxfused.quantize_params(variables, rules, **options)
    found = [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_kernel) if is_kernel(leaf)]
    assert len(found) == count
    y = model.apply(tree, *args)
    expected = model.apply(floats_of(tree, variables), *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), y, expected)
    return tree


class Dense(nn.Module):
    use_bias: bool = True
    norm: bool = False

    @nn.compact
    def __call__(self, x, _):
        y = ours.RMSNorm()(x) if self.norm else x
        return x + ours.Dense(D, use_bias=self.use_bias)(y), None


class Conv1d(nn.Module):
    use_bias: bool = True

    @nn.compact
    def __call__(self, x, _):
        y = x
        if not self.use_bias:
            y = ours.LayerNorm()(x)
        return x + ours.Conv(D, (3,), use_bias=self.use_bias)(y), None


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return ours.TransformerBlock(4, gated=True, norm="rms_norm", use_bias=False)(x), None


def stacked(block, length=3, **options):
    options = dict(variable_axes={"params": 0}, split_rngs={"params": True}) | options
    return nn.scan(block, length=length, **options)


X = (2, 6, D)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: stacked(Dense)(), 1),
        (lambda: stacked(Dense)(use_bias=False, norm=True), 1),
        (lambda: stacked(Conv1d)(), 1),
        (lambda: stacked(Block)(), 5),
    ],
    ids=["dense", "no bias", "conv", "block"],
)
def test_stacks_of_scan(make, count):
    tree = assert_quantised(make(), (normal(0, *X), None), count)
    for leaf in jax.tree.leaves(tree, is_leaf=is_kernel):
        if is_kernel(leaf):
            assert leaf.array.values.shape[0] == leaf.array.scale.shape[0] == 3


def test_calibration_of_a_stack():
    x = normal(0, *X)
    refused, model = stacked(Dense)(), stacked(Dense, check_constancy_invariants=False)()
    variables = refused.init(jax.random.key(0), x, None)
    with pytest.raises(ValueError, match="pass check_constancy_invariants=False to it"):
        calibration = Calibration([x], call=lambda params, x: refused.apply(params, x, None))
        jaxfused.calibrate(variables, "int8", calibration)
    call = lambda params, x: model.apply(params, x, None)[0]  # noqa: E731
    calibrated = jaxfused.calibrate(variables, "int8", Calibration([x], call=call))
    names = [layer.path for layer in calibrated.report.layers]
    assert names == [f"params/Dense_0[{i}]" for i in range(3)]
    y = call(calibrated.quantized, x)
    expected = call(variables, x)
    assert jnp.linalg.norm(y - expected) < 0.02 * jnp.linalg.norm(expected)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (ours.Conv(16, (3,)), (2, 9, D)),
        (ours.Conv(16, (3,), padding="CAUSAL", kernel_dilation=2, strides=2), (2, 9, D)),
        (ours.Conv(D, (5,), feature_group_count=4), (2, 9, D)),
        (ours.Conv(8, (2, 3)), (2, 5, 6, 8)),
        (ours.SeparableConv(8, (3,)), (2, 9, 8)),
    ],
    ids=str,
)
def test_convolutions_along_one_axis_and_more(layer, shape):
    count = 2 if isinstance(layer, ours.SeparableConv) else 1
    assert_quantised(layer, (normal(0, *shape),), count)


def boxed(*names):
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_partitioned_kernels_have_partitioned_parts(layout):
    rules = [QuantizationRule("", "int8", group_size=8, symmetric=False, layout=layout)]
    layer = ours.Dense(16, kernel_init=boxed("data", "model"))
    tree = assert_quantised(layer, (normal(0, 2, D),), 1, rules)
    specs = nn.get_partition_spec(tree)["params"]["kernel"].array
    of_values = ("model", "data") if layout == "columns" else ("data", "model")
    assert specs.values == PartitionSpec(*of_values)
    assert specs.scale == specs.zero_point == PartitionSpec(None, "model")


def test_partitioned_stacks_and_windows():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return ours.Dense(D, kernel_init=boxed("data", "model"))(x), None

    model = stacked(Layer, metadata_params={nn.PARTITION_NAME: "layers"})()
    tree = assert_quantised(model, (normal(0, *X), None), 1)
    specs = nn.get_partition_spec(tree)["params"]["Dense_0"]["kernel"].array
    assert specs.values == PartitionSpec("layers", "model", "data")
    conv = ours.Conv(16, (3, 3), kernel_init=boxed(None, None, "data", "model"))
    tree = assert_quantised(conv, (normal(0, 2, 5, 5, 8),), 1)
    specs = nn.get_partition_spec(tree)["params"]["kernel"].array
    assert specs.values == PartitionSpec(None, "model")
    layer = ours.ConvNormAct(
        16, (3, 3), use_running_average=True, kernel_init=boxed(None, None, None, "model")
    )
    assert_quantised(layer, (normal(0, 2, 5, 5, 8),), 1)


def test_a_fold_into_a_partitioned_norm():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale_init = nn.with_partitioning(nn.initializers.ones, ("model",))
            return ours.Dense(8, name="dense")(
                ours.LayerNorm(name="norm", scale_init=scale_init)(x)
            )

    model, x = Model(), normal(0, 64, D).at[:, 0].mul(30.0)
    variables = model.init(jax.random.key(0), x)
    calibration = Calibration([x], call=model.apply, folds=[Fold("norm", ("dense",))])
    rules = [QuantizationRule("", "int8", input_dtype="int8", smoothing=0.5)]
    calibrated = jaxfused.calibrate(variables, rules, calibration)
    y, expected = model.apply(calibrated.quantized, x), model.apply(variables, x)
    assert jnp.linalg.norm(y - expected) < 0.03 * jnp.linalg.norm(expected)


# --- what stays -----------------------------------------------------------------------------------


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = ours.MultiHeadDotProductAttention(4, name="attention")(x)
        return ours.Dense(8, name="head")(x)


def test_projections_of_attention_stay_and_a_warning_says_so():
    variables = Attention().init(jax.random.key(0), normal(0, *X))
    with pytest.warns(
        UserWarning, match=r"stay in floats: .*attention/query.*attention/out"
    ) as seen:
        tree = jaxfused.quantize_params(variables, "int8")
    assert len(seen) == 1
    assert is_kernel(tree["params"]["head"]["kernel"])
    assert not is_kernel(tree["params"]["attention"]["query"]["kernel"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = [QuantizationRule("attention", None), QuantizationRule("", "int8")]
        jaxfused.quantize_params(variables, rules)
    with pytest.raises(
        ValueError, match=r"'query' decides over no layer.*No rule can .*'params/att"
    ):
        jaxfused.quantize_params(variables, [QuantizationRule("query", "int8")])
    layer = jaxfused.nnx.MultiHeadAttention(4, D, decode=False, rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match="a LinearGeneral reads its kernel as floats"):
        jaxfused.quantize_params(layer, "int8")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"kernel": jnp.ones((3, 8, 8))}, "without a bias nothing tells.*QuantizedKernel"),
        (
            {"kernel": jnp.ones((8, 4, 2)), "bias": jnp.ones((4, 2))},
            "are of a product over several axes",
        ),
        (
            {"kernel": jnp.ones((8, 8, 2)), "bias": jnp.ones((8, 2))},
            "may be of stacked layers or of several axes",
        ),
        ({"kernel": jnp.ones((8, 4)), "extra": jnp.ones(3)}, "it has extra beside a kernel"),
        ({"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32)}, "under jax.eval_shape"),
        ({"kernel": jnp.ones(8)}, "its kernel has 1 axes"),
    ],
)
def test_kernels_that_stay(tree, words):
    with pytest.warns(UserWarning, match=rf"stay in floats: 'odd', because .*{words}"):
        result = jaxfused.quantize_params(
            {"odd": tree, "plain": {"kernel": jnp.ones((8, 8))}}, "int8"
        )
    assert result["odd"]["kernel"] is tree["kernel"]
    assert is_kernel(result["plain"]["kernel"])
    with pytest.raises(ValueError, match=f"decides over no layer.*No rule can decide.*{words}"):
        jaxfused.quantize_params({"odd": tree}, "int8")


def test_lists_of_layers():
    tree = {"layers": [{"kernel": jnp.ones((8, 8))}, {"kernel": jnp.ones((8, 4))}]}
    result = jaxfused.quantize_params(tree, [QuantizationRule("layers/1", "int8")])
    assert is_kernel(result["layers"][1]["kernel"]) and not is_kernel(result["layers"][0]["kernel"])


def test_a_layer_over_several_axes_refuses_a_quantised_kernel():
    layer, x = ours.DenseGeneral((4, 2)), normal(0, 3, 8)
    params = layer.init(jax.random.key(0), x)["params"]
    quantised = {**params, "kernel": QuantizedKernel(jaxfused.quantize(params["kernel"]))}
    with pytest.raises(ValueError, match=r"reads its kernel as floats.*rule of dtype None"):
        layer.apply({"params": quantised}, x)
