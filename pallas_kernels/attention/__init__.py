"""Attention: flash attention for any length, and separate kernels for few keys or few queries."""
