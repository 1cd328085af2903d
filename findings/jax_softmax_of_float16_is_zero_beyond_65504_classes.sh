#!/usr/bin/env bash
# What: jax.nn.softmax of 70,000 equal float16 logits is 0 everywhere, and log_softmax minus infinity.
#
# Version: jax==0.11.2, optax==0.2.8; a CPU, Python 3.12 or newer.
# Expected: 1 / 70,000, which float16 holds to 1 part in 240, and -11.16: subtracting the maximum is there so that
#   nothing overflows.
# Seen: The sum of 70,000 ones is rounded to float16, where it is infinite. Softmax is 0, log_softmax -inf,
#   logsumexp and Optax's cross entropy inf. A language model of a vocabulary of 128,256 or 151,936 whose logits
#   are near 0, as those of a fresh one are, has an infinite loss in float16; trained logits have a large enough
#   maximum, so that it does not show there.
# In jaxfused: jaxfused/ops/loss/ sums exponentials in float32: 11.156 for the same logits.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2 optax==0.2.8

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import optax

random = np.random.RandomState(0)
for count, scale in ((65_000, 0.0), (70_000, 0.0), (128_256, 0.02)):
    logits = jnp.asarray(scale * random.randn(count), jnp.float16)
    softmax = jax.nn.softmax(logits)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, 3)
    wide = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), 3)
    print(count, "softmax", float(softmax.max()), "log", float(jax.nn.log_softmax(logits)[3]), "loss", loss, wide)
    assert abs(wide - np.log(count)) < 0.1
    if count < 65_504:
        assert abs(loss - wide) < 0.01 and softmax.max() > 1e-5
    else:
        assert jnp.isinf(loss) and softmax.max() == 0 and jnp.isinf(jax.nn.logsumexp(logits))
PYTHON
