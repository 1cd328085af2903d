"""Runs a kernel's lowered register operations one by one with NumPy.

A vector value has the elements of its register as its last axis, and before it an axis for the threads
of a warp if a test follows several.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

_COMPUTE = {
    "arith.addf": np.add,
    "arith.andi": np.bitwise_and,
    "arith.bitcast": lambda number: number,
    "arith.extf": lambda number: number.astype(np.float32),
    "arith.extui": lambda number: number.astype(np.uint32),
    "arith.mulf": np.multiply,
    "arith.select": np.where,
    "arith.shrui": np.right_shift,
    "arith.subf": np.subtract,
    "arith.xori": np.bitwise_xor,
    "vector.broadcast": lambda number: number[..., None],
    "vector.from_elements": lambda *elements: np.stack(elements, axis=-1),
}
_DTYPES = {"bf16": jnp.bfloat16, "f16": np.float16, "i16": np.uint16, "i32": np.uint32}


def computed(block: Any, values: Any, results: Any) -> list[Any]:
    """Returns the values of `results`, from those of the block's arguments."""
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
            case "vector.bitcast":
                [number] = operands
                element = ir.VectorType(op.results[0].type).element_type
                value = np.ascontiguousarray(number).view(_DTYPES[str(element)])
            case "llvm.inline_asm":
                assembly = ir.StringAttr(op.attributes["asm_string"]).value
                value = _instruction(assembly.split()[0], *operands)
            case "nvvm.shfl.sync":
                _, number, distance, _ = operands
                value = number[np.arange(len(number)) ^ distance]
            case name:
                value = _COMPUTE[name](*operands)
        known[op.results[0]] = value
    return [known[result] for result in results]


def _instruction(name: str, *operands: Any) -> Any:
    """Returns the result of a PTX instruction on words."""
    if name == "prmt.b32":
        low, high, selector = operands
        both = low.astype(np.uint64) | np.uint64(high) << np.uint64(32)
        found = [both >> np.uint64(8 * (selector >> 4 * i & 7)) & np.uint64(255) for i in range(4)]
        return sum(byte << np.uint64(8 * i) for i, byte in enumerate(found)).astype(np.uint32)
    of = {"fma.rn.bf16x2": jnp.bfloat16, "fma.rn.f16x2": np.float16}[name]
    a, b, c = (_halves(word, of).astype(np.float64) for word in operands)
    return (a * b + c).astype(of).view(np.uint32)[..., 0]


def _halves(word: Any, dtype: Any) -> Any:
    return np.ascontiguousarray(np.asarray(word, np.uint32)[..., None]).view(dtype)


def _constant(op: Any) -> Any:
    attribute = op.attributes["value"]
    if isinstance(op.results[0].type, ir.VectorType):
        kind = ir.VectorType(op.results[0].type)
        splat = ir.FloatAttr(ir.DenseElementsAttr(attribute).get_splat_value()).value
        return np.full(kind.shape, splat, _DTYPES[str(kind.element_type)])
    if isinstance(op.results[0].type, ir.IntegerType):
        return ir.IntegerAttr(attribute).value
    return np.float32(ir.FloatAttr(attribute).value)
