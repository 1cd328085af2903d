#!/usr/bin/env bash
# What: Weights that JAX's initialisers draw in bfloat16 have a mean below 0, which shifts the outputs of a wide
# layer by a whole standard deviation.
#
# Version: jax==0.11.2, flax==0.12.12; a CPU, Python 3.12 or newer.
# Expected: A mean of 0 within the error of the sample, as in float32: param_dtype=jnp.bfloat16 is how one halves
#   the memory of a model.
# Seen: jax.random.uniform in bfloat16 takes 128 values from 0 to 0.992, whose mean is 0.496, and normal numbers
#   are made from it. The mean of 4,096 x 1,024 weights is -0.011 (normal), -0.013 (glorot_uniform) or -0.017
#   (lecun_normal) of their standard deviation, 23 to 35 standard errors. nnx.Linear(4096, 1024) of ones, such as
#   a mean of positive activations, gives outputs with mean -0.8 to -1.2 and deviation 1; drawn in float32 and
#   cast, 0.02. Deviations are right, so that no check of scales sees it.
# In jaxfused: MoE, SparseLinear, QuantizedLinear and DeformConv draw in float32 and round; layers that Flax has
#   too draw as Flax does: make them in float32 and cast, as `jax.tree.map(lambda w: w.astype(jnp.bfloat16), ...)` does.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2 flax==0.12.12

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from flax import nnx

inits = {
    "lecun_normal": nnx.initializers.lecun_normal(),
    "glorot_uniform": nnx.initializers.glorot_uniform(),
    "normal": nnx.initializers.normal(4096**-0.5),
}
for name, init in inits.items():
    shifts = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        weights = init(jax.random.key(0), (4096, 1024), dtype).astype(jnp.float32)
        shifts[dtype.__name__] = float(weights.mean() / weights.std())
        layer = nnx.Linear(4096, 1024, use_bias=False, param_dtype=dtype, kernel_init=init, rngs=nnx.Rngs(0))
        out = layer(jnp.ones((1, 4096))).astype(jnp.float32)
        print(name, dtype.__name__, f"weights' mean {shifts[dtype.__name__]:+.4f} deviations", end=", ")
        print(f"outputs' mean {float(out.mean()):+.2f}, deviation {float(out.std()):.2f}")
        if dtype == jnp.bfloat16:
            assert out.mean() / out.std() < -0.7
        else:
            assert abs(out.mean() / out.std()) < 0.15
    assert shifts["bfloat16"] < -0.01 and abs(shifts["float32"]) < 0.002
PYTHON
