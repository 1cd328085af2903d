"""Faults of the environment in the examples: each ends in one line, and no saved data is lost."""

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from examples import training
from examples.errors import ExampleError
from examples.images import read_image, read_labels
from examples.runs import Run
from examples.unet.image_files import open_image, write_rows
from examples.unet.quantize import main as quantize_unet
from examples.vit.predict import main as predict_vit
from examples.vit.train import main as train_vit
from tests.examples import test_example_training
from tests.examples.test_example_training import donating_add, fit, initial

VIT = dict(model="vit-digits", image_size=8, dtype="float32")


@contextlib.contextmanager
def full_disk():
    """Limits the size of files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_at(path, **config):
    return Run.start(path, dict(flags=VIT, classes=["a"], channels=1, data="") | config)


# --- one run, one owner ---------------------------------------------------------------------------


def test_a_second_process_is_told_that_the_run_has_an_owner(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    program = f"""
import time
from pathlib import Path
from examples.runs import Run
Run.load(Path({str(tmp_path)!r})).own()
print("owned", flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        assert owner.stdout.readline() == "owned\n"
        run = Run.load(tmp_path)
        with pytest.raises(ExampleError, match=r"another one trains in .* now; wait"):
            fit(run)
        assert not run.records() and run.latest_step is None
    finally:
        owner.kill()
        owner.wait()
    # A lock ends with its process.
    assert fit(Run.load(tmp_path))[1]["steps"] == 12


def test_a_file_system_without_locks_forbids_no_training(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    Run.start(tmp_path, {})
    assert fit(Run.load(tmp_path))[1]["steps"] == 12


def test_a_run_is_not_resumed_by_one_of_its_checkpoints(tmp_path):
    run_at(tmp_path)
    with pytest.raises(ExampleError, match=r"--out .*checkpoints/8 is one of them; pass --out"):
        train_vit(["--out", str(tmp_path / "checkpoints/8"), "--resume"])


def test_runs_of_other_examples_are_refused_by_name(tmp_path):
    unet = Run.start(tmp_path / "unet", dict(flags=dict(levels=2), channels=1, data=""))
    assert unet.flags == {"levels": 2}
    with pytest.raises(ExampleError, match=r"one of examples\.vit\.train, but .* another example"):
        predict_vit([str(tmp_path / "unet"), "digit.png"])
    with pytest.raises(ExampleError, match="started by another example, with --levels"):
        train_vit(["--out", str(tmp_path / "unet"), "--resume"])
    run_at(tmp_path / "vit")
    with pytest.raises(ExampleError, match=r"one of examples\.unet\.train"):
        quantize_unet([str(tmp_path / "vit")])


# --- what is saved --------------------------------------------------------------------------------


def test_an_unreadable_held_out_image_loses_no_step(tmp_path, monkeypatch):
    def evaluate(state):
        raise ExampleError("every image must be readable, but it is not")

    monkeypatch.setattr(test_example_training, "evaluate", evaluate)
    run = Run.start(tmp_path, {})
    with pytest.raises(ExampleError, match=r"readable, but it is not Step 4 of 12 is saved"):
        fit(run, checkpoint_every=3)
    assert Run.load(tmp_path).latest_step == 4


def test_a_disk_without_room_is_named_and_the_run_goes_on_later(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    state = dict(params={"total": jnp.asarray(noise)}, opt_state=jnp.int32(0))
    monkeypatch.setattr(test_example_training, "initial", lambda: jax.tree.map(jnp.copy, state))
    run = Run.start(tmp_path, {})

    def fills(state, batch, step):
        if step == 5:
            run._checkpoints().wait_until_finished()
            stack.enter_context(full_disk())
        return donating_add(state, batch, step)

    sentence = r"checkpoints must be writable, .*make room"
    with contextlib.ExitStack() as stack, pytest.raises(ExampleError, match=sentence):
        fit(run, step=fills)
    resumed = Run.load(tmp_path)
    assert resumed.latest_step == 4
    assert fit(resumed)[1]["steps"] == 12 and resumed.latest_step == 12


def test_a_record_without_room_is_named(tmp_path, monkeypatch):
    run = Run.start(tmp_path, {})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "open", full)
    with pytest.raises(ExampleError, match=r"No space left .*make room"):
        run.record(1, loss=1.0)


@pytest.mark.parametrize("fault", ["cut", "empty metadata", "not finite"])
def test_a_checkpoint_that_is_damaged_is_refused_with_the_remedy(tmp_path, fault):
    run = Run.start(tmp_path, {})
    fit(run)
    newest = tmp_path / "checkpoints/12"
    if fault == "cut":
        data = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:100])
    elif fault == "empty metadata":
        (newest / "params/_METADATA").write_text("[]")
    else:
        state = initial()
        state["params"]["total"] = state["params"]["total"].at[0, 0].set(jnp.nan)
        run.save(13, state)
        with run.finished_writes():
            pass
    with pytest.raises(ExampleError, match="remove it to use the one before it"):
        Run.load(tmp_path).restore(initial())


@pytest.mark.parametrize("line", ["{", '{"loss": 1.0}', '{"step": "4"}', "[]"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    run = Run.start(tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n' + line + "\n")
    with pytest.raises(ExampleError, match=r"metrics\.jsonl is a record .* line 2 is"):
        run.records()


def test_a_curve_without_records_is_drawn(tmp_path):
    training.save_curve(tmp_path / "curve.png", [], metric="accuracy", label="accuracy")
    assert Image.open(tmp_path / "curve.png").size


@pytest.mark.parametrize("config", ["{}", "[]", '{"flags": 3}'])
def test_a_config_without_flags_is_named(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ExampleError, match=r"holds its flags, but .*config\.json has none"):
        predict_vit([str(tmp_path), "digit.png"])


# --- images ---------------------------------------------------------------------------------------


def test_an_array_without_bytes_is_named(tmp_path):
    (tmp_path / "empty.npy").write_bytes(b"")
    with pytest.raises(ExampleError, match="must be readable"):
        open_image(tmp_path / "empty.npy", 1)


def test_black_ink_is_no_foreground(tmp_path):
    ink = np.zeros((2, 2, 4), np.uint8)
    ink[0, :, 3] = 255
    Image.fromarray(ink, "CMYK").save(tmp_path / "mask.tif")
    assert (read_labels(tmp_path / "mask.tif") > 0).tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("error", [NotImplementedError("a format"), MemoryError("much")])
def test_whatever_pillow_raises_names_the_file(tmp_path, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(ExampleError, match=r"but .*picture\.png is not"):
        read_image(tmp_path / "picture.png", "L")


def test_the_sentence_of_an_output_is_not_hidden_by_its_cleaning_up(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    with pytest.raises(ExampleError, match="the output must be writable"):
        write_rows(tmp_path / "mask.npy", (1, 1), [np.zeros((1, 1), np.uint8)])


# --- the command ----------------------------------------------------------------------------------


def command(body, redirect=""):
    program = f"""
import sys
from examples.errors import run_command
def main():
    {body}
run_command(main)
"""
    return subprocess.run(
        [
            "bash",
            "-c",
            f'"$0" -c "$1" {redirect}; exit ${{PIPESTATUS[0]}}',
            sys.executable,
            program,
        ],
        capture_output=True,
        text=True,
    )


def test_streams_that_are_closed_or_full():
    many = "for i in range(100000): print(i)"
    assert command(many, "| head -1").returncode == 0
    assert command("print('progress', file=sys.stderr)", "2>&-").returncode == 0
    full = command(many, "> /dev/full")
    assert full.returncode == 2 and "No space left" in full.stderr
    assert "Traceback" not in full.stderr


def test_a_seed_beyond_64_bits_is_refused(capsys):
    with pytest.raises(SystemExit):
        train_vit(["--seed", str(2**63)])
    assert "must be an integer from 0 to" in capsys.readouterr().err


def test_packages_that_are_missing_are_named():
    program = "import sys; sys.modules['tqdm'] = None; import examples"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1 and "pip install 'jaxfused[examples]'" in result.stderr
    assert "Traceback" not in result.stderr
