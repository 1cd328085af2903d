"""Flax Linen modules with Flax's own names, attributes and parameters, on this package's operators.

A call that an operator cannot serve, such as a norm with a mask, runs Flax's own code: each class says
for which arguments, and `jaxfused.explain` lists such calls of a program.

Every other name of `flax.linen` is here too, and is Flax's own: `import jaxfused.linen as nn` is all
that changes in a model, and its submodules may be imported as Flax's: `jaxfused.linen.spmd`.
"""

from typing import Any

from flax import linen as _flax

from jaxfused.linen.attention import MultiHeadAttention as MultiHeadAttention
from jaxfused.linen.attention import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from jaxfused.linen.attention import SelfAttention as SelfAttention
from jaxfused.linen.attention import attention_fn as attention_fn
from jaxfused.linen.batch_norm import BatchNorm as BatchNorm
from jaxfused.linen.carafe import CARAFE as CARAFE
from jaxfused.linen.conv import Conv as Conv
from jaxfused.linen.conv_local import ConvLocal as ConvLocal
from jaxfused.linen.conv_norm_act import ConvNormAct as ConvNormAct
from jaxfused.linen.conv_transpose import ConvTranspose as ConvTranspose
from jaxfused.linen.convnext_block import ConvNeXtBlock as ConvNeXtBlock
from jaxfused.linen.deform_conv import DeformConv as DeformConv
from jaxfused.linen.dit_block import DiTBlock as DiTBlock
from jaxfused.linen.einsum import Einsum as Einsum
from jaxfused.linen.group_norm import GroupNorm as GroupNorm
from jaxfused.linen.instance_norm import InstanceNorm as InstanceNorm
from jaxfused.linen.layer_norm import LayerNorm as LayerNorm
from jaxfused.linen.layer_norm import RMSNorm as RMSNorm
from jaxfused.linen.linear import Dense as Dense
from jaxfused.linen.linear_general import DenseGeneral as DenseGeneral
from jaxfused.linen.mlp import MLP as MLP
from jaxfused.linen.mlp import GatedMLP as GatedMLP
from jaxfused.linen.moe import MoE as MoE
from jaxfused.linen.quantized_linear import QuantizedDense as QuantizedDense
from jaxfused.linen.resample import BlurPool as BlurPool
from jaxfused.linen.resample import PixelShuffle as PixelShuffle
from jaxfused.linen.resample import PixelUnshuffle as PixelUnshuffle
from jaxfused.linen.resample import Resize as Resize
from jaxfused.linen.resnet_block import ResNetBlock as ResNetBlock
from jaxfused.linen.rope import RotaryEmbedding as RotaryEmbedding
from jaxfused.linen.separable_conv import SeparableConv as SeparableConv
from jaxfused.linen.sparse_linear import SparseLinear as SparseLinear
from jaxfused.linen.transformer_block import TransformerBlock as TransformerBlock
from jaxfused.linen.upsample import Upsample as Upsample
from jaxfused.modules.flax_submodules import mirror as _mirror
from jaxfused.modules.pooling import avg_pool as avg_pool
from jaxfused.modules.pooling import max_pool as max_pool

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
            f"module {__name__!r} has no attribute {name!r}, and neither has flax.linen"
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_flax)})
