"""A fuzz of `jaxfused.fuse`: random programs around each of its patterns, judged in float64."""
