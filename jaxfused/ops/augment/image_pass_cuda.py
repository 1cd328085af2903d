"""A pass over images by the CUDA kernels of ffi/augment/image_pass.cu."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.augment import steps_xla
from jaxfused.ops.augment.image_pass_xla import Pass
from jaxfused.ops.augment.resample_xla import Reading
from jaxfused.ops.augment.steps_xla import STATISTICAL, Op
from jaxfused.runtime import cuda_library

MAX_STEPS = 16
MAX_AXIS = 2**20
MAX_REACH = 16
_TILE = 32
_SUMS = 7
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
_ROUNDED = (jnp.bfloat16, jnp.float16)
"""Result dtypes for which 15-bit interpolation weights suffice: their error is 1/16 of the rounding."""
DTYPES = (jnp.uint8, *cuda_library.DTYPES)
_IN_PLACE = Reading((0, 0), "bilinear", is_upright=True, drops=True, fill=(0.0,), widest=1.0)
"""Options passed to the kernel where nothing is resampled: each pixel stays in its place."""


def why_spec_unfit(spec: Pass, channels: int) -> str | None:
    """Returns None if the kernels can compute the steps of a pass, else the reason."""
    if channels not in (1, 3, 4):
        return f"it takes images of 1, 3 or 4 channels, and these have {channels}"
    steps = len(spec.steps) + (len(spec.blur.steps) if spec.blur else 0)
    if steps > MAX_STEPS:
        return f"it takes at most {MAX_STEPS} steps in a pass, and this one has {steps}"
    if spec.blur and max(spec.blur.reach) > MAX_REACH:
        widest = 2 * MAX_REACH + 1
        return f"its blur has at most {widest} weights, and this one {2 * max(spec.blur.reach) + 1}"
    if spec.blur and STATISTICAL & {op for ops in spec.blur.steps for op in ops}:
        return "it has no statistics of blurred images"
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
    if spec.blur and dtype != jnp.uint8:
        return f"it blurs uint8 images, and x has dtype {jnp.dtype(dtype)}"
    size = _size(shape, spec)
    if max(*shape[1:3], *size) > MAX_AXIS or shape[0] * _tiles(size) >= 2**31:
        return f"images of shape {shape} and results of {size} are too large for it"
    return cuda_library.why_unavailable()


def run(
    images: jax.Array, maps: jax.Array, rows: jax.Array, blurs: jax.Array | None, *, spec: Pass
) -> jax.Array:
    """Returns the images of a pass, as `image_pass_xla.run` defines it."""
    cuda_library.register()
    count, channels = images.shape[0], images.shape[3]
    size, options = _size(images.shape, spec), _options(spec)
    statistics = jnp.zeros((0,), jnp.float32)
    if spec.needed:
        rows_before = rows[:, : len(spec.steps)]
        statistics = _statistics(images, maps, rows_before, spec.needed, size, options)
    call = jax.ffi.ffi_call(
        "jaxfused_image_pass", jax.ShapeDtypeStruct((count, *size, channels), spec.dtype)
    )
    if blurs is None:
        blurs = jnp.zeros((0,), jnp.float32)
    reach = spec.blur.reach if spec.blur else (0, 0)
    return call(
        images,
        maps,
        rows,
        statistics,
        blurs,
        **options,
        steps_before=np.int64(len(spec.steps)),
        reach_y=np.int64(reach[0]),
        reach_x=np.int64(reach[1]),
        sharpens=np.bool_(spec.blur is not None and spec.blur.sharpens),
    )


def _statistics(
    images: jax.Array,
    maps: jax.Array,
    rows: jax.Array,
    needed: frozenset[Op],
    size: tuple[int, int],
    options: dict[str, Any],
) -> jax.Array:
    """Returns statistics [B, n]: mean of gray, extremes of each channel, tables of levels."""
    count, channels = images.shape[0], 1 if images.shape[3] == 1 else 3
    levels = 256 if Op.EQUALIZE in needed else 0
    results = (
        jax.ShapeDtypeStruct((count, _tiles(size), _SUMS), jnp.float32),
        jax.ShapeDtypeStruct((count, channels if levels else 0, levels), jnp.int32),
    )
    call = jax.ffi.ffi_call("jaxfused_image_statistics", results)
    height, width = (np.int64(n) for n in size)
    sums, counts = call(images, maps, rows, height=height, width=width, **options)
    pixels = maps[:, -2] * maps[:, -1]
    parts = [(sums[..., 0].sum(1) / pixels)[:, None]]
    if Op.AUTOCONTRAST in needed:
        parts += [sums[..., 1:4].min(1), sums[..., 4:].max(1)]
    else:
        parts.append(jnp.zeros((count, 6), jnp.float32))
    if levels:
        tables = jax.vmap(jax.vmap(steps_xla.equalized))(counts).astype(jnp.float32) / 255
        tables = jnp.pad(tables, ((0, 0), (0, 3 - channels), (0, 0)))
        parts.append(tables.reshape(count, 3 * 256))
    return jnp.concatenate(parts, 1)


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
        precise=np.bool_(spec.blur is not None or jnp.dtype(spec.dtype) not in _ROUNDED),
        widest=np.float32(reading.widest),
        fill=np.array(fill[:4], np.float32),
    )
