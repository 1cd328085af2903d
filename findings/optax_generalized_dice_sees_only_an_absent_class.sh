#!/usr/bin/env bash
# What: optax.losses.multiclass_generalized_dice_loss is nearly 0 for pictures that are wrong in every pixel, as
# soon as one class is absent from the batch.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Near 1 for a wrong prediction and 0 for a right one. The paper that its docstring names puts the
#   weights, one over the squared number of pixels, inside numerator and denominator, where a class without pixels
#   adds only its false alarms.
# Seen: Two classes exchanged in all pixels cost 0.97; with a third class that the batch does not hold they cost
#   0.0015, and the right prediction costs the same 0.0015. The absent class gets the weight 1 / 1e-7, weights are
#   normalised to sum to the number of classes, and 1e-10 is left for the others, also of the gradient. A class
#   that is missing from a batch is the case for which one weighs classes.
# In jaxfused: segmentation_loss weighs classes by the caller's numbers alone
#   (jaxfused/ops/loss/segmentation_loss.py).
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

labels = jnp.array([[0, 0, 1, 1, 1, 0, 1, 0] * 8])


def loss_of(prediction, classes):
    targets, logits = jax.nn.one_hot(labels, classes), 10 * jax.nn.one_hot(prediction, classes)
    loss = optax.losses.multiclass_generalized_dice_loss
    value, gradient = jax.value_and_grad(loss)(logits, targets)
    return float(value), float(jnp.abs(gradient[..., :2]).max())


for classes in (2, 3):
    print(classes, "classes: right", loss_of(labels, classes), "exchanged", loss_of(1 - labels, classes))
assert loss_of(1 - labels, 2)[0] > 0.9 and loss_of(labels, 2)[0] < 1e-3
right, exchanged = loss_of(labels, 3)[0], loss_of(1 - labels, 3)[0]
assert exchanged < 0.002 and abs(exchanged - right) < 1e-4
PYTHON
