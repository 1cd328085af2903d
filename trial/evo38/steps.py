"""Steps under fuse beside stock: times, kernels and launches. steps.py MODEL SECONDS VARIANTS [traits]."""
import json, os, sys, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
begin = time.monotonic()
import jax
from jaxfused.runtime import cuda_library

model, seconds, variants = sys.argv[1], float(sys.argv[2]), sys.argv[3].split(",")
if "traits" in sys.argv[4:]:
    # What a build of the library with kCmdBufferCompatible in these handlers would register.
    from jaxlib import xla_client
    traits = xla_client.CustomCallTargetTraits.COMMAND_BUFFER_COMPATIBLE
    mine = {"jaxfused_group_norm_backward", "jaxfused_max_pool", "jaxfused_max_pool_gradient",
            "jaxfused_bias_activation_backward", "jaxfused_layer_norm_forward"}
    old = jax.ffi.register_ffi_target
    def register(name, fn, platform="cpu", api_version=1, **kw):
        if name in mine:
            kw["traits"] = traits
        return old(name, fn, platform=platform, api_version=api_version, **kw)
    jax.ffi.register_ffi_target = register
    try:
        cuda_library.register()
    except RuntimeError as error:
        print(error)

from benchmarks.whole import end_to_end, end_to_end_fused

def say(text):
    print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

if os.environ.get("TINY"):
    workload = {
        "evoformer": lambda: end_to_end_fused.evoformer("evoformer", end_to_end_fused.EvoformerSize(24, 16, 32, 16, 4, 2, 8, 8)),
    }[model]()
else:
    workload = end_to_end_fused.workloads()[model]
rows = {}
real = end_to_end._measure

def measure(workload, compiled):
    row = real(workload, compiled)
    return row

end_to_end._measure = measure

def save(name, variant, row):
    rows[variant] = row
    kinds = row.get("kinds", {})
    say(f"{name} {variant}: {row.get('milliseconds')} ms, rounds {row.get('rounds')}, kernels {sum(kinds.values()):.2f} ms, {row.get('failed', '')} {row.get('note', '')}"
        f" compile {row.get('compile_seconds', 0):.0f} s")
    for k in row.get("kernels", [])[:34]:
        print(f"  {k['microseconds']:7.0f} us {k['count']:4d}  {k['name'][:58]:58} {k['source'][-70:]}", flush=True)

say("compiling")
end_to_end.run_jax([workload], variants, save)
if {"stock", "fused"} <= rows.keys() and "milliseconds" in rows["fused"] and "milliseconds" in rows["stock"]:
    of = {v: sum(rows[v].get("kinds", {}).values()) for v in rows}
    say(f"RATIO {model}: {rows['stock']['milliseconds'] / rows['fused']['milliseconds']:.3f} by the clock,"
        f" {of['stock'] / max(of['fused'], 1e-9):.3f} by kernels; must {workload.must}")
if time.monotonic() - begin < seconds and "check" in sys.argv[4:]:
    say(f"errors {end_to_end_fused.errors(workload)}")
