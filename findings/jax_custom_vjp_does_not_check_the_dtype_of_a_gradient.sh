#!/usr/bin/env bash
# What: jax.custom_vjp checks the shape of what a backward rule returns, not its dtype; for an integer
# argument not even the shape.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A gradient of the argument's dtype, or an error, as for a wrong shape.
# Seen: jax.grad with respect to a bfloat16 array returns float32, and int32 zeros of shape (7,)
#   pass for an integer argument of shape (3,).
# In jaxfused: Its backward rules cast each gradient to its operand's dtype, as
#   jaxfused/ops/norm/adaptive_norm.py does.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np


@jax.custom_vjp
def double(x, index):
    return 2 * x


def backward(index, cotangent):
    return 2 * cotangent.astype(jnp.float32), np.zeros(7, np.int32)


double.defvjp(lambda x, index: (2 * x, index), backward)
x, index = jnp.ones(3, jnp.bfloat16), jnp.arange(3)
gradient = jax.grad(lambda x: jnp.sum(double(x, index)).astype(jnp.float32))(x)
plain = jax.grad(lambda x: jnp.sum(2 * x).astype(jnp.float32))(x)
print("operand", x.dtype, "gradient", gradient.dtype, "of jax's own rule", plain.dtype)
assert gradient.dtype == jnp.float32 and plain.dtype == jnp.bfloat16
PYTHON
