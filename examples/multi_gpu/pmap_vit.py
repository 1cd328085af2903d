"""Data parallel with `jax.pmap`: `python -m examples.multi_gpu.pmap_vit`, `--help` for the flags.

Every device has the whole model and a part of each batch. The gradients are averaged over the
devices, and all take the same step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.errors import ExampleError, run_command
from examples.images import Batch
from examples.multi_gpu import launch
from examples.placement import OneDevice
from examples.runs import State
from examples.vit import train

AXIS = "devices"


class DataParallel(OneDevice):
    """Keeps the whole model on every device, and splits the batch over all devices of all processes."""

    def __str__(self) -> str:
        return f"{jax.device_count()} x {super().__str__()}"

    def rows(self, batch_size: int) -> slice:
        if batch_size % jax.device_count():
            raise ExampleError(
                f"the devices must share a batch evenly, but --batch-size is {batch_size} and there"
                f" are {jax.device_count()} devices; pass a multiple of {jax.device_count()}."
            )
        share = batch_size // jax.process_count()
        return slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def init(self, f: Callable[..., Any], *args: Any) -> Any:
        # Each device of this process gets a copy, as `pmap` expects of arguments that it does not map.
        copies = NamedSharding(Mesh(jax.local_devices(), AXIS), P())
        return jax.jit(f, out_shardings=copies)(*args)

    def value_and_grad(self, loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
        def mean(params: Any, batch: Batch, key: jax.Array) -> Any:
            # Each device draws dropout bits of its own.
            key = jax.random.fold_in(key, lax.axis_index(AXIS))
            return lax.pmean(jax.value_and_grad(loss_of)(params, batch, key), AXIS)

        return mean

    def train_step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        step_on_each = jax.pmap(f, AXIS, in_axes=(None, 0, None), out_axes=None, donate_argnums=0)

        def train_step(state: State, batch: Batch, step: int) -> Any:
            return step_on_each(state, jax.tree.map(_split, batch), step)

        return train_step

    def predict(self, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def gathered(params: Any, images: jax.Array) -> jax.Array:
            return lax.all_gather(f(params, images), AXIS, tiled=True)

        predict_on_each = jax.pmap(gathered, AXIS, in_axes=(None, 0), out_axes=None)
        return lambda params, images: predict_on_each(params, _split(images))


def _split(array: Any) -> Any:
    """Reshapes [B, ...] to [devices of this process, B / devices, ...]."""
    return array.reshape(jax.local_device_count(), -1, *array.shape[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = train.make_parser("examples.multi_gpu.pmap_vit", out="runs/pmap_vit")
    launch.add_flags(parser)
    launch.start(parser.parse_args(argv))
    train.train(train.parse_flags(parser, argv), DataParallel())


if __name__ == "__main__":
    run_command(main)
