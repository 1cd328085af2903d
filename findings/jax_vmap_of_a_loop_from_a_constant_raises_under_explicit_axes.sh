#!/usr/bin/env bash
# What: jax.vmap over a split axis raises for a loop whose carry starts at a constant, under Explicit axes.
#
# Version: jax==0.11.2, jaxlib==0.11.2; 4 virtual devices of a CPU, Python 3.12 or newer.
# Expected: What Auto axes give: JAX makes the constant one of each entry, split as the entries are.
# Seen: "Resource axis: d of P('d',) is not found in mesh: ()" for fori_loop, scan and while_loop from 0.0, though
#   the mesh is set and has d; jnp.piecewise of a split array raises it from within. A carry that starts at 0 * x
#   works. jax.make_mesh makes Explicit axes unless told otherwise.
# In jaxfused: docs/sharding.md; its operators under jax.vmap run each device's entries by themselves
#   (jaxfused/runtime/sharding.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

lax = jax.lax


def piecewise(x):
    return jnp.piecewise(x, [x < 0], [0.0, 1.0])


by_row = {
    "fori_loop": lambda row: lax.fori_loop(0, 3, lambda i, total: total + row.sum(), 0.0),
    "scan": lambda row: lax.scan(lambda total, i: (total + row.sum(), None), 0.0, jnp.arange(3))[0],
    "while_loop": lambda row: lax.while_loop(lambda total: total < 5, lambda total: total + row.sum(), 0.0),
    "fori_loop from 0 * x": lambda row: lax.fori_loop(0, 3, lambda i, total: total + row.sum(), 0 * row[0]),
}
functions = {name: jax.vmap(function) for name, function in by_row.items()}
functions["piecewise"] = lambda x: piecewise(x[:, 0])
x = np.full((8, 2), 0.5, np.float32)
for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis_type,))
    raised = set()
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("d")))
        for name, function in functions.items():
            try:
                found = jax.jit(function)(placed)
                assert found.shape == (8,)
            except ValueError as error:
                assert "is not found in mesh" in str(error)
                raised.add(name)
    print(axis_type, "raised by", sorted(raised))
    assert raised == (set() if axis_type == AxisType.Auto else set(functions) - {"fori_loop from 0 * x"})
PYTHON
