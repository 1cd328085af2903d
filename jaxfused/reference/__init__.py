"""Every operator in plain jax.numpy: `implementation="xla"`, and the truth for the kernels."""

from jaxfused.reference import attention as attention
from jaxfused.reference import avg_pool as avg_pool
from jaxfused.reference import batch_norm as batch_norm
from jaxfused.reference import conv as conv
from jaxfused.reference import cross_entropy as cross_entropy
from jaxfused.reference import fourier_conv as fourier_conv
from jaxfused.reference import fp8 as fp8
from jaxfused.reference import group_norm as group_norm
from jaxfused.reference import layer_norm as layer_norm
from jaxfused.reference import linear as linear
from jaxfused.reference import max_pool as max_pool
from jaxfused.reference import mlp as mlp
from jaxfused.reference import qkv_projection as qkv_projection
from jaxfused.reference import quantized_conv as quantized_conv
from jaxfused.reference import quantized_matmul as quantized_matmul
from jaxfused.reference import rope as rope
from jaxfused.reference import segmentation_loss as segmentation_loss
from jaxfused.reference import sigmoid_cross_entropy as sigmoid_cross_entropy
from jaxfused.reference import spatial_pyramid_pool as spatial_pyramid_pool
from jaxfused.reference import upsample as upsample
