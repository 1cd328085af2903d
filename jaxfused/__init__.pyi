"""The public names, and where each is defined."""

from jaxfused import augment as augment
from jaxfused import dispatch as dispatch
from jaxfused import linen as linen
from jaxfused import masks as masks
from jaxfused import nnx as nnx
from jaxfused import optim as optim
from jaxfused import parallel as parallel
from jaxfused import quantization as quantization
from jaxfused import remat_policies as remat_policies
from jaxfused.explanation import Explanation as Explanation
from jaxfused.explanation import explain as explain
from jaxfused.fusion import fuse as fuse
from jaxfused.modules.linear import QuantizedKernel as QuantizedKernel
from jaxfused.modules.moe import Routing as Routing
from jaxfused.ops.attention.attention import dot_product_attention as dot_product_attention
from jaxfused.ops.attention.context_parallel import (
    context_parallel_attention as context_parallel_attention,
)
from jaxfused.ops.attention.context_parallel import zigzag_order as zigzag_order
from jaxfused.ops.conv.conv import conv as conv
from jaxfused.ops.conv.conv_input import Concatenated as Concatenated
from jaxfused.ops.conv.conv_transpose import conv_transpose as conv_transpose
from jaxfused.ops.conv.deform_conv import deform_conv as deform_conv
from jaxfused.ops.conv.quantized_conv import quantized_conv as quantized_conv
from jaxfused.ops.fp8.fp8 import Fp8State as Fp8State
from jaxfused.ops.grouped.batched_lora import batched_lora as batched_lora
from jaxfused.ops.grouped.expert_mlp import expert_mlp as expert_mlp
from jaxfused.ops.grouped.expert_parallel import expert_parallel_mlp as expert_parallel_mlp
from jaxfused.ops.grouped.ragged_dot import ragged_dot as ragged_dot
from jaxfused.ops.grouped.ragged_dot_general import ragged_dot_general as ragged_dot_general
from jaxfused.ops.grouped.ragged_mlp import ragged_mlp as ragged_mlp
from jaxfused.ops.grouped.router import Routes as Routes
from jaxfused.ops.grouped.router import load_balancing_loss as load_balancing_loss
from jaxfused.ops.grouped.router import router as router
from jaxfused.ops.linear.gated_mlp import gated_mlp as gated_mlp
from jaxfused.ops.linear.linear import linear as linear
from jaxfused.ops.linear.mlp import mlp as mlp
from jaxfused.ops.linear.qkv_projection import qkv_projection as qkv_projection
from jaxfused.ops.loss.cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from jaxfused.ops.loss.linear_cross_entropy import (
    linear_softmax_cross_entropy as linear_softmax_cross_entropy,
)
from jaxfused.ops.loss.segmentation_loss import segmentation_loss as segmentation_loss
from jaxfused.ops.loss.sigmoid_cross_entropy import sigmoid_cross_entropy as sigmoid_cross_entropy
from jaxfused.ops.norm.batch_norm import batch_norm as batch_norm
from jaxfused.ops.norm.batch_norm import fold_batch_norm as fold_batch_norm
from jaxfused.ops.norm.group_norm import group_norm as group_norm
from jaxfused.ops.norm.layer_norm import layer_norm as layer_norm
from jaxfused.ops.norm.layer_norm import rms_norm as rms_norm
from jaxfused.ops.pool.avg_pool import avg_pool as avg_pool
from jaxfused.ops.pool.avg_pool import global_avg_pool as global_avg_pool
from jaxfused.ops.pool.blur_pool import blur_pool as blur_pool
from jaxfused.ops.pool.carafe import carafe as carafe
from jaxfused.ops.pool.max_pool import max_pool as max_pool
from jaxfused.ops.pool.pixel_shuffle import pixel_shuffle as pixel_shuffle
from jaxfused.ops.pool.pixel_shuffle import pixel_unshuffle as pixel_unshuffle
from jaxfused.ops.pool.resize import resize as resize
from jaxfused.ops.pool.spatial_pyramid_pool import spatial_pyramid_pool as spatial_pyramid_pool
from jaxfused.ops.pool.upsample import upsample as upsample
from jaxfused.ops.quantize.quantize import fake_quantize as fake_quantize
from jaxfused.ops.quantize.quantize import quantize as quantize
from jaxfused.ops.quantize.quantize import quantize_rows as quantize_rows
from jaxfused.ops.quantized.quantized_matmul import quantized_matmul as quantized_matmul
from jaxfused.ops.rope.rope import rope as rope
from jaxfused.ops.rope.rope_config import rope_from_config as rope_from_config
from jaxfused.ops.rope.rope_scaling import DynamicNTKRope as DynamicNTKRope
from jaxfused.ops.rope.rope_scaling import LinearRope as LinearRope
from jaxfused.ops.rope.rope_scaling import Llama3Rope as Llama3Rope
from jaxfused.ops.rope.rope_scaling import LongRope as LongRope
from jaxfused.ops.rope.rope_scaling import NTKRope as NTKRope
from jaxfused.ops.rope.rope_scaling import ProportionalRope as ProportionalRope
from jaxfused.ops.rope.rope_scaling import RopeScaling as RopeScaling
from jaxfused.ops.rope.rope_scaling import YarnRope as YarnRope
from jaxfused.ops.rope.rope_tables import axial_rope_tables as axial_rope_tables
from jaxfused.ops.rope.rope_tables import rope_tables as rope_tables
from jaxfused.ops.sampling.sample import sample as sample
from jaxfused.ops.sampling.top_log_probs import LogProbs as LogProbs
from jaxfused.ops.serving.append_to_pages import append_to_pages as append_to_pages
from jaxfused.ops.serving.kv_cache import KVCache as KVCache
from jaxfused.ops.serving.page_allocator import OutOfPages as OutOfPages
from jaxfused.ops.serving.page_allocator import PageAllocator as PageAllocator
from jaxfused.ops.serving.paged_attention import paged_attention as paged_attention
from jaxfused.ops.serving.paged_attention import (
    ragged_paged_attention as ragged_paged_attention,
)
from jaxfused.ops.sparse.block_sparse import BlockSparse as BlockSparse
from jaxfused.ops.sparse.block_sparse_matmul import block_sparse_matmul as block_sparse_matmul
from jaxfused.ops.sparse.sparse24 import Sparse24 as Sparse24
from jaxfused.ops.sparse.sparse24 import prune24 as prune24
from jaxfused.ops.sparse.sparse24_matmul import sparse24_matmul as sparse24_matmul
from jaxfused.ops.sparse.sparse_matmul import sampled_matmul as sampled_matmul
from jaxfused.ops.sparse.sparse_matmul import sparse_matmul as sparse_matmul
from jaxfused.quantization.calibrate import Calibrated as Calibrated
from jaxfused.quantization.calibrate import Calibration as Calibration
from jaxfused.quantization.calibrate import LayerInputs as LayerInputs
from jaxfused.quantization.calibrate import calibrate as calibrate
from jaxfused.quantization.quantize_params import quantize_params as quantize_params
from jaxfused.quantization.report import LayerError as LayerError
from jaxfused.quantization.report import QuantizationReport as QuantizationReport
from jaxfused.quantization.rules import QuantizationRule as QuantizationRule
from jaxfused.quantization.smoothing import Fold as Fold
from jaxfused.runtime.activation import ACTIVATIONS as ACTIVATIONS
from jaxfused.runtime.quantized_array import QuantizedArray as QuantizedArray
from jaxfused.tuning.tuner import TuningReport as TuningReport
from jaxfused.tuning.tuner import tune as tune

__version__: str
