"""Products of float8 matrices on Hopper for training: a layer, and the gradients of one.

Each matrix has one scale, and the sums run along the last axis of both operands: whoever quantises a
matrix writes it transposed too, where a gradient sums over its other axis.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.activation import activation as activate
from pallas_kernels.activation import activation_and_derivative
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.mainloop import MatmulConfig
from pallas_kernels.gemm.matmul import GRAIN, fits, fitting, matmul

Maximised = Literal["value", "magnitude"]
Scales = Sequence[jax.Array]
"""Of [1] each: what the sums are multiplied by, one after the other."""
DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_OTHERS = (jnp.float32, jnp.bfloat16, jnp.float16)

PROMOTED_STEPS = 4
"""Steps of 128 numbers after which a weight gradient's sums are promoted to float32. They run over all
rows of a batch, and the tensor cores' own sums of float8 products have fewer bits."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    x_dtype: Any,
    w_dtype: Any,
    others: Mapping[str, Any],
    k: int,
    n: int,
) -> str | None:
    """None where x [M, K] can be multiplied with w [N, K], else why not.

    Args:
      others: the dtypes of what else enters the epilogue or leaves it, by name; None for what does not.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    for name, dtype in (("x", x_dtype), ("w", w_dtype)):
        if dtype not in DTYPES:
            return f"it multiplies float8_e4m3fn and float8_e5m2, and {name} is {jnp.dtype(dtype)}"
    for name, dtype in others.items():
        if dtype is not None and dtype not in _OTHERS:
            return f"it takes float32, bfloat16 and float16, and {name} is {jnp.dtype(dtype)}"
    if k % 16:
        return f"it copies rows of whole multiples of 16 bytes, and the sums are of {k} numbers"
    if n % GRAIN:
        return f"it takes a multiple of {GRAIN} columns, and there are {n}"
    return None


def why_slope_unsupported(*, columns: int) -> str | None:
    """None where the kernel can read a slope of so many columns, one byte each, else why not."""
    if columns % 16:
        return f"it copies rows of whole multiples of 16 bytes, and the slope has {columns}"
    return None


def work(
    x: jax.Array, w: jax.Array, *, read_bytes: int, written_bytes: int, activations: int = 0
) -> Work:
    """The product of x [M, K] with w [N, K], and its epilogue."""
    return Work(
        x.shape[0],
        w.shape[0],
        x.shape[1],
        itemsize=1,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        activations=activations,
        k_last=True,
    )


def candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Configs for a layer or its input's gradient, predicted fastest first."""
    configs = fitting(work, multiprocessors, spare_bytes=_SPARE_BYTES)
    return [config for config in configs if isinstance(config, MatmulConfig)]


_SPARE_BYTES = 4096
"""Of shared memory, for a second vector of float32 and for maxima."""


def hidden_candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Configs for the gradient of a hidden layer, whose derivative takes registers."""
    configs = candidates(work, multiprocessors)
    return sorted(configs, key=lambda config: config.tile_m * config.tile_n > 128 * 128)


def slope_candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Configs for the gradient of a hidden layer by its slope; small tiles leave room for stages."""
    configs = hidden_candidates(work, multiprocessors)
    deeper = replace(configs[0], stages=configs[0].stages + 1)
    return [deeper, *configs] if fits(work, deeper, _SPARE_BYTES) else configs


def promoted_candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Configs for the gradient of weights, whose sums take registers twice, predicted fastest first.

    There are few tiles with long sums: what counts is how many of them a multiprocessor takes.
    """
    configs = [
        MatmulConfig(64, tile_n, stages, False, epilogue_columns=32)
        for tile_n, stages in ((192, 4), (128, 6), (64, 8), (128, 4), (64, 4))
    ]

    def time(config: MatmulConfig) -> float:
        tiles = -(-work.m // config.cta_tile_m) * -(-work.n // config.tile_n)
        waves = -(-tiles // max(1, multiprocessors))
        return waves * (_PROMOTED_STEP + config.tile_n * _PROMOTED_COLUMN)

    return sorted(configs, key=time)


_PROMOTED_STEP, _PROMOTED_COLUMN = 0.06, 0.0025
"""Microseconds of a step of a tile of 128 rows: by itself, and for each column. Fitted to an H200."""


def _by_name(scales: Scales) -> dict[str, jax.Array]:
    """Scales as the scalars of an epilogue."""
    return {f"scale_{i}": scale for i, scale in enumerate(scales)}


def _scaled(sums: jax.Array, scales: Mapping[str, jax.Array]) -> jax.Array:
    """What an epilogue makes of the accumulators first."""
    return sums * functools.reduce(operator.mul, scales.values())


@dataclass(frozen=True)
class LayerOptions:
    """What is static in a layer, to the kernel and to the reference alike."""

    activation: str | None
    """Of the first result."""
    out_dtype: Any
    """Of the first result; None for none."""
    narrow_dtype: Any
    """Of the second result; what the activation reads is rounded to it."""
    saves: bool
    """Whether the second result is wanted."""
    maximised: Maximised | None
    """Whether the largest "value" or the largest "magnitude" in each row of the second result is wanted,
    or None."""


def layer(
    x: jax.Array,
    w: jax.Array,
    scales: Scales,
    bias: jax.Array | None,
    residual: jax.Array | None,
    options: LayerOptions,
    *,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """(activation(z) + residual, z, maxima [P, M]) of z = scales * x @ w^T + bias [M, N].

    Args:
      x: [M, K].
      w: [N, K].
      scales: of the product.
      bias: [N].
      residual: [M, N].
      options: which of the three are wanted, and of what.

    The maxima are of rows, of each of P parts of the columns.
    """
    out_dtype, narrow_dtype = options.out_dtype, options.narrow_dtype

    def epilogue(z, *, bias=None, residual=None, **scales):
        z = _scaled(z, scales)
        z = z if bias is None else z + bias
        results = {"z": z}
        if out_dtype is not None:
            if options.activation is not None:
                z = z.astype(narrow_dtype).astype(jnp.float32)
            y = activate(options.activation, z, out_dtype)
            results["y"] = y if residual is None else y + residual
        return results

    outputs = {"y": out_dtype, "z": narrow_dtype if options.saves else None}
    functions: dict[str | None, Callable[[jax.Array], jax.Array] | None]
    functions = {None: None, "value": lambda z: z, "magnitude": jnp.abs}
    function = functions[options.maximised]
    results = matmul(
        x,
        [w],
        epilogue=epilogue,
        vectors={"bias": bias},
        scalars=_by_name(scales),
        matrices={"residual": residual},
        outputs={name: dtype for name, dtype in outputs.items() if dtype is not None},
        row_maxima={} if function is None else {"z": function},
        b_transposed=True,
        config=config,
        multiprocessors=multiprocessors,
        name="fp8_layer",
    )
    return results.get("y"), results.get("z"), results.get("max_z")


def hidden_gradient(
    dy: jax.Array,
    w: jax.Array,
    scales: Scales,
    z: jax.Array,
    up: jax.Array | None,
    *,
    activation: str | None,
    maximise: bool,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradient of a hidden layer's preactivations, from scales * dy @ w^T.

    Args:
      dy: [M, K].
      w: [N, K].
      scales: of the product.
      z: [M, N], what the activation was of.
      up: [M, N], by which it was multiplied, or None.
      activation: the activation.
      maximise: whether the largest magnitude of each row is wanted.

    Returns:
      (dz, dup, maxima of dz [P, M], maxima of dup [P, M]); None for what is not wanted.
    """

    def epilogue(dh, *, z, up=None, **scales):
        dh = _scaled(dh, scales)
        h, slope = activation_and_derivative(activation, z, z_dtype)
        if up is None:
            return {"dz": dh * slope}
        return {"dz": dh * up * slope, "dup": dh * h}

    z_dtype = z.dtype
    names = ("dz",) if up is None else ("dz", "dup")
    results = matmul(
        dy,
        [w],
        epilogue=epilogue,
        scalars=_by_name(scales),
        matrices={"z": z, "up": up},
        outputs=dict.fromkeys(names, z.dtype),
        row_maxima=dict.fromkeys(names, jnp.abs) if maximise else {},
        b_transposed=True,
        config=config,
        multiprocessors=multiprocessors,
        name="fp8_hidden_gradient",
    )
    of = ("dz", "dup", "max_dz", "max_dup")
    return tuple(results.get(name) for name in of)


def hidden_gradient_by_slope(
    dy: jax.Array,
    w: jax.Array,
    scales: Scales,
    slope: jax.Array,
    *,
    dtype: Any,
    maximise: bool,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """(dz, maxima of its rows [P, M]) of dz = scales * dy @ w^T * slope [M, N].

    The arguments are those of `hidden_gradient`, and instead of z:

    Args:
      slope: [M, N], in whose unit one of the scales is.
      dtype: of dz.
      maximise: whether the largest magnitude of each row is wanted.
    """
    results = matmul(
        dy,
        [w],
        epilogue=lambda dh, *, slope, **scales: {"dz": _scaled(dh, scales) * slope},
        scalars=_by_name(scales),
        matrices={"slope": slope},
        outputs={"dz": dtype},
        row_maxima={"dz": jnp.abs} if maximise else {},
        b_transposed=True,
        config=config,
        multiprocessors=multiprocessors,
        name="fp8_hidden_gradient_by_slope",
    )
    return results["dz"], results.get("max_dz")


def weight_gradient(
    x: jax.Array,
    dy: jax.Array,
    scales: Scales,
    *,
    out_dtype: Any,
    promoted_steps: int = PROMOTED_STEPS,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> jax.Array:
    """Scales * x @ dy^T [K, N] of x [K, M] and dy [N, M], summed in float32."""
    if config is None:
        written = jnp.dtype(out_dtype).itemsize
        sums = work(x, dy, read_bytes=0, written_bytes=written)
        pick = promoted_candidates if promoted_steps else candidates
        config = pick(sums, multiprocessors)[0]
    return matmul(
        x,
        [dy],
        epilogue=lambda dw, **scales: {"dw": _scaled(dw, scales)},
        scalars=_by_name(scales),
        outputs={"dw": out_dtype},
        promoted_steps=0 if config.ping_pong else promoted_steps,
        b_transposed=True,
        config=config,
        multiprocessors=multiprocessors,
        name="fp8_weight_gradient",
    )["dw"]
