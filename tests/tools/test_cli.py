"""`python -m jaxfused` lists what runs on this machine, for every operator."""

import inspect
import os
import subprocess
import sys

import pytest

import jaxfused
import jaxfused.__main__ as command_line
from jaxfused import dispatch
from jaxfused.__main__ import faults, operators, report
from jaxfused.explanation import basis
from jaxfused.runtime import cuda_library
from tests.support.grids import parametrize

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


def test_output_without_a_reader_is_no_error():
    command = f"{sys.executable} -m jaxfused | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert (result.returncode, result.stderr) == (0, "") and "jaxfused" in result.stdout


@parametrize("device", DEVICES, quick=(0, 3), ids=lambda device: device.name)
def test_every_operator_and_implementation_is_accounted_for(device):
    listed = dict(operators(device))
    for name, function in inspect.getmembers(jaxfused):
        if (
            inspect.isfunction(function)
            and "implementation" in inspect.signature(function).parameters
        ):
            calls = listed.pop(name).calls
            assert calls and all(choice.reasons["xla"] is None for choice, _ in calls)
    assert not listed


def test_reasons_are_those_of_the_dispatcher():
    [(choice, _)] = dict(operators(CPU))["layer_norm"].calls
    lines = report(CPU).splitlines()
    assert not any(line.endswith(" of ") for line in lines), "an example has no operands"
    text = " ".join(" ".join(lines).split())
    for name, reason in choice.reasons.items():
        assert (f"not '{name}': {reason}" in text) == (reason is not None)


def test_a_hopper_runs_kernels_and_the_report_names_each_stage():
    text = report(DEVICES[1])
    assert "NVIDIA H200, sm_90, 132 multiprocessors" in text
    assert "dot_product_attention forward runs on 'pallas'" in text
    assert "dot_product_attention backward runs on 'pallas'" in text


FIGURES = ("expected: ", "measured", "the first that can run: ", "'")


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_what_decided_is_said_for_every_operator(device):
    for _, explanation in operators(device):
        for choice, _ in explanation.calls:
            able = [name for name, reason in choice.reasons.items() if reason is None]
            if len(able) > 1 and choice.source != "named":
                assert basis(choice)[0].startswith(FIGURES)


@pytest.mark.parametrize(
    ("device", "driver", "library", "faults_found"),
    [
        (CPU, None, "there was no nvcc", []),
        (CPU, "580.1", None, ["JAX computes on cpu"]),
        (DEVICES[1], "580.1", None, []),
        (DEVICES[1], "580.1", "the CUDA library was built for 80-real", ["80-real"]),
    ],
)
def test_check_says_what_keeps_a_gpu_from_its_kernels(device, driver, library, faults_found):
    found = faults(device, driver, library)
    assert len(found) == len(faults_found)
    assert all(part in fault for part, fault in zip(faults_found, found, strict=True))


def test_check_exits_with_1_where_something_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "driver_version", lambda: None)
    assert command_line.main(["--check"]) == 0
    monkeypatch.setattr(command_line, "driver_version", lambda: "580.1")
    assert command_line.main(["--check"]) == 1
    assert "fault         there is an NVIDIA driver (580.1)" in capsys.readouterr().out
    assert command_line.main(["--chekc"]) == 2


def test_help_is_known(capsys):
    assert command_line.main(["--help"]) == 0
    assert "tune PROGRAM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("architecture", "compute_capability", "runs"),
    [
        ("90-real", (9, 0), True),
        ("90-real", (10, 0), False),
        ("80-real", (8, 9), True),
        ("86-real", (8, 0), False),
        ("120", (12, 1), True),
        ("75", (9, 0), True),
        ("100-real", (10, 3), True),
        ("90-virtual", (9, 0), True),
        ("90-virtual", (8, 9), False),
    ],
)
def test_machine_code_serves_its_major_version_and_ptx_all_later_gpus(
    architecture, compute_capability, runs
):
    assert cuda_library.runs_on(architecture, compute_capability) == runs
