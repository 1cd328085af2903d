"""Matrix products with an epilogue: one mainloop, and the operators built on it."""
