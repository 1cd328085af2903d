#!/usr/bin/env bash
# What: jax.nn.gelu, approximate by default, rounds each of its steps in bfloat16, so that its negative
# tail is noise.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The float32 result rounded once, as most 16-bit activations are on a GPU.
# Seen: -0.00586 for gelu(-3) whose float32 value is -0.00364, and exactly -0 at -4 for -7.0e-5; the
#   exact form in bfloat16 is within 2 %.
# In jaxfused: jaxfused/runtime/activation.py: an activation behind an operator is computed in
#   float32 and rounded once.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

x = jnp.array([-3, -4], jnp.bfloat16)
narrow = jax.nn.gelu(x).astype(jnp.float32)
wide = jax.nn.gelu(x.astype(jnp.float32))
exact = jax.nn.gelu(x, approximate=False).astype(jnp.float32)
exact_wide = jax.nn.gelu(x.astype(jnp.float32), approximate=False)
print("bfloat16", narrow, "float32", wide, "exact in bfloat16", exact)
assert narrow[0] / wide[0] > 1.6 and narrow[1] == 0 and wide[1] < -6e-5
assert abs(exact[0] / exact_wide[0] - 1) < 0.03
PYTHON
