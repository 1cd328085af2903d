"""A ViT-S that trains from JPEG files: `python -m benchmarks pipeline`.

Two parts are timed alone: training steps on one batch that stays on the device, and decoding by the
worker processes. Then the example's program trains with `--augment`, by the step compiled before. The
share is the training's images per second over those of the slower part.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from benchmarks.report import results
from benchmarks.run import budget
from examples import training
from examples.augmentation import NAMES
from examples.images import Loader
from examples.placement import OneDevice
from examples.vit import train as vit

NAME = "pipeline"
MUST = 0.95
"""Least acceptable share: training's images per second over those of its slower part."""
_SIZE = (500, 375)
_DISTINCT, _CLASSES = 64, 4
_ROUNDS = 6
"""Timed batches per worker, plus one as a margin for images held out; two more warm up, while which all
workers have a batch at once."""
_STEPS = 30
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""XLA's option for products of cuBLAS, which takes less time to tune: the slower part is decoding."""


def main(arguments: Sequence[str]) -> int:
    """Measures one chain and prints a line; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("--augment", choices=NAMES, default="light", help="(%(default)s)")
    parser.add_argument("--model", default="vit-s16", help="(%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="images (%(default)s)")
    parser.add_argument("--workers", type=int, help="processes that decode (the example's)")
    parser.add_argument("--seconds", type=float, default=180.0, help="hard limit (%(default)s)")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "whole")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as directory,
        budget.limited(options.seconds, remove=directory),
    ):
        rows = budget.Rows(f"{NAME} {options.model}", options.out, options.seconds)
        return measure(rows, options, Path(directory))


def measure(rows: budget.Rows, options: argparse.Namespace, directory: Path) -> int:
    """Adds rows of steps, of decoding and of the whole training; returns 1 if the bar is missed."""
    jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
    flags = ["--data", str(directory / "images"), "--model", options.model, "--epochs", "1"]
    flags += ["--augment", options.augment, "--image-size", str(options.image_size)]
    flags += ["--batch-size", str(options.batch_size), "--warmup-epochs", "0"]
    flags += ["--held-out", "0.02"]
    if options.workers is not None:
        flags += ["--workers", str(options.workers)]
    out = ["--out", str(directory / "run")]
    workers = vit.parse_flags(vit.make_parser("vit", out=out[1]), flags).workers
    # Enough images for the timed batches, for two warm-up batches per worker, and to hold some out.
    write_images(directory / "images", options.batch_size * max(workers, 1) * (_ROUNDS + 2))
    args = vit.parse_flags(vit.make_parser("vit", out=out[1]), flags)
    data = vit.load_data(args)
    of_batches = dict(workers=workers, batch_size=options.batch_size, augment=options.augment)
    rates = {}

    def add(name: str, images_per_second: float, **more: float) -> None:
        rates[name] = images_per_second
        rows.add(name, of_batches | dict(images_per_second=images_per_second) | more)

    def add_training(batches_per_second: float) -> None:
        trained = options.batch_size * batches_per_second
        add("training", trained, share=trained / min(rates.values()), must=MUST)

    place = _Watched(_Rate(workers, add_training))
    add("step", options.batch_size * _steps_per_second(args, data, place))
    with Loader(data.train_batch, workers) as loader:
        rate = _Rate(workers, lambda r: add("decoding", options.batch_size * r))
        for _ in zip(range(rate.last), loader.batches(itertools.count()), strict=False):
            rate.count()
    place.timed = True
    vit.train(args, place)
    return int(rows.rows["training"]["share"] < MUST)


class _Rate:
    """Calls `done` with the batches per second when as many as are timed have been counted."""

    def __init__(self, workers: int, done: Callable[[float], None]):
        self._first, timed = (rounds * max(workers, 1) for rounds in (2, _ROUNDS - 1))
        self.last = self._first + timed
        self._timed, self._done, self._counted, self._begin = timed, done, 0, 0.0

    def count(self) -> None:
        self._counted += 1
        if self._counted == self._first:
            self._begin = time.perf_counter()
        if self._counted == self.last:
            self._done(self._timed / (time.perf_counter() - self._begin))


class _Watched(OneDevice):
    """Compiles the step once, for the steps timed alone and for the training; counts its batches."""

    def __init__(self, rate: _Rate):
        self.timed = False
        self._rate = rate
        self._step: Callable[..., Any] | None = None

    def train_step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        if f.__name__ != "train_step":
            return super().train_step(f)
        if self._step is None:
            self._step = jax.jit(f, donate_argnums=0, compiler_options=_CUBLAS)
        step = self._step

        def watched(*args: Any) -> Any:
            if self.timed:
                self._rate.count()
            return step(*args)

        return watched


def write_images(directory: Path, count: int) -> None:
    """Writes at least `count` JPEG files of 500 x 375 pixels, in a folder per class; 64 are distinct."""
    rng = np.random.default_rng(0)
    for number in range(_DISTINCT):
        # Smooth shapes with some noise are about as large as photographs, 40 to 60 kB.
        coarse = rng.integers(0, 256, (24, 32, 3)).astype(np.uint8)
        image = np.asarray(
            Image.fromarray(coarse).resize(_SIZE, Image.Resampling.BICUBIC), np.int32
        )
        noisy = (image + rng.normal(0, 8, image.shape)).clip(0, 255).astype(np.uint8)
        folder = directory / f"class-{number % _CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        first = folder / f"{number}-0.jpg"
        Image.fromarray(noisy).save(first, quality=88)
        for copy in range(1, -(-count // _DISTINCT)):
            (folder / f"{number}-{copy}.jpg").write_bytes(first.read_bytes())


def _steps_per_second(args: argparse.Namespace, data: Any, place: OneDevice) -> float:
    """Returns how many training steps per second the device takes."""
    graphdef, params = vit.create_vit(args, channels=data.channels, classes=len(data.classes))
    optimizer = training.make_optimizer(args, training.steps_per_epoch(args, data.train_size))
    loss_of = vit.make_loss(
        graphdef,
        label_smoothing=args.label_smoothing,
        dtype=args.dtype,
        chain=vit.make_chain(args),
    )
    train_step = training.make_train_step(
        loss_of, optimizer, seed=args.seed, clip_norm=args.clip_norm, placement=place
    )
    state = dict(params=params, opt_state=place.init(optimizer.init, params))
    batch = jax.device_put(data.train_batch(0))
    for number in range(3):
        state, metrics = train_step(state, batch, number)
    jax.block_until_ready(metrics)
    begin = time.perf_counter()
    for number in range(_STEPS):
        state, metrics = train_step(state, batch, number)
    jax.block_until_ready(metrics)
    return _STEPS / (time.perf_counter() - begin)
