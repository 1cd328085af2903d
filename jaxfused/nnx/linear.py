"""Linear for Flax NNX: Flax's own parameters, this package's operator."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import (
    call_flax,
    changes_dtype,
    is_stock_product,
    resharded,
    why_complex,
    why_given,
    why_intercepted,
    why_sharded,
)
from jaxfused.modules.linear import CalledKernel, Kernel, LoRAKernel, linear, promoted
from jaxfused.nnx.fp8 import history_for, precision_of
from jaxfused.nnx.quantized_linear import QuantizedLinear
from jaxfused.runtime.checks import python_numbers


class Linear(nnx.Linear):
    r"""`flax.nnx.Linear` with an activation and the sum with a residual stream in the same kernel.

    .. math:: y = \text{activation}(x \cdot \text{kernel} + \text{bias}) + \text{residual}

    Constructor, parameters, their names and the use of `rngs` are Flax's, so a checkpoint of one
    loads into the other and gives the same output. Differences:

    - The product is accumulated and the bias added in float32, and so is the parameters' gradient;
      each is rounded once, where Flax rounds the product, then the sum.
    - A `dot_general`, `promote_dtype` or `preferred_element_type` other than Flax's, `out_sharding`
      where no mesh axis is Explicit, and complex numbers run Flax's code. Together with `residual` or
      a named kernel such a call raises an error.

    Args:
      in_features: D.
      out_features: F.
      use_bias: whether there is a bias [F].
      dtype: of the product and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the product, as in Flax.
      kernel_init: initialises the kernel [D, F].
      bias_init: initialises the bias.
      dot_general: as in Flax.
      promote_dtype: as in Flax.
      preferred_element_type: as in Flax.
      rngs: gives the initialisers their keys.
      kernel_metadata: of the kernel's `nnx.Param`.
      bias_metadata: of the bias's `nnx.Param`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.Linear(2, 3, activation="relu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 2)), residual=jnp.ones((4, 3))).shape
      (4, 3)

    Source: `jaxfused.linear`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: DotGeneralT = jax.lax.dot_general,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        activation: str | None = None,
        implementation: Implementation | None = None,
    ):
        super().__init__(
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            dot_general=dot_general,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.activation = activation
        self.implementation = implementation
        self.fp8_history = history_for(precision, "linear")

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Multiplies inputs [..., D] by the kernel.

        Args:
          inputs: [..., D].
          out_sharding: as in Flax.
          residual: [..., F], is added last.

        Returns:
          [..., F], of the residual's dtype where there is one.

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        inputs = jnp.asarray(inputs)
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        preferred = self.preferred_element_type
        reason = (
            why_intercepted()
            or why_given(
                dot_general=not is_stock_product(self.dot_general),
                promote_dtype=self.promote_dtype is not dtypes.promote_dtype,
                preferred_element_type=changes_dtype(
                    preferred, inputs, kernel, bias, dtype=self.dtype
                ),
            )
            or why_sharded(out_sharding, inputs, kernel)
            or why_complex(inputs.dtype, self.dtype, kernel.dtype)
        )
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.Linear",
                reason,
                lambda: super(Linear, self).__call__(inputs, out_sharding),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
            )
        y = linear(
            promoted(inputs, kernel, bias, dtype=self.dtype),
            kernel,
            bias,
            activation=self.activation,
            residual=residual,
            precision=precision_of(self),
            implementation=self.implementation,
        )
        return resharded(y, out_sharding)


def affine(layer: nnx.Module) -> tuple[Kernel, jax.Array | None]:
    """Returns (kernel, bias) of a linear layer, for an operator that takes several layers' parameters.

    A `nnx.LoRA` around a linear layer and a `nnx.LoRALinear` have a `LoRAKernel`. Where JAX's products
    are intercepted, the layers are called: see `CalledKernel`.

    Raises:
      TypeError: a layer of another class, whose own call would be bypassed.
      ValueError: a LoRA with a promote_dtype of its own.
    """
    if why_intercepted() is not None:
        return CalledKernel(lambda x, precision: layer(x), layer_dtype(layer)), None
    if isinstance(layer, nnx.LoRA) and layer.base_module is not None:
        kernel, bias = affine(layer.base_module)
        return _with_lora(kernel, layer), bias
    if type(layer) is nnx.LoRALinear:
        return _with_lora(layer.kernel.get_value(), layer.lora), _bias(layer)
    if type(layer) not in (nnx.Linear, Linear, QuantizedLinear):
        raise TypeError(
            "jaxfused.nnx: MLP, GatedMLP and TransformerBlock read their layers' parameters and do not"
            f" call them, so {type(layer).__name__} cannot stand for one; put a jaxfused.nnx.Linear"
            " there, nnx.LoRALinear, or nnx.LoRA with a linear layer as base_module, or write the block"
            " with layers that are called."
        )
    assert isinstance(layer, nnx.Linear | QuantizedLinear)
    return layer.kernel.get_value(), _bias(layer)


def layer_dtype(layer: nnx.Module) -> Any:
    """Returns the dtype of a layer's parameters, also if they are quantised or have a LoRA."""
    layer = getattr(layer, "base_module", layer)
    return getattr(layer, "param_dtype", jnp.float32)


def _bias(layer: nnx.Linear | QuantizedLinear) -> jax.Array | None:
    return None if layer.bias is None else layer.bias.get_value()


def _with_lora(base: Kernel, lora: nnx.LoRA) -> LoRAKernel:
    if lora.promote_dtype is not dtypes.promote_dtype:
        raise ValueError(
            "jaxfused.nnx: a LoRA in an MLP, GatedMLP or TransformerBlock has a promote_dtype of its"
            " own, which is not called there; leave it out, or pass dtype."
        )
    return LoRAKernel(base, lora.lora_a[...], lora.lora_b[...], lora.dtype)
