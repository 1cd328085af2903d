"""A run's directory: its configuration, checkpoints and metrics.

config.json      the flags and facts about the data (classes, ...); written once
checkpoints/N/   the state after N steps, written by orbax, complete or absent
metrics.jsonl    one line a step, and one for each evaluation
metrics.json     the result, written at the end
*.png            pictures
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from examples import processes, stacks
from examples.errors import ExampleError, Stopped

State = dict[str, Any]
"""Content of a checkpoint: a pytree of arrays for each name ("params", "opt_state", ...)."""


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
        """Creates the directory and writes config.json.

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
        # A full disk shows as a ValueError of tensorstore, an OSError, or an Exception of orbax.
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
        """Waits at the end until all checkpoints are written, even if an expected error is raised.

        An unexpected error in one of several processes is raised at once: a write needs all of them.
        """
        try:
            yield
        except Exception as error:
            if jax.process_count() == 1 or isinstance(error, ExampleError | Stopped):
                self._wait()
            raise
        except BaseException:
            self._wait()
            raise
        self._wait()

    def _wait(self) -> None:
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
    """Returns a pytree as {"blocks.qkv.kernel": array}: a checkpoint then names no Python classes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@functools.cache
def _lock(directory: Path) -> int | None:
    """Locks a directory until this process ends, even if it is killed; None where there are no locks.

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
    except OSError:  # Some network file systems have no locks; a run works without.
        os.close(descriptor)
        return None
    return descriptor


def _is_finite(array: jax.Array) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(jnp.isfinite(array).all())


def _for_orbax(array: jax.Array) -> jax.Array | np.ndarray:
    """Returns `array`, or a NumPy copy if every process has all of it: orbax then writes one of them."""
    if jax.process_count() > 1 and array.is_fully_addressable:
        return np.array(array)
    return array


def _find_arrays(
    where: Path, arrays: dict[str, Any]
) -> tuple[dict[str, stacks.Source], dict[str, Any]]:
    """Returns where a checkpoint stores each of `arrays`, and the restore targets of its stored arrays.

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
