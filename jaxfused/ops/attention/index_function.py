"""Functions of a logit and its indices (b, h, q, k), passed as `score_mod` and `mask_mod`.

A function is traced once, for one element: its program, its closed-over arrays and its used arguments
are known before an implementation is chosen.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jaxfused.ops.attention.masks.mask_class import (
    AttentionMask,
    Index,
    MultiHeadMask,
)
from jaxfused.ops.attention.wide_tables import CALLS, with_wide_tables
from jaxfused.runtime import sharding
from pallas_kernels.attention.tile_function import inlined

NO_MESH = jax.sharding.AbstractMesh((), ())
Places = tuple[Any, Any, Any, Any]
"""Indices of batch entries b [B], heads h [N], query positions q [B or 1, T] and keys k [S]."""
_ADDITIONS = ("add", "add_any")
_SAME_VALUE = ("convert_element_type", "copy", "reshape", "pvary")


@dataclass(frozen=True, eq=False)
class IndexFunction:
    """A traced function of (score, b, h, q, k), or of (b, h, q, k)."""

    program: ClosedJaxpr
    function: Callable[..., Any] | None = field(default=None, repr=False)
    """The caller's function; None for a program that this package made of other functions."""

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], dtype: Any) -> "IndexFunction":
        """Traces `score_mod` for scores of `dtype`, or `mask_mod` if it is None.

        Raises:
          ValueError: the function does not trace, or returns something else.
        """
        takes = "(b, h, q, k)" if dtype is None else "(score, b, h, q, k)"
        index = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
        score = [] if dtype is None else [jax.ShapeDtypeStruct((), dtype)]
        if not callable(function):
            raise ValueError(
                f"dot_product_attention: {name} is {function!r}, but it is called with {takes}; pass a"
                " function."
            )

        def traced(mesh: Any) -> ClosedJaxpr:
            with jax.sharding.use_abstract_mesh(mesh):
                return jax.make_jaxpr(function)(*score, *index)

        mesh = jax.sharding.get_abstract_mesh()
        try:
            program = traced(mesh) if mesh.manual_axes else None
            if program is None or not sharding.varying(*program.consts):
                # The caller's mesh is hidden: kernels evaluate the program on one device's shard.
                program = traced(NO_MESH)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise ValueError(
                f"dot_product_attention: {name} needs the value of an argument while it is traced, as"
                f" `if` and NumPy's functions do, but it is traced with {takes} as scalars of JAX; use"
                " jnp.where and jax.numpy, and make arrays that it indexes jax.numpy's."
            ) from error
        except TypeError as error:
            raise ValueError(
                f"dot_product_attention: {name} does not trace as a function of {takes}: {error}"
            ) from error
        wanted = jnp.bool_ if dtype is None else dtype
        outs = [(out.shape, out.dtype) for out in program.out_avals]
        fits = len(outs) == 1 and outs[0][0] == ()
        fits = fits and (jnp.issubdtype(outs[0][1], jnp.floating) or dtype is None)
        if not fits or (dtype is None and outs[0][1] != jnp.bool_):
            raise ValueError(
                f"dot_product_attention: {name} returns {outs} for one element, but it returns a scalar"
                f" of {jnp.dtype(wanted).name}; return one number computed from {takes}."
            )
        return cls(program, function)

    def __call__(self, *args: Any) -> Any:
        if self.function is not None and sharding.varying(*args, *self.program.consts):
            # A function of JAX takes operands that vary over different mesh axes; a jaxpr does not.
            return self.function(*args)
        (result,) = jaxpr_as_fun(self.program)(*args)
        return result

    def shifted(self, query_offset: Any) -> "IndexFunction":
        """Returns a function of the query's index that calls this one at the index plus the offset.

        Args:
          query_offset: None, a number, or an array () or [B].
        """
        if query_offset is None:
            return self
        # A tracer cannot index a list or a NumPy array, so these become JAX's; a number is a literal.
        offsets = jnp.asarray(query_offset) if np.ndim(query_offset) else query_offset

        def f(*args: Any) -> Any:
            *first, b, h, q, k = args
            offset = offsets[b] if jnp.ndim(offsets) else offsets
            return self(*first, b, h, (q + offset).astype(jnp.int32), k)

        args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.program.in_avals]
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return IndexFunction(jax.make_jaxpr(f)(*args))

    @functools.cached_property
    def used(self) -> tuple[bool, bool, bool, bool]:
        """Flags of b, h, q and k, True where the result depends on the index."""
        needed = {var for var in self.program.jaxpr.outvars if not isinstance(var, Literal)}
        for eqn in reversed(self.program.jaxpr.eqns):
            if needed & set(eqn.outvars):
                needed |= {var for var in eqn.invars if not isinstance(var, Literal)}
        b, h, q, k = (var in needed for var in self.program.jaxpr.invars[-4:])
        return b, h, q, k

    @functools.cached_property
    def is_constant(self) -> bool:
        """Whether the closed-over arrays are known at tracing, and lie on no Explicit mesh."""
        return not any(
            isinstance(const, jax.core.Tracer) or sharding.is_explicit(const)
            for const in _constants(self.program)
        )

    @functools.cached_property
    def varies(self) -> bool:
        """True if the closed-over arrays differ between the devices of a `jax.shard_map`."""
        return bool(sharding.varying(*self.program.consts))

    @functools.cached_property
    def is_additive(self) -> bool:
        """Whether a score_mod returns the score plus a term that does not depend on the score."""
        jaxpr = self.program.jaxpr
        carrier = _carried(jaxpr, jaxpr.invars[0])
        return carrier is not None and jaxpr.outvars[0] is carrier

    def over(self, places: Places, score: jax.Array | None = None) -> jax.Array:
        """Evaluates the function at [B, N, T, S]; the axis of an index that is not used has length 1.

        Args:
          places: indices b, h, q and k of the elements.
          score: logits of a score_mod, [B, N, T, S], or a number for all elements.
        """
        consts = self.program.consts
        operands = consts if score is None else [score, *consts]
        if not sharding.is_explicit(*operands):
            wide = (
                self
                if self.varies
                else IndexFunction(with_wide_tables(self.program), self.function)
            )
            return wide._over(places, score)

        # `jax.vmap` and indexing take no arrays that Explicit axes split, so XLA chooses the placement.
        # Inner calls, as of jnp.clip, are inlined, and no type of the program names the arrays' mesh.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            program = with_wide_tables(inlined(self.program, CALLS))

        def over(consts: Any, places: Any, score: Any) -> jax.Array:
            return IndexFunction(ClosedJaxpr(program.jaxpr, consts))._over(places, score)

        whole = P(None, None, None, None)
        place = whole if score is None or not score.ndim else jax.typeof(score).sharding.spec
        return jax.sharding.auto_axes(over, out_sharding=place)(program.consts, places, score)

    def _over(self, places: Places, score: jax.Array | None) -> jax.Array:
        b, h, q, k = places
        uses_b, uses_h, uses_q, uses_k = self.used
        scores = [] if score is None else [score]
        every: tuple[int | None, ...] = (0,) * len(scores)
        if score is not None and score.ndim:
            uses_b = uses_h = uses_q = uses_k = True
        else:
            every = (None,) * len(scores)
        uses_b = uses_b or (uses_q and q.shape[0] != 1)
        b, h, k = (x if uses else x[:1] for x, uses in ((b, uses_b), (h, uses_h), (k, uses_k)))
        q = q if uses_q else q[:, :1]
        q = jnp.broadcast_to(q if q.shape[0] != 1 and uses_b else q[:1], (b.shape[0], q.shape[1]))
        f = self.__call__
        f = jax.vmap(f, (*every, None, None, None, 0))
        f = jax.vmap(f, (*every, None, None, 0, None))
        f = jax.vmap(f, (*every, None, 0, None, None))
        return jax.vmap(f, (*every, 0, None, 0, None))(*scores, b, h, q, k)

    def digest(self) -> str:
        """Returns a hash of the program and of its closed-over arrays, which are constants."""
        parts = [str(self.program.jaxpr).encode()]
        for const in _constants(self.program):
            is_key = jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
            array = np.asarray(jax.random.key_data(const) if is_key else const)
            parts.append(f"{const.dtype}{array.shape}".encode() + array.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def _constants(program: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """Yields the arrays that a program closes over, with those of the functions that it calls."""
    yield from getattr(program, "consts", ())
    for eqn in program.eqns:
        params = jax.tree.leaves(
            eqn.params, is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr)
        )
        for inner in params:
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield from _constants(inner)


def _carried(jaxpr: Any, score: Any) -> Any:
    """Returns the variable that holds `score` plus other terms after all equations, or None."""
    carrier = score
    earlier: set[Any] = set()
    for eqn in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in earlier for var in eqn.invars):
            return None
        uses = [n for n, var in enumerate(eqn.invars) if var is carrier]
        if not uses:
            continue
        name = eqn.primitive.name
        if name in CALLS and len(uses) == 1:
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            end = _carried(inner.jaxpr, inner.jaxpr.invars[uses[0]])
            found = [n for n, var in enumerate(inner.jaxpr.outvars) if var is end]
            if end is None or len(found) != 1 or len(eqn.outvars) != 1:
                return None
        elif name in _SAME_VALUE:
            if eqn.outvars[0].aval.dtype != score.aval.dtype:
                return None
        elif len(uses) != 1 or (name not in _ADDITIONS and (name, uses) != ("sub", [0])):
            return None
        earlier.add(carrier)
        carrier = eqn.outvars[0]
    return carrier


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A score_mod with the indices of a call's logits [B, N, T, S]."""

    function: IndexFunction
    places: Places
    dtype: Any

    def __call__(self, logits: jax.Array) -> jax.Array:
        return self.function.over(self.places, logits)

    def bias(self) -> jax.Array:
        """Returns the addend of an additive function, [B or 1, N or 1, T or 1, S or 1]."""
        zero = jnp.zeros((), self.dtype)
        return self.function.over(self.places, zero)


@dataclass(frozen=True)
class FunctionMask(AttentionMask):
    """Mask of one head by a `mask_mod` of constants; compared by a hash of the function."""

    head: int
    query_offset: int
    digest: str
    function: IndexFunction = field(compare=False, repr=False)

    @classmethod
    def of_heads_of(
        cls, function: IndexFunction, shape: tuple[int, int], heads: int, query_offset: int
    ) -> AttentionMask:
        """Returns the mask of all heads."""
        digest = function.digest()
        if not function.used[1]:
            return cls(shape, 0, query_offset, digest, function)
        masks = [cls(shape, head, query_offset, digest, function) for head in range(heads)]
        return MultiHeadMask(masks)

    def allowed(self, query: Index, key: Index) -> Any:
        if isinstance(query, np.ndarray) and isinstance(key, np.ndarray):
            return _evaluated(self)[query, key]
        shape = jnp.broadcast_shapes(query.shape, key.shape)
        places = (jnp.broadcast_to(place, shape).reshape(-1) for place in (query, key))
        # Python's ints would become 64-bit where JAX's 64-bit types are enabled.
        head, offset = jnp.int32(self.head), jnp.int32(self.query_offset)
        f = jax.vmap(lambda q, k: self.function(jnp.int32(0), head, q + offset, k))
        places = (place.astype(jnp.int32) for place in places)
        return f(*places).reshape(shape)


@functools.lru_cache(maxsize=256)
def _evaluated(mask: FunctionMask) -> np.ndarray:
    """Returns all elements of the mask, computed at tracing, some rows at a time."""
    queries, keys = mask.shape
    rows = max(1, min(queries, _ELEMENTS // max(1, keys)))
    function, head, offset = mask.function, mask.head, mask.query_offset
    with jax.ensure_compile_time_eval():
        part = jax.jit(
            lambda first: function.over(
                (
                    jnp.zeros(1, jnp.int32),
                    jnp.full(1, head, jnp.int32),
                    (first + offset + jnp.arange(rows, dtype=jnp.int32))[None],
                    jnp.arange(keys, dtype=jnp.int32),
                )
            )
        )
        parts = [np.asarray(part(first))[0, 0] for first in range(0, queries, rows)]
    whole = [np.broadcast_to(one, (rows, keys)) for one in parts]
    return np.concatenate(whole)[:queries] if whole else np.zeros(mask.shape, np.bool_)


_ELEMENTS = 2**26
"""Number of mask elements that are computed at a time."""
