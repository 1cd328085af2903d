"""Records torch's resampling, torchvision's deformable convolution and timm's blur pool in resample.npz.

Run in an environment with torch, torchvision 0.29.1 and timm 1.0.31:
`python -m tests.recorded.record_resample`.
"""

import timm
import torch
import torchvision
from timm.layers import BlurPool2d
from torch.nn import functional as F
from torchvision.ops import deform_conv2d

from tests.recorded import recorder, values
from tests.recorded.recorder import given

RESIZES = {
    "bilinear by size": dict(size=(12, 5), mode="bilinear"),
    "bilinear by factor": dict(scale_factor=(1.5, 1.7), mode="bilinear"),
    "bilinear with corners": dict(size=(14, 3), mode="bilinear", align_corners=True),
    "bilinear to one": dict(size=(1, 1), mode="bilinear", align_corners=True),
    "bilinear, antialiased": dict(size=(3, 11), mode="bilinear", antialias=True),
    "bicubic": dict(size=(12, 5), mode="bicubic"),
    "bicubic with corners": dict(size=(9, 12), mode="bicubic", align_corners=True),
    "bicubic, antialiased": dict(size=(3, 13), mode="bicubic", antialias=True),
    "nearest": dict(size=(3, 13), mode="nearest-exact"),
    "nearest_floor": dict(size=(3, 13), mode="nearest"),
    "nearest_floor by factor": dict(scale_factor=(1.5, 0.6), mode="nearest"),
}
DEFORMED = {
    "deform_conv": dict(groups=1, offsets=1, stride=1, padding=1, dilation=1, mask=True),
    "deform_conv in groups": dict(
        groups=2, offsets=2, stride=(2, 1), padding=(2, 0), dilation=(1, 2), mask=True
    ),
    "deform_conv without mask": dict(
        groups=1, offsets=4, stride=1, padding=0, dilation=1, mask=False
    ),
}


def resizes() -> None:
    for name, options in RESIZES.items():
        x = given(name, "x", 2, 3, 7, 8).requires_grad_()
        y = F.interpolate(x, **options)
        (dx,) = torch.autograd.grad(y, x, given(name, "dy", *y.shape))
        recorder.ROWS[name] = (dict(options=options), dict(y=y.detach(), dx=dx))


def deformed() -> None:
    for name, o in DEFORMED.items():
        x = given(name, "x", 2, 4, 6, 7)
        w = given(name, "w", 6, 4 // o["groups"], 3, 3)
        steps = {key: o[key] for key in ("stride", "padding", "dilation")}
        height, width = F.conv2d(x, w, groups=o["groups"], **steps).shape[2:]
        offset = 1.5 * given(name, "offset", 2, o["offsets"] * 18, height, width)
        mask = given(name, "mask", 2, o["offsets"] * 9, height, width) if o["mask"] else None
        bias = given(name, "bias", 6)
        arrays = dict(x=x, offset=offset, w=w, bias=bias)
        if mask is not None:
            arrays["mask"] = mask
        for array in arrays.values():
            array.requires_grad_()
        y = deform_conv2d(mask=mask, input=x, offset=offset, weight=w, bias=bias, **steps)
        gradients = torch.autograd.grad(y, list(arrays.values()), given(name, "dy", *y.shape))
        results = {f"d{key}": g for key, g in zip(arrays, gradients, strict=True)}
        recorder.ROWS[name] = (dict(options=o), dict(y=y.detach(), **results))


def others() -> None:
    x = given("blur", "x", 2, 3, 7, 8)
    recorder.ROWS["blur"] = ({}, dict(y=BlurPool2d(3)(x), y5=BlurPool2d(3, filt_size=5)(x)))
    x = given("shuffle", "x", 2, 12, 3, 4)
    y = F.pixel_shuffle(x, 2)
    recorder.ROWS["shuffle"] = (
        {},
        dict(y=y, back=F.pixel_unshuffle(given("shuffle", "y", *y.shape), 2)),
    )


def main() -> None:
    resizes()
    deformed()
    others()
    versions = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
    }
    rows = {
        name: (row, {key: value.numpy() for key, value in results.items()})
        for name, (row, results) in recorder.ROWS.items()
    }
    values.save("resample.npz", versions, rows)


if __name__ == "__main__":
    main()
