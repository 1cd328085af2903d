"""image_pass: choice of implementation, gradient."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.augment import image_pass_cuda, image_pass_xla
from jaxfused.ops.augment.image_pass_xla import Pass
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
    *,
    spec: Pass,
    implementation: dispatch.Implementation | None,
) -> jax.Array:
    """Returns the images of a pass, as `image_pass_xla.run` states it.

    Raises:
      ValueError: the named implementation cannot run.
    """
    device = dispatch.current_device(images)
    missing = {"pallas": NO_PALLAS}
    if shift is not None:
        missing["cuda"] = "it takes maps without an elastic deformation"
    elif reason := image_pass_cuda.why_spec_unfit(spec, images.shape[-1]):
        missing["cuda"] = reason
    # The gate's dtypes are those of floats; uint8 images are read as float32.
    like = images if images.dtype != jnp.uint8 else jax.ShapeDtypeStruct(images.shape, jnp.float32)
    if takes_reference(OP, implementation, device, like, maps, missing=missing):  # type: ignore[arg-type]
        return image_pass_xla.run(images, maps, rows, shift, before, spec=spec)
    run = Runner(implementation, device)
    if images.dtype == jnp.uint8:
        return run(_Stage(spec), images, maps, rows)[0]
    return _pass(run, spec, images, maps, rows)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op=OP)
def _pass(run: Runner, spec: Pass, images, maps, rows):
    return run(_Stage(spec), images, maps, rows)[0]


def _pass_fwd(run: Runner, spec: Pass, images, maps, rows):
    return _pass(run, spec, images, maps, rows), (images, maps, rows)


def _pass_bwd(run: Runner, spec: Pass, saved, dy):
    del run
    return jax.vjp(functools.partial(image_pass_xla.run, spec=spec), *saved)[1](dy)


_pass.defvjp(_pass_fwd, _pass_bwd)


@dataclass(frozen=True)
class _Stage:
    """Computes the results of a pass from images, maps and rows."""

    spec: Pass

    @property
    def name(self) -> str:
        return f"{OP} forward"

    def axes(self, images, maps, rows) -> Axes:
        return Axes(("bhwc", "bm", "bsk"), ("buvc",), whole="hwcmskuv")

    def why_not(self, device, images, maps, rows) -> Mapping[str, str | None]:
        reason = image_pass_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            shape=images.shape,
            dtype=images.dtype,
            spec=self.spec,
        )
        return {"cuda": reason, "pallas": NO_PALLAS, "xla": None}

    def run(self, implementation, device, images, maps, rows) -> Results:
        f = image_pass_cuda.run if implementation == "cuda" else image_pass_xla.run
        return (f(images, maps, rows, spec=self.spec),)

    def batched(self, call, axis_size, in_batched, *operands) -> Results:
        merged = merged_images(axis_size, in_batched, operands)
        return unmerged_images(axis_size, call(self, *merged))
