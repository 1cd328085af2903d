"""A picture of held-out images with the model's predictions."""

from pathlib import Path

import numpy as np
import scipy.special
from matplotlib.figure import Figure

from examples.vit.data import Data

_ROWS, _COLUMNS = 5, 10


def save_sheet(path: Path, data: Data, logits: np.ndarray) -> None:
    """Draws up to 50 held-out images: at most 10 mistakes, the most confident first, then a fair sample.

    Args:
      path: of the PNG.
      data: with the held-out images.
      logits: [held-out images, classes].
    """
    labels = data.held_out.labels
    guesses = logits.argmax(axis=-1)
    confidence = scipy.special.softmax(logits.astype(np.float64), axis=-1).max(axis=-1)
    wrong = np.flatnonzero(guesses != labels)
    wrong = wrong[np.argsort(-confidence[wrong])][:_COLUMNS]
    right = np.random.default_rng(0).permutation(np.flatnonzero(guesses == labels))
    shown = [*wrong, *right][: _ROWS * _COLUMNS]

    rows = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(1.25 * _COLUMNS, 1.6 * rows + 0.5), dpi=120, layout="constrained")
    accuracy = np.mean(guesses == labels)
    figure.suptitle(
        f"{accuracy:.2%} of {len(labels)} held-out images are right; {np.sum(guesses != labels)}"
        " mistakes, the surest of them first and in red"
    )
    grid = figure.subplots(rows, _COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, i in zip(grid.flat, shown, strict=False):
        image = data.held_out.image(i)
        axes.imshow(image.squeeze(), cmap="gray" if data.channels == 1 else None, vmin=0, vmax=255)
        guess, label = (_short(data.classes[c]) for c in (guesses[i], labels[i]))
        if guesses[i] == labels[i]:
            axes.set_title(f"{guess}\n{confidence[i]:.0%}", fontsize=9)
        else:
            title = f"{guess}, not {label}\n{confidence[i]:.0%}"
            axes.set_title(title, fontsize=9, color="tab:red")
    figure.savefig(path)


def _short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"
