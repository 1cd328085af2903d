"""Convolution kernels: implicit matrix products whose left operand is windows of images."""
