"""Taps of a resized axis: the values of x that each result reads, and their weights.

NumPy computes the taps while a program is traced: in float64, and for "nearest" positions in float32.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ResizedAxis:
    """An axis of `size` values that is resized to `result` values.

    Attributes: size: values of the axis. result: values of the result. step: distance of adjacent
    results, in values of the axis. method: a `ResizeMethod`. align_corners: whether the first and the
    last results are the axis's first and last values, else values are at centres of equal parts.
    antialias: whether windows grow where the axis shrinks.
    """

    size: int
    result: int
    step: float
    method: str
    align_corners: bool
    antialias: bool

    @property
    def changes(self) -> bool:
        """True if resizing changes the values along the axis."""
        return self.size != self.result or (self.step != 1 and not self.align_corners)


@dataclass(frozen=True)
class Taps:
    """Indices of the values that each result reads, [result, taps], and their weights."""

    places: np.ndarray
    weights: np.ndarray
    size: int
    """Number of values of the axis."""

    def matrix(self) -> np.ndarray:
        """Returns the weights as a matrix [result, size]."""
        matrix = np.zeros((len(self.places), self.size))
        np.add.at(matrix, (np.arange(len(self.places))[:, None], self.places), self.weights)
        return matrix

    def transposed(self) -> "Taps":
        """Returns the taps of the transposed matrix: which results read each value of the axis."""
        columns = self.matrix().T
        count = max(1, int((columns != 0).sum(axis=1).max()))
        # Weights other than 0 come first, in the order of their indices.
        places = np.argsort(columns == 0, axis=1, kind="stable")[:, :count]
        weights = np.take_along_axis(columns, places, axis=1)
        return Taps(np.where(weights != 0, places, 0), weights, len(self.places))


@functools.lru_cache(maxsize=256)
def taps(axis: ResizedAxis) -> Taps:
    """Computes the taps of an axis."""
    results, last = np.arange(axis.result), axis.size - 1
    if axis.align_corners:
        centres = results * (last / max(axis.result - 1, 1))
    else:
        centres = (results + 0.5) * axis.step - 0.5
    if axis.method.startswith("nearest"):
        return _one(_nearest(axis, results), last)
    radius, kernel = _KERNELS[axis.method]
    grows = max(axis.step, 1.0) if axis.antialias else 1.0
    first = np.floor(centres - radius * grows).astype(int) + 1
    places = first[:, None] + np.arange(math.ceil(2 * radius * grows))
    distances = (places - centres[:, None]) / grows
    if axis.method == "bicubic" and not axis.antialias:
        weights = _cubic(-0.75)(distances)
    else:
        weights = kernel(distances)
    inside = (places >= 0) & (places <= last)
    if axis.antialias or axis.method.startswith("lanczos"):
        # Weights beyond the axis's ends are left out of the mean.
        weights = np.where(inside, weights, 0)
        weights /= weights.sum(axis=1, keepdims=True)
    return Taps(places.clip(0, last), weights, axis.size)


def _nearest(axis: ResizedAxis, results: np.ndarray) -> np.ndarray:
    """Returns where each result lies in the axis, rounded to float32 as torch rounds it for images.

    A position near a whole number may be above it in float32 and below it in float64.
    """
    if axis.method == "nearest":
        return (results + 0.5).astype(np.float32) * np.float32(axis.step)
    # An axis whose result has its size is copied, whatever the factor.
    step = 1.0 if axis.result == axis.size else axis.step
    return results.astype(np.float32) * np.float32(step)


def _one(places: np.ndarray, last: int) -> Taps:
    found = np.floor(places).astype(int).clip(0, last)[:, None]
    return Taps(found, np.ones(found.shape), last + 1)


def _linear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(distance), 0)


def _cubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    """Returns Keys' cubic kernel with coefficient `a`."""

    def weight(distance: np.ndarray) -> np.ndarray:
        d = np.abs(distance)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d < 1, near, np.where(d < 2, far, 0))

    return weight


def _lanczos(radius: int) -> Callable[[np.ndarray], np.ndarray]:
    def weight(distance: np.ndarray) -> np.ndarray:
        near = np.abs(distance) < radius
        return np.where(near, np.sinc(distance) * np.sinc(distance / radius), 0)

    return weight


_KERNELS = {
    "bilinear": (1, _linear),
    "bicubic": (2, _cubic(-0.5)),
    "lanczos3": (3, _lanczos(3)),
    "lanczos5": (5, _lanczos(5)),
}
