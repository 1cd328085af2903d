"""Numbers in 8 and 4 bits: how they are stored, how arrays and whole models are quantised."""
