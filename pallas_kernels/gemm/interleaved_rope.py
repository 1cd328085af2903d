"""Rope of interleaved pairs, on the registers of a product's epilogue.

In the layouts of products, a register holds an even number of adjacent features of a row, so that both
features of a pair are in one register. Mosaic's array operations cannot address a part of a register, so
the code here is emitted register by register.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector


def table(cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns cosines and sines [P, R/2] interleaved in one table [P, R], as `turned` reads them."""
    return jnp.stack((cos, sin), axis=-1).reshape(len(cos), 2 * cos.shape[-1])


def turned(
    x: jax.Array, angles: jax.Array, is_fixed: jax.Array, *, layout: Any = plgpu.Layout.WGMMA
) -> jax.Array:
    """Rotates each interleaved pair of float32 features [M, C] by its angle.

    Args:
      angles: [M, C], interleaved cosines and sines, of float32 or float16.
      is_fixed: 1 to rotate nothing, else 0; a scalar of the angles' dtype.
      layout: of x and the angles, with an even number of features in a register.
    """
    # JAX 0.11.2 leaves a broadcast scalar in its splat layout, even if another layout is requested,
    # so `is_fixed` is passed in that layout.
    one_number = plgpu.Layout.WG_SPLAT(x.shape)

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, one_number),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def turn(ctx, *arrays):
        del ctx
        return _turned_registers(*arrays)

    return turn(x, angles * (1 - is_fixed), jnp.broadcast_to(is_fixed, x.shape))


def _turned_registers(x: Any, angles: Any, is_fixed: Any) -> Any:
    """Emits the code of `turned` when a kernel is lowered; returns the registers with the result."""
    number = angles.mlir_dtype
    zero = arith.constant(number, ir.FloatAttr.get(number, 0.0))
    # With `is_fixed`, cosines and sines are 0 here, and adding (1, 0) makes the rotation the identity.
    # An addition works on pairs of numbers: half as many instructions as a selection.
    cosine_and_sine = [is_fixed.registers.item(), zero]
    registers = np.empty_like(x.registers)
    for place, features in np.ndenumerate(x.registers):
        turns = angles.registers[place]
        size = turns.type.shape[0]
        turns = _ADD(turns, vector.from_elements(turns.type, cosine_and_sine * (size // 2)))
        if number != x.mlir_dtype:
            turns = arith.extf(features.type, turns)
        results = []
        for first in range(0, size, 2):
            (a, b), (cos, sin) = (
                [vector.extract(register, [], [first + i]) for i in (0, 1)]
                for register in (features, turns)
            )
            results.append(_SUBTRACT(_MULTIPLY(a, cos), _MULTIPLY(b, sin)))
            results.append(_ADD(_MULTIPLY(b, cos), _MULTIPLY(a, sin)))
        registers[place] = vector.from_elements(features.type, results)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


# A product and a sum may become one instruction (FMA), as in all of a kernel's arithmetic.
_MULTIPLY, _ADD, _SUBTRACT = (
    functools.partial(operation, fastmath=arith.FastMathFlags.contract)
    for operation in (arith.mulf, arith.addf, arith.subf)
)
