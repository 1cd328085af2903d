"""The tuner, which measures implementations and configs and writes the autotuning tables."""
