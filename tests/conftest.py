"""Fixtures of every level: a GPU where one is needed, a simulated Hopper where none is."""

import gc
import os

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfused import dispatch
from tests import mosaic_interpreter

# Threads of XLA's CPU client, one a core unless this says more. Two interpreted kernels of a program
# run at a time, and each waits on threads of its own for further ones: with two cores, for ever.
os.environ.setdefault("NPROC", "16")

HOPPER = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=4)
"""An H200 with few multiprocessors, so that small inputs too give each of them several tiles."""


def pytest_collection_modifyitems(items):
    """What takes long starts first, so that at the end no process waits for the other's last test."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not visit it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _gpu_where_marked(request):
    if request.node.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.fail("this test needs an NVIDIA GPU and a JAX that sees it")


DIGITS_FLAGS = ("--epochs", "8", "--warmup-epochs", "1", "--held-out", "0.4")
DIGITS_FLAGS += ("--checkpoint-every", "2")


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """What a short training of the ViT leaves, once for all who look at it."""
    # Imported here: the tests of operators need no checkpoints and no pictures.
    from examples.vit import train

    out = tmp_path_factory.mktemp("runs") / "digits"
    train.main([*DIGITS_FLAGS, "--out", str(out)])
    return out


@pytest.fixture
def hopper(monkeypatch):
    """Operators believe that they run on a Hopper GPU: for lowering without one."""
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: HOPPER)
    return HOPPER


@pytest.fixture
def interpreted_hopper(hopper, monkeypatch):
    """As `hopper`, and Pallas kernels run in Mosaic's interpreter on the CPU."""
    mosaic_interpreter.share_unions(monkeypatch)
    with plgpu.force_gpu_interpret_mode():
        yield hopper


@pytest.fixture
def race_detector(hopper, capfd, monkeypatch):
    """As `interpreted_hopper`, and the test fails if threads of a kernel race."""
    mosaic_interpreter.share_unions(monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield hopper
    # The interpreter reports races on its standard output and nowhere else that is public.
    assert "RACE DETECTED" not in capfd.readouterr().out
