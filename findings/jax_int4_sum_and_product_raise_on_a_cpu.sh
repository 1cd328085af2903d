#!/usr/bin/env bash
# What: jnp.sum of int4 raises, and so does an int4 product into int32, the form that quantised inference
# needs.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: As for int8, which sums and multiplies into int32.
# Seen: ValueError 'Invalid integer data type V' for the sum; the product is refused by XLA's
#   verifier: 'does not support custom element sizes on non-sub-byte types'.
# In jaxfused: jaxfused/runtime/quantized_array.py holds two nibbles in a uint8 and widens them
#   to int8 before a product.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def product(dtype):
    ones = jnp.ones((4, 4), dtype)
    return jax.lax.dot_general(ones, ones, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def message(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


sum_error, product_error = message(jnp.sum, jnp.ones(4, jnp.int4)), message(product, jnp.int4)
print(sum_error, product_error, sep="\n")
assert sum_error == "ValueError: Invalid integer data type 'V'."
assert "custom element sizes" in product_error
assert int(product(jnp.int8)[0, 0]) == 4 and int(jnp.sum(jnp.ones(4, jnp.int8))) == 4
PYTHON
