#!/usr/bin/env bash
# What: optax.softmax_cross_entropy is NaN where a class is masked by a logit of -inf, while its gradient
# is finite.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The loss of the other classes: the masked class has the target 0.
#   softmax_cross_entropy_with_integer_labels gives it.
# Seen: NaN and the right gradient, so that training goes on while the logged loss and every check
#   of it fail; integer labels give 1.3133.
# In jaxfused: jaxfused/ops/loss/cross_entropy.py takes classes, gives the value and a finite gradient.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

logits, label = jnp.array([[0.0, -jnp.inf, 1.0]]), jnp.array([0])
one_hot = jax.nn.one_hot(label, 3)
loss, gradient = jax.value_and_grad(lambda logits: optax.softmax_cross_entropy(logits, one_hot).sum())(logits)
by_integers = optax.softmax_cross_entropy_with_integer_labels(logits, label)
print("one-hot", loss, "integers", by_integers, "gradient", gradient)
assert jnp.isnan(loss) and jnp.isfinite(gradient).all() and abs(float(by_integers[0]) - 1.3132616) < 1e-5
PYTHON
