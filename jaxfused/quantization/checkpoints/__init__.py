"""Quantised checkpoints of other libraries: a module for each format, and for each kind of file."""
