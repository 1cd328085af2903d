"""Records torchvision's DeepLabV3 and torchmetrics' scores in segmentation.npz.

Run in an environment with torch, torchvision 0.29.1 and torchmetrics 1.9.0:
`python -m tests.recorded.record_segmentation`.
"""

import torch
import torchmetrics
import torchvision
from torchmetrics import segmentation
from torchvision.models.segmentation import deeplabv3_resnet50

from tests.recorded import deeplab, recorder, values
from tests.recorded.recorder import given

CLASSES = 5
SIZES = {"DeepLabV3": (65, 97), "DeepLabV3 of whole factors": (64, 96)}


def models() -> None:
    model = deeplabv3_resnet50(
        weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    ).eval()
    shapes = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            shapes[name] = list(tensor.shape)
            tensor.copy_(torch.from_numpy(deeplab.array(name, tuple(tensor.shape))))
    for name, (height, width) in SIZES.items():
        with torch.no_grad():
            y = model(given(name, "images", 2, 3, height, width))
        # Every eighth pixel: a file of logits at all pixels would be large.
        recorder.ROWS[name] = (
            dict(shapes=shapes),
            {head: logits[:, :, ::8, ::8].numpy() for head, logits in y.items()},
        )


def scores() -> None:
    """Records the scores of three pictures, in which class 4 is nowhere and class 3 in one only."""
    shape = (3, 16, 20)
    truth, found = ((given("scores", key, *shape).abs() * 1.3).long() for key in ("truth", "found"))
    truth, found = truth.clamp(max=2), found.clamp(max=2)
    truth[1, :4] = 3
    found[1, 2:6] = 3
    found[2, 0, 0] = 3
    jaccard = torchmetrics.JaccardIndex("multiclass", num_classes=CLASSES, average="none")
    per_class = jaccard(found, truth)
    macro = torchmetrics.JaccardIndex("multiclass", num_classes=CLASSES)(found, truth)
    ignored = torchmetrics.JaccardIndex("multiclass", num_classes=CLASSES, ignore_index=0)
    dice = segmentation.DiceScore(
        CLASSES, average="none", aggregation_level="global", input_format="index"
    )
    dice_macro = segmentation.DiceScore(
        CLASSES, average="macro", aggregation_level="global", input_format="index"
    )
    by_picture = segmentation.MeanIoU(CLASSES, input_format="index")(found, truth)
    recorder.ROWS["scores"] = (
        {},
        dict(
            truth=truth.numpy(),
            found=found.numpy(),
            iou=per_class.numpy(),
            mean_iou=macro.numpy(),
            mean_iou_by_picture=by_picture.numpy(),
            mean_iou_without_0=ignored(found, truth).numpy(),
            dice=dice(found, truth).numpy(),
            mean_dice=dice_macro(found, truth).numpy(),
        ),
    )


def main() -> None:
    models()
    scores()
    versions = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "torchmetrics": torchmetrics.__version__,
    }
    values.save("segmentation.npz", versions, recorder.ROWS)


if __name__ == "__main__":
    main()
