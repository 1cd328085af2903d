"""Whole training steps: on one GPU, on several, and how long they take to compile."""
