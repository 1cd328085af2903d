"""The blocks of a ResNet for Flax Linen: convolutions with norms, and the sum in the last kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.conv_norm_act import ConvNormAct
from jaxfused.modules.conv import Norm
from jaxfused.modules.resnet_block import needs_shortcut, widths
from jaxfused.ops.conv.conv_input import as_array
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.rectified import Rectified


@python_number_fields
class ResNetBlock(linen.Module):
    r"""Convolutions with norms, added to the block's input before the last activation.

    .. math:: y = \text{activation}(\text{norm}(\operatorname{conv}(\dots)) + \text{shortcut}(x))

    A bottleneck has convolutions of 1 x 1, 3 x 3 and 1 x 1, the last of which makes four times as many
    features; otherwise there are two of 3 x 3. The one of 3 x 3 that comes first takes the strides. The
    shortcut is the identity where it can be, else a convolution of 1 x 1 with a norm.

    Parameters: `layer1`, `layer2`, `layer3` in a bottleneck, and `shortcut` where there is one, all of
    `ConvNormAct`.

    Attributes:
      features: F; a bottleneck returns 4 F.
      strides: 1 or 2, say.
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
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".
      padding: of the windows of 3 x 3, as in Flax. Blocks of torch have 1, which is not "SAME" where
        strides of 2 halve an even size.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> block = jaxfused.linen.ResNetBlock(4, strides=2, use_running_average=False)
      >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 14, 14, 8)))[0].shape
      (2, 7, 7, 16)

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
    https://arxiv.org/abs/1512.03385; with the strides in the 3 x 3, as most libraries have it
    """

    features: int
    strides: int = 1
    bottleneck: bool = True
    norm: Norm = "batch_norm"
    num_groups: int = 32
    use_running_average: bool | None = None
    momentum: float = 0.99
    epsilon: float = 1e-5
    axis_name: str | None = None
    activation: str | None = "relu"
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    implementation: Implementation | None = None
    padding: PaddingLike = "SAME"

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
        return as_array(self._apply(x, use_running_average))

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
          >>> import jax, jax.numpy as jnp
          >>> from flax import linen
          >>> import jaxfused.linen
          >>> class Stage(linen.Module):
          ...     @linen.compact
          ...     def __call__(self, x):
          ...         for _ in range(2):
          ...             x = jaxfused.linen.ResNetBlock(4, use_running_average=False).rectified(x)
          ...         return x.array()
          >>> Stage().init_with_output(jax.random.key(0), jnp.ones((2, 7, 7, 16)))[0].shape
          (2, 7, 7, 16)
        """
        y = self._apply(x, use_running_average, rectified=True)
        assert isinstance(y, Rectified)
        return y

    @linen.compact
    def _apply(
        self,
        x: jax.Array | Rectified,
        use_running_average: bool | None,
        *,
        rectified: bool = False,
    ) -> jax.Array | Rectified:
        shared: dict[str, Any] = dict(
            norm=self.norm,
            num_groups=self.num_groups,
            use_running_average=self.use_running_average,
            momentum=self.momentum,
            epsilon=self.epsilon,
            axis_name=self.axis_name,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            implementation=self.implementation,
        )
        options: dict[str, Any] = dict(use_running_average=use_running_average)
        layers = widths(self.features, self.strides, self.padding, bottleneck=self.bottleneck)
        names = [f"layer{index}" for index in range(1, len(layers) + 1)]
        first, *inner, last = (
            ConvNormAct(
                width, size, step, padding=around, activation=self.activation, **shared, name=name
            )
            for name, (width, size, step, around) in zip(names, layers, strict=True)
        )
        needs = needs_shortcut(x.shape[-1], layers[-1][0], self.strides)
        y, residual = first._forked(x, **options)
        if needs:
            shortcut = ConvNormAct(
                layers[-1][0], (1, 1), self.strides, activation=None, **shared, name="shortcut"
            )
            residual = shortcut(residual, **options)
        for layer in inner:
            y = layer(y, **options)
        call = last._rectified if rectified else last
        return call(y, residual=residual, **options)
