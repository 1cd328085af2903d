"""Matrix products with an epilogue: linear, mlp, qkv_projection, and their weights' gradients."""
