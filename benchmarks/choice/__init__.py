"""Measures how implementations are chosen: code size, effect on recorded times, and a table."""
