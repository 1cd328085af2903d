"""Kernels that programs become on an H200, found on a machine without a GPU."""
