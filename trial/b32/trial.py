"""Block-sparse products, blocks of 32, 64 and 128: right or WRONG, then microseconds of configs."""
import argparse, dataclasses, json, sys, time, traceback
from concurrent.futures import ThreadPoolExecutor

import jax, jax.numpy as jnp, numpy as np

from jaxfused import BlockSparse
from jaxfused.ops.sparse.block_sparse import BlockList
from pallas_kernels.gemm import block_sparse as bs, block_sparse_weights as bw
from pallas_kernels.gemm.matmul_config import MatmulConfig
from pallas_kernels.gemm.operands import swizzled_columns

START = time.time()
parser = argparse.ArgumentParser()
parser.add_argument("--out", default="/tmp/b32.json")
parser.add_argument("--budget", type=float, default=80)
parser.add_argument("--side", type=int, default=8192)
parser.add_argument("--lower", action="store_true", help="lowers only, without a GPU")
args = parser.parse_args()
SIDE, BF = args.side, jnp.bfloat16
try:
    SMS = jax.devices("gpu")[0].core_count
except RuntimeError:
    SMS = 132
def say(*words):
    print(f"[{time.time() - START:4.0f}]", *words, flush=True)


def config(m, n, stages, slots, band, columns, cluster=1):
    return MatmulConfig(m, n, stages=stages, cluster=cluster, ping_pong=False, epilogue_columns=columns, write_slots=slots, band=band)


@dataclasses.dataclass(frozen=True)
class Product:
    block: int
    m: int
    stages: int
    slots: int
    band: int
    order: str = "ranks"
    transposed: bool = False
    cluster: int = 1
    late: bool = False

    def __str__(self):
        return f"{'dx' if self.transposed else 'y '} {self.block:3} rows {2*self.m} stages {self.stages} slots {self.slots} band {self.band}{f' cluster {self.cluster}' if self.cluster > 1 else ''}{'' if self.order == 'ranks' else ' ' + self.order}{' late' if self.late else ''}"

    def __call__(self, x, dy, blocks, cs, ce, rs, re):
        bs.ORDER, bs.LATE = self.order, self.late
        c = config(self.m, self.block, self.stages, self.slots, self.band, min(64, self.block), self.cluster)
        lists = (rs, re) if self.transposed else (cs, ce)
        return bs.block_sparse_product(dy if self.transposed else x, blocks, *lists, transposed=self.transposed,
                                       out_dtype=BF, multiprocessors=SMS, config=c)


@dataclasses.dataclass(frozen=True)
class Weights:
    block: int
    n: int
    k: int
    stages: int
    slots: int
    by_warps: bool = True
    even: bool = True

    def __str__(self):
        return f"dw {self.block:3} columns {self.n} step {self.k} stages {self.stages} slots {self.slots}{'' if self.by_warps else ' by one'}{'' if self.even else ' uneven'}"

    def __call__(self, x, dy, blocks, cs, ce, rs, re):
        bw.TILE_K[self.block], bw.BY_WARPS, bw.EVEN = self.k, self.by_warps, self.even
        c = config(64, self.n, self.stages, self.slots, 8, min(self.block, 64))
        return bw.block_sparse_weights(x, dy, rs, re, block=self.block, out_dtype=BF, multiprocessors=SMS, config=c)


P, W = Product, Weights
Y32 = [P(32, 256, 4, 2, 1), P(32, 256, 4, 2, 2), P(32, 256, 4, 2, 1, cluster=2), P(32, 256, 3, 2, 1), P(32, 128, 8, 2, 2),
       P(32, 128, 6, 2, 2, cluster=2), P(32, 256, 4, 2, 1, late=True), P(32, 256, 4, 2, 1, order="unsorted"), P(32, 256, 4, 2, 1, transposed=True)]
W32 = [W(32, 256, 32, 5, 2), W(32, 256, 64, 3, 1), W(32, 192, 64, 3, 2), W(32, 128, 64, 5, 2), W(32, 192, 32, 7, 2)]
Y64 = [P(64, 128, 4, 2, 8, order="unsorted"), P(64, 128, 4, 2, 4, order="unsorted"), P(64, 128, 4, 2, 2, order="unsorted"),
       P(64, 128, 4, 2, 4), P(64, 128, 4, 2, 2, cluster=2), P(64, 128, 4, 2, 4, transposed=True)]
W64 = [W(64, 192, 64, 3, 2, by_warps=False, even=False), W(64, 192, 64, 3, 2, even=False), W(64, 192, 64, 3, 2), W(64, 256, 64, 2, 2), W(64, 128, 64, 4, 2)]
Y128 = [P(128, 128, 4, 1, 8, order="unsorted"), P(128, 128, 4, 1, 4, order="unsorted"), P(128, 128, 4, 1, 4)]
W128 = [W(128, 256, 64, 3, 2, by_warps=False, even=False), W(128, 256, 64, 3, 2)]
PLAN = [(32, 0.1, Y32 + W32), (64, 0.1, Y64[:4] + Y64[5:] + W64), (64, 0.5, Y64[:5] + W64[:1] + W64[2:]), (128, 0.1, Y128 + W128), (32, 0.5, [])]


def exact():
    """Small whole numbers: every sum is exact in float32 and after rounding differs in no bit."""
    for block, down, across, rows in ((32, 9, 12, 1000), (64, 9, 12, 1000), (128, 9, 12, 1000)):
        rng = np.random.default_rng(block)
        mask = rng.random((down, across)) < 0.4
        if down > 1:
            mask[:, 3] = False; mask[2] = False
        else:
            mask[:] = True
        dense = rng.integers(-2, 3, (down * block, across * block)) * np.kron(mask, np.ones((block, block)))
        x, dy = rng.integers(-2, 3, (rows, down * block)), rng.integers(-2, 3, (rows, across * block))
        weight = BlockSparse.from_dense(jnp.asarray(dense, BF), block, mask=jnp.asarray(mask))
        truth = {"y ": x @ dense, "dx": dy @ dense.T}
        dw = (x.T @ dy).reshape(down, block, across, block).swapaxes(1, 2)
        truth["dw"] = dw[np.asarray(weight.places[0]), np.asarray(weight.places[1])]
        operands = (jnp.asarray(x, BF), jnp.asarray(dy, BF), weight.blocks, *weight.by_column, *weight.by_row)
        yield block, rows, operands, {k: np.asarray(jnp.asarray(v, jnp.float32).astype(BF), np.float32) for k, v in truth.items()}


def kind(v):
    """What may be right or wrong apart from the other configs: a config's tile, not its stages."""
    return (v.block, v.m, v.transposed, v.order, v.cluster, v.late) if isinstance(v, Product) else (v.block, v.n, v.k, v.by_warps, v.even)


def variants(block):
    seen = {}
    for size, _, some in PLAN:
        for v in some:
            if size == block:
                seen.setdefault(kind(v), v)
    return [v for v in seen.values() if isinstance(v, Weights) and v.by_warps and v.even or getattr(v, 'cluster', 1) > 1 or getattr(v, 'late', False)]


def compiled(jobs):
    """Lowers in turn (configs are global variables there) and compiles beside that."""
    def one(key, low):
        try:
            return key, low.compile()
        except Exception as e:
            say("does not compile:", key, str(e)[:200])
            return key, None
    found = []
    with ThreadPoolExecutor(16) as pool:
        for key, operands in jobs:
            try:
                low = jax.jit(key[-1].__call__).trace(*operands).lower(lowering_platforms=("cuda",))
                found.append(low if args.lower else pool.submit(one, key, low))
            except Exception as e:
                say("does not lower:", key, str(e)[:200])
        if args.lower:
            say(len(found), "lowered")
            return {}
        return {k: f for k, f in (job.result() for job in found) if f is not None}


wrong = set()
sets = list(exact())
programs = compiled([((block, rows, v), operands) for block, rows, operands, _ in sets for v in variants(block)])
say(len(programs), "programs of small products compiled")
for block, rows, operands, truth in sets:
    for v in variants(block):
        if (block, rows, v) not in programs:
            continue
        y, again = (programs[block, rows, v](*operands) for _ in range(2))
        t = truth[str(v)[:2]]
        right = np.array_equal(np.float32(y), t) and np.array_equal(np.float32(again), t)
        if not right:
            wrong.add(kind(v))
            bad = np.argwhere(np.float32(y) != t)
            say("WRONG", v, f"{rows} rows, {len(bad)} of {t.size}, first {bad[0]}, {np.nanmax(abs(np.float32(y) - t)):g}")
say("exact products:", "all right" if not wrong else f"{len(wrong)} WRONG")

from benchmarks.run import timing
results = {}


def operands_of(block, density):
    key = jax.random.key(int(density * 100) + block)
    def make(key):
        x, dy, dense = jax.random.normal(key, (3, SIDE, SIDE), BF)
        weight = BlockSparse.from_dense(dense, block, count=int(density * (SIDE // block) ** 2))
        return x, dy, weight.to_dense(), weight.blocks, *weight.by_column, *weight.by_row
    return (make, key)


def median(f, *operands):
    return float(np.median(timing.cupti(f, [operands], samples=7).microseconds))


def rows_gathered(words):
    """The dense matrix as rows of blocks (64 bytes of blocks of 32) in their final order: no transposition."""
    def to_dense(blocks, cs, ce, rs, re):
        weight = BlockSparse(blocks, BlockList(cs, ce), BlockList(rs, re), (SIDE, SIDE))
        size, count = weight.block_size, blocks.shape[0]
        down = SIDE // size
        table = jnp.full((down, down), count, jnp.int32)
        table = table.at[weight.places].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
        rows = (table[:, None] * size + jnp.arange(size, dtype=jnp.int32)[:, None]).reshape(SIDE, down)
        lines = blocks.reshape(count * size, size)
        if words:
            lines = jax.lax.bitcast_convert_type(lines.reshape(count * size, size // 2, 2), jnp.uint32)
        dense = lines.at[rows].get(mode="fill", fill_value=0)
        if words:
            dense = jax.lax.bitcast_convert_type(dense, BF)
        return dense.reshape(SIDE, SIDE)
    return to_dense


def of_today(blocks, cs, ce, rs, re):
    return BlockSparse(blocks, BlockList(cs, ce), BlockList(rs, re), (SIDE, SIDE)).to_dense()


def relative(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


DENSE = {"y ": lambda x, dy, w: x @ w, "dx": lambda x, dy, w: dy @ w.T, "dw": lambda x, dy, w: x.T @ dy}
for block, density, some in PLAN:
    if time.time() - START > args.budget - 8:
        say("no time for", block, density); continue
    make, key = operands_of(block, density)
    s = jax.eval_shape(make, key)
    some = [v for v in some if kind(v) not in wrong]
    programs = compiled([((block, density, v), (s[0], s[1], *s[3:])) for v in some])
    say(len(programs), "programs compiled")
    if args.lower:
        continue
    x, dy, dense, *rest = jax.block_until_ready(jax.jit(make)(key))
    blocks, lists = rest[0], rest[1:]
    base = {}
    truths = {}
    for name, f in DENSE.items():
        if any(str(v)[:2] == name for v in some):
            g = jax.jit(f)
            truths[name] = g(x, dy, dense)
            base[name] = median(g, x, dy, dense)
    say(f"blocks of {block}, {density:.0%}: dense " + ", ".join(f"{k} {v:.0f}" for k, v in base.items()))
    if density == 0.5:
        for name, f in {"today": of_today, "rows": rows_gathered(False), "rows of words": rows_gathered(True)}.items():
            f = jax.jit(f)
            right = bool((f(*rest) == dense).all())
            samples = timing.cupti(f, [tuple(rest)], samples=7)
            say(f"  dense copy, {name}: {np.median(samples.microseconds):.1f} us, {'right' if right else 'WRONG'}", [(n[:24], round(t, 1)) for n, t in samples.kernels])
        from jaxfused.ops.sparse import block_sparse_xla
        from jaxfused.runtime.product_xla import product
        for name, wide in {"today": True}.items():
            def f(x, dy, blocks, cs, ce, rs, re, wide=wide):
                weight = BlockSparse(blocks, BlockList(cs, ce), BlockList(rs, re), (SIDE, SIDE))
                if wide:
                    return block_sparse_xla.kept_blocks(x, dy, weight, out_dtype=BF, precision=None)
                dw = product("md,mf->df", x, dy, dtype=x.dtype, out_dtype=BF)
                grid = dw.reshape(SIDE // block, block, SIDE // block, block).swapaxes(1, 2)
                return grid.at[weight.places].get(mode="fill", fill_value=0)
            samples = timing.cupti(jax.jit(f), [(x, dy, *rest)], samples=7)
            say(f"  dw by XLA, {name}: {np.median(samples.microseconds):.1f} us", [(n[:24], round(t, 1)) for n, t in samples.kernels])
    if "dw" in truths:
        n = SIDE // block
        rows, columns = np.zeros(len(blocks), int), np.zeros(len(blocks), int)
        (_, cplaces), (_, rplaces) = np.asarray(lists[1]), np.asarray(lists[3])
        rows[np.asarray(lists[1])[0]] = cplaces; columns[np.asarray(lists[3])[0]] = rplaces
        truths["dw"] = truths["dw"].reshape(n, block, n, block).swapaxes(1, 2)[rows, columns]
    for v in some:
        if (block, density, v) not in programs or time.time() - START > args.budget:
            continue
        f = programs[block, density, v]
        try:
            name = str(v)[:2]
            off = relative(f(x, dy, *rest), truths[name])
            samples = timing.cupti(f, [(x, dy, *rest)], samples=7)
            us, kernel = float(np.median(samples.microseconds)), max(t for _, t in samples.kernels)
            results[f"{density:.0%} {v}"] = us
            say(f"  {density:.0%} {v}: {us:7.1f} us ({kernel:.1f} the kernel), {base[name] / us:.2f}x of dense {base[name]:.0f}, error {off:.1e}{'' if off < 5e-3 else ' WRONG'}")
        except Exception as e:
            say("  failed", v, str(e)[:200])
        json.dump(results, open(args.out, "w"), indent=1)
say("end")
