"""Segmentation of images with a U-Net: `python -m examples.unet.train`, then `.predict IN OUT`."""
