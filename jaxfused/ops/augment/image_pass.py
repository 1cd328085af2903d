"""image_pass: one pass over images."""

import jax

from jaxfused import dispatch
from jaxfused.ops.augment import image_pass_xla
from jaxfused.ops.augment.image_pass_xla import Pass
from jaxfused.runtime.gate import reference_only

OP = "augment"


def image_pass(
    images: jax.Array,
    maps: jax.Array,
    rows: jax.Array,
    shift: jax.Array | None,
    before: jax.Array | None,
    *,
    spec: Pass,
    implementation: dispatch.Implementation | None,
) -> jax.Array:
    """Returns the images of a pass, as `image_pass_xla.run` states it.

    Raises:
      ValueError: the named implementation cannot run.
    """
    reference_only(OP, implementation, images)
    return image_pass_xla.run(images, maps, rows, shift, before, spec=spec)
