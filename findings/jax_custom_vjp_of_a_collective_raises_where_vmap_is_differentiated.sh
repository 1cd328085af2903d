#!/usr/bin/env bash
# What: A jax.custom_vjp whose backward function calls a collective has no gradient where jax.vmap with that axis name
# is differentiated from outside; the collective by itself has one.
#
# Version: jax==0.11.2, jaxlib==0.11.2; any CPU, Python 3.12 or newer.
# Expected: The backward function runs under the same jax.vmap as the function, so that its axis name is bound, as it is
#   in jax.shard_map and jax.pmap.
# Seen: "NameError: unbound axis name". jax.grad of psum itself, and jax.grad inside of jax.vmap, both give 4.
# In jaxfused: `context_parallel_attention` is tested under jax.shard_map and jax.pmap; its example in
#   jaxfused/__main__.py maps by jax.shard_map, because a gradient is taken around it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


@jax.custom_vjp
def total(x):
    return jax.lax.psum(x, "i")


total.defvjp(lambda x: (total(x), None), lambda _, g: (jax.lax.psum(g, "i"),))
x = jnp.arange(4.0)


def outside(f):
    return jax.grad(lambda x: jax.vmap(f, axis_name="i")(x).sum())(x)


psum = outside(lambda x: jax.lax.psum(x, "i"))
inside = jax.vmap(jax.grad(total), axis_name="i")(x)
print("psum:", psum, "gradient inside of vmap:", inside)
assert psum.tolist() == inside.tolist() == [4.0] * 4
try:
    print("gradient outside of vmap:", outside(total))
except NameError as error:
    print("gradient outside of vmap: NameError:", error)
else:
    raise AssertionError("the gradient from outside has become defined")
PYTHON
