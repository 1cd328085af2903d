"""Rotary position embeddings: the rotation, its tables and scalings."""
