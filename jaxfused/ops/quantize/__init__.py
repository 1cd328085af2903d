"""Arrays to quantised arrays."""
