#!/usr/bin/env bash
# What: jax.lax.conv_transpose pads by another rule where "SAME" or "VALID" is in lower case, unlike conv_general_dilated.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The result of upper case, or an error that says which names there are.
# Seen: With a stride of 1 "same" moves the result of a kernel of 4 by one place, and "valid" gives 1 number
#   in place of 7; with larger strides both raise.
# In jaxfused: jaxfused/modules/conv_transpose.py hands such a name to Flax's code, which passes it on to
#   JAX; the operator in jaxfused/ops/conv/conv_transpose.py reads either case alike.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

x, kernel = jnp.arange(1.0, 5).reshape(1, 4, 1), jnp.arange(1.0, 5).reshape(4, 1, 1)
layout = ("NHC", "HIO", "NHC")


def transposed(padding, stride=1):
    y = jax.lax.conv_transpose(x, kernel, (stride,), padding, dimension_numbers=layout)
    return y.ravel().tolist()


for padding in ("SAME", "same", "VALID", "valid"):
    print(padding, transposed(padding))
assert transposed("SAME") == [11, 20, 30, 20] and transposed("same") == [20, 30, 20, 11]
assert transposed("VALID") == [4, 11, 20, 30, 20, 11, 4] and transposed("valid") == [30]
for padding in ("same", "valid"):
    try:
        transposed(padding, stride=2)
    except ValueError as error:
        print(padding, "with a stride of 2:", error)
    else:
        raise AssertionError("a stride of 2 is no longer refused")
PYTHON
