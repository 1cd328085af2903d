"""The perceptrons of a Transformer block for Flax Linen."""

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.fp8 import precision_of
from jaxfused.linen.linear import affine
from jaxfused.modules.attention import check_rate
from jaxfused.modules.mlp import check_layer_names, gated_mlp, mlp
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_number_fields


class _Perceptron(linen.Module):
    """Base of `MLP` and `GatedMLP`: their fields, and the call of their operator."""

    hidden_features: int
    out_features: int | None = None
    activation: str | None = "gelu_tanh"
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros
    down_kernel_init: Initializer | None = None
    down_bias_init: Initializer | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    layer_names: tuple[str, ...] = ("up", "down")
    save: Save = "preactivation"
    implementation: Implementation | None = None

    _is_gated: ClassVar[bool] = False

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        residual: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Applies the layers to x [..., D]; residual [..., E] is added last.

        Args:
          x: [..., D].
          residual: [..., E].
          deterministic: whether nothing is dropped; needed only where dropout_rate is not 0.

        Returns:
          [..., E], of the residual's dtype where there is one.
        """
        op = "gated_mlp" if self._is_gated else "mlp"
        check_layer_names(
            f"jaxfused.linen.{type(self).__name__}", self.layer_names, 2 + self._is_gated
        )
        dropout_key = self._dropout_key(deterministic)
        first = functools.partial(
            affine,
            precision=self.precision,
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        last = functools.partial(
            first,
            kernel_init=self.down_kernel_init or self.kernel_init,
            bias_init=self.down_bias_init or self.bias_init,
        )
        in_features, hidden = x.shape[-1], self.hidden_features
        out_features = in_features if self.out_features is None else self.out_features
        *names, down = self.layer_names
        run: Callable[..., jax.Array] = gated_mlp if self._is_gated else mlp
        return run(
            x,
            *(first(hidden, name=name)(in_features) for name in names),
            last(out_features, name=down)(hidden),
            dtype=self.dtype,
            activation=self.activation,
            residual=residual,
            save=self.save,
            precision=precision_of(self, op),
            implementation=self.implementation,
            dropout_rate=0.0 if dropout_key is None else self.dropout_rate,
            dropout_key=dropout_key,
        )

    def _dropout_key(self, deterministic: bool | None) -> jax.Array | None:
        """Returns the dropout key of a call, or None if nothing is dropped."""
        check_rate(f"jaxfused.linen.{type(self).__name__}", self.dropout_rate)
        if self.dropout_rate == 0.0 or linen.merge_param(
            "deterministic", self.deterministic, deterministic
        ):
            return None
        return self.make_rng("dropout")


@python_number_fields
class MLP(_Perceptron):
    r"""Two linear layers with an activation between them and a residual sum after them.

    .. math:: y = \text{activation}(x W_\text{up} + b_\text{up}) W_\text{down} + b_\text{down}
              + \text{residual}

    The parameters are those of a Flax module with two `Dense` called `up` and `down`, or as
    `layer_names` says. Kernels are partitioned as their initialisers say.

    Attributes:
      hidden_features: F.
      out_features: E, by default D.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      use_bias: whether the layers have biases.
      dtype: of the products and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the products, as in Flax, or "fp8" or "fp8_delayed".
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      down_kernel_init: initialises the kernel of `down`; None for kernel_init.
      down_bias_init: initialises the bias of `down`; None for bias_init.
      dropout_rate: the fraction of the hidden layer to drop in training, by the stream "dropout".
      deterministic: whether nothing is dropped, where the call does not say.
      layer_names: of the layers in the tree of parameters, such as ("Dense_0", "Dense_1") to load
        the checkpoint of a module whose two layers are anonymous `Dense`.
      save: what is kept for the backward: "hidden", "preactivation" or "inputs", as in
        `jaxfused.mlp`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> mlp = jaxfused.linen.MLP(32)
      >>> x = jnp.ones((2, 8))
      >>> mlp.apply(mlp.init(jax.random.key(0), x), x, residual=x).shape
      (2, 8)

    Source: `jaxfused.mlp`.
    """


@python_number_fields
class GatedMLP(_Perceptron):
    r"""The gated perceptron, SwiGLU by default, with a residual sum after it.

    .. math:: y = \bigl(\text{activation}(x W_\text{gate} + b_\text{gate}) \odot
              (x W_\text{up} + b_\text{up})\bigr) W_\text{down} + b_\text{down} + \text{residual}

    The parameters are those of a Flax module with `Dense` called `gate`, `up` and `down`, or as
    `layer_names` says.

    Attributes:
      hidden_features: F.
      out_features: E, by default D.
      activation: None or a name of `jaxfused.ACTIVATIONS`, of the gate.
      use_bias: whether the layers have biases.
      dtype: of the products and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the products, as in Flax, or "fp8" or "fp8_delayed".
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      down_kernel_init: initialises the kernel of `down`; None for kernel_init.
      down_bias_init: initialises the bias of `down`; None for bias_init.
      dropout_rate: the fraction of the hidden layer to drop in training, by the stream "dropout".
      deterministic: whether nothing is dropped, where the call does not say.
      layer_names: of the layers in the tree of parameters, such as ("Dense_0", "Dense_1", "Dense_2")
        to load the checkpoint of a module whose three layers are anonymous `Dense`.
      save: what is kept for the backward: "hidden", "preactivation" or "inputs", as in
        `jaxfused.gated_mlp`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> mlp = jaxfused.linen.GatedMLP(32)
      >>> x = jnp.ones((2, 8))
      >>> mlp.apply(mlp.init(jax.random.key(0), x), x, residual=x).shape
      (2, 8)

    Source: `jaxfused.gated_mlp`.
    """

    activation: str | None = "silu"
    use_bias: bool = False
    layer_names: tuple[str, ...] = ("gate", "up", "down")

    _is_gated: ClassVar[bool] = True
