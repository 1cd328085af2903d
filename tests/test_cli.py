"""`python -m jaxfused` says what runs on this machine, for every operator."""

import inspect
import os
import subprocess
import sys

import pytest

import jaxfused
from jaxfused import dispatch
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
    listed = dict(operators(device))
    for name, function in vars(jaxfused).items():
        if (
            inspect.isfunction(function)
            and "implementation" in inspect.signature(function).parameters
        ):
            calls = listed.pop(name).calls
            assert calls and all(choice.reasons["xla"] is None for choice, _ in calls)
    assert not listed


def test_reasons_are_those_of_the_dispatcher():
    [(choice, _)] = dict(operators(CPU))["layer_norm"].calls
    text = " ".join(report(CPU).split())
    for name, reason in choice.reasons.items():
        assert (f"not '{name}': {reason}" in text) == (reason is not None)


def test_a_hopper_runs_kernels_and_the_report_names_each_stage():
    text = report(DEVICES[1])
    assert "NVIDIA H200, sm_90, 132 multiprocessors" in text
    assert "dot_product_attention forward runs on 'pallas'" in text
    assert "dot_product_attention backward runs on 'pallas'" in text
