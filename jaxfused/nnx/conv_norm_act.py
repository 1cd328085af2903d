"""Convolution, norm and activation as one layer of Flax NNX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike

from jaxfused.dispatch import Implementation
from jaxfused.modules.conv import Norm, check_norm, convolve, fold_norm
from jaxfused.modules.fallback import followed, why_intercepted
from jaxfused.modules.linear import promoted
from jaxfused.nnx.batch_norm import BatchNorm
from jaxfused.nnx.conv import Conv
from jaxfused.nnx.group_norm import GroupNorm
from jaxfused.ops.conv.conv_input import ConvInput, as_array
from jaxfused.runtime.checks import python_numbers
from jaxfused.runtime.rectified import Rectified, check_rectified


class ConvNormAct(nnx.Module):
    r"""A convolution without bias, a norm, the sum with a residual, and an activation.

    .. math:: y = \text{activation}(\text{norm}(\operatorname{conv}(x)) + \text{residual})

    What follows the convolution is one kernel. Where running averages normalise, they are folded
    into the convolution (`jaxfused.fold_batch_norm`), which is then all there is to run.

    The parameters are those of a Flax module with a `Conv` called `conv` and a norm called `norm`.

    Args:
      in_features: I.
      out_features: O.
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
      rngs: gives the initialisers their keys.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.ConvNormAct(
      ...     3, 8, (3, 3), norm="group_norm", num_groups=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 16, 16, 3))).shape
      (2, 16, 16, 8)

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
    https://arxiv.org/abs/1512.03385
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
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
        check_norm(norm)
        shared: dict[str, Any] = dict(
            dtype=dtype, param_dtype=param_dtype, rngs=rngs, implementation=implementation
        )
        self.conv = Conv(
            in_features,
            out_features,
            kernel_size,
            strides,
            padding=padding,
            kernel_dilation=kernel_dilation,
            feature_group_count=feature_group_count,
            use_bias=False,
            kernel_init=kernel_init,
            **shared,
        )
        self.activation = activation
        self.norm: BatchNorm | GroupNorm | None
        if norm == "batch_norm":
            self.norm = BatchNorm(
                out_features,
                use_running_average=use_running_average,
                momentum=momentum,
                epsilon=epsilon,
                axis_name=axis_name,
                activation=activation,
                **shared,
            )
        else:
            self.norm = GroupNorm(
                out_features, num_groups, epsilon=epsilon, activation=activation, **shared
            )

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

    def _apply(
        self,
        x: ConvInput,
        residual: jax.Array | None,
        use_running_average: bool | None,
        *,
        return_input: bool = False,
        mask_gradient: bool = True,
    ) -> tuple[jax.Array, jax.Array]:
        conv, norm = self.conv, self.norm
        if why_intercepted() is not None:
            return self._one_by_one(as_array(x), residual, use_running_average)
        after: dict[str, Any] = dict(residual=residual, mask_gradient=mask_gradient)
        if isinstance(norm, BatchNorm):
            if use_running_average is None:
                use_running_average = norm.use_running_average
            if use_running_average:
                folded = _folded(conv.kernel.get_value(), norm)
                return self._convolve(x, *folded, residual, return_input)
            after["use_running_average"] = use_running_average
        if norm is None:
            assert conv.bias is not None
            kernel = conv.kernel.get_value()
            return self._convolve(x, kernel, conv.bias[...], residual, return_input)
        wanted = isinstance(norm, BatchNorm) and norm.axis_name is None
        y, x, statistics = conv._run(x, return_input=return_input, statistics=wanted)
        if statistics is not None:
            after["statistics"] = statistics
        return norm._run(y, **after), x

    def _one_by_one(
        self, x: jax.Array, residual: jax.Array | None, use_running_average: bool | None
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the layers one by one, because the convolution's product is intercepted.

        The norm masks its gradient, even if its reader does too.
        """
        y, norm = self.conv(x), self.norm
        if norm is None:
            return followed(y, self.activation, residual, adds_first=True), x
        if isinstance(norm, BatchNorm):
            return norm(y, use_running_average, residual=residual), x
        return norm(y, residual=residual), x

    def fold(self) -> None:
        """Folds the batch norm with its running averages into the convolution, permanently.

        The layer has no `norm` then, and its convolution has a bias. A call does the same as one with
        `use_running_average`, without folding anew. A layer with group norm stays as it is.
        """
        if isinstance(self.norm, BatchNorm):
            kernel, bias = _folded(self.conv.kernel.get_value(), self.norm)
            self.conv.kernel.set_value(kernel)
            self.conv.bias = nnx.Param(bias)
            self.norm = nnx.data(None)

    def _convolve(
        self,
        x: ConvInput,
        kernel: Any,
        bias: jax.Array,
        residual: jax.Array | None,
        return_input: bool,
    ) -> tuple[jax.Array, jax.Array]:
        conv = self.conv
        return convolve(
            x,
            kernel,
            bias,
            kernel_size=conv.kernel_size,
            strides=conv.strides,
            padding=conv.padding,
            input_dilation=1,
            kernel_dilation=conv.kernel_dilation,
            feature_group_count=conv.feature_group_count,
            activation=self.activation,
            residual=residual,
            implementation=conv.implementation,
            dtype=promoted(as_array(x), kernel, dtype=conv.dtype).dtype,
            return_input=return_input,
        )[:2]


def _folded(kernel: Any, norm: BatchNorm) -> tuple[Any, jax.Array]:
    scale, bias = norm.scale, norm.bias
    assert scale is not None and bias is not None
    return fold_norm(
        kernel,
        mean=norm.mean[...],
        var=norm.var[...],
        norm_scale=scale[...],
        norm_bias=bias[...],
        epsilon=norm.epsilon,
    )


def fold_batch_norms(model: nnx.Module) -> None:
    """Folds the batch norms of all `ConvNormAct` layers of a model into their convolutions, for good.

    The model then answers, and is not trained any more.

    Args:
      model: is changed in place.

    Example:
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> block = jaxfused.nnx.ResNetBlock(8, 8, rngs=nnx.Rngs(0))
      >>> jaxfused.nnx.fold_batch_norms(block)
      >>> block.layer1.norm is None
      True
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ConvNormAct):
            module.fold()
