"""Choice of an implementation, and errors if a named one cannot run."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxfused
from jaxfused import dispatch

REASONS = {"pallas": "it needs a Hopper GPU", "cuda": None, "xla": None}


def test_none_takes_the_first_that_can_run():
    assert dispatch.choose("op", None, REASONS) == "cuda"


@pytest.mark.parametrize("name", ["cuda", "xla"])
def test_a_named_one_runs_if_it_can(name):
    assert dispatch.choose("op", name, REASONS) == name


def test_a_named_one_that_cannot_run_raises_with_its_reason():
    with pytest.raises(ValueError) as raised:
        dispatch.choose("op", "pallas", REASONS)
    assert str(raised.value) == (
        "op: implementation='pallas' cannot run here: it needs a Hopper GPU."
        " Pass implementation=None for the fastest one that can."
    )


def test_an_unknown_name_raises_with_the_choice():
    with pytest.raises(ValueError, match=r"one of 'pallas', 'cuda', 'xla', but 'triton'"):
        dispatch.choose("op", "triton", REASONS)


def test_the_device_is_that_of_the_first_concrete_array():
    # The CPU is a device of every machine.
    cpu = jax.local_devices(backend="cpu")[0]
    device = dispatch.current_device(None, jax.device_put(jnp.ones(3), cpu))
    assert device == dispatch.Device("cpu", cpu.device_kind, None, 0)


def test_traced_arrays_fall_back_on_the_default_device():
    seen = []
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        jax.eval_shape(lambda x: seen.append(dispatch.current_device(x)), jnp.ones(3))
    assert [device.platform for device in seen] == ["cpu"]


def test_the_default_device_may_be_a_platform_name():
    with jax.default_device("cpu"):
        assert dispatch.current_device().platform == "cpu"


GPUS = {
    "Turing": (7, 5),
    "Ampere": (8, 0),
    "Hopper": (9, 0),
    "Blackwell": (10, 0),
    "consumer Blackwell": (12, 0),
    "Volta": (7, 0),
    "no GPU": None,
}


@pytest.mark.parametrize("capability", GPUS.values(), ids=GPUS.keys())
def test_every_device_has_an_implementation_and_a_sentence_for_the_others(capability):
    device = dispatch.Device("gpu" if capability else "cpu", "device", capability, 132)
    for features in (1, 64, 1000, 65536, 100_000):
        x = jax.ShapeDtypeStruct((16, features), jnp.bfloat16)
        with dispatch.assume(device):
            [(choice, _)] = jaxfused.explain(jaxfused.layer_norm, x).calls
        assert choice.reasons[choice.implementation] is None
        assert choice.reasons["xla"] is None
        for reason in choice.reasons.values():
            # A reason ends the message "... cannot run here: {reason}. Pass ...".
            assert reason is None or (reason.strip() and not reason.endswith("."))
        if capability != (9, 0):
            assert "Hopper" in choice.reasons["pallas"]


@pytest.mark.parametrize(("name", "is_said"), [("NVIDIA L4", True), ("NVIDIA H200 NVL", False)])
def test_explain_says_that_rules_come_from_another_gpu(name, is_said):
    with dispatch.assume(dispatch.Device("gpu", name, (8, 9), 58)):
        report = jaxfused.explain(jaxfused.layer_norm, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert ("rules come from an NVIDIA H200" in str(report)) == is_said


def test_a_jitted_function_is_traced_for_each_assumed_device():
    f = jax.jit(lambda x: jaxfused.layer_norm(x))
    x = jax.ShapeDtypeStruct((4096, 768), jnp.bfloat16)
    chosen = []
    for name, capability in (("NVIDIA H200", (9, 0)), ("V100", (7, 0)), ("NVIDIA H200", (9, 0))):
        device = dispatch.Device("gpu", name, capability, 132)
        with dispatch.assume(device), dispatch.recorded() as choices:
            f.trace(x)
        chosen.append([choice.implementation for choice in choices])
    assert chosen == [["pallas"], ["xla"], []]


@pytest.mark.parametrize("op", [jaxfused.layer_norm, jaxfused.rms_norm])
def test_a_named_kernel_never_falls_back(op, monkeypatch):
    volta = dispatch.Device("gpu", "V100", (7, 0), 80)
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: volta)
    for name in ("pallas", "cuda"):
        with pytest.raises(ValueError, match=f"implementation='{name}' cannot run here"):
            op(jnp.ones((8, 64)), implementation=name)


def test_choices_of_one_thread_are_not_recorded_for_another():
    """Two threads trace at once: each operator's own list has its own choices, and none stays active."""
    first, second = (
        dispatch.Choice(name, (), "xla", {"xla": None}) for name in ("first", "second")
    )
    barrier = threading.Barrier(2, timeout=10)

    def trace(choice):
        with dispatch.recorded(alone=True) as choices:
            barrier.wait()
            dispatch.record(choice)
            barrier.wait()
        return choices

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(trace, (first, second))) == [[first], [second]]
    with dispatch.recorded() as outer, dispatch.recorded(alone=True) as inner:
        dispatch.record(first)
        with dispatch.recorded() as innermost:
            dispatch.record(second)
    assert (outer, inner, innermost) == ([], [first, second], [second])
    with dispatch.recorded() as outer:
        dispatch.record(first)
    assert outer == [first]
