"""The benchmarks' bookkeeping on any machine: counts, checks, merged results, verdicts, plots."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from benchmarks import __main__
from benchmarks.cases import (
    attention,
    batch_norm,
    conv,
    depthwise,
    group_norm,
    layer_norm,
    linear,
    losses,
    mlp,
    pool,
    qkv_projection,
    quantized_conv,
    quantized_matmul,
    resample,
    rope,
    sample,
    serving,
    serving_calls,
    sparse_entries,
)
from benchmarks.report import plot, report, results
from benchmarks.run import ceilings, peers, runner, timing
from benchmarks.run.case import BARE, BEST_PEER, BULK_COPY, GIGABYTES, TERAFLOPS, Bar
from benchmarks.sweep import attention as sweep_attention
from benchmarks.whole import (
    end_to_end,
    end_to_end_fused,
    end_to_end_jax,
    end_to_end_report,
    parallel,
    parallel_bars,
    parallel_hlo,
    parallel_programs,
    parallel_timing,
    pipeline,
)
from examples.classify.convnext import ConvNeXtSize
from examples.classify.resnet import ResNetSize
from examples.vit.model import MODELS, ViTSize
from tests.support.grids import parametrize

TINY = (6, 64)
CASES = {case.name: case for case in layer_norm.cases(shapes=[TINY])}
PRODUCT_CASES = {
    case.name: case
    for case in (
        *attention.cases(plain=[(2, 24, 4, 16)], causal=[(2, 24, 4, 2, 16)]),
        *linear.cases(shapes=[(24, 16, 32)]),
        *mlp.cases(shapes=[(24, 16, 32)]),
        *rope.cases(shapes=[(2, 12, 4, 2, 16)]),
        *qkv_projection.cases(shapes=[(2, 12, 4, 2, 16)]),
        *quantized_matmul.cases(shapes=[(24, 256, 128)]),
        *sample.cases(shapes=[(5, 300)]),
        *serving.cases(shapes=[(3, 48, 4, 2, 16, 0, 24), (3, 48, 4, 2, 16, 16)]),
        *serving.cases(shapes=[(3, 48, 4, 2, 16, 0, 0, k) for k in ("int8", "float8_e4m3fn")]),
        *serving.cases(shapes=[(3, 48, 4, 2, 16, 0, 0, "bfloat16", tokens) for tokens in (4, 24)]),
        *serving_calls.calls(serving_calls.Sizes(4, 2, 16, 8, (2, 24), 3, 64, 8, 16, 16)),
    )
}
LOSS_CASES = {
    case.name: case
    for case in losses.cases(logits=[(24, 300)], layers=[(24, 16, 300)], images=[(3, 8, 8)])
}
CONV_CASES = {case.name: case for case in conv.cases(shapes=[(2, 6, 5, 8, 16)])}
QUANTIZED_CONV_CASES = {case.name: case for case in quantized_conv.cases(shapes=[(2, 6, 5, 8, 16)])}
IMAGE_CASES = {
    case.name: case
    for operator in (batch_norm, depthwise, group_norm, pool, resample)
    for case in operator.cases(shapes=[(2, 6, 5, 8)])
}
SPARSE_CASES = {
    case.name: case
    for case in sparse_entries.cases(shapes=[(64, 8, 0.05, t) for t in ("float32", "bfloat16")])
}
ALL_CASES = QUANTIZED_CONV_CASES | CASES | PRODUCT_CASES | LOSS_CASES | CONV_CASES | IMAGE_CASES
ALL_CASES |= SPARSE_CASES


def result_of(case, times, **rows):
    """Returns what the runner would save for `case` with these times."""
    rows |= {
        name: {"microseconds": time, "least": 0.99 * time, "most": 1.01 * time}
        for name, time in times.items()
    }
    return {
        "case": case.name,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "bytes": case.bytes,
        "flops": case.flops,
        "default": "pallas",
        "bars": [vars(bar) for bar in case.bars],
        "rows": rows,
    }


def section_of(*cases):
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"versions": {"jax": "1.2.3"}},
        "ceilings": {"bulk_copy": 1e-3, "device_copy": 2e-3, "copy": 2e-3, "gemm": 1e-6},
        "missing": {"tokamax": "ModuleNotFoundError: No module named 'tokamax'"},
        "cases": list(cases),
    }


FORWARD = result_of(
    CASES["layer_norm forward"],
    {"pallas": 2.0, "cuda": 1.5, "reference": 3.0, "xla": 3.0, "liger": 2.5},
    torch_compile={"failed": "RuntimeError: no"},
)
SECTION = section_of(FORWARD, result_of(CASES["rms_norm forward+backward"], {"xla": 3.0}))


# --- the cases ------------------------------------------------------------------------------------


@parametrize("name", list(ALL_CASES), quick=slice(None, None, 8))
def test_case_agrees_with_its_truth(name):
    case = ALL_CASES[name]
    inputs = case.make_inputs(jax.random.key(0))
    with jax.enable_x64(True):
        truth = jax.jit(runner.in_float64(case.truth))(*inputs)
    for implementation in {"reference", "xla", "jax_csr", "dense"} & set(case.jax):
        outputs = jax.jit(case.jax[implementation])(*inputs)
        assert runner.distance(outputs, truth) <= case.error_limit, implementation


@pytest.mark.parametrize("name", CASES)
def test_case_counts_each_operand_once(name):
    """The forward counts inputs and outputs, the backward its inputs (h, dy, scale) and outputs."""
    case = CASES[name]
    inputs = jax.eval_shape(case.make_inputs, jax.random.key(0))
    outputs = jax.eval_shape(case.jax["reference"], *inputs)
    total = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((inputs, outputs)))
    if case.differentiable:
        h, scale = inputs[0], inputs[1]
        total += h.size * h.dtype.itemsize + scale.size * scale.dtype.itemsize
    assert case.bytes == total


@pytest.mark.parametrize("name", [n for n in PRODUCT_CASES if n.endswith(" forward")])
def test_case_with_products_counts_operands_and_operations(name):
    case = PRODUCT_CASES[name]
    inputs = jax.eval_shape(case.make_inputs, jax.random.key(0))
    outputs = jax.eval_shape(case.jax["xla"], *inputs)
    assert case.bytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((inputs, outputs)))
    flops = end_to_end_jax.product_flops(jax.make_jaxpr(case.jax["xla"])(*inputs).jaxpr)
    assert case.flops == flops // (2 if "causal" in name else 1)


@pytest.mark.parametrize("name", [n for n in CONV_CASES if n.endswith(" forward")])
def test_case_of_a_convolution_counts_each_operand_once(name):
    case = CONV_CASES[name]
    inputs = jax.eval_shape(case.make_inputs, jax.random.key(0))
    outputs = jax.eval_shape(case.jax["xla"], *inputs)
    assert case.bytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((inputs, outputs)))
    assert case.flops == 2 * (2 * 6 * 5) * 9 * 8 * 16


def test_attention_takes_its_logits_once_more_for_the_gradient():
    forward, whole = (
        PRODUCT_CASES[f"attention {direction}"].flops
        for direction in ("forward", "forward+backward")
    )
    assert 2 * whole == 7 * forward


def test_truth_of_attention_is_the_same_a_few_heads_at_a_time(monkeypatch):
    case = PRODUCT_CASES["causal attention forward+backward"]
    inputs = [a.astype(jnp.float32) for a in case.make_inputs(jax.random.key(0))]
    at_once = jax.jit(case.truth)(*inputs)
    monkeypatch.setattr(
        sweep_attention, "_TRUTH_LOGITS", 3 * 2 * 24 * 24
    )  # 3 of 4 heads, then the last
    in_parts = jax.jit(lambda *inputs: case.truth(*inputs))(*inputs)  # a new trace
    assert runner.distance(in_parts, at_once) < 1e-5
    of_reference = jax.jit(case.jax["reference"])(*inputs)
    assert runner.distance(in_parts, of_reference) < 1e-5


def test_attention_without_room_for_its_logits_is_skipped():
    (case,) = (
        c for c in attention.cases() if c.name == "attention forward" and c.shape[1] == 16384
    )
    assert set(case.skipped) == {"reference", "xla"}
    assert "16 GiB" in case.skipped["xla"]


def test_attention_at_odd_lengths_has_a_padded_peer():
    by_length = {case.shape[1]: set(case.jax) for case in attention.cases()}
    assert {"cudnn_padded", "tokamax_triton"} <= by_length[197]
    assert not {"cudnn_padded", "tokamax_triton"} & by_length[4096]


def test_gradient_case_returns_outputs_then_gradients():
    case = CASES["residual + layer_norm forward+backward"]
    outputs = jax.eval_shape(
        case.jax["reference"], *jax.eval_shape(case.make_inputs, jax.random.key(0))
    )
    assert [o.shape for o in outputs] == [TINY, TINY, TINY, TINY[1:], TINY[1:]]
    assert [o.dtype for o in outputs] == [jnp.bfloat16] * 3 + [jnp.float32] * 2


def test_inputs_are_random_and_differ_between_sets():
    sets = runner.make_sets(CASES["layer_norm forward"].make_inputs)
    assert len(sets) == timing.input_sets(sum(a.nbytes for a in sets[0]))
    assert not (sets[0][0] == sets[1][0]).all()
    assert all(float(jnp.std(a)) > 0 for a in sets[0])


@pytest.mark.parametrize(("size", "count"), [(1, 16), (2**26, 4), (2**27 + 1, 2), (2**33, 2)])
def test_input_sets_outgrow_the_cache(size, count):
    assert timing.input_sets(size) == count


def test_full_run_has_the_shapes_of_the_bars():
    shapes = {case.shape for case in layer_norm.cases()}
    assert shapes == set(layer_norm.SHAPES)
    assert {case.shape for case in layer_norm.cases(quick=True)} == set(layer_norm.QUICK_SHAPES)


# --- the check before the timing ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "right"),
    [
        (lambda y: y, True),
        (lambda y: y.at[3].multiply(1.02), False),  # one wrong row among many
        (lambda y: y.at[0, 0].set(jnp.nan), False),
        (lambda y: y[:-1], False),
        (lambda y: (y, y), False),
    ],
)
def test_distance_sees_every_row(spoil, right):
    y = jax.random.normal(jax.random.key(0), (512, 64))
    assert (runner.distance(spoil(y), y) <= CASES["layer_norm forward"].error_limit) == right


def test_distance_of_a_short_row_is_by_the_length_of_the_others():
    truth = jax.random.normal(jax.random.key(0), (512, 64)).at[7].set(0.0)
    assert runner.distance(truth.at[7].set(1e-4), truth) < 1e-3
    assert runner.distance(truth.at[7].set(0.1), truth) > 0.05


def test_wrong_and_failing_implementations_are_reported_not_timed(monkeypatch):
    def failing(*_):
        raise ValueError("cannot run here\nsecond line")

    case = CASES["layer_norm forward"]
    right = case.jax["reference"]
    functions = {
        "pallas": right,
        "cuda": failing,
        "reference": lambda x, *rest: right(x, *rest) * 1.05,
        "xla": right,
    }
    functions |= {BARE: lambda x, *_: x, "cudnn": right}
    changed = vars(case) | {
        "jax": functions,
        "torch": {"liger": failing},
        "skipped": {"cudnn": "too large", "torch_compile": "not asked for"},
    }
    timed = []

    def fake_cupti(call, sets):
        timed.append(call)
        return timing.Samples([2.0, 1.0, 3.0], [("kernel", 2.0)])

    monkeypatch.setattr(timing, "cupti", fake_cupti)
    saved = []
    runner.run(
        [type(case)(**changed)],
        {"pallas", "cuda", "reference", "liger", BARE, "cudnn"},
        budget=1e9,
        save=lambda results: saved.append(json.loads(json.dumps(results))),
    )
    rows = saved[-1][0]["rows"]
    assert set(rows) == {"pallas", "cuda", "reference", "liger", BARE, "cudnn"}
    assert rows["pallas"]["microseconds"] == 2.0
    assert rows["pallas"]["rounds"] == [2.0, 2.0]
    assert (rows["pallas"]["least"], rows["pallas"]["most"]) == (1.0, 3.0)
    assert rows["cuda"] == {"failed": "ValueError: cannot run here"}
    assert "relative error" in rows["reference"]["wrong"]
    assert "failed" in rows["liger"]
    assert rows["cudnn"] == {"skipped": "too large"}
    assert rows[BARE]["microseconds"] == 2.0 and "error" not in rows[BARE]
    assert len(timed) == 4  # two rounds of the correct variant, and of the bare product


def test_a_call_that_writes_in_place_gets_what_the_last_one_left(monkeypatch):
    def fake_cupti(call, sets):
        calls = [call(*sets[i % 2]) for i in range(5)]
        jax.block_until_ready(calls)
        return timing.Samples([float(call.kept[0][0]) for call in calls[:2]], [])

    monkeypatch.setattr(timing, "cupti", fake_cupti)
    case = CASES["layer_norm forward"]
    changed = vars(case) | {
        "make_inputs": lambda key: (jnp.zeros(3), jnp.ones(3)),
        "truth": lambda x, y: (x + y,),
        "jax": {"cuda": lambda x, y: (x + y,)},
        "in_place": 1,
    }
    saved = []
    runner.run([type(case)(**changed)], {"cuda"}, budget=1e9, save=saved.append)
    # A call for the check, then 5 in each of two rounds.
    assert saved[0][0]["rows"]["cuda"]["rounds"] == [3.0, 5.5]


def test_the_clock_that_says_less_is_taken():
    def samples(*values):
        return timing.Samples(list(values), [])

    rounds = [
        {"events": samples(5.0, 5.0), "cupti": samples(4.0, 4.2)},
        {"events": samples(5.0, 5.0), "cupti": samples(4.1, 4.3)},
    ]
    row = runner._combine(rounds)
    assert row["clock"] == "cupti"
    assert row["microseconds"] == pytest.approx(4.15)
    assert row["by_clock"]["events"] == 5.0
    del rounds[1]["cupti"]
    assert runner._combine(rounds)["clock"] == "events"


# --- peers ----------------------------------------------------------------------------------------


def test_missing_peer_is_named_with_its_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    reasons = peers.missing(["xla", "tokamax"])
    assert set(reasons) == {"tokamax"}
    assert "tokamax" in reasons["tokamax"]


def test_broken_peer_counts_as_missing(monkeypatch):
    def broken():
        raise OSError("libcuda.so: cannot open")

    monkeypatch.setitem(peers.PROBES, "liger", broken)
    assert peers.missing(["liger"]) == {"liger": "OSError: libcuda.so: cannot open"}


# --- the command ----------------------------------------------------------------------------------


def test_operators_are_the_files_with_cases():
    assert __main__.operators()["layer_norm"] is layer_norm
    assert "runner" not in __main__.operators()


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert __main__.main(["layer_norm"]) == 2
    assert "need an NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["no_such"], ["--peers", "no_such"]])
def test_unknown_names_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        __main__.main(arguments)
    assert "no_such is not known" in capsys.readouterr().err


def test_copy_kernel_copies():
    x = jax.random.normal(jax.random.key(0), (7, 256), jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode():
        y = ceilings.bulk_copy(x, chunk=256, slots=3, ctas=2)
    assert bool((y == x).all())
    with plgpu.force_gpu_interpret_mode():
        last = ceilings.bulk_copy(x, chunk=256, slots=3, ctas=2, writes=False)
    assert bool((last == jnp.stack([x[6], x[5]])).all())


@pytest.mark.parametrize("ring", ceilings._RINGS)
@pytest.mark.parametrize("writes", [True, False])
def test_copy_kernel_lowers_for_a_gpu(ring, writes):
    chunk, slots, ctas = ring
    ring = dict(chunk=chunk, slots=slots, ctas=132 * ctas)
    copy = jax.jit(partial(ceilings.bulk_copy, **ring, writes=writes))
    shape = jax.ShapeDtypeStruct((1024, chunk), jnp.bfloat16)
    jax.export.export(copy, platforms=["cuda"])(shape)


# --- results, judgement, report -------------------------------------------------------------------


def test_saving_one_section_keeps_the_others(tmp_path):
    path = results.save_section(tmp_path, "NVIDIA H200", "layer_norm", {"cases": [1 / 3]})
    assert path.name == "nvidia-h200.json"
    results.save_section(tmp_path, "NVIDIA H200", "attention", {"cases": []})
    results.save_section(tmp_path, "NVIDIA H200", "attention", {"cases": [2]})
    loaded = results.load(path)
    assert loaded["gpu"] == "NVIDIA H200"
    assert loaded["benchmarks"] == {
        "layer_norm": {"cases": [0.33333]},
        "attention": {"cases": [2]},
    }
    assert [p.name for p in tmp_path.iterdir()] == ["nvidia-h200.json"]


def test_rates_and_ratios():
    time = report.microseconds(FORWARD, "pallas")
    assert report.rate(FORWARD, time) == (FORWARD["bytes"] / 2000.0, "GB/s")
    assert report.rate({**FORWARD, "flops": 8_000_000}, time) == (4.0, "TFLOP/s")
    assert report.best_peer(FORWARD) == "liger"
    judged = {(j.ours, j.against): j for j in report.judge(SECTION) if j.case == FORWARD["case"]}
    assert judged["default", "reference"].ratio == 1.5
    assert judged["default", "reference"].met is True
    assert judged["default", BEST_PEER].ratio == 1.25
    assert judged["cuda", "pallas"].ratio == 2.0 / 1.5
    bulk = judged["default", BULK_COPY]
    assert bulk.ratio == pytest.approx(FORWARD["bytes"] / 2.0 / 1e3 / 1e-3)
    unmeasured = [j for j in report.judge(SECTION) if j.case != FORWARD["case"]]
    assert all(j.ratio is None and j.met is None for j in unmeasured)


def test_summary_says_no_where_a_must_is_missed_or_not_measured():
    slow = result_of(CASES["layer_norm forward"], {"pallas": 2.0, "reference": 2.2, "liger": 2.5})
    slow["shape"] = [7, 64]
    _, rows = report.summary(section_of(FORWARD, slow))
    against_xla = next(row for row in rows if row[2] == "jaxfused xla")
    assert against_xla[-3:] == ["1.50 1.10", "1.28", "NO 1/2"]
    _, rows = report.summary(SECTION)
    assert all(row[-1].startswith("NO 0/1") for row in rows if row[0].startswith("rms") and row[3])


def test_bars_of_some_shapes_and_rates():
    case = PRODUCT_CASES["linear + bias + gelu forward"]
    bars = (Bar("xla", must=1.4), Bar(TERAFLOPS, aim=700.0), Bar(BARE, aim=0.97))
    bars += (Bar(GIGABYTES, must=1.0),)
    times = {"pallas": 2.0, "xla": 3.0, BARE: 1.9}
    first = result_of(case, times) | {"bars": [vars(bar) for bar in bars], "flops": 1_500_000_000}
    first["bytes"] = 5_000
    second = result_of(case, times) | {"bars": [], "shape": [1, 2, 3]}
    assert report.best_peer(first) == "xla"
    _, rows = report.summary(section_of(first, second))
    assert [row[1:] for row in rows] == [
        ["default", "stock XLA", "1.40", "", "1.50 .", "", "yes 1/1"],
        ["default", "TFLOP/s", "", "700", "750 .", "", "1/1"],
        ["default", "bare product", "", "0.97", "0.95 .", "", "0/1"],
        ["default", "GB/s", "1.00", "", "2.50 .", "", "yes 1/1"],
    ]


def test_a_default_slower_than_another_of_ours_is_pointed_out():
    (line,) = report.slow_defaults(SECTION)
    assert "jaxfused cuda 1.5 us" in line


def test_faults_are_counted_once_each():
    again = section_of(FORWARD, FORWARD)
    assert list(report.faults(again)) == ["torch.compile, 2 cases, failed: RuntimeError: no"]


def test_table_names_what_went_wrong():
    header, rows = report.table(SECTION)
    text = report.plain_table("title", header, rows)
    assert "failed: RuntimeError: no" in text
    assert all(len(row) == len(header) for row in rows)


def pages_of(directory):
    """Returns arguments of `plot` for empty pages next to a folder of results."""
    readme, page = directory.parent / "README.md", directory / "README.md"
    directory.mkdir(exist_ok=True)
    for path, parts in ((readme, ("models", "operators")), (page, ("benchmarks",))):
        marked = (f"<!-- {part}:begin -->\nold\n<!-- {part}:end -->\n" for part in parts)
        path.write_text(f"before\n{''.join(marked)}after\n")
    arguments = ["--results", str(directory), "--readme", str(readme), "--page", str(page)]
    return arguments, readme, page


def test_chart_and_page_come_from_the_file_alone(tmp_path):
    directory = tmp_path / "results"
    results.save_section(directory, "Some GPU", "layer_norm", SECTION)
    results.save_section(directory, "Some GPU", "pipeline", {"row": {"share": 0.9}})
    arguments, _, page = pages_of(directory)
    plot.main(arguments)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text
    assert "pipeline" not in text
    assert "(some-gpu-layer_norm.png)" in text
    rate = f"{FORWARD['bytes'] / 2e3:.0f} GB/s"
    assert f"| layer_norm forward | 1 | {rate} | 1.50x | 1.25x |" in text
    assert "| rms_norm forward+backward | 1 | not measured | not measured |" in text
    assert "Not timed: torch.compile in 1 of 2 cases." in text
    assert (directory / "some-gpu-layer_norm.png").read_bytes().startswith(b"\x89PNG")
    plot.main([*arguments, "--tables"])
    assert page.read_text() == text


def test_readme_has_medians_of_the_sweep(tmp_path):
    directory = tmp_path / "results"
    arguments, readme, _ = pages_of(directory)

    def entry(case, ours, stock, **fields):
        times = {"ours": ours, "stock a": stock, "stock b": 2 * stock}
        fields = {"operator": "layer_norm", "direction": "forward", "status": "ok"} | fields
        kernels = {"ours": [["norm", 1.0]], "stock a": [["x", 1.0]] * 3, "stock b": []}
        return fields | dict(case=case, microseconds=times, same_program=None, kernels=kernels)

    run = {"date": "2026-11-27T01:00:00", "commit": "a", "versions": {"jax": "0.11.2"}}
    first = [entry(str(n), 1.0, ratio) for n, ratio in enumerate((1.0, 2.0, 3.0))]
    both = entry("0", 1.0, 5.0, direction="forward+backward")
    wrong = {"operator": "layer_norm", "direction": "forward", "status": "wrong", "case": "9"}
    files = {"one": [*first, both, wrong], "two": [entry("0", 1.0, 4.0)]}
    for gpu, entries in files.items():
        text = json.dumps({"runs": [run | {"device": gpu, "entries": entries}]})
        (directory / f"{gpu}-sweep.json").write_text(text)
    plot.main([*arguments, "--tables"])
    text = readme.read_text()
    # The same case on two GPUs counts as two.
    line = "| `layer_norm` | 1 instead of 3 | 2.50x (1.15x) | 5.00x (5.00x) | 4 |"
    assert line in text
    assert "5 timings on one and two with jax 0.11.2, from 2026-11-27 to 2026-11-27" in text
    assert "over 1 commits; 1 more raised or were wrong" in text


def test_tables_of_this_repository_are_those_of_its_results(tmp_path):
    pages = []
    for path in (plot.README, plot.PAGE):
        pages.append(tmp_path / path.parent.name / path.name)
        pages[-1].parent.mkdir()
        pages[-1].write_text(path.read_text())
    readme, page = pages
    for chart in results.DIRECTORY.glob("*.*"):
        if chart.suffix in (".json", ".png"):
            (page.parent / chart.name).symlink_to(chart)
    plot.write_tables(page.parent, readme, page)
    remedy = "run `python -m benchmarks.report.plot --tables`"
    assert readme.read_text() == plot.README.read_text(), remedy
    assert page.read_text() == plot.PAGE.read_text(), remedy


def test_page_without_markers_is_left_alone(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match="benchmarks:begin"):
        plot.replace_part(page, "benchmarks", ["part"])
    assert page.read_text() == "no markers\n"


# --- whole training steps -------------------------------------------------------------------------

TINY_SIZE = ViTSize(patch=4, depth=2, width=16, heads=2, hidden=32)
TINY_VIT = end_to_end_jax.vit("tiny", TINY_SIZE, batch=4, image_size=16, classes=7)
TINY_UNET = end_to_end_jax.unet("unet", batch=2, image_size=16, base=8, levels=3, groups=4)


TINY_CONVNEXT = end_to_end_jax.convnext(
    "tiny", ConvNeXtSize((1, 2), (8, 16), kernel=3), batch=2, image_size=16, classes=7
)
TINY_RESNETS = [
    end_to_end_jax.resnet(
        "tiny", ResNetSize((1, 2), bottleneck, 8, 4, small), norm, batch=2, image_size=16, classes=7
    )
    for bottleneck, small, norm in (
        (True, False, "batch_norm"),
        (False, True, "batch_norm"),
        (True, False, "group_norm"),
    )
]


# Gradients of fewer numbers may be twice as far off as stock's by chance.
TINY_EVOFORMER = end_to_end_fused.evoformer(
    "tiny", end_to_end_fused.EvoformerSize(24, 16, 32, 16, 4, 2, 8, 8)
)


def count_parameters(workload, variant):
    params, *_ = jax.eval_shape(workload.programs[variant]().init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.exhaustive
def test_ours_and_stock_are_the_same_networks():
    assert count_parameters(TINY_VIT, "ours") == count_parameters(TINY_VIT, "stock")
    for workload in (TINY_CONVNEXT, *TINY_RESNETS):
        assert count_parameters(workload, "ours") == count_parameters(workload, "stock")
    assert count_parameters(TINY_UNET, "ours") == count_parameters(TINY_UNET, "stock")


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["ours", "stock"])
def test_networks_that_only_answer(variant):
    sizes = dict(batch=2, image_size=16, classes=7, answers=True)
    resnet = ResNetSize((1, 2), True, 8, 4, False)
    for workload in (
        end_to_end_jax.unet("u", batch=2, image_size=16, base=8, levels=3, groups=4, answers=True),
        end_to_end_jax.convnext("c", ConvNeXtSize((1, 2), (8, 16), kernel=3), **sizes),
        end_to_end_jax.resnet("r", resnet, "batch_norm", **sizes),
    ):
        program = workload.programs[variant]()
        state = program.init(jax.random.key(0))
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"bfloat16"}
        batch = workload.make_batch(jax.random.key(1))
        after, answer = jax.jit(program.step)(state, batch)
        chex.assert_trees_all_equal(after, state)
        assert jnp.isfinite(answer)
        assert workload.flops() == workload.forward_flops()


@pytest.mark.exhaustive
def test_a_step_that_reads_copies_of_the_kernels_is_the_same_step():
    """The forward reads equal numbers; gradients of kernels are rounded to bfloat16."""
    states, losses = [], []
    for variant in ("ours", "ours-copies"):
        program = TINY_VIT.programs[variant]()
        state, step = program.init(jax.random.key(0)), jax.jit(program.step)
        for _ in range(2):
            state, loss = step(state, TINY_VIT.make_batch(jax.random.key(1)))
            losses.append(float(loss))
        states.append(state)
    (params, *_), (others, kept, _) = states
    assert losses[0] == losses[2]
    assert losses[1] == pytest.approx(losses[3], rel=1e-3)
    chex.assert_trees_all_equal(kept.compute, jax.tree.map(lambda p: p.astype("bfloat16"), others))
    # Adam's first steps are as large as the rate, however small gradients were rounded.
    chex.assert_trees_all_close(params, others, atol=4e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", [TINY_VIT, TINY_UNET, TINY_CONVNEXT], ids=lambda w: w.name)
def test_a_fused_step_is_that_of_stock(workload):
    """The forward differs by rounding only; both have float32 parameters and compute in bfloat16."""
    losses = []
    for variant in ("stock", "fused"):
        program = workload.programs[variant]()
        state, step = program.init(jax.random.key(0)), jax.jit(program.step)
        for _ in range(3):
            state, loss = step(state, workload.make_batch(jax.random.key(1)))
            losses.append(float(loss))
    assert losses[3:] == pytest.approx(losses[:3], rel=2e-2)


def test_flops_are_those_of_the_formula():
    size, batch, tokens = MODELS["vit-b16"], 3, 197
    block = tokens * (4 * size.width**2 + 2 * size.width * size.hidden)
    block += 2 * tokens**2 * size.width  # logits, and their products with the values
    total = 196 * 16 * 16 * 3 * size.width + size.depth * block + size.width * 1000
    workload = end_to_end_jax.vit("b", size, batch=batch)
    assert workload.forward_flops() == 2 * batch * total


@pytest.mark.exhaustive
def test_a_block_under_fuse_has_the_gradients_of_stock():
    model = {}
    assert end_to_end.checked(TINY_EVOFORMER, model, save=None) is TINY_EVOFORMER
    assert 0 < model["errors"]["stock"] < 0.2 and model["must"] == 1.5
    for variant in ("stock", "fused"):
        program = TINY_EVOFORMER.programs[variant]()
        state = jax.eval_shape(program.init, jax.random.key(0))
        batch = jax.eval_shape(TINY_EVOFORMER.make_batch, jax.random.key(0))
        assert jax.eval_shape(program.step, state, batch)[0] == state


@pytest.mark.parametrize(("factor", "wrong"), [(1.003, False), (1.05, True), (jnp.nan, True)])
def test_gradients_may_be_twice_as_far_off_as_stock(monkeypatch, factor, wrong):
    truth = [jnp.ones(8), jnp.full(4, 2.0), jnp.zeros(3)]
    stock = [1.01 * truth[0], truth[1], truth[2] + 0.01]
    fused = [truth[0], factor * truth[1], truth[2] + 0.02]
    judged = end_to_end_fused._judged(truth, stock, fused)
    monkeypatch.setattr(end_to_end_fused, "errors", lambda workload: judged)
    failed = []
    workload = end_to_end.checked(TINY_EVOFORMER, {}, lambda *row: failed.append(row))
    assert set(workload.programs) == ({"stock"} if wrong else {"stock", "fused"})
    assert ["wrong: " in row["failed"] for _, _, row in failed] == [True] * wrong


def test_bars_of_steps_are_said():
    rows = {"stock": {"milliseconds": 3.0}, "fused": {"milliseconds": 2.0}}
    errors = {"stock": 0.01, "fused": 0.02, "excess": 0.0}
    model = {"model": "block", "must": 1.6, "aim": None, "errors": errors, "rows": rows}
    (line,) = end_to_end_report.bars({"models": [model, {"model": "without", "rows": rows}]})
    assert line.startswith("block under fuse: 1.500x stock, must 1.60, NOT met; ")
    (line,) = end_to_end_report.bars({"models": [model | {"must": 1.25, "aim": 1.35}]})
    assert "must 1.25, aim 1.35, met" in line
    (line,) = end_to_end_report.bars({"models": [model | {"rows": {"fused": {"failed": "wrong"}}}]})
    assert "not measured, must 1.60, NOT met" in line


def test_flops_of_loops_and_convolutions():
    def f(x, w, up):
        x, _ = jax.lax.scan(lambda c, _: (jax.jit(jnp.dot)(c, w), None), x, length=5)
        x = x.reshape(1, 4, 4, 8)
        return jax.lax.conv_transpose(x, up, (2, 2), "SAME")

    jaxpr = jax.make_jaxpr(f)(jnp.ones((16, 8)), jnp.ones((8, 8)), jnp.ones((2, 2, 8, 3)))
    # Each of 16 pixels becomes 4 pixels of 3 channels.
    expected = 5 * 2 * 16 * 8 * 8 + 2 * 16 * 4 * 8 * 3
    assert end_to_end_jax.product_flops(jaxpr.jaxpr) == expected


@pytest.fixture(scope="module")
def steps_section():
    """Returns the command's results on a CPU, where cuDNN's attention and CUPTI are missing."""
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_ROUND_MILLISECONDS", 30.0)
        end_to_end.run_jax(
            [TINY_VIT],
            ["ours", "stock", "cudnn", "torch"],
            lambda model, variant, row: rows.setdefault(variant, row),
        )
    model = {"model": "tiny", "batch": 4, "flops": 3 * TINY_VIT.forward_flops(), "rows": rows}
    return {**section_of(), "models": [model]}


@pytest.mark.exhaustive
def test_steps_train_and_are_timed(steps_section):
    rows = steps_section["models"][0]["rows"]
    assert set(rows) == {"ours", "stock", "cudnn"}
    assert "cuDNN" in rows["cudnn"]["failed"]
    for name in ("ours", "stock"):
        row = rows[name]
        assert abs(row["losses"][0] - 1.9) < 0.2  # log(7), less what the few warm-up steps gained
        assert row["losses"][-1] < 0.9 * row["losses"][0]
        assert min(row["rounds"]) <= row["milliseconds"] <= max(row["rounds"])
        assert row["planned_bytes"] > 3 * 4 * count_parameters(TINY_VIT, name)
        assert "CUPTI" in row["note"]
    json.dumps(steps_section)


def test_steps_wait_for_the_device_and_take_the_median(monkeypatch):
    now = iter([0, 3, 3, 6, 6, 16, 16, 46, 46, 66])  # seconds of warm-up, probe and three rounds
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(timing, "_ROUND_MILLISECONDS", 10_000.0)
    counts = []
    row = timing.steps(counts.append)
    assert counts == [3, 3, 10, 10, 10]
    assert row == {"milliseconds": 2000.0, "rounds": [1000.0, 3000.0, 2000.0], "steps": 10}


def test_kernels_are_summed_over_layers_and_traced_to_the_program(monkeypatch):
    hlo = """
    %fused { %add.1 = f32[] add(a, b), metadata={op_name="jit(step)/inner"} }
    %loop_add_fusion.5 = f32[8] fusion(p), calls=%fused, metadata={op_name="jit(step)/Dense_5/add"}
    ROOT %loop_add_fusion.6 = f32[8] fusion(p), metadata={op_name="jit(step)/Dense_6/add"}
    """
    timed = [("loop_add_fusion_5", 2.0), ("nvjet_64x4", 5.0), ("loop_add_fusion_6", 4.0), ("x", 1)]
    monkeypatch.setattr(end_to_end, "_KERNELS_KEPT", 2)
    row = end_to_end.summed(timed, end_to_end.sources(hlo))
    name, source = "loop_add_fusion", "jit(step)/Dense/add"
    assert row["kernels"] == [
        {"name": name, "source": source, "count": 2, "microseconds": 6.0},
        {"name": "nvjet_64x4", "source": "", "count": 1, "microseconds": 5.0},
    ]
    assert row["kinds"] == pytest.approx({"matrix products": 0.005, "other": 0.007})


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("sm90_xmma_wgrad_implicit_gemm_bf16", "convolutions"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NNT", "matrix products"),
        ("gemm_fusion_dot_42", "matrix products"),
        ("layer_norm_forward", "norms"),
        ("loop_convert_fusion_3", "other"),
    ],
)
def test_kernels_have_a_kind(kernel, kind):
    assert end_to_end_report.kind(kernel) == kind


def test_the_time_of_a_step_is_shared_out():
    kernels = [{"name": "nvjet", "source": "", "count": 2, "microseconds": 700.0}]
    kinds = {"matrix products": 0.7, "other": 0.2}
    row = {"milliseconds": 1.0, "kernels": kernels, "kinds": kinds}
    shares = {name: time for name, time in end_to_end_report.by_kind(row).items() if time}
    assert shares == pytest.approx({"matrix products": 0.7, "other": 0.2, "gaps": 0.1})
    header, rows = end_to_end_report.kernel_table(row)
    assert rows[0][:4] == ["0.70", "77.8%", "2", "nvjet"] and len(header) == len(rows[0])


@pytest.mark.exhaustive
def test_steps_are_reported_from_the_file_alone(steps_section, tmp_path, capsys):
    directory = tmp_path / "results"
    results.save_section(directory, "Some GPU", "end_to_end", steps_section)
    arguments, _, page = pages_of(directory)
    plot.main(arguments)
    assert (directory / "some-gpu-end_to_end.png").read_bytes().startswith(b"\x89PNG")
    rows = [line for line in page.read_text().splitlines() if line.startswith("| tiny, batch 4")]
    assert [line.split(":")[1].split("|")[0].strip() for line in rows] == [
        "jaxfused",
        "stock (Flax or Equinox) + Optax",
    ]

    # The saved figures are rounded.
    written = results.load(directory / "some-gpu.json")["benchmarks"]["end_to_end"]
    end_to_end_report.print_report(written)
    text = capsys.readouterr().out
    header, cells = end_to_end_report.table(steps_section)
    assert all(len(row) == len(header) for row in cells)
    assert "cuDNN" in text and "failed" in text
    ours = written["models"][0]["rows"]["ours"]["milliseconds"]
    assert f"{4e3 / ours:.0f}" in text  # images per second


def test_memory_is_the_allocators_or_in_brackets_the_plan():
    assert end_to_end_report.memory({"peak_bytes": 3 * 2**30, "planned_bytes": 2**30}) == "3.0"
    assert end_to_end_report.memory({"planned_bytes": 2**30}) == "(1.0)"


@pytest.mark.exhaustive
def test_torch_that_fails_says_why():
    """The result does not depend on whether timm is installed."""
    reason = end_to_end._run_torch("no_such_model", 1)["failed"]
    assert "torch" in reason or "no_such_model" in reason


@pytest.mark.parametrize("arguments", [["--models", "no_such"], ["--variants", "ours,no_such"]])
def test_unknown_models_and_variants_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        __main__.main(["end_to_end", *arguments])
    assert "no_such is not known" in capsys.readouterr().err


# --- several GPUs ---------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", parallel_bars.cases(parallel_programs.TINY))
def test_parallel_measures_each_case(monkeypatch, name):
    """All devices, here one, compute what the first computes alone."""
    monkeypatch.setattr(timing, "_ROUND_MILLISECONDS", 1.0)
    case = parallel_bars.cases(parallel_programs.TINY)[name]
    rows = []
    assert parallel_bars.run(name, case, jax.devices(), rows.append) == 0
    assert [row["model"] for row in rows if "x" in row] == list(case.variants)
    lines = [parallel_bars.line(row) for row in rows]
    assert all(name in line and "WRONG" not in line for line in lines)
    assert any(", must " in line for line in lines)


def test_parallel_runs_cases_in_processes(monkeypatch, capsys):
    def run(command, timeout):
        if "data" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(parallel_bars.subprocess, "run", run)
    assert parallel.main(["--tiny", "--cases", "tensor"]) == 0
    assert parallel.main(["--tiny", "--cases", "data", "fsdp"]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert "status 0" in first and "stopped after its" in second and "fsdp" in third


def test_spans_of_collectives_are_held_against_other_kernels():
    def line(name, *spans):
        events = [
            SimpleNamespace(name=kernel, start_ns=start, duration_ns=end - start)
            for kernel, start, end in spans
        ]
        return SimpleNamespace(name=name, events=events)

    nccl, others = parallel_timing.kernels(
        [
            line("Stream #1(Compute)", ("gemm", 0, 4), ("gemm", 4, 6), ("gemm", 10, 12)),
            line("Stream #2(Compute)", ("ncclDevKernel_AllReduce", 5, 11)),
            line("XLA Ops", ("all-reduce", 0, 20)),
        ]
    )
    assert (nccl, others) == ([(5, 11)], [(0, 6), (10, 12)])
    assert parallel_timing.overlap(nccl, others) == 2


def test_parallel_needs_two_gpus(capsys):
    assert parallel.main([]) == 2
    assert "two NVIDIA GPUs" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_training_from_files_is_held_against_its_parts(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(pipeline, "_ROUNDS", 2)
    monkeypatch.setattr(pipeline, "_STEPS", 1)
    monkeypatch.setattr(pipeline, "_DISTINCT", 8)
    flags = ["--model", "vit-digits", "--image-size", "8", "--batch-size", "4", "--workers", "0"]
    monkeypatch.setattr(pipeline, "MUST", 0.0)
    with jax.log_compiles():
        assert pipeline.main([*flags, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split("] ")[1].split(":")[0] for line in printed.splitlines() if "] " in line]
    assert rows == ["step", "decoding", "training"] and "share" in printed
    compiled = [r for r in caplog.messages if r.startswith("Compiling jit(train_step)")]
    assert len(compiled) == 1


def test_received_bytes_are_read_in_the_program():
    hlo = """
body.1 (p: f32[8]) -> f32[8] {
  %permute = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %sums = (f32[8]{0}, /*index=1*/bf16[4]{0}) all-reduce(%a, %b), to_apply=%add
  %gathered = (f32[4]{0}, f32[16]{0}) all-gather-start(%c), dimensions={0}
  %part = bf16[4]{0} reduce-scatter(%d), dimensions={0}, to_apply=%add
  %two = ((f32[8]{0}, f32[4]{0}), (f32[2]{0}, f32[1]{0})) reduce-scatter-start(%e, %f), to_apply=%add
  %loop = (f32[8]) while(%t), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"3"}}
}
"""
    assert parallel_hlo.received_bytes(hlo, 4) == {
        "collective-permute": 3 * 32.0,
        "all-reduce": 2 * 0.75 * (32 + 8),
        "all-gather": 0.75 * 64,
        "reduce-scatter": 3 * (8.0 + 12.0),
    }
    assert parallel_hlo.received_bytes(hlo, 1) == {}


@pytest.mark.exhaustive
def test_scaling_runs_tiny_programs_and_draws_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timing, "_ROUND_MILLISECONDS", 1.0)
    flags = ["--tiny", "--out", str(tmp_path), "--scaling"]
    assert parallel.main([*flags]) == 0
    [path] = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["benchmarks"]["parallel_scaling"]["scaling"]
    assert len(rows) >= 12 and not [row for row in rows if "error" in row]
    assert all(row["used"] == 1 for row in rows if row["gpus"] == 1)
    assert {row["kind"] for row in rows} == {"weak", "strong"}
    assert [*tmp_path.glob("*-scaling.png")] and "gated_mlp sequence" in capsys.readouterr().out


def test_paper_is_the_page(capsys):
    """docs/scaling.md has the table that the function computes."""
    assert parallel.main(["--paper"]) == 0
    page = Path(__file__).parents[2] / "docs" / "scaling.md"
    assert capsys.readouterr().out.strip() in page.read_text()
