"""One file per operator: its cases, the implementations to run, and the target ratios (bars)."""
