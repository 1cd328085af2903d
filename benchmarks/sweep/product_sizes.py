"""Sizes and activations that the cases of all matrix products draw."""

from benchmarks.run.draw import MOST_ELEMENTS, MOST_FLOPS, Draw

ACTIVATIONS = ("relu", "gelu_tanh", "gelu_tanh", "gelu_erf", "silu")


def hidden_features(draw: Draw, width: int) -> int:
    """Hidden features as networks have them: 4 times the width, SigLIP's 4304, 8/3 of Llama."""
    of_width = (4 * width, 4 * width, 8 * width // 3, eights(8 * width // 3), 7 * width // 2)
    of_models = (4304, 11008, 14336) if width >= 1024 else ()
    return min(draw.pick((*of_width, *of_models)), 16384)


def eights(size: int) -> int:
    """The multiple of 8 up to a size."""
    return max(8, size // 8 * 8)


def product_fits(rows: int, width: int, out: int) -> bool:
    """Whether a product, or so many of them as `rows` counts, is within the sweep's bounds."""
    return 2 * rows * width * out <= MOST_FLOPS and rows * max(width, out) <= 2 * MOST_ELEMENTS
