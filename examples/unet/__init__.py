"""Segmentation of images with a U-Net: `python -m examples.unet.train`, then `.predict IN OUT`.

`.export` makes one file of a run or of torchvision's DeepLabV3; `.segment` and `.serve` infer from it.
"""
