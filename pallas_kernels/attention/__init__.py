"""Attention: flash attention for long sequences, kernels of their own for few keys."""
