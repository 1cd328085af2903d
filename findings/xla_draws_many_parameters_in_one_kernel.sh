#!/usr/bin/env bash
# What: jax.jit of a function that draws many parameters compiles for minutes for an NVIDIA GPU, as XLA makes all draws in one kernel.
#
# Version: jax==0.11.2, jax-cuda13-pjrt==0.11.2, jax-cuda13-plugin==0.11.2; Python 3.12 or newer; a CPU, on which it compiles
#   for an absent Hopper GPU and runs nothing. The plugins are 230 MB.
# Expected: A kernel a parameter, and a time to compile that grows with their number.
# Seen: multi_output_fusion joins the independent draws of one shape in a single kernel of so many results: 32 matrices of
#   jax.random.normal are three kernels, of which one makes all 32. On two cores 12 matrices compile in 3 s and 32 in 19; a
#   language model's 1.2 billion parameters in 117 s. With the compiler option xla_disable_hlo_passes=multi_output_fusion they are
#   35 kernels, which compile in 7 s, and the model's in 24.
# In jaxfused: examples/placement.py compiles initial values without that pass; docs/troubleshooting.md.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile --no-deps \
  jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import re
import time

import jax
from jax.experimental import topologies

# Figures of a Hopper GPU that the compiler divides by or compares with.
GPU = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  device_memory_size: 141000000000 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
"""
topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=GPU)
sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
key = jax.eval_shape(lambda: jax.random.key(0)).update(sharding=sharding)
COUNT = 32


def draws(key):
    return [jax.random.normal(k, (1024, 1024)) for k in jax.random.split(key, COUNT)]


lowered = jax.jit(draws, out_shardings=sharding).trace(key).lower(lowering_platforms=("cuda",))
kernels = {}
for disabled in ("", "multi_output_fusion"):
    begin = time.monotonic()
    options = {"xla_gpu_autotune_level": 0} | ({"xla_disable_hlo_passes": disabled} if disabled else {})
    text = lowered.compile(compiler_options=options).as_text()
    kernels[disabled] = len(re.findall(r" fusion\(", text[text.index("ENTRY ") :]))
    told = f"without {disabled}" if disabled else "by default"
    print(f"{COUNT} draws {told}: {kernels[disabled]} kernels, compiled in {time.monotonic() - begin:.0f} s")
assert kernels[""] <= 4, "XLA no longer joins the draws"
assert kernels["multi_output_fusion"] >= COUNT
PYTHON
