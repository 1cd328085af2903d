#!/usr/bin/env bash
# What: Three forms of one clipped function have three derivatives at its corners: jax.nn.hard_tanh 1, jax.nn.relu6
# 0, and jnp.clip 0.5.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: One rule for functions that clip: hard_tanh(x) is relu6(3 x + 3) / 3 - 1 and jnp.clip(x, -1, 1).
# Seen: At -1 and 1 these have the derivatives 1, 0 and 0.5. At 0 leaky_relu has 1 and relu 0. A network whose
#   values are often exactly at a corner, as after clipping or in int8, gets other gradients from an equal program.
# In jaxfused: jaxfused/runtime/activation.py, tests/ops/linear/test_activation.py.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

forms = {
    "hard_tanh": jax.nn.hard_tanh,
    "relu6(3 x + 3) / 3 - 1": lambda x: jax.nn.relu6(3 * x + 3) / 3 - 1,
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
}
found = {}
for name, form in forms.items():
    assert [float(form(x)) for x in (-2.0, -1.0, 0.5, 1.0, 2.0)] == [-1.0, -1.0, 0.5, 1.0, 1.0]
    found[name] = [float(jax.grad(form)(x)) for x in (-1.0, 1.0)]
    print(name, "has the derivatives", found[name], "at -1 and 1")
print("leaky_relu", float(jax.grad(jax.nn.leaky_relu)(0.0)), "relu", float(jax.grad(jax.nn.relu)(0.0)), "at 0")
assert found["hard_tanh"] == [1.0, 1.0]
assert found["clip"] == [0.5, 0.5]
assert found["relu6(3 x + 3) / 3 - 1"] == [0.0, 0.0]
assert float(jax.grad(jax.nn.leaky_relu)(0.0)) == 1.0 and float(jax.grad(jax.nn.relu)(0.0)) == 0.0
PYTHON
