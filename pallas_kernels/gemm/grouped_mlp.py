"""Products of the perceptrons of groups of rows on Hopper, with their activation fused.

Weights are [E, D, F], or [E, F, D] with `transposed`. A gated perceptron has two first matrices, or one
with the gate's columns before the others.
"""

from collections.abc import Sequence

import jax

from pallas_kernels.activation import activation as activate
from pallas_kernels.gemm.grouped import GroupedProduct


def hidden_layer(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    activation: str | None,
    gated: bool,
    transposed: bool,
    saves: bool,
) -> GroupedProduct:
    """Returns h = activation(z) or activation(gate) * up, and z, or gate and up, if they are saved."""
    saved = ("gate", "up") if gated else ("z",)

    def epilogue(*z):
        h = activate(activation, z[0], x.dtype)
        return dict(zip(saved, z, strict=True)) | {"h": h * z[1] if gated else h}

    return GroupedProduct(
        name="grouped_hidden_layer",
        a=(x,),
        b=weights,
        b_transposed=transposed,
        products=len(saved),
        epilogue=epilogue,
        outputs=dict.fromkeys(("h", *(saved if saves else ())), x.dtype),
        activations=int(activation is not None),
    )


def input_gradient(
    dzs: Sequence[jax.Array], weights: Sequence[jax.Array], *, transposed: bool, out_dtype
) -> GroupedProduct:
    """Returns dx, the sum of each dz times the transpose of its weights, rounded once."""
    return GroupedProduct(
        name="grouped_input_gradient",
        a=dzs,
        b=weights,
        b_transposed=not transposed,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": out_dtype},
    )
