"""The perceptrons of a Transformer block for Flax NNX."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.modules.mlp import gated_mlp, mlp
from jaxfused.nnx.linear import Linear, affine
from jaxfused.ops.mlp import Save


class MLP(nnx.Module):
    r"""Two linear layers with an activation between them and a residual sum after them.

    .. math:: y = \text{activation}(x W_\text{up} + b_\text{up}) W_\text{down} + b_\text{down}
              + \text{residual}

    The parameters are those of a Flax module with two linear layers called `up` and `down`.

    Args:
      in_features: D.
      hidden_features: F.
      out_features: E, by default D.
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu".
      use_bias: whether the layers have biases.
      dtype: of the products and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the products, as in Flax.
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      save: what is kept for the backward: "hidden", "preactivation" or "inputs", as in
        `jaxfused.mlp`.
      rngs: gives the initialisers their keys.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> mlp = jaxfused.nnx.MLP(8, 32, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((2, 8))
      >>> mlp(x, residual=x).shape
      (2, 8)

    Source: `jaxfused.mlp`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str | None = "gelu_tanh",
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        save: Save = "preactivation",
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        linear = functools.partial(
            Linear,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.up = linear(in_features, hidden_features)
        self.down = linear(hidden_features, in_features if out_features is None else out_features)
        self.activation = activation
        self.dtype = dtype
        self.precision = precision
        self.save = save
        self.implementation = implementation

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Applies the layers to x [..., D]; residual [..., E] is added last.

        Returns:
          [..., E], of the residual's dtype where there is one.
        """
        return mlp(
            x,
            affine(self.up),
            affine(self.down),
            dtype=self.dtype,
            activation=self.activation,
            residual=residual,
            save=self.save,
            precision=self.precision,
            implementation=self.implementation,
        )


class GatedMLP(nnx.Module):
    r"""The gated perceptron, SwiGLU by default, with a residual sum after it.

    .. math:: y = \bigl(\text{activation}(x W_\text{gate} + b_\text{gate}) \odot
              (x W_\text{up} + b_\text{up})\bigr) W_\text{down} + b_\text{down} + \text{residual}

    The parameters are those of a Flax module with linear layers called `gate`, `up` and `down`.

    Args:
      in_features: D.
      hidden_features: F.
      out_features: E, by default D.
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu",
        of the gate.
      use_bias: whether the layers have biases.
      dtype: of the products and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the products, as in Flax.
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      save: what is kept for the backward: "hidden", "preactivation" or "inputs", as in
        `jaxfused.gated_mlp`.
      rngs: gives the initialisers their keys.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> mlp = jaxfused.nnx.GatedMLP(8, 32, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((2, 8))
      >>> mlp(x, residual=x).shape
      (2, 8)

    Source: `jaxfused.gated_mlp`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str | None = "silu",
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        save: Save = "preactivation",
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        linear = functools.partial(
            Linear,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.gate = linear(in_features, hidden_features)
        self.up = linear(in_features, hidden_features)
        self.down = linear(hidden_features, in_features if out_features is None else out_features)
        self.activation = activation
        self.dtype = dtype
        self.precision = precision
        self.save = save
        self.implementation = implementation

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Applies the layers to x [..., D]; residual [..., E] is added last.

        Returns:
          [..., E], of the residual's dtype where there is one.
        """
        return gated_mlp(
            x,
            affine(self.gate),
            affine(self.up),
            affine(self.down),
            dtype=self.dtype,
            activation=self.activation,
            residual=residual,
            save=self.save,
            precision=self.precision,
            implementation=self.implementation,
        )
