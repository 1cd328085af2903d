"""short.py FOLDER OUT SECONDS: the musts of issue 49 in one short call; `short.py --case NAME OUT` is one case of it.

Each case is a process that traces and compiles at once with the others, then waits for its turn on the quiet GPUs. The order of turns
is that of CASES. "tensor" compiles in its turn, as the autotuner's choice of its products is what its bar rests on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TINY = bool(os.environ.get("TINY"))
# Case: variants in their order, seconds of its turn at most, whether XLA's autotuner uses the GPU while it compiles.
CASES = {
    "data": (["xla", "shard_map bfloat16 last", "zero1 bfloat16 last"], 75, True),
    "context": (["zigzag ring", "all_to_all", "flash-attn3-jax"], 60, False),
    "tensor": (["xla", "stock", "whole rows"], 70, False),
    "fsdp": (["fsdp"], 60, True),
    "context window": (["all_to_all", "ring"], 45, False),
}
COMPILING = int(os.environ.get("COMPILING", 95))
"""Seconds after which a turn may begin though others still compile; the tests end then too."""
PROFILES = int(os.environ.get("PROFILES", 225))
"""Seconds after which no program is profiled."""


def one(name: str, out: Path) -> int:
    """One case: compiles, says that it is ready, waits for its turn, and runs."""
    import jax

    from benchmarks.run import timing
    from benchmarks.whole import parallel, parallel_bars, parallel_programs, parallel_timing

    began = float(os.environ["BEGAN"])
    wanted, _, _ = CASES[name]
    cases = parallel_bars.cases

    def chosen(sizes):
        found = cases(sizes)
        variants = found[name].variants
        kept = {n: variants[n] for n in wanted if n in variants}
        variants.clear()
        variants.update(kept)
        return found

    def turn():
        (out / f"{name}.ready").touch()
        while not (out / f"{name}.go").exists():
            time.sleep(0.02)

    compiled = parallel_bars._compiled

    def in_turn(builds, jobs):
        if name == "tensor":
            turn()
            yield from compiled(builds, jobs)
            return
        programs = compiled(builds, jobs)
        first = next(programs)
        print(f"({name}: compiled at {time.time() - began:.0f} s)", flush=True)
        turn()
        yield first
        del first
        yield from programs

    last = []
    shares = parallel_timing.Ready.shares

    def later(ready):
        last.append(ready)
        return {}

    line = parallel_bars.line

    def printed(row):
        """The row; where a bar is missed, a profile of its program follows."""
        print(line(row), flush=True)
        text = f"        at {time.time() - began:.0f} s"
        for ready in last:
            if row.get("x", 9) < row.get("bar", 0) and time.time() - began < PROFILES:
                text += f"; {name} {row['model']} profile: {shares(ready)}"
        last.clear()
        return text

    parallel_bars.cases, parallel_bars._compiled, parallel_bars.line = chosen, in_turn, printed
    parallel_timing.Ready.shares = later
    timing._ROUND_MILLISECONDS = 20 if TINY else {"data": 1200, "tensor": 500}.get(name, 700)
    return parallel.main(["--case", name, "--out", str(out / "bars"), *(["--tiny"] if TINY else [])])


def main(folder: Path, out: Path, total: float) -> None:
    began = time.time()
    # The times of the cases' own machinery lie in a folder that is removed; the results are in OUT/bars.
    turns = Path(f"/tmp/two49-{os.getpid()}")
    turns.mkdir(parents=True)
    (turns / "bars").symlink_to(out.resolve())
    table = open(out / "table.txt", "w")

    def since() -> float:
        return time.time() - began

    def say(text: str) -> None:
        print(text, flush=True)
        table.write(text + "\n")
        table.flush()

    def start(command, *, log, **more):
        environment = os.environ | dict(BEGAN=str(began)) | more
        return subprocess.Popen(
            command, stdout=open(log, "w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def stop(process, patience: float = 0) -> None:
        if process.poll() is None and patience:
            # pytest then tells the failures so far.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    children, read = {}, {}
    for name in CASES:
        # The autotuner works on the first device: another one than that of "data".
        other = {} if TINY or name != "fsdp" else {"CUDA_VISIBLE_DEVICES": "1,0"}
        command = [sys.executable, str(Path(__file__).resolve()), "--case", name, str(turns)]
        log = out / f"{name.replace(' ', '_')}.log"
        children[name] = start(command, log=log, **other)
        read[name] = open(log)
    time.sleep(1 if TINY else 8)
    tests = "tests/every_operator/test_two_gpus.py"
    explicit = out / "explicit.txt"
    pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=line", "-rf", tests]
    if TINY:
        pytest += ["-m", "gpu", "-n", "1"]
    else:
        pytest = ["nice", "-n", "5", *pytest, "-m", "gpu", "-n", os.environ.get("WORKERS", "24")]
    flags = os.environ.get("XLA_FLAGS", "") + (
        "" if TINY else " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    )
    testing = start(pytest, log=explicit, XLA_FLAGS=flags)

    def forward() -> None:
        """Prints what the cases have printed, but for XLA's own lines."""
        for file in read.values():
            place = file.tell()
            for text in file.read().splitlines(keepends=True):
                if not text.endswith("\n"):
                    break
                place += len(text.encode())
                if not (text[:1] in "WEI" and text[1:5].isdigit()) and text.strip():
                    say(text.rstrip())
            file.seek(place)

    def told() -> None:
        text = explicit.read_text()
        counts = {word: text.count(f" {word} tests/") for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
        say(f"=== explicit: {counts} of 132, ended at {since():.0f} s")
        rows = text.splitlines()
        for row in rows[:0] if counts["ERROR"] > 20 else rows:
            if " FAILED tests/" in row or row.startswith(("FAILED ", "E  ", "/")):
                say(row[:300])

    running, since_turn, waiting = None, 0.0, [*CASES]
    try:
        while since() < total and (waiting or running):
            forward()
            if testing and (testing.poll() is not None or (since() > COMPILING and testing.poll() is None)):
                stop(testing, 5)
                told()
                testing = None
            for name in [*waiting]:
                if children[name].poll() is not None:
                    waiting.remove(name)
                    say(f"=== {name} ended with {children[name].returncode} before its turn, at {since():.0f} s")
            if running and (children[running].poll() is not None or since() - since_turn > CASES[running][1]):
                status = children[running].poll()
                stop(children[running])
                forward()
                say(f"=== {running}: {since() - since_turn:.0f} s of its turn, status {status}")
                running = None
            ready = [name for name in waiting if (turns / f"{name}.ready").exists()]
            busy = testing or any(CASES[n][2] for n in waiting if n not in ready)
            if running is None and ready and (not busy or since() > COMPILING):
                running, since_turn = ready[0], time.time() - began
                say(f"=== {running} at {since():.0f} s" + (f", beside compiling {set(waiting) - set(ready)}" if busy else ""))
                waiting.remove(running)
                (turns / f"{running}.go").touch()
            time.sleep(0.05)
    finally:
        for process in [*children.values(), *([testing] if testing else [])]:
            stop(process)
        forward()
        if testing:
            told()
        say(f"=== end at {since():.0f} s; not measured: {[*waiting, *([running] if running else [])]}")


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        sys.exit(one(sys.argv[2], Path(sys.argv[3])))
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
