#!/usr/bin/env bash
# What: The gradient of jax.lax.cumlogsumexp is NaN where the first two terms are -inf, although every
# later sum is finite.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Masked terms have the gradient 0 and others their share, as through jax.nn.logsumexp.
# Seen: [nan, nan, 1] for the last sum of [-inf, -inf, 1]; jax.nn.logsumexp of the same gives [0, 0,
#   1].
# In jaxfused: Its log-sum-exps subtract a maximum that is finite
#   (jaxfused/ops/loss/cross_entropy_xla.py), and none is cumulative.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

terms = jnp.array([-jnp.inf, -jnp.inf, 1.0])
sums = jax.lax.cumlogsumexp(terms)
cumulative = jax.grad(lambda terms: jax.lax.cumlogsumexp(terms)[1:].sum(where=jnp.array([False, True])))(terms)
single = jax.grad(jax.nn.logsumexp)(terms)
print("sums", sums, "gradient of the last", cumulative, "of logsumexp", single)
assert float(sums[2]) == 1 and jnp.isnan(cumulative[:2]).all()
assert single.tolist() == [0, 0, 1]
PYTHON
