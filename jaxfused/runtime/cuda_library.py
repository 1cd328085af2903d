"""The shared library of the CUDA kernels, which is found, loaded and registered on first use.

The library is built from ffi/ when jaxfused is installed on a machine with nvcc. It does not depend on
Python: one file serves every Python version, and every jaxlib whose XLA FFI is at least as new as
  that of
the jaxlib it was built with.
"""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

PATH = Path(__file__).with_name("libjaxfused.so")

VECTOR_BYTES = 16
"""Bytes of the widest load or store of one thread; aligned rows start at multiples of it."""
PLATFORM = "CUDA"
"""XLA's name of the platform that the kernels run on."""

TARGETS = (
    "jaxfused_append",
    "jaxfused_attention_forward",
    "jaxfused_attention_backward",
    "jaxfused_bias_activation",
    "jaxfused_bias_activation_backward",
    "jaxfused_cached_attention",
    "jaxfused_cross_entropy_forward",
    "jaxfused_cross_entropy_backward",
    "jaxfused_csr_dense",
    "jaxfused_csr_matmul",
    "jaxfused_csr_starts",
    "jaxfused_factored_moments",
    "jaxfused_factored_sums",
    "jaxfused_factored_updates",
    "jaxfused_few_rows",
    "jaxfused_gradient_norm",
    "jaxfused_depthwise_conv",
    "jaxfused_depthwise_conv1d",
    "jaxfused_depthwise_conv1d_backward",
    "jaxfused_depthwise_conv_mma",
    "jaxfused_depthwise_conv_mma_weights",
    "jaxfused_depthwise_conv_weights",
    "jaxfused_group_norm_forward",
    "jaxfused_group_norm_backward",
    "jaxfused_group_norm_slab",
    "jaxfused_image_pass",
    "jaxfused_image_statistics",
    "jaxfused_largest",
    "jaxfused_layer_norm_forward",
    "jaxfused_layer_norm_backward",
    "jaxfused_linear",
    "jaxfused_muon_momentum",
    "jaxfused_optimizer_step",
    "jaxfused_max_pool",
    "jaxfused_max_pool_gradient",
    "jaxfused_quantize",
    "jaxfused_quantize_rows",
    "jaxfused_quantized_matmul",
    "jaxfused_quantized_matmul_both",
    "jaxfused_rope",
    "jaxfused_sample",
    "jaxfused_sampled_matmul",
    "jaxfused_scale_rows",
    "jaxfused_segmentation_forward",
    "jaxfused_segmentation_backward",
    "jaxfused_segmentation_loss",
    "jaxfused_sparse24_matmul",
    "jaxfused_top_log_probs",
    "jaxfused_upsample",
)
"""The symbol of every handler in the library, under which its FFI target is registered."""


DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
"""Dtypes that every kernel supports."""


def why_unfit(
    compute_capability: tuple[int, int] | None,
    dtype: Any = None,
    residual_dtype: Any = None,
    *,
    whose: str = "x has",
) -> str | None:
    """Returns None for a GPU and dtypes that the kernels are compiled for, else the reason.

    Args:
      dtype: an operand's dtype, or None; `whose` is the subject of the reason.
      residual_dtype: the residual's dtype, which must equal `dtype`, or None.
    """
    if compute_capability is None:
        return "it needs an NVIDIA GPU"
    if compute_capability < (7, 5):
        major, minor = compute_capability
        return f"it needs compute capability 7.5 or later, and this GPU has {major}.{minor}"
    if dtype is not None and (reason := why_dtype_unfit(dtype, whose)):
        return reason
    if residual_dtype is None or residual_dtype == dtype:
        return None
    return (
        f"it takes a residual of x's dtype, and x has {jnp.dtype(dtype)},"
        f" residual {jnp.dtype(residual_dtype)}"
    )


def why_dtype_unfit(dtype: Any, whose: str = "x has") -> str | None:
    """Returns None for a dtype that all kernels take, else the reason, whose subject is `whose`."""
    if dtype in DTYPES:
        return None
    return f"it takes float32, bfloat16 and float16, and {whose} dtype {jnp.dtype(dtype)}"


@functools.cache
def why_unavailable() -> str | None:
    """Returns None if the kernels can be called, else the reason."""
    loaded = _load(PATH)
    return loaded if isinstance(loaded, str) else _why_not_built_for_these_gpus()


def architectures() -> tuple[str, ...]:
    """Returns the GPUs that the kernels were compiled for, as CMake names them: "90-real", "120"."""
    loaded = _load(PATH)
    assert not isinstance(loaded, str), loaded
    loaded.jaxfused_architectures.restype = ctypes.c_char_p
    return tuple(loaded.jaxfused_architectures().decode().split(","))


def runs_on(architecture: str, compute_capability: tuple[int, int]) -> bool:
    """Returns whether a GPU runs code of an architecture in CMake's notation.

    Machine code ("-real") runs on GPUs of the same major version and at least its minor version; PTX
    ("-virtual") on GPUs of at least its version.
    """
    name, _, kind = architecture.partition("-")
    built = divmod(int(name), 10)
    if kind != "virtual" and built[0] == compute_capability[0] and built <= compute_capability:
        return True
    return kind != "real" and built <= compute_capability


def why_not_built_from(
    least: tuple[int, int], compute_capability: tuple[int, int] | None
) -> str | None:
    """Returns None if a GPU runs code that was compiled for `least` or later, else the reason.

    Code compiled for an earlier GPU runs on later ones too, but does not use the features of `least`.
    """
    if reason := why_unavailable():
        return reason
    built = architectures()
    if compute_capability is None or any(
        divmod(int(name.partition("-")[0]), 10) >= least and runs_on(name, compute_capability)
        for name in built
    ):
        return None
    major, minor = least
    return (
        f"it needs code for compute capability {major}.{minor} or later, and the CUDA library was built"
        f" for {', '.join(built)}; install jaxfused again on this machine"
    )


def _why_not_built_for_these_gpus() -> str | None:
    """Returns None if the kernels run on all GPUs that JAX sees on this host, else the reason."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return None
    built = architectures()
    for device in jax.local_devices():
        major, minor = map(int, device.compute_capability.split("."))
        if not any(runs_on(architecture, (major, minor)) for architecture in built):
            return (
                f"the CUDA library was built for {', '.join(built)}, and this GPU has compute"
                f" capability {major}.{minor}; install jaxfused again on this machine, or with"
                " -C cmake.define.JAXFUSED_CUDA_ARCHITECTURES=all"
            )
    return None


def cublaslt_name() -> str:
    """Returns the file name of the cuBLASLt that the kernels open, or "" if built without cuBLASLt."""
    loaded = _load(PATH)
    assert not isinstance(loaded, str), loaded
    loaded.jaxfused_cublaslt_name.restype = ctypes.c_char_p
    return loaded.jaxfused_cublaslt_name().decode()


@functools.cache
def register() -> None:
    """Makes the kernels known to XLA; calls after the first do nothing.

    Raises:
      RuntimeError: the library is not there or does not fit the installed jaxlib.
    """
    loaded = _load(PATH)
    if isinstance(loaded, str):
        raise RuntimeError(f"jaxfused: the CUDA kernels cannot be used: {loaded}.")
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(loaded, target))
        jax.ffi.register_ffi_target(target, handler, platform=PLATFORM)


def operands(
    like: jax.Array, *arrays: jax.Array | None, absent_dtype: Any = None
) -> list[jax.Array]:
    """Returns a handler's operands, with an array of no elements for each absent one.

    The empty array is made from `like`, so that in a `jax.shard_map` it varies over the same mesh axes.
    """
    absent = jnp.zeros_like(like, shape=(0,), dtype=absent_dtype)
    return [absent if array is None else array for array in arrays]


def readable(vector: jax.Array | None) -> jax.Array | None:
    """Returns a bias or scale in a dtype that handlers read; None for None."""
    return vector if vector is None or vector.dtype in DTYPES else vector.astype(jnp.float32)


def _load(path: Path) -> ctypes.CDLL | str:
    """Returns the library, or why it cannot be used."""
    if not path.exists():
        return (
            "jaxfused was installed without its CUDA library, because there was no nvcc; install it"
            " again with nvcc on PATH"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the CUDA library does not load on this system ({error}); install jaxfused again"
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.jaxfused_xla_ffi_version(ctypes.byref(major), ctypes.byref(minor))
    built = major.value, minor.value
    return _version_mismatch(built, running_ffi_version()) or _missing_target(library) or library


def _missing_target(library: ctypes.CDLL) -> str | None:
    symbols = (*TARGETS, "jaxfused_architectures")
    missing = [symbol for symbol in symbols if not hasattr(library, symbol)]
    if not missing:
        return None
    return (
        f"the CUDA library is not of this version of jaxfused, for it lacks {missing[0]}; build it"
        " again with `make ffi`, or install jaxfused again"
    )


def running_ffi_version() -> tuple[int, int]:
    """Returns (major, minor) of the XLA FFI in the installed jaxlib, read from jaxlib's header."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.findall(rf"^#define XLA_FFI_API_{part} (\d+)$", header, re.MULTILINE)[0])
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def _version_mismatch(built: tuple[int, int], running: tuple[int, int]) -> str | None:
    if built[0] == running[0] and built <= running:
        return None
    return (
        f"the CUDA library was built against version {built[0]}.{built[1]} of the XLA FFI, but the"
        f" installed jaxlib {jaxlib.__version__} has version {running[0]}.{running[1]}; install"
        " jaxfused again beside this jaxlib"
    )
