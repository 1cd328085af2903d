#!/usr/bin/env bash
# What: jax.ad_checkpoint.checkpoint_name has no transpose, so gmres and bicgstab fail on a function that names a value.
#
# Version: jax==0.11.2, jaxlib==0.11.2, on a CPU; Python 3.12 or newer.
# Expected: A name changes no number and no derivative: jax.grad goes through it, and so should a linear solver.
# Seen: jax.linear_transpose, gmres and bicgstab of v -> checkpoint_name(A v, "product") raise NotImplementedError, "Transpose
#   rule for 'name' not implemented", where they solve v -> A v. cg, which takes A to be symmetric, and jax.grad work.
# In jaxfused: operators name their results for remat policies; the docstring of sparse_matmul states the limit.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

matrix, right = jnp.diag(jnp.arange(1.0, 5.0)), jnp.ones(4)


def plain(v):
    return matrix @ v


def named(v):
    return checkpoint_name(matrix @ v, "product")


def raises(function):
    try:
        function()
    except NotImplementedError as error:
        print("   ", str(error).splitlines()[0])
        return "'name'" in str(error)
    return False


for solve in (gmres, bicgstab):
    print(solve.__name__, solve(plain, right)[0], "and by name:")
    assert raises(lambda: solve(named, right))
print("linear_transpose", jax.linear_transpose(plain, right)(right), "and by name:")
assert raises(lambda: jax.linear_transpose(named, right)(right))
print("cg by name", cg(named, right)[0], "grad by name", jax.grad(lambda v: named(v).sum())(right))
PYTHON
