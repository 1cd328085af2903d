"""Flax Linen modules with Flax's own names, attributes and parameters, on this package's operators."""

from jaxfused.linen.layer_norm import LayerNorm as LayerNorm
from jaxfused.linen.layer_norm import RMSNorm as RMSNorm
