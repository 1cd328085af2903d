"""Shared parts of every training example: flags, run directory, checkpoints, resume, loop, curve.

An example brings its model, its data and a jitted `train_step`; this module does the rest, so that
all examples keep the same promises. A run lives in one directory:

    config.json      the flags and facts about the data (classes, ...); written once
    checkpoints/N/   the state after N steps, written by orbax, complete or absent
    metrics.jsonl    one line a step, and one for each evaluation
    metrics.json     the result, written at the end
    *.png            pictures

A resumed run gives the numbers of an uninterrupted one: batches and random keys are functions of
the step, and everything else is in the checkpoint.
"""

import argparse
import contextlib
import functools
import json
import math
import os
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
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

from examples import optimizers, processes, stacks
from examples.errors import ExampleError, Stopped
from examples.images import Batch, Loader, MakeBatch
from examples.placement import ONE_DEVICE, OneDevice
from jaxfused.optim import FusedTransformation

State = dict[str, Any]
"""The content of a checkpoint: a pytree of arrays for each name ("params", "opt_state", ...)."""

TrainStep = Callable[[State, Batch, int], tuple[State, dict[str, jax.Array]]]
"""A function (state, batch, step) -> (next state, metrics), where metrics contain "loss"."""


# --- flags ----------------------------------------------------------------------------------------

# These flags belong to one call, and config.json does not keep them.
_CALL_FLAGS = ("out", "resume", "coordinator", "processes", "process_id", "cpu_devices")
# These flags say only where and how a run is carried out; all others define what it computes.
_PLACE_FLAGS = (*_CALL_FLAGS, "workers", "checkpoint_every", "data", "tensor", "fsdp")


def add_flags(parser: argparse.ArgumentParser, *, out: str) -> None:
    """Adds the flags that every example has; each example may set other defaults."""
    run = parser.add_argument_group("run")
    run.add_argument(
        "--out", type=Path, default=Path(out), help="directory of the run (%(default)s)"
    )
    run.add_argument("--resume", action="store_true", help="continue the run in --out")
    run.add_argument(
        "--seed", type=whole(0, most=2**63 - 1), default=0, help="of weights, data order, dropout"
    )
    run.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the computation (auto: float32 on a CPU, else bfloat16); parameters are float32",
    )
    run.add_argument("--workers", type=whole(0), help="processes that make batches (%(default)s)")
    run.add_argument("--evaluate-every", type=whole(1), metavar="N", help="epochs (%(default)s)")
    run.add_argument("--checkpoint-every", type=whole(1), metavar="N", help="epochs (%(default)s)")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument(
        "--optimizer",
        choices=tuple(optimizers.OPTIMIZERS),
        default=optimizers.DEFAULT,
        help=f"its learning rate and decay default to multiples of {optimizers.DEFAULT}'s"
        " (%(default)s)",
    )
    optimizer.add_argument("--epochs", type=whole(1), help="passes over the data (%(default)s)")
    optimizer.add_argument(
        "--batch-size", type=whole(1), help="images, or rows of text, a step (%(default)s)"
    )
    optimizer.add_argument(
        "--learning-rate", type=number(above=0), help="at the end of the warm-up (%(default)s)"
    )
    optimizer.add_argument("--warmup-epochs", type=number(least=0), help="(%(default)s)")
    optimizer.add_argument(
        "--weight-decay",
        type=number(least=0),
        help="of the kernels only, of muon's matrices; sgd has none (%(default)s)",
    )
    optimizer.add_argument(
        "--clip-norm",
        type=number(above=0),
        default=1.0,
        help="largest global norm of the gradients (%(default)s)",
    )


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags. With --resume, those not given are the run's own, and no other may differ.

    The defaults of learning rate and weight decay are those of the optimizer that is named. "auto"
    becomes the dtype of this device, so that a run keeps its dtype when resumed elsewhere.
    """
    entry = optimizers.OPTIMIZERS[parser.parse_args(argv).optimizer]
    parser.set_defaults(
        learning_rate=parser.get_default("learning_rate") * entry.rate,
        weight_decay=parser.get_default("weight_decay") * entry.decay,
    )
    args = parser.parse_args(argv)
    if args.resume:
        run = Run.load(args.out)
        if run.directory != args.out:
            raise ExampleError(
                f"a run is resumed from its newest checkpoint, but --out {args.out} is one of them;"
                f" pass --out {run.directory}, and remove the later checkpoints to go on from this one."
            )
        # Older runs, without the flag, used the default optimizer.
        saved = {"optimizer": optimizers.DEFAULT} | run.flags
        if others := sorted(saved.keys() - vars(args).keys()):
            raise ExampleError(
                f"a run is resumed by the program that started it, but {args.out} was started by"
                f" another example, with --{others[0].replace('_', '-')}; pass another --out."
            )
        parser.set_defaults(**saved)
        args = parser.parse_args(argv)
        for name, value in saved.items():
            if name not in _PLACE_FLAGS and getattr(args, name) != value:
                flag = "--" + name.replace("_", "-")
                raise ExampleError(
                    f"a run keeps its flags, but {args.out} was started with {flag} {value} and"
                    f" now got {flag} {getattr(args, name)}; leave {flag} out, or pass another"
                    " --out to start a new run."
                )
    if args.dtype == "auto":
        args.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return args


def saved_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags in the form that config.json keeps."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in _CALL_FLAGS
    }


def whole(least: int, *, most: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type: an integer of at least `least`, and at most `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            limits = f"from {least} up" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be an integer {limits}, but is {text!r}")
        return value

    return parse


def number(
    *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    """Returns an argparse type: a finite number with least <= value, above < value < below."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # The condition is written such that nan fails it too.
        if not (least <= value < below and value > above and math.isfinite(value)):
            limits = [
                *([f"from {least:g} up"] if least > -math.inf else []),
                *([f"above {above:g}"] if above > -math.inf else []),
                *([f"below {below:g}"] if below < math.inf else []),
            ]
            raise argparse.ArgumentTypeError(
                f"must be a finite number {' and '.join(limits)}, but is {text!r}"
            )
        return value

    return parse


def steps_per_epoch(args: argparse.Namespace, train_size: int, *, unit: str = "images") -> int:
    """Returns the number of full batches in an epoch of `train_size` images, or what else they are.

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
    try:
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: placement.model(build())))
        jax.eval_shape(lambda *arrays: build()(*arrays), *inputs)
    except ValueError as error:
        raise ExampleError(str(error)) from error
    # All operations are compiled as one program, since otherwise each would be compiled alone.
    return graphdef, placement.init(lambda: nnx.to_pure_dict(nnx.state(build())))


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
    batch = dict(row=np.zeros(rows.stop - rows.start, np.float32))  # Placements split a batch.
    take = placement.train_step(step)
    state, _ = take(state, batch, 0)
    jax.block_until_ready(state)
    begin = time.perf_counter()
    for number in range(_TIMED_STEPS):
        state, _ = take(state, batch, number)
    jax.block_until_ready(state)
    milliseconds = 1e3 * (time.perf_counter() - begin) / _TIMED_STEPS
    if not images_per_second:
        return f"a step of {args.optimizer} takes {milliseconds:.3g} ms"
    whole_step = 1e3 * args.batch_size / images_per_second
    return (
        f"{args.optimizer} takes {milliseconds:.3g} of the {whole_step:.3g} ms of a step,"
        f" {milliseconds / whole_step:.1%} (its step timed alone, {_TIMED_STEPS} times in a row)"
    )


# --- the run and its checkpoints ------------------------------------------------------------------


class Run:
    """A run's directory: its configuration, checkpoints and metrics.

    `Run.start` makes one, `Run.load` opens one that exists.
    """

    def __init__(self, directory: Path, config: dict[str, Any], *, step: int | None = None):
        self.directory = directory
        self.config = config
        self._step = step
        self._manager: ocp.CheckpointManager | None = None

    @classmethod
    def start(cls, directory: Path, config: dict[str, Any]) -> "Run":
        """Creates the directory; a directory that is not empty is left as it is.

        Raises:
          ExampleError: the directory is not empty or cannot be written, another run trains there, or
            processes see different directories.
        """
        run = cls(directory, config)
        with processes.together():
            if processes.is_first():
                run._make()
        with processes.together():
            if not (directory / "config.json").exists():
                raise ExampleError(
                    f"all processes must see one run directory, but process {jax.process_index()}"
                    f" has no {directory}; pass an --out on a disk that they share."
                )
        return run

    def _make(self) -> None:
        directory, config = self.directory, self.config
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.own()
            if any(directory.iterdir()):
                remedy = (
                    "pass --resume to continue it, or another --out"
                    if (directory / "config.json").exists()
                    else "pass another --out"
                )
                raise ExampleError(
                    f"a new run needs an empty directory, but {directory} holds"
                    f" {'a run' if 'resume' in remedy else 'other files'}; {remedy}."
                )
            _write_whole(directory / "config.json", json.dumps(config, indent=2) + "\n")
        except OSError as error:
            raise ExampleError(
                f"the run directory must be writable, but {directory} is not"
                f" ({error.strerror}); pass another --out."
            ) from error

    def own(self) -> None:
        """Locks the run: only this process may write to it until the process ends.

        Raises:
          ExampleError: another process has locked it.
        """
        if not processes.is_first():
            return
        try:
            _lock(self.directory.resolve())
        except BlockingIOError as error:
            raise ExampleError(
                f"one process trains a run, but another one trains in {self.directory} now; wait until"
                " it has ended, or pass another --out."
            ) from error

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Returns the run in `path`, which may also name one of its checkpoints, RUN/checkpoints/N.

        Raises:
          ExampleError: there is none.
        """
        directory, step = path, None
        if path.name.isdigit() and path.parent.name == "checkpoints":
            directory, step = path.parent.parent, int(path.name)
        with processes.together():
            try:
                config = json.loads((directory / "config.json").read_text())
            except (OSError, ValueError) as error:
                raise ExampleError(
                    f"a run's directory holds its config.json, but {directory / 'config.json'}"
                    f" cannot be read ({error}); pass the --out of a run that was started."
                ) from error
        return cls(directory, config, step=step)

    @property
    def flags(self) -> dict[str, Any]:
        """The flags that the run was started with.

        Raises:
          ExampleError: its config.json has none.
        """
        flags = self.config.get("flags") if isinstance(self.config, dict) else None
        if not isinstance(flags, dict):
            raise ExampleError(
                f"a run's config.json holds its flags, but {self.directory / 'config.json'} has none;"
                " pass the --out of a run, or put the file back."
            )
        return flags

    def check_program(self, program: str, flag: str) -> None:
        """Checks that `program` started this run, by a flag that all its runs have.

        Raises:
          ExampleError: another example did.
        """
        if flag not in self.flags:
            raise ExampleError(
                f"the checkpoint must be one of {program}, but {self.directory} belongs to another"
                f" example; pass the --out of a run of {program}."
            )

    @property
    def latest_step(self) -> int | None:
        """Returns the step of the checkpoint that `restore` reads, or None while there is none."""
        if self._step is not None:
            return self._step
        return self._checkpoints().latest_step()

    def save(self, step: int, state: State) -> None:
        """Writes a checkpoint in the background; the two newest are kept.

        Orbax copies the arrays before this returns, so that the next step may donate them, and
        renames the finished directory into place, so that a crash leaves no half checkpoint.
        """
        items = {
            name: ocp.args.StandardSave(jax.tree.map(_for_orbax, _flat(tree)))
            for name, tree in state.items()
        }
        try:
            self._checkpoints().save(step, args=ocp.args.Composite(**items))
        # A full disk ends in a ValueError of tensorstore, an OSError, or an Exception of orbax.
        except Exception as error:
            raise self._cannot_write(error) from error

    def restore(self, like: State) -> State:
        """Returns the newest checkpoint, in the structure, shapes and shardings of `like`.

        `like` may leave out names that the checkpoint holds: prediction needs only "params". Stacked
        layers of the checkpoint are split if `like` has them separately.

        Raises:
          ExampleError: there is no checkpoint, it cannot be read, or its arrays differ.
        """
        step = self.latest_step
        if step is None:
            raise ExampleError(
                f"a checkpoint is needed, but {self.directory} has none yet; let the training run"
                " until it has written one."
            )
        where = self.directory / "checkpoints" / str(step)
        flat = {name: _flat(tree) for name, tree in like.items()}
        try:
            sources, items = {}, {}
            for name, arrays in flat.items():
                sources[name], saved = _find_arrays(where / name, arrays)
                items[name] = ocp.args.StandardRestore(saved)
            restored = self._checkpoints().restore(step, args=ocp.args.Composite(**items))
        except ExampleError:
            raise
        # Orbax raises a plain Exception for a truncated file, and others for missing ones.
        except Exception as error:
            raise ExampleError(
                f"a checkpoint must be readable, but {where} is not"
                f" ({' '.join(str(error).split())[:200]}); remove it to use the one before it."
            ) from error
        if not all(jax.tree.leaves(jax.tree.map(_is_finite, restored.get("params", {})))):
            raise ExampleError(
                f"a model's parameters must be finite, but {where} holds others; remove it to use the"
                " one before it."
            )
        return {
            name: jax.tree.unflatten(
                jax.tree.structure(tree),
                [
                    jax.device_put(sources[name][k].read(restored[name]), like.sharding)
                    for k, like in flat[name].items()
                ],
            )
            for name, tree in like.items()
        }

    def record(self, step: int, **values: float) -> None:
        """Appends a line to metrics.jsonl."""
        if not processes.is_first():
            return
        try:
            with self._metrics.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise self._cannot_write(error) from error

    def records(self) -> list[dict[str, float]]:
        """Returns the lines of metrics.jsonl, without a line that a crash cut short.

        Raises:
          ExampleError: another line is no record.
        """
        if not self._metrics.exists():
            return []
        records = []
        lines = self._metrics.read_text(errors="replace").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                continue
            try:
                record = json.loads(line)
                if not isinstance(record["step"], int):
                    raise TypeError(record["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise ExampleError(
                    f"each line of {self._metrics} is a record with its step, but line {number} is"
                    f" {line.strip()[:60]!r}; remove the line."
                ) from error
            records.append(record)
        return records

    def forget_after(self, step: int) -> None:
        """Drops the records of steps that a resumed run is about to repeat."""
        kept = [json.dumps(r) + "\n" for r in self.records() if r["step"] <= step]
        _write_whole(self._metrics, "".join(kept))

    def finish(self, result: dict[str, Any]) -> None:
        """Writes metrics.json."""
        _write_whole(self.directory / "metrics.json", json.dumps(result, indent=2) + "\n")

    @contextlib.contextmanager
    def finished_writes(self) -> Iterator[None]:
        """Waits at the end until all checkpoints are on the disk, even if an error is raised."""
        try:
            yield
        finally:
            try:
                self._checkpoints().wait_until_finished()
            except Exception as error:
                raise self._cannot_write(error) from error

    @property
    def _metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    def _checkpoints(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            directory = (self.directory / "checkpoints").absolute()
            self._manager = ocp.CheckpointManager(directory, options=options)
        return self._manager

    def _cannot_write(self, error: Exception) -> ExampleError:
        reason = " ".join(str(error).split())[:200]
        return ExampleError(
            f"checkpoints must be writable, but {self.directory} is not ({reason}); make room there,"
            " then continue from the checkpoint before with --resume."
        )


def note_other_data(run: Run, fingerprint: str, *, unit: str = "images") -> None:
    """Prints a note when the data of a resumed run differ from those that it was started with."""
    if fingerprint != run.config["data"]:
        print(
            f"note: {unit} were added, removed or renamed since the run was started; it goes on"
            " with them, but not to the numbers of an uninterrupted run.",
            file=sys.stderr,
        )


def _flat(tree: Any) -> dict[str, Any]:
    """Returns a pytree as {"blocks.qkv.kernel": array}, so that a checkpoint names no Python classes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@functools.cache
def _lock(directory: Path) -> int | None:
    """Locks a directory until this process ends; the lock ends with a killed process.

    Raises:
      BlockingIOError: another process has locked it.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # Network file systems may have no locks; a run works without.
        os.close(descriptor)
        return None
    return descriptor


def _is_finite(array: jax.Array) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(jnp.isfinite(array).all())


def _for_orbax(array: jax.Array) -> jax.Array | np.ndarray:
    """Returns `array`, or a NumPy copy if each process has its own, of which orbax writes the first."""
    if jax.process_count() > 1 and array.is_fully_addressable:
        return np.array(array)
    return array


def _find_arrays(
    where: Path, arrays: dict[str, Any]
) -> tuple[dict[str, stacks.Source], dict[str, Any]]:
    """Returns the place in a checkpoint's tree of each of `arrays`, and the targets of its own arrays.

    Raises:
      ExampleError: it has other arrays.
    """
    is_optimizers = where.name == "opt_state"
    metadata = ocp.StandardCheckpointHandler().metadata(epath.Path(where.absolute())).tree
    saved = {name: (tuple(m.shape), np.dtype(m.dtype)) for name, m in metadata.items()}
    wanted = {name: (a.shape, np.dtype(a.dtype)) for name, a in arrays.items()}
    sources = stacks.sources(wanted, saved)
    likes = {}
    for name, source in sources.items():
        for stored in source.names:
            whole = source.index is None
            likes[stored] = (
                _for_orbax(arrays[name]) if whole else stacks.like(arrays[name], *saved[stored])
            )
    for name in [*wanted, *saved]:
        if name not in (sources if name in wanted else likes):
            received, needed = (
                "none" if array is None else f"{array[1]}{list(array[0])}"
                for array in (saved.get(name), wanted.get(name))
            )
            owner = "optimizer" if is_optimizers else "model"
            remedy = (
                "pass the --optimizer that the run was started with"
                if is_optimizers
                else "pass the checkpoint of this model"
            )
            raise ExampleError(
                f"a checkpoint must hold the arrays of the {owner}, but {where} has {received} for"
                f" {name!r} where the {owner} has {needed}; {remedy}, or start a new run with another"
                " --out."
            )
    return sources, likes


def _write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new one."""
    if not processes.is_first():
        return
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


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
    progress = tqdm(
        total=steps * args.batch_size,
        initial=start * args.batch_size,
        unit=f" {unit}",
        unit_scale=True,
        disable=not processes.is_first(),
        # A log file needs a line now and then, not ten a second.
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )
    clock = _Clock()
    pending: tuple[int, dict[str, jax.Array]] | None = None

    def settle() -> None:
        """Waits for the step that was dispatched last, and records it."""
        nonlocal pending
        if pending is None:
            return
        step, metrics = pending
        pending = None
        values = {name: float(value) for name, value in metrics.items()}
        if not math.isfinite(values["loss"]):
            raise ExampleError(
                f"the loss must stay finite, but is {values['loss']} at step {step}; start a new"
                f" run with a lower --learning-rate (checkpoints up to step {run.latest_step or 0}"
                " are good)."
            )
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
            # Reading the metrics of the previous step, rather than this one's, keeps the device busy.
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
                    # A held-out image cannot be read; the progress since the last checkpoint is saved.
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
    if len(losses):  # There are none if metrics.jsonl was removed and a finished run resumed.
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
