"""One file for inference: weights, programs compiled for one machine, and a portable program.

It is a zip file without compression, whose arrays and programs are read when they are needed:

- manifest.json: format, machine, network, and the list of the other members;
- weights/N: the bytes of an array;
- portable/HxW: StableHLO for any batch, made of operations that every platform has (`jax.export`);
- compiled/BxHxW: the executable of one batch, with the kernels of the machine that compiled it
  (`jax.experimental.serialize_executable`).

A compiled program is machine code, and JAX reads it by pickle: load only files that you trust.
"""

import contextlib
import json
import platform
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import jaxfused
from examples.errors import ExampleError
from examples.packages import needed
from examples.unet.network import Network
from jaxfused import dispatch
from jaxfused.runtime import cuda_library

FORMAT = 1
_CPU = dispatch.Device("cpu", "cpu", None, 0)

Answer = tuple[jax.Array, jax.Array]
Program = Callable[[Sequence[jax.Array], Any], Answer]
"""Function from weights and uint8 images [B, H, W, C] to the two arrays of `Network.answer`."""


@dataclass(frozen=True)
class Description:
    """The network of a file, as the file describes it."""

    network: str
    precision: str
    channels: int
    classes: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]
    """Shapes (batch, height, width) of the compiled programs."""


def machine() -> dict[str, str]:
    """Returns all that a compiled program depends on: versions, and the device that runs it."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else f"{platform.machine()} {_cpu_name()}"
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jaxfused": jaxfused.__version__,
        "platform": device.platform,
        "device": kind,
        "runtime": " ".join(device.client.platform_version.split()),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


# --- writing --------------------------------------------------------------------------------------


def write(
    path: Path,
    network: Network,
    *,
    precision: str,
    shapes: Sequence[tuple[int, int, int]],
    say: Callable[[str], None] = print,
) -> None:
    """Compiles a network for this machine and writes it to one file, which is whole or absent.

    Args:
      path: of the file.
      network: the model, the scaling of its images, and its classes.
      precision: name of the precision, which is saved for information only.
      shapes: (batch, height, width) of the images.
      say: receives messages about what was compiled.

    Raises:
      ExampleError: the network refuses a size, or the file cannot be written.
    """
    needed("flatbuffers")  # jax.export needs this package to write.
    graphdef, state = nnx.split(network.model)
    leaves, tree = jax.tree.flatten(state)

    def program(weights: Sequence[jax.Array], images: jax.Array) -> Answer:
        return network.answer(nnx.merge(graphdef, jax.tree.unflatten(tree, weights)), images)

    like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    described = Description(
        network.name, precision, network.channels, network.classes, tuple(shapes)
    )
    manifest = {
        "format": FORMAT,
        "machine": machine(),
        "description": asdict(described),
        "weights": [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves],
    }
    partial = path.with_name(path.name + ".partial")
    try:
        with zipfile.ZipFile(partial, "w") as file:
            for index, leaf in enumerate(leaves):
                file.writestr(f"weights/{index}", np.asarray(leaf).tobytes())
            for height, width in dict.fromkeys(shape[1:] for shape in shapes):
                size = (height, width, network.channels)
                file.writestr(f"portable/{height}x{width}", _portable(program, like, size))
            for batch, height, width in shapes:
                images = jax.ShapeDtypeStruct((batch, height, width, network.channels), jnp.uint8)
                with _without_cache():
                    compiled = jax.jit(program).lower(like, images).compile()
                payload, *_ = serialize_executable.serialize(compiled)
                file.writestr(f"compiled/{batch}x{height}x{width}", payload)
                say(f"compiled {batch} x {height} x {width}: {len(payload) / 1e6:.1f} MB")
            file.writestr("manifest.json", json.dumps(manifest, indent=1))
        partial.replace(path)
    except OSError as error:
        raise ExampleError(
            f"the output must be writable, but {path} is not ({error.strerror}); pass another --out."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Turns off JAX's cache on disk: CPU programs that came from it may be serialised incompletely."""
    before = jax.config.jax_enable_compilation_cache
    # JAX decides once whether it uses its compilation cache, until the cache is reset.
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _portable(program: Program, like: list[Any], size: tuple[int, int, int]) -> bytes:
    """Returns StableHLO for batches of any size, made of operations that every platform has."""
    (batch,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((batch, *size), jnp.uint8)
    # A new lambda keeps JAX from reusing a trace cached for a GPU, which contains its kernels.
    with dispatch.assume(_CPU):
        exported = jax.export.export(
            jax.jit(lambda weights, images: program(weights, images)), platforms=("cpu", "cuda")
        )(like, images)
    return bytes(exported.serialize())


# --- reading --------------------------------------------------------------------------------------


class Artifact:
    """A file of `write`, opened on this machine.

    Args:
      path: of the file.
      recompile: whether to compile the portable program if the machine or a version differs.

    Raises:
      ExampleError: it is no such file, is broken, or was compiled for another machine or version.
    """

    def __init__(self, path: Path, *, recompile: bool = False):
        self.path = path
        try:
            self._file = zipfile.ZipFile(path)
            manifest = json.loads(self._file.read("manifest.json"))
            if manifest["format"] != FORMAT:
                raise ExampleError(
                    f"a file of examples.unet.export must have format {FORMAT}, but {path} has"
                    f" {manifest['format']}; export it again with this version."
                )
            described = dict(manifest["description"])
            described["shapes"] = tuple(map(tuple, described["shapes"]))
            described["classes"] = tuple(described["classes"])
            self.description = Description(**described)
            self._like = [
                jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
                for dtype, shape in manifest["weights"]
            ]
            self.compiled_on = dict(manifest["machine"])
            if not self.description.shapes:
                raise ValueError("it has no programs")
        except (OSError, zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
            raise self._broken(error) from error
        self.recompiles = self._differences() != ""
        if self.recompiles and not recompile:
            raise ExampleError(
                f"compiled programs run where they were compiled, but {path} has {self._differences()};"
                " pass --recompile to compile its portable program here, or export again for the"
                " kernels of this machine."
            )
        self.weights = [self._weight(i, like) for i, like in enumerate(self._like)]

    def program(self, batch: int, height: int, width: int) -> Program:
        """Returns the program of images of one shape, one of `description.shapes`."""
        try:
            if self.recompiles:
                return self._recompiled(batch, height, width)
            return self._compiled(batch, height, width)
        except ExampleError:
            raise
        # XLA, pickle and flatbuffers raise exceptions of their own for broken bytes.
        except Exception as error:
            raise self._broken(error) from error

    def _compiled(self, batch: int, height: int, width: int) -> Program:
        if jax.default_backend() == "gpu" and cuda_library.why_unavailable() is None:
            cuda_library.register()
        in_tree = jax.tree.structure((([0] * len(self._like), 0), {}))
        return serialize_executable.deserialize_and_load(
            self._file.read(f"compiled/{batch}x{height}x{width}"),
            in_tree,
            jax.tree.structure((0, 0)),
            execution_devices=jax.devices()[:1],
        )

    def _recompiled(self, batch: int, height: int, width: int) -> Program:
        needed("flatbuffers")
        exported = jax.export.deserialize(bytearray(self._file.read(f"portable/{height}x{width}")))
        images = jax.ShapeDtypeStruct((batch, height, width, self.description.channels), jnp.uint8)
        return jax.jit(exported.call).lower(self._like, images).compile()

    def _weight(self, index: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        try:
            data = self._file.read(f"weights/{index}")
            array = np.frombuffer(data, like.dtype).reshape(like.shape)
        except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
            raise self._broken(error) from error
        return jax.device_put(array, jax.devices()[0])

    def _differences(self) -> str:
        here = machine()
        return ", ".join(
            f"{self.compiled_on.get(key)} for {key} where {here[key]} runs"
            for key in here
            if self.compiled_on.get(key) != here[key]
        )

    def _broken(self, error: Exception) -> ExampleError:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return ExampleError(
            f"the file must be one that examples.unet.export wrote, but {self.path} cannot be read"
            f" ({reason}); export it again."
        )
