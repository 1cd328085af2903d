"""Products of mlp and gated_mlp on Hopper, with an activation fused before or after them.

The other products are in `pallas_kernels.gemm.linear`; those with nothing to fuse run in XLA.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activation import activation as activate
from pallas_kernels.activation import activation_and_derivative
from pallas_kernels.gemm import linear
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul import MatmulConfig, fitting
from pallas_kernels.gemm.small_m import FewRowsConfig


def hidden_and_slope(
    x: jax.Array, w1: jax.Array, b1: jax.Array | None, *, activation: str
) -> FusedProduct:
    """Returns h = activation(z) and slope = activation'(z), [M, F] each, for z = x @ w1 + b1."""

    def epilogue(z, *, bias=None):
        z = z if bias is None else z + bias
        h, slope = activation_and_derivative(activation, z, x.dtype)
        return {"h": h, "slope": slope}

    return FusedProduct(
        name="hidden_and_slope",
        a=x,
        b=w1,
        epilogue=epilogue,
        vectors={"bias": b1},
        outputs={"h": x.dtype, "slope": x.dtype},
        activations=2,
    )


def hidden_gradient(
    dy: jax.Array, w2: jax.Array, z: jax.Array, *, activation: str | None, sum_rows: bool
) -> FusedProduct:
    """Returns dz = (dy @ w2^T) * activation'(z) [M, F], and its sum over the rows if `sum_rows`.

    With an activation, h = activation(z) is returned too. dy is [M, E], and w2 [F, E].
    """

    def epilogue(dh, *, z):
        h, slope = activation_and_derivative(activation, z, dy.dtype)
        return {"dz": dh * slope, "h": h}

    return FusedProduct(
        name="hidden_gradient",
        a=dy,
        b=w2,
        b_transposed=True,
        epilogue=epilogue,
        matrices={"z": z},
        outputs={"dz": z.dtype} | ({} if activation is None else {"h": z.dtype}),
        column_sums=("dz",) if sum_rows else (),
        activations=0 if activation is None else 2,
    )


def hidden_gradient_by_slope(
    dy: jax.Array, w2: jax.Array, slope: jax.Array, *, sum_rows: bool
) -> FusedProduct:
    """Returns dz = (dy @ w2^T) * slope [M, F] for the activation's derivative `slope`.

    If `sum_rows`, the sum of dz over the rows is returned too. dy is [M, E], and w2 [F, E].
    """
    return FusedProduct(
        name="hidden_gradient_by_slope",
        a=dy,
        b=w2,
        b_transposed=True,
        epilogue=lambda dh, *, slope: {"dz": dh * slope},
        matrices={"slope": slope},
        outputs={"dz": slope.dtype},
        column_sums=("dz",) if sum_rows else (),
    )


def gated_unit(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    save_preactivations: bool,
) -> FusedProduct:
    """Returns h = activation(gate) * up [M, F], and gate and up if `save_preactivations`.

    gate is x @ w_gate + b_gate for x [M, D], and up is like it. Without `w_up`, w_gate [D, 2 F] and
    b_gate [2 F] hold the weights and biases of both.
    """
    if w_up is None and b_gate is not None:
        b_gate, b_up = jnp.split(b_gate, 2)
    multiplied = _multiplied(activation, x.dtype)

    def epilogue(gate, up, *, b_gate=None, b_up=None):
        gate = gate if b_gate is None else gate + b_gate
        return multiplied(gate, up if b_up is None else up + b_up)

    return FusedProduct(
        name="gated_unit",
        a=x,
        b=w_gate if w_up is None else (w_gate, w_up),
        products=2,
        epilogue=epilogue,
        vectors={"b_gate": b_gate, "b_up": b_up},
        outputs=dict.fromkeys(("h", "gate", "up") if save_preactivations else ("h",), x.dtype),
        activations=1,
    )


def _gated_unit_of_gate(
    x: jax.Array,
    gate: jax.Array,
    w_up: jax.Array,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    save_preactivations: bool,
) -> FusedProduct:
    """Returns the product with results h and up of `gated_unit`, given `gate` [M, F]."""
    multiplied = _multiplied(activation, x.dtype)

    def epilogue(up, *, gate, bias=None):
        return multiplied(gate, up if bias is None else up + bias)

    return FusedProduct(
        name="gated_unit",
        a=x,
        b=w_up,
        epilogue=epilogue,
        vectors={"bias": b_up},
        matrices={"gate": gate},
        outputs=dict.fromkeys(("h", "up") if save_preactivations else ("h",), x.dtype),
        activations=1,
    )


def _multiplied(activation: str | None, dtype: Any) -> Callable[..., dict[str, jax.Array]]:
    """Returns a function from gate and up to a dict of a gated unit's results: h, gate and up."""
    return lambda gate, up: {"h": activate(activation, gate, dtype) * up, "gate": gate, "up": up}


def gated_forward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    save_preactivations: bool,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns h, gate and up of `gated_unit`; the last two are None if they are not saved.

    gate and up are two separate products if there is no config, M and D are `_LONG_SUM` or more, and
    w_gate does not hold both weights.
    """
    keywords: dict[str, Any] = dict(activation=activation, save_preactivations=save_preactivations)
    unit = gated_unit(x, w_gate, w_up, b_gate, b_up, **keywords)
    if w_up is None or config is not None or not _takes_two_products(unit.work):
        results = unit.run(multiprocessors=multiprocessors, config=config)
        return results["h"], results.get("gate"), results.get("up")
    gate = _gate(x, w_gate, b_gate, multiprocessors)
    results = _gated_unit_of_gate(x, gate, w_up, b_up, **keywords).run(
        multiprocessors=multiprocessors
    )
    return results["h"], gate if save_preactivations else None, results.get("up")


def gated_forward_candidates(
    work: Work, *, stacked: bool, multiprocessors: int
) -> list[MatmulConfig | FewRowsConfig | None]:
    """Returns configs of `gated_forward`, both products in one pass over x, the default first.

    None, the default where M and D are `_LONG_SUM` or more, means two separate products.
    """
    in_one_pass = fitting(work, multiprocessors)
    return [None, *in_one_pass] if _takes_two_products(work) and not stacked else in_one_pass


def _takes_two_products(work: Work) -> bool:
    """Returns whether two passes over x, with tiles of twice as many columns, are faster than one."""
    return min(work.m, work.k) >= _LONG_SUM


_LONG_SUM = 2048


def _gate(
    x: jax.Array, w_gate: jax.Array, b_gate: jax.Array | None, multiprocessors: int
) -> jax.Array:
    # Without a bias there is nothing to fuse: 16384 x 1024 x 4096 takes 166 us in XLA, 178 in the
    # kernel.
    if b_gate is None:
        return jnp.matmul(x, w_gate.astype(x.dtype))
    gate = linear.layer(
        *(x, w_gate, b_gate, None), activation=None, save_preactivation=False, out_dtype=x.dtype
    )
    return gate.run(multiprocessors=multiprocessors)["y"]


def gated_hidden_gradient(
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str | None,
    sum_rows: tuple[bool, bool],
    returns_hidden: bool,
) -> FusedProduct:
    """Returns dgate, dup, h = activation(gate) * up, and the sums of dgate and of dup over the rows.

    dy is [M, E] and w_down [F, E]. h is computed if `returns_hidden`, and each sum if
    its entry of `sum_rows` is true.
    """

    def epilogue(dh, *, gate, up):
        activated, slope = activation_and_derivative(activation, gate, dy.dtype)
        return {"dgate": dh * up * slope, "dup": dh * activated, "h": activated * up}

    return FusedProduct(
        name="gated_hidden_gradient",
        a=dy,
        b=w_down,
        b_transposed=True,
        epilogue=epilogue,
        matrices={"gate": gate, "up": up},
        outputs=dict.fromkeys(("dgate", "dup", *(("h",) if returns_hidden else ())), gate.dtype),
        column_sums=[n for n, wanted in zip(("dgate", "dup"), sum_rows, strict=True) if wanted],
        activations=0 if activation is None else 2,
    )


def gated_input_gradient(
    dgate: jax.Array, dup: jax.Array, w_gate: jax.Array, w_up: jax.Array | None
) -> FusedProduct:
    """Returns the sum dx = dgate @ w_gate^T + dup @ w_up^T, rounded once."""
    return FusedProduct(
        name="gated_input_gradient",
        a=(dgate, dup),
        b=w_gate if w_up is None else (w_gate, w_up),
        b_transposed=True,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dgate.dtype},
    )
