#!/usr/bin/env bash
# What: jax.grad of an array with Explicit axes, and a jitted function that closes over one, raise outside of
# jax.set_mesh, where jax.jit(jax.grad(...)) and the array as an argument do not.
#
# Version: jax==0.11.2, jaxlib==0.11.2; 2 virtual devices of a CPU, Python 3.12 or newer.
# Expected: The gradient, as the array's type and its sharding name mesh and devices.
# Seen: "Length of device assignment 1 is not equal to the size of the mesh 2", from constants that jax.grad and
#   jax.jit make on one device. jax.vjp with a cotangent, jax.lax.scan and Auto axes are right. jax.make_mesh makes
#   Explicit axes unless told otherwise.
# In jaxfused: jaxfused/parallel/zero1.py sets a mesh that it is given; outside of it, its operators take arrays of
#   Explicit axes as arguments (tests/parallel/test_compiled_once.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 "$folder/venv/bin/python" - <<'PYTHON'
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def square(x):
    return jnp.sum(x * x)


calls = {
    "jax.grad": lambda x: jax.grad(square)(x),
    "jax.jit of jax.grad": lambda x: jax.jit(jax.grad(square))(x),
    "jax.vjp": lambda x: jax.vjp(lambda x: x * x, x)[1](jnp.ones_like(x))[0],
    "jax.jit that closes over it": lambda x: jax.jit(lambda: 2 * x)(),
    "jax.jit of an argument": lambda x: jax.jit(lambda x: 2 * x)(x),
}
numbers = np.arange(4, dtype=np.float32)
for axis_type, sets in ((AxisType.Auto, False), (AxisType.Explicit, True), (AxisType.Explicit, False)):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axis_type,))
    raised = set()
    with jax.set_mesh(mesh) if sets else contextlib.nullcontext():
        x = jax.device_put(numbers, NamedSharding(mesh, P("d")))
        for name, call in calls.items():
            try:
                np.testing.assert_array_equal(call(x), 2 * numbers)
            except ValueError as error:
                assert "Length of device assignment 1" in str(error)
                raised.add(name)
    print(axis_type, "within" if sets else "outside of", "jax.set_mesh: raised by", sorted(raised))
    refused = {"jax.grad", "jax.jit that closes over it"}
    assert raised == (refused if axis_type == AxisType.Explicit and not sets else set())
PYTHON
