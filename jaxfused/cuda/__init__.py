"""The CUDA C kernels of ffi/, called through the XLA FFI: one module an operator.

They serve the GPUs and shapes that the Pallas kernels do not.
"""

from jaxfused.cuda import (
    attention,
    bias_activation,
    cross_entropy,
    cublaslt,
    depthwise_conv,
    depthwise_conv1d,
    gradient_norm,
    group_norm,
    group_norm_slab,
    layer_norm,
    library,
    linear,
    max_pool,
    mlp,
    optimizer_step,
    quantize,
    quantize_rows,
    quantized_matmul,
    rope,
    segmentation_loss,
    upsample,
)

__all__ = [
    "attention",
    "bias_activation",
    "cross_entropy",
    "cublaslt",
    "depthwise_conv",
    "depthwise_conv1d",
    "gradient_norm",
    "group_norm",
    "group_norm_slab",
    "layer_norm",
    "library",
    "linear",
    "max_pool",
    "mlp",
    "optimizer_step",
    "quantize",
    "quantize_rows",
    "quantized_matmul",
    "rope",
    "segmentation_loss",
    "upsample",
]
