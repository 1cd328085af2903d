"""Attention on Hopper, backward for S <= 256: one kernel with all keys of a head on an SM.

Since a CTA holds all keys of a head, dQ of 64 queries is complete when it is computed: nothing is summed
in global memory, and the bits are the same in every run. Two warpgroups hold dK and dV of up to 128 keys
each in registers and iterate over the queries, 64 at a time. Their tiles of logits have keys as rows, so
that P^T and dS^T are in the registers where dV = P^T dO and dK = dS^T Q need them. dS^T also goes
through shared memory to a third warpgroup, which computes dQ = dS K, computes the sum of out * dO over
each row, which dS needs, and copies the operands of the next steps.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import store
from pallas_kernels.attention import memory
from pallas_kernels.attention.backward_rows import row_gradients, row_statistics
from pallas_kernels.attention.logits import Logits, Operands, TransposedTile
from pallas_kernels.attention.mask import Extent
from pallas_kernels.attention.memory import WGMMA_ROWS, Columns, Heads, Matrix
from pallas_kernels.attention.shape import Shape
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES


@dataclass(frozen=True)
class ShortBackwardConfig:
    """Division of a head over warpgroups, and the pipeline stages of its copies."""

    warpgroups: int
    """Warpgroups that compute dK and dV; one more copies and computes dQ."""
    key_tiles: int
    """Tiles of 64 keys that each of these warpgroups holds."""
    key_slots: int
    """Pipeline stages of K and V, of one head each. With 2, the next head's K and V are copied while the
    current head is computed."""
    query_slots: int = 2
    """Pipeline stages of Q, dO and out, of 64 queries each."""

    @property
    def tiles(self) -> int:
        """Tiles of 64 keys that all warpgroups hold together."""
        return self.warpgroups * self.key_tiles

    @property
    def keys(self) -> int:
        return self.tiles * WGMMA_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes dK and dV, and of a thread of the remaining warpgroup.

        Their sum over the warpgroups is fixed at launch: with 3 warpgroups, 3 * 168.
        """
        return {1: (240, 128), 2: (216, 72)}[self.warpgroups]

    def accumulator_columns(self, head_size: int, value_size: int) -> int:
        """Returns the columns of dK and dV together, over `key_tiles`, in a warpgroup's registers."""
        head, value = (Columns.in_wide_blocks(size) for size in (head_size, value_size))
        return self.key_tiles * (head.width + value.width)

    def fits(self, head_size: int, value_size: int) -> bool:
        """Returns whether the buffers for heads of these sizes fit into a CTA's shared memory."""
        head, value = (Columns.in_wide_blocks(size) for size in (head_size, value_size))
        keys, queries = self.key_slots * self.keys, self.query_slots * WGMMA_ROWS
        count = head.bytes(keys) + value.bytes(keys)
        count += head.bytes(queries) + value.bytes(2 * queries)
        count += 2 * self.keys * WGMMA_ROWS + head.bytes(WGMMA_ROWS)
        return count + 5 * 4 * queries <= SHARED_MEMORY_BYTES - BARRIER_BYTES


def smallest_config(key_count: int) -> ShortBackwardConfig:
    """Returns the config that takes the least shared memory; with large heads it may not fit."""
    tiles = -(-key_count // WGMMA_ROWS)
    warpgroups = min(2, tiles)
    return ShortBackwardConfig(warpgroups, -(-tiles // warpgroups), key_slots=1)


def candidates(shape: Shape) -> tuple[ShortBackwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first."""
    smallest = smallest_config(shape.key_count)
    slots = ((2, 3), (2, 2), (1, 2), (1, 3))
    configs = (replace(smallest, key_slots=keys, query_slots=queries) for keys, queries in slots)
    sizes = (shape.head_size, shape.value_size)
    return tuple(config for config in configs if config.fits(*sizes))


Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    logits: Logits,
    multiprocessors: int,
    config: ShortBackwardConfig | None = None,
    dbias_dtype: Any = jnp.float32,
) -> Gradients:
    """Returns (dquery, dkey, dvalue, dbias, dsinks) as pallas_kernels.attention.attention.backward does.

    lse is [B, N, R] as `forward` returned it. If the bias differs between keys, the gradient of the
    logits passes through global memory as [B, N, S, T], and XLA sums it over the bias's broadcast axes.
    That array has the bias's dtype if it has 16 bits, as what JAX's rule sums in a program without this
    kernel; else it is in `dbias_dtype`. The sum is in float32.
    """
    (dquery, dkey, dvalue), dbias, dsinks = _run(
        (query, key, value),
        Shape.of(query, key, value),
        operands,
        (out, lse, dout, dlse),
        logits,
        multiprocessors,
        config,
        dbias_dtype,
    )
    return dquery, dkey, dvalue, dbias, dsinks


def backward_packed(
    packed: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    key_heads: int,
    logits: Logits,
    multiprocessors: int,
    config: ShortBackwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (dpacked, dbias, dsinks), the gradients of `forward_packed`."""
    (dpacked,), dbias, dsinks = _run(
        (packed,),
        Shape.of_packed(packed, key_heads),
        operands,
        (out, lse, dout, dlse),
        logits,
        multiprocessors,
        config,
    )
    return dpacked, dbias, dsinks


def _run(
    arrays: tuple[jax.Array, ...],
    shape: Shape,
    operands: Operands,
    saved: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    logits: Logits,
    multiprocessors: int,
    config: ShortBackwardConfig | None,
    dbias_dtype: Any = jnp.float32,
) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
    out, lse, dout, dlse = saved
    config = config or candidates(shape)[0]
    bias = operands.bias
    dbias, dsinks = None, None
    if bias is not None or operands.sinks is not None:
        rows = row_statistics(out, lse, dout, dlse, logits)
        dbias, dsinks = row_gradients(operands, *rows, dlse, logits)
    dlogits_dtype = None
    if bias is not None and dbias is None:
        dlogits_dtype = bias.dtype if bias.dtype.itemsize == 2 else dbias_dtype
    kernel = _ShortBackward(
        shape,
        arrays[0].dtype,
        logits,
        config,
        ctas=min(multiprocessors, shape.batch * shape.key_heads),
        has_dlse=dlse is not None,
        dlogits_dtype=dlogits_dtype,
    )
    operands = operands.padded(WGMMA_ROWS, config.keys).transposed()
    optional, tree = jax.tree.flatten(operands)
    inputs = [*arrays, out, lse, dout]
    if dlse is not None:
        inputs.append(jnp.pad(dlse, ((0, 0), (0, 0), (0, lse.shape[-1] - dlse.shape[-1]))))
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    if dlogits_dtype is not None:
        results.append(kernel.logits_gradient())

    def run(*refs, **shared):
        refs = iter(refs)

        def heads():
            of_arrays = [next(refs) for _ in arrays]
            return memory.queries_keys_values(of_arrays, shape.heads, shape.key_heads)

        kernel(
            _Cta(
                heads=heads(),
                out=Heads(next(refs)),
                lse=next(refs),
                dout=Heads(next(refs)),
                dlse=None if dlse is None else next(refs),
                operands=jax.tree.unflatten(tree, [next(refs) for _ in optional]),
                gradients=heads(),
                dlogits=None if dlogits_dtype is None else next(refs),
                shared=shared,
                wg_idx=lax.axis_index("wg"),
                cta_idx=(cta_idx := lax.axis_index("cta")),
                items=kernel.items_of(cta_idx),
            )
        )

    gradients = plgpu.kernel(
        run,
        out_type=results,
        scratch_types=kernel.memory(),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        kernel_name="attention_short_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs, *optional)
    if dlogits_dtype is not None:
        dbias = gradients[-1][:, :, : shape.key_count, : shape.query_count].swapaxes(2, 3)
        broadcast = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        if broadcast:
            dbias = jnp.sum(dbias, axis=broadcast, keepdims=True, dtype=jnp.float32)
    if dbias is not None:
        dbias = dbias.astype(dbias_dtype)
    return gradients[: len(arrays)], dbias, dsinks


class _Cta(NamedTuple):
    """References and traced numbers of a CTA, for one of its warpgroups."""

    heads: tuple[Heads, Heads, Heads]
    """Q, K and V in global memory."""
    out: Heads
    lse: Any
    dout: Heads
    dlse: Any
    operands: Operands
    gradients: tuple[Heads, Heads, Heads]
    """dQ, dK and dV in global memory."""
    dlogits: Any
    """Gradient of the logits, with keys as rows and queries as columns, or None."""
    shared: dict[str, Any]
    """Buffers of shared memory and barriers, by name."""
    wg_idx: jax.Array
    cta_idx: jax.Array
    items: jax.Array
    """Number of items (key heads of batch entries) that the CTA processes."""

    def arrive(self, barrier: str, slot: Any = None) -> None:
        plgpu.barrier_arrive(self._barrier(barrier, slot))

    def wait(self, barrier: str, slot: Any = None) -> None:
        plgpu.barrier_wait(self._barrier(barrier, slot))

    def _barrier(self, name: str, slot: Any) -> Any:
        barrier = self.shared[name]
        return barrier if slot is None else barrier.at[slot]

    def matrix(self, name: str, *index: Any) -> Matrix:
        return Matrix.of(self.shared[f"{name}_smem"], *index)


class _Place(NamedTuple):
    """Position of a step's queries: batch entry, query head and first query."""

    batch_idx: jax.Array
    head_idx: jax.Array
    start: jax.Array


@dataclass(frozen=True)
class _ShortBackward:
    """The backward kernel for up to 256 keys: its static parameters, shared memory and code.

    An item is a key head of a batch entry. Its steps go over the queries of its group, 64 at a time.
    """

    shape: Shape
    dtype: Any
    logits: Logits
    config: ShortBackwardConfig
    ctas: int
    has_dlse: bool
    dlogits_dtype: Any
    """Dtype in which the gradient of the logits is written, or None if it is not written."""

    @property
    def head(self) -> Columns:
        return Columns.in_wide_blocks(self.shape.head_size)

    @property
    def value(self) -> Columns:
        return Columns.in_wide_blocks(self.shape.value_size)

    @property
    def chunks(self) -> int:
        """Steps of one query head, with 64 queries each."""
        return -(-self.shape.query_count // WGMMA_ROWS)

    @property
    def steps(self) -> int:
        """Steps of an item, a key head of a batch entry, with 64 queries each."""
        return self.shape.group * self.chunks

    @property
    def scale(self) -> float:
        """Factor by which sums of dS K and dS^T Q are multiplied for dQ and dK.

        It is 1 with a cap, whose derivative, a factor of dS, contains the scale.
        """
        return self.logits.scale if self.logits.soft_cap is None else 1.0

    def logits_gradient(self) -> jax.ShapeDtypeStruct:
        sizes = (self.shape.batch, self.shape.heads, self.config.keys, self.chunks * WGMMA_ROWS)
        return jax.ShapeDtypeStruct(sizes, self.dlogits_dtype)

    def memory(self) -> dict[str, Any]:
        config, dtype, head, value = self.config, self.dtype, self.head, self.value
        warpgroups, tiles = config.warpgroups, config.tiles
        key_slots, query_slots = config.key_slots, config.query_slots
        copies = head.count + 2 * value.count + self.has_dlse + self.logits.row_numbers
        return dict(
            q_smem=head.memory((query_slots,), WGMMA_ROWS, dtype),
            k_smem=head.memory((key_slots, tiles), WGMMA_ROWS, dtype),
            v_smem=value.memory((key_slots, tiles), WGMMA_ROWS, dtype),
            o_smem=value.memory((query_slots,), WGMMA_ROWS, dtype),
            do_smem=value.memory((query_slots,), WGMMA_ROWS, dtype),
            ds_smem=memory.tiled((tiles,), WGMMA_ROWS, WGMMA_ROWS, dtype),
            dq_smem=head.memory((), WGMMA_ROWS, dtype),
            rows_smem=[plgpu.SMEM((query_slots, WGMMA_ROWS), jnp.float32)]
            * (3 + self.logits.row_numbers),
            query_full=plgpu.Barrier(num_arrivals=copies, num_barriers=query_slots),
            query_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=query_slots),
            key_full=plgpu.Barrier(
                num_arrivals=tiles * (head.count + value.count), num_barriers=key_slots
            ),
            key_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=key_slots),
            key_read=plgpu.Barrier(),
            rows_full=plgpu.Barrier(num_barriers=query_slots),
            ds_full=plgpu.Barrier(num_arrivals=warpgroups),
            ds_free=plgpu.Barrier(),
        )

    def __call__(self, cta: _Cta) -> None:
        helper = self.config.warpgroups
        pl.when(cta.wg_idx == helper)(lambda: self.copy_and_multiply_queries(cta))
        pl.when(cta.wg_idx < helper)(lambda: self.add_up_keys(cta))

    def items_of(self, cta_idx: jax.Array) -> jax.Array:
        """Returns how many items (key heads of batch entries) a CTA computes one after the other."""
        items = self.shape.batch * self.shape.key_heads
        return lax.div(items - cta_idx + (self.ctas - 1), jnp.int32(self.ctas))

    def item_place(self, cta: _Cta, item: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (batch, key head) of an item of the CTA."""
        number = cta.cta_idx + item * self.ctas
        key_heads = jnp.int32(self.shape.key_heads)
        return lax.div(number, key_heads), lax.rem(number, key_heads)

    def place(self, cta: _Cta, step: Any) -> _Place:
        """Returns the position of a step's queries; a CTA counts steps over all of its items."""
        batch_idx, key_head = self.item_place(cta, lax.div(step, jnp.int32(self.steps)))
        within = lax.rem(step, jnp.int32(self.steps))
        group = lax.div(within, jnp.int32(self.chunks))
        start = lax.rem(within, jnp.int32(self.chunks)) * WGMMA_ROWS
        return _Place(batch_idx, key_head * self.shape.group + group, start)

    def key_slot(self, item: Any) -> jax.Array:
        return lax.rem(item, jnp.int32(self.config.key_slots))

    def query_slot(self, step: Any) -> jax.Array:
        return lax.rem(step, jnp.int32(self.config.query_slots))

    # --- the warpgroup that copies and computes dQ ------------------------------------------------

    def copy_and_multiply_queries(self, cta: _Cta) -> None:
        plgpu.set_max_registers(self.config.registers[1], action="decrease")
        own_steps = cta.items * self.steps
        cta.arrive("ds_free")
        self.copy_keys(cta, 0)
        ahead = self.config.query_slots - 1
        for step in range(ahead):
            pl.when(step < own_steps)(functools.partial(self.copy_queries, cta, step))
        self.prepare_rows(cta, 0)

        @pl.loop(0, own_steps)
        def _(step):
            pl.when(step + ahead < own_steps)(lambda: self.copy_queries(cta, step + ahead))
            pl.when(step + 1 < own_steps)(lambda: self.prepare_rows(cta, step + 1))
            self.multiply_queries(cta, step)
            item, within = (
                lax.div(step, jnp.int32(self.steps)),
                lax.rem(step, jnp.int32(self.steps)),
            )
            pl.when(within == self.steps - 1)(lambda: cta.arrive("key_read"))
            # With one stage of K and V, the next item's are copied after this item's last step; with
            # two, in its first step.
            copies = within == (0 if self.config.key_slots > 1 else self.steps - 1)
            pl.when(copies & (item + 1 < cta.items))(lambda: self.copy_keys(cta, item + 1))

        # The producer waits for every arrival, so that no warpgroup arrives after the CTA has ended.
        for slot in range(self.config.query_slots):
            cta.wait("query_free", slot)
        if self.config.key_slots == 1:
            cta.wait("key_free", 0)
        else:
            # The last item frees the stage of the one before it.
            pl.when(cta.items > 1)(lambda: cta.wait("key_free", self.key_slot(cta.items)))
        plgpu.wait_smem_to_gmem(0)

    def copy_queries(self, cta: _Cta, step: Any) -> None:
        """Copies Q, dO, out and log-sum-exp of a step's queries, and dlse and rest if there are any."""
        batch_idx, head_idx, start = self.place(cta, step)
        slot = self.query_slot(step)
        cta.wait("query_free", slot)
        full = cta.shared["query_full"].at[slot]
        for name, heads in (("q", cta.heads[0]), ("do", cta.dout), ("o", cta.out)):
            cta.matrix(name, slot).fill(heads, batch_idx, start, head_idx, full)
        lse_smem, dlse_smem, _, _, *rest_smem = cta.shared["rows_smem"]
        place = (batch_idx, head_idx, pl.ds(start, WGMMA_ROWS))
        copies = [(cta.lse.at[place], lse_smem)]
        if cta.dlse is not None:
            copies.append((cta.dlse.at[place], dlse_smem))
        for smem in rest_smem:
            copies.append((cta.operands.lse_rest.at[*place[:2], 0, place[2]], smem))
        for rows, smem in copies:
            plgpu.copy_gmem_to_smem(rows, smem.at[slot], full)

    def copy_keys(self, cta: _Cta, item: Any) -> None:
        """Starts the copies of K and V of a CTA's item (a key head of a batch entry)."""
        batch_idx, key_head = self.item_place(cta, item)
        slot = self.key_slot(item)
        cta.wait("key_free", slot)
        full = cta.shared["key_full"].at[slot]
        for name, heads in (("k", cta.heads[1]), ("v", cta.heads[2])):
            for tile in range(self.config.tiles):
                start = tile * WGMMA_ROWS
                cta.matrix(name, slot, tile).fill(heads, batch_idx, start, key_head, full)

    def prepare_rows(self, cta: _Cta, step: Any) -> None:
        """Stores delta = sum(out * dout) - dlse and base-2 log-sum-exp of a step's 64 queries."""
        slot = self.query_slot(step)
        rows = plgpu.Layout.WGMMA.reduce(1)
        lse_smem, dlse_smem, delta_smem, lse2_smem = cta.shared["rows_smem"][:4]
        cta.wait("query_full", slot)
        parts = []
        out, dout = cta.matrix("o", slot), cta.matrix("do", slot)
        for refs in zip(out.operands, dout.operands, strict=True):
            o, do = (plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for ref in refs)
            parts.append(jnp.sum(o * do, axis=1))
        delta = functools.reduce(jnp.add, parts)
        if self.has_dlse:
            delta -= plgpu.load(dlse_smem.at[slot], layout=rows)
        store.store_registers(delta_smem.at[slot], delta, rows)
        lse = plgpu.load(lse_smem.at[slot], layout=rows)
        # An infinite log-sum-exp makes every weight exp2(x - inf) = 0: such queries attend to nothing.
        is_empty = self.logits.is_empty(lse)
        if self.shape.query_count % WGMMA_ROWS:
            start = self.place(cta, step).start
            row = start + plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=rows)
            is_empty = is_empty | (row >= self.shape.query_count)
        lse2 = jnp.where(is_empty, jnp.inf, lse * self.logits.unit)
        store.store_registers(lse2_smem.at[slot], lse2, rows)
        plgpu.commit_smem()
        cta.arrive("rows_full", slot)

    def multiply_queries(self, cta: _Cta, step: Any) -> None:
        """Computes dQ = dS K for a step's 64 queries, and starts its copy to global memory."""
        batch_idx, head_idx, start = self.place(cta, step)
        slot = self.key_slot(lax.div(step, jnp.int32(self.steps)))
        cta.wait("ds_full")

        def products(*accs):
            for tile in range(self.config.tiles):
                ds_tile = cta.shared["ds_smem"].at[tile].transpose((1, 0))
                memory.multiply(accs, ds_tile, cta.matrix("k", slot, tile))
            return [acc[...] for acc in accs]

        dq = pl.run_scoped(products, *self.head.accumulators())
        cta.arrive("ds_free")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = cta.matrix("dq")
        staged.store([block * self.scale for block in dq])
        staged.write(cta.gradients[0], batch_idx, start, head_idx)

    # --- the warpgroups that compute dK and dV ----------------------------------------------------

    def add_up_keys(self, cta: _Cta) -> None:
        plgpu.set_max_registers(self.config.registers[0], action="increase")
        for slot in range(self.config.query_slots):
            cta.arrive("query_free", slot)
        for slot in range(self.config.key_slots):
            cta.arrive("key_free", slot)

        slots = self.config.key_slots

        # The code of each slot is separate: a traced slot index would take registers that dK and dV
        # need.
        @pl.loop(0, pl.cdiv(cta.items, slots))
        def _(turn):
            for slot in range(slots):
                item = turn * slots + slot
                run = functools.partial(self.of_item, cta, item, slot)
                if slots == 1:
                    run()
                else:
                    pl.when(item < cta.items)(run)

        cta.wait("ds_free")
        plgpu.wait_smem_to_gmem(0)

    def of_item(self, cta: _Cta, item: jax.Array, slot: int) -> None:
        """Computes dK and dV of this warpgroup's tiles of 64 keys, for one key head of a batch entry.

        `slot` is the pipeline stage that holds K and V of the head.
        """
        if self.config.key_slots > 1:
            pl.when(item > 0)(lambda: self.free_keys(cta, 1 - slot))
        cta.wait("key_full", slot)

        def all_steps(dv_accs, dk_accs):
            @pl.loop(0, self.steps)
            def _(within):
                self.accumulate(cta, item, slot, within, dv_accs, dk_accs)

            return jax.tree.map(lambda acc: acc[...], (dv_accs, dk_accs))

        key_tiles = self.config.key_tiles
        dvs, dks = pl.run_scoped(
            all_steps,
            [self.value.accumulators()] * key_tiles,
            [self.head.accumulators()] * key_tiles,
        )
        keep_factor = 1.0 / self.logits.keep_probability
        self.write(cta, item, slot, "v", cta.gradients[2], dvs, keep_factor)
        cta.wait("key_read")
        self.write(cta, item, slot, "k", cta.gradients[1], dks, self.scale)
        if self.config.key_slots == 1:
            self.free_keys(cta, slot)

    def free_keys(self, cta: _Cta, slot: int) -> None:
        """Marks a stage of K and V as free, once dK and dV, stored in its memory, are copied out."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        cta.arrive("key_free", slot)

    def write(
        self,
        cta: _Cta,
        item: jax.Array,
        slot: int,
        name: str,
        heads: Heads,
        results: Any,
        factor: float,
    ) -> None:
        """Stores dK (`name` "k") or dV ("v") through the shared memory of this warpgroup's K or V."""
        batch_idx, key_head = self.item_place(cta, item)
        for j in range(self.config.key_tiles):
            tile = cta.wg_idx * self.config.key_tiles + j
            staged = cta.matrix(name, slot, tile)
            staged.store([block * factor for block in results[j]])
            staged.write(heads, batch_idx, tile * WGMMA_ROWS, key_head)

    def accumulate(
        self, cta: _Cta, item: Any, key_slot: int, within: Any, dv_accs: Any, dk_accs: Any
    ) -> None:
        """Adds a step's 64 queries to dK and dV, and stores dS^T in shared memory for dQ = dS K."""
        step = item * self.steps + within
        slot = self.query_slot(step)
        batch_idx = self.place(cta, step).batch_idx
        extent = cta.operands.extent(self.logits.mask, batch_idx)
        cta.wait("query_full", slot)
        # A warpgroup's tiles of 64 keys are processed one after the other, because its registers hold dK
        # and dV of all of them, but P of only one. The barrier keeps the compiler from computing
        # addresses before the loop, where they would occupy registers throughout the loop.
        first_tile = lax.optimization_barrier(cta.wg_idx) * self.config.key_tiles
        for j in range(self.config.key_tiles):
            accs = (dv_accs[j], dk_accs[j])
            self.of_tile(cta, key_slot, step, extent, first_tile + j, j == 0, *accs)
        plgpu.commit_smem()
        cta.arrive("ds_full")
        plgpu.wgmma_wait(0)
        cta.arrive("query_free", slot)

    def of_tile(
        self,
        cta: _Cta,
        key_slot: int,
        step: Any,
        extent: Extent,
        tile: Any,
        is_first: bool,
        dv_accs: Any,
        dk_accs: Any,
    ) -> None:
        """Adds the contribution of a step's 64 queries to dK and dV of tile `tile` of 64 keys.

        `is_first` is True for the first of the warpgroup's tiles, which waits for the step's barriers.
        """
        batch_idx, head_idx, start = self.place(cta, step)
        slot, logits, operands = self.query_slot(step), self.logits, cta.operands
        q, do = cta.matrix("q", slot), cta.matrix("do", slot)
        k, v = (cta.matrix(name, key_slot, tile) for name in ("k", "v"))
        _, _, delta_smem, lse2_smem, *rest_smem = cta.shared["rows_smem"]
        square = (WGMMA_ROWS, WGMMA_ROWS)
        logits_tile = TransposedTile(
            batch_idx, head_idx, start, tile * WGMMA_ROWS, square, transposed=True
        )

        def logits_products(acc):
            memory.multiply_transposed(acc, k, q)
            return acc[...]

        s = pl.run_scoped(logits_products, plgpu.ACC(square, jnp.float32))
        if is_first:
            cta.wait("rows_full", slot)
        masked = not logits.mask.is_always_full(WGMMA_ROWS, self.config.keys)
        lse2 = logits_tile.along_queries(lse2_smem.at[slot])
        x = logits.logits(s, logits_tile, operands, extent, masked)
        logits_tile = logits_tile.with_rest(operands, [smem.at[slot] for smem in rest_smem])
        p = logits.probabilities(x, lse2, logits_tile, operands)
        kept = logits.dropped(p, logits_tile, operands) if logits.dropout_rate > 0 else None
        # From here on P is rounded to the operands' dtype, unless a bias's gradient is computed from P.
        # Without the barrier the compiler would hold P in float32, and for lack of registers serialise
        # the WGMMAs.
        rounded = lax.optimization_barrier(p.astype(self.dtype))
        weights = rounded if cta.dlogits is None else p
        kept = rounded if kept is None else lax.optimization_barrier(kept.astype(self.dtype))

        def value_products(dp_acc):
            memory.multiply(dv_accs, kept, do)
            memory.multiply_transposed(dp_acc, v, do)
            return dp_acc[...]

        dp = pl.run_scoped(value_products, plgpu.ACC(square, jnp.float32))
        if logits.dropout_rate > 0:
            dp = logits.dropped(dp, logits_tile, operands)
            dp = dp * (1.0 / logits.keep_probability)
        if is_first:
            cta.wait("ds_free")
        delta = logits_tile.along_queries(delta_smem.at[slot])
        ds = weights.astype(jnp.float32) * (dp - delta)
        if cta.dlogits is not None:
            keys, queries = pl.ds(tile * WGMMA_ROWS, WGMMA_ROWS), pl.ds(start, WGMMA_ROWS)
            cta.dlogits.at[batch_idx, head_idx, keys, queries][...] = ds.astype(self.dlogits_dtype)
        if logits.soft_cap is not None:
            ds = ds * logits.derivative_of_capped(s)
        ds = ds.astype(self.dtype)
        memory.multiply(dk_accs, ds, q)
        # No barrier is needed before these stores, as nothing reads this memory after the wait for
        # `ds_free`; `accumulate` makes them visible to WGMMA.
        store.store_piece(cta.shared["ds_smem"].at[tile], ds)
