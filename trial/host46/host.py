"""host.py OUT SECONDS: what the host does in a decode step of the 8 B int4 Llama, under XLA's flags, and with K steps a program.

A child process each; all compile at once, timing takes a lock.
"""
import collections, dataclasses, fcntl, functools, json, os, subprocess, sys, tempfile, time
from pathlib import Path
T0 = float(os.environ.get("BEGAN", time.time()))
TINY = "tiny" in sys.argv
DEPTH = int(os.environ.get("DEPTH", 32))
VARIANTS = {  # name: (rows, steps a program, flags)
    "default": ("b1 int4", 1, ""),
    "scan 8": ("b1 int4", 8, ""),
    "scan 4": ("b1 int4", 4, ""),
    "b1 scan 8": ("b1", 8, ""),
    "skip temp": ("b1 int4", 1, "--xla_gpu_command_buffer_update_mode=SKIP_TEMP"),
    "skip profiled": ("b1 int4", 1, "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED"),
    "own color": ("b1 int4", 1, "--xla_gpu_temp_buffer_use_separate_color=true"),
    "exclusive": ("b1 int4", 1, "--xla_gpu_require_exclusive_lock=true"),
    "trace cache": ("b1 int4", 1, "--xla_cmd_buffer_trace_cache_size=256"),
}
def say(*a):
    print(f"[{time.time() - T0:5.1f}]", *a, flush=True)
def child(name):
    import jax, jax.numpy as jnp
    from benchmarks.whole import language_model as lm
    from examples.lm import speed
    from examples.lm.loading import quantized
    row_name, K, _ = VARIANTS[name]
    row = lm.ROWS[row_name]
    config = speed.SHAPES["llama-8b"]
    config = dataclasses.replace(config, depth=DEPTH, windows=config.windows[:DEPTH], ropes=config.ropes[:DEPTH])
    if TINY:
        from examples.lm.config import Rope
        config = dataclasses.replace(config, width=64, depth=2, heads=4, key_heads=2, head_size=16, hidden=128, vocabulary=264, scale=0.25, windows=(None,)*2, ropes=(Rope(16, 1e4),)*2)
    model = speed.random_model(config, "bfloat16", "float")
    if row.format == "int4": model = quantized(model, "int4", group_size=16 if TINY else 128)
    p = lm._Program(row, model, TINY)
    def several(params, carry):
        return jax.lax.scan(lambda c, _: (p._step(params, c), None), carry, length=K)[0]
    f = p._step if K == 1 else several
    low = jax.jit(f, donate_argnums=1).lower(p._params, jax.eval_shape(p._first))
    compiled = low.compile()
    say(name, "compiled")
    lock = open(os.environ["LOCK"], "w"); fcntl.flock(lock, fcntl.LOCK_EX)
    carry = compiled(p._params, jax.jit(p._first)())
    def pointers():
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(carry)]
    moved = []
    for _ in range(4):
        before = pointers(); carry = compiled(p._params, carry); jax.block_until_ready(carry)
        moved.append(sum(a != b for a, b in zip(before, pointers())))
    def run(n):
        nonlocal carry
        t = time.perf_counter()
        for _ in range(n): carry = compiled(p._params, carry)
        host = time.perf_counter() - t
        jax.block_until_ready(carry)
        return 1e3 * host / n / K, 1e3 * (time.perf_counter() - t) / n / K
    run(2)
    n = max(24 // K, 2)
    times = [run(n) for _ in range(5)]
    # Enqueued while the device is idle, one program: host's time without waiting for a queue.
    alone = []
    for _ in range(5):
        jax.block_until_ready(carry); t = time.perf_counter(); carry = compiled(p._params, carry); alone.append(round(1e3 * (time.perf_counter() - t), 3))
    say(f"{name:14} ms a step {min(t[1] for t in times):.3f}, host {min(t[0] for t in times):.3f}, alone {min(alone)} a program; arrays {len(p._params)} + {len(moved and pointers())}, moved {moved}; logits {float(carry[-1].mean()):.5f}")
    o = jax.profiler.ProfileOptions(); o.python_tracer_level = 0; o.host_tracer_level = 3
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=o): run(2)
        planes = [q for file in Path(folder).rglob("*.pb") for q in jax.profiler.ProfileData.from_file(str(file)).planes]
    import re
    host, kernels = {}, [0, 0.0]
    for q in planes:
        for l in q.lines:
            for e in l.events:
                if "GPU" in q.name:
                    if "tream" in l.name: kernels[0] += 1; kernels[1] += e.duration_ns / 1e3
                else:
                    key = re.sub(r"[:#(].*$|\d+$", "", e.name) if "command_buffer" not in e.name else e.name[:40]
                    a, b = host.get(key, (0, 0.0)); host[key] = a + 1, b + e.duration_ns / 1e3
    lines = [f"   kernels {kernels[0] / 2 / K:.0f} a step, {kernels[1] / 2 / K:.0f} us"]
    for key, (a, b) in sorted(host.items(), key=lambda x: -x[1][1])[: 26 if name in ("default", "scan 8") else 5]:
        lines.append(f"     {key[:70]:70} {a / 2:.1f} a program, {b / 2:.0f} us")
    print("\n".join(lines), flush=True)
    os._exit(0)
if "--child" in sys.argv:
    child(sys.argv[sys.argv.index("--child") + 1])
else:
    out, limit = Path(sys.argv[1]), float(sys.argv[2])
    children = []
    for name, (_, _, flags) in VARIANTS.items():
        e = os.environ | dict(BEGAN=str(T0), LOCK="/tmp/host46.lock", XLA_PYTHON_CLIENT_PREALLOCATE="false", TF_CPP_MIN_LOG_LEVEL="2", XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + " " + flags)
        children.append(subprocess.Popen([sys.executable, __file__, "--child", name, *(["tiny"] if TINY else [])], env=e, stderr=open(out / f"{name.replace(' ', '_')}.err", "w"), start_new_session=True))
    while time.time() - T0 < limit and any(c.poll() is None for c in children): time.sleep(0.2)
    for name, c in zip(VARIANTS, children):
        say(name, "status", c.poll())
        if c.poll() is None: os.killpg(c.pid, 9)
        if c.poll() not in (0, None): print((out / f"{name.replace(' ', '_')}.err").read_text()[-500:])
