"""What `jaxfused.nnx` and `jaxfused.linen` share: one file an operator, without parameters."""
