"""Table of the optimizers that `--optimizer` names, shared by all examples.

Optimizers differ in their formula and in the size of a good step. So the table gives each one's default
learning rate and decay as multiples of AdamW's; values from the user are taken unscaled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from optax import contrib

import jaxfused
from examples.errors import ExampleError
from jaxfused.optim import FusedTransformation

DEFAULT = "adamw"


@dataclass(frozen=True)
class Entry:
    """An optimizer that `--optimizer` can name."""

    make: Callable[[optax.Schedule, float], FusedTransformation]
    """Function (learning rate, weight decay) -> optimizer."""
    rate: float = 1.0
    """Default learning rate of the optimizer, as a multiple of AdamW's."""
    decay: float = 1.0
    """Default weight decay of the optimizer, as a multiple of AdamW's; 0 where it has none."""


def make(name: str, schedule: optax.Schedule, weight_decay: float) -> FusedTransformation:
    """Returns the optimizer of this name, which decays the kernels only.

    Raises:
      ExampleError: the optimizer has no weight decay, and `weight_decay` is not 0.
    """
    entry = OPTIMIZERS[name]
    if weight_decay and not entry.decay:
        raise ExampleError(
            f"--optimizer {name} has no weight decay, but --weight-decay is {weight_decay:g}; leave"
            " --weight-decay out, or pass another --optimizer."
        )
    return entry.make(schedule, weight_decay)


def is_decayed(params: Any) -> Any:
    """Returns True for the kernels of linear layers and convolutions, False for all other parameters."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path[-1:]) == "kernel", params)


def matrices(params: Any) -> Any:
    """Returns the axes of a kernel that are a matrix's rows and columns for Muon; None for AdamW.

    A stack of kernels [layers, in, out] is one matrix a layer; a convolution's kernel, [height, width,
    in, out], is one of height * width * in rows. AdamW gets the first and the last layer, as Muon's
    author advises.
    """
    numbers = contrib.MuonDimensionNumbers
    of_rank = {2: numbers(0, 1), 3: numbers(1, 2), 4: numbers((0, 1, 2), 3)}

    def of_leaf(path: tuple[Any, ...], leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
        if _name(path[-1:]) != "kernel" or _name(path[:1]) in ("embed", "head"):
            return None
        return of_rank.get(leaf.ndim)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True)


def _adafactor(schedule: optax.Schedule, decay: float) -> FusedTransformation:
    # These are the settings of Zhai et al., https://arxiv.org/abs/2106.04560, for Vision Transformers:
    # with momentum, and without scaling steps by the parameter, which is tiny for a layer that starts
    # at 0. Adafactor does not multiply its decay by the learning rate, so the schedule is applied here.
    return jaxfused.optim.adafactor(
        schedule,
        multiply_by_parameter_scale=False,
        momentum=0.9,
        weight_decay_rate=(lambda count: decay * schedule(count)) if decay else None,
        weight_decay_mask=is_decayed,
    )


def _muon(schedule: optax.Schedule, decay: float) -> FusedTransformation:
    return jaxfused.optim.muon(
        schedule,
        weight_decay=decay,
        weight_decay_mask=is_decayed,
        adam_b2=0.99,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=0.2,  # Scales a matrix's steps to the size of AdamW's.
    )


OPTIMIZERS: Mapping[str, Entry] = {
    "adamw": Entry(
        lambda schedule, decay: jaxfused.optim.adamw(
            schedule, b2=0.99, weight_decay=decay, mask=is_decayed
        )
    ),
    "lion": Entry(
        lambda schedule, decay: jaxfused.optim.lion(
            schedule, b2=0.98, weight_decay=decay, mask=is_decayed
        ),
        rate=0.3,
        decay=3.0,
    ),
    "lamb": Entry(
        lambda schedule, decay: jaxfused.optim.lamb(
            schedule, b2=0.99, weight_decay=decay, mask=is_decayed
        )
    ),
    "sgd": Entry(
        lambda schedule, decay: jaxfused.optim.sgd(schedule, momentum=0.9, nesterov=True),
        rate=20.0,
        decay=0.0,
    ),
    "adafactor": Entry(_adafactor),
    "muon": Entry(_muon, rate=2.0),
    "adamw8bit": Entry(
        lambda schedule, decay: jaxfused.optim.adamw8bit(
            schedule, b2=0.99, weight_decay=decay, mask=is_decayed
        )
    ),
}
