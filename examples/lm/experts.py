"""The mixture of experts of gpt-oss, whose weights may be stored in MXFP4."""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused
from examples.lm.config import Mixture


class Experts(nnx.Module):
    """Gives each token the weighted sum of a few gated MLPs, which a router chooses.

    An MLP is ((clip(u) + 1) g sigmoid(alpha g)) D + b. As in checkpoints, g and u are the even and
    the odd columns of one product with a bias; g is clipped from above, u on both sides.

    Args:
      features: width of a token's vector.
      hidden: features inside an MLP.
      mixture: number of experts, and their activation.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: makes the parameters.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        mixture: Mixture,
        *,
        dtype: jax.typing.DTypeLike,
        param_dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.mixture, self.dtype = mixture, dtype
        init = nnx.initializers.normal(0.02)
        # The router's choice needs the precision of float32.
        self.router = jaxfused.nnx.Linear(
            features,
            mixture.experts,
            kernel_init=init,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            rngs=rngs,
        )

        def param(*shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        self.gate_up = param(mixture.experts, features, 2 * hidden)
        self.gate_up_bias = param(mixture.experts, 2 * hidden)
        self.down = param(mixture.experts, hidden, features)
        self.down_bias = param(mixture.experts, features)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the result [..., features] of tokens x [..., features]."""
        mixture, tokens = self.mixture, x.reshape(-1, x.shape[-1])
        routes = jaxfused.router(self.router(tokens), mixture.experts_of_token, over="chosen")
        chosen = routes.indices.reshape(-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=mixture.experts).astype(jnp.int32)
        expert = chosen[order]
        rows = tokens[order // mixture.experts_of_token].astype(self.dtype)
        both = self._product(rows, self.gate_up, expert, sizes) + self.gate_up_bias[...][expert]
        gate = jnp.minimum(both[:, ::2], mixture.limit)
        up = jnp.clip(both[:, 1::2], -mixture.limit, mixture.limit)
        hidden = (up + 1) * gate * jax.nn.sigmoid(mixture.alpha * gate)
        y = self._product(hidden.astype(rows.dtype), self.down, expert, sizes)
        y = (y + self.down_bias[...][expert]).astype(jnp.float32)
        # A gather restores the tokens' order; a scatter-add would sum in no fixed order.
        y = y[jnp.argsort(order)].reshape(*routes.weights.shape, -1)
        return (y * routes.weights[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)

    def _product(
        self, rows: jax.Array, weights: nnx.Variable, expert: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        """Multiplies rows, sorted by expert, by their expert's weights [experts, inputs, outputs]."""
        kept = weights.get_value()
        if not isinstance(kept, jaxfused.QuantizedArray):
            return jaxfused.ragged_dot(rows, kept.astype(self.dtype), sizes)
        if len(rows) <= len(sizes):
            # For few rows, only the weights of the chosen experts are read and dequantised.
            own = jax.tree.map(lambda array: array[expert], kept).dequantize(self.dtype)
            product = jnp.einsum("md,mdf->mf", rows, own, preferred_element_type=jnp.float32)
            return product.astype(rows.dtype)
        return jaxfused.ragged_dot(rows, kept.dequantize(self.dtype), sizes)
