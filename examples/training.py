"""The training loop that every example shares: steps, evaluations, checkpoints, resume, learning curve.

An example supplies its model, its data and a jitted `train_step`; `fit` does the rest, so that all
examples behave alike. The flags are in `examples.flags`, the run's directory in `examples.runs`.

A resumed run gives the numbers of an uninterrupted one: batches and random keys are functions of
the step, and everything else is in the checkpoint.
"""

import argparse
import contextlib
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

from examples import optimizers, processes
from examples.errors import ExampleError, Stopped
from examples.images import Batch, Loader, MakeBatch
from examples.placement import ONE_DEVICE, OneDevice
from examples.runs import Run, State
from jaxfused.optim import FusedTransformation

TrainStep = Callable[[State, Batch, int], tuple[State, dict[str, jax.Array]]]
"""Function (state, batch, step) -> (next state, metrics), where metrics contain "loss"."""


def steps_per_epoch(args: argparse.Namespace, train_size: int, *, unit: str = "images") -> int:
    """Returns the number of full batches in an epoch of `train_size` images, or of another `unit`.

    Raises:
      ExampleError: there is none, or the warm-up is as long as the run.
    """
    if args.batch_size > train_size:
        raise ExampleError(
            f"a batch must fit into the training data, but --batch-size is {args.batch_size} and"
            f" there are {train_size} training {unit}; pass --batch-size {train_size} or less."
        )
    if args.warmup_epochs >= args.epochs:
        raise ExampleError(
            f"the warm-up must be shorter than the run, but --warmup-epochs is"
            f" {args.warmup_epochs:g} and --epochs is {args.epochs}; pass a shorter warm-up."
        )
    return train_size // args.batch_size


# --- model ----------------------------------------------------------------------------------------


def create(
    build: Callable[[], nnx.Module],
    *inputs: jax.ShapeDtypeStruct,
    placement: OneDevice = ONE_DEVICE,
) -> tuple[Any, Any]:
    """Returns the structure and the initial parameters of the model that `build` makes.

    Args:
      build: makes the model.
      inputs: what the model will be called with; it is traced with them, not run.
      placement: holds the parameters.

    Raises:
      ExampleError: the model refuses its sizes or these inputs.
    """
    # The placement reads the names of parameters' axes; Flax itself would need a mesh for them here.
    with nnx.use_eager_sharding(False):
        try:
            graphdef = nnx.graphdef(nnx.eval_shape(build))
            jax.eval_shape(lambda *arrays: build()(*arrays), *inputs)
        except ValueError as error:
            raise ExampleError(str(error)) from error
        # All operations are compiled as one program; otherwise each would be compiled separately.
        return graphdef, placement.parameters(lambda: nnx.state(build()))


def to_float(images: jax.Array, dtype: str) -> jax.Array:
    """Maps uint8 to [-1, 1]."""
    return (images.astype(jnp.float32) / 127.5 - 1).astype(dtype)


def make_train_step(
    loss_of: Callable[[Any, Batch, jax.Array], jax.Array],
    optimizer: FusedTransformation,
    *,
    seed: int,
    clip_norm: float,
    placement: OneDevice = ONE_DEVICE,
) -> TrainStep:
    """Returns the compiled step of `loss_of(params, batch, key)`; gradients are clipped to `clip_norm`.

    The step donates the state, so that parameters are updated in place.
    """
    value_and_grad = placement.value_and_grad(loss_of)

    def train_step(state: State, batch: Batch, step: int) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        loss, gradients = value_and_grad(state["params"], batch, key)
        params, opt_state = optimizer.step(
            gradients, state["opt_state"], state["params"], max_norm=clip_norm
        )
        metrics = dict(loss=loss, gradient_norm=optax.tree.norm(gradients))
        return dict(params=params, opt_state=opt_state), metrics

    return placement.train_step(train_step)


# --- optimizer ------------------------------------------------------------------------------------


def make_optimizer(args: argparse.Namespace, epoch_steps: int) -> FusedTransformation:
    """Returns the optimizer of the flags, with warm-up and cosine decay of its rate to zero.

    `make_train_step` clips the gradients.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=args.learning_rate,
        warmup_steps=round(args.warmup_epochs * epoch_steps),
        decay_steps=args.epochs * epoch_steps,
    )
    return optimizers.make(args.optimizer, schedule, args.weight_decay)


_TIMED_STEPS = 20


def optimizer_share(
    optimizer: FusedTransformation,
    state: State,
    *,
    args: argparse.Namespace,
    images_per_second: float,
    placement: OneDevice = ONE_DEVICE,
) -> str:
    """Returns a sentence that says how much of a training step the optimizer takes.

    The optimizer's step is timed alone, on the device, over some steps in a row with one wait at the
    end; a training step is the run's average. `state` is donated.
    """

    def step(state: State, batch: Batch, number: int) -> tuple[State, dict[str, jax.Array]]:
        del batch, number
        params, opt_state = optimizer.step(
            state["gradients"], state["opt_state"], state["params"], max_norm=args.clip_norm
        )
        return dict(params=params, opt_state=opt_state, gradients=state["gradients"]), {}

    zeros = placement.init(lambda params: jax.tree.map(jnp.zeros_like, params), state["params"])
    state = dict(params=state["params"], opt_state=state["opt_state"], gradients=zeros)
    rows = placement.rows(args.batch_size)
    # The placement's step splits its batch among devices, so it gets one that `step` ignores.
    batch = dict(row=np.zeros(rows.stop - rows.start, np.float32))
    take = placement.train_step(step)
    state, _ = take(state, batch, 0)
    jax.block_until_ready(state)
    begin = time.perf_counter()
    for number in range(_TIMED_STEPS):
        state, _ = take(state, batch, number)
    jax.block_until_ready(state)
    milliseconds = 1e3 * (time.perf_counter() - begin) / _TIMED_STEPS
    whole_step = 1e3 * args.batch_size / images_per_second if images_per_second else 0.0
    if whole_step < milliseconds:
        # No step was timed, or too few of them to say how long one is.
        return f"a step of {args.optimizer} takes {milliseconds:.3g} ms"
    return (
        f"{args.optimizer} takes {milliseconds:.3g} of the {whole_step:.3g} ms of a step,"
        f" {milliseconds / whole_step:.1%} (its step timed alone, {_TIMED_STEPS} times in a row)"
    )


# --- the loop -------------------------------------------------------------------------------------


def fit(
    run: Run,
    state: State,
    train_step: TrainStep,
    make_batch: MakeBatch,
    *,
    args: argparse.Namespace,
    epoch_steps: int,
    evaluate: Callable[[State], dict[str, float]],
    unit: str = "images",
) -> tuple[State, dict[str, float]]:
    """Trains from the newest checkpoint to the end, with progress, evaluations and checkpoints.

    Args:
      run: a new run, or one to resume; its newest checkpoint takes the place of `state`.
      state: the initial state. It is donated to `train_step`.
      train_step: (state, batch, step) -> (state, metrics), jitted.
      make_batch: the training batch of a step.
      args: the flags of `add_flags`.
      epoch_steps: steps in an epoch.
      evaluate: the held-out metrics of a state, for example {"test_accuracy": 0.97}.
      unit: what a batch consists of.

    Returns:
      The final state, and the result that metrics.json holds.

    Raises:
      ExampleError: the data cannot be read or the loss is not finite.
      Stopped: the user pressed Ctrl-C; the state is saved.
    """
    steps = args.epochs * epoch_steps
    with processes.together():
        run.own()
    start = run.latest_step or 0
    if start:
        state = run.restore(state)
    run.forget_after(start)
    progress = _progress(start * args.batch_size, steps * args.batch_size, unit)
    clock = _Clock()
    pending: tuple[int, dict[str, jax.Array]] | None = None

    def settle() -> None:
        """Waits for the last dispatched step, and records its metrics."""
        nonlocal pending
        if pending is None:
            return
        step, metrics = pending
        pending = None
        values = {name: float(value) for name, value in metrics.items()}
        _check_finite(values["loss"], step, run)
        run.record(step, **values)
        progress.set_postfix(loss=f"{values['loss']:.4f}", refresh=False)
        progress.update(args.batch_size)
        clock.count(args.batch_size)

    def stop(reason: str) -> str:
        """Saves the state, and returns a message that says how to continue."""
        settle()
        if step == 0:
            return f"{reason} No step was taken, and nothing is saved."
        if step != (run.latest_step or 0):
            run.save(step, state)
        resume = shlex.join(["--out", str(run.directory), "--resume"])
        return f"{reason} Step {step} of {steps} is saved; continue with {resume}."

    step = start
    loader = Loader(make_batch, args.workers)
    with _stop_signals() as stopped, progress, loader, run.finished_writes():
        stream = processes.in_step(loader.batches(range(start, steps)), stopped)
        while step < steps:
            try:
                batch = next(stream)
            except (ExampleError, Stopped) as reason:
                raise type(reason)(stop(str(reason))) from reason
            state, metrics = train_step(state, batch, step)
            # The previous step's metrics are read, not this one's, so that the device stays busy.
            settle()
            step += 1
            pending = (step, metrics)
            last = step == steps
            if last or step % (args.evaluate_every * epoch_steps) == 0:
                settle()
                try:
                    with clock.paused():
                        values = evaluate(state)
                except ExampleError as reason:
                    # A held-out image could not be read; the progress since the last checkpoint is
                    # saved.
                    raise ExampleError(stop(str(reason))) from reason
                run.record(step, **values)
                shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
                if processes.is_first():
                    progress.write(
                        f"epoch {step // epoch_steps}/{args.epochs}  {shown}", sys.stderr
                    )
            if last or step % (args.checkpoint_every * epoch_steps) == 0:
                settle()
                with clock.paused():
                    run.save(step, state)
    if start == steps:
        values = evaluate(state)
    result = {"steps": steps, **values, f"{unit}_per_second": round(clock.per_second, 1)}
    run.finish(result)
    return state, result


def _progress(initial: int, total: int, unit: str) -> tqdm:
    """Returns the progress bar of images, or of another unit, that the first process shows."""
    return tqdm(
        total=total,
        initial=initial,
        unit=f" {unit}",
        unit_scale=True,
        disable=not processes.is_first(),
        # A log file gets a line now and then, a terminal ten updates a second.
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )


def _check_finite(loss: float, step: int, run: Run) -> None:
    if not math.isfinite(loss):
        raise ExampleError(
            f"the loss must stay finite, but is {loss} at step {step}; start a new"
            f" run with a lower --learning-rate (checkpoints up to step {run.latest_step or 0}"
            " are good)."
        )


class _Clock:
    """Measures images a second of training, without compilation, evaluations and checkpoints."""

    def __init__(self) -> None:
        self._images = 0
        self._seconds = 0.0
        self._since: float | None = None

    def count(self, images: int) -> None:
        now = time.perf_counter()
        # The clock starts after the first step, which compiles.
        if self._since is not None:
            self._images += images
            self._seconds += now - self._since
        self._since = now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - begin

    @property
    def per_second(self) -> float:
        return self._images / self._seconds if self._seconds else 0.0


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C (or SIGTERM) into a flag; a second Ctrl-C ends the program at once."""
    received = False

    def note(signum: int, frame: Any) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this step; Ctrl-C again loses what is not saved", file=sys.stderr)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# --- pictures -------------------------------------------------------------------------------------


def save_curve(
    path: Path, records: Sequence[Mapping[str, float]], *, metric: str, label: str
) -> None:
    """Draws the training loss and a held-out metric over the steps of metrics.jsonl."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    train = [r for r in records if "loss" in r]
    steps = np.array([r["step"] for r in train])
    losses = np.array([r["loss"] for r in train])
    window = max(1, len(losses) // 50)
    left.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="each step")
    if len(losses):  # Losses are missing if metrics.jsonl was removed and a finished run resumed.
        smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        left.plot(steps[window - 1 :], smooth, color="tab:blue", label=f"mean of {window} steps")
        left.legend(frameon=False)
    left.set(xlabel="step", ylabel="training loss")

    test = [r for r in records if metric in r]
    values = [r[metric] for r in test]
    right.plot([r["step"] for r in test], values, color="tab:orange", marker=".")
    right.set(xlabel="step", ylabel=label)
    if values:
        right.set_title(f"last: {values[-1]:.4f}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
