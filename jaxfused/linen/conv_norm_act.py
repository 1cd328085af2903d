"""Convolution, norm and activation as one layer of Flax Linen."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.core import meta
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.batch_norm import BatchNorm
from jaxfused.linen.conv import Conv
from jaxfused.linen.flax_code import why_watched
from jaxfused.linen.group_norm import GroupNorm
from jaxfused.modules.conv import Norm, check_norm, convolve, fold_norm
from jaxfused.modules.linear import promoted
from jaxfused.ops.conv.conv_input import ConvInput, as_array
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.rectified import Rectified, check_rectified


@python_number_fields
class ConvNormAct(linen.Module):
    r"""A convolution without bias, a norm, the sum with a residual, and an activation.

    .. math:: y = \text{activation}(\text{norm}(\operatorname{conv}(x)) + \text{residual})

    What follows the convolution is one kernel. Where running averages normalise, they are folded
    into the convolution (`jaxfused.fold_batch_norm`), which is then all there is to run.

    The parameters are those of a Flax module with a `Conv` called `conv` and a norm called `norm`.

    Attributes:
      features: O.
      kernel_size: of every spatial axis.
      strides: as in Flax, and so are the next three.
      padding: as in Flax.
      kernel_dilation: as in Flax.
      feature_group_count: as in Flax.
      norm: "batch_norm" or "group_norm".
      num_groups: of the group norm.
      use_running_average: of the batch norm, as in Flax.
      momentum: of the batch norm, as in Flax.
      epsilon: is added to the variance.
      axis_name: of the batch norm, as in Flax.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      dtype: of the convolution and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initialises the kernel.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.ConvNormAct(8, (3, 3), norm="group_norm", num_groups=2)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 16, 16, 3)))[0].shape
      (2, 16, 16, 8)

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
    https://arxiv.org/abs/1512.03385
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] | None = 1
    padding: PaddingLike = "SAME"
    kernel_dilation: int | Sequence[int] | None = 1
    feature_group_count: int = 1
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

    def __call__(
        self,
        x: ConvInput,
        *,
        residual: jax.Array | None = None,
        use_running_average: bool | None = None,
    ) -> jax.Array:
        """Applies the layer to x [..., *spatial, I].

        Args:
          x: [..., *spatial, I].
          residual: of the result's shape, is added before the activation.
          use_running_average: of the batch norm, as in Flax.

        Returns:
          [..., *spatial', O].
        """
        return self._apply(x, residual, use_running_average)[0]

    def _forked(
        self, x: ConvInput, *, use_running_average: bool | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (y, x), for a block whose shortcut reads this x instead of its own.

        The convolution's backward adds the gradient of the returned x to its own.
        """
        return self._apply(x, None, use_running_average, return_input=True)

    def _rectified(
        self,
        x: ConvInput,
        *,
        residual: jax.Array | None = None,
        use_running_average: bool | None = None,
    ) -> Rectified:
        """Applies the layer with a relu, whose mask the layers that read y apply to its gradient."""
        check_rectified("ResNetBlock", self.activation)
        y, _ = self._apply(x, residual, use_running_average, mask_gradient=False)
        return Rectified(y)

    @linen.compact
    def _apply(
        self,
        x: ConvInput,
        residual: jax.Array | None,
        use_running_average: bool | None,
        *,
        return_input: bool = False,
        mask_gradient: bool = True,
    ) -> tuple[jax.Array, jax.Array]:
        check_norm(self.norm)
        geometry: dict[str, Any] = dict(
            strides=self.strides,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
            implementation=self.implementation,
        )
        shared: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        conv = Conv(
            self.features,
            self.kernel_size,
            use_bias=False,
            kernel_init=self.kernel_init,
            **geometry,
            **shared,
            name="conv",
        )
        after: dict[str, Any] = dict(
            epsilon=self.epsilon,
            activation=self.activation,
            implementation=self.implementation,
            **shared,
            name="norm",
        )
        watched = why_watched() is not None
        if self.norm == "group_norm":
            if watched:
                inputs = as_array(x)
                return GroupNorm(self.num_groups, **after)(conv(inputs), residual=residual), inputs
            y, x, _ = conv._run(x, return_input=return_input)
            return GroupNorm(self.num_groups, **after)(y, residual=residual), x
        use_running_average = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        if not use_running_average or self.is_initializing() or watched:
            norm = BatchNorm(
                use_running_average, momentum=self.momentum, axis_name=self.axis_name, **after
            )
            if watched:
                inputs = as_array(x)
                return norm(conv(inputs), residual=residual), inputs
            y, x, statistics = conv._run(
                x,
                return_input=return_input,
                statistics=self.axis_name is None and not use_running_average,
            )
            y = norm._run(y, residual=residual, mask_gradient=mask_gradient, statistics=statistics)
            return y, x
        variables = meta.unbox(self.variables)
        params, statistics = variables["params"], variables["batch_stats"]["norm"]
        kernel = params["conv"]["kernel"]
        return convolve(
            x,
            *fold_norm(
                kernel,
                mean=statistics["mean"],
                var=statistics["var"],
                norm_scale=params["norm"]["scale"],
                norm_bias=params["norm"]["bias"],
                epsilon=self.epsilon,
            ),
            kernel_size=self.kernel_size,
            input_dilation=1,
            activation=self.activation,
            residual=residual,
            dtype=promoted(as_array(x), kernel, dtype=self.dtype).dtype,
            return_input=return_input,
            **geometry,
        )[:2]
