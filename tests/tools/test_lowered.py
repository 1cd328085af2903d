"""`python -m benchmarks lowered`: equal programs have equal hashes, and differences are named."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import jaxfused
from benchmarks.without_gpu import lowered
from jaxfused import dispatch

H200, A100 = lowered.DEVICES
X = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)


def norm(implementation, **options):
    function = functools.partial(jaxfused.rms_norm, implementation=implementation, **options)
    return lowered.Program(lowered.FORWARD, implementation, function, (X,))


def test_the_same_program_has_the_same_record():
    first = lowered.record(norm("pallas"), H200)
    assert first == lowered.record(norm("pallas"), H200)
    ((stage, implementation, reasons),) = first["choices"]
    assert (stage, implementation) == ("rms_norm forward", "pallas")
    assert {name for name, _ in reasons} == {"pallas", "cuda", "xla"}
    assert [key.operands[0] for key in first["keys"]] == [("bfloat16", (256, 512))]
    # This works without a built library too.
    assert lowered.record(norm("cuda"), H200)["text"] != first["text"]
    refused = lowered.record(norm("pallas"), A100)
    assert refused["raised"].startswith("ValueError: rms_norm: implementation='pallas' cannot run")


@pytest.mark.parametrize("implementation", ["pallas", "cuda", "xla"])
def test_another_constant_is_another_text_and_no_other_choice(implementation):
    first, second = (
        lowered.record(norm(implementation, epsilon=epsilon), H200) for epsilon in (1e-6, 1e-5)
    )
    assert first.pop("text") != second.pop("text")
    assert first == second


def test_files_lines_and_counts_of_kernels_are_left_out():
    with dispatch.assume(H200):
        traced = jax.jit(norm("pallas").function).trace(X)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    left = lowered.without_places(text)
    for place in (".py", "dump_basename", "kernel_hash"):
        assert place in text
        assert place not in left
    # The kernel's instructions and its name in a profile are kept.
    assert "module @layer_norm_forward" in left
    assert "nvvm.mbarrier" in left


def test_what_differs_is_named(tmp_path, capsys):
    found = lowered.lowered(seed=0, cases=0, only="avg_pool")
    assert [*found["lowerings"]] == [
        f"avg_pool example, {direction}, None, {device.name}"
        for direction in (lowered.FORWARD, lowered.GRADIENT)
        for device in lowered.DEVICES
    ]
    before, now = tmp_path / "before", tmp_path / "now"
    before.write_text(json.dumps(found))
    compare = ["--compare", str(before), str(now)]
    now.write_text(json.dumps(found))
    assert lowered.main(compare) == 0
    assert "all 4 lowerings are equal" in capsys.readouterr().out
    label = f"avg_pool example, gradient, None, {A100.name}"
    found["lowerings"][label]["text"] = "of another program"
    now.write_text(json.dumps(found))
    assert lowered.main(compare) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{label}: text", "1 of 4 lowerings differ: text 1"]
