"""Operators that work row by row and are bound by memory: norms and rope."""
