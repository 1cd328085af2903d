"""Statistics of the inputs of a model's layers while it runs.

The kernels are replaced by `ObservedKernel`s. These are pytrees, so that they work in `jax.jit`, in
blocks that read their layers' parameters, and in `jax.lax.scan` over stacked layers, where each step
gets its layer's kernel and number. `jax.debug.callback` reports the statistics to the host.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxfused.modules.linear import ObservedKernel
from jaxfused.quantization.layers import Path, name_of, replace_kernels

Call = Callable[[Any, Any], Any]
"""Function (module or parameters, batch) -> result."""


@dataclass
class Inputs:
    """Statistics of the input rows of one layer.

    Attributes:
      count: the number of rows.
      low: [D], the smallest value of each feature, not counting the padding of a convolution.
      high: [D], the largest.
      gram: [D, D], the sum of the outer products of the rows with themselves, in float64; None if it is
        not needed.
      samples: arrays [N, D] of sampled rows.
      inside: arrays [N, D], whether a number of the samples is an input and not padding; empty for a
        linear layer.
      stride: number of reported rows for each one that is stored.
    """

    count: int
    low: np.ndarray
    high: np.ndarray
    gram: np.ndarray | None
    samples: list[np.ndarray] = field(default_factory=list)
    inside: list[np.ndarray] = field(default_factory=list)
    stride: int = 1

    def add_sample(self, rows: np.ndarray, inside: np.ndarray | None, most: int) -> None:
        """Stores every `stride`-th row; above 2 * `most` stored rows, removes every second one."""
        self.samples.append(rows[:: self.stride])
        if inside is not None:
            self.inside.append(inside[:: self.stride])
        if sum(map(len, self.samples)) > 2 * most:
            self.samples = [np.concatenate(self.samples)[::2]]
            self.inside = [np.concatenate(self.inside)[::2]] if self.inside else []
            self.stride *= 2

    def rows(self, most: int) -> np.ndarray:
        """Returns at most `most` of the sampled rows, evenly spaced."""
        rows = np.concatenate(self.samples)
        return rows[:: -(-len(rows) // most)]

    def inside_rows(self, most: int) -> np.ndarray | None:
        """Returns a mask of the numbers of `rows` that are inputs and not padding; None if all are."""
        if not self.inside:
            return None
        inside = np.concatenate(self.inside)
        return inside[:: -(-len(inside) // most)]

    def magnitudes(self) -> np.ndarray:
        """Returns [D], the largest magnitude of each feature."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


@dataclass
class _Recorder:
    """Accumulates the statistics that the layers' calls report, keyed by the layers' numbers."""

    with_gram: bool
    sampled_rows: int
    inputs: dict[int, Inputs] = field(default_factory=dict)
    in_groups: set[int] = field(default_factory=set)
    """Numbers of the layers that convolve channels in groups, for which no statistics are taken."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    # A recorder is static in compiled programs: two recorders are never equal.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def observe(self, layer: jax.Array, x: jax.Array | None, inside: jax.Array | None) -> None:
        """Reports the rows of x [..., D] that layer number `layer` reads; None for channels in groups.

        Args:
          inside: a mask that broadcasts to x, False for padding; None if nothing is padding.
        """
        if x is None:
            jax.debug.callback(self._add_group, layer)
            return
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        if len(rows) == 0:
            return
        gram = None
        if self.with_gram:
            gram = jnp.matmul(rows.T, rows, precision="highest")
        drawn = _drawn(len(rows), self.sampled_rows)
        everywhere = (
            jnp.ones(x.shape, bool) if inside is None else jnp.broadcast_to(inside, x.shape)
        )
        everywhere = everywhere.reshape(rows.shape)
        low = jnp.min(rows, axis=0, where=everywhere, initial=jnp.inf)
        high = jnp.max(rows, axis=0, where=everywhere, initial=-jnp.inf)
        sample = rows[drawn], None if inside is None else everywhere[drawn]
        report = functools.partial(self._add, len(rows))
        jax.debug.callback(report, layer, low, high, gram, *sample)

    def _add_group(self, layer: Any) -> None:
        with self.lock:
            self.in_groups.add(int(layer))

    def _add(
        self, count: int, layer: Any, low: Any, high: Any, gram: Any, sample: Any, inside: Any
    ) -> None:
        low, high, sample = (np.array(a, np.float32) for a in (low, high, sample))
        inside = None if inside is None else np.array(inside)
        gram = None if gram is None else np.array(gram, np.float64)
        with self.lock:
            seen = self.inputs.get(int(layer))
            if seen is None:
                seen = self.inputs[int(layer)] = Inputs(count, low, high, gram)
            else:
                seen.count += count
                np.minimum(seen.low, low, out=seen.low)
                np.maximum(seen.high, high, out=seen.high)
                if gram is not None:
                    assert seen.gram is not None
                    seen.gram += gram
            seen.add_sample(sample, inside, self.sampled_rows)


def _drawn(count: int, most: int) -> np.ndarray | slice:
    """Returns the indices of the rows to sample: all, or `most` of them at random with a fixed seed.

    A fixed stride would be biased: if 16 divides an image's width, every 16th window has the same
    columns.
    """
    if count <= most:
        return slice(None)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def call_by_default(op: str, module_or_params: Any) -> Call:
    """Returns the default call of an nnx module, module(batch); raises for a tree of parameters."""
    if isinstance(module_or_params, nnx.Module):
        return lambda module, batch: module(batch)
    raise ValueError(
        f"{op}: calibration says nothing of how to call the model that these parameters belong to; pass"
        " jaxfused.Calibration(batches, call=lambda params, batch: model.apply(params, batch))."
    )


def compiled(call: Call, module_or_params: Any) -> Callable[[Any], Any]:
    """Returns the model as a compiled function of a batch; updates of its state are discarded."""
    if not isinstance(module_or_params, nnx.Module):
        return functools.partial(jax.jit(call), module_or_params)
    graphdef, state = nnx.split(module_or_params)
    run = jax.jit(lambda state, batch: call(nnx.merge(graphdef, state), batch))
    return functools.partial(run, state)


def observe(
    op: str,
    module_or_params: Any,
    batches: Iterable[Any],
    call: Call,
    *,
    wanted: Mapping[str, bool],
    sampled_rows: int,
) -> dict[str, Any]:
    """Runs the model on the batches and returns statistics of its layers' inputs.

    Args:
      op: the caller's name, for messages.
      module_or_params: the model.
      batches: at least one.
      call: runs the model on a batch.
      wanted: the names of the layers to look at, and whether their `gram` is needed.
      sampled_rows: largest number of rows to sample from one call of a layer.

    Returns:
      By the layer's name, an array of `Inputs` in the shape of the kernel's leading axes; None for a
      layer that convolves channels in groups.
    """
    recorders = {needed: _Recorder(needed, sampled_rows) for needed in (False, True)}
    numbers: dict[str, np.ndarray] = {}

    def observed(path: Path, kernel: jax.Array, taps: int) -> ObservedKernel | None:
        del taps
        name = name_of(path)
        if name not in wanted:
            return None
        first = sum(layers.size for layers in numbers.values())
        leading = kernel.shape[:-2]
        numbers[name] = np.arange(first, first + int(np.prod(leading))).reshape(leading)
        observe = recorders[wanted[name]].observe
        return ObservedKernel(kernel, jnp.asarray(numbers[name], jnp.int32), observe)

    run = compiled(call, replace_kernels(op, module_or_params, observed))
    count = 0
    for batch in batches:
        try:
            jax.block_until_ready(run(batch))
        except ValueError as error:
            # Flax raises this error for every effect in the body of nn.scan, also for the callbacks
            # of a calibration.
            if "data dependency on the scan body" not in str(error):
                raise
            raise ValueError(
                f"{op}: nn.scan lets nobody look at the layers that it repeats; for the model of `call`"
                " pass check_constancy_invariants=False to it, which has the same parameters."
            ) from error
        count += 1
    jax.effects_barrier()
    if count == 0:
        raise ValueError(f"{op}: calibration has no batches; pass at least one.")
    inputs: dict[int, Inputs | None] = dict(recorders[False].inputs | recorders[True].inputs)
    for found in inputs.values():
        assert found is not None
        # A feature that was padding in all windows has low > high.
        unread = found.low > found.high
        found.low, found.high = (np.where(unread, 0.0, a) for a in (found.low, found.high))
    for recorder in recorders.values():
        inputs |= dict.fromkeys(recorder.in_groups)
    silent = [
        name for name, layers in numbers.items() if any(int(i) not in inputs for i in layers.flat)
    ]
    if silent:
        raise ValueError(
            f"{op}: no calibration batch reached the layer {silent[0]!r}, or its batches are empty; pass"
            " batches that do, or a rule of dtype None for it."
        )
    result: dict[str, Any] = {}
    for name, layers in numbers.items():
        result[name] = np.empty(layers.shape, object)
        for index in np.ndindex(layers.shape):
            result[name][index] = inputs[int(layers[index])]
    return result
