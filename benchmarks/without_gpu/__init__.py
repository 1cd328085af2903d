"""The kernels that programs become on an H200, seen on a machine without a GPU."""
