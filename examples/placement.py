"""Placement of a training on devices: the only code that differs between one device and many.

A training is written once, for whole batches and whole parameters, and a placement compiles its
functions. The placements on many devices are in examples/multi_gpu.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


class OneDevice:
    """Keeps everything on one device."""

    def __str__(self) -> str:
        return jax.devices()[0].device_kind

    def rows(self, batch_size: int) -> slice:
        """Returns the images of each batch that this process makes, as a slice."""
        return slice(0, batch_size)

    def model(self, model: nnx.Module) -> nnx.Module:
        """Returns `model`, changed in place if its parameters have to be read in another way."""
        return model

    def init(self, f: Callable[..., Any], *args: Any) -> Any:
        """Returns parameters, or a state that contains them, made by the compiled `f(*args)`."""
        return jax.jit(f)(*args)

    def value_and_grad(self, loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Returns `jax.value_and_grad` of a mean over the batch, for use inside a `train_step`."""
        return jax.value_and_grad(loss_of)

    def train_step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `f(state, batch, step)`, compiled; it takes this process's rows, donates the state."""
        return jax.jit(f, donate_argnums=0)

    def predict(self, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns `f(params, images)`, compiled; it takes this process's rows and returns all rows."""
        return jax.jit(f)


ONE_DEVICE = OneDevice()
