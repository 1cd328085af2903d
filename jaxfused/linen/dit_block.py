"""The block of a diffusion Transformer for Flax Linen: modulation and gates are part of the norms."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.linear import Dense, affine
from jaxfused.linen.mlp import MLP
from jaxfused.modules.dit_block import CHUNKS, Stream, check_heads, dit_block
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class DiTBlock(linen.Module):
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

    Attributes:
      num_heads: of the attention.
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
      implementation: of all but the attention: None, "pallas", "cuda", "xla".
      attention_implementation: the same, or "cudnn".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> block = jaxfused.linen.DiTBlock(4)
      >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)), jnp.ones((2, 16)))[0].shape
      (2, 5, 32)

    Source: Peebles, Xie, "Scalable Diffusion Models with Transformers", 2022,
    https://arxiv.org/abs/2212.09748
    """

    num_heads: int
    hidden_features: int | None = None
    epsilon: float = 1e-6
    activation: str | None = "gelu_tanh"
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros
    modulation_init: Initializer = linen.initializers.zeros
    save: Save = "preactivation"
    implementation: Implementation | None = None
    attention_implementation: AttentionImplementation | None = None
    mlp_epsilon: float | None = None

    @linen.compact
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
        features = x.shape[-1]
        check_heads(features, self.num_heads)
        shared: dict[str, Any] = dict(
            use_bias=self.use_bias, param_dtype=self.param_dtype, bias_init=self.bias_init
        )
        layer: Callable[..., Any] = functools.partial(
            affine, precision=self.precision, kernel_init=self.kernel_init, **shared
        )
        modulation = Dense(
            CHUNKS * features,
            dtype=self.dtype,
            precision=self.precision,
            kernel_init=self.modulation_init,
            name="modulation",
            **shared,
        )(jax.nn.silu(condition))
        mlp = MLP(
            4 * features if self.hidden_features is None else self.hidden_features,
            activation=self.activation,
            dtype=self.dtype,
            precision=self.precision,
            kernel_init=self.kernel_init,
            save=self.save,
            implementation=self.implementation,
            name="mlp",
            **shared,
        )
        return dit_block(
            x,
            modulation,
            layer(3 * features, name="qkv")(features),
            layer(features, name="project")(features),
            mlp,
            residual=residual,
            gate=gate,
            num_heads=self.num_heads,
            epsilon=self.epsilon,
            mlp_epsilon=self.mlp_epsilon,
            mask=mask,
            dtype=self.dtype,
            precision=self.precision,
            implementation=self.implementation,
            attention_implementation=self.attention_implementation,
        )
