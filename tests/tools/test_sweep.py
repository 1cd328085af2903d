"""The sweep, the fuzz and the compile benchmark at CPU sizes: their cases, verdicts and output."""

import dataclasses
import itertools
import json
import os
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from benchmarks import __main__
from benchmarks.fuzz import judge as fuzz_judge
from benchmarks.fuzz import operators as fuzz_operators
from benchmarks.fuzz import programs as fuzz_programs
from benchmarks.fuzz.problem import Operand, Problem
from benchmarks.run import timing
from benchmarks.run.draw import Draw
from benchmarks.sweep import configs, judge, lowering, programs, quantized_programs, report
from benchmarks.whole import compile_time
from examples.vit.model import ViTSize
from jaxfused.__main__ import EXAMPLES
from jaxfused.tuning.timing import split_at_markers
from tests.support.arrays import put
from tests.support.grids import parametrize

# --- the sweep: what is drawn ---------------------------------------------------------------------


@pytest.mark.parametrize("operator", configs.OPERATORS)
def test_sweep_draws_cases_that_fit_and_can_be_pasted(operator):
    drawn = [configs.drawn(operator, 1, index) for index in range(30)]
    assert len(set(drawn)) > 25
    for index, config in enumerate(drawn):
        assert config.fits()
        assert configs.label(config) == operator
        assert configs.from_line(configs.to_line(config)) == config
        assert configs.drawn(operator, 1, index) == config
    assert drawn != [configs.drawn(operator, 2, index) for index in range(30)]


@parametrize("operator", configs.OPERATORS, quick=slice(None, None, 2))
def test_sweep_has_each_case_in_every_form(operator):
    """Our function, stock's forms and the peers give results and gradients of the same shapes."""
    for index in range(3):
        config = configs.drawn(operator, 1, index).tiny()
        written = programs.of(config)
        arrays = jax.eval_shape(written.make_inputs, jax.random.key(0))
        forms = [written.ours, *written.stock.values(), written.plain()]
        shapes = [
            [(a.shape, a.dtype) for a in jax.eval_shape(written.whole(form, True), *arrays)]
            for form in forms
        ]
        assert all(other == shapes[0] for other in shapes), config
        assert len(shapes[0]) == written.cotangents + written.differentiable
        true = jax.eval_shape(written.in_float32(), *arrays)
        assert [(a.shape, a.dtype) for a in true] == [(s, jnp.float32) for s, _ in shapes[0]]
        judged = jax.eval_shape(written.judged, true[: written.cotangents])
        assert [a.shape for a in judged] == [a.shape for a in true[: written.cotangents]]
        gradients = shapes[0][written.cotangents :]
        operands = [(a.shape, a.dtype) for a in arrays[: written.differentiable]]
        assert gradients == operands


def test_draw_is_the_same_for_a_name():
    def sizes(seed, name):
        draw = Draw(seed, name)
        return [draw.size(1, 1000) for _ in range(20)]

    assert sizes(1, "a") == sizes(1, "a")
    assert len({tuple(sizes(*which)) for which in ((1, "a"), (2, "a"), (1, "b"))}) == 3
    assert {Draw(3, str(n)).size(1, 2) for n in range(50)} == {1, 2}


# --- the sweep: how it judges ---------------------------------------------------------------------


def test_sweep_of_tiny_shapes(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    run = ["sweep", "rms_norm", "--count", "2", "--dry-run", "--out", str(path)]
    assert __main__.main(run) == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert {"commit", "dirty", "device", "versions", "date", "arguments"} <= set(run)
    assert [(e["operator"], e["direction"]) for e in run["entries"]] == [
        ("rms_norm", direction) for direction in (lowering.FORWARD, lowering.WHOLE) * 2
    ]
    assert all(e["status"] == "ok" and e["error"] <= 1 for e in run["entries"])
    capsys.readouterr()
    assert __main__.main(["sweep", "--report", str(path), str(path)]) == 0
    printed = capsys.readouterr().out
    # If a case is in two files, or twice in one, the last entry counts.
    row = next(line for line in printed.splitlines() if line.startswith("rms_norm "))
    assert int(row.split()[3]) == len({e["case"] for e in run["entries"]})
    case = run["entries"][-1]["case"]
    assert f"sweep --case '{case}' --gradient forward+backward" in printed


QUANTISED = [name for name in configs.OPERATORS if name.startswith(("quantize", "fp8_"))]


@parametrize("operator", QUANTISED, quick=(2,))
def test_sweep_of_quantised_operators_is_right_in_every_form(operator):
    """Stock's forms are judged by the rule that a sweep applies to our function."""
    for index in range(4):
        config = configs.drawn(operator, 3, index).tiny()
        written = programs.of(config)
        args = jax.jit(written.make_inputs)(jax.random.key(1))
        plain, ours = (written.whole(form, True) for form in (written.plain(), written.ours))
        true, expected = (jax.jit(f)(*args) for f in (written.in_float32(), plain))
        forms = {"ours": ours} | {n: written.whole(f, True) for n, f in written.stock.items()}
        for name, form in forms.items():
            results = jax.jit(form)(*args)
            sides = (written.judged(side) for side in (results, expected, true))
            figures = lowering.compare(*sides, strict=written.cotangents)
            dtypes = written.units or [a.dtype for a in results]
            share, why = judge._worst(np.array(figures), dtypes)
            assert not why, (config, name, share)


def test_sweep_has_no_gradient_where_nothing_gets_one():
    line = configs.to_line(configs.drawn("quantize_rows", 1, 0).tiny())
    lowered = lowering.lower(line, (lowering.FORWARD, lowering.WHOLE), "cpu")
    assert set(lowered.by_direction) == {lowering.FORWARD}


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantised_results_are_compared_in_steps_of_their_format(name):
    if name == "int8":
        numbers = np.arange(-127, 128, dtype=np.int8)
    else:
        codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(name))
        numbers = np.unique(codes[np.isfinite(codes.astype(np.float32))].astype(np.float32))
    (steps,) = quantized_programs.in_steps(name, (put(numbers, jnp.float32),))
    # -0 and 0 are one number, and all others are one step apart.
    np.testing.assert_array_equal(np.diff(steps), 1)
    halfway = (numbers[:-1].astype(np.float32) + numbers[1:]) / 2
    (between,) = quantized_programs.in_steps(name, (put(halfway, jnp.float32),))
    np.testing.assert_array_equal(between, steps[:-1] + 0.5)


@pytest.mark.parametrize(("steps", "wrong"), [(0, False), (1, True), (-2, True)])
def test_a_number_that_is_rounded_to_the_wrong_side_is_wrong(steps, wrong):
    """Stock's largest error is half a step here, so a whole step is allowed."""
    true = put([3.3, 127.0, -5.5], jnp.float32)
    plain = put([3, 127, -6], jnp.int8)
    ours = plain.at[0].add(-steps)
    figures = lowering.compare(
        *((quantized_programs.in_steps("int8", (a,))) for a in (ours, plain, true)), strict=1
    )
    assert bool(judge._worst(np.array(figures), [jnp.float32])[1]) == wrong


def test_weights_come_from_memory_however_few_they_are():
    mebibyte = 2**20
    assert judge._count_of_sets(mebibyte, 0) == timing.input_sets(mebibyte) == 16
    assert judge._count_of_sets(3 * mebibyte, 2 * mebibyte) == 64
    assert judge._count_of_sets(40 * mebibyte, 32 * mebibyte) == timing.input_sets(40 * mebibyte)
    assert judge._count_of_sets(mebibyte // 8, mebibyte // 16) == 64
    # If each call reads large other arrays, fewer sets of inputs suffice.
    assert judge._count_of_sets(256 * mebibyte, mebibyte // 16) == 4


def test_sweep_says_what_raised(monkeypatch, capsys):
    monkeypatch.setattr(jaxfused, "rms_norm", lambda *_, **__: 1 / 0)
    assert __main__.main(["sweep", "rms_norm", "--count", "1", "--dry-run"]) == 1
    assert "raised: RuntimeError: ZeroDivisionError" in capsys.readouterr().out


def test_sweep_lowers_again_what_a_dead_process_took_along(monkeypatch):
    """If the first process of the pool dies twice at the second case, only that case is lost."""
    started = []

    class Pool:
        def __init__(self, *_, **__):
            started.append(self)

        def submit(self, lower, line):
            future = Future()
            if line == "bad":
                future.set_exception(BrokenProcessPool())
            else:
                future.set_result(line)
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(lowering, "processes", Pool)
    workers = lowering.Workers(2, ["a", "bad", "b"], (lowering.FORWARD,), "cpu")
    assert workers.result(0) == "a"
    with pytest.raises(RuntimeError, match="a process died"):
        workers.result(1)
    assert workers.result(2) == "b"
    assert len(started) == 3


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        # error, plain jax.numpy's error, largest value, count of non-finite values, excused error
        ((0.0, 0.0, 1.0, 0.0, 0.0), False),
        ((0.01, 0.005, 1.0, 0.0, 0.0), False),
        ((0.0078125, 0.0, 1.0, 0.0, 0.0), False),
        ((0.03, 0.01, 1.0, 0.0, 0.0), True),
        ((0.03, 0.01, 1.0, 0.0, 0.01), False),
        ((0.0, 0.0, 1.0, 1.0, 0.0), True),
        ((np.nan, 0.0, 1.0, 0.0, 0.0), True),
    ],
)
def test_sweep_allows_twice_the_error_of_plain_and_a_unit(figures, wrong):
    _, why = judge._worst(np.array([figures]), [jnp.bfloat16])
    assert bool(why) == wrong


def test_compare_sees_errors_and_misplaced_nans():
    truth = put([1.0, 2.0, jnp.nan, -4.0])
    ours = put([1.0, 2.5, 3.0, -4.0])
    plain = put([1.25, 2.0, jnp.nan, -4.0])
    figures = lowering.compare((ours, ours), (plain, plain), (truth, truth), strict=1)
    np.testing.assert_array_equal(
        figures[:, :4], [[0.5, 0.25, 4.0, 1.0], [0.5 / 2, 0.25 / 2, 4.0, 1.0]]
    )
    # A kink excuses a share of the root mean square of 1, 2, 0 and -4.
    np.testing.assert_allclose(figures[:, 4], [0.0, 2.0**-11 * (21 / 4) ** 0.5], rtol=1e-6)


def test_same_program_is_recognised():
    def one(x, w):
        return jnp.tanh(x @ w).sum(0)

    def other(a, b):
        hidden = jnp.einsum("ij,jk->ik", a, b)
        return jnp.tanh(hidden).sum(0)

    def text(f, shape=(8, 16)):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (16, 4))]
        return judge.program_text(jax.jit(f).lower(*shapes).compile())

    assert text(one) == text(other)
    assert text(one) != text(lambda x, w: 2 * one(x, w))
    assert text(one) != text(one, (9, 16))


def entry(microseconds, same_program=None, status="ok", direction="forward"):
    case = json.dumps(sorted(microseconds.items()))
    return {
        "operator": "linear",
        "direction": direction,
        "case": case,
        "status": status,
        "why": "because",
        "microseconds": microseconds,
        "memory": dict.fromkeys(microseconds, 2**20),
        "same_program": same_program,
    }


def test_report_counts_the_fastest_form_and_half_a_microsecond():
    entries = [
        entry({"ours": 10.0, "stock a": 20.0, "stock b": 30.0}),
        # If ours is the same program as the fastest form, times do not matter.
        entry({"ours": 10.0, "stock a": 9.0}, same_program="stock a"),
        # Less than half a microsecond is no loss.
        entry({"ours": 2.4, "stock a": 2.0}),
        entry({"ours": 24.0, "stock a": 20.0, "cudnn": 36.0, "bfloat16": 12.0}),
        entry({}, status="wrong"),
    ]
    assert [report.over_stock(e) for e in entries[:4]] == [2.0, 1.0, 2.0 / 2.4, 20.0 / 24.0]
    row = next(line for line in report.text(entries).splitlines() if " XLA " in line)
    assert row.split()[3:] == ["4", "0.83", "0.92", "0.83", "1", "2", "1", "0"]
    row = next(line for line in report.text(entries).splitlines() if " cuDNN " in line)
    assert row.split()[3:6] == ["1", "1.50", "1.50"]
    row = next(line for line in report.text(entries).splitlines() if " bf16 " in line)
    assert row.split()[3:8] == ["1", "0.50", "0.50", "0.50", "1"]
    assert report.percentile([0.0, 10.0, 20.0], 25) == 5.0


# --- the sweep: how it times ----------------------------------------------------------------------


def test_kernels_are_split_at_markers(monkeypatch):
    """Two programs alternate; the kernels of each are between markers, and the median is taken."""
    milliseconds = itertools.count(1)

    def measure(f, *, aggregate, iterations):
        assert not aggregate

        def measured():
            f()
            return None, [
                [(name, float(next(milliseconds))) for name in ("one", "m", "two", "three", "m")]
                for _ in range(iterations)
            ]

        return measured

    monkeypatch.setattr(timing.profiler, "measure", measure)
    calls = {"a": lambda x: x + 1, "b": lambda x: x + 2}
    samples = timing.interleaved(calls, [(jnp.ones(3),)], seconds=0.0)
    assert samples["a"].microseconds == [1e3, 6e3, 11e3, 16e3]
    assert samples["a"].kernels == [("one", 8.5e3)]
    assert samples["b"].microseconds == [7e3, 17e3, 27e3, 37e3]
    assert [name for name, _ in samples["b"].kernels] == ["two", "three"]
    with pytest.raises(RuntimeError, match="2 programs ran, and 1 markers"):
        split_at_markers([("one", 1.0), ("m", 1.0)], 2)


# --- the fuzz -------------------------------------------------------------------------------------


def test_fuzz_of_a_few_cases(monkeypatch, capsys):
    # The fuzz changes the environment for its processes; monkeypatch restores it.
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    run = ["fuzz", "rms_norm", "rope", "--cases", "3", "--jobs", "0", "--verbose"]
    # Other implementations are refused without a GPU.
    run += ["--implementation", "xla"]
    assert __main__.main(run) == 0
    printed = capsys.readouterr().out
    assert "3 cases, 0 wrong, 0 raised, 0 different between runs" in printed
    line = next(line for line in printed.splitlines() if "--case" in line)
    pasted = line.split("'")[1]
    assert __main__.main(["fuzz", "--jobs", "0", "--case", pasted]) == 0


def test_fuzz_draws_every_operator_and_traces_it():
    names = [*fuzz_operators.OPERATORS]
    known = {*EXAMPLES} - {"dot_product_attention"} | {"attention", "depthwise_conv", "optimizer"}
    # conv also draws transposed ones; the pools run in XLA on every device; a token has no error.
    known -= {"conv_transpose", "avg_pool", "global_avg_pool", "spatial_pyramid_pool", "sample"}
    known -= {"blur_pool", "carafe", "deform_conv", "pixel_shuffle", "pixel_unshuffle", "resize"}
    # Their kernels are those of ragged_dot, of attention over pages, and of attention; pages are places.
    known -= {
        "batched_lora",
        "expert_mlp",
        "expert_parallel_mlp",
        "ragged_dot_general",
        "paged_attention",
        "ragged_paged_attention",
        "append_to_pages",
        "context_parallel_attention",
    }
    assert {*names} == known
    seen = {}
    for index in range(250):
        options = fuzz_operators.drawn(1, index, names)
        assert options == json.loads(json.dumps(options)), "a case has to survive its line"
        seen.setdefault(options["operator"], []).append(options)
    assert set(seen) == set(names)
    for options in (of_one[0] for of_one in seen.values()):
        made = fuzz_judge.Programs(fuzz_operators.problem_of(options), options)
        assert made.results
        default = fuzz_programs.How(None, False)
        ours = made.problem.whole(default, made.batched, False)
        results = jax.eval_shape(ours, made.shapes, made.problem.constants, None)
        assert [r.shape for r in results] == [r.shape for r in made.results]


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_fuzz_knows_the_words_of_a_refusal(precision):
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError) as refused:
        jaxfused.linear(x, x.T, precision=precision, implementation="cuda")
    assert fuzz_programs.is_refusal(refused.value, "cuda")
    assert not fuzz_programs.is_refusal(refused.value, "pallas")
    with pytest.raises(ValueError) as invalid:
        jaxfused.linear(x, x, precision=precision, implementation="cuda")
    assert not fuzz_programs.is_refusal(invalid.value, "cuda")


OPTIONS = {"operator": "relu", "data": 3, "vmap": None, "vmap_size": 1, "gradient": True}


def verdict(monkeypatch, function, **more):
    """Returns the verdict on a case whose `function` takes (x, bias, is_ours)."""

    def run(operands, constants, how):
        del constants
        return function(operands["x"], operands["bias"], how.implementation is None)

    operands = {"x": Operand((40, 50), "bfloat16"), "bias": Operand((50,), "float32")}
    problem = Problem(run, operands, {}, **more)
    monkeypatch.setattr(fuzz_judge.operators, "problem_of", lambda options: problem)
    return fuzz_judge.judge(OPTIONS)


def relu_with_a_kink_at(threshold, x, bias, is_ours):
    preactivation = x.astype(jnp.float32) + bias
    above = preactivation > (threshold if is_ours else 0.0)
    return jnp.where(above, preactivation, 0.0).astype(x.dtype)


def test_fuzz_forgives_what_rounding_does_at_a_kink(monkeypatch):
    shifted = partial(relu_with_a_kink_at, 0.02)
    assert verdict(monkeypatch, shifted).status == fuzz_judge.WRONG
    assert verdict(monkeypatch, shifted, kinks=("bias",)).status == fuzz_judge.OK
    far = partial(relu_with_a_kink_at, 0.5)
    assert verdict(monkeypatch, far, kinks=("bias",)).status == fuzz_judge.WRONG


def test_fuzz_tells_wrong_raised_refused_and_different_apart(monkeypatch):
    def off_in_a_row(x, bias, is_ours):
        y = x * bias.astype(x.dtype)
        return y.at[7].multiply(1.05) if is_ours else y

    assert verdict(monkeypatch, off_in_a_row).status == fuzz_judge.WRONG

    def raises(x, bias, is_ours):
        assert not is_ours
        return x * bias.astype(x.dtype)

    assert verdict(monkeypatch, raises).status == fuzz_judge.RAISED

    counter = itertools.count()

    def changes(x, bias, is_ours):
        y = x * bias.astype(x.dtype)
        if not is_ours:
            return y
        scalar = jax.ShapeDtypeStruct((), jnp.bfloat16)
        noise = jax.pure_callback(lambda: np.array(1e-3 * next(counter), jnp.bfloat16), scalar)
        return y + jax.lax.stop_gradient(noise)

    assert verdict(monkeypatch, changes).status == fuzz_judge.DIFFERENT

    def not_a_number(x, bias, is_ours):
        y = x * bias.astype(x.dtype)
        return y.at[3, 4].set(jnp.nan) if is_ours else y

    nan = verdict(monkeypatch, not_a_number)
    assert nan.status == fuzz_judge.WRONG
    assert "values of (40, 50) are NaN or Inf where XLA's are not" in nan.why


# --- compile --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", compile_time.LAYERS)
@pytest.mark.usefixtures("hopper")
def test_compile_counts_lowered_kernels(monkeypatch, variant):
    tiny = ViTSize(patch=16, depth=1, width=64, heads=1, hidden=64)
    monkeypatch.setitem(compile_time.SIZES, "tiny", tiny)
    job = compile_time.Job("tiny", variant, 1, 2, 32, "sgd", "cuda")
    measured = compile_time.measure(job)
    assert set(measured["seconds"]) == {"trace", "lower"}
    assert measured["total"] == sum(measured["seconds"].values())
    assert (measured["kernels"] > 0) == (variant == "ours")
    assert measured["functions"] <= measured["kernels"]
    line = compile_time._line(measured, [measured])
    assert line.split()[:3] == ["tiny", "1", variant]


def test_kernels_of_a_text_are_counted():
    call = (
        'stablehlo.custom_call @mosaic_gpu_v2(%{0}) {{module = "{1}"}} :'
        " (tensor<{2}>) -> tensor<4xf32>"
    )
    text = "\n".join(
        [
            "  func.func public @main(%arg0: tensor<4xf32>) {",
            "    %0 = " + call.format("arg0", "a", "4xf32"),
            "    %1 = " + call.format("0", "b", "4xf32"),
            "    stablehlo.custom_call @jaxfused_rope(%1)",
            "  func.func private @inner(%arg0: tensor<8xf32>) {",
            "    %0 = " + call.format("arg0", "a", "8xf32"),
        ]
    )
    counted = compile_time.count_kernels(text)
    assert counted | {"text_bytes": 0} == {
        "kernels": 3,
        "functions": 2,
        "shapes": 2,
        "cuda_calls": 1,
        "partitioned_calls": 0,
        "text_bytes": 0,
    }


def test_job_travels_as_plain_values():
    job = compile_time.Job("vit-s16", "ours", 1, 2, 32, "sgd", None)
    assert json.loads(json.dumps(dataclasses.asdict(job))) == vars(job)
