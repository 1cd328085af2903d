"""Norms: of rows, of groups and of batches."""
