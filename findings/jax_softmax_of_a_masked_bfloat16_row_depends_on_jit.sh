#!/usr/bin/env bash
# What: Under jax.jit on a CPU, a bfloat16 sum is not rounded to bfloat16 where its next use is a cast to float32, so that
# the softmax of a row of which all logits are masked by -1e4 has other values than the same program without jit.
#
# Version: jax==0.11.2, jaxlib==0.11.2; an x86 CPU, Python 3.12 or newer.
# Expected: One set of weights. As written, 1, 2, 3 and 4 less 1e4 are the same bfloat16, whose step there is 64: the
#   weights are 1/4 each.
# Seen: 0.25 without jit and with XLA's flag xla_allow_excess_precision turned off; 0.03, 0.09, 0.24 and 0.64 under jit,
#   whose default keeps the sum in float32.
# In jaxfused: tests/program_fuzz/judge.py compiles programs without excess precision; docs/operators/attention.md says
#   that a finite mask in 16 bits rounds the logits of a row that it masks whole, and recommends a boolean one.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

logits = jnp.asarray([1.0, 2.0, 3.0, 4.0], jnp.bfloat16)


def weights(logits):
    masked = logits + jnp.asarray(-1e4, jnp.bfloat16)
    return jax.nn.softmax(masked.astype(jnp.float32))


strict = jax.jit(weights, compiler_options={"xla_allow_excess_precision": False})
for name, f in (("without jit", weights), ("jit", jax.jit(weights)), ("strict jit", strict)):
    print(f"{name}: {np.round(np.asarray(f(logits)), 3)}")
np.testing.assert_allclose(weights(logits), 0.25)
np.testing.assert_allclose(strict(logits), 0.25)
np.testing.assert_allclose(jax.jit(weights)(logits), [0.032, 0.087, 0.237, 0.644], atol=1e-3)
PYTHON
