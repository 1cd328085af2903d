"""The perceptrons of a Transformer block for Flax NNX."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.modules.attention import check_rate
from jaxfused.modules.mlp import check_layer_names, gated_mlp, mlp
from jaxfused.nnx.fp8 import history_for, precision_of
from jaxfused.nnx.linear import Linear, affine
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_numbers


def _add_layers(
    module: "MLP | GatedMLP",
    sizes: tuple[int, int, int | None],
    linear: Callable[..., Linear],
    first: Mapping[str, Any],
    last: Mapping[str, Any],
) -> None:
    """Sets a module's linear layers as the attributes `layer_names`; the layer to the result is last.

    Args:
      module: the module, which has its `layer_names`.
      sizes: features of x, of the hidden layer, and of the result; None stands for those of x.
      linear: makes a layer.
      first: its options for the layers to the hidden features.
      last: its options for the last layer; None stands for the option in `first`.
    """
    features, hidden_features, out_features = sizes
    *names, down = module.layer_names
    for name in names:
        setattr(module, name, linear(features, hidden_features, **first))
    given = {key: value for key, value in last.items() if value is not None}
    out_features = features if out_features is None else out_features
    setattr(module, down, linear(hidden_features, out_features, **{**first, **given}))


class _Perceptron(nnx.Module):
    """Base of `MLP` and `GatedMLP`, which calls their operator with the parameters of their layers."""

    _operator: ClassVar[Callable[..., jax.Array]]
    layer_names: tuple[str, ...]
    activation: str | None
    dtype: Dtype | None
    dropout_rate: float
    deterministic: bool | None
    rngs: nnx.RngStream | None
    save: Save
    implementation: Implementation | None

    def __call__(
        self,
        x: jax.Array,
        *,
        residual: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> jax.Array:
        """Applies the layers to x [..., D]; residual [..., E] is added last.

        Args:
          x: [..., D].
          residual: [..., E].
          deterministic: whether nothing is dropped; needed only where dropout_rate is not 0.
          rngs: give dropout its key, in place of those of the constructor.

        Returns:
          [..., E], of the residual's dtype where there is one.
        """
        dropout_key = self._dropout_key(deterministic, rngs)
        return type(self)._operator(
            x,
            *(affine(getattr(self, name)) for name in self.layer_names),
            dtype=self.dtype,
            activation=self.activation,
            residual=residual,
            save=self.save,
            precision=precision_of(self),
            implementation=self.implementation,
            dropout_rate=0.0 if dropout_key is None else self.dropout_rate,
            dropout_key=dropout_key,
        )

    def _dropout_key(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> jax.Array | None:
        """Returns the dropout key of a call, or None if nothing is dropped."""
        if self.dropout_rate == 0.0:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"jaxfused.nnx.{type(self).__name__}: dropout_rate is {self.dropout_rate}, but nothing"
                " says whether to drop; pass deterministic."
            )
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        stream = self.rngs if stream is None else stream
        return None if deterministic or stream is None else stream()


class MLP(_Perceptron):
    r"""Two linear layers with an activation between them and a residual sum after them.

    .. math:: y = \text{activation}(x W_\text{up} + b_\text{up}) W_\text{down} + b_\text{down}
              + \text{residual}

    The parameters are those of a Flax module with two linear layers called `up` and `down`, or as
    `layer_names` says.

    Args:
      in_features: D.
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
      kernel_metadata: of the kernels' `nnx.Param`.
      bias_metadata: of the biases' `nnx.Param`.
      down_kernel_metadata: of the kernel of `down`; None for kernel_metadata.
      down_bias_metadata: of the bias of `down`; None for bias_metadata.
      dropout_rate: the fraction of the hidden layer to drop in training.
      deterministic: whether nothing is dropped, where the call does not say.
      layer_names: of the attributes that hold the layers, such as ("fc1", "fc2") to load the
        checkpoint of a module with those names.
      save: what is kept for the backward: "hidden", "preactivation" or "inputs", as in
        `jaxfused.mlp`.
      rngs: gives the initialisers their keys, and dropout where it is used.
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

    _operator = staticmethod(mlp)
    # The default names; `layer_names` may give others.
    up: Linear
    down: Linear

    @python_numbers
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
        down_kernel_init: Initializer | None = None,
        down_bias_init: Initializer | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        down_kernel_metadata: Mapping[str, Any] | None = None,
        down_bias_metadata: Mapping[str, Any] | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        layer_names: tuple[str, ...] = ("up", "down"),
        save: Save = "preactivation",
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        check_layer_names("jaxfused.nnx.MLP", layer_names, 2)
        check_rate("jaxfused.nnx.MLP", dropout_rate)
        first: dict[str, Any] = dict(kernel_init=kernel_init, bias_init=bias_init)
        first |= dict(kernel_metadata=kernel_metadata, bias_metadata=bias_metadata)
        last: dict[str, Any] = dict(kernel_init=down_kernel_init, bias_init=down_bias_init)
        last |= dict(kernel_metadata=down_kernel_metadata, bias_metadata=down_bias_metadata)
        self.layer_names = tuple(layer_names)
        _add_layers(
            self,
            (in_features, hidden_features, out_features),
            functools.partial(Linear, use_bias=use_bias, param_dtype=param_dtype, rngs=rngs),
            first,
            last,
        )
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else None
        self.activation = activation
        self.dtype = dtype
        self.precision = precision
        self.fp8_history = history_for(precision, "mlp")
        self.save = save
        self.implementation = implementation


class GatedMLP(_Perceptron):
    r"""The gated perceptron, SwiGLU by default, with a residual sum after it.

    .. math:: y = \bigl(\text{activation}(x W_\text{gate} + b_\text{gate}) \odot
              (x W_\text{up} + b_\text{up})\bigr) W_\text{down} + b_\text{down} + \text{residual}

    The parameters are those of a Flax module with linear layers called `gate`, `up` and `down`, or as
    `layer_names` says.

    Args:
      in_features: D.
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
      kernel_metadata: of the kernels' `nnx.Param`.
      bias_metadata: of the biases' `nnx.Param`.
      down_kernel_metadata: of the kernel of `down`; None for kernel_metadata.
      down_bias_metadata: of the bias of `down`; None for bias_metadata.
      dropout_rate: the fraction of the hidden layer to drop in training.
      deterministic: whether nothing is dropped, where the call does not say.
      layer_names: of the attributes that hold the layers, such as ("w1", "w3", "w2") to load the
        checkpoint of a module with those names.
      save: what is kept for the backward: "hidden", "preactivation" or "inputs", as in
        `jaxfused.gated_mlp`.
      rngs: gives the initialisers their keys, and dropout where it is used.
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

    _operator = staticmethod(gated_mlp)
    # The default names; `layer_names` may give others.
    gate: Linear
    up: Linear
    down: Linear

    @python_numbers
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
        down_kernel_init: Initializer | None = None,
        down_bias_init: Initializer | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        down_kernel_metadata: Mapping[str, Any] | None = None,
        down_bias_metadata: Mapping[str, Any] | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        layer_names: tuple[str, ...] = ("gate", "up", "down"),
        save: Save = "preactivation",
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        check_layer_names("jaxfused.nnx.GatedMLP", layer_names, 3)
        check_rate("jaxfused.nnx.GatedMLP", dropout_rate)
        first: dict[str, Any] = dict(kernel_init=kernel_init, bias_init=bias_init)
        first |= dict(kernel_metadata=kernel_metadata, bias_metadata=bias_metadata)
        last: dict[str, Any] = dict(kernel_init=down_kernel_init, bias_init=down_bias_init)
        last |= dict(kernel_metadata=down_kernel_metadata, bias_metadata=down_bias_metadata)
        self.layer_names = tuple(layer_names)
        _add_layers(
            self,
            (in_features, hidden_features, out_features),
            functools.partial(Linear, use_bias=use_bias, param_dtype=param_dtype, rngs=rngs),
            first,
            last,
        )
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else None
        self.activation = activation
        self.dtype = dtype
        self.precision = precision
        self.fp8_history = history_for(precision, "gated_mlp")
        self.save = save
        self.implementation = implementation
