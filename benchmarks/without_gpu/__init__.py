"""Compiles programs for an H200 on a machine without a GPU, and lists their kernels."""
