"""Running a case: compilation, checks, timing, peers, and what the GPU can do at most."""
