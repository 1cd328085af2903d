#!/usr/bin/env bash
# What: jax.nn.scaled_dot_general in nvfp4 cannot represent a row of ones unless a global scale is given,
# and none is given by default.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: 1 is a value of e2m1 and every block's scale is exact for ones: 32 ones times 32 ones
#   are 32.
# Seen: 34.03: the block's scale 1/6 is rounded to float8 (each one becomes 1.031); with the global
#   scale 1 / (448 * 6) it is 32.
# In jaxfused: Its quantised products take float32 scales (docs/quantisation.md); nvfp4 is not among
#   their formats.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

ones = jnp.ones((1, 32))
contract_last = (((1,), (1,)), ((), ()))


def product(**scale):
    config = jax.nn.get_scaled_dot_general_config("nvfp4", **scale)
    result = jax.nn.scaled_dot_general(
        ones, ones, contract_last, preferred_element_type=jnp.float32, configs=[config] * 3
    )
    return float(result[0, 0])


by_default, with_scale = product(), product(global_scale=jnp.float32(1 / (448 * 6)))
print(by_default, with_scale)
assert by_default == 34.03125 and with_scale == 32
PYTHON
