"""Pooling and resizing of images."""
