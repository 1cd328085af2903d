"""The block of a ConvNeXt for Flax NNX: depthwise convolution, norm, and a perceptron with its sum."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer

from jaxfused.dispatch import Implementation
from jaxfused.modules.convnext_block import scaled_mlp
from jaxfused.modules.transformer_block import check_rates
from jaxfused.nnx.conv import Conv
from jaxfused.nnx.layer_norm import LayerNorm
from jaxfused.nnx.linear import affine
from jaxfused.nnx.mlp import MLP
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_numbers


class ConvNeXtBlock(nnx.Module):
    r"""A depthwise convolution, a LayerNorm and a perceptron, added to the block's input.

    .. math:: y = x + \text{layer\_scale} \odot \text{mlp}(\text{norm}(\operatorname{conv}(x)))

    Where no path is dropped, the perceptron's kernel adds x, and the scale is a part of its parameters.

    Parameters: `conv`, `norm`, `mlp` with `up` and `down`, and `layer_scale` [D].

    Args:
      features: D.
      kernel_size: of the convolution.
      hidden_features: of the perceptron, by default 4 D.
      layer_scale: the first value of the scale; None for no scale.
      drop_path_rate: the fraction of examples whose branch to drop in training.
      epsilon: of the norm.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      dtype: of the products and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      save: what the perceptron keeps for its backward, as in `jaxfused.mlp`.
      rngs: gives the initialisers their keys, and `drop_path_rate` where it is used.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> block = jaxfused.nnx.ConvNeXtBlock(8, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((2, 14, 14, 8))).shape
      (2, 14, 14, 8)

    Source: Liu et al., "A ConvNet for the 2020s", 2022, https://arxiv.org/abs/2201.03545
    """

    @python_numbers
    def __init__(
        self,
        features: int,
        *,
        kernel_size: int | Sequence[int] = (7, 7),
        hidden_features: int | None = None,
        layer_scale: float | None = 1e-6,
        drop_path_rate: float = 0.0,
        epsilon: float = 1e-6,
        activation: str | None = "gelu_erf",
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        save: Save = "preactivation",
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        check_rates(drop_path_rate=drop_path_rate)
        shared: dict[str, Any] = dict(
            dtype=dtype, param_dtype=param_dtype, rngs=rngs, implementation=implementation
        )
        layer: dict[str, Any] = dict(kernel_init=kernel_init, bias_init=bias_init, **shared)
        self.conv = Conv(features, features, kernel_size, feature_group_count=features, **layer)
        self.norm = LayerNorm(features, epsilon=epsilon, **shared)
        hidden_features = 4 * features if hidden_features is None else hidden_features
        self.mlp = MLP(features, hidden_features, activation=activation, save=save, **layer)
        self.layer_scale = nnx.data(None)
        if layer_scale is not None:
            self.layer_scale = nnx.Param(jnp.full(features, layer_scale, param_dtype))
        # A dropped path is 0 for all pixels and features of an example.
        self.drop_path = nnx.Dropout(
            drop_path_rate, broadcast_dims=(-3, -2, -1), rngs=rngs if drop_path_rate > 0 else None
        )

    def __call__(
        self,
        x: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | jax.Array | None = None,
    ) -> jax.Array:
        """Applies the block to x.

        Args:
          x: [..., H, W, D].
          deterministic: whether no path is dropped; by default what `train` and `eval` set.
          rngs: chooses the paths, in place of what the constructor was given.

        Returns:
          [..., H, W, D] of x's dtype.
        """
        if deterministic is None:
            deterministic = self.drop_path.deterministic
        drop = None
        if self.drop_path.rate > 0 and not deterministic:
            drop = functools.partial(self.drop_path, deterministic=False, rngs=rngs)
        mlp = self.mlp
        y, x, _ = self.conv._run(x, return_input=True)
        return scaled_mlp(
            self.norm(y),
            affine(mlp.up),
            affine(mlp.down),
            None if self.layer_scale is None else self.layer_scale[...],
            x,
            drop=drop,
            dtype=mlp.dtype,
            activation=mlp.activation,
            save=mlp.save,
            precision=mlp.precision,
            implementation=mlp.implementation,
        )
