"""Prediction of images of any size, tile by tile, without seams or the whole image in memory.

Tiles overlap, and in the overlaps their predictions are blended. The weights fall off smoothly towards a
tile's edge, where the model has the least context of a pixel.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

PredictTiles = Callable[[np.ndarray], np.ndarray]
"""Function from tiles, uint8 [N, tile, tile, C], to foreground probabilities, [N, tile, tile]."""


def predict_rows(
    image: np.ndarray,
    predict: PredictTiles,
    *,
    tile: int,
    overlap: int,
    batch_size: int,
) -> Iterator[np.ndarray]:
    """Yields the probabilities of an image from top to bottom, some rows at a time.

    The memory needed is that of one row of tiles. The image is read once, a tile at a time, so it may be
    a memory-mapped file.

    Args:
      image: uint8 [H, W, C], of any size; one smaller than a tile is mirrored at its edges.
      predict: function of `batch_size` tiles that returns their probabilities.
      tile: height and width of a tile.
      overlap: of neighbouring tiles, in pixels; at most half a tile.
      batch_size: tiles a call.

    Yields:
      float32 [rows, W]; together H rows.
    """
    height, width = image.shape[:2]
    rows = axis_tiles(height, tile, overlap)
    columns = axis_tiles(width, tile, overlap)
    band = np.zeros((min(tile, height), width), np.float32)
    for (top, row_weights), (next_top, _) in itertools.pairwise([*rows, (height, None)]):
        for group in itertools.batched(columns, batch_size):
            tiles = [cut_tile(image, top, left, (tile, tile)) for left, _ in group]
            # The last call repeats a tile, so that all calls have the same shape.
            tiles += tiles[-1:] * (batch_size - len(tiles))
            predictions = np.asarray(predict(np.stack(tiles)))
            for (left, weights), prediction in zip(group, predictions, strict=False):
                window = row_weights[:, None] * weights
                part = prediction[: window.shape[0], : window.shape[1]]
                band[:, left : left + tile] += window * part
        finished = next_top - top
        yield band[:finished].copy()
        band[: len(band) - finished] = band[finished:]
        band[len(band) - finished :] = 0


def axis_tiles(length: int, tile: int, overlap: int) -> list[tuple[int, np.ndarray]]:
    """Returns the tiles that cover an axis: the start of each, and its weights, which sum to 1.

    In an overlap the weights of the two tiles are sin² and cos², whose sum is 1. The last tile ends with
    the axis and may overlap more; dividing by the sum makes the weights sum to 1 there too.
    """
    if length <= tile:
        return [(0, np.ones(length, np.float32))]
    starts = [*range(0, length - tile, tile - overlap), length - tile]
    ramp = np.sin(np.pi / 2 * (np.arange(overlap) + 0.5) / max(overlap, 1)) ** 2
    window = np.concatenate([ramp, np.ones(tile - 2 * overlap), ramp[::-1]])
    total = np.zeros(length)
    for start in starts:
        total[start : start + tile] += window
    return [(start, (window / total[start : start + tile]).astype(np.float32)) for start in starts]


def cut_tile(image: np.ndarray, top: int, left: int, size: tuple[int, int]) -> np.ndarray:
    """Returns the tile [*size, C] at (top, left); the image is mirrored beyond its end."""
    part = image[top : top + size[0], left : left + size[1]]
    missing = [(0, wanted - has) for wanted, has in zip(size, part.shape[:2], strict=True)]
    return np.pad(part, [*missing, (0, 0)], mode="symmetric")
