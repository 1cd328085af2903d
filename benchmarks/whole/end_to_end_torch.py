"""One network under torch.compile: prints a row of `python -m benchmarks end_to_end`.

`python -m benchmarks.whole.end_to_end_torch MODEL BATCH`: timm's networks by name, or the U-Net of
examples/unet as a user of torch writes it; channels last, autocast to bfloat16, float32 parameters,
fused AdamW, clipping by the global norm, random images. With --answers, inference instead of steps, with
weights in bfloat16 and in a CUDA graph. The last line of the output is JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.run import peers, timing

UNET = "unet"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help=f"timm's name for it, or {UNET}")
    parser.add_argument("batch", type=int)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--answers", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    run = (inference if options.answers else training)(
        options.model, options.batch, options.image_size
    )
    begin = time.perf_counter()
    losses = [run(1)]
    compile_seconds = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    row = timing.steps(lambda count: losses.append(run(count)))
    row |= {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "compile_seconds": compile_seconds,
        "losses": losses,
    }
    # If the profiler does not work, the row has no kernels.
    try:
        row["kernels"] = kernels(lambda: run(1))
    except Exception as error:
        row["note"] = f"no kernel times: {peers.describe(error)}"
    print(json.dumps(row))


def training(name: str, batch: int, image_size: int | None) -> Callable[[int], float]:
    """Returns a function that takes n steps, waits for the last, and returns its loss."""
    import torch

    model, images, labels = create(name, batch, image_size)
    model.train()
    compiled = torch.compile(model, dynamic=False)
    loss_of = segmentation_loss if name == UNET else torch.nn.functional.cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)

    def run(count: int) -> float:
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(compiled(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return float(loss.item())

    return run


def inference(name: str, batch: int, image_size: int | None) -> Callable[[int], float]:
    """Returns a function that infers n times, waits for the last, and returns the logits' mean."""
    import torch

    model, images, _ = create(name, batch, image_size)
    model.eval().to(torch.bfloat16)
    compiled = torch.compile(model, dynamic=False)
    with torch.inference_mode():
        for _ in range(3):
            compiled(images)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = compiled(images)

    def run(count: int) -> float:
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        return float(logits.float().mean().item())

    return run


def create(name: str, batch: int, image_size: int | None = None) -> tuple[Any, Any, Any]:
    import torch

    if name == UNET:
        model = unet()
        side = image_size or 256
        labels = torch.rand(batch, side, side, device="cuda") < 0.5
    else:
        import timm

        model = timm.create_model(name, num_classes=1000)
        side = image_size or model.default_cfg["input_size"][-1]
        labels = torch.randint(1000, (batch,), device="cuda")
    last = torch.channels_last
    images = torch.randn(batch, 3, side, side, device="cuda").to(torch.bfloat16)
    return model.cuda().to(memory_format=last), images.contiguous(memory_format=last), labels


def unet(base: int = 64, levels: int = 5, groups: int = 32) -> Any:
    """Returns the network of `examples.unet.model.UNet` in torch."""
    import torch
    from torch import nn

    def block(before: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (before, width):
            layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=False))
            layers += [nn.GroupNorm(groups, width), nn.SiLU(inplace=True)]
        return nn.Sequential(*layers)

    widths = [base * 2**level for level in range(levels)]

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = zip([3, *widths[:-1]], widths, strict=True)
            self.down = nn.ModuleList(block(before, width) for before, width in pairs)
            self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:-1])
            self.up = nn.ModuleList(block(2 * width, width) for width in widths[:-1])
            self.head = nn.Conv2d(base, 1, 1)

        def forward(self, x: Any) -> Any:
            seen = []
            for level, layer in enumerate(self.down):
                x = layer(nn.functional.max_pool2d(x, 2) if level else x)
                seen.append(x)
            for level in reversed(range(levels - 1)):
                x = torch.cat([seen[level], self.widen[level](x)], 1)
                x = self.up[level](x)
            return self.head(x)[:, 0].float()

    return UNet()


def segmentation_loss(logits: Any, labels: Any) -> Any:
    """Computes cross-entropy plus the Dice loss, as the JAX networks' training does."""
    import torch

    targets = labels.float()
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
    probabilities = torch.sigmoid(logits)
    overlap = 2 * (probabilities * targets).sum((1, 2)) + 1
    dice = overlap / ((probabilities + targets).sum((1, 2)) + 1)
    return cross_entropy + 1 - dice.mean()


def kernels(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns (name, microseconds) of each kernel of a call, without copies and fills, as in JAX."""
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
