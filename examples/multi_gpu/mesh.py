"""A training on a mesh of devices: data, fully sharded (FSDP), context and tensor parallel in one.

The step is that of one device. Only its arrays are placed, as `examples.multi_gpu.rules` says, and XLA
splits the work accordingly. Parameters and their optimizer state are stored sharded; a step all-gathers
a parameter that is split over fsdp where a layer reads it, and again in the backward pass.

Sources: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053; Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019,
https://arxiv.org/abs/1910.02054
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen
import jax
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.errors import ExampleError
from examples.images import Batch
from examples.multi_gpu import launch
from examples.multi_gpu.layers import layers_gather
from examples.multi_gpu.metadata import Path, is_named, names_of, with_paths, without_metadata
from examples.multi_gpu.rules import AXES, RULES, Rules, spec
from examples.placement import INITIAL_VALUES, ONE_DEVICE, OneDevice
from examples.runs import State
from jaxfused.parallel.fsdp_layer import saved_unless_gathered


class OnMesh(OneDevice):
    """Splits batches, sequences and parameters over a mesh, by the names of their axes.

    Args:
      sizes: sizes of the mesh's axes by name; one may be -1, for the remaining devices.
      rules: mesh axes by name of an array's axis; `flax.linen.logical_axis_rules` take precedence.
      devices: those of the mesh, by default as many of `jax.devices()` as it has. For devices that are
        not here, to compile for, parameters and states are shapes.
      layers: name of the model's list of layers that run by `examples.multi_gpu.layers.run_layer`. If
        only the axes data and fsdp have several devices, each of these layers all-gathers its own
        parameters; when other parameters are gathered is XLA's choice.
      bfloat16: whether these layers' gradients travel in bfloat16, which halves their bytes.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        rules: Rules = RULES,
        layers: str | None = None,
        bfloat16: bool = False,
        devices: Sequence[jax.Device] = (),
    ):
        shape = _shape(sizes, len(devices) or jax.device_count())
        types = (AxisType.Auto,) * len(AXES)
        self.mesh = jax.make_mesh(shape, AXES, axis_types=types, devices=devices or None)
        self.is_absent = bool(devices) and devices[0] not in jax.devices()
        self.rules = rules
        alone = self.mesh.shape["context"] == self.mesh.shape["tensor"] == 1
        self.layers = layers if alone and self.mesh.shape["fsdp"] > 1 else None
        self._of_layers = None if self.layers is None else dict(bfloat16=bfloat16)
        self.batch = self._sharding(self._spec(("batch",), (0,)))
        self.copies = self._sharding(P())
        self._stored: dict[Path, P] = {}
        """Partition specs of the parameters, by their paths."""

    def __str__(self) -> str:
        axes = " x ".join(f"{n} {name}" for name, n in self.mesh.shape.items() if n > 1)
        return f"{axes or 'a mesh of 1'} {super().__str__()}"

    def rows(self, batch_size: int) -> slice:
        by = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if batch_size % by:
            raise ExampleError(
                f"the mesh must share a batch evenly, but --batch-size is {batch_size} and"
                f" {self.mesh.shape['data']} data x {self.mesh.shape['fsdp']} fsdp devices share it;"
                f" pass a multiple of {by}."
            )
        places = self.batch.addressable_devices_indices_map((batch_size,)).values()
        ranges = [rows.indices(batch_size) for (rows,) in places]
        return slice(min(first for first, _, _ in ranges), max(last for _, last, _ in ranges))

    def check(self, *, heads: int, tokens: int, is_causal: bool) -> None:
        """Checks that the devices can share a model's heads and tokens.

        Raises:
          ExampleError: the mesh's axes do not divide the heads or the tokens.
        """
        tensor, context = self.mesh.shape["tensor"], self.mesh.shape["context"]
        if heads % tensor:
            raise ExampleError(
                f"the tensor axis must divide the heads, but has {tensor} devices and the model has"
                f" {heads} heads (those of keys); pass a tensor= that divides {heads}."
            )
        parts = context * (2 if is_causal and context > 1 else 1)
        if tokens % parts:
            raise ExampleError(
                f"devices that share a sequence need equal parts, but there are {tokens} tokens for"
                f" context={context}, in {parts} parts; pass another context=, or make the tokens a"
                f" multiple of {parts}."
            )

    def parameters(self, f: Callable[[], Any]) -> Any:
        def plain() -> Any:
            return without_metadata(f())

        with self._here():
            self._stored = {
                path: self._spec(names_of(leaf), without_metadata(leaf).shape)
                for path, leaf in with_paths(jax.eval_shape(f), is_named)
            }
            shardings = _map(
                lambda path, _: self._sharding(self._stored[path]), jax.eval_shape(plain)
            )
            return self._made(plain, shardings)

    def init(self, f: Callable[..., Any], *args: Any) -> Any:
        """Returns `f(*args)`; a result that is named and shaped like a parameter is split like it."""
        given = {path: leaf for arg in args for path, leaf in with_paths(arg)}

        def sharding(path: Path, leaf: Any) -> NamedSharding:
            # The path of an 8-bit moment's codes is the parameter's with one more name at the end.
            for end in (len(path), len(path) - 1):
                for start in range(end):
                    like = given.get(path[start:end])
                    if like is not None and like.shape == leaf.shape:
                        return like.sharding
            return self.copies

        with self._here():
            shardings = _map(sharding, jax.eval_shape(f, *args))
            return self._made(f, shardings, *args)

    def _made(self, f: Callable[..., Any], shardings: Any, *args: Any) -> Any:
        """Returns the compiled `f(*args)`, or its shapes for devices that are not here."""
        if not self.is_absent:
            jitted = jax.jit(f, out_shardings=shardings, compiler_options=INITIAL_VALUES)
            return jitted(*args)
        shapes = jax.eval_shape(f, *args)
        return jax.tree.map(lambda a, to: a.update(sharding=to), shapes, shardings)

    def value_and_grad(self, loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
        def of_parts(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
            with layers_gather(self._of_layers):
                return loss_of(self._gathered(params), batch, key)

        # The backward pass all-gathers parameters again in place of saving them, so that they are never
        # all in memory at once.
        def value_and_grad(params: Any, batch: Batch, key: jax.Array) -> Any:
            shapes = [
                leaf.shape for path, leaf in with_paths(params) if self._is_gathered_here(path)
            ]
            policy = saved_unless_gathered(shapes)
            return jax.value_and_grad(jax.checkpoint(of_parts, policy=policy))(params, batch, key)

        return value_and_grad

    def train_step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        compiled = None

        def step(state: State, batch: Batch, number: int) -> Any:
            nonlocal compiled
            if compiled is None:
                kept = jax.tree.map(lambda array: array.sharding, state)
                compiled = jax.jit(f, donate_argnums=0, out_shardings=(kept, self.copies))
            with self._here():
                return compiled(state, self._whole(batch), number)

        return step

    def predict(self, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def of_parts(params: Any, rows: Any) -> jax.Array:
            with layers_gather(self._of_layers):
                return f(self._gathered(params), rows)

        compiled = jax.jit(of_parts, out_shardings=self.copies)

        def predict(params: Any, rows: Any) -> jax.Array:
            with self._here():
                return compiled(params, self._whole(rows))

        return predict

    def _here(self) -> Any:
        return jax.set_mesh(self.mesh)

    def _sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _spec(self, names: Any, shape: Sequence[int]) -> P:
        rules = {**self.rules, **dict(flax.linen.get_logical_axis_rules())}
        return spec(names, shape, self.mesh.shape, rules)

    def _gathered(self, params: Any) -> Any:
        """Returns the parameters all-gathered over fsdp, except those of `self.layers`."""

        def gathered(path: Path, param: jax.Array) -> jax.Array:
            stored = self._stored.get(path, P())
            if not self._is_gathered_here(path):
                return param
            whole = P(*map(_without_fsdp, stored))
            # Without this constraint XLA would split activations like the parameters.
            return _gather(self._sharding(whole), self._sharding(stored), param)

        return _map(gathered, params)

    def _is_gathered_here(self, path: Path) -> bool:
        stored = self._stored.get(path, P())
        return path[0] != self.layers and P(*map(_without_fsdp, stored)) != stored

    def _whole(self, rows: Any) -> Any:
        """Returns the batch as one array on all devices; `rows` are this process's part of it."""
        return jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(self.batch, array), rows
        )


def _map(f: Callable[[Path, Any], Any], tree: Any) -> Any:
    """Returns a tree of `f(path, leaf)` for its leaves."""
    return jax.tree.structure(tree).unflatten([f(*each) for each in with_paths(tree)])


def _without_fsdp(axes: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    given = axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis for axis in given if axis not in ("fsdp", None)) or None


def _gather(whole: NamedSharding, stored: NamedSharding, param: jax.Array) -> jax.Array:
    """All-gathers a parameter; its gradient is reduce-scattered."""

    def gather(_: Any, param: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(param, whole)

    def scatter(_: Any, gradient: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(gradient, stored)

    return linear_call(gather, scatter, (), param)


# --- flags ----------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the mesh and of several processes."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--mesh",
        type=_mesh,
        metavar="AXIS=N,...",
        help="train on several devices: data=N share the batch; fsdp=N too, and parameters and"
        " optimizer state; tensor=N share heads, hidden features and the vocabulary; context=N share"
        " each sequence. -1 takes the devices that are left: data=-1 (one device)",
    )
    launch.add_flags(parser)


def placement(
    flag: str | None,
    *,
    heads: int,
    tokens: int,
    is_causal: bool = False,
    layers: str | None = None,
) -> OneDevice:
    """Returns the placement of `--mesh` for a model with `heads` heads and `tokens` tokens.

    Raises:
      ExampleError: the mesh does not fit the devices or the model.
    """
    if flag is None:
        if jax.process_count() > 1:
            raise ExampleError(
                f"{jax.process_count()} processes train on one mesh, but there is no --mesh; pass"
                " --mesh data=-1 to share each batch."
            )
        return ONE_DEVICE
    place = OnMesh(_parsed(flag), layers=layers)
    place.check(heads=heads, tokens=tokens, is_causal=is_causal)
    return place


def _parsed(text: str) -> dict[str, int]:
    pairs = [part.split("=") for part in text.split(",")]
    return {name.strip(): int(size) for name, size in pairs}


def _mesh(text: str) -> str:
    try:
        sizes = _parsed(text)
    except ValueError:
        sizes = {}
    names = [part.split("=")[0].strip() for part in text.split(",")]
    is_good = len(sizes) == len(names) > 0 and {*sizes} <= {*AXES}
    if not is_good or not all(size >= 1 or size == -1 for size in sizes.values()):
        raise argparse.ArgumentTypeError(
            f"must be sizes of the axes {', '.join(AXES)}, such as data=2,fsdp=4, but is {text!r}"
        )
    if list(sizes.values()).count(-1) > 1:
        raise argparse.ArgumentTypeError(f"must have one -1 at most, but is {text!r}")
    return text


def _shape(sizes: Mapping[str, int], devices: int) -> tuple[int, ...]:
    """Returns the sizes of all mesh axes, with -1 replaced by the number of remaining devices."""
    product = math.prod(size for size in sizes.values() if size > 0)
    given = ",".join(f"{name}={size}" for name, size in sizes.items())
    if -1 in sizes.values():
        left, rest = divmod(devices, product)
        if rest or not left:
            raise ExampleError(
                f"the mesh must use all devices, but --mesh is {given} and there are {devices}; pass"
                f" sizes whose product divides {devices}."
            )
    # A single process may leave some devices unused; several must all have devices in the mesh.
    elif product > devices or (product < devices and jax.process_count() > 1):
        raise ExampleError(
            f"the mesh must have the devices that there are, but --mesh is {given}, for {product}, and"
            f" there are {devices}; pass sizes whose product is {devices}."
        )
    else:
        left = 1
    return tuple(left if sizes.get(axis) == -1 else sizes.get(axis, 1) for axis in AXES)
