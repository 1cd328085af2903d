"""Registers few_rows.cu's handler from a library of its own (FEW_SO), if the main library lacks it."""
import ctypes, os
import jax
from jaxfused.runtime import cuda_library as c

path = os.environ.get("FEW_SO")
whole = ctypes.cdll.LoadLibrary(str(c.PATH))
if path and not hasattr(whole, "jaxfused_few_rows"):
    jax.ffi.register_ffi_target("jaxfused_few_rows", jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(path).jaxfused_few_rows), platform="CUDA")
    c.TARGETS = tuple(t for t in c.TARGETS if t != "jaxfused_few_rows")
