"""A picture of held-out images: the input, the truth, and the model's prediction."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from examples.images import Batch

PICTURED = 4
"""Largest number of images in a picture."""

_FOUND, _MISSED, _INVENTED = "white", "tab:red", "tab:blue"


def save_picture(path: Path, predictions: Sequence[tuple[Batch, np.ndarray]]) -> None:
    """Draws a row for each image.

    Args:
      path: of the PNG.
      predictions: pairs of an image with its mask, and the probability of the foreground at each pixel.
    """
    shapes = [probability.shape for _, probability in predictions]
    ratios = [min(max(height / width, 0.3), 3.0) for height, width in shapes]
    figure = Figure(figsize=(9, 3 * sum(ratios) + 0.8), dpi=120, layout="constrained")
    grid = figure.subplots(
        len(predictions), 3, squeeze=False, gridspec_kw=dict(height_ratios=ratios)
    )
    for axes, title in zip(grid[0], ("input", "truth", "prediction"), strict=True):
        axes.set_title(title)
    for row, (batch, probability) in zip(grid, predictions, strict=True):
        truth = batch["mask"] > 0
        for axes, shown in zip(
            row, (stretched(batch["image"]), truth, verdict(probability >= 0.5, truth)), strict=True
        ):
            axes.imshow(shown, cmap="gray", interpolation="nearest")
            axes.axis("off")
    figure.legend(
        handles=[Patch(color=_MISSED, label="missed"), Patch(color=_INVENTED, label="invented")],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(path)


def stretched(image: np.ndarray) -> np.ndarray:
    """Returns an image scaled to 0 at its 1st and 1 at its 99th percentile, so that faint cells show."""
    low, high = np.percentile(image, (1, 99))
    return ((image - low) / max(high - low, 1)).clip(0, 1)


def verdict(prediction: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns a mask in colour, [H, W, 3], that shows where the prediction differs from the truth."""
    picture = np.zeros((*truth.shape, 3))
    picture[prediction & truth] = to_rgb(_FOUND)
    picture[~prediction & truth] = to_rgb(_MISSED)
    picture[prediction & ~truth] = to_rgb(_INVENTED)
    return picture
