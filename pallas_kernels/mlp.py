"""mlp and gated_mlp on the Hopper product, where an activation stands before or after it.

Their other products are `pallas_kernels.linear`, or XLA's where nothing is to be fused.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.activation import activation as activate
from pallas_kernels.activation import derivative
from pallas_kernels.matmul import MatmulConfig, matmul

# An epilogue that reads or writes several matrices takes few columns at a time, so that the ring keeps
# its slots.
_HIDDEN_GRADIENT = MatmulConfig(epilogue_columns=32)
_GATED_FORWARD = MatmulConfig(epilogue_columns=32)
_GATED_HIDDEN_GRADIENT = MatmulConfig(tile_n=128, epilogue_columns=32)
_GATED_INPUT_GRADIENT = MatmulConfig()


def hidden_gradient(
    dy: jax.Array,
    w2: jax.Array,
    z: jax.Array,
    *,
    activation: str | None,
    sum_rows: bool,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Of dy [M, E], w2 [F, E] and z [M, F]: dz, activation(z), and dz summed over the rows."""

    def epilogue(dh, *, z):
        dz = dh * derivative(activation, z)
        return {"dz": dz, "h": activate(activation, z), "db": dz}

    results = matmul(
        dy,
        w2,
        b_transposed=True,
        epilogue=epilogue,
        matrices={"z": z},
        outputs={"dz": z.dtype} | ({} if activation is None else {"h": z.dtype}),
        column_sums=("db",) if sum_rows else (),
        config=config or _HIDDEN_GRADIENT,
        multiprocessors=multiprocessors,
    )
    return results["dz"], results.get("h", z), results.get("db")


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
    config: MatmulConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(activation(gate) * up, gate, up) of x [M, D], the latter two if they are to be saved.

    Without `w_up`, w_gate [D, 2 F] and b_gate [2 F] hold both.
    """
    if w_up is None and b_gate is not None:
        b_gate, b_up = jnp.split(b_gate, 2)

    def epilogue(gate, up, *, b_gate=None, b_up=None):
        gate = gate if b_gate is None else gate + b_gate
        up = up if b_up is None else up + b_up
        gate, up = (z.astype(x.dtype).astype(jnp.float32) for z in (gate, up))
        return {"h": activate(activation, gate) * up, "gate": gate, "up": up}

    saved = ("gate", "up") if save_preactivations else ()
    results = matmul(
        x,
        w_gate if w_up is None else (w_gate, w_up),
        products=2,
        epilogue=epilogue,
        rows={"b_gate": b_gate, "b_up": b_up},
        outputs=dict.fromkeys(("h", *saved), x.dtype),
        config=config or _GATED_FORWARD,
        multiprocessors=multiprocessors,
    )
    return results["h"], results.get("gate"), results.get("up")


def gated_hidden_gradient(
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str | None,
    sum_rows: tuple[bool, bool],
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Of dy [M, E], w_down [F, E]: dgate, dup, activation(gate) * up, and the former's row sums."""

    def epilogue(dh, *, gate, up):
        activated = activate(activation, gate)
        dgate = dh * up * derivative(activation, gate)
        dup = dh * activated
        return {
            "dgate": dgate,
            "dup": dup,
            "h": activated * up,
            "db_gate": dgate,
            "db_up": dup,
        }

    results = matmul(
        dy,
        w_down,
        b_transposed=True,
        epilogue=epilogue,
        matrices={"gate": gate, "up": up},
        outputs=dict.fromkeys(("dgate", "dup", "h"), gate.dtype),
        column_sums=[n for n, wanted in zip(("db_gate", "db_up"), sum_rows, strict=True) if wanted],
        config=config or _GATED_HIDDEN_GRADIENT,
        multiprocessors=multiprocessors,
    )
    names = ("dgate", "dup", "h", "db_gate", "db_up")
    return tuple(results.get(name) for name in names)


def gated_input_gradient(
    dgate: jax.Array,
    dup: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    *,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array]:
    """The sum dgate @ w_gate^T + dup @ w_up^T, rounded once."""
    results = matmul(
        (dgate, dup),
        w_gate if w_up is None else (w_gate, w_up),
        b_transposed=True,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dgate.dtype},
        config=config or _GATED_INPUT_GRADIENT,
        multiprocessors=multiprocessors,
    )
    return (results["dx"],)
