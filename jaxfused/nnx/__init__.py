"""Flax NNX modules with Flax's own names, arguments and parameters, on this package's operators.

A call that an operator cannot serve, such as a norm with a mask, runs Flax's own code: each class says
for which arguments, and `jaxfused.explain` lists such calls of a program.

Every other name of `flax.nnx` is here too, and is Flax's own: `import jaxfused.nnx as nnx` is all that
changes in a model, and its submodules may be imported as Flax's: `jaxfused.nnx.spmd`.
"""

from typing import Any

from flax import nnx as _flax

from jaxfused.modules.flax_submodules import mirror as _mirror
from jaxfused.modules.pooling import avg_pool as avg_pool
from jaxfused.modules.pooling import max_pool as max_pool
from jaxfused.nnx.attention import MultiHeadAttention as MultiHeadAttention
from jaxfused.nnx.attention import attention_fn as attention_fn
from jaxfused.nnx.batch_norm import BatchNorm as BatchNorm
from jaxfused.nnx.carafe import CARAFE as CARAFE
from jaxfused.nnx.conv import Conv as Conv
from jaxfused.nnx.conv_norm_act import ConvNormAct as ConvNormAct
from jaxfused.nnx.conv_norm_act import fold_batch_norms as fold_batch_norms
from jaxfused.nnx.conv_transpose import ConvTranspose as ConvTranspose
from jaxfused.nnx.convnext_block import ConvNeXtBlock as ConvNeXtBlock
from jaxfused.nnx.deform_conv import DeformConv as DeformConv
from jaxfused.nnx.dit_block import DiTBlock as DiTBlock
from jaxfused.nnx.einsum import Einsum as Einsum
from jaxfused.nnx.group_norm import GroupNorm as GroupNorm
from jaxfused.nnx.instance_norm import InstanceNorm as InstanceNorm
from jaxfused.nnx.layer_norm import LayerNorm as LayerNorm
from jaxfused.nnx.layer_norm import RMSNorm as RMSNorm
from jaxfused.nnx.linear import Linear as Linear
from jaxfused.nnx.linear_general import LinearGeneral as LinearGeneral
from jaxfused.nnx.mlp import MLP as MLP
from jaxfused.nnx.mlp import GatedMLP as GatedMLP
from jaxfused.nnx.moe import MoE as MoE
from jaxfused.nnx.quantized_linear import QuantizedLinear as QuantizedLinear
from jaxfused.nnx.resample import BlurPool as BlurPool
from jaxfused.nnx.resample import PixelShuffle as PixelShuffle
from jaxfused.nnx.resample import PixelUnshuffle as PixelUnshuffle
from jaxfused.nnx.resample import Resize as Resize
from jaxfused.nnx.resnet_block import ResNetBlock as ResNetBlock
from jaxfused.nnx.rope import RotaryEmbedding as RotaryEmbedding
from jaxfused.nnx.separable_conv import SeparableConv as SeparableConv
from jaxfused.nnx.sparse_linear import SparseLinear as SparseLinear
from jaxfused.nnx.transformer_block import TransformerBlock as TransformerBlock
from jaxfused.nnx.upsample import Upsample as Upsample

dot_product_attention = attention_fn

__all__ = _mirror(__name__, _flax)


def __getattr__(name: str) -> Any:
    """Returns Flax's object for a name that this package does not define."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_flax, name)
    except AttributeError:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}, and neither has flax.nnx"
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_flax)})
