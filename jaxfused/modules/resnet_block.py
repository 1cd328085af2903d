"""What ResNetBlock of nnx and linen share: the convolutions of a block."""


def widths(
    features: int, strides: int, *, bottleneck: bool
) -> tuple[tuple[int, tuple[int, int], int], ...]:
    """(features, kernel size, strides) of each convolution of a block."""
    if bottleneck:
        return (
            (features, (1, 1), 1),
            (features, (3, 3), strides),
            (4 * features, (1, 1), 1),
        )
    return (features, (3, 3), strides), (features, (3, 3), 1)


def needs_shortcut(before: int, after: int, strides: int) -> bool:
    """Whether a block's input cannot be added to its result as it is."""
    return before != after or strides > 1
