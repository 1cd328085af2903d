"""Calibration: rounding with error feedback, smoothing, clipped inputs, and the report of errors."""

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
from jaxfused import Calibration, Fold, QuantizationRule
from jaxfused.modules.conv import patches
from jaxfused.quantization.error_feedback import rounded_weights
from jaxfused.quantization.layers import replace_kernels
from jaxfused.quantization.observe import observe
from tests.flax.test_modules import normal, params_of
from tests.support.arrays import put
from tests.support.grids import parametrize

D, F = 64, 24
FOLDS = (Fold("norm1", ("qkv",)), Fold("norm2", ("mlp/up", "mlp/gate")))


def correlated(rows, features=D, *, outliers=0, seed=0):
    """Returns rows whose features are correlated, some of them fifty times as large."""
    rng = np.random.default_rng(seed)
    few = rng.normal(size=(rows, features // 4)) @ rng.normal(size=(features // 4, features))
    x = few + 0.3 * rng.normal(size=(rows, features))
    x[:, :outliers] *= 50
    return put(x, jnp.float32)


def linear_layer(features=D, seed=0):
    return jaxfused.nnx.Linear(features, F, rngs=flax.nnx.Rngs(seed))


def only_error(layer, x, **options):
    (error,) = jaxfused.calibrate(layer, [QuantizationRule("", **options)], [x]).report.layers
    return error


def naive_gptq(w, gram, scale, low, high, damping):
    """Rounds feature by feature in float64, and refits all remaining weights after each."""
    w, order = np.array(w, np.float64), np.argsort(-np.diag(gram), kind="stable")
    gram = gram + damping * np.diag(gram).mean() * np.eye(len(gram))
    rest = list(order)
    while rest:
        first, rest = rest[0], rest[1:]
        before = w[first].copy()
        w[first] = np.clip(np.round(before / scale[first]), low, high) * scale[first]
        if rest:
            # The best change of the remaining weights: H_rr dw_r = -H_rf dw_f.
            effect = np.linalg.solve(gram[np.ix_(rest, rest)], gram[rest, first])
            w[rest] -= np.outer(effect, w[first] - before)
    return w


@parametrize("features", [24, 300], quick=(0,))
def test_error_feedback_is_that_of_its_definition(features):
    """300 features are three blocks, the last of them partial."""
    x = np.asarray(correlated(4 * features, features), np.float64)
    w = np.random.default_rng(1).normal(size=(features, 5)).astype(np.float32)
    gram = x.T @ x
    q = jaxfused.quantize(w, "int4")
    actual = rounded_weights(put(w), gram, "int4", q.scale, None, damping=0.01)
    scale = np.broadcast_to(np.asarray(q.scale, np.float64), w.shape)
    expected = naive_gptq(w, gram, scale, -7, 7, 0.01)
    # float32 may round a value halfway between two codes to the other one.
    differs = ~np.isclose(actual, expected, rtol=1e-5)
    errors = [np.linalg.norm(x @ (a - w)) for a in (np.asarray(actual), expected)]
    assert errors[0] <= 1.05 * errors[1]
    assert differs.mean() < 0.2
    # All weights are multiples of the scale.
    np.testing.assert_allclose(
        np.asarray(actual) / scale, np.round(np.asarray(actual) / scale), atol=1e-3
    )


@parametrize(
    "options",
    [
        dict(dtype="int4", group_size=32),
        dict(dtype="int4", group_size=32, symmetric=False),
        dict(dtype="int4"),
        dict(dtype="int8", group_size=16),
        dict(dtype="int8", group_size=(16, 8)),
        dict(dtype="float8_e4m3fn", rounding="gptq"),
        dict(dtype="float8_e5m2", rounding="gptq", group_size=64),
    ],
    quick=(2,),
)
def test_error_feedback_halves_the_error_of_the_result(options):
    x = correlated(512)
    error = only_error(linear_layer(), x, **options)
    assert error.result < 0.5 * error.nearest
    # The weights themselves have larger errors, which cancel in the result.
    assert (
        error.weights > only_error(linear_layer(), x, **options | dict(rounding="nearest")).weights
    )


def test_error_feedback_survives_what_says_nothing():
    """Some features are always 0, two are equal, and there are fewer rows than features."""
    x = correlated(20).at[:, 3].set(0.0)
    x = x.at[:, 5].set(x[:, 4])
    layer = linear_layer()
    calibrated = jaxfused.calibrate(layer, "int4", [x])
    (error,) = calibrated.report.layers
    assert error.result <= error.nearest
    nearest = jaxfused.quantize(layer.kernel[...], "int4")
    array = calibrated.quantized.kernel.get_value().array
    np.testing.assert_array_equal(array.scale, nearest.scale)
    zeros = jaxfused.calibrate(layer, "int4", [jnp.zeros_like(x)])
    np.testing.assert_array_equal(zeros.quantized.kernel.get_value().array.values, nearest.values)
    assert zeros.report.layers[0].result == 0.0


@pytest.mark.exhaustive
def test_layouts_have_the_same_numbers():
    x, layer = correlated(512, 128), linear_layer(128)
    rows, columns = (
        jaxfused.quantize_params(
            layer, [QuantizationRule("", "int4", group_size=64, layout=layout)], calibration=[x]
        )
        .kernel.get_value()
        .array
        for layout in ("rows", "columns")
    )
    assert columns.layout == "columns"
    np.testing.assert_array_equal(rows.dequantize(), columns.dequantize())


def test_smoothing_lowers_the_error_of_outlying_channels():
    x = correlated(512, outliers=3)
    rule = dict(dtype="int8", input_dtype="int8", rounding="nearest")
    plain, smooth = (only_error(linear_layer(), x, **rule, smoothing=s) for s in (None, 0.5))
    assert smooth.nearest == plain.result
    assert smooth.result < 0.5 * plain.result
    both = only_error(linear_layer(), x, **rule | dict(smoothing=0.5, rounding="gptq"))
    assert both.result < smooth.result


def test_a_smoothed_layer_divides_its_inputs():
    x, layer = correlated(512, outliers=3), linear_layer()
    rules = [QuantizationRule("", "int8", smoothing=0.5, rounding="nearest")]
    quantised = jaxfused.quantize_params(layer, rules, calibration=[x])
    kernel = quantised.kernel.get_value()
    share = np.abs(x).max(axis=0) ** 0.5 / np.abs(layer.kernel[...]).max(axis=1) ** 0.5
    np.testing.assert_allclose(kernel.input_divisor, share, rtol=1e-5)
    y = layer(x)
    assert jnp.linalg.norm(quantised(x) - y) < 0.02 * jnp.linalg.norm(y)
    grad = jax.grad(lambda x: quantised(x).sum())(x)
    expected = (kernel.array.dequantize() / kernel.input_divisor[:, None]).sum(axis=1)
    np.testing.assert_allclose(grad[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_a_percentile_clips_outliers():
    x = np.clip(np.asarray(normal(0, 2000, D)), -3, 3)
    x[7, 5] = 1000.0
    layer = linear_layer()
    rule = dict(dtype="int8", input_dtype="int8", rounding="nearest")
    rules = [QuantizationRule("", **rule, input_percentile=p) for p in (100.0, 99.9)]
    of_all, clipped = (jaxfused.quantize_params(layer, [r], calibration=[x]) for r in rules)
    np.testing.assert_allclose(of_all.kernel.get_value().input_scale, 1000 / 127, rtol=1e-6)
    assert 2.5 / 127 < clipped.kernel.get_value().input_scale <= 3 / 127
    others = np.delete(x, 7, axis=0)
    y = layer(others)

    def error(quantised):
        return float(jnp.linalg.norm(quantised(others) - y) / jnp.linalg.norm(y))

    assert error(clipped) < 0.02 < 0.5 < error(of_all)
    # The outlier itself saturates and does not wrap around.
    spike = jnp.zeros(D).at[5].set(1000.0)
    kernel = clipped.kernel.get_value()
    expected = kernel.input_scale * 127 * kernel.array.dequantize()[5]
    np.testing.assert_allclose(clipped(spike) - clipped.bias[...], expected, rtol=1e-4)


RULES = [
    QuantizationRule("mlp/(up|gate)$", "int4", group_size=16, smoothing=0.5),
    QuantizationRule("project$", None),
    QuantizationRule("", "int8", input_dtype="int8", smoothing=0.5),
]


@parametrize(("gated", "folds"), [(True, FOLDS), (False, ())], quick=())
def test_nnx_and_linen_are_calibrated_alike(gated, folds):
    options = dict(hidden_features=D, gated=gated)
    block = jaxfused.nnx.TransformerBlock(D, 4, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.TransformerBlock(4, **options)
    params = params_of(block)
    batches = [correlated(32, seed=i).reshape(2, 16, D) for i in range(3)]
    of_module = jaxfused.calibrate(block, RULES, Calibration(batches, folds=folds))
    of_tree = jaxfused.calibrate(
        params,
        RULES,
        Calibration(
            iter(batches), call=lambda params, x: linen.apply({"params": params}, x), folds=folds
        ),
    )
    assert {e.path: e for e in of_module.report.layers} == {
        e.path: e for e in of_tree.report.layers
    }
    state = flax.nnx.to_pure_dict(flax.nnx.state(of_module.quantized))
    chex.assert_trees_all_equal(state, of_tree.quantized, strict=True)
    x = batches[0]
    y = of_module.quantized(x)
    np.testing.assert_array_equal(linen.apply({"params": of_tree.quantized}, x), y)
    assert jnp.linalg.norm(y - block(x)) < 0.1 * jnp.linalg.norm(block(x))
    # The block that was passed is unchanged, and after folding no divisor is left.
    chex.assert_trees_all_equal(params_of(block), params)
    up = of_tree.quantized["mlp"]["up"]["kernel"]
    assert (up.input_divisor is None) == bool(folds)
    assert of_tree.quantized["mlp"]["down"]["kernel"].input_divisor.shape == (D,)
    moved = not np.array_equal(of_tree.quantized["norm2"]["scale"], params["norm2"]["scale"])
    assert moved == bool(folds)


def test_a_fold_that_changes_the_model_is_refused():
    block = jaxfused.nnx.TransformerBlock(D, 4, hidden_features=D, rngs=flax.nnx.Rngs(0))
    rules = [QuantizationRule("", "int8", smoothing=0.5)]
    batch = correlated(32, outliers=4).reshape(2, 16, D)
    wrong = Calibration([batch], folds=(Fold("norm2", ("qkv",)),))
    with pytest.raises(ValueError, match=r"folded into 'norm2' .* changes by"):
        jaxfused.calibrate(block, rules, wrong)
    # Nothing is folded into a missing norm, or into one that a layer without smoothing reads too.
    only_qkv = [QuantizationRule("qkv", "int8", smoothing=0.5)]
    for chosen, fold in (
        (rules, Fold("norm3", ("qkv",))),
        (only_qkv, Fold("norm1", ("qkv", "project"))),
    ):
        calibrated = jaxfused.calibrate(block, chosen, Calibration([batch], folds=(fold,)))
        np.testing.assert_array_equal(calibrated.quantized.norm1.scale[...], block.norm1.scale[...])


def test_stacked_layers_are_calibrated_each():
    @flax.nnx.vmap
    def stack(rngs):
        return jaxfused.nnx.Linear(D, D, rngs=rngs)

    @flax.nnx.scan(in_axes=(flax.nnx.Carry, 0), out_axes=flax.nnx.Carry)
    def scan(x, layer):
        return layer(x)

    layers = stack(flax.nnx.Rngs(0).split(3))
    x = correlated(256)
    rule = QuantizationRule("", "int4", group_size=32, smoothing=0.5)
    calibration = Calibration([x], call=lambda layers, x: scan(x, layers))
    calibrated = jaxfused.calibrate(layers, [rule], calibration)
    assert [error.path for error in calibrated.report.layers] == ["[0]", "[1]", "[2]"]
    kernel = calibrated.quantized.kernel.get_value()
    assert kernel.array.shape == (3, D, D)
    for i in range(3):
        one = jaxfused.nnx.Linear(D, D, rngs=flax.nnx.Rngs(0))
        one.kernel[...] = layers.kernel[i]
        expected = jaxfused.calibrate(one, [rule], [x]).quantized.kernel.get_value()
        same = jax.tree.map(lambda a: a[i], kernel)  # noqa: B023
        np.testing.assert_array_equal(same.array.dequantize(), expected.array.dequantize())
        x = x @ layers.kernel[i]
    np.testing.assert_allclose(
        scan(correlated(256), calibrated.quantized), x, atol=0.2 * np.abs(x).max()
    )


def test_statistics_are_those_of_all_batches():
    layer = linear_layer()
    batches = [correlated(rows, seed=rows) for rows in (7, 50, 300)]
    seen = observe(
        "test", layer, batches, lambda layer, x: layer(x), wanted={"": True}, sampled_rows=20
    )
    inputs, x = seen[""][()], np.concatenate(batches).astype(np.float64)
    assert inputs.count == len(x)
    np.testing.assert_array_equal(inputs.low, x.min(axis=0))
    np.testing.assert_array_equal(inputs.high, x.max(axis=0))
    np.testing.assert_allclose(inputs.gram, x.T @ x, rtol=1e-4, atol=1e-2)
    rows = inputs.rows(20)
    assert 10 <= len(rows) <= 20
    assert {row.tobytes() for row in rows} <= {np.float32(row).tobytes() for row in x}


def test_ranges_of_inputs_are_by_feature():
    layer, batches = linear_layer(), [correlated(300, seed=i, outliers=2) for i in range(2)]
    inputs = jaxfused.calibrate(layer, "int8", batches).inputs[""]
    x = np.concatenate(batches)
    np.testing.assert_array_equal(inputs.low, x.min(axis=0))
    np.testing.assert_array_equal(inputs.high, x.max(axis=0))
    np.testing.assert_allclose(inputs.percentile(90.0), np.percentile(abs(x), 90.0, axis=0))


def test_the_report_says_what_was_done():
    rules = [
        QuantizationRule("up", "int4", group_size=16, symmetric=False, smoothing=0.25),
        QuantizationRule("", "int8", input_dtype="int8", rounding="nearest", input_percentile=99.5),
    ]
    mlp = jaxfused.nnx.MLP(D, 32, rngs=flax.nnx.Rngs(0))
    x = correlated(128)
    calibrated = jaxfused.calibrate(mlp, rules, [x])
    report = {error.path: error for error in calibrated.report.layers}
    assert report["up"].format == "int4 groups of 16 with zero points, gptq, smoothing 0.25"
    assert report["down"].format == "int8 x int8, inputs at 99.5 %"
    lines = str(calibrated.report).splitlines()
    assert lines[0].split() == ["layer", "format", "weights", "nearest", "result"]
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    # The reported errors are those of the arrays.
    kernel = calibrated.quantized.up.kernel.get_value()
    truth = mlp.up.kernel[...]
    weights = kernel.array.dequantize() / kernel.input_divisor[:, None]
    for actual, expected, error in (
        (weights, truth, report["up"].weights),
        (x @ weights, x @ truth, report["up"].result),
    ):
        ratio = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error == pytest.approx(ratio, rel=1e-3)


def test_the_first_rule_still_decides():
    mlp = jaxfused.nnx.MLP(D, 32, rngs=flax.nnx.Rngs(0))
    x = correlated(128)
    with pytest.raises(ValueError, match="'up' decides over no layer"):
        rules = [QuantizationRule("", "int8"), QuantizationRule("up", "int4")]
        jaxfused.quantize_params(mlp, rules, calibration=[x])
    rules = [QuantizationRule("up", None), QuantizationRule("", "int8")]
    quantised = jaxfused.quantize_params(mlp, rules, calibration=[x])
    assert isinstance(quantised.up, flax.nnx.Linear)
    assert isinstance(quantised.down, jaxfused.nnx.QuantizedLinear)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rounding="up"), "rounding='up' is not known"),
        (dict(smoothing=1.5), "smoothing is 1.5, but it is a share"),
        (dict(smoothing=float("nan")), "smoothing is nan"),
        (dict(input_percentile=0.0, input_dtype="int8"), "input_percentile is 0.0"),
        (dict(input_percentile=99.0), "the inputs are not quantised"),
    ],
)
def test_rules_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizationRule("", "int8", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(damping=-1.0), "damping is -1.0"),
        (dict(damping=float("nan")), "damping is nan"),
        (dict(sampled_rows=0), "sampled_rows is 0; pass 1 or more"),
    ],
)
def test_calibration_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Calibration([], **options)


def test_refuses_what_cannot_be_calibrated():
    layer, x = linear_layer(), correlated(8)
    for options in (dict(rounding="gptq"), dict(smoothing=0.5)):
        with pytest.raises(
            ValueError, match="takes inputs of the layers to choose by; pass calibration"
        ):
            jaxfused.quantize_params(layer, [QuantizationRule("", "int8", **options)])
    with pytest.raises(ValueError, match="no batches; pass at least one"):
        jaxfused.calibrate(layer, "int8", [])
    with pytest.raises(ValueError, match="no calibration batch reached the layer 'up'"):
        mlp = jaxfused.nnx.MLP(D, 32, rngs=flax.nnx.Rngs(0))
        jaxfused.calibrate(mlp, "int8", Calibration([x], call=lambda mlp, x: mlp.down(x[:, :32])))
    with pytest.raises(ValueError, match="no calibration batch reached"):
        jaxfused.calibrate(layer, "int8", [x[:0]])
    with pytest.raises(ValueError, match="how to call the model"):
        jaxfused.calibrate(params_of(layer), "int8", [x])
    for rounding in ("nearest", "gptq"):
        rules = [QuantizationRule("", "int8", rounding=rounding)]
        with pytest.raises(ValueError, match=r"not finite.*; pass batches"):
            jaxfused.calibrate(layer, rules, [x.at[3, 3].set(jnp.nan)])
    with pytest.raises(TypeError, match="has to be an nnx module"):
        jaxfused.calibrate(jnp.ones(3), "int8", Calibration([x], call=lambda m, x: x))
    # A bad format is refused before anything runs.
    with pytest.raises(ValueError, match="group_size is 7"):
        rules = [QuantizationRule("", "int8", group_size=7)]
        jaxfused.calibrate(layer, rules, Calibration([x], call=None))


def test_looking_changes_nothing():
    block = jaxfused.nnx.TransformerBlock(D, 4, hidden_features=D, rngs=flax.nnx.Rngs(0))
    assert replace_kernels("test", block, lambda path, kernel, taps: None) is not block
    x = correlated(32).reshape(2, 16, D)
    seen = observe(
        "test",
        block,
        [x],
        lambda block, x: block(x),
        wanted=dict.fromkeys(("qkv", "project", "mlp/up", "mlp/down"), False),
        sampled_rows=8,
    )
    assert {name: inputs[()].low.shape for name, inputs in seen.items()} == dict.fromkeys(
        seen, (D,)
    )
    assert all(inputs[()].gram is None for inputs in seen.values())


@pytest.mark.exhaustive
def test_convolutions_are_calibrated_by_their_windows():
    images = np.asarray(correlated(4 * 10 * 10, 16, outliers=2)).reshape(4, 10, 10, 16)
    conv = jaxfused.nnx.Conv(16, 24, (3, 3), strides=2, rngs=flax.nnx.Rngs(0))
    rules = {
        name: QuantizationRule("", "int8", input_dtype="int8", **options)
        for name, options in dict(
            nearest=dict(rounding="nearest"),
            gptq=dict(),
            smooth=dict(smoothing=0.5, rounding="nearest"),
            fixed=dict(rounding="nearest", input_percentile=100.0),
        ).items()
    }
    y = conv(images)
    errors = {}
    for name, rule in rules.items():
        calibrated = jaxfused.calibrate(conv, [rule], [images[:3], images[3:]])
        (layer,) = calibrated.report.layers
        errors[name] = float(jnp.linalg.norm(calibrated.quantized(images) - y) / jnp.linalg.norm(y))
        # The report's error over sampled windows is close to that over the images.
        assert layer.result == pytest.approx(errors[name], rel=0.3)
    assert errors["smooth"] < 0.6 * errors["nearest"]
    assert errors["gptq"] < 1.05 * errors["nearest"]
    kernel = calibrated.quantized.kernel.get_value()
    np.testing.assert_allclose(kernel.input_scale, np.abs(images).max() / 127, rtol=1e-6)
    int4 = [QuantizationRule("", "int4", group_size=16)]
    (layer,) = jaxfused.calibrate(conv, int4, [images]).report.layers
    assert layer.result < 0.6 * layer.nearest


def test_windows_are_those_that_a_convolution_reads():
    x, kernel = normal(0, 2, 7, 8, 3), normal(1, 3, 2, 3, 5)
    options = dict(strides=(2, 1), padding="SAME", kernel_dilation=(1, 2), input_dilation=1)
    windows = patches(x, (3, 2), feature_group_count=1, **options)
    y = jaxfused.conv(x, kernel, **options)
    product = jnp.matmul(windows, kernel.reshape(-1, 5), precision="highest")
    np.testing.assert_allclose(product, y.reshape(2, -1, 5), rtol=1e-5, atol=1e-5)


@parametrize(
    ("shape", "size", "options"),
    [
        ((2, 33, 33, 4), (3, 3), dict(kernel_dilation=36)),
        ((2, 40, 4), (4,), dict(padding="CAUSAL", kernel_dilation=3)),
        ((2, 17, 18, 4), (3, 3), dict(strides=2)),
        ((2, 17, 18, 4), (1, 1), dict(strides=3, padding="VALID")),
        ((2, 9, 10, 4), (3, 2), dict(padding="CIRCULAR")),
        ((2, 9, 10, 4), (3, 3), dict(input_dilation=2, padding=((1, 1), (1, 1)))),
        ((2, 6, 7, 5, 4), (3, 3, 3), dict(padding=((2, 1), (0, 3), (1, 1)))),
    ],
    quick=(0, 1),
)
def test_percentiles_of_a_convolution_are_of_its_inputs_and_not_of_padding(shape, size, options):
    """Each input counts as often as it is read: the gradient of a sum of windows of ones."""
    layer = flax.nnx.Conv(4, 8, size, rngs=flax.nnx.Rngs(0), **options)
    x = normal(0, *shape) + 3.0
    rule = QuantizationRule(
        "", "int8", input_dtype="int8", input_percentile=90.0, rounding="nearest"
    )
    calibrated = jaxfused.calibrate(layer, [rule], Calibration([x], sampled_rows=10_000))
    ones = flax.nnx.Conv(
        4, 1, size, kernel_init=flax.nnx.initializers.ones, rngs=flax.nnx.Rngs(0), **options
    )
    counts = np.rint(jax.grad(lambda x: ones(x).sum())(x)).astype(int)
    values = np.repeat(np.abs(np.ravel(x)), np.ravel(counts))
    scale = calibrated.quantized.kernel.get_value().input_scale
    np.testing.assert_allclose(127 * scale, np.percentile(values, 90.0), rtol=1e-5)
    # Padding is excluded from ranges and percentiles too, so they are not below the smallest input.
    inputs = calibrated.inputs[""]
    read = inputs.inside.any(axis=0)
    assert (inputs.low[read] >= np.min(x)).all() and (inputs.low[~read] == 0).all()
    assert (inputs.percentile(50.0)[read] > 2.0).all()


def test_windows_are_drawn_from_all_columns_of_images():
    x = jnp.broadcast_to(jnp.arange(32.0)[:, None], (16, 32, 32, 1))
    layer = flax.nnx.Conv(1, 1, (1, 1), rngs=flax.nnx.Rngs(0))
    calibration = Calibration([x], sampled_rows=256)
    rows = jaxfused.calibrate(layer, "int8", calibration).inputs[""].rows
    assert len(np.unique(rows)) > 24


@pytest.mark.exhaustive
def test_convolutions_in_groups_are_rounded_to_nearest():
    block = jaxfused.nnx.ConvNeXtBlock(
        16, kernel_size=(3, 3), layer_scale=1.0, rngs=flax.nnx.Rngs(0)
    )
    x = correlated(2 * 6 * 6, 16).reshape(2, 6, 6, 16)
    calibrated = jaxfused.calibrate(block, "int8", [x])
    assert {layer.path for layer in calibrated.report.layers} == {"mlp/up", "mlp/down"}
    array = calibrated.quantized.conv.kernel.get_value().array
    expected = jaxfused.quantize(block.conv.kernel[...].reshape(-1, 16), layout="rows")
    np.testing.assert_array_equal(array.values, expected.values)
    assert jnp.linalg.norm(calibrated.quantized(x) - block(x)) < 0.02 * jnp.linalg.norm(block(x))
    with pytest.raises(ValueError, match="'conv' convolves channels in groups"):
        jaxfused.calibrate(block, [QuantizationRule("conv", "int8", smoothing=0.5)], [x])
