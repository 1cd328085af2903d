"""Random realistic shapes, the default against stock XLA: `python -m benchmarks sweep OPERATOR`."""
