"""A linear layer with a sparse kernel for Flax Linen."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
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
from jaxfused.ops.sparse.block_sparse import BlockSparse
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class SparseLinear(linen.Module):
    r"""A linear layer with a sparse kernel: some of its square blocks, or two of each four numbers.

    .. math:: y = x \cdot \text{kernel} + \text{bias}

    With pattern "blocks" the parameter is `blocks` [kept, B, B], at places that are drawn once and are
    no parameters (collection "places"). The kept blocks alone are multiplied, forward and backward. With
    "2:4" the parameter is the dense `kernel` [D, F], pruned by magnitude along D in every call, as
    `jaxfused.sparse24_matmul` does it.

    Attributes:
      features: F.
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
      implementation: None for the fastest that can run, or "pallas" (blocks), "cuda" (2:4), "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.SparseLinear(256, block_size=64, density=0.5)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 128)))
      >>> layer.apply(variables, jnp.ones((2, 128))).shape, variables["params"]["blocks"].shape
      ((2, 256), (4, 64, 64))

    Source: `jaxfused.block_sparse_matmul`, `jaxfused.sparse24_matmul`.
    """

    features: int
    pattern: Pattern = "blocks"
    block_size: int = 128
    density: float = 0.1
    straight_through: bool = False
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Multiplies inputs [..., D] by the kernel, and adds the bias: [..., F]."""
        shape = (jnp.shape(inputs)[-1], self.features)
        check_sparse_linear("jaxfused.linen.SparseLinear", self.pattern, self.density, shape[0])
        weight: BlockSparse | jax.Array
        if self.pattern == "blocks":
            weight = self._blocks(shape)
        else:
            weight = self.param("kernel", in_float32(self.kernel_init), shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return sparse_linear(
            inputs,
            weight,
            bias,
            straight_through=self.straight_through,
            dtype=self.dtype,
            precision=self.precision,
            implementation=self.implementation,
        )

    def _blocks(self, shape: tuple[int, int]) -> BlockSparse:
        lists: Any = self.variable(
            "places",
            "lists",
            lambda: first_places(self.make_rng("params"), shape, self.block_size, self.density),
        ).value
        blocks = self.param(
            "blocks", first_blocks, self.kernel_init, shape, self.param_dtype, lists
        )
        by_column, by_row = lists
        return BlockSparse(blocks, by_column, by_row, shape)
