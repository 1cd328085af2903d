"""Products in float8: scaling state, quantised operands, and the operators on them."""
