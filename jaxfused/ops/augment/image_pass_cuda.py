"""A pass over images by the CUDA kernels of ffi/augment/image_pass.cu."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.augment.image_pass_xla import Pass
from jaxfused.ops.augment.resample_xla import Reading
from jaxfused.ops.augment.steps_xla import Op
from jaxfused.runtime import cuda_library

MAX_STEPS = 16
MAX_AXIS = 2**20
_TILE = 32
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
DTYPES = (jnp.uint8, *cuda_library.DTYPES)
_IN_PLACE = Reading((0, 0), "bilinear", is_upright=True, drops=True, fill=(0.0,), widest=1.0)
"""Stands for a reading where each pixel stays in its place."""


def why_spec_unfit(spec: Pass, channels: int) -> str | None:
    """Returns None if the kernels have the steps of a pass, else the reason."""
    if channels not in (1, 3, 4):
        return f"it takes images of 1, 3 or 4 channels, and these have {channels}"
    missing = sorted(op.name.lower() for op in spec.needed - {Op.CONTRAST})
    if missing:
        return f"it has no statistics of {' and '.join(missing)}"
    if len(spec.steps) > MAX_STEPS:
        return f"it takes at most {MAX_STEPS} steps in a pass, and this one has {len(spec.steps)}"
    if spec.dtype not in DTYPES:
        return f"it writes uint8, float32, bfloat16 and float16, and not {jnp.dtype(spec.dtype)}"
    return None


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    shape: tuple[int, int, int, int],
    dtype: Any,
    spec: Pass,
) -> str | None:
    """Returns None if the kernels can run a pass over images [B, H, W, C], else the reason."""
    if reason := cuda_library.why_unfit(compute_capability):
        return reason
    if dtype not in DTYPES:
        return f"it reads uint8, float32, bfloat16 and float16, and x has dtype {jnp.dtype(dtype)}"
    if reason := why_spec_unfit(spec, shape[3]):
        return reason
    size = _size(shape, spec)
    if max(*shape[1:3], *size) > MAX_AXIS or shape[0] * _tiles(size) >= 2**31:
        return f"images of shape {shape} and results of {size} are too large for it"
    return cuda_library.why_unavailable()


def run(images: jax.Array, maps: jax.Array, rows: jax.Array, *, spec: Pass) -> jax.Array:
    """Returns what `image_pass_xla.run` does."""
    cuda_library.register()
    count, channels = images.shape[0], images.shape[3]
    size, options = _size(images.shape, spec), _options(spec)
    pivots = jnp.zeros((0,), jnp.float32)
    if Op.CONTRAST in spec.needed:
        sums = jax.ffi.ffi_call(
            "jaxfused_image_sums", jax.ShapeDtypeStruct((count, _tiles(size)), jnp.float32)
        )(images, maps, rows, height=np.int64(size[0]), width=np.int64(size[1]), **options)
        pivots = sums.sum(1) / (maps[:, -2] * maps[:, -1])
    call = jax.ffi.ffi_call(
        "jaxfused_image_pass", jax.ShapeDtypeStruct((count, *size, channels), spec.dtype)
    )
    return call(images, maps, rows, pivots, **options)


def _size(shape: tuple[int, ...], spec: Pass) -> tuple[int, int]:
    return (shape[1], shape[2]) if spec.reading is None else spec.reading.size


def _tiles(size: tuple[int, int]) -> int:
    return -(-size[0] // _TILE) * -(-size[1] // _TILE)


def _options(spec: Pass) -> dict[str, Any]:
    reading = spec.reading or _IN_PLACE
    fill = reading.fill * 4 if len(reading.fill) == 1 else (*reading.fill, 0.0)
    return dict(
        interpolation=np.int64(_INTERPOLATIONS.index(reading.interpolation)),
        reads=np.bool_(spec.reading is not None),
        drops=np.bool_(reading.drops),
        widest=np.float32(reading.widest),
        fill=np.array(fill[:4], np.float32),
    )
