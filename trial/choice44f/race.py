"""race.py FOLDER OUT SECONDS: compiles programs lowered elsewhere, then times those of a case in turns.

Worker processes compile at the same time (a case's builds one after the other in one thread, so that XLA
autotunes a product that they share once), in windows. Between two windows nothing compiles, and the workers
time what is ready one at a time. At the end what looks lost is compiled and timed again by a new process alone.
"""

import json
import math
import os
import pickle
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

BEGIN = time.monotonic()
WORKERS, THREADS = int(os.environ.get("WORKERS", 4)), int(os.environ.get("THREADS", 4))
WINDOWS = (0.28, 0.52, 0.72)
"""Shares of the seconds at which compiling stops and timing begins."""
AGAIN = 0.8
"""Share of the seconds after which lost cases are compiled again."""
LOST = 0.96


def cases_of(folder):
    return [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]


# --- a worker -------------------------------------------------------------------------------------


def worker(folder):
    from concurrent.futures import ThreadPoolExecutor

    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.run import timing
    from benchmarks.sweep import judge
    from jaxfused.ops.linear import cublaslt
    from jaxfused.runtime import cuda_library

    lock, out = threading.Lock(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**record):
        with lock:
            out.write(json.dumps(record) + "\n")
            out.flush()

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and cuda_library.why_unavailable() is None:
        cuda_library.register()
        cublaslt.why_unavailable()
    cases, ready, host = cases_of(folder), {}, {}
    base = np.random.default_rng(0).standard_normal(2**20 + 7).astype(np.float32)

    def values(aval, seed):
        """Returns an array of normal numbers (a tenth, or 20 times, rounded); copied, not computed."""
        count, dtype = math.prod(aval.shape), jnp.dtype(aval.dtype)
        if dtype not in host or host[dtype].size < count + 4096:
            scaled = base * 20 if jnp.issubdtype(dtype, jnp.integer) else base * 0.1
            host[dtype] = np.resize(scaled.astype(dtype), count + 4096)
        start = 977 * seed % 4096
        return jax.device_put(host[dtype][start : start + count].reshape(aval.shape))

    def sets_of(module, weight_bytes, far):
        args, _ = jax.tree.unflatten(module.in_tree, module.in_avals)
        avals = jax.tree.leaves(args)
        size = sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in avals)
        count = judge._count_of_sets(size, weight_bytes) if on_gpu else 2
        def operand(aval, i, s):
            found = values(aval, s * len(avals) + i)
            # Biases far from zero, so that no rounding flips relu's derivative.
            size = far.get(str(i))
            return found if size is None else jnp.where(found < 0, -size, size).astype(found.dtype)

        return [[operand(a, i, s) for i, a in enumerate(avals)] for s in range(count)]

    def difference(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        finite = jnp.isfinite(a)
        off = jnp.max(jnp.where(finite, jnp.abs(a - b), 0), initial=0.0)
        off /= jnp.max(jnp.where(finite, jnp.abs(a), 0), initial=1e-30)
        return jnp.where(jnp.all(finite == jnp.isfinite(b)), off, jnp.inf)

    @jax.jit
    def differences(some, others):
        return jnp.stack([difference(a, b) for a, b in zip(some, others, strict=True)])

    def compiled(index):
        begin, found = time.monotonic(), {}
        try:
            for build in cases[index]["builds"]:
                lowered = pickle.loads((folder / "modules" / f"{index}.{build}").read_bytes())
                module = lowered["module"]
                args, _ = jax.tree.unflatten(module.in_tree, module.in_avals)
                found[build] = jax.jit(module.call).lower(*args).compile()
            results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in module.out_avals]
            gaps = differences.lower(results, results).compile()
            ready[index] = (module, lowered["weight_bytes"], found, gaps)
            say(index=index, seconds=round(time.monotonic() - begin, 1))
        except Exception as error:
            say(index=index, error=f"compile: {type(error).__name__}: {str(error)[:400]}")

    def on_host(calls, sets):
        times = {n: [] for n in calls}
        for s in (*sets, *sets):
            for n, c in calls.items():
                t = time.perf_counter()
                jax.block_until_ready(c(*s))
                times[n].append(1e6 * (time.perf_counter() - t))
        return {n: timing.Samples(t, []) for n, t in times.items()}

    def sampled(calls, sets, seconds):
        found = timing.interleaved(calls, sets, seconds) if on_gpu else on_host(calls, sets)
        first, last = calls
        pairs = zip(found[first].microseconds, found[last].microseconds, strict=True)
        ratios = sorted(a / b for a, b in pairs)
        low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.1, 0.9))
        return {
            "us": {n: round(statistics.median(s.microseconds), 2) for n, s in found.items()},
            "ratio": round(statistics.median(ratios), 4),
            "spread": [round(low, 3), round(high, 3)],
            "rounds": len(ratios),
            "kernels": {n: [[k[:60], round(us, 2)] for k, us in s.kernels] for n, s in found.items()},
        }

    def timed(index):
        module, weight_bytes, calls, gaps = ready.pop(index)
        record = {}
        try:
            sets = sets_of(module, weight_bytes, cases[index].get("far", {}))
            results = [jax.tree.leaves(call(*sets[0])) for call in calls.values()]
            record["off"] = float(max(gaps(*results)))
            del results
            record |= sampled(calls, sets, 0.12)
            if record["ratio"] < LOST:
                record |= sampled(calls, sets, 0.3)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        return record

    say(started=True, backend=jax.default_backend())
    with ThreadPoolExecutor(THREADS) as pool:
        for line in sys.stdin:
            what, index = line.split()
            if what == "compile":
                pool.submit(compiled, int(index))
            else:
                say(timed=int(index), record=timed(int(index)))
        os._exit(0)  # without waiting for what still compiles


# --- the process that divides the work ------------------------------------------------------------


class Worker:
    """A worker process; its messages, and (self, None) when it ends, go to `inbox`."""

    def __init__(self, name, folder, out, inbox):
        self.name, self.inbox = name, inbox
        self.compiling, self.ready, self.alive = set(), [], True
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(out / f"worker.{name}").open("w"),
            text=True,
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self.inbox.put((self, json.loads(line)))
        self.inbox.put((self, None))

    def tell(self, what, index):
        try:
            self.process.stdin.write(f"{what} {index}\n")
            self.process.stdin.flush()
        except OSError:
            self.alive = False

    def end(self):
        self.alive = False
        self.process.kill()


class Race:
    def __init__(self, folder, out, seconds):
        self.folder, self.out, self.seconds = folder, out, seconds
        self.cases, self.inbox = cases_of(folder), queue.Queue()
        part, parts = map(int, os.environ.get("PART", "0/1").split("/"))
        self.waiting = list(range(len(self.cases)))[part::parts][::-1]
        self.file = (out / "results.jsonl").open("w")
        self.records, self.compile_seconds, self.dead, self.owners = {}, [], 0, {}
        self.workers = [Worker(n, folder, out, self.inbox) for n in range(WORKERS)]

    def left(self, share=1.0):
        return share * self.seconds - (time.monotonic() - BEGIN)

    def receive(self, timeout):
        """Takes one message; returns what a worker measured, or None."""
        try:
            who, message = self.inbox.get(timeout=max(0.01, timeout))
        except queue.Empty:
            return None
        if message is None:
            self.lost(who)
        elif "seconds" in message or "error" in message:
            who.compiling.discard(message["index"])
            if "error" in message:
                self.add(message["index"], {"error": message["error"]})
            else:
                self.compile_seconds.append(message["seconds"])
                who.ready.append(message["index"])
        elif "timed" in message:
            return who, message["timed"], message["record"]
        return None

    def lost(self, who):
        """A worker died: its cases wait again, at the end, and a new one takes its place."""
        if who not in self.workers:
            return
        who.alive = False
        self.dead += 1
        self.waiting[:0] = [*who.compiling, *who.ready]
        who.compiling, who.ready = set(), []
        self.workers.remove(who)
        print(f"[{-self.left(0):4.0f} s] worker {who.name} ended: {self.tail(who)}", flush=True)
        if self.dead < 6:
            self.workers.append(Worker(f"{who.name}x", self.folder, self.out, self.inbox))

    def tail(self, who):
        return (self.out / f"worker.{who.name}").read_text()[-200:].replace("\n", " ")

    def next_for(self, worker):
        """Takes the next case; a forward and its gradient share a worker, whose XLA has autotuned products."""
        for place in range(len(self.waiting) - 1, max(-1, len(self.waiting) - 25), -1):
            line = self.cases[self.waiting[place]]["line"]
            if self.owners.get(line, worker.name) == worker.name:
                break
        else:
            place, line = len(self.waiting) - 1, None
        if line is not None:
            self.owners[line] = worker.name
        return self.waiting.pop(place)

    def compile(self, workers, share):
        """Keeps THREADS cases in each worker until the share of time is over, then waits for those."""
        while self.left(share) > 0 and (self.waiting or any(w.compiling for w in workers)):
            for w in [w for w in workers if w.alive]:
                while self.waiting and len(w.compiling) < THREADS:
                    index = self.next_for(w)
                    w.compiling.add(index)
                    w.tell("compile", index)
            self.receive(min(0.5, self.left(share)))
        stop = time.monotonic() + 12
        while any(w.compiling for w in self.workers) and time.monotonic() < min(stop, BEGIN + self.seconds):
            self.receive(0.2)

    def time(self, workers, share, again=False):
        for w in [*workers]:
            while w.ready and w.alive and self.left(share) > 0:
                index = w.ready.pop(0)
                w.tell("time", index)
                begin, found = time.monotonic(), None
                while found is None and w.alive and time.monotonic() - begin < 20:
                    found = self.receive(0.5)
                if found is None:
                    self.add(index, {"error": "timing did not end in 20 s, or the worker ended"})
                    w.end()
                    break
                beside = sum(len(v.compiling) for v in self.workers)
                self.add(index, found[2] | ({"beside": beside} if beside else {}), again)

    def add(self, index, record, again=False):
        record = {"index": index, **self.cases[index], **record} | ({"again": True} if again else {})
        if again and "error" in record:
            print(f"again: {record['error'][:200]}", flush=True)
            return
        self.records[index] = record
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        print(line_of(record), flush=True)

    def run(self):
        for share in WINDOWS:
            self.compile(self.workers, share)
            ready = sum(len(w.ready) for w in self.workers)
            mean = statistics.fmean(self.compile_seconds or [0])
            print(f"[{-self.left(0):4.0f} s] {ready} ready, {len(self.waiting)} wait; {mean:.1f} s a case in its thread", flush=True)
            self.time(self.workers, AGAIN + 0.08)
            print(f"[{-self.left(0):4.0f} s] {len(self.records)} timed", flush=True)
            if not self.waiting:
                break
        for w in [*self.workers]:
            w.end()
        self.workers = []
        lost = [r for r in self.records.values() if r.get("ratio", 1) < LOST and r["us"][r["builds"][0]] + 0.3 < r["us"][r["builds"][1]]]
        never = self.waiting
        self.waiting = [r["index"] for r in sorted(lost, key=lambda r: r["ratio"])][::-1]
        if self.waiting and self.left() > 20:
            print(f"[{-self.left(0):4.0f} s] {len(lost)} again, in a new process", flush=True)
            alone = Worker("again", self.folder, self.out, self.inbox)
            self.workers = [alone]
            while self.left(0.97) > 5 and (self.waiting or alone.compiling or alone.ready) and alone.alive:
                # Few at a time, so that the worst are timed whatever happens.
                mark = min(0.97, (self.seconds - self.left() + 14) / self.seconds)
                self.compile([alone], mark)
                self.time([alone], 0.99, again=True)
            alone.end()
        print(report([*self.records.values()], len(never)), flush=True)
        os._exit(0)


# --- text -----------------------------------------------------------------------------------------


def short(record):
    config = json.loads(record["line"])
    operator = config.pop("operator")
    text = ",".join(f"{k}={v}" if isinstance(v, bool) else f"{v}" for k, v in config.items() if v not in (False, None, 0, "same"))
    return f"{operator} {'fwd+bwd' if '+' in record['direction'] else 'fwd'} {text}"


def line_of(r):
    if "error" in r:
        return f"  ERROR {r['error'][:160]} | {r['tag']} {short(r)}"
    a, b = r["builds"]
    mark = "LOST " if r["ratio"] < 0.95 and r["spread"][1] < 0.95 else "     "
    if r["off"] > 0.05:
        mark = "WRONG"
    again = " again" if r.get("again") else ""
    stages = "; ".join(f"{s} {x}>{y}" for s, x, y in r["changes"][:3])
    return f"{r['ratio']:6.3f} [{r['spread'][0]:.2f} {r['spread'][1]:.2f}] {mark} {r['us'][a]:8.2f} {r['us'][b]:8.2f} us off {r['off']:.0e}{again} | {r['tag']} {short(r)} | {stages}"


def report(records, never):
    good = [r for r in records if "ratio" in r]
    lines = [f"\n{len(records)} cases, {len(good)} timed, {len(records) - len(good)} failed, {never} never compiled; ratio: first build over last, above 1 is good"]
    rows = {}
    for r in good:
        key = r["tag"] if r["tag"] != "draw" else json.loads(r["line"])["operator"]
        direction = "fwd+bwd" if "+" in r["direction"] else "fwd"
        rows.setdefault((r["tag"] != "draw", key, direction), []).append(r)
        if r["tag"] == "draw":
            for d in (direction, ""):
                rows.setdefault((False, "all draws", d), []).append(r)
    lines.append(f"{'':34}{'':9}timed median geomean  total    min    max  <0.95 beyond spread")
    for (_, name, direction), rs in sorted(rows.items()):
        ratios = [r["ratio"] for r in rs]
        first, last = (sum(r["us"][r["builds"][i]] for r in rs) for i in (0, 1))
        beyond = sum(is_lost(r) for r in rs)
        geo = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(f"{name:34}{direction:9}{len(rs):5} {statistics.median(ratios):6.3f} {geo:7.3f} {first / last:6.3f} {min(ratios):6.3f} {max(ratios):6.3f} {sum(x < 0.95 for x in ratios):6} {beyond:5}")
    lines.append("\nbelow 0.95 beyond the spread, by more than 0.3 us:")
    lines += [line_of(r) for r in sorted(good, key=lambda r: r["ratio"]) if is_lost(r)]
    wrong = [r for r in good if r["off"] > 0.05]
    lines.append(f"\nresults that differ by more than 5 % of the largest value: {len(wrong)}")
    lines += [line_of(r) for r in wrong]
    return "\n".join(lines)


def is_lost(r):
    a, b = r["builds"]
    return r["ratio"] < 0.95 and r["spread"][1] < 0.95 and r["us"][b] - r["us"][a] > 0.3


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(Path(sys.argv[2]))
    else:
        Race(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])).run()
