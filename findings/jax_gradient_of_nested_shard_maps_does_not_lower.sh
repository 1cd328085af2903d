#!/usr/bin/env bash
# What: JAX cannot lower the gradient of a jax.shard_map inside another one, whose value it computes.
#
# Version: jax==0.11.2, jaxlib==0.11.2, and so in 0.12.0.1; 4 virtual devices of a CPU in a mesh [2, 2] of Auto axes,
#   Python 3.12 or newer.
# Expected: The gradient of one shard_map of both axes.
# Seen: "ValueError: Cannot lower jaxpr with verifier errors: 'sdy.manual_computation' op operand 1 - operates on axis
#   "b" which is already bound by a parent sdy.manual_computation op", for a sine, for 2 * x, and also where the
#   gradient is taken inside the outer shard_map. The value and forward mode are right. So is the gradient with
#   check_vma=False on both; with it on the inner one alone another error comes first.
# In jaxfused: jaxfused/runtime/sharding.py makes a shard_map inside the caller's only within an operator's own
#   gradient rules, so that JAX differentiates through none.
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

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
x = np.linspace(0, 3, 16, dtype=np.float32).reshape(8, 2)


def split(function, axis, **options):
    return jax.shard_map(function, in_specs=P(axis), out_specs=P(axis), axis_names={axis}, **options)


def gradient(function):
    return jax.grad(lambda x: function(x).sum())


with jax.set_mesh(mesh):
    for name, function in (("sin", jnp.sin), ("2 * x", lambda x: 2 * x)):
        right = gradient(function)(x)
        nested = split(split(function, "a"), "b")
        np.testing.assert_allclose(jax.jit(nested)(x), function(x), rtol=1e-6)
        (forward,) = jax.jit(lambda x: jax.jvp(nested, (x,), (jnp.ones_like(x),))[1:])(x)
        np.testing.assert_allclose(forward, right, rtol=1e-6)

        for place, refused in (
            ("outside", gradient(nested)),
            ("inside the outer one", split(gradient(split(function, "a")), "b")),
        ):
            try:
                jax.jit(refused)(x)
                raise SystemExit("lowered")
            except ValueError as error:
                print(f"gradient of {name} taken {place}:", str(error).splitlines()[1].strip())
                assert "already bound by a parent sdy.manual_computation" in str(error)

        flat = jax.shard_map(function, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
        unchecked = split(split(function, "a", check_vma=False), "b", check_vma=False)
        for works in (flat, unchecked):
            np.testing.assert_allclose(jax.jit(gradient(works))(x), right, rtol=1e-6)
PYTHON
