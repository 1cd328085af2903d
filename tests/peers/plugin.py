"""A pytest plugin that points the names of Flax and JAX at this package's modules and operators.

Loaded with `-p plugin` before the tests of Flax or JAX are imported; see `python -m tests.peers`.
"""

import flax.linen
import flax.nnx

import jaxfused
import jaxfused.linen
import jaxfused.nnx

NNX = ("BatchNorm", "Conv", "GroupNorm", "LayerNorm", "Linear", "MultiHeadAttention", "RMSNorm")
LINEN = ("BatchNorm", "Conv", "Dense", "GroupNorm", "LayerNorm", "RMSNorm")
LINEN += ("MultiHeadAttention", "MultiHeadDotProductAttention")


def pytest_configure(config):
    """Swaps the names, once jaxfused holds Flax's own classes."""
    for theirs, ours, names in (
        (flax.nnx, jaxfused.nnx, NNX),
        (flax.linen, jaxfused.linen, LINEN),
    ):
        for name in names:
            setattr(theirs, name, getattr(ours, name))
        theirs.dot_product_attention = ours.attention_fn
