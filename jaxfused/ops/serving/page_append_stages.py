"""Writes new tokens into pages, by a kernel that looks up each token's page or by XLA's scatters."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.quantize.quantize import quantize
from jaxfused.ops.serving import append_cuda
from jaxfused.ops.serving.append_stages import NO_PALLAS
from jaxfused.ops.serving.example_operands import example_operands
from jaxfused.ops.serving.pages import (
    Layout,
    Pages,
    Pools,
    are_shared,
    checked_number,
    is_in_pool,
    tokens_of,
    values_and_scale,
)
from jaxfused.runtime import sharding
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import choose_without_stages
from jaxfused.runtime.kernel_gradient import gradients_in_xla, kernel_gradient
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.runner import Axes, Results, Runner


class Arrays(NamedTuple):
    """Operands; those after `bounds` may be None, and so may `kept_value` if one pool has both."""

    kept_key: Any
    """Pool of keys in its layout; `kept_value` is the pool of values. See `Pools`."""
    kept_value: Any
    key: Any
    """New keys [tokens, K, H]; `value` has the new values [tokens, K, V]."""
    value: Any
    lengths: Any
    """Tokens of each sequence with the new ones, int32 [B]."""
    table: Any
    """Page table, int32 [B, n]."""
    bounds: Any
    """First row of each sequence, then the end of the last, int32 [B + 1]."""
    sequences: Any
    """Number of sequences, int32 [1]; None for B."""
    key_scale: Any
    """Scales of a quantised pool, float32, shaped like it without H."""
    value_scale: Any

    def pools(self, layout: Layout) -> Pools:
        """Returns the pools of these arrays."""

        def pool(values: Any, scale: Any) -> Any:
            if scale is None:
                return values
            return QuantizedArray(values, scale[..., None], None, axis=-1)

        key, value = pool(self.kept_key, self.key_scale), pool(self.kept_value, self.value_scale)
        return Pools(key, value, layout)


def _results(pools: Pools) -> Results:
    """Returns the pools' arrays (keys, values, scales of keys, scales of values), or None for each."""
    (key, key_scale), (value, value_scale) = map(values_and_scale, (pools.key, pools.value))
    return key, value, key_scale, value_scale


def append_xla(pools: Pools, arrays: Arrays) -> Pools:
    """Returns the pools with the new tokens, written by XLA's scatters."""
    layout, pages, size = pools.layout, pools.pages, pools.page_size
    tokens = tokens_of(
        "append_to_pages", arrays.key.shape[0], arrays.lengths, arrays.bounds, arrays.sequences
    )
    slot = lax.div(tokens.position, jnp.int32(size))
    most = arrays.table.shape[1]
    page = arrays.table[tokens.sequence, jnp.clip(slot, 0, most - 1)]
    fits = tokens.is_token & (slot < most) & is_in_pool(page, pages)
    # Ids outside the pool are dropped; negative ones too, which JAX would count from the end.
    page, place = jnp.where(fits, page, pages), lax.rem(tokens.position, jnp.int32(size))
    index: Any = (slice(None), page, place) if layout == "KPSH" else (page, place)

    def written(pool: Pages, new: jax.Array) -> Pages:
        new = new.swapaxes(0, 1) if layout == "KPSH" else new
        if not isinstance(pool, QuantizedArray):
            return pool.at[index].set(_as_kept(new, pool.dtype), mode="drop")
        given = None
        if are_shared(pool, layout):
            given = pool.scale[:, 0] if layout == "KPSH" else pool.scale[0]
        kept = quantize(new, pool.dtype, axis=-1, scale=given)
        values = pool.values.at[index].set(kept.values, mode="drop")
        if given is not None:
            return replace(pool, values=values)
        scale = pool.scale.at[index].set(kept.scale.astype(pool.scale.dtype), mode="drop")
        return replace(pool, values=values, scale=scale)

    key, value = arrays.key, arrays.value
    if pools.value is None:
        both = jnp.stack([key, value], axis=2).reshape(key.shape[0], 2 * pools.heads, -1)
        return pools._replace(key=written(pools.key, both))
    return pools._replace(key=written(pools.key, key), value=written(pools.value, value))


def _as_kept(new: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers in the pages' dtype, clipped for float8, as XLA's cast gives NaN or infinity."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        new = jnp.clip(new, -largest, largest)
    return new.astype(dtype)


@dataclass(frozen=True)
class AppendToPages:
    """Writes tokens in place and returns (keys, values, scales of keys, scales of values)."""

    layout: Layout

    @property
    def name(self) -> str:
        return "append_to_pages forward"

    def axes(self, *operands) -> Axes:
        arrays = Arrays(*operands)
        pool = "kps" if self.layout == "KPSH" else "psk"
        # In a pool of both, keys and values alternate along the axis of heads, so devices do not
        # split it.
        kept, whole = (pool + "h", pool + "v"), "tpshvbnmcu"
        if arrays.kept_value is None:
            kept, whole = ("psch", "pscv"), whole + "k"
        tokens = ("tkh", "tkv", "b", "bn", "m", "u", pool, pool)
        results = (
            kept[0],
            None if arrays.kept_value is None else kept[1],
            *(None if a is None else pool for a in (arrays.key_scale, arrays.value_scale)),
        )
        return Axes((*kept, *tokens), results, whole=whole)

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        arrays = Arrays(*operands)
        kept, has_scales = jnp.dtype(arrays.kept_key.dtype), arrays.key_scale is not None
        if has_scales != (kept.itemsize == 1):
            why = "numbers of 8 bits without scales are written as they are"
            return {"pallas": NO_PALLAS, "cuda": why, "xla": None}
        of_cuda = append_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=arrays.key.dtype,
            value_dtype=arrays.value.dtype,
            kept=kept,
            columns=max(arrays.key.shape[-1], arrays.value.shape[-1]),
            places=arrays.kept_key.shape[2 if self.layout == "KPSH" else 1],
        )
        return {"pallas": NO_PALLAS, "cuda": of_cuda, "xla": None}

    def estimate(self, device, able, *operands) -> Estimate:
        """Prefers the kernel: on an H200, 64 sequences took 5 us, and 22 us by XLA's scatters."""
        del device, able, operands
        return Rule(("cuda",), "XLA finds each token's place and writes it in some 20 kernels")

    def examples(self, random, device, *operands) -> Any:
        del device
        return example_operands(
            random, Arrays(*operands), lengths=0, table=0, bounds=0, sequences=0
        )

    def run(self, implementation, device, *operands) -> Results:
        del device
        arrays = Arrays(*operands)
        if implementation == "xla":
            return _results(append_xla(arrays.pools(self.layout), arrays))
        written = append_cuda.forward(
            append_cuda.Tokens(
                arrays.key,
                arrays.value,
                arrays.lengths,
                arrays.bounds,
                arrays.sequences,
                arrays.table,
            ),
            append_cuda.Pages(
                arrays.kept_key, arrays.kept_value, arrays.key_scale, arrays.value_scale
            ),
            kept=arrays.kept_key.dtype,
            sequence_tokens=None,
            heads_first=self.layout == "KPSH",
        )
        return tuple(written)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return None


def append(
    pools: Pools, tokens: Sequence[jax.Array], sequences: Any, implementation: str | None
) -> Pools:
    """Returns the pools with new `tokens`: key, value, lengths, table and bounds as in `Arrays`."""
    key, value, lengths, table, bounds = tokens
    parts = [values_and_scale(pool) for pool in (pools.key, pools.value)]
    (kept_key, key_scale), (kept_value, value_scale) = parts
    scales = [scale for _, scale in parts if scale is not None]
    count = None if sequences is None else checked_number("append_to_pages", sequences)
    arrays = Arrays(
        *(kept_key, kept_value, key, value, lengths, table, bounds, count, key_scale, value_scale)
    )
    kept = [pool for pool, _ in parts if pool is not None]
    has_own = [scale.shape == pool.shape[:-1] for pool, scale in parts if scale is not None]
    # The kernel needs one dtype for all pools: floats, or values with a float32 scale per token and
    # head.
    fits = len({pool.dtype for pool in kept}) == 1 and len(has_own) in (0, 2) and all(has_own)
    if not fits or any(scale.dtype != jnp.float32 for scale in scales):
        why = (
            "it writes keys and values of one dtype, with a scale of each token and head in float32 if"
            " they are quantised, and these pages are of others"
        )
        reasons = {"pallas": NO_PALLAS, "cuda": why, "xla": None}
        choose_without_stages("append_to_pages", implementation, reasons, key, kept_key)
        return append_xla(pools, arrays)
    run = Runner(implementation, dispatch.current_device(key, kept_key))
    stage = AppendToPages(pools.layout)
    choice = run.choice(stage, *arrays)
    if choice.implementation == "xla":
        # XLA's scatters do not run through `Runner`, so `explain` must not look for a kernel.
        dispatch.record(choice._replace(kernel=None))
        return append_xla(pools, arrays)
    spelt = stage.axes(*arrays)
    aligned = sharding.align(arrays, operand_axes=spelt.operands, whole=spelt.whole)
    new = _append(run, stage, Arrays(*aligned))
    written: list[Any] = []
    for i, pool in enumerate((pools.key, pools.value)):
        if isinstance(pool, QuantizedArray):
            written.append(replace(pool, values=new[i], scale=new[2 + i][..., None]))
        else:
            written.append(new[i])
    key_pages, value_pages = written
    return Pools(key_pages, value_pages, pools.layout)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="append_to_pages")
def _append(run: Runner, stage: AppendToPages, arrays: Arrays) -> Results:
    return run(stage, *arrays)


def _append_fwd(run: Runner, stage: AppendToPages, arrays: Arrays) -> tuple[Results, Arrays]:
    return _append(run, stage, arrays), arrays


def _append_bwd(run: Runner, stage: AppendToPages, arrays: Arrays, dresults: Any) -> Any:
    """Differentiates XLA's scatters."""
    del run

    def f(arrays: Arrays) -> Results:
        return _results(append_xla(arrays.pools(stage.layout), arrays))

    return gradients_in_xla(f, arrays, dresults)


_append.defvjp(_append_fwd, _append_bwd)
