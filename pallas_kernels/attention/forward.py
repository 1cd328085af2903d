"""Attention on Hopper, forward: flash attention with a producer and two or three consumers.

One warpgroup copies Q, K and V by TMA; each of the others holds 64 queries. A consumer issues Q K^T
of a block together with P V of the one before, and takes exponentials as soon as the first is done,
so that the tensor cores have its second product, and those of the other consumers, meanwhile. CTAs
are persistent: the copies of the next tile run during the end of this one.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.logits import (
    EMPTY_LSE,
    LOG2E,
    Logits,
    Operands,
    Tile,
    saved_length,
)
from pallas_kernels.attention.mask import segment_blocks
from pallas_kernels.attention.tiles import QueryTiles, operand_memory, padded_columns
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES

_ROWS = 64
"""Queries of a consumer: what one wgmma instruction takes."""

_LOWEST = -0.5 * float(jnp.finfo(jnp.float32).max)
"""Where the running maximum starts: finite, so that its difference to -inf is not NaN."""


@dataclass(frozen=True)
class ForwardConfig:
    """How the work is cut: a tile of 64 queries a consumer against blocks of keys."""

    consumers: int = 2
    key_block: int = 128
    stages: int = 2
    """Blocks of K, and of V, in shared memory."""
    takes_turns: bool = False
    """Whether consumers issue products in turns, so that they take exponentials in turns too."""
    separate_output: bool = True
    """Whether the output has shared memory of its own, or goes where Q was if it is as wide."""
    heads_together: int = 1
    """Heads whose tiles are next to each other, for their K and V to stay in the L2 cache."""

    def __post_init__(self):
        if self.consumers not in (1, 2, 3):
            raise ValueError(f"consumers must be 1, 2 or 3, got {self.consumers}")
        if self.key_block % 16 or not 64 <= self.key_block <= 256:
            raise ValueError(
                f"key_block must be a multiple of 16 from 64 to 256, got {self.key_block}"
            )
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")

    @property
    def query_block(self) -> int:
        return self.consumers * _ROWS

    def shared_bytes(self, head_size: int, value_size: int) -> int:
        """Of Q, K, V and the output in 16-bit elements, and no less than the barriers beside them."""
        head_width, value_width = shared_width(head_size), shared_width(value_size)
        elements = self.query_block * head_width
        elements += self.stages * self.key_block * (head_width + value_width)
        if self.has_own_output(head_size, value_size):
            elements += self.query_block * value_width
        return 2 * elements + BARRIER_BYTES

    def has_own_output(self, head_size: int, value_size: int) -> bool:
        """Whether the output has shared memory of its own: also where that of Q has another width."""
        return self.separate_output or shared_width(head_size) != shared_width(value_size)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of a consumer and of the producer, from 64 Ki a multiprocessor."""
        return {1: (232, 40), 2: (240, 24), 3: (160, 32)}[self.consumers]


def default_config(
    head_size: int, value_size: int, key_count: int, queries_per_key_head: int
) -> ForwardConfig:
    """The measured choice. TFLOP/s on an H200, bf16, B4 T4096 N16 unless said otherwise.

    Head size 64: 531 with 3 consumers that take turns, 515 without turns, 426 with 2 consumers;
    causal 467, 446, 399. Head size 128: 702 without turns, 689 with them, 673 with blocks of 160
    keys; T 16384: 712, 703. Head size 256, B2, causal: 708 without turns, 698 with them.
    """
    widest = max(head_size, value_size)
    # 16 MB of K and V at a time: T 4096, head size 128: 698 with 8 MB, 671 with 32 MB.
    head_bytes = 2 * key_count * (head_size + value_size)
    together = max(1, 2**24 // head_bytes) * queries_per_key_head
    if widest <= 64:
        return ForwardConfig(consumers=3, takes_turns=True, heads_together=together)
    if widest <= 128:
        return ForwardConfig(heads_together=together)
    config = ForwardConfig(key_block=64, separate_output=False, heads_together=together)
    if config.shared_bytes(head_size, value_size) <= SHARED_MEMORY_BYTES:
        return config
    return replace(config, consumers=1)


def shared_width(head_size: int) -> int:
    """The head size in shared memory: TMA fills what is beyond the array's with zeros."""
    for width in (16, 32, 64):
        if head_size <= width:
            return width
    return -(-head_size // 16) * 16


def copyable(array: jax.Array) -> jax.Array:
    """[B, T, N, H] with what Mosaic's copies of tiles ask of a global array, padded where it lacks.

    They take it in tiles of 8 x 16 to 64 elements, whole ones unless there is but one of them.
    """
    length, head_size = array.shape[1], array.shape[3]
    rows = -length % 8 if length > 8 else 0
    columns = -head_size % 16 if head_size > 64 else 0
    if rows == columns == 0:
        return array
    return jnp.pad(array, ((0, 0), (0, rows), (0, 0), (0, columns)))


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, V], lse [B, N, R]), see pallas_kernels.attention.attention."""
    batch, query_count, heads, head_size = query.shape
    key_count, key_heads, value_size = value.shape[1:]
    mask = logits.mask
    dtype = query.dtype
    config = config or default_config(head_size, value_size, key_count, heads // key_heads)
    rows, block, stages = config.query_block, config.key_block, config.stages
    consumers = config.consumers
    head_width, value_width = shared_width(head_size), shared_width(value_size)
    query, key, value = copyable(query), copyable(key), copyable(value)
    # What arrays only some calls have: the bounds by segments, then the operands.
    segment_bounds = []
    if mask.has_segments:
        segments = (operands.query_segments, operands.key_segments)
        segment_bounds = [segment_blocks(*segments, rows, block)]
    operands = operands.padded(rows, block)
    present = [name for name, array in operands._asdict().items() if array is not None]
    tiles = QueryTiles(mask, heads, rows, block)
    schedule = tiles.schedule(batch, config.heads_together, multiprocessors)
    lse_length = saved_length(query_count)
    # Whether blocks are masked: the last of a consumer, then the others; None is by their number.
    last_is_masked = not mask.is_always_full(rows, block)
    others_are_masked: bool | None = None
    if mask.has_explicit:
        others_are_masked = True
    elif not mask.has_left_edge and mask.right_partial_blocks(_ROWS, block) == 1:
        others_are_masked = False

    def kernel(q_gmem, k_gmem, v_gmem, schedule_gmem, *refs, **scratch):
        *operand_refs, out_gmem, lse_gmem = refs
        bounds_gmem = operand_refs.pop(0) if mask.has_segments else None
        ops = Operands(**dict(zip(present, operand_refs, strict=True)))
        q_smem, k_smem, v_smem = scratch["q_smem"], scratch["k_smem"], scratch["v_smem"]
        out_smem = scratch.get("out_smem")
        q_full, q_free = scratch["q_full"], scratch["q_free"]
        k_full, k_free = scratch["k_full"], scratch["k_free"]
        v_full, v_free = scratch["v_full"], scratch["v_free"]
        turn = scratch.get("turn")
        wg_idx = lax.axis_index("wg")
        cta_idx = lax.axis_index("cta")
        tile_count = schedule_gmem[cta_idx, 0]

        def place(tile_idx):
            return tiles.place(schedule_gmem[cta_idx, tile_idx + 1], ops, bounds_gmem)

        @pl.when(wg_idx == consumers)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def copy_tile(tile_idx, step):
                at = place(tile_idx)
                key_head = lax.div(at.head_idx, jnp.int32(heads // key_heads))

                def copy_queries(consumer):
                    plgpu.barrier_wait(q_free.at[consumer])
                    plgpu.copy_gmem_to_smem(
                        q_gmem.at[
                            at.batch_idx,
                            pl.ds(at.start + consumer * _ROWS, _ROWS),
                            at.head_idx,
                            padded_columns(head_width, at.batch_idx),
                        ],
                        q_smem.at[consumer],
                        q_full.at[consumer],
                    )

                def copy_block(gmem, smem, free, full, width, index, slot):
                    plgpu.barrier_wait(free.at[slot])
                    plgpu.copy_gmem_to_smem(
                        gmem.at[
                            at.batch_idx,
                            pl.ds(index * block, block),
                            key_head,
                            padded_columns(width, at.batch_idx),
                        ],
                        smem.at[slot],
                        full.at[slot],
                    )

                def copy_key(index, slot):
                    copy_block(k_gmem, k_smem, k_free, k_full, head_width, index, slot)

                def copy_value(index, slot):
                    copy_block(v_gmem, v_smem, v_free, v_full, value_width, index, slot)

                count = at.stop - at.first
                last = at.stop - 1
                # The first consumer starts as soon as its own queries are there.
                copy_queries(0)
                copy_key(last, lax.rem(step, jnp.int32(stages)))
                for consumer in range(1, consumers):
                    copy_queries(consumer)
                copy_value(last, lax.rem(step, jnp.int32(stages)))

                def copy_pair(i, _):
                    slot = lax.rem(step + i, jnp.int32(stages))
                    copy_key(last - i, slot)
                    copy_value(last - i, slot)

                lax.fori_loop(1, count, copy_pair, None)
                return step + count

            lax.fori_loop(0, tile_count, copy_tile, jnp.int32(0))
            # Every arrival is waited for: the interpreter's race detection insists on it.
            for slot in range(stages):
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.barrier_wait(v_free.at[slot])
            for consumer in range(consumers):
                plgpu.barrier_wait(q_free.at[consumer])

        @pl.when(wg_idx < consumers)
        def _consumer():
            plgpu.set_max_registers(config.registers[0], action="increase")
            for slot in range(stages):
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
            plgpu.barrier_arrive(q_free.at[wg_idx])
            q_wg_smem = q_smem.at[wg_idx]
            out_wg_smem = q_wg_smem if out_smem is None else out_smem.at[wg_idx]

            def take_turn():
                if config.takes_turns:
                    plgpu.barrier_wait(turn.at[wg_idx])

            def pass_turn():
                if config.takes_turns:
                    following = jnp.where(wg_idx == consumers - 1, 0, wg_idx + 1)
                    plgpu.barrier_arrive(turn.at[following])

            if config.takes_turns:

                @pl.when(wg_idx == consumers - 1)
                def _():
                    plgpu.barrier_arrive(turn.at[0])

            def attend(tile_idx, step):
                at = place(tile_idx)
                start = at.start + wg_idx * _ROWS
                # Blocks beyond what its own rows reach a consumer leaves to the others.
                own = at.key_blocks(start, start + _ROWS)
                own_stop = at.stop
                if mask.reach()[1] is not None:
                    own_stop = lax.clamp(at.first + 1, jnp.int32(own.stop), at.stop)

                def pass_over(i, _):
                    slot = lax.rem(step + i, jnp.int32(stages))
                    plgpu.barrier_wait(k_full.at[slot])
                    take_turn()
                    pass_turn()
                    plgpu.barrier_arrive(k_free.at[slot])
                    plgpu.barrier_wait(v_full.at[slot])
                    plgpu.barrier_arrive(v_free.at[slot])

                skipped = at.stop - own_stop
                lax.fori_loop(0, skipped, pass_over, None)
                step += skipped
                count = own_stop - at.first
                last = own_stop - 1
                full_first = own_stop - own.full_stop
                full_last = own_stop - own.full_start

                def softmax(products, maximum, total, i, masked):
                    tile = Tile(
                        at.batch_idx, at.head_idx, start, (last - i) * block, (_ROWS, block)
                    )
                    is_partial = masked
                    if masked is None:
                        is_partial = (i < full_first) | (i >= full_last)
                    x = logits.logits_if_masked(products, tile, ops, at.key_length, is_partial)
                    scaled = _times(jnp.max(x, axis=1), logits.multiplier)
                    new_maximum = jnp.maximum(maximum, scaled)
                    decay = jnp.exp2(maximum - new_maximum)
                    weights = jnp.exp2(
                        _times(x, logits.multiplier) - _rows(new_maximum, products.shape)
                    )
                    # Sums of columns 8 apart stay within a thread; across threads only at the end.
                    total = total * _rows(decay, total.shape)
                    columns = [weights[:, c : c + 8] for c in range(0, block, 8)]
                    total += functools.reduce(operator.add, columns)
                    if logits.dropout_rate > 0:
                        weights = logits.dropped(weights, tile, ops)
                    return weights.astype(dtype), new_maximum, total, decay

                plgpu.barrier_wait(q_full.at[wg_idx])
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(k_full.at[slot])
                take_turn()

                def first_products(s_acc):
                    plgpu.wgmma(s_acc, q_wg_smem, k_smem.at[slot].T)
                    pass_turn()
                    return s_acc[...]

                products = pl.run_scoped(first_products, plgpu.ACC((_ROWS, block), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                vector = plgpu.Layout.WGMMA.reduce(1)
                maximum = plgpu.layout_cast(jnp.full((_ROWS,), _LOWEST, jnp.float32), vector)
                total = plgpu.layout_cast(jnp.zeros((_ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
                weights, maximum, total, _ = softmax(products, maximum, total, 0, last_is_masked)
                out = plgpu.layout_cast(
                    jnp.zeros((_ROWS, value_width), jnp.float32), plgpu.Layout.WGMMA
                )

                def advance(i, carry, *, masked):
                    out, weights, maximum, total = carry
                    k_slot = lax.rem(step + i, jnp.int32(stages))
                    v_slot = lax.rem(step + i - 1, jnp.int32(stages))
                    plgpu.barrier_wait(k_full.at[k_slot])
                    plgpu.barrier_wait(v_full.at[v_slot])
                    take_turn()

                    def both_products(s_acc, out_acc):
                        out_acc[...] = out
                        plgpu.wgmma(s_acc, q_wg_smem, k_smem.at[k_slot].T)
                        plgpu.wgmma(out_acc, weights, v_smem.at[v_slot])
                        pass_turn()
                        products = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        plgpu.barrier_arrive(k_free.at[k_slot])
                        result = softmax(products, maximum, total, i, masked)
                        new_out = plgpu.wgmma_accumulator_load(out_acc, wait_n=0)
                        plgpu.barrier_arrive(v_free.at[v_slot])
                        return new_out, *result

                    out, weights, maximum, total, decay = pl.run_scoped(
                        both_products,
                        plgpu.ACC((_ROWS, block), jnp.float32),
                        plgpu.ACC((_ROWS, value_width), jnp.float32),
                    )
                    out = out * _rows(decay, out.shape)
                    return out, weights, maximum, total

                carry = (out, weights, maximum, total)
                carry = lax.fori_loop(
                    1, count, functools.partial(advance, masked=others_are_masked), carry
                )
                out, weights, maximum, total = carry
                total = jnp.sum(total, axis=1)
                if out_smem is not None:
                    plgpu.barrier_arrive(q_free.at[wg_idx])

                v_slot = lax.rem(step + count - 1, jnp.int32(stages))
                plgpu.barrier_wait(v_full.at[v_slot])

                def last_products(out_acc):
                    out_acc[...] = out
                    plgpu.wgmma(out_acc, weights, v_smem.at[v_slot])
                    return out_acc[...]

                out = pl.run_scoped(last_products, plgpu.ACC((_ROWS, value_width), jnp.float32))
                plgpu.barrier_arrive(v_free.at[v_slot])

                if logits.has_sinks:
                    sink = ops.sinks[at.head_idx] * LOG2E
                    new_maximum = jnp.maximum(maximum, sink)
                    decay = jnp.exp2(maximum - new_maximum)
                    total = total * decay + jnp.exp2(sink - new_maximum)
                    maximum = new_maximum
                    out = out * _rows(decay, out.shape)
                empty = total == 0.0
                if ops.query_lengths is not None:
                    row = start + plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=vector)
                    empty = empty | (row >= at.query_length)
                lse = jnp.where(empty, EMPTY_LSE, (maximum + jnp.log2(total)) * (1 / LOG2E))
                inverse = jnp.where(
                    empty, 0.0, (1.0 / logits.keep_probability) / jnp.where(empty, 1.0, total)
                )
                out = out * _rows(inverse, out.shape)

                # The copies of the previous tile may still be reading this shared memory.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_wg_smem[...] = out.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    out_wg_smem,
                    out_gmem.at[
                        at.batch_idx,
                        pl.ds(start, _ROWS),
                        at.head_idx,
                        padded_columns(value_width, at.batch_idx),
                    ],
                )

                # Registers are written without a test for the end, so rows beyond it are not written.
                @_when_needed(start < lse_length, lse_length < tiles.count * rows)
                def _write_lse():
                    lse_gmem[at.batch_idx, at.head_idx, pl.ds(start, _ROWS)] = lse

                if out_smem is None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(q_free.at[wg_idx])
                return step + count

            lax.fori_loop(0, tile_count, attend, jnp.int32(0))
            pl.when(wg_idx == 0)(take_turn)
            plgpu.wait_smem_to_gmem(0)

    shared = functools.partial(operand_memory, dtype=dtype)
    scratch: dict[str, Any] = dict(
        q_smem=shared((consumers, _ROWS, head_width)),
        k_smem=shared((stages, block, head_width)),
        v_smem=shared((stages, block, value_width), contracted=block),
        q_full=plgpu.Barrier(num_barriers=consumers),
        q_free=plgpu.Barrier(num_barriers=consumers),
        k_full=plgpu.Barrier(num_barriers=stages),
        k_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    )
    if config.takes_turns:
        scratch["turn"] = plgpu.Barrier(num_barriers=consumers)
    if config.has_own_output(head_size, value_size):
        scratch["out_smem"] = shared((consumers, _ROWS, value_width))

    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, query.shape[1], heads, value.shape[3]), dtype),
            jax.ShapeDtypeStruct((batch, heads, lse_length), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(schedule.shape[0],),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="attention_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, schedule, *segment_bounds, *(getattr(operands, name) for name in present))
    return out[:, :query_count, :, :value_size], lse


def _when_needed(condition: jax.Array, is_needed: bool) -> Callable[[Callable[[], None]], None]:
    """`pl.when(condition)` where the condition is needed, else what is always done."""
    return pl.when(condition) if is_needed else lambda f: f()


def _rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [0])


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * factor
