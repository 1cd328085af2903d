"""`python -m jaxfused` says what runs on this machine, for every operator."""

import inspect
import os
import subprocess
import sys

import pytest

import jaxfused
from jaxfused import cuda, dispatch
from jaxfused.__main__ import operators, report

CPU = dispatch.Device("cpu", "cpu", None, 0)
DEVICES = [
    CPU,
    dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132),
    dispatch.Device("gpu", "NVIDIA A100", (8, 0), 108),
    dispatch.Device("gpu", "Tesla T4", (7, 5), 40),
]


def test_the_command_reports_on_this_machine():
    result = subprocess.run(
        [sys.executable, "-m", "jaxfused"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
    )
    assert f"jaxfused {jaxfused.__version__}" in result.stdout
    assert "layer_norm" in result.stdout and "runs on 'xla'" in result.stdout


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_operator_and_implementation_is_accounted_for(device):
    listed = {operator.name: operator for operator in operators(device)}
    for name, function in vars(jaxfused).items():
        if (
            inspect.isfunction(function)
            and "implementation" in inspect.signature(function).parameters
        ):
            reasons = listed.pop(name).reasons
            assert {"pallas", "cuda", "xla"} <= set(reasons) and reasons["xla"] is None
    assert not listed


def test_reasons_are_those_of_the_dispatcher():
    [operator] = [o for o in operators(CPU) if o.name == "layer_norm"]
    text = " ".join(report(CPU).split())
    for name, reason in operator.reasons.items():
        assert (f"not '{name}': {reason}" in text) == (reason is not None)


def test_a_hopper_runs_what_the_dispatcher_takes_first(monkeypatch):
    monkeypatch.setattr(cuda.layer_norm, "why_unsupported", lambda **limits: "there is no library")
    text = report(DEVICES[1])
    [operator] = [o for o in operators(DEVICES[1]) if o.name == "rms_norm"]
    [line] = [line for line in text.splitlines() if line.startswith("rms_norm ")]
    first = dispatch.choose("rms_norm", None, operator.reasons)
    assert first != "cuda" and f"runs on '{first}'" in line
    assert "NVIDIA H200, sm_90, 132 multiprocessors" in text
