"""Code that `jaxfused.nnx` and `jaxfused.linen` share: one file an operator, without parameters."""
