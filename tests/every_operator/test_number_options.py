"""Numeric options accept NumPy's scalars and concrete arrays like Python's numbers, and no others."""

import enum
import inspect
import math

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfused
from jaxfused.runtime.checks import _kinds, _leaves

X, IMAGES = jnp.ones((4, 8)), jnp.ones((2, 6, 6, 8))
W, KERNEL = jnp.ones((8, 8)), jnp.ones((3, 3, 8, 8))
HEADS, CLASSES = jnp.ones((2, 4, 2, 8)), jnp.zeros(4, jnp.int32)
PAGES = jnp.ones((3, 4, 2, 8))
WEIGHTS = jaxfused.quantize(jnp.ones((72, 8)))
CONV = dict(strides=2, padding=((1, 1), (0, 2)), kernel_dilation=(1, 2))
LOSS = dict(label_smoothing=0.25, z_loss=0.5, ignore_index=-1, logits_soft_cap=2.0)

CALLS = {
    "avg_pool": ((IMAGES,), dict(window=2, strides=(2, 1), padding=1)),
    "max_pool": ((IMAGES,), dict(window=(2, 2), strides=2, padding=((1, 0), (0, 1)))),
    "axial_rope_tables": ((), dict(height=2, width=4, rotary_dim=8, theta=100.0)),
    "batch_norm": ((X,), dict(epsilon=0.5)),
    "fold_batch_norm": ((W,), dict(mean=X[0], var=X[0], epsilon=0.5)),
    "conv": ((IMAGES, KERNEL[:, :, :4]), CONV | dict(feature_group_count=2, input_dilation=1)),
    "conv_transpose": ((IMAGES, KERNEL[:, :, :4]), CONV | dict(feature_group_count=2)),
    "dot_product_attention": (
        (HEADS, HEADS, HEADS),
        dict(local_window_size=(2, 1), logits_soft_cap=2.0, dropout_rate=0.0),
    ),
    "fake_quantize": ((W,), dict(axis=-2, group_size=4)),
    "quantize": ((W,), dict(axis=-2, group_size=(4, 4))),
    "expert_mlp": ((X, X[:, :1], CLASSES[:, None], W[None], W[None], W[None]), dict(capacity=2)),
    "router": (
        (X,),
        dict(
            k=2,
            groups=2,
            groups_kept=1,
            masked=0.5,
            epsilon=0.5,
            floor=0.25,
            scale=2.0,
            softcap=2.0,
            logit_scale=0.5,
        ),
    ),
    "gated_mlp": ((X, W, W, W), dict(dropout_rate=0.0)),
    "mlp": ((X, W, None, W), dict(dropout_rate=0.0)),
    "group_norm": ((IMAGES,), dict(num_groups=2, epsilon=0.5)),
    "layer_norm": ((X, X[0]), dict(epsilon=0.5, scale_offset=1.0)),
    "rms_norm": ((X, X[0]), dict(epsilon=0.5, scale_offset=1.0)),
    "linear_softmax_cross_entropy": ((X, W, CLASSES), LOSS | dict(chunk_size=2)),
    "softmax_cross_entropy": ((X, CLASSES), LOSS),
    "segmentation_loss": (
        (X, CLASSES),
        dict(
            cross_entropy_weight=0.5,
            dice_weight=0.25,
            smooth=2.0,
            tversky_alpha=0.5,
            tversky_beta=0.25,
            focal_gamma=2.0,
            ignore_index=7,
        ),
    ),
    "paged_attention": (
        (HEADS[:, 0], PAGES, PAGES, CLASSES[: len(HEADS)], jnp.zeros((len(HEADS), 2), jnp.int32)),
        dict(
            attn_logits_soft_cap=2.0,
            pages_per_compute_block=4,
            scale=0.5,
            prefix_pages=1,
            sliding_window=3,
            layout="PSKH",
        ),
    ),
    "ragged_paged_attention": (
        (HEADS[0], (PAGES, PAGES), jnp.array([4]), jnp.zeros((1, 2), jnp.int32), jnp.array([0, 4])),
        dict(sm_scale=0.5, sliding_window=3, soft_cap=2.0, k_scale=0.5, v_scale=2.0),
    ),
    "sample": ((X, 3), dict(logprobs=2)),
    "sigmoid_cross_entropy": (
        (X[0], jnp.zeros(8, jnp.int32)),
        dict(label_smoothing=0.25, focal_gamma=2.0, focal_alpha=0.25, ignore_index=7),
    ),
    "qkv_projection": (
        (X[None], jnp.ones((8, 24))),
        dict(heads=2, key_heads=2, epsilon=0.5, scale_offset=1.0),
    ),
    "quantized_conv": (
        (IMAGES, WEIGHTS),
        CONV | dict(kernel_size=3, feature_group_count=1, input_dilation=1),
    ),
    "rope": ((HEADS, HEADS), dict(rotary_dim=4, theta=100.0)),
    "rope_tables": ((), dict(positions=jnp.arange(4), rotary_dim=4, theta=100.0)),
    "spatial_pyramid_pool": ((IMAGES,), dict(levels=(1, 2))),
    "upsample": ((IMAGES,), dict(factor=(2, 1))),
    "blur_pool": ((IMAGES,), dict(strides=2, filter_size=3)),
    "carafe": ((IMAGES, jnp.ones((2, 6, 6, 2))), dict(kernel_size=1, groups=2)),
    "deform_conv": (
        (IMAGES, KERNEL, jnp.zeros((2, 6, 6, 18))),
        dict(strides=1, padding=1, kernel_dilation=1, feature_group_count=1),
    ),
    "pixel_shuffle": ((IMAGES,), dict(factor=(2, 1))),
    "pixel_unshuffle": ((IMAGES,), dict(factor=(2, 1))),
    "resize": ((IMAGES,), dict(size=(2, 5))),
}
OTHERS = {
    "axial_rope_tables": {"features", "order", "prefix"},
    "batch_norm": {"axis_index_groups"},
    # They have tests of their own: two need a mapped axis, one has no arrays.
    "expert_parallel_mlp": {"capacity_factor"},
    "context_parallel_attention": {
        "scale",
        "local_window_size",
        "logits_soft_cap",
        "dropout_rate",
    },
    "zigzag_order": {"length", "devices"},
    "group_norm": {"group_size"},
    "resize": {"factor"},
    "upsample": {"size"},
    "rope_from_config": {"layer", "head_size"},
}
"""Numbers that are excluded: they conflict with other options, or the function returns no arrays."""


def numbers_of(function):
    return _kinds({p.name: p.annotation for p in inspect.signature(function).parameters.values()})


def with_numbers(options, kinds, made):
    """Returns the options with each number converted by `made`."""

    def number(value, kind):
        if isinstance(value, tuple):
            return tuple(number(v, kind) for v in value)
        return made(np.int64(value) if kind is int else np.float32(value))

    return {n: number(v, kinds[n]) if n in kinds else v for n, v in options.items()}


def test_every_number_of_every_operator_is_tried():
    for name, function in inspect.getmembers(jaxfused):
        if not getattr(function, "__module__", "").startswith("jaxfused.ops."):
            continue
        if not inspect.isfunction(function):
            continue
        kinds = numbers_of(function)
        tried = set(CALLS.get(name, ((), {}))[1]) | OTHERS.get(name, set())
        assert kinds.keys() <= tried, f"{name}: {kinds.keys() - tried}"
        assert not kinds or hasattr(function, "__wrapped__"), name


@pytest.mark.parametrize("name", CALLS)
def test_scalars_of_numpy_and_arrays_are_numbers(name):
    function, (args, options) = getattr(jaxfused, name), CALLS[name]
    kinds = numbers_of(function)

    def program(made):
        numbers = with_numbers(options, kinds, made)
        arrays = [i for i, a in enumerate(args) if isinstance(a, jax.Array)]

        def call(*given):
            merged = list(args)
            for i, a in zip(arrays, given, strict=True):
                merged[i] = a
            return function(*merged, **numbers)

        return str(jax.make_jaxpr(call)(*(args[i] for i in arrays)))

    plain = program(lambda number: number.item())
    assert program(lambda number: number) == plain
    assert program(jnp.asarray) == plain


@pytest.mark.parametrize("name", CALLS)
def test_truth_values_and_traced_numbers_are_refused(name):
    function, (args, options) = getattr(jaxfused, name), CALLS[name]
    for option in numbers_of(function).keys() & options.keys():
        for wrong in (True, np.bool_(True), jnp.array(True)):
            with pytest.raises(ValueError, match=f"{name}: {option} is .*; pass a"):
                function(*args, **(options | {option: wrong}))
        with pytest.raises(ValueError, match=f"{name}: {option} is .*; pass a"):
            jax.jit(lambda n, o=option: function(*args, **(options | {o: n})))(1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_finite_number_is_refused(name, wrong):
    function, (args, options) = getattr(jaxfused, name), CALLS[name]
    for option, kind in numbers_of(function).items():
        if kind is float and option in options:
            with pytest.raises(ValueError, match=rf"{name}: {option} .*is {wrong}.*; pass a"):
                function(*args, **(options | {option: wrong}))


def test_an_integer_of_an_enumeration_is_one():
    sizes = enum.IntEnum("sizes", {"batch": 2, "length": 8, "key_heads": 1, "head_size": 4})
    cache = jaxfused.KVCache.zeros(**sizes.__members__)
    assert cache.key.shape == (2, 8, 1, 4)


@pytest.mark.parametrize("wrong", ["a", [1, 2], 1j, {}])
def test_a_scale_of_attention_that_is_no_number_is_refused(wrong):
    with pytest.raises(
        ValueError, match=r"dot_product_attention: scale is .*; pass (a finite|one or None)"
    ):
        jaxfused.dot_product_attention(HEADS, HEADS, HEADS, scale=wrong)


@pytest.mark.parametrize("op", ["rope", "rope_tables"])
def test_what_tables_are_made_of_is_refused_by_name(op):
    call = {"rope": lambda **options: jaxfused.rope(HEADS, **options)}.get(
        op,
        lambda rotary_dim=4, **options: jaxfused.rope_tables(jnp.arange(4), rotary_dim, **options),
    )
    with pytest.raises(ValueError, match=f"{op}: scaling is .*; pass a .*rope_from_config"):
        call(scaling={"rope_type": "linear", "factor": 4.0})
    with pytest.raises(ValueError, match=f"{op}: theta is 0.*greater"):
        call(theta=0)
    with pytest.raises(ValueError, match=f"{op}: rotary_dim is 3"):
        call(rotary_dim=3)


def test_fractions_are_no_counts():
    for wrong in (2.0, np.float32(2.0), jnp.array(2.0)):
        with pytest.raises(ValueError, match=r"conv: strides is .*2\..*pass an int"):
            jaxfused.conv(IMAGES, KERNEL, strides=wrong)


TWO, HALF, RNGS = np.int64(2), np.float32(0.5), nnx.Rngs(0)
LINEN = {
    "LayerNorm": dict(epsilon=HALF),
    "RMSNorm": dict(epsilon=jnp.float32(0.5)),
    "GroupNorm": dict(num_groups=TWO, epsilon=HALF),
    "BatchNorm": dict(use_running_average=False, epsilon=HALF, momentum=HALF),
    "InstanceNorm": dict(epsilon=HALF),
    "Dense": dict(features=TWO),
    "DenseGeneral": dict(features=(TWO, TWO), axis=np.int64(-1)),
    "Conv": dict(features=TWO, kernel_size=TWO, strides=TWO, padding=TWO),
    "ConvTranspose": dict(features=TWO, kernel_size=(TWO, TWO), strides=(TWO, TWO)),
    "SeparableConv": dict(features=TWO, kernel_size=(TWO, TWO), strides=TWO),
    "ConvNormAct": dict(features=TWO, kernel_size=(TWO, TWO), use_running_average=False),
    "MLP": dict(hidden_features=TWO, dropout_rate=np.float32(0.0)),
    "Upsample": dict(factor=TWO),
    "Resize": dict(size=(TWO, TWO)),
    "PixelShuffle": dict(factor=TWO),
    "PixelUnshuffle": dict(factor=TWO),
    "BlurPool": dict(strides=TWO, filter_size=TWO),
    "CARAFE": dict(factor=TWO, groups=TWO, compressed_features=TWO),
    "DeformConv": dict(features=TWO, kernel_size=TWO, strides=TWO),
}
NNX = {
    "LayerNorm": (8, dict(epsilon=HALF)),
    "GroupNorm": (8, dict(num_groups=TWO, epsilon=HALF)),
    "BatchNorm": (8, dict(epsilon=HALF, momentum=HALF)),
    "Linear": (8, dict(out_features=TWO)),
    "LinearGeneral": (8, dict(out_features=(TWO, TWO))),
    "Conv": (8, dict(out_features=TWO, kernel_size=TWO, strides=TWO, padding=TWO)),
    "ConvTranspose": (8, dict(out_features=TWO, kernel_size=(TWO, TWO), strides=(TWO, TWO))),
    "MLP": (8, dict(hidden_features=TWO)),
}


@pytest.mark.parametrize("name", LINEN)
def test_modules_of_linen_take_them(name):
    x = IMAGES[:, 0] if name == "Conv" else IMAGES
    jax.eval_shape(getattr(jaxfused.linen, name)(**LINEN[name]).init, jax.random.key(0), x)


@pytest.mark.parametrize("name", NNX)
def test_modules_of_nnx_take_them(name):
    features, options = NNX[name]
    x = IMAGES[:, 0] if name == "Conv" else IMAGES
    module = getattr(jaxfused.nnx, name)(np.int64(features), **options, rngs=RNGS)
    nnx.eval_shape(lambda module: module(x), module)


def test_a_module_of_linen_names_itself():
    with pytest.raises(ValueError, match=r"Conv: strides is True.*pass an int"):
        jaxfused.linen.Conv(8, (3, 3), strides=True)
    with pytest.raises(ValueError, match=r"Conv: strides is True.*pass an int"):
        jaxfused.nnx.Conv(8, 8, (3, 3), strides=True, rngs=RNGS)
    assert isinstance(jaxfused.linen.Conv(8, (3, 3)), flax.linen.Conv)


NO_NUMBER = ["bad", b"x", 1j, {}, object(), X, lambda: 1]
OTHER_CALLS = {
    "linear": ((X, W), dict(precision="highest")),
    "quantized_matmul": ((X, jaxfused.quantize(W)), {}),
    "quantize_rows": ((X,), {}),
    "global_avg_pool": ((IMAGES,), {}),
}


@pytest.mark.parametrize("name", CALLS | OTHER_CALLS)
def test_an_option_of_another_kind_is_refused_by_name(name):
    """Options of all kinds: numbers, booleans, strings, dtypes, precisions and axes."""
    function, (args, options) = getattr(jaxfused, name), (CALLS | OTHER_CALLS)[name]
    for option, parameter in list(inspect.signature(function).parameters.items())[len(args) :]:
        if jax.Array in _leaves(parameter.annotation) or option in {
            "scaling",
            "quantize_rows",
            "weights",
        }:
            continue
        for wrong in NO_NUMBER:
            if wrong == "bad" and str in _leaves(parameter.annotation):
                continue
            with pytest.raises(
                ValueError, match=rf"{name}: {option}.*; (pass|call)|make the tables"
            ):
                function(*args, **(options | {option: wrong}))


@pytest.mark.parametrize("name", CALLS)
def test_numbers_beyond_their_range_are_refused_by_name(name):
    function, (args, options) = getattr(jaxfused, name), CALLS[name]
    for option, kind in numbers_of(function).items():
        if option in options:
            huge = 10**400 if kind is float else 2**70
            with pytest.raises(ValueError, match=rf"{name}: {option} is 1\d*, beyond.*; pass a"):
                function(*args, **(options | {option: huge}))


@pytest.mark.parametrize("name", [n for n in CALLS if "epsilon" in CALLS[n][1]])
def test_a_whole_epsilon_is_a_number_and_a_negative_one_is_refused(name):
    function, (args, options) = getattr(jaxfused, name), CALLS[name]
    whole, same = (function(*args, **(options | dict(epsilon=e))) for e in (2**40, 2.0**40))
    jax.tree.map(np.testing.assert_array_equal, whole, same)
    with pytest.raises(ValueError, match=rf"{name}: epsilon is -1.0.*; pass 0 or more"):
        function(*args, **(options | dict(epsilon=-1)))


def test_switches_are_true_false_one_or_zero():
    for value in (True, 1, np.bool_(True), jnp.array(True)):
        y = jaxfused.dot_product_attention(HEADS, HEADS, HEADS, is_causal=value)
        np.testing.assert_array_equal(
            y, jaxfused.dot_product_attention(HEADS, HEADS, HEADS, is_causal=True)
        )
    with pytest.raises(ValueError, match=r"dot_product_attention: is_causal is .*; pass True or"):
        jax.jit(lambda c: jaxfused.dot_product_attention(HEADS, HEADS, HEADS, is_causal=c))(True)


@pytest.mark.parametrize("dtype", [0, 1.5, [], {}, "bad", X, np.ones(3), True])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=r"linear: out_dtype is .* no dtype; pass"):
        jaxfused.linear(X, W, out_dtype=dtype)
    with pytest.raises(ValueError, match=r"Linear: param_dtype is .* no dtype; pass"):
        jaxfused.nnx.Linear(8, 8, param_dtype=dtype, rngs=RNGS)
    with pytest.raises(ValueError, match=r"Dense: dtype is .* no dtype; pass"):
        jaxfused.linen.Dense(8, dtype=dtype)


def test_a_name_of_a_dtype_may_come_from_numpy():
    assert jaxfused.linear(X, W, out_dtype=np.array(["float16"])[0]).dtype == jnp.float16


@pytest.mark.parametrize("axis", ["batch", 0, 1.5, {}, (1.5,), True, np.int64(1), ("a", 2)])
def test_what_names_no_mapped_axis_is_refused(axis):
    for name in ("batch_norm", "softmax_cross_entropy"):
        args = CALLS[name][0]
        with pytest.raises(ValueError, match=rf"{name}: axis_name is .*; (pass|call)"):
            getattr(jaxfused, name)(*args, axis_name=axis)
    if axis != "batch":
        with pytest.raises(ValueError, match=r"BatchNorm: axis_name is .*; pass"):
            jaxfused.nnx.BatchNorm(8, axis_name=axis, rngs=RNGS)


def test_labels_hold_what_is_ignored():
    with pytest.raises(
        ValueError, match=r"softmax_cross_entropy: ignore_index is 1\d*, but labels"
    ):
        jaxfused.softmax_cross_entropy(X, CLASSES, ignore_index=2**40)
    with pytest.raises(ValueError, match=r"softmax_cross_entropy: cotangent is .*; pass"):
        jaxfused.softmax_cross_entropy(X, CLASSES, cotangent=1j)


COUNTED = {
    "Linear": dict(in_features=8, out_features=8),
    "LinearGeneral": dict(in_features=8, out_features=8),
    "Conv": dict(in_features=8, out_features=8, kernel_size=3, feature_group_count=1),
    "ConvTranspose": dict(in_features=8, out_features=8, kernel_size=2),
    "SeparableConv": dict(in_features=8, out_features=8, kernel_size=3, channel_multiplier=1),
    "ConvNormAct": dict(in_features=8, out_features=8, kernel_size=3, num_groups=2),
    "ConvNeXtBlock": dict(features=8, kernel_size=3, hidden_features=8),
    "ResNetBlock": dict(in_features=8, features=8, num_groups=2),
    "LayerNorm": dict(num_features=8),
    "RMSNorm": dict(num_features=8),
    "BatchNorm": dict(num_features=8),
    "InstanceNorm": dict(num_features=8),
    "GroupNorm": dict(num_features=8, num_groups=2),
    "MLP": dict(in_features=8, hidden_features=8, out_features=8),
    "GatedMLP": dict(in_features=8, hidden_features=8, out_features=8),
    "QuantizedLinear": dict(in_features=8, out_features=8, group_size=4),
    "MultiHeadAttention": dict(num_heads=2, in_features=8, qkv_features=8, num_kv_heads=1),
    "TransformerBlock": dict(
        features=8, num_heads=2, num_kv_heads=1, head_dim=8, hidden_features=8
    ),
    "DiTBlock": dict(features=8, num_heads=2, condition_features=8, hidden_features=8),
}
LINEN_COUNTED = {
    "Dense": dict(features=8),
    "DenseGeneral": dict(features=8),
    "Conv": dict(features=8, kernel_size=3, feature_group_count=1),
    "ConvLocal": dict(features=8, kernel_size=3),
    "ConvTranspose": dict(features=8, kernel_size=2),
    "SeparableConv": dict(features=8, kernel_size=3, channel_multiplier=1),
    "ConvNormAct": dict(features=8, kernel_size=3, num_groups=2),
    "ConvNeXtBlock": dict(kernel_size=3, hidden_features=8),
    "ResNetBlock": dict(features=8, num_groups=2),
    "GroupNorm": dict(num_groups=2),
    "MLP": dict(hidden_features=8, out_features=8),
    "GatedMLP": dict(hidden_features=8, out_features=8),
    "QuantizedDense": dict(features=8, group_size=4),
    "MultiHeadAttention": dict(num_heads=2, qkv_features=8, out_features=8),
    "SelfAttention": dict(num_heads=2, qkv_features=8, out_features=8),
    "TransformerBlock": dict(num_heads=2, num_kv_heads=1, head_dim=8, hidden_features=8),
    "DiTBlock": dict(num_heads=2, hidden_features=8),
    "Upsample": dict(features=8),
}


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "3", 2**40])
def test_sizes_of_modules_count_one_or_more(wrong):
    for name, options in COUNTED.items():
        for option in options:
            with pytest.raises(ValueError, match=f"{name}: {option} is .*; pass a"):
                getattr(jaxfused.nnx, name)(**(options | {option: wrong}), rngs=RNGS)
    for name, options in LINEN_COUNTED.items():
        for option in options:
            with pytest.raises(ValueError, match=f"{name}: {option} is .*; pass a"):
                getattr(jaxfused.linen, name)(**(options | {option: wrong}))
