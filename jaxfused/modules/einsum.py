"""The test whether an einsum of input and kernel is one product of matrices without transpositions."""

from typing import NamedTuple


class Split(NamedTuple):
    """An einsum as a product of matrices, over the last axes of x and the first ones of the kernel."""

    contracted: int
    """The number of contracted axes."""


def as_matrices(equation: str, x_axes: int, kernel_axes: int) -> Split | str:
    """Returns a Split if the equation is one product of matrices without transposes, else the reason.

    Args:
      equation: such as "BTD,DNH->BTNH" or "...NH,NHD->...D", with no spaces needed.
      x_axes: the number of axes of the first operand.
      kernel_axes: the number of axes of the second operand.
    """
    operands, _, result = equation.replace(" ", "").partition("->")
    left, _, right = operands.partition(",")
    if "..." in right:
        return "the kernel has an ellipsis"
    if "..." in left:
        # The axes of the ellipsis get letters that no user's equation has.
        count = x_axes - (len(left) - 3)
        rows = "".join(chr(ord("\u4e00") + i) for i in range(count))
        left, result = left.replace("...", rows), result.replace("...", rows)
    if len(left) != x_axes or len(right) != kernel_axes:
        return "the equation does not fit the operands"
    contracted = [letter for letter in left if letter in right and letter not in result]
    inputs, features = right[: len(contracted)], right[len(contracted) :]
    rows = left[: len(left) - len(contracted)]
    if not contracted or not features:
        return "the equation is no product of matrices"
    if left != rows + inputs or result != rows + features or set(rows) & set(right):
        return "the equation asks for a transposed operand or a batch of products"
    if len(set(left)) != len(left) or len(set(right)) != len(right):
        return "the equation has a diagonal"
    return Split(len(contracted))
