"""Matrix products with an epilogue: one mainloop, and the operators that stand on it."""
