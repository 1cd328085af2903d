"""What references and kernels must agree on: masks, dropout bits, activations, scalings of rope."""
