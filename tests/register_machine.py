"""What a kernel is lowered to for its registers, computed op by op with NumPy.

A value has the elements of a register as its last axis, if it is one, and before it the threads of a
warp, where a test follows several.
"""

from typing import Any

import numpy as np
from jaxlib.mlir import ir

_COMPUTE = {
    "arith.addf": np.add,
    "arith.andi": np.bitwise_and,
    "arith.bitcast": lambda number: number,
    "arith.extf": lambda number: number.astype(np.float32),
    "arith.mulf": np.multiply,
    "arith.select": np.where,
    "arith.subf": np.subtract,
    "vector.from_elements": lambda *elements: np.stack(elements, axis=-1),
}


def computed(block: Any, values: Any, results: Any) -> list[Any]:
    """The values of `results`, from those of the block's arguments."""
    known = dict(zip(block.arguments, values, strict=True))
    for op in block.operations:
        operands = [known[operand] for operand in op.operands]
        match op.operation.name:
            case "arith.constant":
                value = _constant(op)
            case "arith.cmpi":
                assert ir.IntegerAttr(op.attributes["predicate"]).value == 1, "only ne is known"
                value = np.not_equal(*operands)
            case "vector.extract":
                [index] = op.attributes["static_position"]
                value = operands[0][..., index]
            case "nvvm.shfl.sync":
                _, number, distance, _ = operands
                value = number[np.arange(len(number)) ^ distance]
            case name:
                value = _COMPUTE[name](*operands)
        known[op.results[0]] = value
    return [known[result] for result in results]


def _constant(op: Any) -> Any:
    attribute = op.attributes["value"]
    if isinstance(op.results[0].type, ir.IntegerType):
        return ir.IntegerAttr(attribute).value
    return np.float32(ir.FloatAttr(attribute).value)
