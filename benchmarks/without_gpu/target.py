"""An absent H200: XLA's compiler for it, and programs compiled ahead of time.

The compiler is in JAX's CUDA plugin and needs no driver. `make without-gpu` puts the plugin into a
folder of its own, so that JAX does not look for a GPU in every other program.
"""

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxfused import dispatch
from jaxfused.ops.linear import cublaslt
from jaxfused.runtime import cuda_library

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)

_BUILD = Path(__file__).parents[2] / "build"
PLUGIN = _BUILD / "without_gpu"
_QUICK_LIBRARY = _BUILD / "ffi-quick" / "libjaxfused.so"

_WITHOUT_GPU: dict[str, Any] = {"xla_gpu_autotune_level": 0}


def why_unavailable() -> str | None:
    """Returns None where programs can be compiled for an H200, else the reason."""
    if not (PLUGIN / "jax_plugins").exists():
        return f"JAX's CUDA plugin is not in {PLUGIN}; `make without-gpu` puts it there"
    return None


def prepare() -> Any:
    """Returns an H200 to compile for, not to run on; must come before JAX lists its devices."""
    return prepare_host(1)[0]


def prepare_host(count: int) -> Sequence[Any]:
    """Returns the H200s of one host to compile for, as `prepare` does one."""
    jax.config.update("jax_platforms", "cpu")
    # Operators are split over devices where JAX sees several.
    jax.config.update("jax_num_cpu_devices", count)
    sys.path.insert(0, str(PLUGIN))
    # Mosaic links its kernels to this library; its own search, at import, preceded this path.
    ctypes.CDLL(str(PLUGIN / "jax_cuda13_plugin/libmosaic_gpu_runtime.so"), ctypes.RTLD_GLOBAL)
    if cuda_library.why_unavailable() is not None and _QUICK_LIBRARY.exists():
        cuda_library.PATH = _QUICK_LIBRARY
        cuda_library.why_unavailable.cache_clear()
    if cuda_library.why_unavailable() is None:
        cuda_library.register()
        # A machine with a GPU has cuBLASLt from the plugin's wheels; here nothing is called.
        cublaslt.why_unavailable = lambda: None  # type: ignore[assignment]
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x1x{count}",
        target_config=Path(__file__).with_name("h200.txtpb").read_text(),
    )
    return topology.devices


def lower_for(device: Any, f: Callable[..., Any], shapes: Sequence[Any]) -> Any:
    """Lowers `f` with the kernels chosen for an H200; `shapes` are trees of arrays or shapes."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    operands = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tuple(shapes)
    )
    with dispatch.assume(H200):
        return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))


def compile(
    lowered: Any,
    *,
    triton_products: bool = False,
    dump: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a lowered program; `dump` is a folder for its texts, `options` are XLA's."""
    given = {**(options or {}), **_WITHOUT_GPU, "xla_gpu_enable_triton_gemm": triton_products}
    if dump is not None:
        given |= {"xla_dump_to": str(dump), "xla_dump_emitter_re": ".*"}
    return lowered.compile(compiler_options=given)
