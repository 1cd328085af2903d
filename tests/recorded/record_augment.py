"""Records transforms of torchvision v2 in augment.npz.

Run in an environment with torch and torchvision 0.29.1: `python -m tests.recorded.record_augment`.
"""

from typing import Any

import numpy as np
import torch
import torchvision
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as T
from torchvision.transforms.v2 import functional as F

from tests.recorded import values
from tests.recorded.augment_images import BOXES, CROP, DISPLACEMENT, ENDS, POLICY, image, mask

BILINEAR, NEAREST = InterpolationMode.BILINEAR, InterpolationMode.NEAREST
BICUBIC = InterpolationMode.BICUBIC
WARP: dict[str, Any] = dict(angle=-30.0, translate=[2, -1], scale=1.2, shear=[10.0, 5.0])
ROWS: dict[str, Any] = {}


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).movedim(-1, 0)


def record(name: str, f: Any, *, floats: bool = True, levels: bool = True) -> None:
    """Records f of the float image and of the uint8 image, [H, W, C]."""
    results = {}
    if floats:
        results["float32"] = f(tensor(image() / np.float32(255))).movedim(0, -1).numpy()
    if levels:
        results["uint8"] = f(tensor(image())).movedim(0, -1).numpy()
    ROWS[name] = ({}, results)


def geometry() -> None:
    record("affine", lambda x: F.affine(x, **WARP, interpolation=BILINEAR))
    record("rotate", lambda x: F.rotate(x, 30.0, interpolation=BILINEAR))
    record(
        "perspective",
        lambda x: F.perspective(x, [[0, 0], [12, 0], [12, 11], [0, 11]], ENDS, BILINEAR),
    )
    displacement = torch.from_numpy(DISPLACEMENT / np.array([13, 12]) * 2).float()[None]
    record("elastic", lambda x: F.elastic(x, displacement, BILINEAR))
    for name, mode in (("bilinear", BILINEAR), ("bicubic", BICUBIC)):
        record(
            f"crop {name}",
            lambda x, mode=mode: F.resized_crop(x, *CROP, [5, 6], mode, antialias=True),
        )
        record(
            f"larger crop {name}",
            lambda x, mode=mode: F.resized_crop(x, *CROP, [17, 16], mode, antialias=True),
        )
    labels = tv_tensors.Mask(torch.from_numpy(mask()))
    ROWS["affine of a mask"] = (
        {},
        dict(y=F.affine(labels, **WARP, interpolation=NEAREST).numpy()),
    )
    boxes = tv_tensors.BoundingBoxes(torch.tensor(BOXES), format="XYXY", canvas_size=(12, 13))
    ROWS["boxes"] = (
        {},
        dict(
            affine=F.affine(boxes, **WARP).numpy(),
            rotate=F.rotate(boxes, 30.0).numpy(),
            crop=F.resized_crop(boxes, *CROP, [5, 6]).numpy(),
            flip=F.horizontal_flip(boxes).numpy(),
        ),
    )


def colours() -> None:
    record("brightness", lambda x: F.adjust_brightness(x, 1.4))
    record("contrast", lambda x: F.adjust_contrast(x, 0.6))
    record("saturation", lambda x: F.adjust_saturation(x, 1.7))
    record("hue", lambda x: F.adjust_hue(x, 0.2))
    record("gamma", lambda x: F.adjust_gamma(x, 1.4, 0.9))
    record("grayscale", lambda x: F.rgb_to_grayscale(x, 3))
    record("invert", F.invert)
    record("posterize", lambda x: F.posterize(x, 3), floats=False)
    record("solarize", lambda x: F.solarize(x, 100), floats=False)
    record("equalize", F.equalize, floats=False)
    record("autocontrast", F.autocontrast)
    record("blur", lambda x: F.gaussian_blur(x, [5, 5], [1.3, 1.3]))
    record("sharpness", lambda x: F.adjust_sharpness(x, 1.7))
    record("normalize", lambda x: F.normalize(x, [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]), levels=False)


def policies() -> None:
    policy = T.RandAugment()
    for name, magnitude in POLICY.items():
        record(
            f"policy {name}",
            lambda x, name=name, magnitude=magnitude: policy._apply_image_or_video_transform(
                x, name, magnitude, interpolation=NEAREST, fill={}
            ),
            floats=False,
        )


if __name__ == "__main__":
    geometry()
    colours()
    policies()
    versions = {"torchvision": torchvision.__version__, "torch": torch.__version__}
    values.save("augment.npz", versions, ROWS)
