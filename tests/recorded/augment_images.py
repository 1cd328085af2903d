"""The image that record_augment.py and the tests change, and what they do with it."""

import numpy as np

CROP = (2, 1, 9, 10)
"""Top, left, height and width."""
ENDS = [[1, 2], [11, 0], [10, 9], [2, 11]]
"""Corners (x, y) of the result of a perspective."""
BOXES = [[2.0, 3.0, 7.0, 8.0], [0.0, 0.0, 13.0, 12.0], [9.5, 1.0, 12.0, 4.5]]

POLICY = {
    "ShearX": 0.09,
    "ShearY": -0.09,
    "TranslateX": 0.3 * 150 / 331 * 13,
    "TranslateY": -0.3 * 150 / 331 * 12,
    "Rotate": 9.0,
    "Brightness": 0.27,
    "Color": -0.27,
    "Contrast": 0.27,
    "Sharpness": 0.27,
    "Posterize": 7,
    "Solarize": 0.7,
    "AutoContrast": 0.0,
    "Equalize": 0.0,
}
"""Operations of RandAugment with what magnitude 9 of 31 bins means for this image."""

_generator = np.random.RandomState(0)
_LEVELS = _generator.randint(20, 240, (12, 13, 3)).astype(np.uint8)
DISPLACEMENT = _generator.uniform(-2, 2, (12, 13, 2))
"""Of each pixel, in pixels along x and y."""


def image() -> np.ndarray:
    """Returns a uint8 image [12, 13, 3], smooth in one half."""
    levels = _LEVELS.copy()
    levels[:, :6] = np.arange(0, 240, 20).reshape(12, 1, 1) + np.array([0, 5, 15])
    return levels


def mask() -> np.ndarray:
    """Returns labels [12, 13]."""
    return (np.arange(12)[:, None] // 4 * 4 + np.arange(13) // 4).astype(np.uint8)
