"""One to four rows by weights of 4 bits: today's operator, the new CUDA C kernel in several ways, and bf16.

python trial.py MAIN_SO MORE_SO OUT.json [--budget SECONDS] [--cpu]. Right against float64 first (float32 results), then
kernel times in turn with cold weights (each call reads another set; sets of a format have 300 MB in all).
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
# Per format: dtype of values, of scale, group, zero points.
FORMATS = {
    "int4_128": ("int32", "float32", 128, False), "int4_64": ("int32", "float32", 64, False), "int4_32": ("int32", "float32", 32, False),
    "zero_128": ("int32", "float32", 128, True), "zero_32": ("int32", "float32", 32, True),
    "mxfp4": ("uint8", "float8_e8m0fnu", 32, False), "nf4": ("uint8", "float32", 64, False),
}
HOW = {"bits": 0, "mixed": 1, "table": 2}
# Ways of the new kernel: (how, blocks of a cluster, stages, CTAs of an SM).
PLAIN = {f: [("table" if f == "nf4" else "bits", 1, 4, 1)] for f in FORMATS}
ALL_WAYS = {
    "int4_128": [("bits", 1, 4, 1), ("bits", 2, 4, 1), ("bits", 4, 4, 1), ("bits", 1, 3, 1), ("bits", 1, 6, 1), ("bits", 1, 4, 2)],
    "mxfp4": [("bits", 1, 4, 1), ("mixed", 1, 4, 1), ("bits", 1, 6, 1), ("bits", 1, 4, 2), ("bits", 2, 4, 1)],
    "nf4": [("table", 1, 4, 1), ("table", 1, 3, 1)],
}
SHAPES = [(4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096), (5120, 13824), (3584, 18944), (8192, 8192), (2880, 5760)]
TIMED = []  # (k, n, m, format)
for _k, _n in SHAPES:
    for _f in ("int4_128", "mxfp4", "nf4"):
        if _f != "int4_128" or _k % 128 == 0:
            TIMED.append((_k, _n, 1, _f))
TIMED += [(k, n, 4, f) for k, n in SHAPES[:3] + [(5120, 13824)] for f in ("int4_128", "mxfp4")]
TIMED += [(k, n, 1, f) for k, n in SHAPES[:2] for f in ("int4_32", "zero_128")]
CHECKED = [(1280, 1044), (2176, 528)]
SHARED = 232448


def columns_of(fmt, n):
    """Returns n, or the next multiple of 16 where scales or zero points are bytes."""
    return -(-n // 16) * 16 if fmt in ("mxfp4", "zero_128", "zero_32") else n


def say(text):
    print(f"[{time.monotonic() - BEGIN:5.1f}] {text}", flush=True)


def ways(fmt, m):
    found = ALL_WAYS.get(fmt, PLAIN[fmt]) if m == 1 else PLAIN[fmt] + [(h, 1, 3, 1) for h, *_ in PLAIN[fmt]]
    return found


def plan(fmt, way, m, k, n, sms=132, most_warps=16):
    """Returns (warps, cluster, blocks, stages), or None if it does not fit."""
    how, cluster, stages, of_sm = way
    slices, most_warps = -(-k // 256), most_warps // of_sm
    passes = -(-slices // (most_warps * cluster))
    warps = -(-slices // (passes * cluster))
    if cluster > 1 and warps < 10 and most_warps == 16:
        return None  # too few copies in flight
    blocks = sms * of_sm // cluster * cluster
    _, scale, group, zeros = FORMATS[fmt]
    groups = {32: 8, 64: 4}.get(group, 2)
    stage = 2048 + groups * 16 * (1 if fmt == "mxfp4" else 4) + (groups * 16 if zeros else 0)
    rows = 4 if m == 3 else m
    most = -(-(-(-n // 16)) // (blocks // cluster)) * 16
    ring, sums = stages * stage, warps * rows * most * 4
    if fmt == "nf4" or how == "mixed":  # a table of 64 KB from 64 KB on
        behind = (SHARED - 131072) // ring
        fits = max(0, warps - behind) * ring + sums <= 65536 - 1024 and of_sm == 1
    else:
        fits = warps * ring + sums <= SHARED // of_sm - (1024 if of_sm > 1 else 0)
    if not fits:
        return None
    return warps, cluster, blocks, stages


def name_of(way):
    how, cluster, stages, of_sm = way
    return f"new {how}" + (f" cluster{cluster}" if cluster > 1 else "") + (f" stages{stages}" if stages != 4 else "") + (" twoCTAs" if of_sm > 1 else "")


def arrays(fmt, k, n):
    values, scale, group, zeros = FORMATS[fmt]
    per = 8 if values == "int32" else 2
    return [((n, k // per), values), ((k // group, n), scale)] + ([((k // group, n), "int8")] if zeros else [])


def book(fmt):
    import jaxfused

    return {"mxfp4": jaxfused.quantization.CODEBOOKS["e2m1"], "nf4": jaxfused.quantization.CODEBOOKS["nf4"]}.get(fmt)


def lower(job):
    """Exports today's product or bf16's, in a process of its own. "exact": today's kernel with float32 results."""
    import jax
    import jax.numpy as jnp

    import jaxfused
    from benchmarks.run.lowering import export as _export
    from benchmarks.without_gpu.target import H200
    from jaxfused import dispatch

    name, fmt, m, k, n = job
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    if name == "bf16":
        return _export("cuda", lambda x, w: x @ w, x, jax.ShapeDtypeStruct((k, n), jnp.bfloat16))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in arrays(fmt, k, n)]

    def ours(x, values, scale, zero_point=None):
        w = jaxfused.QuantizedArray(values, scale, zero_point, -2, "columns", codebook=book(fmt))
        return jaxfused.quantized_matmul(x, w)

    def exact(x, values, scale, zero_point=None):
        from pallas_kernels.gemm import quantized

        if scale.dtype == jnp.float8_e8m0fnu:
            scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
        codes = book(fmt)
        w = quantized.Packed(values, scale, zero_point, None if codes is None else tuple(codes))
        options = dict(activation=None, save_preactivation=False, out_dtype=jnp.float32)
        return quantized.forward(x, w, None, None, **options, multiprocessors=132)[0]

    with dispatch.assume(H200):
        return _export("cuda", exact if name == "exact" else ours, x, *shapes)


def numbers(fmt, k, values, scale, zeros):
    """Returns float64 weights [K, columns] of stored columns."""
    import jax.numpy as jnp

    if values.dtype == np.int32:
        words = values.view(np.uint32).reshape(len(values), k // 128, 4, 4)  # column, block, thread, run
        q = np.zeros((len(values), k // 128, 128), np.int64)
        for i in range(8):
            for t in range(4):
                for run in range(4):
                    feature = run * 32 + i % 4 * 8 + 2 * t + i // 4
                    q[:, :, feature] = (words[:, :, t, run] >> np.uint32(4 * i) & np.uint32(15)).astype(np.int64) - 8
        q = q.reshape(len(values), k)
    else:
        codes = np.stack([values & 15, values >> 4], -1).reshape(len(values), -1)
        q = np.asarray(book(fmt), np.float32).astype(jnp.bfloat16).astype(np.float64)[codes]
    group = FORMATS[fmt][2]
    w = q.T.astype(np.float64)
    if zeros is not None:
        w = w - np.repeat(zeros.astype(np.float64), group, 0)
    return w * np.repeat(scale.astype(np.float64), group, 0)


def main():
    so, more, out = sys.argv[1:4]
    budget = float(sys.argv[sys.argv.index("--budget") + 1]) if "--budget" in sys.argv else 80.0
    cpu = "--cpu" in sys.argv
    jobs = [("exact", f, 1, CHECKED[0][0], columns_of(f, CHECKED[0][1])) for f in ("int4_128", "zero_128", "mxfp4", "nf4")] if not cpu else []
    if not cpu:
        for k, n, m, f in TIMED:
            jobs += [job for job in [("bf16", "", m, k, n), ("today", f, m, k, n)] if job not in jobs]
    os.environ["JAX_PLATFORMS"] = "cpu"
    pool = ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) if not cpu else None
    exported = {job: pool.submit(lower, job) for job in jobs}
    if not cpu:
        del os.environ["JAX_PLATFORMS"]

    import jax
    import jax.numpy as jnp

    platform = "cpu" if cpu else "CUDA"
    for target, path in (("few_rows_main", so), ("few_rows_more", more)):
        library = ctypes.cdll.LoadLibrary(path)
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library.jaxfused_few_rows), platform=platform)

    def ours(fmt, way, planned, dtype):
        warps, cluster, blocks, stages = planned
        attributes = dict(codebook=np.asarray(book(fmt) or (), np.float32), how=np.int64(HOW[way[0]]), warps=np.int64(warps),
                          cluster=np.int64(cluster), blocks=np.int64(blocks), stages=np.int64(stages))

        def product(x, values, scale, zero_point=None):
            if scale.dtype == jnp.float8_e8m0fnu:
                scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
            if zero_point is None:
                zero_point = jnp.zeros((0,), jnp.int8)
            y = jax.ShapeDtypeStruct((x.shape[0], values.shape[0]), dtype)
            target = "few_rows_main" if stages == 4 else "few_rows_more"
            return jax.ffi.ffi_call(target, y)(x, values, scale, zero_point, **attributes)

        return product

    def compile_ours(fmt, way, m, k, n, dtype):
        planned = plan(fmt, way, m, k, n, *((4, 4) if cpu else ()))
        if planned is None:
            return None
        shapes = [jax.ShapeDtypeStruct((m, k), jnp.bfloat16)]
        shapes += [jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for shape, d in arrays(fmt, k, n)]
        return jax.jit(ours(fmt, way, planned, dtype)).lower(*shapes).compile()

    def draw(shape, dtype, key):
        if dtype == "uint8":
            return jax.random.bits(key, shape, jnp.uint8)
        if dtype == "int32":
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)
        if dtype == "int8":
            return jax.random.randint(key, shape, -8, 8).astype(jnp.int8)
        if dtype == "float32":
            return jax.random.uniform(key, shape, minval=0.005, maxval=0.02)
        return jax.lax.bitcast_convert_type(jax.random.randint(key, shape, 118, 122).astype(jnp.uint8), jnp.dtype(dtype))

    drawing = jax.jit(draw, static_argnums=(0, 1))

    def draws(fmt, k, n, i):
        return tuple(drawing(shape, dtype, jax.random.key(3 * i + j)) for j, (shape, dtype) in enumerate(arrays(fmt, k, n)))

    def truth(fmt, k, x, drawn, columns):
        values, scale, *zeros = drawn
        w = numbers(fmt, k, np.asarray(values[columns]), np.asarray(scale[:, columns].astype(jnp.float32)),
                    np.asarray(zeros[0][:, columns]) if zeros else None)
        return np.asarray(x.astype(jnp.float32)).astype(np.float64) @ w

    from benchmarks.run import timing

    if not cpu:
        from benchmarks.sweep.judge import compile_module
        from jaxfused.runtime import cuda_library

        if cuda_library.why_unavailable() is None:
            cuda_library.register()
        threads = ThreadPoolExecutor(12)
        compiled = {job: threads.submit(lambda job=job: compile_module(exported[job].result())) for job in jobs}
        pending = [(f, way, m, k, n) for k, n, m, f in TIMED for way in ways(f, m)]
        of_new = {job: threads.submit(compile_ours, *job, jnp.bfloat16) for job in pending}

    # --- right?
    wrong, results = set(), []
    for k, n in CHECKED:
        for fmt in FORMATS:
            n_of = columns_of(fmt, n)
            drawn, columns = draws(fmt, k, n_of, 7), np.arange(n_of)
            worst, bad = {}, []
            for m in (1, 2, 3, 4):
                x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16) + (m == 1)
                true = truth(fmt, k, x, drawn, columns)
                for way in (ALL_WAYS.get(fmt, PLAIN[fmt]) if m in (1, 4) else PLAIN[fmt]):
                    try:
                        call = compile_ours(fmt, way, m, k, n_of, jnp.float32)
                        if call is None:
                            continue
                        first, second = (np.asarray(call(x, *drawn)) for _ in range(2))
                    except Exception as error:
                        say(f"FAILED {fmt} {name_of(way)} {m} x {k} x {n_of} {str(error)[:200]}")
                        wrong.add((fmt, way))
                        continue
                    error = np.abs(first - true).max() / np.abs(true).max()
                    worst[name_of(way)] = max(error, worst.get(name_of(way), 0))
                    if not error < 2e-6 or not np.array_equal(first, second):
                        wrong.add((fmt, way))
                        bad.append((m, name_of(way)))
            say(f"{'WRONG ' + str(bad) if bad else 'right'} {fmt} {k} x {n_of} " + "  ".join(f"{a} {e:.1e}" for a, e in worst.items()))
            if not cpu and ("exact", fmt, 1, k, n_of) in compiled:
                x = jax.random.normal(jax.random.key(1), (1, k), jnp.bfloat16) + 1
                try:
                    y = np.asarray(compiled["exact", fmt, 1, k, n_of].result()(x, *drawn))
                    true = truth(fmt, k, x, drawn, columns)
                    say(f"   today's kernel, one row: {np.abs(y - true).max() / np.abs(true).max():.1e}")
                except Exception as error:
                    say(f"   today's kernel FAILED {str(error)[:200]}")
    if cpu:
        return

    # --- fast?
    weights, kept_shape = {}, None
    for k, n, m, fmt in sorted(TIMED, key=lambda job: (job[2] != 1, SHAPES.index(job[:2]), job[2])):
        if time.monotonic() - BEGIN > budget:
            say("the budget is spent")
            break
        if (k, n) != kept_shape:
            weights, kept_shape = {}, (k, n)
        count = min(24, max(4, -(-300 * 2**20 // (k * n // 2))))
        if "bf16" not in weights:
            weights["bf16"] = [(jax.random.normal(jax.random.key(i), (k, n), jnp.bfloat16) / 64,) for i in range(max(2, min(8, count // 4 + 1)))]
        if fmt not in weights:
            weights[fmt] = [draws(fmt, k, n, i) for i in range(count)]
        x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
        turns = {name: itertools.cycle(sets) for name, sets in weights.items()}
        calls, notes = {}, []
        for name, sets in (("bf16", "bf16"), ("today", fmt)):
            try:
                call = compiled[name, "" if name == "bf16" else fmt, m, k, n].result()
                calls[name] = lambda call=call, turn=turns[sets]: call(x, *next(turn))
            except Exception as error:
                notes.append(f"FAILED {name} {str(error)[:200]}")
        columns = np.unique(np.r_[0:40, n // 2 : n // 2 + 24, n - 40 : n])
        true = truth(fmt, k, x, weights[fmt][0], columns)
        for way in ways(fmt, m):
            if (fmt, way) in wrong:
                continue
            try:
                call = of_new[fmt, way, m, k, n].result()
                if call is None:
                    continue
                y = np.asarray(call(x, *weights[fmt][0]).astype(jnp.float32))[:, columns]
                error = (np.abs(y - true) - np.abs(true) / 256).max() / np.abs(true).max()
                if not error < 5e-6:
                    notes.append(f"WRONG {name_of(way)} {error:.1e}")
                    continue
                calls[name_of(way)] = lambda call=call, turn=turns[fmt]: call(x, *next(turn))
            except Exception as error:
                notes.append(f"FAILED {name_of(way)} {str(error)[:200]}")
        try:
            found = timing.interleaved(calls, [()], 0.12)
        except Exception as error:
            say(f"TIMING FAILED {fmt} {m} {k} {n} {str(error)[:300]} {notes}")
            continue
        us = {name: float(np.median(s.microseconds)) for name, s in found.items()}
        mb = sum(a.nbytes for a in weights[fmt][0]) / 1e6
        results.append(dict(k=k, n=n, m=m, fmt=fmt, us=us, mb=mb, least={name: min(s.microseconds) for name, s in found.items()}))
        say(f"{fmt} M {m} {k}x{n} {mb:.1f} MB  " + "  ".join(f"{name} {t:.1f}" + ("" if name == "bf16" else f" ({mb / t:.2f} TB/s)") for name, t in us.items()))
        for note in notes:
            say("   " + note)
        with open(out, "w") as file:
            json.dump(results, file)
    with open(out, "w") as file:
        json.dump(results, file)
    say("done")
    if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
