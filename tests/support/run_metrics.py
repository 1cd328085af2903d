"""Metrics that an example's run recorded, and their comparison with another run's."""

import json

import numpy as np


def metrics(run):
    """Returns a dict for each line of the run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_numbers(run, wanted):
    """Compares both losses, both gradient norms, and the parameters after both steps."""
    actual = metrics(run)
    assert [r.keys() for r in actual] == [r.keys() for r in wanted]
    for mine, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-5)
