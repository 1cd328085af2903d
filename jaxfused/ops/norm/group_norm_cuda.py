"""group_norm by the CUDA kernels of ffi/norm/group_norm_fwd.cu and ffi/norm/group_norm_bwd.cu.

The first pass sums slices of an image's pixels, and the second writes y. The passes may run over chunks
of images that fit the L2 cache: a launch then runs the second pass of one chunk and the first pass of
the next. If images fit into a Hopper GPU's shared memory, one launch runs both passes and reads x once.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MAX_PIXELS = 2**30
_THREADS = 512
"""Threads of a thread block, unless one pixel has more than 512 vectors of channels."""
_MAX_THREADS = 1024


@dataclass(frozen=True)
class Config:
    """Launch parameters of the forward or the backward."""

    slices: int
    """Slices of an image's pixels; one thread block reads one slice."""
    chunk: int
    """Images of one launch; if `once`, the images that thread blocks work on at a time."""
    once: bool = False
    """True if a slice stays in shared memory between the two passes (group_norm_single_pass.cuh)."""

    def __post_init__(self) -> None:
        if not 1 <= self.slices <= 65536:
            raise ValueError(f"group_norm.Config: slices must be 1 to 65536, got {self.slices}")
        if self.chunk < 1:
            raise ValueError(f"group_norm.Config: chunk must be 1 or more, got {self.chunk}")


def vector_size(channels: int, itemsize: int) -> int:
    """Returns the number of values that a thread of the backward loads at once."""
    return 4 if channels * itemsize % 16 == 0 else 4 // itemsize


_FEWEST_VALUES = 4
"""Fewest values of a group that has a 16-bit residual. dx is the residual's rounded gradient minus sums
of the unrounded one. With up to three values the two cancel, and only rounding errors are left."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    images: int,
    pixels: int,
    channels: int,
    groups: int,
    dtype: Any,
    residual_dtype: Any = None,
) -> str | None:
    """Returns None if forward and backward can run on x [images, pixels, channels], else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype, residual_dtype):
        return reason
    assert compute_capability is not None
    if groups < 1 or channels % groups:
        return f"it takes groups that divide the channels, and {groups} do not divide {channels}"
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize == 2 and channels % 2:
        return f"it takes an even number of channels in 16 bits, and x has {channels}"
    values = pixels * (channels // groups)
    if itemsize == 2 and residual_dtype is not None and values < _FEWEST_VALUES:
        return (
            f"with a residual in 16 bits it takes groups of at least {_FEWEST_VALUES} values, and"
            f" these have {values}"
        )
    most = _MAX_THREADS * vector_size(channels, itemsize)
    if channels > most:
        return f"it takes at most {most} such channels, and x has {channels}"
    if pixels > MAX_PIXELS:
        return f"it takes at most {MAX_PIXELS} pixels, and x has {pixels}"
    if images * channels >= 2**31:
        return f"it takes less than 2**31 channels of all images, and x has {images * channels}"
    return cuda_library.why_unavailable()


# --- configs --------------------------------------------------------------------------------------

_CACHED_BYTES = 28e6
"""Most bytes read by one pass that the next pass still finds in the L2 cache."""
_MOST_SUMS = 4096
"""Most partial sums of an image (slices * groups) that every block of the second pass merges itself;
more are merged by a separate kernel between the passes.
"""
_LAUNCH = 7.0
"""Microseconds of a launch of one pass, including a block's first loads and the sums of its threads."""
_MERGE_LAUNCH = 3.5
_ROUND = 2.0
"""Microseconds of each wave of blocks after the first."""
_TERABYTES_A_SECOND = 4.1
_CACHE_TERABYTES_A_SECOND = 10.0
"""TB/s at which the second pass reads from the L2 cache; its writes of y are counted separately."""
_BLOCK_TERABYTES_A_SECOND = 0.024
_TWO_PASSES = {1: 1.07, 2: 1.16}
"""Factor on the time to move a pass's bytes, by the number of arrays read: instructions limit the pass,
not memory."""
_CHUNK_GAIN = 0.9
"""Largest ratio of the time in several chunks to that in one chunk at which several are chosen."""

_ONCE_LAUNCH = 7.4
"""Microseconds of a single-pass launch: start, first loads, and the wait for the last image's sums."""
_ONCE_TERABYTES_A_SECOND = {1: 3.0, 2: 2.2}
"""TB/s of the single pass, by the number of arrays read. With two, instructions are the limit."""
_ONCE_BLOCK_TERABYTES_A_SECOND = 0.04
_ONCE_SUM = 0.7e-3
"""Microseconds to merge one partial sum of an image, while the block already loads other images."""
_ONCE_IMAGE, _ONCE_ROUND = 1.5, 0.3
"""Least microseconds that a block takes for an image, and microseconds that each wave of blocks adds."""
_ONCE_ALONE = 3.0
"""Microseconds that a block with a single image waits for the sums of the image's other blocks."""
_ONCE_BYTES = 140 * 1024
"""Most bytes of a slice in the single pass. The rest of a block's shared memory holds sums and pending
loads."""
_ONCE_PIXEL_BYTES = 2048
"""Largest number of bytes of a pixel's channels in the single-pass kernel; a thread sums 16 of them."""
_ONCE_GROUPS = 512
_ONCE_SUMS = 8192
"""Most partial sums of an image (slices * groups), because every block merges all of them."""


def reads_once(compute_capability: tuple[int, int] | None) -> bool:
    """Returns whether a GPU has bulk copies and enough shared memory to read images once."""
    return (
        compute_capability is not None
        and compute_capability[0] in (9, 10)
        and cuda_library.why_not_built_from((9, 0), compute_capability) is None
    )


def _configs_once(
    images: int, pixels: int, pixel_bytes: int, kept: int, groups: int, multiprocessors: int
) -> list[Config]:
    """Returns the single-pass configs, which hold `kept` arrays in shared memory; [] if `kept` is 0."""
    fits = pixel_bytes % 16 == 0 and pixel_bytes <= _ONCE_PIXEL_BYTES and groups <= _ONCE_GROUPS
    if not kept or not fits:
        return []
    found: list[Config] = []
    for rounds in range(1, images + 1):
        teams = math.ceil(images / rounds)
        slices = min(pixels, multiprocessors // teams, _ONCE_SUMS // groups)
        if slices < 1 or (found and found[-1].chunk == teams):
            continue
        if kept * math.ceil(pixels / slices) * pixel_bytes <= _ONCE_BYTES:
            found.append(Config(slices, teams, once=True))
    return found


def candidates(
    images: int,
    pixels: int,
    channels: int,
    itemsize: int,
    arrays: int,
    *,
    groups: int,
    multiprocessors: int,
    kept: int = 0,
) -> list[Config]:
    """Returns configs for x [images, pixels, channels], the best guess first.

    Both passes read `arrays` of that shape: x, the residual, and dy in the backward. Single-pass
    kernels hold `kept` of the arrays in shared memory; with 0 there is no such kernel.
    """
    shape = (images, pixels, channels, itemsize, arrays)
    image_bytes = arrays * pixels * channels * itemsize
    rows, blocks = _block(pixels, channels, itemsize, multiprocessors)
    found = [Config(1, max(1, images))]
    for limit in (0.5 * _CACHED_BYTES, _CACHED_BYTES, 1.5 * _CACHED_BYTES, math.inf):
        chunks = min(max(1, images), max(1, math.ceil(images * image_bytes / limit)))
        chunk = math.ceil(max(1, images) / chunks)
        for waves in (0.5, 1, 2):
            slices = min(math.ceil(pixels / rows), max(1, int(waves * blocks / chunk)))
            if slices > 1 and (config := Config(slices, chunk)) not in found:
                found.append(config)
    found += _configs_once(images, pixels, channels * itemsize, kept, groups, multiprocessors)

    def expected(config: Config) -> float:
        time = microseconds(config, *shape, groups=groups, multiprocessors=multiprocessors)
        return time if config.once or config.chunk >= images else time / _CHUNK_GAIN

    return sorted(found, key=expected)


def microseconds(
    config: Config,
    images: int,
    pixels: int,
    channels: int,
    itemsize: int,
    arrays: int,
    *,
    groups: int,
    multiprocessors: int,
) -> float:
    """Returns the expected microseconds of passes that read `arrays` of x's shape and write one."""
    if config.once:
        return _microseconds_once(config, images, pixels, channels * itemsize, arrays, groups)
    _, blocks = _block(pixels, channels, itemsize, multiprocessors)
    chunk = max(1, min(config.chunk, images))
    chunks = math.ceil(images / chunk)
    image_bytes = pixels * channels * itemsize
    running = min(chunk * config.slices, blocks)
    rounds = math.ceil(chunk * config.slices / blocks)
    slice_bytes = math.ceil(pixels / config.slices) * channels * itemsize

    def at(terabytes_a_second: float, count: float) -> float:
        """Returns the microseconds to move `count` arrays of a chunk."""
        of_all = (
            count
            * chunk
            * image_bytes
            / min(terabytes_a_second, running * _BLOCK_TERABYTES_A_SECOND)
        )
        of_blocks = count * rounds * slice_bytes / _BLOCK_TERABYTES_A_SECOND
        return max(of_all, of_blocks) / 1e6

    # A block with a whole image reads it twice in a row. The L2 cache then need hold only the images of
    # blocks that run at the time, not a whole chunk.
    whole = config.slices == 1
    live = running * slice_bytes if whole else chunk * image_bytes
    again = min(1.0, _CACHED_BYTES / max(1, arrays * live))
    first = at(_TERABYTES_A_SECOND, arrays)
    second = at(_TERABYTES_A_SECOND, arrays * (1.0 - again) + 1.0)
    second += at(_CACHE_TERABYTES_A_SECOND, arrays * again)
    time = chunks * (first + second + 2.0 * (rounds - 1) * _ROUND)
    time *= _TWO_PASSES[min(arrays, 2)]
    if whole:
        return time + _LAUNCH
    # The first pass writes a sum for each slice and group. They are merged by a kernel between the
    # passes, or else by every block of the second pass.
    apart = config.slices * groups > _MOST_SUMS
    readers = 1 if apart else config.slices
    sums = 8 * images * config.slices * groups * (1 + readers)
    time += (chunks + 1) * _LAUNCH + sums / _TERABYTES_A_SECOND / 1e6
    return time + chunks * _MERGE_LAUNCH if apart else time


def _microseconds_once(
    config: Config, images: int, pixels: int, pixel_bytes: int, arrays: int, groups: int
) -> float:
    teams = max(1, min(config.chunk, images))
    blocks = config.slices * teams
    moved = (arrays + 1) * blocks * math.ceil(pixels / config.slices) * pixel_bytes
    of_memory = _ONCE_TERABYTES_A_SECOND[min(arrays, 2)]
    rate = min(of_memory, blocks * _ONCE_BLOCK_TERABYTES_A_SECOND)
    merge = _ONCE_SUM * config.slices * groups
    rounds = math.ceil(images / teams)
    alone = _ONCE_ALONE if rounds == 1 else 0.0
    return (
        _ONCE_LAUNCH + alone + rounds * (_ONCE_ROUND + max(moved / rate / 1e6, merge, _ONCE_IMAGE))
    )


def _block(pixels: int, channels: int, itemsize: int, multiprocessors: int) -> tuple[int, int]:
    """Returns the pixels that a block reads at a time, and the blocks that the GPU runs at a time."""
    columns = channels // vector_size(channels, itemsize)
    rows = max(1, min(_THREADS // columns, pixels))
    threads = 32 * math.ceil(rows * columns / 32)
    return rows, max(1, multiprocessors * min(32, _MAX_THREADS // threads))


# --- calls ----------------------------------------------------------------------------------------


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    groups: int,
    epsilon: float,
    activation: str | None,
    save_statistics: bool,
    save_variance: bool = False,
    multiprocessors: int,
    once: bool = False,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (y, mean, rstd, variance) of x [B, pixels, C] with scale and bias [1 or B, C].

    The statistics are float32 [B, groups], or None if they are not wanted. `once` is the result of
    `reads_once` for the GPU.
    """
    images, pixels, channels = x.shape
    config = (
        config
        or candidates(
            images,
            pixels,
            channels,
            x.dtype.itemsize,
            1 if residual is None else 2,
            groups=groups,
            multiprocessors=multiprocessors,
            kept=1 if once else 0,
        )[0]
    )
    return call_forward(
        "jaxfused_group_norm_forward",
        (x, residual, scale, bias),
        _scratch(config, images, groups),
        groups=groups,
        epsilon=epsilon,
        activation=activation,
        save_statistics=save_statistics,
        save_variance=save_variance,
        slices=np.int64(config.slices),
        chunk=np.int64(config.chunk),
        once=np.bool_(config.once),
    )


def call_forward(
    target: str,
    operands: Sequence[Any],
    scratch: Sequence[jax.ShapeDtypeStruct],
    *,
    groups: int,
    epsilon: float,
    activation: str | None,
    save_statistics: bool,
    save_variance: bool,
    **attributes: np.generic,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Calls a forward's FFI handler on x [B, pixels, C]; returns (y, mean, rstd, variance).

    `scratch` are arrays through which thread blocks exchange sums; `attributes` are launch parameters.
    """
    cuda_library.register()
    x, *others = operands
    statistics = (x.shape[0], groups)
    wanted = (save_statistics, save_statistics, save_variance)
    call = jax.ffi.ffi_call(
        target,
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *(jax.ShapeDtypeStruct(statistics if w else (0,), jnp.float32) for w in wanted),
            *scratch,
        ),
    )
    y, mean, rstd, variance, *_ = call(
        x,
        *_operands(x, *others),
        groups=np.int64(groups),
        epsilon=np.float32(epsilon),
        activation=activation or "none",
        **attributes,
    )
    return (
        y,
        mean if save_statistics else None,
        rstd if save_statistics else None,
        variance if save_variance else None,
    )


def backward(
    dy: jax.Array,
    x: jax.Array,
    residual: jax.Array | None,
    mean: jax.Array,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dmean: jax.Array | None = None,
    dvariance: jax.Array | None = None,
    *,
    groups: int,
    activation: str | None,
    per_image: bool,
    multiprocessors: int,
    once: bool = False,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (dx, dresidual, dscale, dbias) of x [B, pixels, C]; None for absent operands.

    `dmean` and `dvariance` [B, groups] are the gradients of the forward's statistics. dscale and dbias
    are float32 [B, C] if `per_image` or if the images have parameters of their own, else [1, C].
    """
    cuda_library.register()
    images, pixels, channels = x.shape
    reads_residual = residual is not None and activation is not None
    config = (
        config
        or candidates(
            images,
            pixels,
            channels,
            x.dtype.itemsize,
            3 if reads_residual else 2,
            groups=groups,
            multiprocessors=multiprocessors,
            kept=2 if once and not reads_residual else 0,
        )[0]
    )

    def result(shape, wanted, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape if wanted else (0,), dtype)

    shared = all(a is None or a.shape[0] == 1 for a in (scale, bias))
    rows = 1 if shared and not per_image else images
    # In the single pass, a block adds up dscale and dbias over all of its images if the images share
    # the parameters.
    keeps_sums = config.once and (rows == 1 or (scale is None and bias is None))
    call = jax.ffi.ffi_call(
        "jaxfused_group_norm_backward",
        (
            result(x.shape, True, x.dtype),
            result(x.shape, reads_residual, x.dtype),
            result((rows, channels), scale is not None),
            result((rows, channels), bias is not None),
            result(
                (
                    min(config.chunk, images) if keeps_sums else images,
                    config.slices,
                    channels,
                    2,
                ),
                True,
            ),
            *_scratch(config, images, groups, has_partials=config.once or groups < channels),
        ),
    )
    dx, dresidual, dscale, dbias, *_ = call(
        dy,
        x,
        *_operands(x, residual if reads_residual else None),
        mean,
        rstd,
        *_operands(x, dmean, dvariance, scale, bias),
        groups=np.int64(groups),
        activation=activation or "none",
        slices=np.int64(config.slices),
        chunk=np.int64(config.chunk),
        once=np.bool_(config.once),
    )
    if residual is not None and not reads_residual:
        dresidual = dy
    return (
        dx,
        None if residual is None else dresidual,
        None if scale is None else dscale,
        None if bias is None else dbias,
    )


def _scratch(
    config: Config, images: int, groups: int, has_partials: bool = True
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of scratch for sums of slices, merged sums and counters; empty if unneeded."""
    partials = (images, config.slices, groups, 2)
    if config.once:
        partials = (images, groups, config.slices, 2)
    return [
        jax.ShapeDtypeStruct(partials if has_partials else (0,), jnp.float32),
        jax.ShapeDtypeStruct((0,) if config.once else (images, groups, 2), jnp.float32),
        jax.ShapeDtypeStruct((images + 1,) if config.once else (0,), jnp.int32),
    ]


_operands = functools.partial(cuda_library.operands, absent_dtype=jnp.float32)
