"""Builds benchmark cases from configs of benchmarks/sweep or problems of benchmarks/fuzz."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.run.case import Arrays, Bar, Case, Function, functions, torch_compiled
from benchmarks.sweep import programs
from benchmarks.sweep.configs import Config
from benchmarks.sweep.program_parts import Programs

FORWARD, WITH_GRADIENTS = "forward", "forward+backward"
_FAR = 8.0
"""Magnitude of a bias before a relu, in standard deviations of the sum that it is added to."""


def case(
    name: str,
    shape: tuple[int, ...],
    config: Config | Programs,
    *,
    stock: str | None = None,
    torch: Function | None = None,
    with_gradient: bool = False,
    read_again: int = 0,
    bytes: int | None = None,
    flops: int = 0,
    backward: float = 2.0,
    bars: tuple[Bar, ...] = (),
    peers: Mapping[str, Function] | None = None,
    torch_peers: Mapping[str, Callable[[], Function]] | None = None,
    far_bias: int | None = None,
    differentiable: int | None = None,
    skipped: Mapping[str, str] | None = None,
    error_limit: float = 1e-2,
) -> Case:
    """Returns the benchmark case of a config: ours, stock JAX, torch and other peers.

    Args:
      name: name of the case, with its direction.
      shape: sizes by which the case is listed.
      config: a config of the sweep, or the programs of a problem.
      stock: the form of stock JAX that is the peer "xla"; None for no such peer. If XLA has too little
        memory for it, `skipped` says so.
      torch: the same function of torch's tensors.
      with_gradient: whether the backward is measured too.
      read_again: bytes in addition to every operand and result once: saved values that the backward
        reads, and writes of saved values that are neither an operand nor a result.
      bytes: bytes in all, if operands and results do not count once each; None if they do.
      flops: operations of the forward's products.
      backward: operations of the backward's products for each of the forward's.
      bars: ratios to a peer's time, or rates, that ours must reach.
      peers: further functions in JAX.
      torch_peers: further functions that import a torch peer's packages and return its function.
      far_bias: index of a bias before a relu whose values are moved far from 0, so that rounding does
        not decide whether a gradient is 0.
      differentiable: how many operands get a gradient, if not all that the sweep differentiates by.
      skipped: reasons for not running an implementation, by name.
      error_limit: largest error of a row that counts as right.
    """
    written = config if isinstance(config, Programs) else programs.of(config)
    cotangents = written.cotangents if with_gradient else 0

    def make_inputs(key: jax.Array) -> Arrays:
        inputs = list(written.make_inputs(key))
        if far_bias is not None:
            inputs[far_bias] = _FAR * jnp.sign(inputs[far_bias])
        operands = (
            inputs if with_gradient or not written.differentiable else inputs[: -written.cotangents]
        )
        return (*operands, *(written.floats(*operands) if written.floats else ()))

    found: dict[str, Any] = functions(
        written.ours,
        ({"xla": written.stock.get(stock, written.plain())} if stock else {}) | dict(peers or {}),
        ({"torch_compile": partial(torch_compiled, torch)} if torch else {}) | (torch_peers or {}),
        differentiable=differentiable or written.differentiable,
        cotangents=cotangents,
        truth=written.truth or written.reference,
    )
    return Case(
        name=name,
        shape=shape,
        make_inputs=make_inputs,
        bytes=read_again + _bytes(make_inputs, found["truth"]) if bytes is None else bytes,
        flops=int(flops * (1 + backward * with_gradient)),
        bars=bars,
        skipped=skipped or {},
        error_limit=error_limit,
        **found,
    )


def _bytes(make_inputs: Function, forward: Function) -> int:
    inputs = jax.eval_shape(make_inputs, jax.random.key(0))
    arrays = jax.tree.leaves((inputs, jax.eval_shape(forward, *inputs)))
    return sum(a.size * a.dtype.itemsize for a in arrays)


def of_images(
    name: str,
    shape: tuple[int, ...],
    config: Config,
    bars: Mapping[tuple[str, tuple[int, ...]], tuple[Bar, ...]],
    **options: Any,
) -> list[Case]:
    """Returns the cases of an operator over images, forward and with gradients.

    Args:
      name: name of the cases, without the direction.
      shape: shape of x, which the backward reads again.
      config: a config of the sweep, over images [B, H, W, C] in bfloat16.
      bars: bars by name and shape.
      options: further arguments of `case`.
    """
    size = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    return [
        case(
            f"{name} {direction}",
            shape,
            config,
            with_gradient=direction == WITH_GRADIENTS,
            read_again=size if direction == WITH_GRADIENTS else 0,
            bars=bars.get((f"{name} {direction}", shape), ()),
            error_limit=2e-2 if direction == WITH_GRADIENTS else 1e-2,
            **options,
        )
        for direction in (FORWARD, WITH_GRADIENTS)
    ]
