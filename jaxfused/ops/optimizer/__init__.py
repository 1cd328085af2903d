"""Optimizer steps over all leaves of a tree."""
