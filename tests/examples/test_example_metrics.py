"""Scores of examples/unet against torchmetrics' and their definitions."""

import numpy as np
import pytest

from examples.unet.metrics import confusion, mean_iou_by_picture, scores
from tests.recorded import values

CLASSES = 5


def recorded():
    results = values.load("segmentation.npz")["scores"].results
    pairs = zip(results["found"].astype(int), results["truth"].astype(int), strict=True)
    return results, list(pairs)


def test_scores_are_torchmetrics():
    results, pairs = recorded()
    found = scores(pairs, CLASSES)
    # torchmetrics shows 0 for the IoU of a class that is nowhere, and leaves it out of the mean.
    assert np.isnan(found.iou[4]) and results["iou"][4] == 0
    np.testing.assert_allclose(found.iou[:4], results["iou"][:4], rtol=1e-6)
    np.testing.assert_allclose(found.dice, results["dice"], rtol=1e-6)
    np.testing.assert_allclose(found.mean_iou, results["mean_iou"], rtol=1e-6)
    np.testing.assert_allclose(found.mean_dice, results["mean_dice"], rtol=1e-6)
    ignoring = scores(pairs, CLASSES, ignore_index=0)
    np.testing.assert_allclose(ignoring.mean_iou, results["mean_iou_without_0"], rtol=1e-6)
    by_picture = mean_iou_by_picture(pairs, CLASSES)
    np.testing.assert_allclose(by_picture, results["mean_iou_by_picture"], rtol=1e-6)


def test_a_class_that_is_nowhere_has_no_score_and_a_false_alarm_scores_0():
    nothing, one = np.zeros((4, 4), int), np.eye(4, dtype=int)
    assert np.isnan(scores([(nothing, nothing)], 2).iou[1])
    assert scores([(nothing, nothing)], 2).mean_iou == 1
    assert scores([(one, nothing)], 2).iou[1] == scores([(one, nothing)], 2).dice[1] == 0
    assert np.isnan(scores([], 2).mean_iou) and np.isnan(mean_iou_by_picture([], 2))
    ignored = scores([(one, np.where(one, 255, 0))], 2, ignore_index=255)
    assert ignored.iou[0] == 1 and np.isnan(ignored.iou[1])


def test_numbers_that_are_no_class_are_refused():
    a = np.array([[0, 1], [2, 1]])
    with pytest.raises(ValueError, match="truth has class numbers 0 to 2, but there are 2 classes"):
        confusion(np.zeros_like(a), a, 2)
    with pytest.raises(ValueError, match=r"shape \(1, 2\) and truth \(2, 2\)"):
        confusion(a[:1], a, 3)
