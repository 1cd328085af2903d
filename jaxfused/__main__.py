"""`python -m jaxfused`: reports which parts of jaxfused run on this machine, and why others do not.

`python -m jaxfused --check` exits with 1 where this machine has a GPU that the kernels cannot use.
`python -m jaxfused tune` measures what is the fastest; see `jaxfused/tuning/command.py`.
"""

import errno
import functools
import importlib.metadata
import inspect
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, PartitionSpec

import jaxfused
from jaxfused import dispatch
from jaxfused.explanation import basis
from jaxfused.runtime import cuda_library, table
from jaxfused.tuning import command

USAGE = """usage: python -m jaxfused [--help | --check | tune PROGRAM]

               which implementation runs each operator here, and why the others do not
--check        versions, driver, device and faults; exits with 1 where kernels cannot use the GPU
tune PROGRAM   measures what is fastest on this GPU; see python -m jaxfused tune --help"""


class Example(NamedTuple):
    """A call of an operator, with the shapes of ViT-B/16 at 224 pixels or of a model that uses it."""

    call: Callable[..., Any]
    shapes: tuple[Any, ...]
    """Shapes of the arguments that get a gradient."""
    others: tuple[Any, ...] = ()
    """Shapes of the arguments that have no gradient."""

    def value_and_gradients(self, operands: Sequence[Any], others: Sequence[Any]) -> Any:
        """Returns the call's results, and the gradients of `operands` with the results as cotangents."""
        results, pullback = jax.vjp(lambda *moving: self.call(*moving, *others), *operands)
        return results, pullback(results)


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _block_sparse(x: jax.Array, w: jax.Array) -> jax.Array:
    return jaxfused.block_sparse_matmul(x, jaxfused.BlockSparse.from_dense(w, 128, count=14))


def _quantized(x: jax.Array, w: jax.Array) -> jax.Array:
    return jaxfused.quantized_matmul(x, jaxfused.quantize(w))


def _quantized_conv(x: jax.Array, w: jax.Array) -> jax.Array:
    images = jaxfused.quantize(x, axis=-1, per_tensor=True)
    weights = jaxfused.quantize(w.reshape(-1, w.shape[-1]), layout="rows")
    return jaxfused.quantized_conv(images, weights, kernel_size=w.shape[:-2], out_dtype=x.dtype)


def _sampled(logits: jax.Array, seeds: jax.Array) -> jax.Array:
    drawn: Any = jaxfused.sample(logits, seeds, top_p=0.9, logprobs=1)
    _, logprobs = drawn  # The token is an integer and has no gradient.
    return logprobs.chosen


def _diagonals(count: int) -> jax.Array:
    """Returns (row, column) indices of `count` elements of an 8192 x 8192 matrix, sorted by row."""
    index = jnp.arange(count)
    rows = index * 8192 // count
    return jnp.stack([rows, (rows + index * 1009) % 8192], axis=1)


def _sparse_matmul(data: jax.Array, b: jax.Array) -> jax.Array:
    places = _diagonals(len(data))
    return jaxfused.sparse_matmul(BCOO((data, places), shape=(8192, 8192), indices_sorted=True), b)


def _sampled_matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    places = _diagonals(2**16)
    pattern = BCOO((jnp.ones(2**16), places), shape=(8192, 8192), indices_sorted=True)
    return jaxfused.sampled_matmul(x, y, pattern).data


def _context_parallel(*heads: jax.Array) -> jax.Array:
    attend = functools.partial(jaxfused.context_parallel_attention, axis_name="context")
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, "context")
    return jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)(*heads)


def _expert_parallel(x: jax.Array, *experts: jax.Array) -> jax.Array:
    def of_device(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        routes = jaxfused.router(x[:, :8], 2)
        return jaxfused.expert_parallel_mlp(x, *routes, gate, up, down, axis_name="expert")

    mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("expert")
    return jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec)(x, *experts)


def _paged(query: jax.Array, *others: jax.Array) -> jax.Array:
    return jaxfused.paged_attention(query, *others, scale=query.shape[-1] ** -0.5, layout="PSKH")


def _ragged(
    query: jax.Array, k_pages: jax.Array, v_pages: jax.Array, *table: jax.Array
) -> jax.Array:
    scale = query.shape[-1] ** -0.5
    return jaxfused.ragged_paged_attention(query, (k_pages, v_pages), *table, sm_scale=scale)


def _appended(k_pages: jax.Array, v_pages: jax.Array, *others: jax.Array) -> Any:
    return jaxfused.append_to_pages((k_pages, v_pages), *others)


_ROWS = (_array(16384, 768),)
_POOLS = (_array(1024, 64, 8, 128), _array(1024, 64, 8, 128))
_TABLE = (_array(16, dtype=jnp.int32), _array(16, 64, dtype=jnp.int32))
_MAPS = (_array(8, 64, 64, 64),)
_HEADS = (_array(256, 197, 12, 64),)
_WIDE, _BACK = _array(768, 3072), _array(3072, 768)
_OF_WEIGHTS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
EXAMPLES: dict[str, Example] = {
    "append_to_pages": Example(
        _appended,
        (),
        (*_POOLS, *2 * (_array(16, 8, 128),), *_TABLE, _array(17, dtype=jnp.int32)),
    ),
    "blur_pool": Example(jaxfused.blur_pool, _MAPS),
    "carafe": Example(jaxfused.carafe, (*_MAPS, _array(8, 64, 64, 25))),
    "deform_conv": Example(
        jaxfused.deform_conv, (*_MAPS, _array(3, 3, 64, 64), _array(8, 64, 64, 18))
    ),
    "avg_pool": Example(lambda x: jaxfused.avg_pool(x, 2, strides=2), _MAPS),
    "batch_norm": Example(lambda x, p: jaxfused.batch_norm(x, p, p)[0], (*_MAPS, _array(64))),
    "batched_lora": Example(
        lambda x, a, b: jaxfused.batched_lora(x, a, b, jnp.arange(16384) % 8),
        (*_ROWS, _array(8, 768, 64), _array(8, 64, 3072)),
    ),
    "block_sparse_matmul": Example(_block_sparse, (*_ROWS, _WIDE)),
    "context_parallel_attention": Example(_context_parallel, 3 * _HEADS),
    "conv": Example(jaxfused.conv, (*_MAPS, _array(3, 3, 64, 64), _array(64))),
    "conv_transpose": Example(
        functools.partial(jaxfused.conv_transpose, strides=2),
        (*_MAPS, _array(2, 2, 64, 64), _array(64)),
    ),
    "dot_product_attention": Example(jaxfused.dot_product_attention, 3 * _HEADS),
    "expert_mlp": Example(
        lambda x, *w: jaxfused.expert_mlp(x, *jaxfused.router(x[:, :8], 2), *w),
        (*_ROWS, _array(8, 768, 3072), _array(8, 768, 3072), _array(8, 3072, 768)),
    ),
    "expert_parallel_mlp": Example(
        _expert_parallel,
        (*_ROWS, _array(8, 768, 3072), _array(8, 768, 3072), _array(8, 3072, 768)),
    ),
    "gated_mlp": Example(jaxfused.gated_mlp, (*_ROWS, _WIDE, _WIDE, _BACK)),
    "global_avg_pool": Example(jaxfused.global_avg_pool, _MAPS),
    "group_norm": Example(
        lambda x, p: jaxfused.group_norm(x, p, p, num_groups=32), (*_MAPS, _array(64))
    ),
    "layer_norm": Example(jaxfused.layer_norm, (*_ROWS, _array(768), _array(768))),
    "linear": Example(
        lambda *args: jaxfused.linear(*args, activation="gelu_tanh"),
        (*_ROWS, _WIDE, _array(3072)),
    ),
    "linear_softmax_cross_entropy": Example(
        jaxfused.linear_softmax_cross_entropy,
        (*_ROWS, _array(768, 32768)),
        (_array(16384, dtype=jnp.int32),),
    ),
    "max_pool": Example(lambda x: jaxfused.max_pool(x, 2, strides=2), _MAPS),
    "mlp": Example(jaxfused.mlp, (*_ROWS, _WIDE, _array(3072), _BACK, _array(768))),
    "qkv_projection": Example(
        lambda x, w: jaxfused.qkv_projection(x, w, heads=12),
        (_array(50432, 768), _array(768, 2304)),
    ),
    "quantize_rows": Example(lambda x: jaxfused.quantize_rows(x).dequantize(), _ROWS),
    "quantized_conv": Example(_quantized_conv, (*_MAPS, _array(3, 3, 64, 64))),
    "quantized_matmul": Example(_quantized, (*_ROWS, _WIDE)),
    "ragged_dot": Example(
        lambda x, w: jaxfused.ragged_dot(x, w, jnp.full(8, 2048, jnp.int32)),
        (*_ROWS, _array(8, 768, 3072)),
    ),
    "ragged_dot_general": Example(
        lambda x, dy: jaxfused.ragged_dot_general(x, dy, jnp.full(8, 2048, jnp.int32), _OF_WEIGHTS),
        (*_ROWS, _array(16384, 3072)),
    ),
    "ragged_mlp": Example(
        lambda x, gate, up, down: jaxfused.ragged_mlp(
            x, gate, up, down, jnp.full(8, 2048, jnp.int32)
        ),
        (*_ROWS, *2 * (_array(8, 768, 3072),), _array(8, 3072, 768)),
    ),
    "rms_norm": Example(jaxfused.rms_norm, (*_ROWS, _array(768))),
    "rope": Example(lambda q, k: jaxfused.rope(q, k, rotary_dim=32), 2 * _HEADS),
    "paged_attention": Example(_paged, (_array(16, 32, 128),), (*_POOLS, *_TABLE)),
    "ragged_paged_attention": Example(
        _ragged, (_array(2063, 32, 128),), (*_POOLS, *_TABLE, _array(17, dtype=jnp.int32))
    ),
    "sample": Example(
        _sampled,
        (_array(64, 128256, dtype=jnp.float32),),
        (_array(64, dtype=jnp.int32),),
    ),
    "sampled_matmul": Example(_sampled_matmul, (_array(8192, 512), _array(512, 8192))),
    "segmentation_loss": Example(
        jaxfused.segmentation_loss, (_array(8, 64, 64),), (_array(8, 64, 64, dtype=jnp.int32),)
    ),
    "sigmoid_cross_entropy": Example(
        jaxfused.sigmoid_cross_entropy,
        (_array(4096, 1000),),
        (_array(4096, 1000, dtype=jnp.int32),),
    ),
    "softmax_cross_entropy": Example(
        jaxfused.softmax_cross_entropy, (_array(4096, 32768),), (_array(4096, dtype=jnp.int32),)
    ),
    "sparse24_matmul": Example(jaxfused.sparse24_matmul, (*_ROWS, _WIDE)),
    "sparse_matmul": Example(_sparse_matmul, (_array(2**16), _array(8192, 512))),
    "spatial_pyramid_pool": Example(jaxfused.spatial_pyramid_pool, _MAPS),
    "pixel_shuffle": Example(jaxfused.pixel_shuffle, _MAPS),
    "pixel_unshuffle": Example(jaxfused.pixel_unshuffle, _MAPS),
    "resize": Example(lambda x: jaxfused.resize(x, 48), _MAPS),
    "upsample": Example(jaxfused.upsample, _MAPS),
}
"""One example for each public function that takes `implementation`."""


def operators(device: dispatch.Device) -> Iterator[tuple[str, jaxfused.Explanation]]:
    """Yields each public function that takes `implementation`, with its example's explanation."""
    for name, function in inspect.getmembers(jaxfused):
        if inspect.isfunction(function) and "implementation" in _parameters(function):
            yield name, _explanation(EXAMPLES[name], device)


def _explanation(example: Example, device: dispatch.Device) -> jaxfused.Explanation:
    """Returns the explanation of an example's call and of its gradient."""
    with dispatch.assume(device):
        return jaxfused.explain(example.value_and_gradients, example.shapes, example.others)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def describe(device: dispatch.Device) -> str:
    """Returns a description of the device in one line."""
    if device.compute_capability is None:
        return f"{device.name} ({device.platform})"
    major, minor = device.compute_capability
    return f"{device.name}, sm_{major}{minor}, {device.multiprocessors} multiprocessors"


def versions() -> str:
    """Returns the versions of the packages on which the chosen implementations depend."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "numpy")
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    found = [f"{name} {installed[name]}" for name in names if name in installed]
    return ", ".join([f"jaxfused {jaxfused.__version__}", *found])


def measured_choices(device: dispatch.Device) -> list[str]:
    """Returns the lines of the report about the autotuning table's files."""
    if device.compute_capability is None:
        return []
    measured = table.load(device)
    lines = [f"measured      {measured}"] if measured.entries else []
    lines += [f"              {file}" for file in measured.files]
    try:
        path = table.user_path(device)
    except table.Refused as refusal:
        lines.append(f"              {refusal}")
    else:
        if path not in [file.path for file in measured.files]:
            lines.append(f"              nothing is in {path}; `python -m jaxfused tune` makes it")
    return ["measured" + lines[0][8:], *lines[1:]]


def faults(device: dispatch.Device, driver: str | None, library: str | None) -> list[str]:
    """Returns why kernels cannot use this machine's GPU, each fault with its remedy.

    Args:
      device: the device that JAX computes on.
      driver: the NVIDIA driver's version, None where there is no driver.
      library: why the CUDA library cannot be used, None where it can.
    """
    found = []
    if device.platform != "gpu":
        if driver is not None:
            found.append(
                f"there is an NVIDIA driver ({driver}), but JAX computes on {device.platform};"
                " install JAX's plugin with pip install 'jaxfused[cuda13]', and leave JAX_PLATFORMS"
                " unset"
            )
        return found
    if library is not None:
        found.append(library)
    with warnings.catch_warnings(record=True) as refused:
        warnings.simplefilter("always")
        # Tables are read on first use, with a warning for each refused file.
        len(table.load(device).entries)
    return found + [str(warning.message) for warning in refused]


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver, or None where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    versions = result.stdout.split()
    return versions[0] if result.returncode == 0 and versions else None


def check(device: dispatch.Device) -> int:
    """Prints versions, device and faults of this machine; returns 1 if there are faults, else 0."""
    driver = driver_version()
    print(f"versions      {versions()}")
    print(f"driver        {driver or 'there is no NVIDIA driver'}")
    print(f"device        {describe(device)}")
    library = cuda_library.why_unavailable()
    built = f"for {', '.join(cuda_library.architectures())}" if library is None else library
    print(f"CUDA library  {built}")
    found = faults(device, driver, library)
    for fault in found:
        print(f"fault         {fault}")
    if not found:
        runs = "kernels can run" if device.platform == "gpu" else "without a GPU all runs in XLA"
        print(f"no fault      {runs}")
    return 1 if found else 0


def report(device: dispatch.Device) -> str:
    """Returns the command's report: each operator's kernels at one shape, forward and backward."""
    lines = [
        f"versions      {versions()}",
        f"device        {describe(device)}",
        f"CUDA library  {cuda_library.why_unavailable() or cuda_library.PATH}",
        *measured_choices(device),
    ]
    for name, explanation in operators(device):
        example = EXAMPLES[name]
        operands = jax.tree.leaves(example.shapes or example.others)
        shapes = ", ".join(f"{s.dtype}{list(s.shape)}" for s in operands)
        lines += ["", f"{name} of {shapes}"]
        for choice, _ in explanation.calls:
            lines.append(f"  {choice.stage} runs on {choice.implementation!r}")
            for text in basis(choice):
                lines += textwrap.wrap(
                    text, 100, initial_indent=" " * 6, subsequent_indent=" " * 10
                )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    if arguments and arguments[0] == "tune":
        return command.main(arguments[1:])
    if arguments == ["--check"]:
        return check(dispatch.current_device())
    if arguments in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    if arguments:
        print(f"{arguments[0]!r} is not known, or stands among others\n\n{USAGE}")
        return 2
    print(report(dispatch.current_device()))
    return 0


def run() -> int:
    """Runs `main`, and exits quietly if the reader of its output, such as `head`, has stopped."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again at exit, which would raise: stdout is replaced by /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"jaxfused: the output could not be written ({error.strerror})", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
