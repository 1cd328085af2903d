"""MXFP4 and NF4 weights by few rows: today's kernel, the new CUDA C kernel in several ways, and bf16.

python trial.py SO OUT.json [--budget SECONDS]. Correctness against float64 first, then kernel times in turn,
cold weights (each call reads another set; sets of a format have 300 MB in all).
"""

import ctypes
import itertools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np

BEGIN = time.monotonic()
SHAPES = ((5120, 13824), (3584, 18944), (8192, 8192), (2880, 5760))
OTHERS = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024), (1024, 4096))  # where the new kernel is the better choice
ROWS = (1, 16, 4)
UNITS = {13824: 7, 18944: 9, 8192: 4, 5760: 3, 4096: 2, 14336: 7, 1024: 1}
NAMES = {0: "table", 1: "bits", 2: "half", 3: "third"}
WAYS = {"mxfp4": (0, 3), "nf4": (0,)}
# Configs of today's kernel: CTAs that share a block of columns, stages.
CONFIGS = {"mxfp4": ("p4s3", "p4s2", "p3s3", "p3s2", "p2s3", "p2s2"), "nf4": ("p1s3", "p1s4", "p2s3", "p2s2", "p3s2", "p4s2")}
GROUP = {"mxfp4": 32, "nf4": 64}


def rows_of(shape):
    return ROWS if shape in SHAPES else (1, 16)


def ways_of(kind, shape):
    return WAYS[kind]


ALL = [(k, n, m) for shape in (*SHAPES, *OTHERS) for k, n in [shape] for m in rows_of(shape)]


def say(text):
    print(f"[{time.monotonic() - BEGIN:5.1f}] {text}", flush=True)


def way_name(kind, how):
    return f"{kind} {'turned ' if how >= 100 else ''}{'bulk ' if how % 100 >= 10 else ''}{NAMES[how % 10]}"


def arrays(kind, k, n):
    scale = "float8_e8m0fnu" if kind == "mxfp4" else "float32"
    return ((n, k // 2), "uint8"), ((k // GROUP[kind], n), scale)


def book(kind):
    import jaxfused

    return jaxfused.quantization.CODEBOOKS["e2m1" if kind == "mxfp4" else "nf4"]


def lower(job):
    """Exports today's product or bf16's, in a process of its own."""
    import jax
    import jax.numpy as jnp

    import jaxfused
    from benchmarks.run.lowering import export as _export
    from benchmarks.without_gpu.target import H200
    from jaxfused import dispatch

    name, m, k, n = job
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    if name == "bf16":
        return _export("cuda", lambda x, w: x @ w, x, jax.ShapeDtypeStruct((k, n), jnp.bfloat16))
    kind = name.split()[0]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in arrays(kind, k, n)]

    def ours(x, values, scale):
        w = jaxfused.QuantizedArray(values, scale, None, -2, "columns", codebook=book(kind))
        return jaxfused.quantized_matmul(x, w)

    def by_config(x, values, scale):
        from pallas_kernels.gemm import quantized
        from pallas_kernels.gemm.quantized import Packed
        from pallas_kernels.gemm.small_m import QuantizedConfig

        if scale.dtype == jnp.float8_e8m0fnu:
            scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
        config = QuantizedConfig(64, 4, int(name[-1]), 256)
        object.__setattr__(config, "parts", int(name[-3]))  # 3 is refused as yet
        w = Packed(values, scale, None, tuple(book(kind)))
        options = dict(activation=None, save_preactivation=False, out_dtype=jnp.bfloat16)
        return quantized.forward(x, w, None, None, **options, multiprocessors=132, config=config)[0]

    with dispatch.assume(H200):
        return _export("cuda", ours if name.endswith("today") else by_config, x, *shapes)


def main():
    so, out = sys.argv[1:3]
    budget = float(sys.argv[sys.argv.index("--budget") + 1]) if "--budget" in sys.argv else 85.0
    dry = "--dry" in sys.argv
    jobs = [(name, m, k, n) for k, n, m in ALL for name in ("bf16", "mxfp4 today", "nf4 today")]
    for k, n, m in ALL:
        if (k, n) in SHAPES and m != 4:
            jobs += [(f"{kind} {config}", m, k, n) for kind in CONFIGS for config in CONFIGS[kind]]
    if dry:
        jobs = [job for job in jobs if job[1:] == (1, 5120, 13824)]
    os.environ["JAX_PLATFORMS"] = "cpu"
    pool = ProcessPoolExecutor(2 if dry else 12, multiprocessing.get_context("spawn"))
    exported = {job: pool.submit(lower, job) for job in jobs}
    if not dry:
        del os.environ["JAX_PLATFORMS"]

    import jax
    import jax.numpy as jnp

    library = ctypes.cdll.LoadLibrary(so)
    jax.ffi.register_ffi_target("fp4_trial", jax.ffi.pycapsule(library.jaxfused_codes_tma), platform="CUDA")

    def ours(kind, how, units, out_dtype):
        def product(x, values, scale):
            none = jnp.zeros((0,), jnp.float32)
            if scale.dtype == jnp.float8_e8m0fnu:
                scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
            shape = jax.ShapeDtypeStruct((x.shape[0], values.shape[0]), out_dtype)
            call = jax.ffi.ffi_call("fp4_trial", (shape, jax.ShapeDtypeStruct((0,), jnp.float32)))
            return call(x, values, scale, none, none, activation="none",
                        codebook=np.asarray(book(kind), np.float32), units=np.int64(units), how=np.int64(how))[0]

        return product

    def compile_ours(kind, how, m, k, n, dtype):
        shapes = [jax.ShapeDtypeStruct((m, k), jnp.bfloat16)]
        shapes += [jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for shape, d in arrays(kind, k, n)]
        lowered = jax.jit(ours(kind, how, UNITS[n], dtype)).trace(*shapes)
        return lowered.lower(lowering_platforms=("cuda",)) if dry else lowered.lower().compile()

    if dry:
        print(compile_ours("mxfp4", 0, 1, 5120, 13824, jnp.float32).as_text()[:1500])
        for job in jobs:
            say(f"{job} {len(exported[job].result()[0]) if isinstance(exported[job].result(), tuple) else type(exported[job].result())}")
        return

    from benchmarks.run import timing
    from benchmarks.sweep.judge import compile_module
    from jaxfused.runtime import cuda_library

    if cuda_library.why_unavailable() is None:
        cuda_library.register()
    threads = ThreadPoolExecutor(12)
    compiled = {job: threads.submit(lambda job=job: compile_module(exported[job].result())) for job in jobs}
    new = [(kind, how, m, k, n) for k, n, m in ALL for kind in WAYS for how in ways_of(kind, (k, n))]
    of_new = {job: threads.submit(compile_ours, *job, jnp.bfloat16) for job in new}
    def clocks(kind, how, m, k, n):
        """Returns a program that gives the cycles at which each block reached five places."""
        def product(x, values, scale):
            none = jnp.zeros((0,), jnp.float32)
            if scale.dtype == jnp.float8_e8m0fnu:
                scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
            shape = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)
            call = jax.ffi.ffi_call("fp4_trial", (shape, jax.ShapeDtypeStruct((m, n), jnp.float32)))
            return call(x, values, scale, none, none, activation="none",
                        codebook=np.asarray(book(kind), np.float32), units=np.int64(UNITS[n]), how=np.int64(how))[1]

        shapes = [jax.ShapeDtypeStruct((m, k), jnp.bfloat16)]
        shapes += [jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for shape, d in arrays(kind, k, n)]
        return jax.jit(product).lower(*shapes).compile()

    def draw(shape, dtype, key):
        if dtype == "uint8":
            return jax.random.bits(key, shape, jnp.uint8)
        if dtype == "float32":
            return jax.random.uniform(key, shape, minval=0.005, maxval=0.02)
        return jax.lax.bitcast_convert_type(jax.random.randint(key, shape, 118, 122).astype(jnp.uint8), jnp.dtype(dtype))

    drawing = jax.jit(draw, static_argnums=(0, 1))
    results, wrong = [], []
    phases = [("configs", shape) for shape in SHAPES] + [("new", shape) for shape in (*SHAPES, *OTHERS)]
    for phase, (k, n) in phases:
        if time.monotonic() - BEGIN > budget:
            say("the budget is spent")
            break
        size = k * n // 2
        count = min(24, max(4, -(-300 * 2**20 // size)))
        sets = {"bf16": [(jax.random.normal(jax.random.key(i), (k, n), jnp.bfloat16) / 64,) for i in range(max(2, min(8, count // 4 + 1)))]}
        for kind in WAYS:
            (shape, dtype), (of_scale, scale_dtype) = arrays(kind, k, n)
            sets[kind] = [(drawing(shape, dtype, jax.random.key(2 * i)), drawing(of_scale, scale_dtype, jax.random.key(2 * i + 1)))
                          for i in range(count)]
        # --- right?
        columns = np.unique(np.r_[0:40, n // 2 : n // 2 + 24, max(0, n - 130) : n])
        m = 16
        x = jax.random.normal(jax.random.key(5), (m, k), jnp.bfloat16)
        for kind in WAYS if phase == "new" else ():
            values, scale = sets[kind][0]
            stored = np.asarray(values[columns])
            numbers = np.asarray(book(kind), np.float32).astype(jnp.bfloat16).astype(np.float64)
            w = numbers[np.stack([stored & 15, stored >> 4], -1).reshape(len(columns), -1)].T
            w = w * np.repeat(np.asarray(scale[:, columns].astype(jnp.float32)).astype(np.float64), GROUP[kind], 0)
            true = np.asarray(x.astype(jnp.float32)).astype(np.float64) @ w
            for how in ways_of(kind, (k, n)):
                try:
                    call = of_new[kind, how, m, k, n].result()
                    first, second = (np.asarray(call(x, values, scale).astype(jnp.float32)) for _ in range(2))
                except Exception as error:
                    say(f"FAILED {way_name(kind, how)} {k}x{n} {str(error)[:300]}")
                    wrong.append((kind, how, n))
                    continue
                # Beyond the rounding of the result to bfloat16, of the largest result.
                error = np.abs(first[:, columns] - true) - np.abs(true) / 256
                error = max(0.0, error.max() / np.abs(true).max())
                same = np.array_equal(first, second)
                ok = error < 5e-6 and same
                say(f"{'right' if ok else 'WRONG'} {way_name(kind, how)} {m} x {k} x {n} error {error:.1e} same twice {same}")
                if not ok:
                    wrong.append((kind, how, n))
        # --- fast?
        for m in rows_of((k, n)) if phase == "new" else (1, 16):
            if time.monotonic() - BEGIN > budget:
                say("the budget is spent")
                break
            x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
            calls = {}
            turns = {kind: itertools.cycle(of_kind) for kind, of_kind in sets.items()}
            for name in [job[0] for job in jobs if job[1:] == (m, k, n)]:
                if phase == "new" and name[-2:-1] == "s":
                    continue
                try:
                    call = compiled[name, m, k, n].result()
                except Exception as error:
                    say(f"FAILED {name} {m} {k}x{n} {str(error)[:200]}")
                    continue
                calls[name] = lambda call=call, turn=turns[name.split()[0]]: call(x, *next(turn))
            for kind in WAYS if phase == "new" else ():
                for how in ways_of(kind, (k, n)):
                    if (kind, how, n) not in wrong:
                        call = of_new[kind, how, m, k, n].result()
                        calls[way_name(kind, how)] = lambda call=call, turn=turns[kind]: call(x, *next(turn))
            try:
                found = timing.interleaved(calls, [()], 0.15)
            except Exception as error:
                say(f"{m} {k} {n} TIMING FAILED {str(error)[:300]}")
                continue
            us = {name: float(np.median(s.microseconds)) for name, s in found.items()}
            results.append(dict(m=m, k=k, n=n, us=us, least={name: min(s.microseconds) for name, s in found.items()},
                                kernels={name: [kernel for kernel, _ in s.kernels] for name, s in found.items()}))
            say(f"{k}x{n} M {m:2d} bf16 {us['bf16']:.1f}")
            for kind in WAYS:
                say("   " + "  ".join(f"{name} {t:.1f} {t / us['bf16']:.3f}" for name, t in us.items() if name.startswith(kind)))
            many = {name: len(s.kernels) for name, s in found.items() if len(s.kernels) > 1}
            if many:
                say(f"   of several kernels: {many}")
            if m != 4 and phase == "new":
                for kind in WAYS:
                    for how in ways_of(kind, (k, n)):
                        if (kind, how, n) in wrong:
                            continue
                        call = clocks(kind, how, m, k, n)
                        for _ in range(3):
                            cycles = np.asarray(call(x, *next(turns[kind])))[0]
                        width = 16 * UNITS[n]
                        cycles = np.stack([cycles[i : len(cycles) // width * width : width] for i in range(1, 6)])
                        say(f"   cycles of {way_name(kind, how)}, median and most of the blocks: " + ", ".join(
                            f"{what} {np.median(c):.0f} {c.max():.0f}" for what, c in zip(("table", "data", "loop", "sums", "end"), cycles)))
            with open(out, "w") as file:
                json.dump(results, file)
    names = [name for name in results[0]["us"] if name != "bf16"] if results else []
    for name in names:
        shares = [row["us"][name] / row["us"]["bf16"] for row in results if name in row["us"] and (row["k"], row["n"]) in SHAPES]
        say(f"{name}: worst {max(shares):.3f}, mean {np.mean(shares):.3f}, missed 0.45 at {sum(s > 0.45 for s in shares)} of {len(shares)}")
    pool.shutdown(wait=False, cancel_futures=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
