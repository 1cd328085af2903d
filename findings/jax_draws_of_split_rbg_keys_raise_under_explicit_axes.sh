#!/usr/bin/env bash
# What: Under Explicit axes jax.vmap over split keys raises inside jax.random: for normal, uniform and most others
# if the keys are of the rbg generator, for loggamma and ball if they are of the default one.
#
# Version: jax==0.11.2, jaxlib==0.11.2; 4 virtual devices of a CPU, Python 3.12 or newer.
# Expected: Draws of each key, on the device that holds the key, as normal and uniform of default keys give.
# Seen: normal, uniform, bits, bernoulli, categorical and permutation of rbg keys ask for an out_sharding that
#   they do not take, or say that a slice is not implemented; loggamma and ball of default keys get "inconsistent
#   axis specs". Under Auto axes all of them draw.
# In jaxfused: jaxfused/ops/sampling/row_options.py turns keys into seeds, and rows draw by a hash of their own.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

draws = {
    "normal": lambda key: jax.random.normal(key, (3,)),
    "uniform": lambda key: jax.random.uniform(key, (3,)),
    "bits": lambda key: jax.random.bits(key, (3,)),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.5, (3,)),
    "categorical": lambda key: jax.random.categorical(key, jnp.zeros(4)),
    "permutation": lambda key: jax.random.permutation(key, 8),
    "loggamma": lambda key: jax.random.loggamma(key, 2.0),
    "ball": lambda key: jax.random.ball(key, 3),
}
expected = {("threefry2x32", AxisType.Explicit): {"loggamma", "ball"}, ("rbg", AxisType.Explicit): set(draws)}
for generator in ("threefry2x32", "rbg"):
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(axis_type,))
        raised = set()
        with jax.set_mesh(mesh):
            keys = jax.random.split(jax.random.key(0, impl=generator), 8)
            keys = jax.device_put(keys, NamedSharding(mesh, P("d")))
            for name, draw in draws.items():
                try:
                    assert jax.jit(jax.vmap(draw))(keys).shape[0] == 8
                except Exception:  # Of several types; Auto axes show that nothing else is wrong.
                    raised.add(name)
        print(generator, axis_type, "raised by", sorted(raised))
        assert raised == expected.get((generator, axis_type), set()), raised
PYTHON
