"""The benchmarks of whole language models and of quantised weights, at tiny sizes on a CPU."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import pytest

from benchmarks import __main__
from benchmarks.cases import quantized_table, ragged_dot
from benchmarks.report import results
from benchmarks.run import budget, lowering, runner, timing
from benchmarks.run.case import BARE, MIXED


def rows_of(out, command, *flags):
    """Returns the saved rows of a command that has run."""
    __main__.main([*command.split(), *flags, "--seconds", "500", "--out", str(out)])
    path = out / f"{results.slug(jax.devices()[0].device_kind)}.json"
    (section,) = results.load(path)["benchmarks"].values()
    return section["rows"]


def test_decode_is_checked_and_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_ROUND_MILLISECONDS", 1.0)
    monkeypatch.setattr(timing, "SAMPLES", 1)
    rows = rows_of(tmp_path, "language_model decode", "--tiny", "--only", "b16,b16 cudnn,b16 flax")
    assert "cuDNN" in rows["b16 cudnn"]["failed"]
    assert set(rows) == {"read ceiling", "b16", "b16 cudnn", "b16 flax"}
    ours, flax = rows["b16"], rows["b16 flax"]
    assert ours["largest_logit"] == pytest.approx(flax["largest_logit"], rel=0.02)
    assert ours["over"]["b16 flax"]["must"] == 1.5 and ours["share"] > 0


def test_training_steps_of_both_networks_learn_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_ROUND_MILLISECONDS", 1.0)
    rows = rows_of(tmp_path, "language_model train", "--tiny", "--only", "bf16,stock")
    ours, stock = rows["bf16"], rows["stock"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=0.01)
    assert ours["teraflops"] > 0 and "stock" in ours["over"]


def test_a_checkpoint_is_written_read_and_loaded(tmp_path):
    flags = ["--blocks", "2", "--width", "256", "--hidden", "384", "--folder", str(tmp_path)]
    rows = rows_of(tmp_path, "checkpoint", *flags)
    assert set(rows) == {"read", "load 1", "load 2", "load 3", "load 4"}
    assert "wrong" not in rows["load 1"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "case", quantized_table.cases(shapes=[(16, 256, 24)]), ids=lambda c: c.name
)
def test_table_agrees_with_its_truth(case):
    inputs = case.make_inputs(jax.random.key(0))
    with jax.enable_x64(True):
        truth = jax.jit(runner.in_float64(case.truth))(*inputs)
    assert runner.distance(jax.jit(case.jax[MIXED])(*inputs), truth) <= case.error_limit
    assert case.bytes == sum(a.nbytes for a in inputs[:3]) + truth.size * 2
    assert case.jax[BARE](*inputs).shape == truth.shape


@pytest.mark.parametrize(
    "case",
    ragged_dot.cases(
        shapes=[(4, 48, 16, 24, "even"), (4, 48, 16, 24, "uneven"), (6, 12, 16, 24, 2)]
    ),
    ids=lambda c: c.name,
)
def test_grouped_products_agree_with_each_group_alone(case):
    inputs = case.make_inputs(jax.random.key(0))
    with jax.enable_x64(True):
        truth = jax.jit(runner.in_float64(case.truth))(*inputs)
    for name in {MIXED, "xla", BARE} & {*case.jax}:
        outputs = jax.jit(case.jax[name])(*inputs)
        assert runner.distance(outputs, truth) <= case.error_limit
    assert inputs[2].sum() == len(inputs[0])


def test_programs_of_one_text_and_inputs_are_compiled():
    cases = quantized_table.cases(shapes=[(16, 256, 24)])[:2]
    for case, found in zip(cases, runner.compile_all(cases, {BARE}), strict=True):
        assert set(found) == {BARE, "truth", "inputs"}
        inputs = found["inputs"].result()(jax.random.key(3))
        for a, b in zip(inputs, case.make_inputs(jax.random.key(3)), strict=True):
            assert (a == b).all()
        assert found[BARE].result()(*inputs).shape == (16, 24)


def test_programs_lowered_elsewhere_are_compiled_and_what_fails_there_is_lowered_here(monkeypatch):
    case = quantized_table.cases(shapes=[(16, 256, 24)])[0]
    monkeypatch.setattr(lowering, "_cases", lambda name, quick: [case])
    with ThreadPoolExecutor(1) as pool:
        (modules,) = lowering.start(pool, "quantized_table", False, [case], {MIXED, BARE})
    assert set(modules) == {MIXED}  # a bare product is quick to lower
    failed = Future()
    failed.set_result("ValueError: it cannot be exported")
    inputs = case.make_inputs(jax.random.key(0))
    results = []
    for module in (modules[MIXED], failed):
        (found,) = runner.compile_all([case], {MIXED}, [{MIXED: module}])
        results.append(found[MIXED].result()(*inputs))
    assert "call_exported" in lowering.lowered(modules[MIXED].result()).as_text(debug_info=True)
    assert (results[0] == results[1]).all()


def test_few_cases_are_compiled_before_the_first_row(monkeypatch):
    events = []

    def compile_all(cases, *_):
        events.append(len(cases))
        return [{} for _ in cases]

    monkeypatch.setattr(runner, "compile_all", compile_all)
    monkeypatch.setattr(runner, "_run_case", lambda *_: {})
    cases = quantized_table.cases(shapes=[(16, 256, 24)])[:6]
    runner.run(cases, {MIXED}, budget=1.0, save=lambda results: events.append("row"))
    assert events == [4, *["row"] * 4, 2, *["row"] * 2]


def test_table_has_the_formats_that_fit():
    names = {case.name for case in quantized_table.cases(shapes=[(512, 2880, 24)])}
    assert not any("int4" in name for name in names) and len(names) == 5
    assert len(quantized_table.cases(quick=True)) == 13


def test_the_budget_ends_the_process(monkeypatch, capsys, tmp_path):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with budget.limited(0.01, remove=str(folder)):
        assert ended.wait(10)
    assert "0.01 s is spent" in capsys.readouterr().out and not folder.exists()
    with budget.limited(None):
        pass
