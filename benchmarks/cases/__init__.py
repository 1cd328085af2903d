"""One file for each operator: its cases, what runs them, and the bars to meet."""
