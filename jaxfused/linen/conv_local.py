"""ConvLocal for Flax Linen: Flax's own code, which `jaxfused.explain` lists."""

import jax
from flax import linen

from jaxfused.linen.flax_code import flax_call
from jaxfused.modules.fallback import call_flax
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class ConvLocal(linen.ConvLocal):
    """`flax.linen.ConvLocal`, a convolution that has a kernel of its own for each place.

    Flax's code runs it, because no operator takes such kernels, and `jaxfused.explain` says so. The
    attributes are those of `flax.linen.ConvLocal`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused, jaxfused.linen
      >>> layer = jaxfused.linen.ConvLocal(4, (3,), padding="VALID")
      >>> x = jnp.ones((1, 8, 3))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> print(jaxfused.explain(layer.apply, variables, x).fallbacks[0][0])
      jaxfused.linen.ConvLocal runs Flax's own code because it has a kernel for each place

    Source: `flax.linen.ConvLocal`.
    """

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs [..., *spatial, I].

        Args:
          inputs: [..., *spatial, I], any number of batch axes.

        Returns:
          [..., *spatial', O].
        """
        return call_flax(
            "jaxfused.linen.ConvLocal",
            "it has a kernel for each place",
            lambda: flax_call(ConvLocal)(self, inputs),
        )
