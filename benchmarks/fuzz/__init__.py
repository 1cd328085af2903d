"""Tests random options of every operator against XLA in float32: `python -m benchmarks fuzz`."""
