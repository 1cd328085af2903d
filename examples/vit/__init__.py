"""A Vision Transformer: `python -m examples.vit.train`, then `python -m examples.vit.predict`."""
