"""Scores of a segmentation into classes, from one matrix that counts pixels over all pictures.

The definition is that of torchmetrics 1.9.0: `JaccardIndex(task="multiclass", average="macro")` is the
mean IoU here, and `segmentation.DiceScore(aggregation_level="global", average="macro")` the mean Dice. A
class that neither the truth nor the prediction has is left out, and one that only the prediction has
counts as 0. Keras's MeanIoU and scikit-learn's jaccard_score agree. segmentation-models-pytorch counts
an absent class as 1, and MONAI leaves out every picture whose truth lacks the class.
"""

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]
"""A prediction and its truth, both [H, W] of class numbers."""


@dataclass(frozen=True)
class Scores:
    """Scores of each class, NaN for absent classes, and their means without NaN."""

    iou: np.ndarray
    dice: np.ndarray

    @property
    def mean_iou(self) -> float:
        return _mean(self.iou)

    @property
    def mean_dice(self) -> float:
        return _mean(self.dice)


def confusion(
    prediction: np.ndarray, truth: np.ndarray, classes: int, *, ignore_index: int | None = None
) -> np.ndarray:
    """Returns how many pixels of each true class (row) were predicted as each class (column).

    Args:
      prediction: class numbers, of any shape.
      truth: class numbers, of the same shape.
      classes: how many classes there are.
      ignore_index: pixels with this truth do not count.

    Raises:
      ValueError: shapes differ, or a number that counts is no class.
    """
    if prediction.shape != truth.shape:
        raise ValueError(
            f"confusion: prediction has shape {prediction.shape} and truth {truth.shape}; pass two of"
            " one picture."
        )
    counted = np.ones(truth.shape, bool) if ignore_index is None else truth != ignore_index
    rows, columns = (np.asarray(a[counted], np.int64) for a in (truth, prediction))
    for name, numbers in (("truth", rows), ("prediction", columns)):
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < classes:
            raise ValueError(
                f"confusion: {name} has class numbers {numbers.min()} to {numbers.max()}, but there are"
                f" {classes} classes; pass 0 to {classes - 1}, or what to ignore as ignore_index."
            )
    return np.bincount(rows * classes + columns, minlength=classes**2).reshape(classes, classes)


def scores_of(matrix: np.ndarray, *, ignore_index: int | None = None) -> Scores:
    r"""Returns the scores of a matrix of `confusion`.

    .. math:: \text{IoU}_c = \frac{|P_c \cap T_c|}{|P_c \cup T_c|}, \quad
              \text{Dice}_c = \frac{2 |P_c \cap T_c|}{|P_c| + |T_c|}

    Args:
      matrix: [classes, classes].
      ignore_index: a class without a score.
    """
    both = np.diag(matrix).astype(np.float64)
    sizes = (matrix.sum(axis=0) + matrix.sum(axis=1)).astype(np.float64)
    if ignore_index is not None and 0 <= ignore_index < len(matrix):
        sizes[ignore_index] = both[ignore_index] = 0
    with np.errstate(invalid="ignore"):
        return Scores(iou=both / (sizes - both), dice=2 * both / sizes)


def scores(pairs: Iterable[Pair], classes: int, *, ignore_index: int | None = None) -> Scores:
    """Returns the scores over all pixels of all pictures together."""
    matrices = (confusion(*pair, classes, ignore_index=ignore_index) for pair in pairs)
    none = np.zeros((classes, classes), np.int64)
    return scores_of(functools.reduce(operator.add, matrices, none), ignore_index=ignore_index)


def mean_iou_by_picture(
    pairs: Iterable[Pair], classes: int, *, ignore_index: int | None = None
) -> float:
    """Returns the mean IoU over pictures and their classes; a picture's size does not matter.

    The score is that of `torchmetrics.segmentation.MeanIoU`: each class that a picture has counts
    once.
    """
    found = [
        scores_of(confusion(*pair, classes, ignore_index=ignore_index), ignore_index=ignore_index)
        for pair in pairs
    ]
    return _mean(np.concatenate([s.iou for s in found])) if found else float("nan")


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
