"""Operators that draw tokens from logits."""
