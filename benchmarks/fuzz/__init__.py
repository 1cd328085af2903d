"""Random configurations of every operator against float32 XLA: `python -m benchmarks fuzz`."""
