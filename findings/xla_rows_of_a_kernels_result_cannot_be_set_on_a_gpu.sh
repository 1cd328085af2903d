#!/usr/bin/env bash
# What: y.at[0].set(0) of the result y of a Pallas kernel or a cuBLAS product does not compile for an NVIDIA GPU.
#
# Version: jax==0.11.2, jax-cuda13-pjrt==0.11.2, jax-cuda13-plugin==0.11.2 (0.12.0.1 is the same); Python 3.12 or newer; a CPU, on
#   which it compiles for an absent Hopper GPU and runs nothing. The plugins are 230 MB.
# Expected: A program.
# Seen: XLA fuses a custom call with slices of its operands and updates of buffers by its results, but also with an update of its
#   own result by whole rows at a constant place or at a loop's counter: JaxRuntimeError, "DynamicSliceFusion: DUS target must
#   be a fusion parameter", or, where the rows come from another result of the kernel, "A cycle is detected". Products raise
#   where XLA takes cuBLAS, not Triton. It compiles with rows at places known at run time, with jax.lax.optimization_barrier
#   around the results, and with --xla_gpu_enable_dynamic_slice_fusion=false.
# In jaxfused: docs/troubleshooting.md; pallas_kernels/attention/shares.py has the barrier.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile --no-deps \
  jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

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
x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding)


def two_results(x):
    def kernel(x_ref, doubled_ref, parts_ref):
        i = lax.axis_index("i")
        tile = x_ref[pl.ds(64 * i, 64), :]
        doubled_ref[pl.ds(64 * i, 64), :] = 2 * tile
        parts_ref[i] = 1 + tile

    shapes = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((4, 64, 256), jnp.float32)
    semantics = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    return plgpu.kernel(kernel, out_type=shapes, grid=(4,), grid_names=("i",), compiler_params=semantics)(x)


def of_its_other_result(x):
    doubled, parts = two_results(x)
    return doubled.at[:64].set(parts.sum(0))


def in_a_loop(x):
    return lax.fori_loop(0, 4, lambda i, x: two_results(x)[0].at[i].set(0), x)


NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
NO_FUSION = {"xla_gpu_enable_dynamic_slice_fusion": False}
TARGET, CYCLE = "DUS target must be a fusion parameter", "A cycle is detected"
PROGRAMS = {
    "kernel": (lambda x: two_results(x)[0].at[0].set(0), {}, TARGET),
    "kernel, by its other result": (of_its_other_result, {}, CYCLE),
    "kernel, in a loop": (in_a_loop, {}, TARGET),
    "product by cuBLAS": (lambda x: (x @ x).at[0].set(0), NO_TRITON, TARGET),
    "product by Triton": (lambda x: (x @ x).at[0].set(0), {}, "compiles"),
    "kernel, a column": (lambda x: two_results(x)[0].at[:, 0].set(0), {}, "compiles"),
    "kernel, a row of run time": (lambda x: two_results(x)[0].at[x[0, 0].astype(int)].set(0), {}, "compiles"),
    "kernel, a barrier": (lambda x: lax.optimization_barrier(two_results(x))[0].at[0].set(0), {}, "compiles"),
    "kernel, without the fusion": (lambda x: two_results(x)[0].at[0].set(0), NO_FUSION, "compiles"),
}
for name, (program, options, expected) in PROGRAMS.items():
    lowered = jax.jit(program).trace(x).lower(lowering_platforms=("cuda",))
    try:
        lowered.compile(compiler_options={"xla_gpu_autotune_level": 0} | options)
        found = "compiles"
    except jax.errors.JaxRuntimeError as error:
        found = str(error)
    print(f"{name}: {found.splitlines()[0][:120]}")
    assert expected in found
PYTHON
