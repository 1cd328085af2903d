"""Quantisation of arrays: quantize, quantize_rows and fake_quantize."""
