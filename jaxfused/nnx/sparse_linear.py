"""A linear layer with a sparse kernel for Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.modules.initial import in_float32
from jaxfused.modules.sparse_linear import (
    Pattern,
    check_sparse_linear,
    first_blocks,
    first_places,
    sparse_linear,
)
from jaxfused.ops.sparse.block_sparse import BlockList, BlockSparse
from jaxfused.runtime.checks import python_numbers


class BlockPlaces(nnx.Variable):
    """Lists of where a layer's nonzero blocks are: no parameter, as integers have no gradient."""


class SparseLinear(nnx.Module):
    r"""A linear layer with a sparse kernel: some of its square blocks, or two of each four numbers.

    .. math:: y = x \cdot \text{kernel} + \text{bias}

    With pattern "blocks" the parameter is `blocks` [kept, B, B], at places that are drawn once and are
    no parameters. The kept blocks alone are multiplied, forward and backward. With
    "2:4" the parameter is the dense `kernel` [D, F], pruned by magnitude along D in every call, as
    `jaxfused.sparse24_matmul` does it.

    Args:
      in_features: D.
      out_features: F.
      pattern: "blocks" or "2:4".
      block_size: B, 32, 64 or 128, which divides D and F.
      density: the fraction of the blocks that are kept.
      straight_through: with "2:4", whether the gradient reaches the numbers that are pruned too.
      use_bias: whether there is a bias [F].
      dtype: of the product and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters. Those of 16 bits are drawn in float32 and rounded.
      precision: of the product, as in Flax.
      kernel_init: initialises the whole kernel [D, F]; kept blocks are then scaled by density^(-1/2).
      bias_init: initialises the bias.
      rngs: gives the initialisers their keys.
      implementation: None for the fastest that can run, or "pallas" (blocks), "cuda" (2:4), "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.SparseLinear(128, 256, block_size=64, density=0.5, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 128))).shape, layer.blocks.shape
      ((2, 256), (4, 64, 64))

    Source: `jaxfused.block_sparse_matmul`, `jaxfused.sparse24_matmul`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        pattern: Pattern = "blocks",
        block_size: int = 128,
        density: float = 0.1,
        straight_through: bool = False,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        check_sparse_linear("jaxfused.nnx.SparseLinear", pattern, density, in_features)
        self.shape, self.straight_through = (in_features, out_features), straight_through
        key = rngs.params()
        lists = None
        if pattern == "blocks":
            lists = first_places(rngs.params(), self.shape, block_size, density)
        self.blocks = (
            nnx.Param(first_blocks(key, kernel_init, self.shape, param_dtype, lists))
            if lists
            else None
        )
        self.places = BlockPlaces((*lists[0], *lists[1])) if lists else None
        self.kernel = (
            nnx.Param(in_float32(kernel_init)(key, self.shape, param_dtype))
            if lists is None
            else None
        )
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype)) if use_bias else None
        )
        self.dtype, self.precision, self.implementation = dtype, precision, implementation

    @property
    def weight(self) -> BlockSparse | jax.Array:
        """The `jaxfused.BlockSparse`, or with pattern "2:4" the dense kernel before it is pruned."""
        if self.blocks is None or self.places is None:
            assert self.kernel is not None
            return self.kernel[...]
        column_starts, columns, row_starts, rows = self.places.get_value()
        by_column, by_row = BlockList(column_starts, columns), BlockList(row_starts, rows)
        return BlockSparse(self.blocks[...], by_column, by_row, self.shape)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Multiplies inputs [..., D] by the kernel, and adds the bias: [..., F]."""
        return sparse_linear(
            inputs,
            self.weight,
            None if self.bias is None else self.bias[...],
            straight_through=self.straight_through,
            dtype=self.dtype,
            precision=self.precision,
            implementation=self.implementation,
        )
