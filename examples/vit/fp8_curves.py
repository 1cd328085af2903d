"""Trains the ViT on the digits in bfloat16 and with precision="fp8", and draws the curves of both.

python -m examples.vit.fp8_curves

Three seeds of each precision give the spread of its curves. Without a GPU, the jax.numpy reference
computes with the same float8 numbers.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from examples.vit import train

PRECISIONS = {"bfloat16": (), "fp8": ("--precision", "fp8")}
COLORS = {"bfloat16": "tab:blue", "fp8": "tab:orange"}
SEEDS = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the runs that are missing, and draws their curves."""
    parser = argparse.ArgumentParser(prog="python -m examples.vit.fp8_curves", description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--runs", type=Path, default=Path("runs/fp8_curves"), metavar="DIR")
    parser.add_argument("--picture", type=Path, default=Path("docs/fp8_curves.png"))
    flags = parser.parse_args(argv)
    runs = {
        precision: [_run(flags, precision, seed) for seed in range(SEEDS)]
        for precision in PRECISIONS
    }
    draw(flags.picture, runs)
    for precision, records in runs.items():
        losses = [_held_out(r)[1][-1] for r in records]
        print(f"{precision}: last held-out losses {', '.join(f'{loss:.4f}' for loss in losses)}")


def _run(flags: argparse.Namespace, precision: str, seed: int) -> list[dict[str, float]]:
    """Returns the records of one training, which runs only if it has not finished before."""
    out = flags.runs / f"{precision}-{seed}"
    if not (out / "metrics.json").exists():
        run = ["--epochs", str(flags.epochs), "--seed", str(seed), "--out", str(out)]
        train.main([*run, "--dtype", "bfloat16", *PRECISIONS[precision]])
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _smooth(records: Sequence[dict[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps, and for each the mean training loss of the last steps up to it."""
    train_records = [r for r in records if "loss" in r]
    steps, losses = (np.array([r[key] for r in train_records]) for key in ("step", "loss"))
    window = max(1, len(losses) // 25)
    return steps[window - 1 :], np.convolve(losses, np.full(window, 1 / window), mode="valid")


def _held_out(records: Sequence[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Returns steps, and the held-out loss after them."""
    test_records = [r for r in records if "test_loss" in r]
    return [r["step"] for r in test_records], [r["test_loss"] for r in test_records]


def draw(path: Path, runs: dict[str, list[list[dict[str, float]]]]) -> None:
    """Writes the picture of training and held-out losses, a line for each seed."""
    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2)
    titles = ("training loss (mean of neighbouring steps)", "held-out loss")
    for ax, curve, title in zip(axes, (_smooth, _held_out), titles, strict=True):
        for precision, of_seeds in runs.items():
            for seed, records in enumerate(of_seeds):
                label = f"{precision}, {SEEDS} seeds" if seed == 0 else None
                ax.plot(
                    *curve(records), color=COLORS[precision], linewidth=1, alpha=0.8, label=label
                )
        ax.set(xlabel="step", title=title)
        ax.legend(frameon=False)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
