#!/usr/bin/env bash
# What: jnp.interp, jnp.searchsorted, jnp.digitize and jnp.polyval, which look at each number by itself, raise for
# a split array under Explicit axes.
#
# Version: jax==0.11.2, jaxlib==0.11.2; 4 virtual devices of a CPU, Python 3.12 or newer.
# Expected: A result split as the argument is, as jnp.sin, jnp.isin and jnp.select return it.
# Seen: interp, searchsorted and digitize say that the axis is not found in the mesh, and polyval that a scan's
#   carry changes its type, which no argument of theirs can cure. All are right under Auto axes, and so is
#   searchsorted with method="compare_all". jax.make_mesh makes Explicit axes unless told otherwise.
# In jaxfused: docs/sharding.md; its operators take Auto and Explicit axes (tests/every_operator/test_shards.py).
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

x, table = np.linspace(0, 3, 8, dtype=np.float32), np.arange(5, dtype=np.float32)
functions = {
    "interp": (lambda x: jnp.interp(x, table, table**2), np.interp(x, table, table**2)),
    "searchsorted": (lambda x: jnp.searchsorted(table, x), np.searchsorted(table, x)),
    "searchsorted, compare_all": (
        lambda x: jnp.searchsorted(table, x, method="compare_all"),
        np.searchsorted(table, x),
    ),
    "digitize": (lambda x: jnp.digitize(x, table), np.digitize(x, table)),
    "polyval": (lambda x: jnp.polyval(table, x), np.polyval(table, x)),
    "isin": (lambda x: jnp.isin(x, table), np.isin(x, table)),
    "sin": (jnp.sin, np.sin(x)),
}
for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis_type,))
    raised = set()
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("d")))
        for name, (function, right) in functions.items():
            try:
                found = function(placed)
            except Exception:  # Of several types; Auto axes show that nothing else is wrong.
                raised.add(name)
                continue
            np.testing.assert_allclose(found, right, rtol=1e-5)
    print(axis_type, "raised by", sorted(raised))
    refused = {"interp", "searchsorted", "digitize", "polyval"}
    assert raised == (set() if axis_type == AxisType.Auto else refused)
PYTHON
