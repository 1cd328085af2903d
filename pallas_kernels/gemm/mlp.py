"""Products of mlp and gated_mlp on Hopper, with an activation fused before or after them.

The other products are `pallas_kernels.gemm.linear`, or XLA's where nothing is to be fused.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.activation import activation as activate
from pallas_kernels.activation import activation_and_derivative
from pallas_kernels.gemm import cost, linear, xla_cost
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.matmul import MatmulConfig, fitting, matmul, predicted_time
from pallas_kernels.gemm.small_m import FewRowsConfig


def hidden_and_slope(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    *,
    activation: str,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the activation of x @ w1 + b1 and its derivative there, [M, F] each."""

    def epilogue(z, *, bias=None):
        z = z if bias is None else z + bias
        h, slope = activation_and_derivative(activation, z, x.dtype)
        return {"h": h, "slope": slope}

    results = matmul(
        x,
        w1,
        epilogue=epilogue,
        vectors={"bias": b1},
        outputs={"h": x.dtype, "slope": x.dtype},
        activations=2,
        config=config,
        multiprocessors=multiprocessors,
        name="hidden_and_slope",
    )
    return results["h"], results["slope"]


def hidden_gradient(
    dy: jax.Array,
    w2: jax.Array,
    z: jax.Array,
    *,
    activation: str | None,
    sum_rows: bool,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dz, activation(z), and dz summed over the rows, for dy [M, E], w2 [F, E] and z [M, F]."""

    def epilogue(dh, *, z):
        h, slope = activation_and_derivative(activation, z, dy.dtype)
        return {"dz": dh * slope, "h": h}

    results = matmul(
        dy,
        w2,
        b_transposed=True,
        epilogue=epilogue,
        matrices={"z": z},
        outputs={"dz": z.dtype} | ({} if activation is None else {"h": z.dtype}),
        column_sums=("dz",) if sum_rows else (),
        activations=0 if activation is None else 2,
        config=config,
        multiprocessors=multiprocessors,
        name="hidden_gradient",
    )
    return results["dz"], results.get("h", z), results.get("sum_dz")


def hidden_gradient_by_slope(
    dy: jax.Array,
    w2: jax.Array,
    slope: jax.Array,
    *,
    sum_rows: bool,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns dz and its sum over the rows, for dy [M, E], w2 [F, E] and the derivative [M, F]."""
    results = matmul(
        dy,
        w2,
        b_transposed=True,
        epilogue=lambda dh, *, slope: {"dz": dh * slope},
        matrices={"slope": slope},
        outputs={"dz": slope.dtype},
        column_sums=("dz",) if sum_rows else (),
        config=config,
        multiprocessors=multiprocessors,
        name="hidden_gradient_by_slope",
    )
    return results["dz"], results.get("sum_dz")


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
    """Returns (activation(gate) * up, gate, up) of x [M, D], the latter two if they are to be saved.

    Without `w_up`, w_gate [D, 2 F] and b_gate [2 F] hold both.
    """

    def epilogue(gate, up):
        return {"h": activate(activation, gate, x.dtype) * up, "gate": gate, "up": up}

    outputs = ("h", "gate", "up") if save_preactivations else ("h",)
    hidden = w_gate.shape[1] // (2 if w_up is None else 1)
    work = Work(
        x.shape[0],
        hidden,
        x.shape[1],
        itemsize=x.dtype.itemsize,
        w_itemsize=w_gate.dtype.itemsize if x.shape[0] <= cost.CONVERTED_ROWS else 0,
    )
    in_one, in_two = _times(work, len(outputs), multiprocessors)
    if w_up is None or in_one <= in_two or config is not None:
        results = _in_one_pass(
            x, w_gate, w_up, b_gate, b_up, epilogue, outputs, multiprocessors, config
        )
        return results["h"], results.get("gate"), results.get("up")
    gate = _gate(x, w_gate, b_gate, multiprocessors)
    outputs = ("h", "up") if save_preactivations else ("h",)
    results = _of_gate(x, gate, w_up, b_up, epilogue, outputs, multiprocessors)
    return results["h"], gate if save_preactivations else None, results.get("up")


def gated_forward_time(
    work: Work, *, stacked: bool, save_preactivations: bool, multiprocessors: int
) -> float:
    """Returns the predicted microseconds of `gated_forward` in 16 bits."""
    times = _times(work, 3 if save_preactivations else 1, multiprocessors)
    return times[0] if stacked else min(times)


def gated_forward_candidates(
    work: Work, *, stacked: bool, save_preactivations: bool, multiprocessors: int
) -> list[MatmulConfig | FewRowsConfig | None]:
    """Returns configs of both products of `gated_forward` in one pass over x, the default first.

    None stands for the default where that is one product after the other.
    """
    outputs = 3 if save_preactivations else 1
    in_one, in_two = _times(work, outputs, multiprocessors)
    in_one_pass = fitting(work, multiprocessors)
    return in_one_pass if stacked or in_one <= in_two else [None, *in_one_pass]


def _times(work: Work, outputs: int, multiprocessors: int) -> tuple[float, float]:
    """Returns predicted microseconds of both products in one pass over x, and in one pass each.

    One pass is limited to tiles of half the width.

    Args:
      work: the work of one of the products, or of both; epilogue aside.
    """
    one = replace(work, products=1, activations=1, read_bytes=0)
    in_one = replace(one, products=2, written_bytes=outputs * work.itemsize)
    # The second product writes h, and up too where both are saved.
    of_gate = replace(one, read_bytes=work.itemsize, written_bytes=min(outputs, 2) * work.itemsize)
    gate = xla_cost.xla_product(work.m, work.n, work.k, work.itemsize, multiprocessors)
    return (
        predicted_time(in_one, multiprocessors),
        gate + cost.conversion(one) + predicted_time(of_gate, multiprocessors),
    )


def _in_one_pass(
    x, w_gate, w_up, b_gate, b_up, epilogue, outputs, multiprocessors, config=None
) -> dict[str, jax.Array]:
    """Returns `outputs` of epilogue(gate, up), with both products in one pass over x."""
    if w_up is None and b_gate is not None:
        b_gate, b_up = jnp.split(b_gate, 2)

    def of_sums(gate, up, *, b_gate=None, b_up=None):
        gate = gate if b_gate is None else gate + b_gate
        return epilogue(gate, up if b_up is None else up + b_up)

    return matmul(
        x,
        w_gate if w_up is None else (w_gate, w_up),
        products=2,
        epilogue=of_sums,
        vectors={"b_gate": b_gate, "b_up": b_up},
        outputs=dict.fromkeys(outputs, x.dtype),
        activations=1,
        config=config,
        multiprocessors=multiprocessors,
        name="gated_unit",
    )


def _gate(x, w_gate, b_gate, multiprocessors) -> jax.Array:
    if b_gate is None:  # Nothing to fuse: 16384 x 1024 x 4096 takes XLA 166 us, ours 178.
        return jnp.matmul(x, w_gate.astype(x.dtype))
    gate, _ = linear.forward(
        x,
        w_gate,
        b_gate,
        None,
        activation=None,
        save_preactivation=False,
        out_dtype=x.dtype,
        multiprocessors=multiprocessors,
    )
    return gate


def _of_gate(x, gate, w_up, b_up, epilogue, outputs, multiprocessors) -> dict[str, jax.Array]:
    """Returns `outputs` of epilogue(gate, up), where the product for gate has been taken before."""

    def of_sum(up, *, gate, bias=None):
        return epilogue(gate, up if bias is None else up + bias)

    return matmul(
        x,
        w_up,
        epilogue=of_sum,
        vectors={"bias": b_up},
        matrices={"gate": gate},
        outputs=dict.fromkeys(outputs, x.dtype),
        activations=1,
        multiprocessors=multiprocessors,
        name="gated_unit",
    )


def gated_hidden_gradient(
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str | None,
    sum_rows: tuple[bool, bool],
    returns_hidden: bool,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns dgate, dup, activation(gate) * up, and the sums over the rows of the former two.

    dy is [M, E] and w_down [F, E]. The third is there if it `returns_hidden`, the sums as in `sum_rows`.
    """

    def epilogue(dh, *, gate, up):
        activated, slope = activation_and_derivative(activation, gate, dy.dtype)
        return {"dgate": dh * up * slope, "dup": dh * activated, "h": activated * up}

    results = matmul(
        dy,
        w_down,
        b_transposed=True,
        epilogue=epilogue,
        matrices={"gate": gate, "up": up},
        outputs=dict.fromkeys(("dgate", "dup", *(("h",) if returns_hidden else ())), gate.dtype),
        column_sums=[n for n, wanted in zip(("dgate", "dup"), sum_rows, strict=True) if wanted],
        activations=0 if activation is None else 2,
        config=config,
        multiprocessors=multiprocessors,
        name="gated_hidden_gradient",
    )
    names = ("dgate", "dup", "h", "sum_dgate", "sum_dup")
    return tuple(results.get(name) for name in names)


def gated_input_gradient(
    dgate: jax.Array,
    dup: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    *,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array]:
    """Returns the sum dgate @ w_gate^T + dup @ w_up^T, rounded once."""
    results = matmul(
        (dgate, dup),
        w_gate if w_up is None else (w_gate, w_up),
        b_transposed=True,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dgate.dtype},
        config=config,
        multiprocessors=multiprocessors,
        name="gated_input_gradient",
    )
    return (results["dx"],)
