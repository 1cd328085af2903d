"""Products of MLPs of groups of rows (mixture of experts) on Hopper, with their activation fused.

Weights are [E, D, F], or [E, F, D] with `transposed`. A gated MLP has two first matrices, gate and up,
or one with the gate's columns before those of up.
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
    """Returns the product with results h = activation(z), or activation(gate) * up, [M, F].

    If `saves`, z, or gate and up, are results too: rows of x times their group's first matrices.
    """
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
    """Returns the product for dx [M, D], the sum of each dz @ weights^T, rounded once."""
    return GroupedProduct(
        name="grouped_input_gradient",
        a=dzs,
        b=weights,
        b_transposed=not transposed,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": out_dtype},
    )
