"""Fixtures for tests on every level: a real GPU, or a simulated Hopper where none is needed."""

import fcntl
import gc
import os
import shutil
from dataclasses import replace
from pathlib import Path

import hypothesis
import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfused import dispatch
from jaxfused.runtime import cuda_library, lowering, runner, table
from tests.support import mosaic_interpreter, uncut_stores
from tests.support.calls import have_library

# Threads of an interpreted kernel wait for one another inside callbacks of XLA's CPU client. The client
# has one thread per core unless NPROC asks for more. They deadlock if it has fewer threads than wait, or
# if it runs programs on its threads instead of the callers'.
os.environ["NPROC"] = "64"
jax.config.update("jax_cpu_enable_async_dispatch", False)

# Most objects are freed by their reference counts, and cycles may wait: collecting and tracing make
# millions of small objects.
gc.set_threshold(100_000, 20, 20)

# Draws are the same in every run, however slow: a commit fails or passes by what it changes.
hypothesis.settings.register_profile(
    "same_draws",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same_draws")

# Without a GPU, `make test-all` compiles the library quickly into a folder of its own.
QUICK_LIBRARY = Path(__file__).parents[1] / "build/ffi-quick/libjaxfused.so"
if QUICK_LIBRARY.exists() and (
    not cuda_library.PATH.exists()
    or cuda_library.PATH.stat().st_mtime < QUICK_LIBRARY.stat().st_mtime
):
    cuda_library.PATH = QUICK_LIBRARY

HOPPER = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=4)
"""An H200 with few SMs, so that small inputs too give each SM several tiles."""


@pytest.fixture(scope="session", autouse=True)
def stores_are_cut():
    with uncut_stores.refused():
        yield


@pytest.fixture(autouse=True)
def stages_choose_anew():
    """Tests replace limits, libraries and rules that a stage asks while it is traced."""
    yield
    runner.forget()


OF_LIBRARY = {"library_path", "loadable", "built_library"}
"""Fixtures of tests that need the CUDA library, which takes minutes to compile."""


@pytest.fixture
def built_library():
    """Skips the test unless the CUDA library is built, which `why_unavailable` checks too."""
    if reason := cuda_library.why_unavailable():
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Starts long tests first, so that at the end no process waits for another's last test.

    `make test-all` runs the tests of the CUDA library itself, which it compiles.
    """
    for item in items:
        if OF_LIBRARY & set(item.fixturenames):
            item.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


_crashed: set[str] = set()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_handlecrashitem(crashitem, report, sched):
    """Repeats a test whose process died or hung, where only interpreters run.

    On rare occasions JAX's interpreter of GPU kernels deadlocks, or its compiler crashes. The summary
    counts such tests as "rerun".
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu" and crashitem not in _crashed:
        _crashed.add(crashitem)
        report.outcome = "rerun"
        sched.mark_test_pending(crashitem)


LIBRARY_ASKED = pytest.StashKey[int]()
"""How often a module asked for the CUDA library while it was imported."""


def pytest_collection_finish(session):
    """Exempts imported objects from garbage collection, because they live until the end."""
    gc.collect()
    gc.freeze()
    session.config.stash[LIBRARY_ASKED] = cuda_library.why_unavailable.cache_info().misses


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
    """Hides tables that were measured on this machine, so that they change no test."""
    nowhere = Path(__file__).parent / "no-such-folder"
    monkeypatch.setattr(table, "user_path", lambda device: nowhere / table.file_name(device))


# Muon learns as much in a third of AdamW's steps.
DIGITS_FLAGS = ("--optimizer", "muon", "--epochs", "3", "--warmup-epochs", "1")
DIGITS_FLAGS += ("--held-out", "0.4", "--checkpoint-every", "1")


@pytest.fixture(scope="session")
def made_once(request, tmp_path_factory):
    """Returns a function with which one of pytest's processes makes a directory for all of them."""
    common = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        # A worker of pytest-xdist has its own folder within that of the run.
        common = common.parent

    def directory(name, make):
        out = common / name
        with open(common / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process dies
            if not (common / f"{name}.made").exists():
                shutil.rmtree(out, ignore_errors=True)
                make(out)
                (common / f"{name}.made").touch()
        return out

    return directory


@pytest.fixture(scope="session")
def digits_run(made_once):
    """Returns the directory of one short training of the ViT, which all tests share."""

    def make(out):
        # Imported here, because the tests of operators need neither checkpoints nor pictures.
        from examples.vit import train

        train.main([*DIGITS_FLAGS, "--out", str(out)])

    return made_once("digits", make)


@pytest.fixture
def hopper(monkeypatch):
    """Makes operators assume a Hopper GPU, so that they can be lowered without one."""
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: HOPPER)
    monkeypatch.setattr(lowering, "KERNELS_RUN_EVERYWHERE", True)
    return HOPPER


@pytest.fixture
def with_library(hopper, monkeypatch):
    """Pretends that the CUDA library is loaded, for lowering; test_ffi.py tests the library itself."""
    have_library(monkeypatch)
    return hopper


@pytest.fixture
def without_library(monkeypatch):
    """Hides the CUDA library, which this checkout may have built."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: "the CUDA library is hidden")


EMULATED = {
    "75": replace(HOPPER, name="Tesla T4", compute_capability=(7, 5)),
    "80": replace(HOPPER, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0)),
    "89": replace(HOPPER, name="NVIDIA L4", compute_capability=(8, 9)),
    "90": HOPPER,
}


@pytest.fixture
def emulated_gpu(request, monkeypatch):
    """Makes operators assume a GPU whose CUDA C kernels run on the CPU: see tests/cuda_emulator."""
    # Imported here, because only this fixture needs the compiler.
    from tests.cuda_emulator import build

    architecture = request.config.getoption("--emulated-cuda")
    device = EMULATED[architecture]
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: device)
    monkeypatch.setattr(lowering, "KERNELS_RUN_EVERYWHERE", True)
    monkeypatch.setattr(cuda_library, "PATH", build.library(architecture))
    monkeypatch.setattr(cuda_library, "PLATFORM", "cpu")
    return device


@pytest.fixture
def interpreted_hopper(hopper, monkeypatch):
    """Like `hopper`, and runs Pallas kernels in Mosaic's interpreter on the CPU."""
    mosaic_interpreter.prepare(monkeypatch)
    with plgpu.force_gpu_interpret_mode():
        yield hopper


@pytest.fixture
def race_detector(hopper, capfd, monkeypatch):
    """Like `interpreted_hopper`, and fails the test if threads of a kernel race."""
    mosaic_interpreter.prepare(monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield hopper
    # The interpreter has no public report of races other than its standard output.
    assert "RACE DETECTED" not in capfd.readouterr().out
