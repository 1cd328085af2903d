"""from_qwix and from_aqt: the quantised arrays of JAX's other libraries, in trees of parameters."""

from collections.abc import Callable
from typing import Any

import jax

from jaxfused.runtime.other_arrays import converted, is_of_aqt, is_of_qwix


def from_qwix(tree: Any, *, axis: int = -2) -> Any:
    """Returns a tree in which every array of qwix is a `jaxfused.QuantizedArray`.

    The numbers are the same, in the layout that `jaxfused.quantize` chooses; those of 4 bits are packed.

    Args:
      tree: of parameters, with `qwix.QArray` in it, or what `qwix.quantize_params` wraps them in; or one
        such array.
      axis: along which scales are shared, counted from the last; of weights [D, F] it is -2.

    Returns:
      The tree; what is not of qwix stays as it is.

    Raises:
      ValueError: nothing in the tree is of qwix, or scales are not those of groups along the axis.

    Example:
      >>> import jax.numpy as jnp, jaxfused, types
      >>> array = types.SimpleNamespace(  # qwix.quantize(w, jnp.int8, channelwise_axes=[1])
      ...     qvalue=jnp.ones((4, 2), jnp.int8), scale=jnp.ones((1, 2)), zero_point=None, qtype=jnp.int8
      ... )
      >>> jaxfused.quantization.from_qwix({"kernel": array})["kernel"].shape
      (4, 2)

    Source: https://qwix.readthedocs.io
    """
    return _from("from_qwix", "qwix.QArray", is_of_qwix, tree, axis)


def from_aqt(tree: Any, *, axis: int = -2) -> Any:
    """Returns a tree in which every `QTensor` of AQT is a `jaxfused.QuantizedArray`.

    Args:
      tree: of parameters, or one array.
      axis: along which scales are shared, counted from the last; of weights [D, F] it is -2.

    Returns:
      The tree; what is not of AQT stays as it is.

    Raises:
      ValueError: nothing in the tree is of AQT, an array is tiled or sparse, or scales are not those of
        groups along the axis.

    Source: https://github.com/google/aqt
    """
    return _from("from_aqt", "QTensor", is_of_aqt, tree, axis)


def _from(op: str, kind: str, is_one: Callable[[Any], bool], tree: Any, axis: int) -> Any:
    found = 0

    def is_leaf(node: Any) -> bool:
        return is_one(node) or is_one(getattr(node, "array", None))

    def of_leaf(node: Any) -> Any:
        nonlocal found
        if not is_leaf(node):
            return node
        found += 1
        return converted(op, node if is_one(node) else node.array, axis, packs=True)

    result = jax.tree.map(of_leaf, tree, is_leaf=is_leaf)
    if not found:
        raise ValueError(f"{op}: the tree has no {kind}; pass parameters that were quantised.")
    return result
