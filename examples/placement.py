"""On which devices a training runs: all that differs between one device and many.

A training is written once, for whole batches and whole parameters, and leaves it to a placement to
compile its functions. The placements on many devices are in examples/multi_gpu.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


class OneDevice:
    """Everything on one device."""

    def __str__(self) -> str:
        return jax.devices()[0].device_kind

    def rows(self, batch_size: int) -> slice:
        """Which images of each batch this process makes."""
        return slice(0, batch_size)

    def model(self, model: nnx.Module) -> nnx.Module:
        """`model`, changed in place where its parameters are to be read in another way."""
        return model

    def init(self, f: Callable[..., Any], *args: Any) -> Any:
        """`f(*args)`, compiled: parameters, or a state like them."""
        return jax.jit(f)(*args)

    def value_and_grad(self, loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
        """`jax.value_and_grad` of a mean over the batch, for use inside a `train_step`."""
        return jax.value_and_grad(loss_of)

    def train_step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f(state, batch, step)`, compiled; it takes this process's rows and donates the state."""
        return jax.jit(f, donate_argnums=0)

    def predict(self, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`f(params, images)`, compiled; it takes this process's rows and returns all."""
        return jax.jit(f)


ONE_DEVICE = OneDevice()
