"""One augmentation pass over images: dispatch to an implementation, and the gradient."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.augment import image_pass_cuda, image_pass_xla
from jaxfused.ops.augment.image_pass_xla import Pass
from jaxfused.ops.augment.resample_xla import repeatable_pixels
from jaxfused.ops.augment.steps_xla import Op
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import merged_images, unmerged_images

OP = "augment"
NO_PALLAS = "there is no Pallas kernel of augment, whose gathers have an address for each pixel"


def image_pass(
    images: jax.Array,
    maps: jax.Array,
    rows: jax.Array,
    shift: jax.Array | None,
    before: jax.Array | None,
    blurs: jax.Array | None = None,
    *,
    spec: Pass,
    implementation: dispatch.Implementation | None,
) -> jax.Array:
    """Returns the images of a pass, as `image_pass_xla.run` defines it.

    Raises:
      ValueError: the named implementation cannot run.
    """
    device = dispatch.current_device(images)
    missing = {"pallas": NO_PALLAS}
    if shift is not None:
        missing["cuda"] = "it takes maps without an elastic deformation"
    elif reason := image_pass_cuda.why_spec_unfit(spec, images.shape[-1]):
        missing["cuda"] = reason
    # `takes_reference` checks float dtypes; uint8 images are computed in float32.
    like = images if images.dtype != jnp.uint8 else jax.ShapeDtypeStruct(images.shape, jnp.float32)
    if takes_reference(OP, implementation, device, like, maps, missing=missing):  # type: ignore[arg-type]
        return image_pass_xla.run(images, maps, rows, shift, before, blurs, spec=spec)
    if rows.shape[1] == 0:
        # `Runner` skips calls that have an empty operand. A pass without steps still moves pixels, so it
        # gets an identity step.
        spec = replace(spec, steps=((Op.IDENTITY,),))
        rows = jnp.zeros((len(images), 1, rows.shape[2]), rows.dtype)
    run = Runner(implementation, device)
    if images.dtype == jnp.uint8:
        return run(_Stage(spec), images, maps, rows, blurs)[0]
    return _pass(run, spec, images, maps, rows)


def joins_blur(images: jax.Array, shift: jax.Array | None, spec: Pass) -> bool:
    """Returns whether a kernel computes a pass together with the blur that follows it."""
    return (
        images.dtype == jnp.uint8
        and shift is None
        and image_pass_cuda.why_spec_unfit(spec, images.shape[-1]) is None
    )


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op=OP)
def _pass(run: Runner, spec: Pass, images, maps, rows):
    return run(_Stage(spec), images, maps, rows, None)[0]


def _pass_fwd(run: Runner, spec: Pass, images, maps, rows):
    return _pass(run, spec, images, maps, rows), (images, maps, rows)


def _pass_bwd(run: Runner, spec: Pass, saved, dy):
    del run
    f = functools.partial(image_pass_xla.run, spec=spec, pixels=repeatable_pixels)
    return jax.vjp(f, *saved)[1](dy)


_pass.defvjp(_pass_fwd, _pass_bwd)


@dataclass(frozen=True)
class _Stage:
    """Call of a pass's kernel with images, maps, steps and blur weights, and its implementations."""

    spec: Pass

    @property
    def name(self) -> str:
        return f"{OP} forward"

    def axes(self, images, maps, rows, blurs) -> Axes:
        return Axes(("bhwc", "bm", "bsk", "bn"), ("buvc",), whole="hwcmsknuv")

    def why_not(self, device, images, maps, rows, blurs) -> Mapping[str, str | None]:
        reason = image_pass_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            shape=images.shape,
            dtype=images.dtype,
            spec=self.spec,
        )
        return {"cuda": reason, "pallas": NO_PALLAS, "xla": None}

    def run(self, implementation, device, images, maps, rows, blurs) -> Results:
        if implementation == "cuda":
            return (image_pass_cuda.run(images, maps, rows, blurs, spec=self.spec),)
        return (image_pass_xla.run(images, maps, rows, blurs=blurs, spec=self.spec),)

    def batched(self, call, axis_size, in_batched, *operands) -> Results:
        merged = merged_images(axis_size, in_batched, operands)
        return unmerged_images(axis_size, call(self, *merged))
