"""The blocks of a ResNet for Flax NNX: convolutions with norms, and the sum in the last one's kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike

from jaxfused.dispatch import Implementation
from jaxfused.modules.conv import Norm
from jaxfused.modules.resnet_block import needs_shortcut, widths
from jaxfused.nnx.conv_norm_act import ConvNormAct
from jaxfused.runtime.checks import python_numbers
from jaxfused.runtime.rectified import Rectified


class ResNetBlock(nnx.Module):
    r"""Convolutions with norms, added to the block's input before the last activation.

    .. math:: y = \text{activation}(\text{norm}(\operatorname{conv}(\dots)) + \text{shortcut}(x))

    A bottleneck has convolutions of 1 x 1, 3 x 3 and 1 x 1, the last of which makes four times as many
    features; otherwise there are two of 3 x 3. The one of 3 x 3 that comes first takes the strides. The
    shortcut is the identity where it can be, else a convolution of 1 x 1 with a norm.

    Parameters: `layer1`, `layer2`, `layer3` in a bottleneck, and `shortcut` where there is one, all of
    `ConvNormAct`.

    Args:
      in_features: I.
      features: F; a bottleneck returns 4 F.
      strides: 1 or 2, say.
      padding: of the windows of 3 x 3, as in Flax. Blocks of torch have 1, which is not "SAME" where
        strides of 2 halve an even size.
      bottleneck: which of the two.
      norm: "batch_norm" or "group_norm".
      num_groups: of the group norms.
      use_running_average: of the batch norms, as in Flax, and so are the next three.
      momentum: as in Flax.
      epsilon: is added to the variance.
      axis_name: as in Flax.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      dtype: of the convolutions and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initialises the kernels.
      rngs: gives the initialisers their keys.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> block = jaxfused.nnx.ResNetBlock(8, 4, strides=2, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((2, 14, 14, 8))).shape
      (2, 7, 7, 16)

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
    https://arxiv.org/abs/1512.03385; with the strides in the 3 x 3, as most libraries have it
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        strides: int = 1,
        padding: PaddingLike = "SAME",
        bottleneck: bool = True,
        norm: Norm = "batch_norm",
        num_groups: int = 32,
        use_running_average: bool | None = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        axis_name: str | None = None,
        activation: str | None = "relu",
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        shared: dict[str, Any] = dict(
            norm=norm,
            num_groups=num_groups,
            use_running_average=use_running_average,
            momentum=momentum,
            epsilon=epsilon,
            axis_name=axis_name,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
            implementation=implementation,
        )
        names = ("layer1", "layer2", "layer3")
        before = in_features
        for name, (width, size, step, around) in zip(
            names, widths(features, strides, padding, bottleneck=bottleneck), strict=False
        ):
            layer = ConvNormAct(
                before, width, size, step, padding=around, activation=activation, **shared
            )
            setattr(self, name, layer)
            before = width
        self.shortcut = nnx.data(None)
        if needs_shortcut(in_features, before, strides):
            self.shortcut = ConvNormAct(
                in_features, before, (1, 1), strides, activation=None, **shared
            )
        self.layers = 3 if bottleneck else 2

    def __call__(
        self, x: jax.Array | Rectified, *, use_running_average: bool | None = None
    ) -> jax.Array:
        """Applies the block to x [..., H, W, I].

        Args:
          x: [..., H, W, I].
          use_running_average: of the batch norms, as in Flax.

        Returns:
          [..., H / strides, W / strides, F], or 4 F of a bottleneck.
        """
        x, after = self._until_last(x, use_running_average)
        return getattr(self, f"layer{self.layers}")(x, **after)

    def rectified(
        self, x: jax.Array | Rectified, *, use_running_average: bool | None = None
    ) -> Rectified:
        """Applies the block, whose activation is relu, for another block to read its result.

        The gradients that meet at the result are then added and masked by one kernel of the next block,
        where the sum of gradients and its mask are a pass over memory otherwise.

        Args:
          x: [..., H, W, I].
          use_running_average: of the batch norms, as in Flax.

        Returns:
          What a call returns, for the next block alone; other code reads its `array()`.

        Raises:
          ValueError: the activation is another one.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> import jaxfused.nnx
          >>> blocks = [jaxfused.nnx.ResNetBlock(16, 4, rngs=nnx.Rngs(i)) for i in range(2)]
          >>> x = jnp.ones((2, 7, 7, 16))
          >>> for block in blocks:
          ...     x = block.rectified(x)
          >>> x.array().shape
          (2, 7, 7, 16)
        """
        x, after = self._until_last(x, use_running_average)
        return getattr(self, f"layer{self.layers}")._rectified(x, **after)

    def _until_last(
        self, x: jax.Array | Rectified, use_running_average: bool | None
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the last layer's input, and the arguments of its call."""
        options: dict[str, Any] = dict(use_running_average=use_running_average)
        first, *inner = (getattr(self, f"layer{index}") for index in range(1, self.layers))
        y, residual = first._forked(x, **options)
        if self.shortcut is not None:
            residual = self.shortcut(residual, **options)
        for layer in inner:
            y = layer(y, **options)
        return y, dict(residual=residual, **options)
