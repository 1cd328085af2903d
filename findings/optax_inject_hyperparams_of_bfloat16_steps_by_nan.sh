#!/usr/bin/env bash
# What: optax.inject_hyperparams(optax.adam) of bfloat16 parameters steps by NaN: b2 = 0.999 is 1 in bfloat16.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The steps of optax.adam itself, with the learning rate readable and settable in the state.
# Seen: Every hyperparameter takes the dtype of the parameters, and all updates are NaN from the first step on,
#   for adam, adamw and nadam; the same in float32, or with hyperparam_dtype=jnp.float32, is right.
# In jaxfused: jaxfused/optim/options.py refuses a b2 of 1 outside of jax.jit, and so names the cause.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np
import optax


def steps(transformation, dtype):
    parameters = jnp.ones(3, dtype)
    state, found = transformation.init(parameters), []
    for _ in range(3):
        updates, state = transformation.update(0.3 * parameters, state, parameters)
        found.append(float(updates[0]))
    return np.array(found), state


for name in ("adam", "adamw", "nadam"):
    make = getattr(optax, name)
    plain, _ = steps(make(1e-3), jnp.bfloat16)
    injected, state = steps(optax.inject_hyperparams(make)(1e-3), jnp.bfloat16)
    wide, _ = steps(optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(1e-3), jnp.bfloat16)
    single, _ = steps(optax.inject_hyperparams(make)(1e-3), jnp.float32)
    print(name, "plain", plain, "injected", injected, "in float32", wide, "b2", state.hyperparams["b2"])
    assert np.isnan(injected).all() and float(state.hyperparams["b2"]) == 1
    assert np.isfinite(plain).all() and np.isfinite(wide).all() and np.isfinite(single).all()
PYTHON
