"""Grouped products: runs of rows, each multiplied by a matrix of its own."""
