#!/usr/bin/env bash
# What: Inside a jax.shard_map of some mesh axes of which others are Auto, what jax.eval_shape returns is refused by
# JAX, and jnp.searchsorted, digitize, interp and histogram, which use it, raise.
#
# Version: jax==0.11.2, jaxlib==0.11.2, and so in 0.12.0.1; 4 virtual devices of a CPU, Python 3.12 or newer.
# Expected: Shapes that eval_shape, zeros_like and linear_transpose take, as outside of the shard_map, and the values
#   that a shard_map of all the axes gives.
# Seen: AssertionError: ManualAxisType(varying=frozenset({'b'}), ...), for every operand that varies along the Manual
#   axis. The shape says that it varies, but has no mesh. searchsorted raises with each method but "sort",
#   so do jnp.digitize, interp and histogram and jax.random.choice(p=...). With every axis Manual, with an Explicit
#   axis instead of the Auto one, or with check_vma=False, all of them work.
# In jaxfused: jaxfused/runtime/sharding.py (searchsorted, eval_shape).
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

x, table = np.linspace(0, 3, 8, dtype=np.float32), np.arange(5, dtype=np.float32)


def shape(x):
    return jax.eval_shape(jnp.sin, x)


functions = {
    "eval_shape of a shape": lambda x: x + jnp.zeros(jax.eval_shape(jnp.cos, shape(x)).shape),
    "zeros_like of a shape": lambda x: x + jnp.zeros_like(shape(x)),
    "linear_transpose of a shape": lambda x: jax.linear_transpose(lambda x: 2 * x, shape(x))(x)[0],
    "eval_shape once": lambda x: x + jnp.zeros(shape(x).shape),
    "digitize": lambda x: jnp.digitize(x, table),
    "interp": lambda x: jnp.interp(x, table, table**2),
    "histogram": lambda x: x + jnp.histogram(x, 4, (0, 3))[0],
}
for method in ("scan", "scan_unrolled", "compare_all", "sort"):
    functions[f"searchsorted, {method}"] = lambda x, method=method: jnp.searchsorted(table, x, method=method)
works = {"eval_shape once", "searchsorted, sort"}

auto = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
explicit = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
for title, mesh, names, options in (
    ("beside an Auto axis", auto, {"b"}, {}),
    ("beside an Explicit axis", explicit, {"b"}, {}),
    ("all axes Manual", auto, {"a", "b"}, {}),
    ("check_vma=False", auto, {"b"}, {"check_vma": False}),
):
    raised = set()
    with jax.set_mesh(mesh):
        for name, function in functions.items():
            split = jax.shard_map(function, in_specs=P("b"), out_specs=P("b"), axis_names=names, **options)
            try:
                found = jax.jit(split)(x)
            except AssertionError as error:
                assert "ManualAxisType" in str(error)
                raised.add(name)
                continue
            right = np.concatenate([function(half) for half in np.split(x, 2)])
            np.testing.assert_allclose(found, right, rtol=1e-6)
    print(title, "raised by", sorted(raised))
    assert raised == (set(functions) - works if title == "beside an Auto axis" else set())
PYTHON
