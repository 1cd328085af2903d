"""group_norm by the CUDA kernels of ffi/group_norm_fwd.cu and ffi/group_norm_bwd.cu.

A team of blocks shares an image and keeps it on chip, so that the image is read once. The blocks of a
team exchange their sums, and therefore all blocks of a launch run at the same time.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.cuda import library

MAX_THREADS = 512
MAX_PIXELS = 2**30


@dataclass(frozen=True)
class Config:
    """How a kernel is launched."""

    team: int
    """Blocks that share an image; fewer where an image has fewer pixels, or the GPU fewer blocks."""
    threads: int = 512
    """Threads of a block."""
    blocks: int = 1
    """Blocks that share the shared memory of a multiprocessor."""

    def __post_init__(self) -> None:
        if self.team < 1:
            raise ValueError(f"group_norm.Config: team must be 1 or more, got {self.team}")
        if not 32 <= self.threads <= MAX_THREADS or self.threads % 32:
            raise ValueError(
                f"group_norm.Config: threads must be a multiple of 32 up to {MAX_THREADS},"
                f" got {self.threads}"
            )
        if not 1 <= self.blocks <= 16:
            raise ValueError(f"group_norm.Config: blocks must be 1 to 16, got {self.blocks}")


def vector_size(channels: int, itemsize: int) -> int:
    """The values of a thread's vector: 16 bytes where pixels are whole vectors, else 4 bytes."""
    return (16 if channels * itemsize % 16 == 0 else 4) // itemsize


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
    """None where forward and backward can run on x [images, pixels, channels], else the reason."""
    reason = library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    assert compute_capability is not None
    if reason := library.why_dtype_unfit(dtype):
        return reason
    if reason := library.why_residual_unfit(dtype, residual_dtype):
        return reason
    if groups < 1 or channels % groups:
        return f"it takes groups that divide the channels, and {groups} do not divide {channels}"
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize == 2 and channels % 2:
        return f"it takes an even number of channels in 16 bits, and x has {channels}"
    most = MAX_THREADS * vector_size(channels, itemsize)
    if channels > most:
        return f"it takes at most {most} such channels, and x has {channels}"
    if _ring_steps(compute_capability, channels, groups, itemsize) < _TOGETHER:
        return f"a step of {channels} channels does not fit into the shared memory of this GPU"
    if pixels > MAX_PIXELS:
        return f"it takes at most {MAX_PIXELS} pixels, and x has {pixels}"
    if images * channels >= 2**31:
        return f"it takes less than 2**31 channels of all images, and x has {images * channels}"
    return library.why_unavailable()


# --- configs --------------------------------------------------------------------------------------

_TOGETHER = 4
"""Steps of a slice that a thread computes together, and for which a ring has room."""
_SHARED_KILOBYTES = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99}
"""Of a block, by compute capability; 227 for those that are not listed."""


def _shared_bytes(compute_capability: tuple[int, int]) -> int:
    return _SHARED_KILOBYTES.get(compute_capability, 227) * 1024


def _ring_steps(
    compute_capability: tuple[int, int], channels: int, groups: int, itemsize: int
) -> int:
    """How many steps of x, dy and a residual fit on chip for the smallest block with these channels."""
    vector = vector_size(channels, itemsize)
    threads = max(32, math.ceil(channels / vector / 32) * 32)
    fixed = (threads * vector + channels + groups) * 8
    return (_shared_bytes(compute_capability) - fixed) // (3 * threads * vector * itemsize)


_LAUNCH = 4.0
_TERABYTES_A_SECOND = 4.0
_BLOCK_GIGABYTES_A_SECOND = 60.0
_SHARED_ROUND = 1.0
_WAITED_ROUND = 3.0


def candidates(
    images: int,
    pixels: int,
    channels: int,
    itemsize: int,
    arrays: int,
    *,
    multiprocessors: int,
    compute_capability: tuple[int, int] = (9, 0),
) -> list[Config]:
    """Configs for x [images, pixels, channels], the best guess first.

    `arrays` of that shape are kept on chip: x, the residual, and dy in the backward.
    """
    shape = (images, pixels, channels, itemsize, arrays)
    columns = channels // vector_size(channels, itemsize)
    found = []
    for threads, blocks in ((512, 1), (256, 2)):
        if columns > threads:
            continue
        total = multiprocessors * blocks
        steps = math.ceil(pixels / (threads // columns))
        most = min(total, steps)
        teams = {min(most, 2**i) for i in range(12)} | {min(most, total // i) for i in range(1, 9)}
        found += [Config(team, threads, blocks) for team in sorted(teams) if team > 0]

    def expected(config: Config) -> tuple[float, int]:
        time = microseconds(
            config,
            *shape,
            multiprocessors=multiprocessors,
            compute_capability=compute_capability,
        )
        teams = min(images, multiprocessors * config.blocks // config.team)
        # Of configs that are expected to take as long, the one that leaves the fewest blocks idle.
        return round(time, 3), -teams * config.team // config.blocks

    return sorted(found, key=expected)


def microseconds(
    config: Config,
    images: int,
    pixels: int,
    channels: int,
    itemsize: int,
    arrays: int,
    *,
    multiprocessors: int,
    compute_capability: tuple[int, int] = (9, 0),
) -> float:
    """The expected time of a kernel that keeps `arrays` on chip and writes one."""
    vector_bytes = vector_size(channels, itemsize) * itemsize
    columns = channels * itemsize // vector_bytes
    rows = max(1, config.threads // columns)
    team = max(1, min(config.team, pixels))
    teams = max(1, min(images, multiprocessors * config.blocks // team))
    rounds = math.ceil(images / teams)
    steps = math.ceil(math.ceil(pixels / team) / rows)
    step_bytes = arrays * config.threads * vector_bytes
    fixed = config.threads * vector_bytes // itemsize * 8
    ring = max(2, (_shared_bytes(compute_capability) // config.blocks - fixed) // step_bytes)
    reads = arrays if steps <= ring else 2 * arrays
    # Threads without a column, and rows of the last step without a pixel, cost as much as the others.
    slice_bytes = steps * config.threads * vector_bytes
    memory = teams * pixels * channels * itemsize * (reads + 1) / _TERABYTES_A_SECOND / 1e6
    block = slice_bytes * (reads + 1) / _BLOCK_GIGABYTES_A_SECOND / 1e3
    if team == 1:
        wait = _SHARED_ROUND if config.blocks == 1 else 0.5 * _SHARED_ROUND
    else:
        wait = _SHARED_ROUND if 5 * steps <= 2 * ring else _WAITED_ROUND
    return _LAUNCH + rounds * (max(memory, block) + wait)


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
    compute_capability: tuple[int, int] = (9, 0),
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """(y, mean, rstd, variance) of x [B, P, C] and scale, bias [1 or B, C].

    The statistics are float32 [B, groups], and None where they are not wanted.
    """
    library.register()
    images, pixels, channels = x.shape
    config = (
        config
        or candidates(
            images,
            pixels,
            channels,
            x.dtype.itemsize,
            1 if residual is None else 2,
            multiprocessors=multiprocessors,
            compute_capability=compute_capability,
        )[0]
    )
    statistics = (images, groups) if save_statistics else (0,)
    shares = config.team > 1
    call = jax.ffi.ffi_call(
        "jaxfused_group_norm_forward",
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(statistics, jnp.float32),
            jax.ShapeDtypeStruct(statistics, jnp.float32),
            jax.ShapeDtypeStruct((images, groups) if save_variance else (0,), jnp.float32),
            jax.ShapeDtypeStruct((images, groups, config.team, 2) if shares else (0,), jnp.float32),
            jax.ShapeDtypeStruct((images,) if shares else (0,), jnp.int32),
        ),
    )
    y, mean, rstd, variance, _, _ = call(
        x,
        *_operands(x, residual, scale, bias),
        groups=np.int64(groups),
        epsilon=np.float32(epsilon),
        activation=activation or "none",
        team=np.int64(config.team),
        threads=np.int64(config.threads),
        blocks=np.int64(config.blocks),
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
    multiprocessors: int,
    compute_capability: tuple[int, int] = (9, 0),
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """(dx, dresidual, dscale, dbias) of x [B, P, C]; None for what is None.

    `dmean` and `dvariance` [B, groups] are the gradients of the forward's statistics. dscale and dbias
    are float32 [B, C], for each image, also where the images share the parameter.
    """
    library.register()
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
            multiprocessors=multiprocessors,
            compute_capability=compute_capability,
        )[0]
    )

    def result(shape, wanted, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape if wanted else (0,), dtype)

    shares = config.team > 1
    call = jax.ffi.ffi_call(
        "jaxfused_group_norm_backward",
        (
            result(x.shape, True, x.dtype),
            result(x.shape, reads_residual, x.dtype),
            result((images, channels), scale is not None),
            result((images, channels), bias is not None),
            result((images, config.team, channels, 2), shares),
            result((images, groups, config.team, 2), shares),
            result((images,), shares, jnp.int32),
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
        team=np.int64(config.team),
        threads=np.int64(config.threads),
        blocks=np.int64(config.blocks),
    )
    if residual is not None and not reads_residual:
        dresidual = dy
    return (
        dx,
        None if residual is None else dresidual,
        None if scale is None else dscale,
        None if bias is None else dbias,
    )


def _operands(x: jax.Array, *arrays: jax.Array | None) -> list[jax.Array]:
    """The arrays as a handler takes them: one that is absent travels without elements.

    It is made like `x`, because in a `jax.shard_map` all operands must vary over the same axes.
    """
    absent = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
    return [absent if a is None else a for a in arrays]
