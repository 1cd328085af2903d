"""Convolutions on Hopper with a traced epilogue: the limits, configs and launches of the kernel."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.activation import ARITHMETIC
from pallas_kernels.activation import activation as activate
from pallas_kernels.conv import cost
from pallas_kernels.conv.product import ConvConfig, ConvProduct, Plan
from pallas_kernels.conv.window import GROUP, MAX_REACH, Boxes, Window, best_box
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.epilogue import Epilogue, Function
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul import fitting as product_configs
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import allocated_bytes, swizzled_columns
from pallas_kernels.gemm.small_m import FewRowsConfig
from pallas_kernels.gemm.speeds import H200
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

MAX_PIXELS = 2**30
"""Largest number of pixels of all images: 32-bit indices also count those of tiles past the edges."""


Config = ConvConfig | MatmulConfig | FewRowsConfig
"""Config of a convolution; a matrix product's config if the window has one weight."""


@dataclass(frozen=True)
class ConvCall:
    """Static description of a convolution of x [B, *spatial, C] with w [taps, C, F] or [taps, F, C]."""

    sizes: tuple[int, ...]
    """Sizes of x: number of images, then the size of each spatial axis."""
    channels: int
    features: int
    window: Window
    dtype: Any
    multiprocessors: int
    flipped: bool = False
    """True if the window is rotated by 180 degrees, as in dgrad; the weights are then [taps, F, C]."""
    first_channels: int = 0
    """Channels of the first array if x is two concatenated arrays; 0 if x is one array."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of the result's pixels in one row of the product, which has the features of all
    of them: more than one in a transposed convolution without overlap and in strided dgrad."""

    @property
    def is_matrix_product(self) -> bool:
        return self.window.is_pointwise and self.block == (1, 1)

    @property
    def result(self) -> tuple[int, ...]:
        return (self.sizes[0], *self.window.result(self.sizes[1:]))

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the result, and the shape that the kernel writes, with axes over a block's pixels."""
        whole = (*self.result, self.features)
        if self.block == (1, 1):
            return whole, whole
        images, rows, across, features = whole
        height, width = self.block
        features //= height * width
        return (
            (images, rows * height, across * width, features),
            (images, rows, height, across, width, features),
        )

    @property
    def is_of_bytes(self) -> bool:
        return jnp.dtype(self.dtype).itemsize == 1

    def as_product(self, read_bytes: int, written_bytes: int, activations: int) -> Work:
        """Returns the sizes of the product [pixels, C] @ [C, F], for a window of one weight."""
        return Work(
            m=math.prod(self.sizes),
            n=self.features,
            k=self.channels,
            itemsize=jnp.dtype(self.dtype).itemsize,
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            activations=activations,
            k_last=self.flipped,
        )

    def product(self, config: ConvConfig) -> ConvProduct:
        halo = 0 if config.plan == "taps" else self.window.reach[-2]
        boxes = Boxes(self.result, best_box(self.result, config.tile_m, halo=halo))
        return ConvProduct(
            m=boxes.count * config.tile_m,
            n=self.features,
            ks=(self.channels,),
            dtype=self.dtype,
            blocks=(),
            config=config,
            multiprocessors=self.multiprocessors,
            b_transposed=self.flipped or config.turns_weights,
            b_columns=self.features,
            window=self.window,
            boxes=boxes,
            flipped=self.flipped,
            first_channels=self.first_channels,
            block=self.block,
        )

    def why_not(self, config: ConvConfig) -> str | None:
        """Returns None if the config can tile the convolution, else the reason."""
        transposed = self.flipped or config.turns_weights
        if not transposed and self.is_of_bytes:
            return "turns_weights must be True for weights of 8 bits, whose channels must be contiguous"
        if not transposed and config.tile_n % swizzled_columns(self.dtype):
            return f"tile_n must be a multiple of {swizzled_columns(self.dtype)}"
        of_pixel = self.features // math.prod(self.block)
        if self.block != (1, 1) and of_pixel % config.epilogue_columns:
            return (
                f"epilogue_columns must divide the {self.features} features of {self.block} pixels"
            )
        if config.plan == "taps":
            return None
        if self.window.is_strided:
            return "the rows that a strided window reads are not adjacent in memory"
        if self.window.reach[-2] > MAX_REACH:
            return f"the window may reach {MAX_REACH} rows, and reaches {self.window.reach[-2]}"
        if config.plan == "resident" and (self.features > config.tile_n or config.cluster > 1):
            return "resident weights need tile_n of at least the features, and no cluster"
        return None


def candidates(call: ConvCall, *, read_bytes: int = 0) -> list[ConvConfig]:
    """Returns configs that can tile the convolution; not all of them fit into shared memory."""
    slots = [(4, 2, 2), (4, 1, 1)] if read_bytes else [(4, 1, 2), (4, 1, 1)]
    slots += [(3, 1, 1), (2, 1, 1)]
    base = ConvConfig(epilogue_columns=_EPILOGUE_COLUMNS)
    whole = swizzled_columns(call.dtype)
    shapes = [replace(base, tile_n=width) for width in (64, 128, 192)]
    shapes += [replace(base, tile_n=width, turns_weights=not call.flipped) for width in (96, 160)]
    if call.is_of_bytes:
        # Tiles of transposed weights have any multiple of 8 features: 8 bits take the widths of 16.
        whole = swizzled_columns(jnp.bfloat16)
        shapes = [replace(shape, turns_weights=True) for shape in shapes]
    # Two warpgroups that share a tile read fewer bytes of operands than two with a tile each, which is
    # ping-pong.
    shapes += [replace(shape, ping_pong=False) for shape in shapes if shape.tile_n > whole]
    if call.window.kernel[-2] > 1:
        shapes += [
            replace(base, plan=plan, tile_n=width, turns_weights=call.is_of_bytes)
            for plan, width in itertools.product(_PLANS_OF_ROWS, (whole, 2 * whole))
        ]
    return [
        replace(shape, stages=stages, read_slots=read, write_slots=write)
        for shape in shapes
        if shape.tile_n == whole or shape.tile_n < 2 * call.features
        for stages, read, write in slots
        if call.why_not(shape) is None
    ]


_PLANS_OF_ROWS: tuple[Plan, ...] = ("resident", "rows")


def fitting(
    call: ConvCall, *, read_bytes: int = 0, written_bytes: int, activations: int = 0
) -> Sequence[Config]:
    """Returns the configs that fit into shared memory, predicted fastest first.

    Args:
      read_bytes: bytes that the epilogue reads per element of the result.
      written_bytes: bytes that it writes per element.
      activations: activations that it evaluates per element.
    """
    streams = (read_bytes, written_bytes, activations)
    if call.is_matrix_product:
        return product_configs(call.as_product(*streams), call.multiprocessors)
    return sorted(
        (
            config
            for config in candidates(call, read_bytes=read_bytes)
            if _shared_bytes(call, config, read_bytes, written_bytes) <= SHARED_MEMORY_BYTES
        ),
        key=lambda config: _time(call, config, *streams),
    )


def _shared_bytes(call: ConvCall, config: ConvConfig, read_bytes: int, written_bytes: int) -> int:
    """Estimates a CTA's shared memory in bytes; `Epilogue.shared_bytes` counts the exact allocations."""
    ring = allocated_bytes(call.product(config).operand_memory())
    streams = config.read_slots * read_bytes + config.write_slots * written_bytes
    vectors_and_barriers = 3 * 1024
    return (
        ring + CONSUMERS * config.tile_m * config.epilogue_columns * streams + vectors_and_barriers
    )


def _time(
    call: ConvCall, config: ConvConfig, read_bytes: int, written_bytes: int, activations: int
) -> float:
    """Returns the predicted microseconds of the convolution with a config."""
    product = call.product(config)
    itemsize = jnp.dtype(call.dtype).itemsize
    x_rows = math.prod(product.x_box) * product.boxes_of_slot
    weights = 0.0 if product.is_resident else product.rows_at_once * config.tile_n / config.cluster
    down, across = product.tile_grid
    elements = math.prod(call.result) * call.features
    operands = math.prod(call.sizes) * call.channels
    operands += call.window.taps * call.channels * call.features
    work = cost.Work(
        tiles=down * config.cluster * across,
        rows=config.cta_tile_m,
        columns=config.tile_n,
        slots=product.k_steps,
        slot_bytes=product.tile_k * itemsize * (x_rows + weights),
        # A multiply-add of 8-bit numbers takes half as long as one of 16-bit numbers.
        multiplications_of_slot=product.rows_at_once
        * config.cta_tile_m
        * config.tile_n
        * product.tile_k
        * itemsize
        // 2,
        stages=config.stages,
        shared_tile=not config.ping_pong,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        activations=activations,
        memory_bytes=operands * itemsize + elements * (read_bytes + written_bytes),
        few_channels=call.channels < product.tile_k,
        in_pieces=call.features % 16 != 0,
        strided=call.window.is_strided,
    )
    turned = 0.0
    if config.turns_weights:
        moved = 2 * itemsize * call.window.taps * call.channels * call.features
        turned = H200.xla_pass + moved * H200.xla_pass_byte
    return cost.kernel(work, call.multiprocessors) + turned


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    channels: Mapping[str, int],
    sizes: tuple[int, ...],
    window: Window,
) -> str | None:
    """Returns None if the convolution can run, else why not.

    Args:
      dtypes: the operands' dtypes keyed by name, None for an absent one.
      channels: the channels of x, under "x", and of the result.
      sizes: the sizes of x: images, then each axis of the picture.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in (jnp.bfloat16, jnp.float16):
            return f"it takes bfloat16 and float16, and {name} has dtype {jnp.dtype(dtype)}"
    for name, count in channels.items():
        if count % GROUP:
            return f"it takes multiples of {GROUP} channels, and {name} has {count}"
    if (pixels := math.prod(sizes)) > MAX_PIXELS:
        return f"it takes at most {MAX_PIXELS} pixels, and x has {pixels}"
    if window.is_strided:
        if len(window.kernel) > 2:
            return f"with strides x must have two spatial axes, and has {len(window.kernel)}"
        if channels["x"] % 64:
            return f"with strides it takes multiples of 64 channels, and x has {channels['x']}"
    return window.why_unfit(sizes[1:])


def why_enlarging_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    channels: Mapping[str, int],
    sizes: tuple[int, ...],
    block: tuple[int, int],
) -> str | None:
    """Returns None if each pixel of x can be expanded to a block of pixels, else the reason.

    Args:
      dtypes: the operands' dtypes keyed by name, None for an absent one.
      channels: the channels of x, under "x", and of the result.
      sizes: the sizes of x: images, rows and columns.
      block: rows and columns that a pixel produces.
    """
    features = channels["the result"]
    if features % _EPILOGUE_COLUMNS:
        return f"it writes multiples of {_EPILOGUE_COLUMNS} channels, and there are {features}"
    if max(block) > _LARGEST_BLOCK:
        return (
            f"it makes blocks of up to {_LARGEST_BLOCK} pixels a side, and this is one of {block}"
        )
    return why_unsupported(
        compute_capability=compute_capability,
        dtypes=dtypes,
        channels=channels,
        sizes=sizes,
        window=Window.pointwise(len(block)),
    )


_EPILOGUE_COLUMNS = 32
"""Columns of a tile that an epilogue stores at a time. With blocks of pixels, a pixel's features are a
multiple of it, so that all of these columns belong to one pixel."""
_LARGEST_BLOCK = 16


def why_not_of_two(window: Window, dtype: Any, first_channels: int, channels: int) -> str | None:
    """Returns None if x may be two concatenated arrays, one with `first_channels`, else why not."""
    whole = swizzled_columns(dtype)
    if first_channels % whole or (channels - first_channels) % GROUP:
        return (
            f"of two arrays it takes a multiple of {whole} channels in the first and of {GROUP} in the"
            f" second, and they have {first_channels} and {channels - first_channels}"
        )
    if window.is_strided or window.is_pointwise:
        return "it takes two arrays with windows of several weights and without strides"
    return None


def conv(
    x: jax.Array | tuple[jax.Array, jax.Array],
    w: jax.Array,
    *,
    window: Window,
    epilogue: Function,
    outputs: Mapping[str, Any],
    vectors: Mapping[str, jax.Array | None] | None = None,
    matrices: Mapping[str, jax.Array | None] | None = None,
    column_moments: Sequence[str] = (),
    activations: int = 0,
    flipped: bool = False,
    config: Config | None = None,
    multiprocessors: int,
    block: tuple[int, int] = (1, 1),
    name: str = "conv",
) -> dict[str, jax.Array]:
    """Returns a dict of the epilogue's results for x [B, *spatial, C] convolved with w [*kernel, C, F].

    Args:
      x: one array, or two that the kernel reads as their concatenation: see `why_not_of_two`.
      epilogue, outputs, vectors, matrices, column_moments, activations: as in `FusedProduct`; matrices
        have the result's shape.
      flipped: whether w is [*kernel, F, C] and its window rotated by 180 degrees, as in dgrad.
      block: rows and columns of pixels that one row of the product holds. Then w is
        [*kernel, C, block * F], vectors are [block * F], and results and matrices
        [B, H * rows, W * columns, F].
      name: the kernel's name in a profile.
    """
    xs = x if isinstance(x, tuple) else (x,)
    x = xs[0]
    call = ConvCall(
        sizes=x.shape[:-1],
        channels=sum(array.shape[-1] for array in xs),
        features=w.shape[-2 if flipped else -1],
        window=window,
        dtype=x.dtype,
        multiprocessors=multiprocessors,
        flipped=flipped,
        first_channels=x.shape[-1] if len(xs) > 1 else 0,
        block=block,
    )
    vectors = {key: v for key, v in (vectors or {}).items() if v is not None}
    matrices = {key: v for key, v in (matrices or {}).items() if v is not None}
    if call.is_matrix_product:
        assert not isinstance(config, ConvConfig)
        product = FusedProduct(
            name=name,
            a=x.reshape(-1, call.channels),
            b=w.reshape(w.shape[-2:]),
            b_transposed=flipped,
            epilogue=epilogue,
            vectors=vectors,
            matrices={key: v.reshape(-1, call.features) for key, v in matrices.items()},
            outputs=outputs,
            column_moments=column_moments,
            activations=activations,
        )
        results = product.run(multiprocessors=multiprocessors, config=config)
        return results | {key: results[key].reshape(*call.result, call.features) for key in outputs}

    def fused(config: ConvConfig) -> Epilogue:
        return Epilogue(
            product=call.product(config),
            function=epilogue,
            vectors={key: v.dtype for key, v in vectors.items()},
            matrices={key: v.dtype for key, v in matrices.items()},
            outputs=dict(outputs),
            column_sums=(),
            column_moments=tuple(column_moments),
        )

    if config is None:
        config = _fastest(call, fused, matrices, outputs, activations)
    assert isinstance(config, ConvConfig)
    if reason := call.why_not(config):
        raise ValueError(f"conv: {reason}, got {config}; pass another config")
    whole = fused(config)
    whole.product.check_shared_bytes(whole.shared_bytes)
    weights = w.astype(x.dtype).reshape(window.taps, *w.shape[-2:])
    if config.turns_weights and not flipped:
        weights = weights.transpose(0, 2, 1)
    return _launch(call, whole, xs, weights, vectors, matrices, name)


def _launch(
    call: ConvCall,
    whole: Epilogue,
    xs: Sequence[jax.Array],
    weights: jax.Array,
    vectors: Mapping[str, jax.Array],
    matrices: Mapping[str, jax.Array],
    name: str,
) -> dict[str, jax.Array]:
    """Runs the kernel; returns its results keyed by name."""
    shape, written = call.shapes
    results = whole.product.launch(
        tuple(call.window.splits(array) for array in xs),
        (weights,),
        (*vectors.values(), *(v.reshape(written) for v in matrices.values())),
        out_type=[
            *(jax.ShapeDtypeStruct(written, dtype) for dtype in whole.outputs.values()),
            *whole.moments_types,
        ],
        scratch=whole.scratch(),
        epilogue=whole.of_tile,
        name=name,
    )
    remaining = iter(results)
    found = {key: next(remaining).reshape(shape) for key in whole.outputs}
    return found | whole.merged_moments(remaining)


def _fastest(
    call: ConvCall,
    fused: Callable[[ConvConfig], Epilogue],
    matrices: Mapping[str, jax.Array],
    outputs: Mapping[str, Any],
    activations: int,
) -> ConvConfig:
    """Returns the config predicted fastest of those that fit into shared memory with the epilogue."""
    ranked = fitting(
        call,
        read_bytes=sum(v.dtype.itemsize for v in matrices.values()),
        written_bytes=sum(jnp.dtype(d).itemsize for d in outputs.values()),
        activations=activations,
    )
    return next(
        c
        for c in ranked
        if isinstance(c, ConvConfig) and fused(c).shared_bytes <= SHARED_MEMORY_BYTES
    )


def forward(
    x: jax.Array | tuple[jax.Array, jax.Array],
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    save_preactivation: bool,
    multiprocessors: int,
    config: Config | None = None,
    block: tuple[int, int] = (1, 1),
) -> tuple[jax.Array, jax.Array | None]:
    """Returns y = activation(z), and z = conv(x, w) + bias + residual if it is saved, else None.

    `block` is the rows and columns of pixels that a row of the product computes, as in `conv`.
    """
    dtype = (x[0] if isinstance(x, tuple) else x).dtype
    results = _layer(
        x,
        w,
        bias,
        residual,
        activation,
        window=window,
        outputs={"y": dtype} | ({"preactivation": dtype} if save_preactivation else {}),
        multiprocessors=multiprocessors,
        config=config,
        block=block,
    )
    return results["y"], results.get("preactivation")


def _layer(
    x: jax.Array | tuple[jax.Array, jax.Array],
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: str | None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Returns a dict of `conv`'s results, with y = activation(conv(x, w) + bias + residual).

    The names are those in the options `outputs` ("y", "preactivation") and "mean_y" and "variance_y" for
    `column_moments`.
    """
    dtype = (x[0] if isinstance(x, tuple) else x).dtype
    return conv(
        x,
        w,
        epilogue=functools.partial(_sum_and_activation, activation, dtype),
        vectors={"bias": bias},
        matrices={"residual": residual},
        activations=int(activation not in (None, *ARITHMETIC)),
        **options,
    )


def _sum_and_activation(activation, dtype, z, *, bias=None, residual=None):
    z = z if bias is None else z + bias
    z = z if residual is None else z + residual
    return {"y": activate(activation, z, dtype), "preactivation": z}


def forward_and_statistics(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    multiprocessors: int,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y = activation(conv(x, w) + bias + residual), and y's float32 mean and variance [F]."""
    results = _layer(
        x,
        w,
        bias,
        residual,
        activation,
        window=window,
        outputs={"y": x.dtype},
        column_moments=("y",),
        multiprocessors=multiprocessors,
        config=config,
        name="conv_and_statistics",
    )
    return results["y"], results["mean_y"], results["variance_y"]


def why_quantized_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    out_dtypes: Mapping[str, Any],
    channels: Mapping[str, int],
    sizes: tuple[int, ...],
    window: Window,
) -> str | None:
    """Returns None if a convolution of int8 can run, else why not.

    Args:
      dtypes: the dtypes of x and the weights, keyed by name.
      out_dtypes: the dtypes of the result and the residual keyed by name, None for an absent one.
      channels: the channels of x, under "x", and of the result.
      sizes: the sizes of x: images, then each axis of the picture.
    """
    for name, dtype in dtypes.items():
        if dtype != jnp.int8:
            return f"it convolves int8 with int8, and {name} has dtype {jnp.dtype(dtype)}"
    if channels["x"] % 16:
        return f"it copies int8 of multiples of 16 channels, and x has {channels['x']}"
    if window.is_strided and channels["x"] % 128:
        return f"with strides it takes int8 of multiples of 128 channels, and x has {channels['x']}"
    if window.is_pointwise:
        return "a window of one weight is a matrix product"
    for name, dtype in out_dtypes.items():
        if dtype is not None and dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"it takes float32, bfloat16 and float16, and {name} is {jnp.dtype(dtype)}"
    return why_unsupported(
        compute_capability=compute_capability,
        dtypes={},
        channels=channels,
        sizes=sizes,
        window=window,
    )


def quantized_forward(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    out_dtype: Any,
    multiprocessors: int,
    config: Config | None = None,
) -> jax.Array:
    """Returns activation(scale * conv(x, w) + bias + residual).

    Args:
      x: int8 [B, *spatial, C].
      w: int8 [*kernel, C, F].
      scale: the product [F] of the scales of x and w.
    """

    def epilogue(z, *, scale, bias=None, residual=None):
        z = z * scale
        z = z if bias is None else z + bias
        z = z if residual is None else z + residual
        return {"y": activate(activation, z, out_dtype)}

    return conv(
        x,
        w,
        window=window,
        epilogue=epilogue,
        vectors={"scale": scale, "bias": bias},
        matrices={"residual": residual},
        outputs={"y": out_dtype},
        activations=int(activation not in (None, *ARITHMETIC)),
        multiprocessors=multiprocessors,
        config=config,
        name="quantized_conv",
    )["y"]


def input_gradient(
    dy: jax.Array,
    w: jax.Array,
    *,
    other: jax.Array | None = None,
    rectified: jax.Array | None = None,
    window: Window,
    multiprocessors: int,
    config: Config | None = None,
) -> jax.Array:
    """Returns dgrad [B, *spatial, C] of a convolution by `window` with w [*kernel, C, F].

    Args:
      other: the gradient from another use of x, which is added.
      rectified: x, if it is the result of a relu; the gradient is zero where x is not positive.
    """

    def epilogue(dx, *, other=None, rectified=None):
        dx = dx if other is None else dx + other
        return {"dx": dx if rectified is None else jnp.where(rectified > 0, dx, 0.0)}

    results = conv(
        dy,
        w,
        window=window.transposed(),
        epilogue=epilogue,
        matrices={"other": other, "rectified": rectified},
        outputs={"dx": dy.dtype},
        flipped=True,
        multiprocessors=multiprocessors,
        config=config,
        name="conv_input_gradient",
    )
    return results["dx"]
