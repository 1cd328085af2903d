"""Products of float8 matrices on Hopper for training: a layer and its gradients.

Each matrix has one scale. WGMMA sums along the last axis of both float8 operands: a matrix that a
gradient sums over its first axis is also quantised as a transposed copy.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.activation import IN_KERNELS, Functions
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul import GRAIN, fits, fitting
from pallas_kernels.gemm.matmul_config import MatmulConfig

Maximised = Literal["value", "magnitude"]
Scales = Sequence[jax.Array]
"""Scales of the operands, float32 [1] each; the accumulated sums are multiplied by all of them."""
DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_OTHERS = (jnp.float32, jnp.bfloat16, jnp.float16)

PROMOTED_STEPS = 4
"""Steps of 128 numbers after which a weight gradient's sums, over all rows of a batch, are added to
float32 totals: the tensor cores' own sums of float8 products have fewer bits."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    x_dtype: Any,
    w_dtype: Any,
    others: Mapping[str, Any],
    k: int,
    n: int,
) -> str | None:
    """Returns None if x [M, K] can be multiplied with w [N, K], else why not.

    Args:
      others: dtypes of the epilogue's other operands and results, keyed by name; None for absent ones.
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
        return f"it copies rows of whole multiples of 16 bytes, and rows of x and w have {k}"
    if n % GRAIN:
        return f"it takes a multiple of {GRAIN} columns, and there are {n}"
    return None


def why_slope_unsupported(*, columns: int) -> str | None:
    """Returns None if a derivative of `columns` columns, one byte each, can be read, else why not."""
    if columns % 16:
        return (
            f"it copies rows of multiples of 16 bytes, and those of the derivative have {columns}"
        )
    return None


def candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs for a layer or its input's gradient, predicted fastest first."""
    configs = fitting(work, multiprocessors, spare_bytes=_SPARE_BYTES)
    return [config for config in configs if isinstance(config, MatmulConfig)]


_SPARE_BYTES = 4096
"""Bytes of shared memory reserved for a second float32 vector and for maxima."""


def hidden_candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs for a hidden layer's gradient: first tiles of up to 128 x 128 elements.

    Larger ones leave its epilogue fewer registers.
    """
    configs = candidates(work, multiprocessors)
    return sorted(configs, key=lambda config: config.tile_m * config.tile_n > 128 * 128)


def slope_candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns `hidden_candidates` for `hidden_gradient_by_slope`.

    Before them comes the first of them with one more pipeline stage, if that fits.
    """
    configs = hidden_candidates(work, multiprocessors)
    deeper = replace(configs[0], stages=configs[0].stages + 1)
    return [deeper, *configs] if fits(work, deeper, _SPARE_BYTES) else configs


def promoted_candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs for a weight gradient, predicted fastest first.

    Tiles have 64 rows a warpgroup, since accumulators and float32 totals both need registers. A weight
    gradient has few tiles, so the number of their waves decides.
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
"""Microseconds of a K step of a tile of 128 rows: a constant, and for each column. Fitted to an H200."""


def _by_name(scales: Scales) -> dict[str, jax.Array]:
    """Returns scales as the named scalars of an epilogue."""
    return {f"scale_{i}": scale for i, scale in enumerate(scales)}


def _scaled(sums: jax.Array, scales: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the accumulators times all scales; every epilogue begins with this product."""
    return sums * functools.reduce(operator.mul, scales.values())


def _wide(operand: jax.Array) -> jax.Array:
    """Returns an epilogue's operand in float32, which it is in a kernel but not in the XLA reference."""
    return operand.astype(jnp.float32)


@dataclass(frozen=True)
class LayerOptions:
    """Static options of a layer, for the kernel and the reference alike."""

    activation: str | None
    """Activation of the first result, y."""
    out_dtype: Any
    """Dtype of the first result, y; None if y is not returned."""
    narrow_dtype: Any
    """Dtype of the second result, the preactivation z; the activation reads z rounded to it."""
    saves: bool
    """True if the second result, z, is returned."""
    maximised: Maximised | None
    """Kind of row maxima of z that are returned, "value" or "magnitude"; None for none."""


def layer(
    x: jax.Array,
    w: jax.Array,
    scales: Scales,
    bias: jax.Array | None,
    residual: jax.Array | None,
    options: LayerOptions,
    functions: Functions = IN_KERNELS,
) -> FusedProduct:
    """Returns y = activation(z) + residual, z and row maxima of z, where z = scales * x @ w^T + bias.

    Args:
      x: [M, K].
      w: [N, K].
      scales: of the product.
      bias: [N].
      residual: [M, N].
      options: static options, such as which of the three are returned.
      functions: the activations, as kernels or XLA compute them.

    y and z are [M, N]. The maxima [P, M] are those of each row in each of P columns of tiles.
    """
    out_dtype, narrow_dtype = options.out_dtype, options.narrow_dtype

    def epilogue(z, *, bias=None, residual=None, **scales):
        z = _scaled(z, scales)
        z = z if bias is None else z + _wide(bias)
        results = {"z": z}
        if out_dtype is not None:
            if options.activation is not None:
                z = z.astype(narrow_dtype).astype(jnp.float32)
            y = functions.activation(options.activation, z, out_dtype)
            results["y"] = y if residual is None else y + _wide(residual)
        return results

    outputs = {"y": out_dtype, "z": narrow_dtype if options.saves else None}
    kinds: dict[str | None, Callable[[jax.Array], jax.Array] | None]
    kinds = {None: None, "value": lambda z: z, "magnitude": jnp.abs}
    maximised = kinds[options.maximised]
    return FusedProduct(
        name="fp8_layer",
        a=x,
        b=(w,),
        b_transposed=True,
        epilogue=epilogue,
        vectors={"bias": bias},
        scalars=_by_name(scales),
        matrices={"residual": residual},
        outputs={name: dtype for name, dtype in outputs.items() if dtype is not None},
        row_maxima={} if maximised is None else {"z": maximised},
        activations=int(options.activation is not None),
    )


def hidden_gradient(
    dy: jax.Array,
    w: jax.Array,
    scales: Scales,
    z: jax.Array,
    up: jax.Array | None,
    *,
    activation: str | None,
    maximise: bool,
    functions: Functions = IN_KERNELS,
) -> FusedProduct:
    """Returns the gradient of a hidden layer's preactivations, from scales * dy @ w^T.

    The results are dz, dup if there is an `up`, and row maxima [P, M] of each of P columns of tiles.

    Args:
      dy: [M, K].
      w: [N, K].
      scales: of the product.
      z: [M, N], the preactivations.
      up: [M, N], by which the activation was multiplied, or None.
      activation: the activation.
      maximise: whether the largest magnitude of each row is returned.
    """

    def epilogue(dh, *, z, up=None, **scales):
        dh = _scaled(dh, scales)
        h, slope = functions.activation_and_derivative(activation, _wide(z), dtype)
        if up is None:
            return {"dz": dh * slope}
        return {"dz": dh * _wide(up) * slope, "dup": dh * h}

    dtype = z.dtype
    names = ("dz",) if up is None else ("dz", "dup")
    return FusedProduct(
        name="fp8_hidden_gradient",
        a=dy,
        b=(w,),
        b_transposed=True,
        epilogue=epilogue,
        scalars=_by_name(scales),
        matrices={"z": z, "up": up},
        outputs=dict.fromkeys(names, z.dtype),
        row_maxima=dict.fromkeys(names, jnp.abs) if maximise else {},
        activations=0 if activation is None else 2,
    )


def hidden_gradient_by_slope(
    dy: jax.Array, w: jax.Array, scales: Scales, slope: jax.Array, *, dtype: Any, maximise: bool
) -> FusedProduct:
    """Returns dz = scales * dy @ w^T * slope [M, N], and row maxima [P, M] of its magnitudes.

    P is the number of columns of tiles. Arguments as in `hidden_gradient`, but in place of z and up:

    Args:
      slope: [M, N], the activation's derivative, whose own scale is one of `scales`; columns beyond N
        are not read.
      dtype: dtype of dz.
      maximise: whether the largest magnitude of each row is returned.
    """

    def epilogue(dh, *, slope, **scales):
        dh = _scaled(dh, scales)
        return {"dz": dh * _wide(slope[:, : dh.shape[1]])}

    return FusedProduct(
        name="fp8_hidden_gradient_by_slope",
        a=dy,
        b=(w,),
        b_transposed=True,
        epilogue=epilogue,
        scalars=_by_name(scales),
        matrices={"slope": slope},
        outputs={"dz": dtype},
        row_maxima={"dz": jnp.abs} if maximise else {},
    )


def weight_gradient(
    x: jax.Array,
    dy: jax.Array,
    scales: Scales,
    *,
    out_dtype: Any,
    promoted_steps: int = PROMOTED_STEPS,
) -> FusedProduct:
    """Returns dw = scales * x @ dy^T [K, N] of x [K, M] and dy [N, M], summed in float32."""
    return FusedProduct(
        name="fp8_weight_gradient",
        a=x,
        b=(dy,),
        b_transposed=True,
        epilogue=lambda dw, **scales: {"dw": _scaled(dw, scales)},
        scalars=_by_name(scales),
        outputs={"dw": out_dtype},
        promoted_steps=promoted_steps,
    )
