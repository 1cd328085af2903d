"""Placements decide which devices store a training's arrays and run its steps: one device or many.

A training is written once, for whole batches and whole parameters, and a placement compiles its
functions. The placements on many devices are in examples/multi_gpu.
"""

from collections.abc import Callable
from typing import Any

import jax

from examples.multi_gpu.metadata import without_metadata

INITIAL_VALUES = {"xla_disable_hlo_passes": "multi_output_fusion"}
"""Options of XLA for programs that make parameters.

On a GPU, XLA (jax 0.11.2) otherwise joins the random draws of many parameters in a few kernels, which
compile for minutes: 117 s in place of 24 for a language model of 1.2 billion parameters on two cores.
"""


class OneDevice:
    """Keeps everything on one device."""

    def __str__(self) -> str:
        return jax.devices()[0].device_kind

    def rows(self, batch_size: int) -> slice:
        """Returns the images of each batch that this process makes, as a slice."""
        return slice(0, batch_size)

    def parameters(self, f: Callable[[], Any]) -> Any:
        """Returns the parameters that the compiled `f()` makes, as arrays without Flax's metadata."""
        return self.init(lambda: without_metadata(f()))

    def init(self, f: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of the compiled `f(*args)`, such as an optimizer's state."""
        return jax.jit(f, compiler_options=INITIAL_VALUES)(*args)

    def value_and_grad(self, loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Returns `jax.value_and_grad` of a mean over the batch, for use inside a `train_step`."""
        return jax.value_and_grad(loss_of)

    def train_step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the compiled `f(state, batch, step)`: reads this process's rows, donates the state."""
        return jax.jit(f, donate_argnums=0)

    def predict(self, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns the compiled `f(params, images)`: reads this process's rows, and returns all rows."""
        return jax.jit(f)


ONE_DEVICE = OneDevice()
