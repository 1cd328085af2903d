"""Times our default against stock XLA at random realistic shapes: `python -m benchmarks sweep`."""
