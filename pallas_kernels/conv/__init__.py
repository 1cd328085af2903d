"""Kernels of convolutions: implicit products whose operands are windows of a picture."""
