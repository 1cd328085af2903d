"""The tools of benchmarks.choice, without a GPU: what they count, what they measure, how they judge."""

import ast
import itertools
import json

import pytest

from benchmarks.choice import measured, replay, size, tune_sweep
from benchmarks.report import results
from benchmarks.sweep import configs
from tests.support.grids import parametrize


def test_constants_are_the_literals_that_steer():
    text = "def estimate(m):\n    'Of 3 rows.'\n    return 1.5 * m if m > 64 else -1 + 2 * m"
    [function] = ast.parse(text).body
    assert size.constants(function) == 2
    assert size.lines(function) == 2


@parametrize("with_configs", (False, True), quick=(0,))
def test_choices_reach_the_regimes_and_no_limits(with_configs):
    found = size.reached(size.roots(with_configs=with_configs))
    assert size.Place("jaxfused.ops.norm.layer_norm_regimes", "forward") in found
    assert size.Place("jaxfused.ops.conv.dense_conv_regimes", "_FEW_CHANNELS") in found
    assert not [place for place in found if place.name.endswith("why_not")]


def _entry(ours, stock, kernel):
    microseconds = {"ours": ours, "stock": stock}
    return {
        "microseconds": microseconds,
        "kernels": {"ours": [[kernel, ours]]},
        "same_program": None,
    }


@pytest.mark.parametrize(
    ("runs", "entry", "expected"),
    [
        (("pallas", "pallas"), _entry(10.0, 20.0, "mosaic_gpu"), (1.0, "same")),
        (("pallas", "xla"), _entry(10.0, 20.0, "mosaic_gpu"), (0.5, "measured")),
        (("xla", "pallas"), _entry(10.0, 20.0, "mosaic_gpu"), (2.0, "measured")),
        (("xla", "pallas"), _entry(20.0, 20.0, "loop_fusion"), (1.0, "unknown")),
    ],
)
def test_a_change_is_judged_by_recorded_times(runs, entry, expected):
    before, now = ([{"runs": name, "able": ["pallas", "xla"]}] for name in runs)
    ratio, how = replay._ratio(entry, before, now)
    assert (pytest.approx(ratio), how) == expected


def test_the_table_is_measured_at_layers_of_models_before_draws():
    cases = list(itertools.islice(tune_sweep._cases(44), 200))
    assert cases[0] == configs.Norm("layer_norm", 64, 197, 384, "bfloat16", False, True)
    assert all(configs.from_line(configs.to_line(case)) == case for case in cases)
    operators = {configs.label(case) for case in cases}
    assert operators >= {
        "mlp",
        "gated_mlp",
        "attention",
        "qkv_projection",
        "rope",
        "linear",
        "conv",
    }


def test_recorded_stages_are_found_again_and_judged():
    file = results.DIRECTORY / "choice" / "nvidia-h200-models.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    attention = [r for r in records if r["stage"].startswith("dot_product_attention")][:2]
    judged = list(measured._judged(attention))
    assert [each.record for each in judged] == attention
    assert all(each.chosen == "pallas" and each.now == each.then == 1.0 for each in judged)
