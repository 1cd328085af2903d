"""Every operator timed against its peers on the GPU at hand: `python -m benchmarks NAME...`.

One file per operator, benchmarks/cases/<x>.py, with a function `cases(quick)`; everything else here
serves all of them. Commands with options of their own: `end_to_end` times whole training steps, `sweep`
random shapes, `compile` compilation, and `fuzz` looks for wrong results. METHOD.md says how the numbers
are made, LAB.md what was learned, lab/ what was tried.
"""
