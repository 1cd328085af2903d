"""examples/multi_gpu: many devices, or several processes, train to the numbers of one device.

The devices must exist before JAX starts, so this file runs itself in a process of its own.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from examples.errors import ExampleError, Stopped
from examples.lm import train as lm_train
from examples.multi_gpu import jit_lm, jit_vit, launch, mesh, pmap_vit
from examples.vit import data as vit_data
from examples.vit import train
from tests.support.grids import parametrize
from tests.support.run_metrics import assert_same_numbers, metrics

DEVICES = 4
on_four_devices = pytest.mark.skipif(
    jax.device_count() != DEVICES or jax.default_backend() != "cpu",
    reason="runs in the process that test_on_four_devices starts",
)
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
TWO_STEPS = ["--epochs", "1", "--warmup-epochs", "0", "--batch-size", "128", "--held-out", "0.8"]
TWO_STEPS += ["--unroll", "1"]


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() == DEVICES, reason="this is that process")
@parametrize("selection", ["not exhaustive", "exhaustive"], quick=())
def test_on_four_devices(selection):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        # Tests without the mark need one device, and run in the outer process only.
        [*command, "-m", f"skipif and {selection}", __file__],
        env=ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(DEVICES)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


# --- the numbers of one device --------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Returns the metrics of two steps and an evaluation on one device."""
    out = tmp_path_factory.mktemp("runs") / "one"
    train.main([*TWO_STEPS, "--out", str(out)])
    return metrics(out)


@on_four_devices
def test_a_mesh_of_data_and_tensor_with_fsdp_resumes_on_another(one_device, tmp_path):
    """The checkpoint after the first step does not depend on the devices that wrote it."""
    flags = [*TWO_STEPS, "--out", str(tmp_path)]

    def stop(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return make_batch(*args)

    make_batch = vit_data._DigitsTrain.__call__
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match="Step 1 of 2 is save"):
        patch.setattr(vit_data._DigitsTrain, "__call__", stop)
        jit_vit.main([*flags, "--tensor", "2", "--fsdp"])
    jit_vit.main(["--resume", "--out", str(tmp_path), "--tensor", "4", "--no-fsdp"])
    assert_same_numbers(tmp_path, one_device)


@pytest.mark.exhaustive
@on_four_devices
def test_a_mesh_splits_blocks_that_no_loop_runs(tmp_path):
    """Unrolled blocks have separate parameters, where the loop of the other tests has a stack."""
    flags = [*TWO_STEPS, "--unroll", "4"]
    train.main([*flags, "--out", str(tmp_path / "one")])
    jit_vit.main([*flags, "--out", str(tmp_path / "mesh"), "--tensor", "2", "--fsdp"])
    assert_same_numbers(tmp_path / "mesh", metrics(tmp_path / "one"))


@pytest.mark.exhaustive
@on_four_devices
def test_a_language_model_on_a_mesh_has_the_numbers_of_one_device(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(f"{i} times two is {2 * i}, as all know.\n" * 20)
    flags = ["--data", str(texts), "--model", "lm-byte", "--length", "32", "--epochs", "1"]
    flags += ["--warmup-epochs", "0", "--batch-size", "8", "--epoch-rows", "16", "--samples", "0"]
    flags += ["--held-out", "0.3"]
    lm_train.main([*flags, "--out", str(tmp_path / "one")])
    jit_lm.main([*flags, "--out", str(tmp_path / "mesh"), "--tensor", "2", "--fsdp"])
    assert_same_numbers(tmp_path / "mesh", metrics(tmp_path / "one"))


# --- two processes --------------------------------------------------------------------------------


def started(*command):
    """Starts `command` as process 0 and process 1 of a run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, *command, "--coordinator", address, "--processes", "2"]
    return [
        subprocess.Popen(
            [*command, "--process-id", str(i)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


def two_processes(*command):
    """Runs `command` as process 0 and process 1; returns their exit codes and output."""
    processes = started(*command)
    try:
        printed = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed


# The test above covers the mesh of jit_vit in one process.
@on_four_devices
@parametrize(
    "command",
    (
        ["-m", "examples.multi_gpu.pmap_vit", "--cpu-devices", "2"],
        ["-m", "examples.multi_gpu.jit_vit", "--cpu-devices", "2", "--tensor", "2", "--fsdp"],
    ),
    quick=(0,),
    ids=lambda command: command[1].rpartition(".")[2],
)
def test_two_processes_find_each_other(one_device, tmp_path, command):
    codes, printed = two_processes(*command, *TWO_STEPS, "--out", str(tmp_path / "run"))
    assert codes == [0, 0], printed
    assert_same_numbers(tmp_path / "run", one_device)
    assert "held-out accuracy" in printed[0] and "held-out accuracy" not in printed[1]
    # XLA warns of this if it can only partition by gathering everything.
    assert "rematerialization" not in printed[0]


IN_STEP = """
import argparse, sys
import jax
from examples import processes
from examples.errors import ExampleError, Stopped
from examples.multi_gpu import launch

parser = argparse.ArgumentParser()
launch.add_flags(parser)
launch.start(parser.parse_args())
other = not processes.is_first()

def report(name, batches, stopped=lambda: False):
    seen = []
    try:
        for batch in processes.in_step(iter(batches), stopped):
            seen.append(batch)
        print(name, seen, "all")
    except (ExampleError, Stopped) as reason:
        print(name, seen, type(reason).__name__, reason)
    return seen

def broken():
    yield from range(3)
    if other:
        raise ExampleError("x.png is not readable.")
    yield from range(3, 6)

asked = iter(range(100))
report("whole", range(4))
report("broken", broken())
report("stopped", range(9), stopped=lambda: other and next(asked) >= 2)
try:
    with processes.together():
        if processes.is_first():
            raise ExampleError("the run exists.")
except ExampleError as error:
    print("together", error)
"""


@on_four_devices
def test_two_processes_stop_before_the_same_step():
    codes, printed = two_processes("-c", IN_STEP, "--cpu-devices", "1")
    assert codes == [0, 0], printed
    said = [re.findall(r"^(?:whole|broken|stopped|together) .*", text, re.M) for text in printed]
    other = "all processes must be able to go on, but process {} is not; see what it printed."
    assert said == [
        [
            "whole [0, 1, 2, 3] all",
            f"broken [0, 1, 2] ExampleError {other.format(1)}",
            "stopped [0, 1] Stopped Process 1 was stopped.",
            "together the run exists.",
        ],
        [
            "whole [0, 1, 2, 3] all",
            "broken [0, 1, 2] ExampleError x.png is not readable.",
            "stopped [0, 1] Stopped Stopped.",
            f"together {other.format(0)}",
        ],
    ]


LONG = [
    "--epochs",
    "400",
    "--checkpoint-every",
    "1",
    "--evaluate-every",
    "400",
    "--warmup-epochs",
    "0",
]
LONG += ["--batch-size", "128", "--held-out", "0.8", "--unroll", "1"]


def complete_checkpoints(run):
    names = [path.name for path in (run / "checkpoints").glob("*")]
    return [int(name) for name in names if name.isdigit()]


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() == DEVICES, reason="starts processes of its own")
@pytest.mark.parametrize("victim", (0, 1))
def test_when_a_process_is_killed_the_other_says_so_and_one_goes_on(tmp_path, victim):
    out = tmp_path / "run"
    command = ["-m", "examples.vit.train", *LONG, "--out", str(out)]
    processes = started(*command, "--cpu-devices", "1", "--mesh", "fsdp=2")
    try:
        deadline = time.monotonic() + 900
        while not complete_checkpoints(out) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes[victim].kill()
        # The sentence comes within a minute; a busy machine may take longer to print it.
        printed = processes[1 - victim].communicate(timeout=900)[0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1 - victim].returncode not in (0, None), printed
    assert launch.LOST in printed, printed
    step = max(complete_checkpoints(out))
    # Steps after the last checkpoint are recorded too, and the process that goes on records them again.
    recorded = len(metrics(out))
    # One process goes on, and stops at once when it is told to.
    one = [sys.executable, "-m", "examples.vit.train", "--out", str(out), "--resume"]
    done = subprocess.Popen(
        [*one, "--mesh", "data=1", "--cpu-devices", "1"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while len(metrics(out)) <= recorded and time.monotonic() < deadline + 900:
            time.sleep(0.1)
        done.send_signal(signal.SIGINT)
        said = done.communicate(timeout=900)[1]
    finally:
        done.kill()
    assert done.returncode == 130 and "is saved; continue with" in said, said
    steps = [record["step"] for record in metrics(out) if "loss" in record]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > step


def test_a_process_makes_its_part_of_a_batch_only(tmp_path):
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(8):
            image = random.integers(0, 256, (9, 9, 3), np.uint8)
            Image.fromarray(image).save(tmp_path / name / f"{i}.png")
    options = dict(batch_size=8, seed=0, image_size=8, held_out=0.5, least_crop=0.5, flip=True)
    folder = vit_data.folder(tmp_path, **options)
    whole = folder.train_batch(3)
    held_out = folder.held_out(0)
    part = vit_data.folder(tmp_path, **options, rows=slice(2, 5))
    read = []
    with pytest.MonkeyPatch.context() as patch:
        read_image = vit_data.read_image
        patch.setattr(vit_data, "read_image", lambda *a: read.append(a) or read_image(*a))
        mine = part.train_batch(3)
        mine_held_out = part.held_out(0)
    assert len(read) == 3 + 3
    np.testing.assert_array_equal(mine["image"], whole["image"][2:5])
    np.testing.assert_array_equal(mine["label"], whole["label"][2:5])
    np.testing.assert_array_equal(mine_held_out["image"], held_out["image"][2:5])
    options = dict(batch_size=8, seed=0, image_size=8, held_out=0.5)
    digits = vit_data.digits(**options).train_batch(3)
    mine = vit_data.digits(**options, rows=slice(2, 5)).train_batch(3)
    np.testing.assert_array_equal(mine["image"], digits["image"][2:5])
    np.testing.assert_array_equal(mine["label"], digits["label"][2:5])


# --- what is where --------------------------------------------------------------------------------


@on_four_devices
def test_fsdp_keeps_a_quarter_of_the_state_on_each_device_from_step_to_step():
    place = mesh.OnMesh(dict(fsdp=4))
    kernel = jnp.arange(48 * 96.0).reshape(48, 96)
    make = lambda: dict(up=dict(kernel=kernel))  # noqa: E731
    state = dict(params=place.parameters(make), opt_state=place.init(lambda: jnp.int32(0)))
    step = place.train_step(lambda state, batch, step: (state, dict(loss=batch["image"].sum())))
    after, metrics = step(state, dict(image=np.ones((8, 2), np.float32)), 0)
    for params in (place.parameters(make), after["params"]):
        matrix = params["up"]["kernel"]
        assert [shard.data.shape for shard in matrix.addressable_shards] == [(48, 24)] * 4
        np.testing.assert_array_equal(matrix, kernel)
    assert metrics["loss"] == 16


# --- errors ---------------------------------------------------------------------------------------


@on_four_devices
@pytest.mark.parametrize(
    ("module", "flags", "message"),
    (
        (
            jit_vit,
            ["--tensor", "3"],
            "--mesh is data=-1,tensor=3 and there are 4; pass sizes whose",
        ),
        (jit_vit, ["--tensor", "4", "--model", "vit-s16"], "4 devices and the model has 6 heads"),
        (jit_vit, ["--batch-size", "30"], "30 and 4 data x 1 fsdp devices share it; .* of 4"),
        (
            train,
            ["--mesh", "context=2", "--pool", "token"],
            "17 tokens for context=2, in 2 parts; pass another",
        ),
        (pmap_vit, ["--batch-size", "30"], "is 30 and there are 4 devices; pass a multiple of 4"),
        (pmap_vit, ["--process-id", "0"], "but got None, None, 0; pass all three"),
    ),
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path, module, flags, message):
    with pytest.raises(ExampleError, match=message):
        module.main([*flags, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def parse(*argv):
    parser = argparse.ArgumentParser()
    launch.add_flags(parser)
    return parser.parse_args(argv)


def test_processes_that_cannot_meet_say_so(monkeypatch, capsys):
    with socket.create_server(("", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ExampleError, match=r"is not free .*; pass another port"):
            launch.start(parse("--coordinator", taken, "--processes", "2", "--process-id", "0"))
    monkeypatch.setattr(launch, "_SECONDS", 0)
    with pytest.raises(ExampleError, match=rf"nothing does at {taken} .*; start process 0"):
        launch.start(parse("--coordinator", taken, "--processes", "2", "--process-id", "1"))
    with pytest.raises(ExampleError, match=f"but got {taken}, 2, 2; pass all three"):
        launch.start(parse("--coordinator", taken, "--processes", "2", "--process-id", "2"))
    with pytest.raises(SystemExit):
        parse("--coordinator", "localhost")
    assert "--coordinator: must be HOST:PORT, but is 'localhost'" in capsys.readouterr().err
