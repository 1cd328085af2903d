"""A fuzz of `jaxfused.fuse`: random programs around each pattern that it knows, judged in float64."""
