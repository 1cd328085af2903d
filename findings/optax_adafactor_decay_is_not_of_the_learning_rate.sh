#!/usr/bin/env bash
# What: The weight_decay_rate of optax.adafactor is taken off as it is: it is not multiplied by the learning rate,
# as the weight_decay of Optax's other optimizers is.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A decay of 0.1 with a learning rate of 1e-3 shrinks a parameter by 1e-4 at each step, and by nothing
#   where a warm-up begins with 0, as in optax.adamw and in the Adafactor of torch, Keras, timm and transformers.
#   The docstring says "Optional rate at which to decay weights".
# Seen: Parameters shrink by 10 % at each step, at a learning rate of 1e-3, of 0 and throughout a schedule that
#   falls to 0: 65 % are gone after ten steps. A decay of 1e-4 that looks small undoes a parameter in 10,000
#   steps.
# In jaxfused: jaxfused/optim/adafactor.py keeps Optax's numbers; its docstring says so, and what to pass for the
#   other.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax


def after_ten_steps(optimizer):
    parameter = jnp.ones(4)
    state = optimizer.init(parameter)
    for _ in range(10):
        update, state = optimizer.update(jnp.zeros(4), state, parameter)
        parameter = optax.apply_updates(parameter, update)
    return float(parameter[0])


falling = optax.linear_schedule(1e-3, 0.0, 5)
for rate in (1e-3, 0.0, falling):
    adafactor = after_ten_steps(optax.adafactor(rate, weight_decay_rate=0.1))
    others = [after_ten_steps(make(rate, weight_decay=0.1)) for make in (optax.adamw, optax.lion, optax.lamb)]
    print("learning rate", "falling" if callable(rate) else rate, "adafactor", adafactor, "adamw, lion, lamb", others)
    assert abs(adafactor - 0.9**10) < 1e-5 and all(1 - other < 0.02 for other in others)
PYTHON
