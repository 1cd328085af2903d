"""Data and tensor parallel with `jax.jit` over a mesh: `python -m examples.multi_gpu.jit_vit`.

The step is that of one device. Only its arrays are placed on a mesh of data x tensor devices, and XLA
splits the work accordingly:

- data: each row of devices has a part of the batch;
- --tensor N: each column has a part of the heads and of the MLP's features, as in Megatron-LM;
- --fsdp: each row stores only a part of every matrix and of its optimizer state. A layer gathers its
  matrix when it reads it, once a step: the backward pass uses it again.

Sources: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053; Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019,
https://arxiv.org/abs/1910.02054
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.errors import ExampleError, run_command
from examples.flags import whole
from examples.images import Batch
from examples.multi_gpu import launch
from examples.placement import OneDevice
from examples.runs import State
from examples.vit import train
from examples.vit.model import MODELS

COLUMNS = ("qkv", "gate", "up")
"""Layers whose outputs are split over `tensor`: features of the MLP, and columns of qkv. In qkv all
queries come first, so XLA exchanges columns between devices to get whole heads."""
ROWS = ("project", "down")
"""Layers whose inputs are split over `tensor`; a sum over `tensor` completes their outputs."""


class GatheredParam(nnx.Param):
    """A matrix that is stored in parts, one on each device, and gathered when a layer reads it."""

    whole: NamedSharding

    def get_value(self, *, index: Any = ...) -> jax.Array:
        return lax.with_sharding_constraint(super().get_value(index=index), self.whole)


class OnMesh(OneDevice):
    """Splits batches over `data`, and parameters as `spec` says.

    Args:
      heads: of the model, those of keys where they are fewer.
      tensor: devices that share each layer.
      fsdp: whether parameters and optimizer state are split over `data` too.
    """

    def __init__(self, heads: int, *, tensor: int, fsdp: bool):
        data, rest = divmod(jax.device_count(), tensor)
        if rest:
            raise ExampleError(
                f"the mesh must use all devices, but --tensor is {tensor} and there are"
                f" {jax.device_count()}; pass a --tensor that divides {jax.device_count()}."
            )
        if heads % tensor:
            raise ExampleError(
                f"--tensor must divide the heads, but is {tensor} and the model has {heads};"
                f" pass a --tensor that divides {heads}."
            )
        self.fsdp = fsdp
        self.mesh = jax.make_mesh(
            (data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto)
        )
        self.batch = NamedSharding(self.mesh, P("data"))
        self.copies = NamedSharding(self.mesh, P())

    def __str__(self) -> str:
        axes = " x ".join(f"{size} {name}" for name, size in self.mesh.shape.items())
        return f"{axes} {super().__str__()}" + ", fsdp" * self.fsdp

    def _tensor_spec(self, layer: str, name: str, rank: int) -> P:
        """Returns the sharding of a parameter while a layer uses it."""
        axes: list[str | None] = [None] * rank
        if layer in COLUMNS:
            axes[-1] = "tensor"
        elif layer in ROWS and name == "kernel":
            axes[-2] = "tensor"
        return P(*axes)

    def spec(self, layer: str, name: str, shape: tuple[int, ...]) -> P:
        """Returns the stored sharding of a parameter, or of a moment named after its parameter.

        Moments of another shape than the parameter have few elements, and each device has all of them.
        """
        if name == "kernel" and len(shape) < 2:
            return P()
        axes = list(self._tensor_spec(layer, name, len(shape)))
        if any(
            axis and size % self.mesh.shape[axis] for axis, size in zip(axes, shape, strict=True)
        ):
            return P()
        if self.fsdp and name == "kernel":
            free = [
                axis
                for axis in (-2, -1)
                if axes[axis] is None and shape[axis] % self.mesh.shape["data"] == 0
            ]
            if free:
                axes[max(free, key=lambda axis: shape[axis])] = "data"
        return P(*axes)

    def shardings(self, tree: Any) -> Any:
        """Returns the sharding of each leaf of parameters, or of a state made of them."""

        def sharding(path: Sequence[Any], leaf: Any) -> NamedSharding:
            names = [jax.tree_util.keystr((key,), simple=True) for key in path]
            if names[-1] == "codes":  # The codes of an 8-bit moment are split like their parameter.
                names.pop()
            return NamedSharding(self.mesh, self.spec("".join(names[-2:-1]), names[-1], leaf.shape))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def rows(self, batch_size: int) -> slice:
        if batch_size % self.mesh.shape["data"]:
            raise ExampleError(
                f"the mesh must share a batch evenly, but --batch-size is {batch_size} and the mesh"
                f" has {self.mesh.shape['data']} x {self.mesh.shape['tensor']} devices; pass a"
                f" multiple of {self.mesh.shape['data']}."
            )
        places = self.batch.addressable_devices_indices_map((batch_size,)).values()
        ranges = [rows.indices(batch_size) for (rows,) in places]
        return slice(min(first for first, _, _ in ranges), max(last for _, last, _ in ranges))

    def model(self, model: nnx.Module) -> nnx.Module:
        if self.fsdp:
            for path, layer in nnx.iter_modules(model):
                if isinstance(layer, nnx.Linear):
                    # Without this constraint XLA would split activations like the matrices.
                    whole = NamedSharding(self.mesh, self._tensor_spec(path[-1], "kernel", 2))
                    layer.kernel = GatheredParam(layer.kernel.get_raw_value(), whole=whole)
        return model

    def init(self, f: Callable[..., Any], *args: Any) -> Any:
        shardings = self.shardings(jax.eval_shape(f, *args))
        return jax.jit(f, out_shardings=shardings)(*args)

    def train_step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def in_place(state: State, batch: Batch, step: int) -> Any:
            state, metrics = f(state, batch, step)
            return lax.with_sharding_constraint(
                (state, metrics), (self.shardings(state), self.copies)
            )

        compiled = jax.jit(in_place, donate_argnums=0)
        return lambda state, batch, step: compiled(state, self._whole(batch), step)

    def predict(self, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        compiled = jax.jit(f, out_shardings=self.copies)
        return lambda params, images: compiled(params, self._whole(images))

    def _whole(self, rows: Any) -> Any:
        """Returns the batch as one array on all devices, of which this process has `rows`."""
        return jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(self.batch, array), rows
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the mesh and of several processes."""
    mesh = parser.add_argument_group("mesh")
    mesh.add_argument(
        "--tensor",
        type=whole(1),
        default=1,
        metavar="N",
        help="devices that share each layer; the others share the batch (%(default)s)",
    )
    mesh.add_argument(
        "--fsdp",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="split parameters and optimizer state over the devices that share the batch",
    )
    launch.add_flags(parser)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = train.make_parser("examples.multi_gpu.jit_vit", out="runs/jit_vit")
    add_flags(parser)
    launch.start(parser.parse_args(argv))
    args = train.parse_flags(parser, argv)
    train.train(args, OnMesh(MODELS[args.model].heads, tensor=args.tensor, fsdp=args.fsdp))


if __name__ == "__main__":
    run_command(main)
