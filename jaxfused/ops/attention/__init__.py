"""Attention, and its masks."""
