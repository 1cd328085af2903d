"""One file per operator: its cases, the implementations to run, and the bars to meet."""
