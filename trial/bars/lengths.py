"""Attention's gradients with lengths: python lengths.py TAG HASHES. Right against float32, then kernel times.

TAG is "today" or "patched" (lengths.patch); HASHES is a file in which the first run leaves the hashes of all
results, which the second must repeat: the schedule moves tiles between SMs and changes no sum.
"""
import hashlib, json, os, statistics, sys, time
BEGIN = time.monotonic()
import jax, jax.numpy as jnp, numpy as np
import jaxfused
from jaxfused import dispatch

TAG, HASHES = sys.argv[1:3]
GPU = jax.default_backend() == "gpu"
H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)

def say(*words):
    print(f"[{time.monotonic() - BEGIN:5.1f} s] {TAG}", *words, flush=True)

def program(causal, implementation):
    def f(q, k, v, lengths):
        n = dict(query_seq_lengths=lengths) if causal else {}
        return jaxfused.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, is_causal=causal, implementation=implementation, **n)
    def both(q, k, v, do, lengths):
        out, vjp = jax.vjp(lambda q, k, v: f(q, k, v, lengths), q, k, v)
        out, do = jax.lax.optimization_barrier((out, do))
        return out, *vjp(do)
    return both

def shapes(b, t, n, kn, h, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct((b, t, m, h), dtype) for m in (n, kn, kn, n)] + [jax.ShapeDtypeStruct((b,), jnp.int32)]

def lower(f, s):
    if GPU:
        return jax.jit(f).lower(*s)
    with dispatch.assume(H200):
        return jax.jit(f).trace(*s).lower(lowering_platforms=("cuda",))

def inputs(s, lengths):
    keys = jax.random.split(jax.random.key(1), 4)
    return (*(jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, s)), jnp.asarray(lengths, jnp.int32))

SIZES = ((4, 4096, 16, 16, 128), (4, 4096, 16, 4, 64))
LENGTHS = ([1000, 800, 600, 400], [4096, 3500, 3000, 2000], [4000] * 4, [4096, 200, 200, 200])
known = json.load(open(HASHES)) if os.path.exists(HASHES) else {}
mine, bad = {}, 0
for size in SIZES:
    for causal in (False, True):
        name = f"{list(size)} {'causal' if causal else 'full'}"
        try:
            compiled = lower(program(causal, "pallas"), shapes(*size))
            say(name, "lowered")
            if not GPU:
                continue
            compiled = compiled.compile()
            small = (4, 2048, *size[2:])
            for check, lengths in ((small, [1000, 800, 600, 37]),):
                s = shapes(*check)
                args = inputs(s, lengths)
                got = jax.jit(program(causal, "pallas"))(*args)
                wide = [a.astype(jnp.float32) for a in args[:4]]
                with jax.default_matmul_precision("highest"):
                    want = jax.jit(program(causal, "xla"))(*wide, args[4])
                errors = [float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) for a, b in zip(got, want)]
                bad += not max(errors) < 8e-3
                say(name, "RIGHT" if max(errors) < 8e-3 else "WRONG", check, "relative errors of out dq dk dv", [f"{e:.1e}" for e in errors])
            from benchmarks.run import timing
            for lengths in LENGTHS:
                args = inputs(shapes(*size), lengths)
                out, again = compiled(*args), compiled(*args)
                digest = hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in out)).hexdigest()[:16]
                repeats = all(bool((a == b).all()) for a, b in zip(out, again))
                key = f"{name} {lengths}"
                mine[key] = digest
                same = "" if key not in known else "same bits as today" if known[key] == digest else "OTHER BITS"
                found = timing.cupti(compiled, [args], 10)
                us = statistics.median(found.microseconds)
                parts = ", ".join(f"{k.replace('mosaic_gpu_', '').replace('attention_', '')[:28]} {t:.0f}" for k, t in found.kernels if t > 4)
                say(f"LENGTHS {key} {us:.0f} us; {'' if repeats else 'BITS VARY '}{same}; {parts} ({len(found.kernels)} kernels)")
        except Exception as error:
            bad += 1
            say(name, "FAILED", type(error).__name__, str(error)[:300])
if GPU and not known:
    json.dump(mine, open(HASHES, "w"))
say("wrong or failed:", bad)
