"""Forward and backward kernels of dot_product_attention, with rules that choose an implementation."""

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.attention import attention_cuda as cuda_attention
from jaxfused.ops.attention import attention_xla
from jaxfused.ops.attention.kernel_function import over_arrays
from jaxfused.ops.attention.mask import EMPTY_LSE, Mask
from jaxfused.ops.attention.masks.pattern import Pattern
from jaxfused.runtime import cuda_library
from jaxfused.runtime.dropout import Bits
from jaxfused.runtime.estimate import KERNELS, Rule
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import batch_all, is_batched
from pallas_kernels.attention import attention as pallas_attention
from pallas_kernels.attention.block_lists import as_explicit
from pallas_kernels.attention.logits import Logits, Operands, saved_length
from pallas_kernels.attention.mask import BlockMask, segment_blocks
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.tile_function import TileFunction

_FEW_QUERIES, _MANY_KEYS = 16, 64
"""Up to 16 queries a head, the CUDA kernels' tile of 128 queries is mostly empty. From 64 keys on, XLA
is then faster in the backward, and in float32 in the forward too."""
_FEW_ROWS = 4096
"""Queries, summed over heads and examples, below which float32 CUDA kernels leave most SMs idle. From
`_MANY_KEYS` keys on XLA is then faster: at 12 of 12 shapes measured on an H200 (benchmarks/lab)."""
_KERNELS_FIRST = Rule(
    KERNELS, "a kernel writes no logits: XLA was faster in 2 of 400 recorded cases"
)


@dataclass(frozen=True)
class Options:
    """Static options of a call of the kernels."""

    is_causal: bool
    window: tuple[int, int] | None
    scale: float
    soft_cap: float | None
    dropout_rate: float
    pattern: Pattern | None = None
    """Mask objects of the call, combined; `Arrays.pattern_heads` says which head has which."""
    score: TileFunction | None = None
    """Function (score_mod) of each logit after soft cap and bias; it reads the first `Arrays.reads`."""
    allows: TileFunction | None = None
    """Function (mask_mod), True where a query attends to a key; it reads the other `Arrays.reads`."""
    allows_tf32: bool = False
    """True if the operands are float32 and may be rounded to tf32, as XLA rounds them by default."""

    def rule(
        self, device: dispatch.Device, able: Collection[str], arrays: "Arrays", *, backward: bool
    ) -> Rule:
        """Returns the preferred implementations and the reason; `able` names those that can run."""
        if arrays.are_wide() and (backward or arrays.query.shape[1] > _FEW_QUERIES):
            return Rule(("xla",), "the kernel for heads above 256 is timed only for few queries")
        if device.multiprocessors == 0:
            return Rule(KERNELS, "the device's number of SMs is unknown")
        if arrays.key.shape[1] == 1:
            return Rule(("xla",), "a single key, whose weight is always 1, is faster in XLA")
        batch, queries, key_heads, groups, _ = arrays.query.shape
        in_float32, rows = arrays.query.dtype == jnp.float32, batch * key_heads * groups * queries
        if "pallas" in able or self.visited_keys(arrays) < _MANY_KEYS:
            return _KERNELS_FIRST
        if queries <= _FEW_QUERIES and (backward or in_float32):
            why = f"up to {_FEW_QUERIES} queries over {_MANY_KEYS} keys are faster in XLA than in CUDA"
            return Rule(("xla",), why)
        if in_float32 and rows < _FEW_ROWS:
            return Rule(("xla",), f"{rows} rows of queries, fewer than {_FEW_ROWS}, leave SMs idle")
        return _KERNELS_FIRST

    def why_not(self, device: dispatch.Device, arrays: "Arrays") -> dict[str, str | None]:
        """Returns, by implementation, why it cannot run forward or backward, or None if it runs both.

        For heads above 256 (`are_wide`), None for "pallas" means that it runs the forward only.
        """
        call = dict(
            compute_capability=device.compute_capability,
            dtype=arrays.query.dtype,
            query_count=arrays.query.shape[1],
            key_count=arrays.key.shape[1],
            head_size=arrays.query.shape[4],
            value_size=arrays.value.shape[3],
        )
        cuda = cuda_attention.why_unsupported(**call, allows_tf32=self.allows_tf32)
        if self.score is not None or self.allows is not None:
            cuda = "functions of a score or a place are evaluated in Pallas's kernels and in XLA"
        return {"pallas": pallas_attention.why_unsupported(**call), "cuda": cuda, "xla": None}

    def with_gradients(self, of_reads: Sequence[bool]) -> "Options":
        """Returns the options with gradients only for the reads flagged by `of_reads`, to save work."""
        if self.score is None or all(of_reads):
            return self
        wanted = tuple(a and b for a, b in zip(self.score.wanted, of_reads, strict=False))
        return replace(self, score=replace(self.score, wanted=wanted))

    def wanted(self, arrays: "Arrays") -> tuple[bool, ...]:
        """Returns for each of `arrays.reads` whether it gets a gradient."""
        of_score = () if self.score is None else self.score.wanted
        return of_score + (False,) * (len(arrays.reads) - len(of_score))

    def visited_keys(self, arrays: "Arrays") -> int:
        """Returns a bound of the keys that causal mask and window let all queries together attend to."""
        queries, keys = arrays.query.shape[1], arrays.key.shape[1]
        if self.is_causal and arrays.query_offset is None:
            keys = min(keys, queries)
        if self.window is not None:
            keys = min(keys, queries + sum(self.window))
        return keys

    def row_numbers(self, arrays: "Arrays") -> int:
        """Returns how many numbers a forward saves of each query, as `Logits.row_numbers` says."""
        return self.logits(arrays.query, arrays.key, arrays).row_numbers

    def logits(self, query: Any, key: Any, operands: "Operands | Arrays") -> Logits:
        """Returns the options in the form that the Pallas kernels take."""
        mask = BlockMask(
            query_count=query.shape[1],
            key_count=key.shape[1],
            is_causal=self.is_causal,
            window=self.window,
            has_query_offset=operands.query_offset is not None,
            has_query_lengths=operands.query_lengths is not None,
            has_key_lengths=operands.key_lengths is not None,
            has_segments=operands.query_segments is not None,
            has_explicit=operands.explicit is not None,
            has_function=self.allows is not None,
            pattern=self.pattern,
        )
        return Logits(
            scale=self.scale,
            mask=mask,
            soft_cap=self.soft_cap,
            has_bias=operands.bias is not None,
            has_sinks=operands.sinks is not None,
            dropout_rate=self.dropout_rate,
            score=self.score,
            allows=self.allows,
        )


def _for_cuda(
    logits: Logits, operands: Operands
) -> tuple[cuda_attention.Operands, cuda_attention.Options]:
    """Returns operands and options in the form that the CUDA kernels take."""
    logits, operands = as_explicit(logits, operands)
    queries, keys = operands.query_segments, operands.key_segments
    bounds = {}
    if queries is not None and keys is not None:
        block = cuda_attention.SEGMENT_BLOCK
        bounds = dict(
            key_bounds=segment_blocks(queries, keys, block, block),
            query_bounds=segment_blocks(keys, queries, block, block),
        )
    left, right = logits.mask.reach()
    options = cuda_attention.Options(
        scale=logits.scale,
        soft_cap=logits.soft_cap,
        left=left,
        right=right,
        dropout_threshold=logits.dropout_threshold,
    )
    given = operands._asdict()
    assert given.pop("pattern_heads") is None and not given.pop("reads")
    del given["lse_rest"]
    return cuda_attention.Operands(**given, **bounds), options


class Arrays(NamedTuple):
    """Operands of a call. The N query heads are axes [K, G], G of each key head, to shard alike.

    The fields are arrays or None. The same class holds the cotangents of these arrays.
    """

    query: Any
    """Queries [B, T, K, G, H]."""
    key: Any
    """Keys [B, S, K, H]."""
    value: Any
    """Values [B, S, K, V]."""
    bias: Any = None
    """Bias [B or 1, K or 1, G or 1, T or 1, S or 1]; `explicit` has the same axes and is int8."""
    sinks: Any = None
    """Sinks [K, G]."""
    query_lengths: Any = None
    key_lengths: Any = None
    query_offset: Any = None
    query_segments: Any = None
    key_segments: Any = None
    explicit: Any = None
    dropout_seeds: Any = None
    """Seeds [2, B, K, G], uint32, of dropout's counter-based random bits."""
    pattern_heads: Any = None
    """Index [K, G] into `Options.pattern` of each query head's mask."""
    reads: tuple[Any, ...] = ()
    """Arrays that `Options.score` reads, then those that `Options.allows` reads; axes as in `bias`."""

    @classmethod
    def of(cls, *operands: Any) -> "Arrays":
        """Packs a flat sequence of operands: those after `pattern_heads` become `reads`."""
        count = len(cls._fields) - 1
        return cls(*operands[:count])._replace(reads=tuple(operands[count:]))

    def operands(self) -> tuple[Any, ...]:
        """Returns the fields as one flat sequence, with `reads` at its end."""
        return (*self[:-1], *self.reads)

    def axes(self) -> tuple[str, ...]:
        """Returns the axes of each operand, one letter an axis, by which `sharding` splits them."""
        bias, explicit = _axes_of_logits(self.bias), _axes_of_logits(self.explicit)
        segments = ("bt", "bs")
        return (
            *(
                "btkgh",
                "bskh",
                "bskv",
                bias,
                "kg",
                "b",
                "b",
                "b",
                *segments,
                explicit,
                "zbkg",
                "kg",
                *map(_axes_of_logits, self.reads),
            ),
        )

    def are_wide(self) -> bool:
        """Returns whether the heads are too large for Pallas's backward, which is left to XLA."""
        return pallas_attention.are_wide(self.query.shape[-1], self.value.shape[-1])

    def shape(self) -> Shape:
        """Returns the sizes in the form that the Pallas kernels take."""
        batch, query_count, key_heads, groups, head_size = self.query.shape
        _, key_count, _, value_size = self.value.shape
        heads = key_heads * groups
        return Shape(batch, query_count, key_count, heads, key_heads, head_size, value_size)

    def ungrouped(self) -> tuple[jax.Array, jax.Array, jax.Array, Operands]:
        """Returns the arrays in the form that the kernels take, with query heads [N]."""
        batch, query_count, key_heads, groups, head_size = self.query.shape
        heads = key_heads * groups

        def matrix(array):
            if array is None:
                return None
            first, k, g, *last = array.shape
            return array.reshape(first, k * g, *last)

        seeds, sinks = self.dropout_seeds, self.sinks
        operands = Operands(
            bias=matrix(self.bias),
            sinks=None if sinks is None else sinks.reshape(heads),
            query_lengths=self.query_lengths,
            key_lengths=self.key_lengths,
            query_offset=self.query_offset,
            query_segments=self.query_segments,
            key_segments=self.key_segments,
            explicit=matrix(self.explicit),
            dropout_seeds=None if seeds is None else seeds.reshape(2, batch, heads),
            pattern_heads=None if self.pattern_heads is None else self.pattern_heads.reshape(heads),
            reads=tuple(map(matrix, self.reads)),
        )
        query = self.query.reshape(batch, query_count, heads, head_size)
        return query, self.key, self.value, operands


WHOLE = "tshvrgzBKGTS"
"""Letters of the axes that are never sharded: all but b, the batch, and k, the key heads."""


def _axes_of_logits(array: jax.Array | None) -> str:
    """Returns "bkgts" for an array [B, K, G, T, S], in upper case where an axis has length 1."""
    if array is None:
        return "BKGTS"
    return "".join(
        letter.upper() if size == 1 else letter
        for letter, size in zip("bkgts", array.shape, strict=True)
    )


def within(mask: Mask, query_count: int) -> jax.Array:
    """Returns booleans [B, T, 1], True for a query whose index is below its sequence's length."""
    assert mask.query_lengths is not None
    return jnp.arange(query_count)[None, :, None] < mask.query_lengths[:, None, None]


@dataclass(frozen=True)
class Forward:
    """Computes (output [B, T, K, G, V], log-sum-exp [B, K, G, R]); R is T padded, `saved_length(T)`.

    With a bias or a score the rest of the log-sum-exp follows (`Logits.log_sum_exp`).
    """

    options: Options

    @property
    def name(self) -> str:
        return "dot_product_attention forward"

    def axes(self, *operands) -> Axes:
        arrays = Arrays.of(*operands)
        saved = ["bkgr"] * self.options.row_numbers(arrays)
        return Axes(arrays.axes(), ("btkgv", *saved), WHOLE, {"r": "t"})

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        return self.options.why_not(device, Arrays.of(*operands))

    def estimate(self, device, able, *operands) -> Rule:
        return self.options.rule(device, able, Arrays.of(*operands), backward=False)

    def configs(self, implementation, device, *operands) -> Sequence[Hashable]:
        arrays = Arrays.of(*operands)
        if implementation != "pallas":
            return ()
        return pallas_attention.forward_candidates(
            arrays.shape(),
            arrays.query.dtype,
            logits=self.options.logits(arrays.query, arrays.key, arrays),
            multiprocessors=device.multiprocessors,
        )

    def examples(self, random, device, *operands) -> Sequence[Any]:
        del device
        return _examples(random, Arrays.of(*operands)).operands()

    def run(self, implementation, device, *operands, config=None) -> Results:
        arrays = Arrays.of(*operands)
        query, key, value, optional = arrays.ungrouped()
        if implementation == "xla":
            given = (query, key, value, optional.bias, optional.sinks, *optional.reads)
            with_rest = self.options.row_numbers(arrays) == 2
            return _in_xla(self.options, arrays, with_rest)(*given)
        logits = self.options.logits(query, key, optional)
        if implementation == "cuda":
            results = cuda_attention.forward(
                query,
                key,
                value,
                *_for_cuda(logits, optional),
                saved_length=saved_length(query.shape[1]),
            )
        else:
            results = pallas_attention.forward(
                query,
                key,
                value,
                optional,
                logits=logits,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return _grouped(arrays, *results)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return _over_batch(self, call, axis_size, in_batched, operands, 0)


@dataclass(frozen=True)
class Backward:
    """Computes (dquery, dkey, dvalue, dbias, dsinks, *dreads), with None for what has no gradient.

    The operands are the forward's results, the cotangents of output and log-sum-exp, and the fields of
    `Arrays`.
    """

    options: Options
    own_bias: bool = False
    """True if devices split the bias as they split queries, so that no gradient is summed over devices.
    dbias may then have the bias's dtype; else it is float32, in which it is summed over devices."""
    row_numbers: int = 1
    """Results of the forward after its output: 2 with a bias or a score."""

    @property
    def name(self) -> str:
        return "dot_product_attention backward"

    def axes(self, *operands) -> Axes:
        arrays = self._arrays(operands)
        axes = arrays.axes()
        results = [
            None if array is None else letters
            for array, letters in zip(arrays[:5], axes[:5], strict=True)
        ]
        letters_of_reads = axes[len(axes) - len(arrays.reads) :]
        results += [
            letters if is_wanted else None
            for letters, is_wanted in zip(
                letters_of_reads, self.options.wanted(arrays), strict=True
            )
        ]
        saved = ["bkgr"] * self.row_numbers
        return Axes(("btkgv", *saved, "btkgv", "bkgr", *axes), results, WHOLE)

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        arrays = self._arrays(operands)
        reasons = self.options.why_not(device, arrays)
        if arrays.are_wide():
            del reasons["pallas"]
        return reasons

    def estimate(self, device, able, *operands) -> Rule:
        return self.options.rule(device, able, self._arrays(operands), backward=True)

    def configs(self, implementation, device, *operands) -> Sequence[Hashable]:
        arrays = self._arrays(operands)
        if implementation != "pallas":
            return ()
        return pallas_attention.backward_candidates(
            arrays.shape(),
            arrays.query.dtype,
            logits=self.options.logits(arrays.query, arrays.key, arrays),
            multiprocessors=device.multiprocessors,
        )

    def examples(self, random, device, *operands) -> Sequence[Any]:
        arrays = _examples(random, self._arrays(operands))
        forward = Forward(self.options)
        implementation = Runner(None, device).choice(forward, *arrays.operands()).implementation
        results = forward.run(implementation, device, *arrays.operands())
        cotangents = map(random, operands[1 + self.row_numbers :][:2])
        return *results, *cotangents, *arrays.operands()

    def run(self, implementation, device, output, lse, *operands, config=None) -> Results:
        *rest, doutput, dlse = operands[: 1 + self.row_numbers]
        arrays = Arrays.of(*operands[1 + self.row_numbers :])
        query, key, value, optional = arrays.ungrouped()
        batch, query_count, heads, _ = query.shape
        if implementation == "xla":
            wanted = self.options.wanted(arrays)
            reads = [
                r if is_wanted else None
                for r, is_wanted in zip(optional.reads, wanted, strict=True)
            ]
            differentiated = (query, key, value, optional.bias, optional.sinks, *reads)
            _, vjp = jax.vjp(_in_xla(self.options, arrays), *differentiated)
            return self._as_operands(arrays, *vjp((doutput, dlse)))
        # Cotangents beyond the queries' lengths may be NaN, which probabilities of 0 do not cancel.
        [doutput] = attention_xla.cleared_beyond(
            optional.query_lengths, doutput.reshape(*query.shape[:3], -1)
        )
        logits = self.options.logits(query, key, optional)
        rest = [x.reshape(batch, heads, -1)[:, :, :query_count] for x in rest]
        if rest:
            optional = optional._replace(lse_rest=rest[0][..., None])
        saved = (
            output.reshape(*query.shape[:3], -1),
            lse.reshape(batch, heads, -1),
            doutput,
            dlse.reshape(batch, heads, -1)[..., :query_count],
        )
        if implementation == "cuda":
            cuda_operands, cuda_options = _for_cuda(logits, optional)
            gradients: Results = cuda_attention.backward(
                query, key, value, cuda_operands, *saved, cuda_options, *rest
            )
        else:
            # Unlike the forward kernels, these multiply by keys and values beyond the lengths, which
            # may be NaN.
            key, value = attention_xla.cleared_beyond(optional.key_lengths, key, value)
            gradients = pallas_attention.backward(
                query,
                key,
                value,
                optional,
                *saved,
                logits=logits,
                multiprocessors=device.multiprocessors,
                config=config,
                dbias_dtype=self._dbias_dtype(arrays),
            )
        return self._as_operands(arrays, *gradients)

    def _dbias_dtype(self, arrays: Arrays) -> Any:
        has_it = arrays.bias is not None and arrays.bias.dtype in cuda_library.DTYPES
        return arrays.bias.dtype if self.own_bias and has_it else jnp.float32

    def _as_operands(self, arrays: Arrays, dquery, dkey, dvalue, dbias, dsinks, *dreads) -> Results:
        """Returns the gradients in the operands' shapes; those of sinks and reads are float32."""
        if dbias is not None:
            dbias = dbias.reshape(arrays.bias.shape).astype(self._dbias_dtype(arrays))
        return (
            dquery.reshape(arrays.query.shape),
            dkey,
            dvalue,
            dbias,
            None if dsinks is None else dsinks.reshape(arrays.sinks.shape).astype(jnp.float32),
            *(
                None if dread is None else dread.reshape(read.shape).astype(jnp.float32)
                for dread, read in zip(dreads, arrays.reads, strict=True)
            ),
        )

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return _over_batch(self, call, axis_size, in_batched, operands, 3 + self.row_numbers)

    def _arrays(self, operands) -> Arrays:
        return Arrays.of(*operands[3 + self.row_numbers :])


def _examples(random: Callable[[Any], Any], arrays: Arrays) -> Arrays:
    """Returns random operands for timing: of full length, in four segments, with all keys allowed."""

    def segments(ids):
        if ids is None:
            return None
        length = ids.shape[1]
        return jnp.broadcast_to(4 * jnp.arange(length, dtype=ids.dtype) // length, ids.shape)

    def lengths(counts, array):
        return None if counts is None else jnp.full_like(counts, array.shape[1])

    random_arrays = Arrays.of(
        *(None if array is None else random(array) for array in arrays.operands())
    )
    explicit, offset, heads = arrays.explicit, arrays.query_offset, arrays.pattern_heads
    queries, keys = arrays.query.shape[1], arrays.key.shape[1]
    return random_arrays._replace(
        query_lengths=lengths(arrays.query_lengths, arrays.query),
        key_lengths=lengths(arrays.key_lengths, arrays.key),
        query_offset=None if offset is None else jnp.full_like(offset, max(0, keys - queries)),
        query_segments=segments(arrays.query_segments),
        key_segments=segments(arrays.key_segments),
        explicit=None if explicit is None else jnp.ones_like(explicit),
        pattern_heads=None if heads is None else jnp.zeros_like(heads),
        reads=tuple(
            read if jnp.issubdtype(read.dtype, jnp.floating) else jnp.zeros_like(read)
            for read in random_arrays.reads
        ),
    )


def _grouped(arrays: Arrays, output: jax.Array, *saved: jax.Array) -> Results:
    """Splits axis N of the output [B, T, N, V] and of what is saved [B, N, R] into [K, G]."""
    shape = arrays.query.shape[:4]
    batch, _, key_heads, groups = shape
    saved = tuple(x.reshape(batch, key_heads, groups, x.shape[-1]) for x in saved)
    return output.reshape(*shape, output.shape[-1]), *saved


def _in_xla(options: Options, arrays: Arrays, with_rest: bool = False) -> Callable[..., Results]:
    """Returns the jax.numpy forward as a function of q, k, v, bias, sinks and reads.

    A read that is None is taken from `arrays`; a bias or sinks of None are absent.
    """
    query, _, _, operands = arrays.ungrouped()
    query_count, key_count = query.shape[1], arrays.key.shape[1]
    count = 0 if options.score is None else options.score.reads
    explicit = None if operands.explicit is None else operands.explicit != 0
    if options.allows is not None:
        by_place = over_arrays(options.allows, operands.reads[count:], query_count, key_count)
        explicit = by_place if explicit is None else explicit & by_place
    mask = Mask(
        is_causal=options.is_causal,
        window=options.window,
        query_lengths=operands.query_lengths,
        key_lengths=operands.key_lengths,
        query_offset=operands.query_offset,
        query_segments=operands.query_segments,
        key_segments=operands.key_segments,
        explicit=explicit,
        pattern=options.pattern,
        pattern_heads=operands.pattern_heads,
    )

    def forward(query, key, value, bias, sinks, *reads):
        given = [
            own if read is None else read for own, read in zip(operands.reads, reads, strict=True)
        ]
        score_mod = None
        if options.score is not None:
            score_mod = functools.partial(
                over_arrays, options.score, given[:count], query_count, key_count
            )
        output, lse, *rest = attention_xla.attention_by_seeds(
            query,
            key,
            value,
            bias,
            sinks,
            mask,
            None if operands.dropout_seeds is None else Bits(operands.dropout_seeds),
            scale=options.scale,
            logits_soft_cap=options.soft_cap,
            dropout_rate=options.dropout_rate,
            score_mod=score_mod,
            with_rest=with_rest,
        )
        if sinks is not None and mask.query_lengths is not None:
            # The kernels' backward recognises queries beyond the length by EMPTY_LSE alone.
            lse = jnp.where(within(mask, query_count), lse, EMPTY_LSE)
        missing = saved_length(query_count) - query_count
        lse, *rest = (
            jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, missing))) for x in (lse, *rest)
        )
        return _grouped(arrays, output, lse, *rest)

    return forward


def _over_batch(kernel, call, axis_size: int, in_batched, operands, first: int) -> Results | None:
    """Runs the kernel under `jax.vmap`; the operands from index `first` on are those of `Arrays`.

    The mapped axis is merged into the batch axis B. Returns None if an operand may lack that axis.
    """
    arrays = Arrays.of(*operands[first:])
    shared = (arrays.bias, arrays.sinks, arrays.explicit, arrays.dropout_seeds, *arrays.reads)
    heads = first + Arrays._fields.index("pattern_heads")
    if any(array is not None for array in shared) or is_batched(in_batched[heads]):
        return None
    operands = batch_all(axis_size, in_batched, operands)
    operands[heads] = None
    batch = arrays.query.shape[1 if is_batched(in_batched[first]) else 0]
    folded = [None if a is None else a.reshape(axis_size * batch, *a.shape[2:]) for a in operands]
    folded[heads] = arrays.pattern_heads
    outputs = call(kernel, *folded)
    return tuple(None if o is None else o.reshape(axis_size, batch, *o.shape[1:]) for o in outputs)
