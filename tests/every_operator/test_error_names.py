"""An operator's errors name the operator and its own arguments, not those of inner calls."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jaxfused
from tests.support.arrays import put


def ones(*shape):
    return put(np.ones(shape, np.float32))


X, IMAGES = ones(4, 8), ones(2, 6, 6, 8)
W, KERNEL = ones(8, 8), ones(3, 3, 8, 8)
HEADS = ones(2, 4, 2, 8)
CLASSES = put(np.zeros(4, np.int32))
QUANTIZED, WINDOWS, BLOCKS, SPARSE24 = jax.jit(
    lambda w, windows, blocks: (
        jaxfused.quantize(w),
        jaxfused.quantize(windows),
        jaxfused.BlockSparse.from_dense(blocks, 32, count=2),
        jaxfused.Sparse24.from_dense(w),
    )
)(W, ones(72, 8), ones(32, 64))
_RAGGED = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
CALLS = {
    "avg_pool": ((IMAGES, 2), {}),
    "batch_norm": ((IMAGES,), {}),
    "batched_lora": ((X, W[None], W[None], CLASSES), {}),
    "block_sparse_matmul": ((ones(4, 32), BLOCKS), {}),
    "conv": ((IMAGES, KERNEL), {}),
    "conv_transpose": ((IMAGES, KERNEL), {}),
    "dot_product_attention": ((HEADS, HEADS, HEADS), {}),
    "expert_mlp": ((X, X[:, :1], CLASSES[:, None], W[None], W[None], W[None]), {}),
    "fake_quantize": ((W,), {}),
    "fold_batch_norm": ((W,), dict(mean=X[0], var=X[0])),
    "gated_mlp": ((X, W, W, W), {}),
    "global_avg_pool": ((IMAGES,), {}),
    "group_norm": ((IMAGES,), dict(num_groups=2)),
    "layer_norm": ((X,), {}),
    "linear": ((X, W), {}),
    "linear_softmax_cross_entropy": ((X, W, CLASSES), {}),
    "load_balancing_loss": ((X, CLASSES[:, None]), {}),
    "max_pool": ((IMAGES, 2), {}),
    "mlp": ((X, W, None, W), {}),
    "qkv_projection": ((X[None], ones(8, 24)), dict(heads=2)),
    "quantize": ((W,), {}),
    "quantize_rows": ((X,), {}),
    "quantized_conv": ((IMAGES, WINDOWS), dict(kernel_size=3)),
    "quantized_matmul": ((X, QUANTIZED), {}),
    "ragged_dot": ((X, W[None], put([4], np.int32)), {}),
    "ragged_dot_general": ((X, W[None], put([4], np.int32), _RAGGED), {}),
    "ragged_mlp": ((X, W[None], W[None], W[None], put([4], np.int32)), {}),
    "rms_norm": ((X,), {}),
    "rope": ((HEADS, HEADS), {}),
    "sample": ((X, CLASSES), {}),
    "router": ((X, 2), {}),
    "sampled_matmul": ((X, ones(8, 8), BCOO.fromdense(ones(4, 8))), {}),
    "segmentation_loss": ((X, CLASSES), {}),
    "sigmoid_cross_entropy": ((X, put(np.zeros((4, 8), np.float32))), {}),
    "softmax_cross_entropy": ((X, CLASSES), {}),
    "prune24": ((W,), {}),
    "sparse24_matmul": ((X, SPARSE24), {}),
    "sparse_matmul": ((BCOO.fromdense(X), W), {}),
    "spatial_pyramid_pool": ((IMAGES, (1, 2)), {}),
    "upsample": ((IMAGES, 2), {}),
    "blur_pool": ((IMAGES, 2), {}),
    "carafe": ((IMAGES, ones(*IMAGES.shape[:3], 9)), dict(kernel_size=3)),
    "deform_conv": ((IMAGES, KERNEL, ones(*IMAGES.shape[:3], 18)), {}),
    "pixel_shuffle": ((IMAGES, 2), {}),
    "pixel_unshuffle": ((IMAGES, 2), {}),
    "resize": ((IMAGES, 3), {}),
}
WRONG = [
    ones(),
    ones(3),
    ones(5, 7),
    ones(2, 6, 6, 5),
    put(np.ones((2, 6, 6, 8), np.int32)),
    put(np.ones(3, np.int32)),
]
WRONG_OPTIONS = dict(
    activation="swish",
    axis=9,
    bias=ones(3),
    cotangent="some",
    dropout_rate=2.0,
    dtype="int3",
    epsilon="small",
    factor=0,
    feature_group_count=3,
    group_size=3,
    implementation="triton",
    input_dilation=0,
    kernel_dilation=0,
    kernel_size=0,
    label_smoothing=2.0,
    levels=(0,),
    logits_soft_cap=-1.0,
    num_groups=3,
    padding="FULL",
    precision="fp8",
    padding_mode="white",
    reduction="median",
    residual=ones(1, 3),
    scale=ones(5, 7),
    strides=0,
    weights=ones(9),
    window=0,
)


def bad_calls(name):
    """Yields calls that each have one wrong operand or option."""
    args, options = CALLS[name]
    for i, given in enumerate(args):
        for wrong in WRONG:
            if hasattr(given, "shape") and given.shape != wrong.shape:
                yield (*args[:i], wrong, *args[i + 1 :]), options
        if hasattr(given, "shape"):
            for wrong in ("text", QUANTIZED, jaxfused.quantization.QuantizedLayer(QUANTIZED)):
                yield (*args[:i], wrong, *args[i + 1 :]), options
    yield (None, *args[1:]), options
    names = list(inspect.signature(getattr(jaxfused, name)).parameters)
    for option in WRONG_OPTIONS.keys() & set(names):
        wrong, i = WRONG_OPTIONS[option], names.index(option)
        if i < len(args):
            yield (*args[:i], wrong, *args[i + 1 :]), options
        else:
            yield args, options | {option: wrong}


@pytest.mark.parametrize("name", CALLS)
def test_errors_name_the_operator_that_was_called(name):
    refused = 0
    for args, options in bad_calls(name):
        try:
            getattr(jaxfused, name)(*args, **options)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"{name}: "), str(error)
    assert refused


def test_a_transposed_convolution_names_the_axes_of_its_own_kernel():
    x = jnp.ones((1, 5, 5, 4))
    with pytest.raises(
        ValueError, match=r"w has shape \(3, 3, 6, 2\).*4 input channels in its last axis\."
    ):
        jaxfused.conv_transpose(x, jnp.ones((3, 3, 6, 2)), strides=2, transpose_kernel=True)
    with pytest.raises(ValueError, match=r"w has shape \(3, 3, 2, 6\).*in its last axis but one\."):
        jaxfused.conv_transpose(x, jnp.ones((3, 3, 2, 6)), strides=2)
    with pytest.raises(
        ValueError, match="feature_group_count is 3, but it must divide the 4 input"
    ):
        jaxfused.conv_transpose(x, jnp.ones((3, 3, 4, 6)), feature_group_count=3)
