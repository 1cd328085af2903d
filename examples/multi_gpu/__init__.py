"""The Vision Transformer of examples/vit on many devices, of one host or of several."""
