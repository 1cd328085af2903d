"""Convolutions: dense, depthwise, deformable, transposed and quantised."""
