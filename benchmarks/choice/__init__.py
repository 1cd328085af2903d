"""Measures the choice of implementations: its size, its effect on recorded times, its table."""
