"""Fixtures for tests on every level: a real GPU, or a simulated Hopper where none is needed."""

import fcntl
import gc
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfused import dispatch
from jaxfused.runtime import cuda_library, platforms, table
from tests.support import mosaic_interpreter, uncut_stores

# The threads of an interpreted kernel wait for one another inside callbacks of XLA's CPU client. Where
# the client has fewer threads than wait, one a core unless NPROC says more, or runs programs on them
# instead of on the callers', they wait for ever.
os.environ["NPROC"] = "64"
jax.config.update("jax_cpu_enable_async_dispatch", False)

# Where there is no GPU, `make test-all` compiles the library quickly, and it is not the checkout's.
QUICK_LIBRARY = Path(__file__).parents[1] / "build/ffi-quick/libjaxfused.so"
if QUICK_LIBRARY.exists() and (
    not cuda_library.PATH.exists()
    or cuda_library.PATH.stat().st_mtime < QUICK_LIBRARY.stat().st_mtime
):
    cuda_library.PATH = QUICK_LIBRARY

HOPPER = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=4)
"""An H200 with few multiprocessors, so that small inputs too give each of them several tiles."""


@pytest.fixture(scope="session", autouse=True)
def stores_are_cut():
    with uncut_stores.refused():
        yield


OF_LIBRARY = {"library_path", "loadable", "built_library"}
"""Fixtures of tests that need the CUDA library, which takes minutes to compile."""


@pytest.fixture
def built_library():
    """The test needs the CUDA library, if only to be told that its kernels can be taken."""
    if reason := cuda_library.why_unavailable():
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that take long start first, so that at the end no process waits for another's last test.

    Those of the CUDA library itself are left to `make test-all`, which compiles it.
    """
    for item in items:
        if OF_LIBRARY & set(item.fixturenames):
            item.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


_crashed: set[str] = set()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_handlecrashitem(crashitem, report, sched):
    """A test whose process died, or waited for ever, gets a second try where only interpreters run.

    On rare occasions JAX's interpreter of GPU kernels waits for itself, or its compiler crashes.
    The summary counts such tests as "rerun".
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu" and crashitem not in _crashed:
        _crashed.add(crashitem)
        report.outcome = "rerun"
        sched.mark_test_pending(crashitem)


def pytest_collection_finish():
    """Objects imported by now live on, so the garbage collector need not visit them each time.

    What tests leave behind is freed as it is; cycles may wait. Tracing makes millions of small objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_addoption(parser):
    parser.addoption(
        "--emulated-cuda",
        nargs="?",
        const="90",
        metavar="ARCHITECTURE",
        help="run the CUDA C kernels on the CPU, in the emulator, as on a GPU of this architecture",
    )


@pytest.fixture(autouse=True)
def _gpu_where_marked(request):
    if request.config.getoption("--emulated-cuda"):
        request.getfixturevalue("emulated_gpu")
    elif request.node.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.fail("this test needs an NVIDIA GPU and a JAX that sees it")


@pytest.fixture(autouse=True)
def _nothing_measured_here(monkeypatch):
    """What whoever runs the tests has measured on this machine changes no test."""
    nowhere = Path(__file__).parent / "no-such-folder"
    monkeypatch.setattr(table, "user_path", lambda device: nowhere / table.file_name(device))


@pytest.fixture(autouse=True)
def _kernels_need_not_be_named(monkeypatch):
    """Tests take operators to their kernels before a GPU has measured those."""
    monkeypatch.setattr(dispatch, "UNMEASURED", frozenset())


# Muon takes a third of the steps that AdamW takes to learn as much.
DIGITS_FLAGS = ("--optimizer", "muon", "--epochs", "3", "--warmup-epochs", "1")
DIGITS_FLAGS += ("--held-out", "0.4", "--checkpoint-every", "1")


@pytest.fixture(scope="session")
def made_once(request, tmp_path_factory):
    """Returns a function that has one of pytest's processes make a directory, which all of them read."""
    common = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        # A worker of pytest-xdist has a folder of its own in that of the run.
        common = common.parent

    def directory(name, make):
        out = common / name
        with open(common / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Released as the file is closed, or its process dies.
            if not (common / f"{name}.made").exists():
                shutil.rmtree(out, ignore_errors=True)
                make(out)
                (common / f"{name}.made").touch()
        return out

    return directory


@pytest.fixture(scope="session")
def digits_run(made_once):
    """The directory of one short training of the ViT, shared by all tests that read it."""

    def make(out):
        # Imported here: the tests of operators need no checkpoints and no pictures.
        from examples.vit import train

        train.main([*DIGITS_FLAGS, "--out", str(out)])

    return made_once("digits", make)


@pytest.fixture
def hopper(monkeypatch):
    """Operators assume a Hopper GPU, so that they can be lowered for one without having it."""
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: HOPPER)
    monkeypatch.setattr(platforms, "KERNELS_RUN_EVERYWHERE", True)
    return HOPPER


EMULATED = {
    "75": replace(HOPPER, name="Tesla T4", compute_capability=(7, 5)),
    "80": replace(HOPPER, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0)),
    "89": replace(HOPPER, name="NVIDIA L4", compute_capability=(8, 9)),
    "90": HOPPER,
}


@pytest.fixture
def emulated_gpu(request, monkeypatch):
    """Operators assume an emulated GPU, whose CUDA C kernels run on the CPU: see tests/cuda_emulator."""
    # Imported here: nothing else needs what compiles it.
    from tests.cuda_emulator import build

    architecture = request.config.getoption("--emulated-cuda")
    device = EMULATED[architecture]
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: device)
    monkeypatch.setattr(platforms, "KERNELS_RUN_EVERYWHERE", True)
    monkeypatch.setattr(cuda_library, "PATH", build.library(architecture))
    monkeypatch.setattr(cuda_library, "PLATFORM", "cpu")
    return device


@pytest.fixture
def interpreted_hopper(hopper, monkeypatch):
    """Like `hopper`, and Pallas kernels run in Mosaic's interpreter on the CPU."""
    mosaic_interpreter.prepare(monkeypatch)
    with plgpu.force_gpu_interpret_mode():
        yield hopper


@pytest.fixture
def race_detector(hopper, capfd, monkeypatch):
    """Like `interpreted_hopper`, and the test fails if threads of a kernel race."""
    mosaic_interpreter.prepare(monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield hopper
    # The interpreter reports races on its standard output and nowhere else that is public.
    assert "RACE DETECTED" not in capfd.readouterr().out
