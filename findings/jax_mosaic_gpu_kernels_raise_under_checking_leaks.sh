#!/usr/bin/env bash
# What: Tracing any plgpu.kernel of Pallas within jax.checking_leaks() raises "Leaked trace", also where nothing
# leaks.
#
# Version: jax==0.11.2, absl-py==2.5.1; a CPU, which is enough to trace, Python 3.12 or newer.
# Expected: A check that passes, as it does for the same body in pl.pallas_call, interpreted or with Mosaic GPU's,
#   Triton's or TPU parameters.
# Seen: The error names the kernel's references in global memory as leaked tracers, for a kernel that only doubles
#   its input. JAX_CHECK_TRACER_LEAKS=1, the tool to find a leak in a training step, stops at the first such
#   kernel of the step, and a test suite run under it fails there.
# In jaxfused: Its kernels are of this kind; a check on a CPU, or with implementation="xla", traces none of them.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2 absl-py==2.5.1

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def double(x, doubled):
    doubled[...] = x[...] * 2


shape = jax.ShapeDtypeStruct((128,), jnp.float32)
kernels = {
    "plgpu.kernel": plgpu.kernel(double, out_type=shape),
    "pallas_call": pl.pallas_call(double, out_shape=shape),
    "pallas_call for Mosaic GPU": pl.pallas_call(
        double, out_shape=shape, compiler_params=plgpu.CompilerParams()
    ),
}
raised = {}
for name, kernel in kernels.items():
    jax.make_jaxpr(kernel)(jnp.ones(128))
    jax.clear_caches()
    try:
        with jax.checking_leaks():
            jax.make_jaxpr(kernel)(jnp.ones(128))
        raised[name] = None
    except Exception as error:
        raised[name] = str(error)
    print(name, "raises" if raised[name] else "passes", (raised[name] or "").split("\n")[0])
assert raised["plgpu.kernel"].startswith("Leaked trace")
assert raised["pallas_call"] is None and raised["pallas_call for Mosaic GPU"] is None
PYTHON
