"""Every operator timed against its peers on the GPU at hand: `python -m benchmarks NAME...`.

One file per operator, benchmarks/<x>.py, with a function `cases(quick)`; everything else here
serves all of them. NOTES.md says how the numbers are made.
"""
