"""Kernels that work row by row and are bound by memory bandwidth: norms, row quantisation, rope."""
