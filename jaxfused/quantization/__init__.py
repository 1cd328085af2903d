"""Quantisation of whole models to 8 and 4 bits: rules, calibration, smoothing, error feedback."""

from jaxfused.runtime.quantized_array import CODEBOOKS as CODEBOOKS
