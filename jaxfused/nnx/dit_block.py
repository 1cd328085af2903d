"""The block of a diffusion Transformer for Flax NNX: modulation and gates are part of the norms."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.modules.dit_block import CHUNKS, Stream, check_heads, dit_block
from jaxfused.nnx.linear import Linear, affine
from jaxfused.nnx.mlp import MLP
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_numbers


class DiTBlock(nnx.Module):
    r"""A Transformer block whose norms a condition modulates, and whose branches come through gates.

    .. math::
        (b_1, s_1, g_1, b_2, s_2, g_2) &= \text{split}(W_\text{modulation} \, \text{silu}(c)) \\
        h &= x + g_1 \cdot \text{attention}(\text{norm}(x) \cdot (1 + s_1) + b_1) \\
        y &= h + g_2 \cdot \text{mlp}(\text{norm}(h) \cdot (1 + s_2) + b_2)

    Called with `residual` and `gate`, the block leaves its last sum to the next one:
    `x, residual, gate = block(x, c, residual=residual, gate=gate)`, and after the last block
    `jaxfused.layer_norm(x, residual=residual, gate=gate, ...)`.

    Parameters: `modulation` [C, 6 D]; `qkv` [D, 3 D], the columns of the queries, of the keys and of the
    values; `project`; `mlp` with `up` and `down`. The norms have none.

    Args:
      features: D.
      num_heads: of the attention.
      condition_features: C, by default D.
      hidden_features: of the perceptron, by default 4 D.
      epsilon: of the norms.
      mlp_epsilon: of the norm before the perceptron, by default `epsilon`; diffusers' DiT has 1e-5 there
        and 1e-6 before the attention.
      activation: of the perceptron.
      use_bias: whether linear layers have biases.
      dtype: of the products; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the products, as in Flax.
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      modulation_init: initialises the kernel of `modulation`: zeros, so that a block begins as identity.
      save: what the perceptron keeps for its backward, as in `jaxfused.mlp`.
      rngs: gives the initialisers their keys.
      implementation: of all but the attention: None, "pallas", "cuda", "xla".
      attention_implementation: the same, or "cudnn".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> block = jaxfused.nnx.DiTBlock(32, 4, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((2, 5, 32)), jnp.ones((2, 32))).shape
      (2, 5, 32)

    Source: Peebles, Xie, "Scalable Diffusion Models with Transformers", 2022,
    https://arxiv.org/abs/2212.09748
    """

    @python_numbers
    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        condition_features: int | None = None,
        hidden_features: int | None = None,
        epsilon: float = 1e-6,
        mlp_epsilon: float | None = None,
        activation: str | None = "gelu_tanh",
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        modulation_init: Initializer = nnx.initializers.zeros,
        save: Save = "preactivation",
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
        attention_implementation: AttentionImplementation | None = None,
    ):
        check_heads(features, num_heads)
        layer: dict[str, Any] = dict(
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            bias_init=bias_init,
            rngs=rngs,
        )
        condition_features = features if condition_features is None else condition_features
        self.modulation = Linear(
            condition_features, CHUNKS * features, kernel_init=modulation_init, **layer
        )
        layer |= dict(kernel_init=kernel_init, implementation=implementation)
        self.qkv = Linear(features, 3 * features, **layer)
        self.project = Linear(features, features, **layer)
        self.mlp = MLP(
            features,
            4 * features if hidden_features is None else hidden_features,
            activation=activation,
            save=save,
            **layer,
        )
        self.num_heads = num_heads
        self.epsilon = epsilon
        self.mlp_epsilon = mlp_epsilon
        self.implementation = implementation
        self.attention_implementation = attention_implementation

    def __call__(
        self,
        x: jax.Array,
        condition: jax.Array,
        *,
        residual: jax.Array | None = None,
        gate: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> jax.Array | Stream:
        """Applies the block to the images.

        Args:
          x: [..., T, D].
          condition: [..., C], of each image: the embedding of its time and class.
          residual: like x, the stream to which x is to be added first; see above.
          gate: [..., D], what x is multiplied by before that.
          mask: bool, True where a query may attend to a key; broadcasts to [..., N, T, T].

        Returns:
          [..., T, D]; with `residual`, (the last branch, the stream to add it to, its gate).

        Raises:
          ValueError: shapes do not fit, or a named implementation cannot run.
        """
        return dit_block(
            x,
            self.modulation(jax.nn.silu(condition)),
            affine(self.qkv),
            affine(self.project),
            self.mlp,
            residual=residual,
            gate=gate,
            num_heads=self.num_heads,
            epsilon=self.epsilon,
            mlp_epsilon=self.mlp_epsilon,
            mask=mask,
            dtype=self.project.dtype,
            precision=self.project.precision,
            implementation=self.implementation,
            attention_implementation=self.attention_implementation,
        )
