"""Quantisation of whole models to 8 and 4 bits, and the quantised checkpoints of other libraries."""

from jaxfused.quantization.checkpoints.jax_arrays import from_aqt as from_aqt
from jaxfused.quantization.checkpoints.jax_arrays import from_qwix as from_qwix
from jaxfused.quantization.checkpoints.layer import QuantizedLayer as QuantizedLayer
from jaxfused.quantization.checkpoints.load import formats as formats
from jaxfused.quantization.checkpoints.load import from_tensors as from_tensors
from jaxfused.quantization.checkpoints.load import load as load
from jaxfused.quantization.checkpoints.save import save as save
from jaxfused.quantization.checkpoints.stack import stack as stack
from jaxfused.quantization.checkpoints.stored import read_metadata as read_metadata
from jaxfused.quantization.checkpoints.stored import read_tensors as read_tensors
from jaxfused.quantization.with_kernels import with_kernels as with_kernels
from jaxfused.runtime.quantized_array import CODEBOOKS as CODEBOOKS
