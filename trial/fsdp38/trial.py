"""trial.py OUT SECONDS: FSDP of lm-1b by several designs, each a process: compiled at the same time, timed one after the other.

A child: trial.py --child NAME. Parent and child talk by lines: child prints "COMPILED", parent writes "go".
"""

import json, os, subprocess, sys, threading, time

SCRIPT = os.path.abspath(__file__)
TINY = bool(os.environ.get("TINY"))
CACHE = os.environ.get("CACHE", "/tmp/fsdp38-autotune")
COMBINE = {
    "xla_gpu_all_gather_combine_threshold_bytes": 134217728,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 268435456,
}
P2P = {"xla_gpu_use_memcpy_local_p2p": True}
NOGRAPH = "--xla_gpu_enable_command_buffer="
# name: (switches, compiler options, XLA_FLAGS)
PACKED_16 = {} if TINY else COMBINE | {"xla_gpu_reduce_scatter_combine_threshold_bytes": 110000000}
VARIANTS = {
    "alone": ("", {}, ""),
    "base": ("", {}, ""),
    "ahead packed": ("ahead", COMBINE, ""),
    "ints": ("ints", {}, ""),
    "bf16 ahead packed": ("rs16,ahead", PACKED_16, ""),
    "bf16 axis0 ahead packed": ("rs16,axis0,ahead", PACKED_16, ""),
    "bf16 axis0 keep 10": ("rs16,axis0,keep", {}, ""),
    "8 channels": ("", {"xla_gpu_nccl_collective_max_nchannels": 8}, ""),
}


def say(*words):
    print(*words, flush=True)


def wait_for(word):
    if sys.stdin.readline().strip() != word:
        os._exit(3)  # The parent has ended.


def child(name):
    begin = time.time()
    switches, options, _ = VARIANTS[name]
    import dataclasses
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import AxisType

    from benchmarks.run import timing
    from benchmarks.whole import parallel_programs as programs
    from benchmarks.whole.parallel_bars import projection
    from benchmarks.whole.parallel_timing import Ready
    from examples.multi_gpu import mesh as meshes
    from examples.multi_gpu import rules

    if "axis0" in switches:
        rules.RULES["mlp"] = rules.RULES["heads"] = ("tensor", "fsdp")
    sizes = programs.TINY if TINY else programs.FULL

    def shapes_only(self, f, shardings, *args):
        shapes = jax.eval_shape(f, *args)
        return jax.tree.map(
            lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to), shapes, shardings
        )

    meshes.OnMesh._made = shapes_only
    devices = jax.devices()[:1] if name == "alone" else jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    with nnx.use_eager_sharding(False):
        program = programs.language_model(sizes, mesh)
        params, state, text = program.make()
        with jax.set_mesh(program.mesh or mesh):
            low = program.step.lower(params, state, text)
    say(f"LOWERED {time.time() - begin:.0f}")
    wait_for("compile")
    begin = time.time()
    compiled = low.compile(compiler_options=options)
    ready = Ready(program, mesh, compiled, [params, state, text])
    project = projection(ready)

    @functools.cache
    def maker(shape, dtype, sharding):
        def make(seed):
            if dtype != jnp.float32 or len(shape) < 2:
                return jnp.ones(shape, dtype)
            i = functools.reduce(
                lambda a, k: a * np.uint32(shape[k]) + jax.lax.broadcasted_iota(jnp.uint32, shape, k),
                range(len(shape)),
                jnp.zeros((), jnp.uint32),
            )
            for _ in range(2):
                i = (i ^ (i >> 16) ^ seed) * np.uint32(0x45D9F3B)
            return ((i >> 8).astype(jnp.float32) * 2.0**-24 - 0.5) * 0.07

        low = jax.jit(make, out_shardings=sharding).lower(jax.ShapeDtypeStruct((), jnp.uint32))
        return low.compile()

    leaves, treedef = jax.tree.flatten(params)
    for a in leaves:
        maker(a.shape, a.dtype, a.sharding)

    @functools.cache
    def zeros(shape, dtype, sharding):
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding).lower().compile()

    of_state = jax.tree.leaves(state)
    for a in of_state:
        zeros(a.shape, a.dtype, a.sharding)
    memory = compiled.memory_analysis()
    text_of = compiled.as_text()
    counts = {k: text_of.count(f" {k}-start(") for k in ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")}
    say(f"COMPILED {time.time() - begin:.0f} s, peak {memory.peak_memory_in_bytes / 1e9:.2f} GB, {ready.counted()['received']} {counts}")
    if out := os.environ.get("HLO"):
        open(f"{out}/{name.replace(' ', '_')}.hlo", "w").write(text_of)
    del text_of
    wait_for("go")
    begin = time.time()
    made = [maker(a.shape, a.dtype, a.sharding)(np.uint32(i)) for i, a in enumerate(leaves)]
    ready.operands[0] = treedef.unflatten(made)
    del made
    ready.operands[1] = jax.tree.map(lambda a: zeros(a.shape, a.dtype, a.sharding)(), state)
    found = project()
    truth = f"/tmp/fsdp38-truth-{TINY}.npz"
    differs = ""
    if name == "alone":
        np.savez(truth, *found)
    elif os.path.exists(truth):
        from benchmarks.whole.parallel_bars import difference

        given = np.load(truth)
        differs = f"differs {difference(found, [given[k] for k in given.files]):.1e}"
    if TINY:
        say("RESULT", json.dumps(dict(name=name, milliseconds=1.0)), differs)
        return

    def run(times):
        for _ in range(times):
            results = ready.call()
        jax.block_until_ready(results)

    row = timing.steps(run)
    say("RESULT", json.dumps(dict(name=name, **row)), differs, f"{time.time() - begin:.0f} s")
    try:
        say("PROFILE", json.dumps(profile(ready, len(devices))))
    except Exception as error:
        say("PROFILE none:", repr(error)[:200])
    os._exit(0)


def profile(ready, devices):
    """Profiles three steps in a row: per step and device, ms of kernels, collectives, gaps."""
    import collections
    import glob
    import tempfile

    import jax

    from benchmarks.whole.parallel_timing import _length, _merged, overlap

    steps = 3
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                results = ready.call()
            jax.block_until_ready(results)
        del results
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = [p for p in jax.profiler.ProfileData.from_file(path).planes if "GPU:" in p.name]
        out = []
        for plane in planes[:devices]:
            ours, others, names, every = [], [], collections.Counter(), []
            sums = collections.Counter()
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for e in line.events:
                    span = (e.start_ns, e.start_ns + e.duration_ns)
                    low = e.name.lower()
                    (ours if "nccl" in low or "memcpy" in low and "p2p" in low else others).append(span)
                    every.append((*span, e.name[:48]))
                    key = e.name.split("<")[0][:40]
                    names[key] += 1
                    sums[key] += e.duration_ns
            if not others:
                continue
            a, b, c = _merged(ours), _merged(others), _merged([*ours, *others])
            gaps = [(y[0] - x[1], x[1]) for x, y in zip(c, c[1:])]
            ends = {e: n for _, e, n in every}
            starts = {s: n for s, _, n in every}
            big = sorted(gaps, reverse=True)[:4]
            hist = [
                (lo, sum(lo <= g < hi for g, _ in gaps) // steps, round(sum(g for g, _ in gaps if lo <= g < hi) / steps / 1e6, 2))
                for lo, hi in ((0, 2000), (2000, 5000), (5000, 10000), (10000, 30000), (30000, 10**10))
            ]
            out.append(
                dict(
                    span=(c[-1][1] - c[0][0]) / steps / 1e6,
                    collectives=_length(a) / steps / 1e6,
                    runs=len(ours) / steps,
                    computes=_length(b) / steps / 1e6,
                    kernels=len(others) / steps,
                    waits=(_length(a) - overlap(a, b)) / steps / 1e6,
                    gaps=hist,
                    biggest=[(round(g / 1e3), ends.get(at), starts.get(at + g)) for g, at in big],
                    top=[(k, names[k] // steps, round(v / steps / 1e6, 2)) for k, v in sums.most_common(16)],
                )
            )
        return out


def share_of(name, times):
    return f"{times['alone'] / times[name]:.1%}" if "alone" in times else ""


def main(out, seconds):
    start = time.time()
    os.makedirs(CACHE, exist_ok=True)
    children = {}
    only = os.environ.get("ONLY")
    names = [n for n in VARIANTS if not only or n in only.split(";")]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    for name in names:
        switches, _, flags = VARIANTS[name]
        env = os.environ | dict(
            FSDP=switches,
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
            OMP_NUM_THREADS="1",
            OPENBLAS_NUM_THREADS="1",
            XLA_FLAGS=" ".join(
                [os.environ.get("XLA_FLAGS", ""), flags]
                + ([] if TINY else [f"--xla_gpu_per_fusion_autotune_cache_dir={CACHE}"])
            ),
        )
        if name == "alone":
            env["CUDA_VISIBLE_DEVICES"] = gpus[-1]
        log = open(f"{out}/{name.replace(' ', '_')}.err", "w")
        p = subprocess.Popen(
            [sys.executable, SCRIPT, "--child", name],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True,
        )
        lines = []
        children[name] = (p, lines)
        threading.Thread(target=lambda p=p, lines=lines: [lines.append(l.strip()) for l in p.stdout], daemon=True).start()

    def has(name, word):
        return any(l.startswith(word) for l in children[name][1])

    def send(name, word):
        try:
            children[name][0].stdin.write(word + "\n")
            children[name][0].stdin.flush()
        except Exception:
            pass

    def ended(name):
        return children[name][0].poll() is not None

    def until(name, word, limit):
        while not has(name, word) and not ended(name) and time.time() < limit:
            time.sleep(0.05)
        return has(name, word)

    def now():
        return f"[{time.time() - start:3.0f} s]"

    end = start + seconds
    # Both first programs tune the products, one on each GPU; the others find them in the cache.
    for name in names[:2]:
        send(name, "compile")
    for name in names[:2]:
        until(name, "COMPILED", start + 0.5 * seconds)
        say(now(), f"{name:32}", next((l for l in children[name][1] if l.startswith("COMPILED")), "not compiled"))
    for name in names[2:]:
        send(name, "compile")
    limit = start + 0.58 * seconds
    for name in names[2:]:
        until(name, "COMPILED", limit)
        say(now(), f"{name:32}", next((l for l in children[name][1] if l.startswith("COMPILED")), "not compiled"))
    times, rows = {}, []
    for name in names:
        if end - time.time() < 9:
            say(now(), name, "not begun")
            continue
        if not has(name, "COMPILED"):
            text = open(f"{out}/{name.replace(' ', '_')}.err").read()
            say(now(), f"{name:32} failed:", text[-300:].replace("\n", " ") if ended(name) else "still compiling")
            continue
        send(name, "go")
        until(name, "RESULT", min(end, time.time() + 25))
        line = next((l for l in children[name][1] if l.startswith("RESULT")), "")
        if line:
            row, at = json.JSONDecoder().raw_decode(line[7:])
            times[name] = row["milliseconds"]
            share = share_of(name, times)
            say(now(), f"{name:32} {times[name]:8.2f} ms {share:6} {[round(r, 1) for r in row.get('rounds', [])]} {line[7 + at:]}")
            until(name, "PROFILE", min(end, time.time() + 12))
            found = next((l for l in children[name][1] if l.startswith("PROFILE")), "")
            try:
                row["profile"] = json.loads(found[8:])
                for each in row["profile"]:
                    say("     ", {k: round(v, 2) if isinstance(v, float) else v for k, v in each.items() if k not in ("top", "biggest")})
            except Exception:
                say("     ", found)
            rows.append(row)
            json.dump(rows, open(f"{out}/rows.json", "w"), indent=0)
        else:
            text = open(f"{out}/{name.replace(' ', '_')}.err").read()
            say(now(), f"{name:32} no result:", text[-300:].replace("\n", " "))
        p = children[name][0]
        try:
            p.wait(2)
        except Exception:
            p.kill()
            p.wait(5)
    for p, _ in children.values():
        if p.poll() is None:
            p.kill()
    say(now(), "end")


if __name__ != "__main__":
    pass
elif sys.argv[1] == "--child":
    child(sys.argv[2])
else:
    main(sys.argv[1], float(sys.argv[2]))
