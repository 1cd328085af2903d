"""Every operator timed against its peers on the GPU at hand: `python -m benchmarks NAME...`.

One file per operator, benchmarks/<x>.py, with a function `cases(quick)`; everything else here
serves all of them. Whole training steps: `python -m benchmarks end_to_end`. NOTES.md says how the
numbers are made.
"""
