"""Layers, gradients and optimizers split over devices; their collectives run during products.

The functions are called within `jax.shard_map` or `jax.pmap` over a mesh axis or, except for
`mean_gradients`, under `jax.jit` with arrays that the mesh splits.
"""

from jaxfused.parallel.fsdp_layer import fsdp_layer as fsdp_layer
from jaxfused.parallel.gated_mlp import gated_mlp as gated_mlp
from jaxfused.parallel.linear import linear as linear
from jaxfused.parallel.mean_gradients import mean_gradients as mean_gradients
from jaxfused.parallel.mlp import mlp as mlp
from jaxfused.parallel.qkv_projection import qkv_projection as qkv_projection
from jaxfused.parallel.zero1 import ShardedTransformation as ShardedTransformation
from jaxfused.parallel.zero1 import zero1 as zero1
