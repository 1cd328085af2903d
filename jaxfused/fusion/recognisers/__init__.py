"""Recognisers of operators in a program: one operator, or a few similar ones, in each file."""
