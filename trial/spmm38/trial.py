"""Sparse products: right against float64, the kernels of a call, lanes of the kernel, beside cuSPARSE and dense.

python trial.py CSR_SO [--cpu EMULATED_SO]. The library CSR_SO has the new handlers and trial_LANES_TOGETHER.
"""

import ctypes
import functools
import os
import sys
import time

BEGIN = time.monotonic()
CPU = "--cpu" in sys.argv
if CPU:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused.ops.sparse import sparse_products_cuda as kernels
from jaxfused.ops.sparse.coordinates import Coordinates
from jaxfused.runtime import cuda_library
from jax.experimental import sparse

BUDGET = 64.0
extra = ctypes.CDLL(sys.argv[sys.argv.index("--cpu") + 1] if CPU else sys.argv[1])
PLATFORM = "cpu" if CPU else "CUDA"
NEW = ("jaxfused_csr_matmul", "jaxfused_csr_dense", "jaxfused_csr_starts")
FOLDER = None if CPU else sys.argv[2]
WAYS = [(16, 8, 128), (16, 4, 128), (32, 4, 128), (32, 8, 128), (8, 8, 512), (16, 8, 512), (32, 8, 512), (8, 4, 512), (16, 4, 512),
        (4, 8, 1024), (8, 8, 1024), (16, 8, 1024), (8, 4, 1024)]


def register():
    for lanes, eight, threads in WAYS if not CPU else ():
        library = ctypes.CDLL(f"{FOLDER}/csr{threads}.so")
        handler = jax.ffi.pycapsule(getattr(library, f"trial_{lanes}_{eight}"))
        jax.ffi.register_ffi_target(f"trial_{lanes}_{eight}_{threads}", handler, platform=PLATFORM)
    for target in NEW:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(extra, target)), platform=PLATFORM)
    if CPU:
        return
    library = ctypes.CDLL(str(cuda_library.PATH))
    for target in cuda_library.TARGETS:
        if target not in NEW and hasattr(library, target):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform=PLATFORM)


cuda_library.TARGETS = tuple(t for t in cuda_library.TARGETS if t not in NEW)
register()
cuda_library.register = lambda: None


def say(text):
    print(f"[{time.monotonic() - BEGIN:5.1f}] {text}", flush=True)


def with_way(way, starts, columns, data, b, rows):
    out = jax.ShapeDtypeStruct((rows, b.shape[1]), b.dtype)
    return jax.ffi.ffi_call("trial_" + "_".join(map(str, way)), out)(starts, columns, data, b)


# --- right?
def check(rows, depth, width, entries, dtype, ways=(), skew=False):
    rng = np.random.default_rng(entries)
    at = rng.choice(rows * depth, entries, replace=False)
    if skew:
        at = np.unique(np.concatenate([at, np.arange(depth) + (rows // 2) * depth]))
    at = np.sort(at)
    r, c = (at // depth).astype(np.int32), (at % depth).astype(np.int32)
    # rows before the first and after the last, and columns beyond either end, count for nothing
    r = np.concatenate([[-3, -1], r, [rows, rows + 5]]).astype(np.int32)
    c = np.concatenate([[0, 1], c, [0, 1]]).astype(np.int32)
    c[5::97] = depth + 2
    c[6::89] = -1
    data = jnp.asarray(rng.normal(size=len(r)), dtype)
    b = jnp.asarray(rng.normal(size=(depth, width)), dtype)
    inside = (r >= 0) & (r < rows) & (c >= 0) & (c < depth)
    d64, b64 = np.asarray(data.astype(jnp.float32), np.float64), np.asarray(b.astype(jnp.float32), np.float64)
    dense = np.zeros((rows, depth))
    dense[r[inside], c[inside]] = d64[inside]
    true, scale = dense @ b64, np.abs(dense) @ np.abs(b64) + 1e-30
    places = Coordinates(jnp.asarray(r), jnp.asarray(c), True, True)
    pairs = places._replace(indices=jnp.stack([places.rows, places.columns], axis=1))
    raw = jnp.asarray(np.stack([r, np.where((c >= 0) & (c < depth) & (np.arange(len(c)) % 3 == 0), c - depth, np.where(c == -1, -1 - depth, c))], axis=1))
    pairs = pairs._replace(indices=raw.astype(jnp.int32))
    starts = np.asarray(kernels._by_rows(places, (rows, depth))[0])
    if not np.array_equal(starts, np.asarray(kernels._by_rows(pairs, (rows, depth))[0])):
        print("WRONG starts of pairs")
    bad = []
    if not np.array_equal(starts, np.searchsorted(r, np.arange(rows + 1))):
        bad.append("starts")
    copy = np.asarray(kernels.dense_copy(data, places, (rows, depth)).astype(jnp.float32))
    if not np.array_equal(copy, dense.astype(np.float32)):
        bad.append("copy")
    copy = np.asarray(kernels.dense_copy(data, pairs, (rows, depth)).astype(jnp.float32))
    if not np.array_equal(copy, dense.astype(np.float32)):
        bad.append("copy of pairs")
    eps = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    worst = 0.0
    calls = {"ours": lambda: kernels.sparse_product(data, places, b, rows=rows), "pairs": lambda: kernels.sparse_product(data, pairs, b, rows=rows)}
    for way in ways:
        calls[str(way)] = lambda way=way: with_way(way, jnp.asarray(starts), places.columns, data, b, rows)
    for name, call in calls.items():
        y, again = (np.asarray(call().astype(jnp.float32)) for _ in range(2))
        error = ((np.abs(y - true) - eps * np.abs(true)) / scale).max() / 2.0**-24
        worst = max(worst, error)
        longest = np.diff(starts).max()
        if not error < 4 + longest or not np.array_equal(y, again):
            bad.append(f"{name} {error:.1f}")
    say(f"{'WRONG ' + str(bad) if bad else 'right'} {rows} x {depth} x {width} {entries} entries {dtype}: {worst:.2f} units of float32's rounding")


small = [(40, 50, 24, 200, "float32"), (33, 70, 7, 500, "bfloat16"), (5, 9000, 136, 3000, "float16"), (300, 40, 1, 900, "float32"),
         (64, 5000, 520, 4000, "bfloat16"), (2000, 3, 4, 60, "float32")]
for case in small[: 5 if CPU else 9]:
    check(*case, ways=() if CPU else WAYS[4:], skew=case[1] == 50)
if CPU:
    say("done")
    sys.exit()
check(2048, 4096, 512, 84000, "float32", ways=WAYS)
check(2048, 4096, 512, 84000, "bfloat16", ways=WAYS)

from benchmarks.cases import sparse_entries
from benchmarks.run import timing

DENSITIES = (0.001, 0.01, 0.02, 0.05)
SIDE = 8192
best = {}
torch = None
for dtype in ("float32", "bfloat16"):
    for density in DENSITIES:
        if time.monotonic() - BEGIN > BUDGET - 8:
            say("the budget is spent")
            break
        [case] = sparse_entries.cases(shapes=[(SIDE, 512, density, dtype)])
        make = jax.jit(case.make_inputs)
        sets = [make(jax.random.key(i)) for i in range(3)]

        def matrix(data, places):
            return sparse.BCOO((data, places), shape=(SIDE, SIDE), indices_sorted=True, unique_indices=True)

        def ours(data, places, at, starts, b, dense):
            return jaxfused.sparse_matmul(matrix(data, places), b)

        def kernel(data, places, at, starts, b, dense):
            return jaxfused.sparse_matmul(matrix(data, places), b, precision="highest", implementation="cuda")

        def copy(data, places, at, starts, b, dense):
            ordered = Coordinates(places[:, 0].astype(jnp.int32), at.astype(jnp.int32), True, True, indices=places)
            return kernels.dense_copy(data, ordered, (SIDE, SIDE))

        def route(data, places, at, starts, b, dense):
            return copy(data, places, at, starts, b, dense) @ b

        def product(data, places, at, starts, b, dense):
            return dense @ b

        def alone(way, data, places, at, starts, b, dense):
            return with_way(way, starts, at.astype(jnp.int32), data, b, SIDE)

        calls = {"ours": jax.jit(ours), "dense": jax.jit(product), "copy": jax.jit(copy), "by copy": jax.jit(route)}
        if density <= 0.02:
            for way in WAYS:
                calls["/".join(map(str, way))] = jax.jit(functools.partial(alone, way))
        try:
            error = 0
            data, places, at, starts, b, dense = sets[0]
            some = np.arange(0, SIDE, 97)
            d64, b64 = np.asarray(dense[some].astype(jnp.float32), np.float64), np.asarray(b.astype(jnp.float32), np.float64)
            y = np.asarray(calls["ours"](*sets[0]).astype(jnp.float32))[some]
            error = np.abs(y - d64 @ b64).max() / np.abs(d64 @ b64).max()
            same = bool(jnp.array_equal(calls["copy"](*sets[0]), dense))
            found = timing.interleaved(calls, sets, 0.25)
        except Exception as problem:
            say(f"FAILED {dtype} {density} {str(problem)[:300]}")
            continue
        us = {name: float(np.median(s.microseconds)) for name, s in found.items()}
        say(f"{dtype} {density:.1%} error {error:.1e} {'copy right' if same else 'copy WRONG'}: " + "  ".join(f"{n} {t:.1f}" for n, t in us.items()))
        say("   kernels of ours: " + ", ".join(f"{name[:40]} {t:.1f}" for name, t in found["ours"].kernels))
        say("   kernels by copy: " + ", ".join(f"{name[:40]} {t:.1f}" for name, t in found["by copy"].kernels))
        if density <= 0.01:
            try:
                if torch is None:
                    import torch
                tensors = [tuple(torch.from_dlpack(x) for x in (s[3], s[2].astype(jnp.int32), s[0], s[4])) for s in sets]
                run = lambda starts, at, data, b: torch.sparse_csr_tensor(starts, at, data, size=(SIDE, SIDE)) @ b
                found = timing.torch_cupti(run, tensors)
                say(f"   cuSPARSE {float(np.median(found.microseconds)):.1f}")
            except Exception as problem:
                say(f"   cuSPARSE FAILED {str(problem)[:200]}")
        del sets
