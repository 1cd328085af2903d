"""The block of a ConvNeXt for Flax Linen: depthwise convolution, norm, and a perceptron with its sum."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer

from jaxfused.dispatch import Implementation
from jaxfused.linen.conv import Conv
from jaxfused.linen.flax_code import why_watched
from jaxfused.linen.layer_norm import LayerNorm
from jaxfused.linen.linear import Affine
from jaxfused.linen.mlp import MLP
from jaxfused.modules.convnext_block import scaled_mlp, scaled_sum
from jaxfused.modules.mlp import Layer
from jaxfused.modules.transformer_block import check_rates
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class ConvNeXtBlock(linen.Module):
    r"""A depthwise convolution, a LayerNorm and a perceptron, added to the block's input.

    .. math:: y = x + \text{layer\_scale} \odot \text{mlp}(\text{norm}(\operatorname{conv}(x)))

    Where no path is dropped, the perceptron's kernel adds x, and the scale is a part of its parameters.

    Parameters: `conv`, `norm`, `mlp` with `up` and `down`, and `layer_scale` [D].

    Attributes:
      kernel_size: of the convolution.
      hidden_features: of the perceptron, by default 4 D.
      layer_scale: the first value of the scale; None for no scale.
      drop_path_rate: the fraction of examples whose branch to drop in training.
      deterministic: whether no path is dropped; or say so in the call.
      epsilon: of the norm.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      dtype: of the products and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      save: what the perceptron keeps for its backward, as in `jaxfused.mlp`.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> block = jaxfused.linen.ConvNeXtBlock()
      >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 14, 14, 8)))[0].shape
      (2, 14, 14, 8)

    Source: Liu et al., "A ConvNet for the 2020s", 2022, https://arxiv.org/abs/2201.03545
    """

    kernel_size: int | Sequence[int] = (7, 7)
    hidden_features: int | None = None
    layer_scale: float | None = 1e-6
    drop_path_rate: float = 0.0
    deterministic: bool | None = None
    epsilon: float = 1e-6
    activation: str | None = "gelu_erf"
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros
    save: Save = "preactivation"
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Applies the block to x; dropping takes its keys from the stream "dropout".

        Args:
          x: [..., H, W, D].
          deterministic: whether no path is dropped; by default what the attribute says.

        Returns:
          [..., H, W, D] of x's dtype.
        """
        check_rates(drop_path_rate=self.drop_path_rate)
        features = x.shape[-1]
        shared: dict[str, Any] = dict(
            dtype=self.dtype, param_dtype=self.param_dtype, implementation=self.implementation
        )
        initialisers: dict[str, Any] = dict(kernel_init=self.kernel_init, bias_init=self.bias_init)
        conv = Conv(
            features,
            self.kernel_size,
            feature_group_count=features,
            **initialisers,
            **shared,
            name="conv",
        )
        y, x, _ = conv._run(x, return_input=True)
        normalised = LayerNorm(epsilon=self.epsilon, **shared, name="norm")(y)
        hidden = 4 * features if self.hidden_features is None else self.hidden_features
        scale = None
        if self.layer_scale is not None:
            ones = linen.initializers.constant(self.layer_scale)
            scale = self.param("layer_scale", ones, (features,), self.param_dtype)
        drop = None
        if self.drop_path_rate > 0 and not linen.merge_param(
            "deterministic", self.deterministic, deterministic
        ):
            # A dropped path is 0 for all pixels and features of an example.
            path = linen.Dropout(self.drop_path_rate, broadcast_dims=(-3, -2, -1))
            drop = functools.partial(path, deterministic=False)
        if why_watched() is not None:
            assert isinstance(normalised, jax.Array)
            mlp = MLP(hidden, activation=self.activation, **initialisers, **shared, name="mlp")
            return scaled_sum(mlp(normalised), scale, x, drop)
        up, down = _Layers(features, hidden, self.param_dtype, **initialisers, name="mlp").layers()
        return scaled_mlp(
            normalised,
            up,
            down,
            scale,
            x,
            drop=drop,
            dtype=self.dtype,
            activation=self.activation,
            save=self.save,
            precision=None,
            implementation=self.implementation,
        )


@python_number_fields
class _Layers(linen.Module):
    """The parameters of the block's two linear layers, for one operator to read."""

    features: int
    hidden_features: int
    param_dtype: Dtype
    kernel_init: Initializer
    bias_init: Initializer

    @linen.compact
    def layers(self) -> tuple[Layer, Layer]:
        affine = functools.partial(
            Affine,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        return (
            affine(self.hidden_features, name="up").parameters(self.features),
            affine(self.features, name="down").parameters(self.hidden_features),
        )
