"""Sizes and activations from which the cases of all matrix products are drawn."""

from benchmarks.run.draw import MOST_ELEMENTS, MOST_FLOPS, Draw

ACTIVATIONS = ("relu", "gelu_tanh", "gelu_tanh", "gelu_erf", "silu")


def hidden_features(draw: Draw, width: int) -> int:
    """Draws hidden features as in networks: 4 times the width, 8/3 of it, or SigLIP's 4304."""
    of_width = (4 * width, 4 * width, 8 * width // 3, eights(8 * width // 3), 7 * width // 2)
    of_models = (4304, 11008, 14336) if width >= 1024 else ()
    return min(draw.pick((*of_width, *of_models)), 16384)


def eights(size: int) -> int:
    """Rounds a size down to a multiple of 8, at least 8."""
    return max(8, size // 8 * 8)


def product_fits(rows: int, width: int, out: int) -> bool:
    """Returns whether a product of `rows` rows is within the sweep's bounds."""
    return 2 * rows * width * out <= MOST_FLOPS and rows * max(width, out) <= 2 * MOST_ELEMENTS
