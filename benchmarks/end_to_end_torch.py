"""One network of timm under torch.compile: prints a row of `python -m benchmarks end_to_end`.

`python -m benchmarks.end_to_end_torch MODEL BATCH`: autocast to bfloat16, float32 parameters, fused
AdamW, clipping by the global norm, random images. The last line of the output is JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import peers, timing


def main() -> None:
    import timm
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="timm's name for it")
    parser.add_argument("batch", type=int)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = timm.create_model(options.model, num_classes=1000).cuda().train()
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    images = torch.randn(options.batch, *model.default_cfg["input_size"], device="cuda")
    images = images.to(torch.bfloat16)
    labels = torch.randint(1000, (options.batch,), device="cuda")
    losses = []

    def run(count: int) -> None:
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(compiled(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        losses.append(loss.item())

    begin = time.perf_counter()
    run(1)
    compile_seconds = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    row = timing.steps(run)
    row |= {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "compile_seconds": compile_seconds,
        "losses": losses,
    }
    # The row stands without them where the profiler does not work.
    try:
        row["kernels"] = kernels(lambda: run(1))
    except Exception as error:
        row["note"] = f"no kernel times: {peers.describe(error)}"
    print(json.dumps(row))


def kernels(call: Callable[[], None]) -> list[tuple[str, float]]:
    """The kernels of one call: name, microseconds. Copies and fills are none, as in JAX."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [(e["name"], float(e["dur"])) for e in events if e.get("cat") == "kernel"]
    if not found:
        raise RuntimeError("the profiler saw no kernel")
    return found


if __name__ == "__main__":
    main()
