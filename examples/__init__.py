"""Training examples of jaxfused; run them from the root of the repository."""
