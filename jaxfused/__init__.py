"""Fused operators for JAX on NVIDIA GPUs; the same functions run as plain jax.numpy elsewhere."""

from jaxfused.ops.layer_norm import layer_norm as layer_norm
from jaxfused.ops.layer_norm import rms_norm as rms_norm
