#!/usr/bin/env bash
# What: nn.RNN and nnx.RNN return for a sequence of length 0 the carry after all of its padding.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The initial carry, zeros, as a sequence without a step leaves it; padding is said to be ignored.
# Seen: With seq_lengths=[0, 2, 5] of 5 steps, the first carry is that of 5 steps, and changes with the padding.
#   Lengths from 1 on are right.
# In jaxfused: It has no recurrent layers; its attention gives 0 for a sequence without keys
#   (docs/operators/attention.md).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

lengths = jnp.array([0, 2, 5])
x = jax.random.normal(jax.random.key(0), (3, 5, 4))
linen = nn.RNN(nn.GRUCell(8), return_carry=True)
variables = linen.init(jax.random.key(1), x)
new = nnx.RNN(nnx.GRUCell(4, 8, rngs=nnx.Rngs(0)), return_carry=True)
calls = {
    "linen": lambda x, lengths: linen.apply(variables, x, seq_lengths=lengths)[0],
    "nnx": lambda x, lengths: new(x, seq_lengths=lengths)[0],
}
for name, carry_of in calls.items():
    carry, full = carry_of(x, lengths), carry_of(x, jnp.array([5, 5, 5]))
    other = carry_of(x.at[0].add(1), lengths)
    two_steps = carry_of(x[:, :2], jnp.array([2, 2, 2]))
    print(name, "carry of length 0:", np.asarray(carry[0, :3]), "of all 5 steps:", np.asarray(full[0, :3]))
    np.testing.assert_allclose(carry[0], full[0], rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(carry[0]).max()) > 0.05 and float(jnp.abs(carry - other)[0].max()) > 0.01
    np.testing.assert_allclose(carry[1], two_steps[1], rtol=1e-5, atol=1e-6)
PYTHON
