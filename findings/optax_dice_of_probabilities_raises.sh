#!/usr/bin/env bash
# What: Optax's Dice losses take probabilities neither under jax.jit nor, of one class, at all:
# dice_loss(apply_softmax=False) and binary_dice_loss(apply_sigmoid=False) raise.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The loss of the given probabilities, as apply_softmax=False and apply_sigmoid=False say, with the
#   value that logits of the same probabilities give.
# Seen: The check that probabilities sum to 1 over the classes is an if on an array: TracerBoolConversionError in
#   any jitted step. binary_dice_loss makes one class of its probabilities, whose sum is then the probability
#   itself: ValueError for every prediction that is not 1 in all pixels.
# In jaxfused: segmentation_loss reads logits, under jit too (jaxfused/ops/loss/segmentation_loss.py).
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

logits = jnp.array([[[2.0, -1.0], [0.5, 1.5]]])
targets = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
probabilities = jax.nn.softmax(logits)


def of_classes(p):
    return optax.losses.dice_loss(p, targets, apply_softmax=False)


def of_one_class(p):
    return optax.losses.binary_dice_loss(p, targets[..., 0], apply_sigmoid=False)


print("eager", of_classes(probabilities), "of logits", optax.losses.dice_loss(logits, targets))
assert jnp.allclose(of_classes(probabilities), optax.losses.dice_loss(logits, targets), atol=1e-6)
for name, function, given, kind in (
    ("dice_loss under jit", jax.jit(of_classes), probabilities, jax.errors.TracerBoolConversionError),
    ("binary_dice_loss", of_one_class, jax.nn.sigmoid(logits[..., 0]), ValueError),
):
    try:
        function(given)
    except kind as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError(f"{name} no longer raises")
PYTHON
