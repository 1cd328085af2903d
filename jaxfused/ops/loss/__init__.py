"""Losses over classes and masks."""
