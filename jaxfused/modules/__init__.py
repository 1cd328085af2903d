"""What `jaxfused.nnx` and `jaxfused.linen` share: one file for each operator, without parameters."""
