"""Depthwise convolution by the CUDA kernels of ffi/conv/depthwise_conv*.cu.

With strips, a warp computes 64 channels of a few output columns, row after row, with all sums in
registers. With tiles, tensor cores multiply 16-bit values: 16 blocks of 8 columns and 7 or 8 rows.
"""

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

KERNELS = {
    (3, 3): (1, 2),
    (5, 5): (1, 2),
    (7, 7): (1,),
}
"""Window sizes (height, width) of the kernels, and the strides of each."""
MAX_PIXELS = 2**28
"""Pixels of all images together are fewer than this."""
MAX_CHANNELS = 64 * 65535

_BLOCK_CHANNELS = 64
_WARPS = 4
_BLOCKS_OF_MULTIPROCESSOR = 2
"""Blocks of the wgrad kernel that run on an SM at a time."""
_PIXELS_OF_WARP = 32
"""Fewest pixels that a warp sums in wgrad; with fewer it would mostly write its partial sums."""


@dataclass(frozen=True)
class Window:
    """Window of a convolution of images: size, stride and zeros on the axes H and W."""

    kernel: tuple[int, int]
    stride: int
    padding: tuple[tuple[int, int], tuple[int, int]]
    """Zeros (before, after) the rows, and (before, after) the columns."""

    def result(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of the result."""
        sizes = [
            (size + sum(padding) - kernel) // self.stride + 1
            for size, padding, kernel in zip(
                (height, width), self.padding, self.kernel, strict=True
            )
        ]
        return sizes[0], sizes[1]

    def transposed(self) -> "Window":
        """Returns the window that dgrad applies to dz; the convolution has stride 1."""
        assert self.stride == 1
        rows, columns = (
            (kernel - 1 - before, kernel - 1 - after)
            for kernel, (before, after) in zip(self.kernel, self.padding, strict=True)
        )
        return Window(self.kernel, 1, (rows, columns))


@dataclass(frozen=True)
class Strips:
    """Config of the kernels that compute strips of columns; it has no parameters."""


@dataclass(frozen=True)
class Tile:
    """Output tile of the tensor-core kernels: 16 blocks of 7 or 8 rows and 8 columns."""

    block_rows: int
    images: int
    """Number of images from which the tile takes its 16 blocks."""
    blocks_down: int
    blocks_across: int

    def __post_init__(self) -> None:
        blocks = self.images * self.blocks_down * self.blocks_across
        if blocks != _BLOCKS or any(
            n & (n - 1) for n in (self.images, self.blocks_down, self.blocks_across)
        ):
            raise ValueError(
                "depthwise_conv.Tile: images, blocks_down and blocks_across must be powers of two whose"
                f" product is {_BLOCKS}, got {self.images}, {self.blocks_down}, {self.blocks_across}"
            )
        if self.block_rows not in _BLOCK_ROWS:
            raise ValueError(
                f"depthwise_conv.Tile: block_rows must be one of {_BLOCK_ROWS}, got {self.block_rows}"
            )

    @staticmethod
    def why_unfit(
        compute_capability: tuple[int, int] | None, channels: int, window: Window, dtype: Any
    ) -> str | None:
        """Returns None if the tensor-core kernels can run this window, else the reason."""
        if compute_capability is None or compute_capability < (8, 0):
            return "it needs compute capability 8.0 or later"
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"it takes bfloat16 and float16, and x has dtype {jnp.dtype(dtype)}"
        rows, columns = window.kernel
        if window.stride > 1 or rows not in _TILE_HEIGHTS or columns > _MOST_TILE_COLUMNS:
            window_is = f"{rows} x {columns} with stride {window.stride}"
            return f"there is no kernel on tensor cores of {window_is}"
        if channels % 8:
            return f"it takes a multiple of 8 channels, and x has {channels}"
        return cuda_library.why_not_built_from((8, 0), compute_capability)

    @property
    def rows(self) -> int:
        """Rows of a tile in each image's output."""
        return self.blocks_down * self.block_rows

    @property
    def columns(self) -> int:
        return self.blocks_across * _BLOCK_COLUMNS

    def count(self, images: int, height: int, width: int) -> int:
        """Returns the number of tiles that cover an output of these sizes."""
        return (
            math.ceil(images / self.images)
            * math.ceil(height / self.rows)
            * math.ceil(width / self.columns)
        )

    def useful(self, images: int, height: int, width: int) -> float:
        """Returns the fraction of the tiles' results inside the output; 0 for an empty output."""
        if min(images, height, width) < 1:
            return 0.0
        computed = self.count(images, height, width) * _BLOCKS * self.block_rows * _BLOCK_COLUMNS
        return images * height * width / computed

    def input_pairs(self, window: Window, height: int, out_height: int) -> int:
        """Returns how many pairs of pixels a tile loads, including padding of the MMA operands."""
        rows = self.rows + window.kernel[0] - 1
        if self.blocks_down == 1 and out_height <= self.block_rows:
            # Rows of zeros above and below the image are left out.
            top = window.padding[0][0]
            rows = min(rows, top + height) - top
        return self.images * rows * (self.blocks_across + 1) * _BLOCK_COLUMNS // 2


_BLOCKS = 16
_BLOCK_ROWS = (7, 8)
_BLOCK_COLUMNS = 8
_TILE_CHANNELS = 16
_TILE_HEIGHTS = (5, 7)
"""Window heights of the tensor-core kernels."""
_MOST_TILE_COLUMNS = 9
"""Largest window width of the tensor-core kernels."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    images: int,
    height: int,
    width: int,
    channels: int,
    window: Window,
    dtype: Any,
    residual_dtype: Any = None,
) -> str | None:
    """Returns None if the convolution and its gradients can run, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype, residual_dtype):
        return reason
    assert compute_capability is not None
    if window.stride not in KERNELS.get(window.kernel, ()):
        rows, columns = window.kernel
        return f"there is no kernel of {rows} x {columns} with stride {window.stride}"
    if channels % 2:
        return f"it takes an even number of channels, and x has {channels}"
    # dgrad pads with window size - 1 - zeros, which must not be negative.
    reach = [k - 1 for k in window.kernel]
    if any(not 0 <= p <= r for pair, r in zip(window.padding, reach, strict=True) for p in pair):
        return f"it pads with 0 to {reach} zeros on a side, and padding is {window.padding}"
    out = window.result(height, width)
    if min(out) < 1:
        return f"the result has {out[0]} rows and {out[1]} columns"
    if max(images * math.prod(out), images * height * width) >= MAX_PIXELS:
        return f"it takes less than {MAX_PIXELS} pixels, and x has more"
    if channels > MAX_CHANNELS:
        return f"it takes at most {MAX_CHANNELS} channels, and x has {channels}"
    return cuda_library.why_unavailable()


def candidates(
    images: int,
    height: int,
    width: int,
    channels: int,
    *,
    window: Window,
    compute_capability: tuple[int, int],
    multiprocessors: int,
    of_weights: bool = False,
    in_float32: bool = False,
) -> list[Tile]:
    """Returns the tiles for x [images, height, width, channels], predicted fastest first.

    With `in_float32` (a residual, or a saved preactivation), sums pass through shared memory in float32.
    """
    out = window.result(height, width)
    roomy = compute_capability in ((8, 0), (9, 0), (10, 0))
    shared_bytes = _SHARED_BYTES if roomy else _LITTLE_SHARED_BYTES
    ranked: list[tuple[float, int, Tile]] = []
    powers = (1, 2, 4, 8, 16)
    for block_rows, n, down in itertools.product(_BLOCK_ROWS, powers, powers):
        if n * down > _BLOCKS:
            continue
        tile = Tile(block_rows, n, down, _BLOCKS // (n * down))
        pixels = 2 * tile.input_pairs(window, height, out[0])
        plane, taken = _bytes_of(tile, window, pixels, of_weights)
        if 2 * pixels > plane or taken > shared_bytes:
            continue
        blocks = tile.count(images, *out) * math.ceil(channels / _TILE_CHANNELS)
        cycles = _cycles_of(tile, window, pixels, of_weights, in_float32)
        ahead = block_rows == _BLOCK_ROWS[0] and pixels <= _AHEAD_PIXELS
        if ahead or of_weights or blocks <= 3 * multiprocessors or 3 * taken > shared_bytes:
            cycles *= _BY_TWO
        rounds = math.ceil(blocks / multiprocessors)
        ranked.append((rounds * cycles, len(ranked), tile))
    return [tile for _, _, tile in sorted(ranked)[:_MOST_CANDIDATES]]


def _bytes_of(tile: Tile, window: Window, pixels: int, of_weights: bool) -> tuple[int, int]:
    """Returns bytes of shared memory: of one channel's plane, and of a CTA whose input has `pixels`."""
    pitch = (tile.block_rows | 1) * 4 * _BLOCK_COLUMNS
    plane = _BLOCKS * pitch + 256
    taken = _TILE_CHANNELS * plane + pixels + _BLOCKS * tile.block_rows * 8 + 128
    if of_weights:
        return plane, taken + _TILE_CHANNELS * _BLOCKS * pitch // 2 + 144
    return plane, taken + _TILE_CHANNELS * window.kernel[0] * 48


def _cycles_of(
    tile: Tile, window: Window, pixels: int, of_weights: bool, in_float32: bool
) -> float:
    """Returns the estimated cycles for which a tile keeps an SM's load/store path busy.

    A request to global memory for a pixel takes one cycle, as does a row of 128 bytes of shared memory.
    """
    rows = window.kernel[0] + tile.block_rows - 1
    results = _BLOCKS * _BLOCK_COLUMNS * tile.block_rows
    of_channel = 4 * rows + 2 * window.kernel[0] + pixels / 64
    of_channel += results / (64 if of_weights else 16 if in_float32 else 32)
    return pixels + results + _TILE_CHANNELS * of_channel + _TILE_CYCLES


_MOST_CANDIDATES = 8
_AHEAD_PIXELS = 1536
"""Most pixels of a tile's input that kernels with 7 rows a block load during the previous tile."""
_BY_TWO = 0.85
"""Factor on a tile's time if shared memory fits fewer than three CTAs, or an SM gets at most three."""
_TILE_CYCLES = 600
"""Cycles of a tile for barriers and waits."""
_SHARED_BYTES = 226 * 1024
_LITTLE_SHARED_BYTES = 99 * 1024
"""Largest number of bytes of shared memory of a block: at capability 8.0, 9.0, 10.0, and others."""


def conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    save_preactivation: bool,
    turned: bool = False,
    config: Strips | Tile = Strips(),
) -> tuple[jax.Array, jax.Array | None]:
    """Convolves x [B, H, W, C] with w [kh, kw, C]; returns (y, z).

    z is the sum with bias and residual, or None without `save_preactivation`; y is its activation.
    `turned` rotates the window by 180 degrees, for dgrad.
    """
    cuda_library.register()
    shape = (x.shape[0], *window.result(*x.shape[1:3]), x.shape[3])
    absent = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
    by_tiles = isinstance(config, Tile)
    call = jax.ffi.ffi_call(
        "jaxfused_depthwise_conv_mma" if by_tiles else "jaxfused_depthwise_conv",
        (
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct(shape if save_preactivation else (0,), x.dtype),
        ),
    )
    y, z = call(
        x,
        (w.astype(x.dtype) if by_tiles else w).reshape(-1, x.shape[3]),
        absent if bias is None else bias,
        absent if residual is None else residual,
        **_attributes(window, config),
        turned=np.bool_(turned),
        activation=activation or "none",
    )
    return y, z if save_preactivation else None


def weight_gradient(
    x: jax.Array,
    dy: jax.Array,
    *,
    window: Window,
    multiprocessors: int,
    config: Strips | Tile = Strips(),
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 (dw [kh, kw, C], dbias [C]); dy is the gradient of y before its activation."""
    cuda_library.register()
    channels = x.shape[3]
    resident = _BLOCKS_OF_MULTIPROCESSOR * multiprocessors
    if isinstance(config, Tile):
        target = "jaxfused_depthwise_conv_mma_weights"
        most = config.count(*dy.shape[:3])
        workers = max(1, resident // math.ceil(channels / _TILE_CHANNELS))
        # So many thread blocks that each computes equally many tiles, or one fewer.
        blocks = math.ceil(most / math.ceil(most / workers))
    else:
        target = "jaxfused_depthwise_conv_weights"
        most = math.ceil(math.prod(dy.shape[:3]) / (_WARPS * _PIXELS_OF_WARP))
        blocks = min(max(1, resident // math.ceil(channels / _BLOCK_CHANNELS)), most)
    taps = math.prod(window.kernel)
    shape = (blocks, taps + 1, channels)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))
    parts = call(x, dy, **_attributes(window, config))
    # XLA fuses each slice with its sum. One sum of all partial sums, sliced afterwards, would take more
    # kernels.
    dw = jnp.sum(parts[:, :taps], axis=0)
    return dw.reshape(*window.kernel, channels), jnp.sum(parts[:, taps], axis=0)


def _attributes(window: Window, config: Strips | Tile) -> dict[str, Any]:
    (top, _), (left, _) = window.padding
    numbers = dict(height=window.kernel[0], width=window.kernel[1], top=top, left=left)
    numbers |= asdict(config) if isinstance(config, Tile) else dict(stride=window.stride)
    return {name: np.int64(number) for name, number in numbers.items()}
