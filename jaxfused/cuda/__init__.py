"""The CUDA C kernels of ffi/, called through the XLA FFI: one module an operator.

They serve the GPUs and shapes that the Pallas kernels do not.
"""

from jaxfused.cuda import layer_norm, library, rope

__all__ = ["layer_norm", "library", "rope"]
