"""Convolutions: dense, depthwise, transposed, quantised."""
