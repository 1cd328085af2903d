"""Functions of a logit and its query and key indices, evaluated on tiles of logits in registers.

A function is a program of scalars: of the score, the indices of query and key, and numbers that are read
from arrays. Values that depend on the query alone are computed once a row of the tile, values that
depend on the key alone once a column, and the rest for each element.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

# fmt: off
_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "bitcast_convert_type", "clamp", "convert_element_type",
    "copy", "div", "eq", "exp", "exp2", "ge", "gt", "integer_pow", "le", "log", "log2",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "rem",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sqrt", "square", "stop_gradient", "sub", "tanh", "xor",
})
# fmt: on
_OF_SHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
"""Primitives that change only the shape: programs here are of scalars, which they return unchanged."""
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)
_DTYPES = frozenset(map(jnp.dtype, (jnp.float32, jnp.int32, jnp.uint32, jnp.bool_)))
_HALVES = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16)))
_EXACT = 2**23
"""Bound on integers that kernels compute in float32: below it they are exact, and fit into the 23
mantissa bits."""


def why_not_on_tiles(eqn: Any) -> str | None:
    """Returns what kernels cannot evaluate in an equation of a jaxpr over scalars, in words, or None."""
    name = eqn.primitive.name
    if name in _CALLS:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        reasons = map(why_not_on_tiles, getattr(inner, "jaxpr", inner).eqns)
        return next((reason for reason in reasons if reason is not None), None)
    if any(var.aval.shape != () for var in (*eqn.invars, *eqn.outvars)):
        return f"{name} of arrays"
    if name not in _ELEMENTWISE | _OF_SHAPES or len(eqn.outvars) != 1:
        return name
    dtypes = {jnp.dtype(var.aval.dtype) for var in (*eqn.invars, *eqn.outvars)}
    allowed = _DTYPES if name == "bitcast_convert_type" else _DTYPES | _HALVES
    if not dtypes <= allowed:
        return f"{name} of {', '.join(sorted(d.name for d in dtypes - allowed))}"
    if name == "integer_pow" and eqn.params["y"] == 0:
        return "integer_pow to the power 0"
    if name == "select_n" and (len(eqn.invars) != 3 or eqn.invars[0].aval.dtype != jnp.bool_):
        return f"select_n of {len(eqn.invars) - 1} cases"
    if eqn.params.get("accuracy") is not None:
        return f"{name} of a stated accuracy"
    return None


def inlined(program: ClosedJaxpr, calls: frozenset[str] = _CALLS) -> ClosedJaxpr:
    """Returns the program with the bodies of called functions in place of their calls.

    The types of its variables name no mesh with Explicit axes, even if those of its constants do.
    """

    def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )
        for eqn in jaxpr.eqns:
            given = [value_of(env, var) for var in eqn.invars]
            name = eqn.primitive.name
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if name in calls:
                results = run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)
            elif name == "custom_jvp_call" and "jvp_jaxpr_fun" in eqn.params:
                results = with_own_derivative(eqn, given)
            elif name == "reshard":
                results = given
            else:
                results = bound(eqn, given)
            env.update(zip(eqn.outvars, results, strict=True))
        return [value_of(env, var) for var in jaxpr.outvars]

    def with_own_derivative(eqn: Any, given: Sequence[Any]) -> list[Any]:
        """Returns the results of a `jax.custom_jvp`, traced again without meshes, with its own rule."""
        body, rule = eqn.params["call_jaxpr"], eqn.params["jvp_jaxpr_fun"]
        given, hoisted = given[eqn.params["num_consts"] :], given[: eqn.params["num_consts"]]

        @jax.custom_jvp
        def f(*args: Any) -> list[Any]:
            return run(body.jaxpr, body.consts, (*hoisted, *args))

        @f.defjvp
        def jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
            jaxpr, consts, is_zero = rule.call_wrapped(*[False] * len(primals))
            results = run(jaxpr, consts, (*primals, *tangents))
            y, changes = results[: len(is_zero)], iter(results[len(is_zero) :])
            return y, [
                jnp.zeros_like(a) if zero else next(changes)
                for a, zero in zip(y, is_zero, strict=True)
            ]

        return f(*given)

    def plain(aval: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    args = [*map(plain, program.in_avals)]
    types = [jax.typeof(const) for const in program.consts]
    if not any(aval.sharding.mesh.explicit_axes for aval in types):
        return jax.make_jaxpr(lambda *args: run(program.jaxpr, program.consts, args))(*args)
    return closed(
        lambda consts, args: run(program.jaxpr, consts, args),
        program.consts,
        [*map(plain, types)],
        args,
    )


def closed(
    f: Callable[[Any, Any], Any], consts: Sequence[Any], types: Sequence[Any], args: Sequence[Any]
) -> ClosedJaxpr:
    """Returns the program of `f(consts, args)` that closes over consts, traced for consts of `types`."""
    whole = jax.make_jaxpr(f)([*types], [*args])
    jaxpr, count = whole.jaxpr, len(types)
    return ClosedJaxpr(
        Jaxpr(
            (*jaxpr.constvars, *jaxpr.invars[:count]),
            jaxpr.invars[count:],
            jaxpr.outvars,
            jaxpr.eqns,
            jaxpr.effects,
            debug_info=_DEBUG_INFO,
        ),
        (*whole.consts, *consts),
    )


def value_of(env: dict[Any, Any], var: Any) -> Any:
    """Returns the value of a variable or a literal."""
    return var.val if isinstance(var, Literal) else env[var]


def bound(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """Returns the results of a jaxpr's equation for operands `given`, without shardings it states."""
    args = {v: x for v, x in zip(eqn.invars, given, strict=True) if not isinstance(v, Literal)}
    placed = [
        name for name, value in eqn.params.items() if isinstance(value, jax.sharding.Sharding)
    ]
    if placed:
        eqn = eqn.replace(params=eqn.params | dict.fromkeys(placed))
    jaxpr = Jaxpr((), tuple(args), tuple(eqn.outvars), [eqn], eqn.effects, debug_info=_DEBUG_INFO)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*args.values())


_DEBUG_INFO = jax.make_jaxpr(lambda: ())().jaxpr.debug_info


class Part(NamedTuple):
    """An array over some axes of a tile: none, its rows (0), its columns (1), or both (0, 1).

    It is constant along the other axes.
    """

    array: Any
    axes: tuple[int, ...]

    def over(self, axes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """Returns the array broadcast to `axes` of a tile of `shape`."""
        if self.axes == axes:
            return self.array
        dimensions = [axes.index(axis) for axis in self.axes]
        sizes = tuple(shape[axis] for axis in axes)
        return lax.broadcast_in_dim(jnp.asarray(self.array), sizes, dimensions)


@dataclass(frozen=True, eq=False)
class TileFunction:
    """A function of a score, a query index and a key index; without the score if not `of_score`."""

    program: ClosedJaxpr
    """Program from scalars (score, query, key, *reads) to one; without the score if not `of_score`."""
    of_score: bool
    wanted: tuple[bool, ...] = ()
    """Whether each array that the function reads gets a gradient."""
    is_additive: bool = False
    """True if the result is the score plus a term that does not depend on the score."""

    @functools.cached_property
    def partials(self) -> ClosedJaxpr:
        """Program of the derivatives by the score and by each array read whose gradient is wanted."""

        def derivatives(score, query, key, *reads):
            def f(score, *floats):
                floats = iter(floats)
                args = [next(floats) if w else r for r, w in zip(reads, self.wanted, strict=True)]
                return jaxpr_as_fun(self.program)(score, query, key, *args)[0]

            wanted = [read for read, is_wanted in zip(reads, self.wanted, strict=True) if is_wanted]
            result, vjp = jax.vjp(f, score, *wanted)
            return vjp(jnp.ones_like(result))

        args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.program.in_avals]
        return inlined(jax.make_jaxpr(derivatives)(*args))

    @functools.cached_property
    def flat(self) -> ClosedJaxpr:
        return inlined(self.program)

    @functools.cached_property
    def text(self) -> str:
        """A hash of the program and of its derivatives; functions with the same hash count as equal."""
        programs = [self.flat, self.partials] if self.of_score else [self.flat]
        text = [_text(program.jaxpr) for program in programs]
        return hashlib.sha256(repr((text, self.of_score, self.wanted)).encode()).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TileFunction) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"TileFunction({self.text})"

    @property
    def reads(self) -> int:
        """Number of arrays that the function reads."""
        return len(self.program.in_avals) - (3 if self.of_score else 2)

    @functools.cached_property
    def derivative_by_element(self) -> bool:
        """True if the derivative with respect to the score depends on the score."""
        if not self.of_score or self.is_additive:
            return False
        jaxpr = self.partials.jaxpr
        needed = {jaxpr.outvars[0]} if not isinstance(jaxpr.outvars[0], Literal) else set()
        for eqn in reversed(jaxpr.eqns):
            if needed & set(eqn.outvars):
                needed |= {var for var in eqn.invars if not isinstance(var, Literal)}
        return jaxpr.invars[0] in needed

    def why_not(self) -> str | None:
        """Returns the operation that kernels cannot evaluate, or None."""
        programs = [("", self.flat)] + (
            [("the derivative of ", self.partials)] if self.of_score else []
        )
        for of, program in programs:
            if program.jaxpr.constvars:
                return f"{of}a function with a derivative of its own that closes over JAX's arrays"
            for eqn in program.eqns:
                if (reason := why_not_on_tiles(eqn)) is not None:
                    return of + reason
        return None

    def __call__(
        self, tile: Any, reads: Sequence[Any], limits: tuple[int, int], score: Any = None
    ) -> Any:
        """Evaluates the function at each element of a tile, in a kernel.

        Args:
          tile: `logits.Tile`.
          reads: references to the arrays in global memory.
          limits: numbers of queries and keys.
          score: the scores of the tile, or a function that returns them.
        """
        (result,) = self._evaluated(self.flat.jaxpr, tile, reads, limits, score, [0])
        return result.over((0, 1), tile.shape)

    def separated(
        self, tile: Any, reads: Sequence[Any], limits: tuple[int, int]
    ) -> "Separated | None":
        """Returns what the function adds to the score as terms of query and key; None if inseparable."""
        if not self.is_additive:
            return None
        return self._values(self.flat.jaxpr, tile, reads, limits, None).added(tile)

    def derivatives(
        self,
        which: Sequence[int],
        tile: Any,
        reads: Sequence[Any],
        limits: tuple[int, int],
        score: Any,
    ) -> list[Part]:
        """Returns the function's derivatives by the inputs `which`.

        Input 0 is the score, and input i the i-th of the reads that get a gradient.
        """
        return self._evaluated(self.partials.jaxpr, tile, reads, limits, score, which)

    def _evaluated(
        self,
        jaxpr: Jaxpr,
        tile: Any,
        reads: Sequence[Any],
        limits: tuple[int, int],
        score: Any,
        which: Sequence[int],
    ) -> list[Part]:
        values = self._values(jaxpr, tile, reads, limits, score)
        return [values.of(jaxpr.outvars[i]) for i in which]

    def _values(
        self, jaxpr: Jaxpr, tile: Any, reads: Sequence[Any], limits: tuple[int, int], score: Any
    ) -> "_Values":
        given: list[_Given] = []
        if self.of_score:
            given.append(_Given((0, 1), lambda: score() if callable(score) else score))
        for axis in (0, 1):
            numbers = functools.partial(_positions, tile, axis, limits[axis])
            given.append(_Given((axis ^ tile.query_axis,), numbers, (0, limits[axis] - 1)))
        for ref, aval in zip(reads, self.program.in_avals[len(given) :], strict=True):
            given.append(_Given(tile.axes(ref), functools.partial(_loaded, tile, ref, aval.dtype)))
        return _Values(jaxpr, tile.shape, dict(zip(jaxpr.invars, given, strict=True)))


class _Given(NamedTuple):
    """An input of a program: the axes of a tile along which it varies, and a function to its array.

    `bounds` are its least and greatest value, if known.
    """

    axes: tuple[int, ...]
    array: Callable[[], Any]
    bounds: tuple[int, int] | None = None


class Separated(NamedTuple):
    """A sum of terms that depend on the query or on the key alone; calling a term computes it."""

    by_query: list[Callable[[], Part]]
    by_key: list[Callable[[], Part]]
    origins: int = 0
    """Factor by which the tile's first query index is still to be added, as terms have indices relative
    to that query.

    Indices are large, but those of a query and its most attended keys are near each other: relative
    indices are smaller, and lose fewer bits in float32.
    """

    def mapped(self, f: Callable[[Part], Part], factor: int = 1) -> "Separated":
        """Returns the sum with `f` applied to each term, and `origins` times `factor`."""
        terms = ([functools.partial(_called, f, t) for t in terms] for terms in self[:2])
        return Separated(*terms, self.origins * factor)

    def plus(self, other: "Separated") -> "Separated":
        """Returns this sum plus another."""
        origins = self.origins + other.origins
        return Separated(self.by_query + other.by_query, self.by_key + other.by_key, origins)


def _called(f: Callable[[Part], Part], term: Callable[[], Part]) -> Part:
    return f(term())


def total(terms: Sequence[Callable[[], Part]], axis: int, shape: tuple[int, ...]) -> Any:
    """Returns the float32 sum of terms that vary along `axis` of a tile or not at all, as a vector."""
    arrays = [term().over((axis,), shape).astype(jnp.float32) for term in terms]
    return functools.reduce(lambda x, y: x + y, arrays)


def _positions(tile: Any, axis: int, limit: int) -> Any:
    """Returns the indices of queries (axis 0) or keys (axis 1), clamped to the last one."""
    numbers = tile.numbers(axis)
    if limit % tile.shape[axis ^ tile.query_axis]:
        # Beyond the last query or key a function might return NaN, and a weight of 0 times NaN is NaN.
        numbers = jnp.minimum(numbers, limit - 1)
    return numbers


def _loaded(tile: Any, ref: Any, dtype: Any) -> Any:
    array = tile.read(ref)
    if dtype == jnp.bool_:
        return array != 0
    return array if array.dtype == _held(dtype) else array.astype(_held(dtype))


def _held(dtype: Any) -> Any:
    """Returns the dtype of values in registers: float32 for 16-bit floats, else `dtype`."""
    return jnp.float32 if dtype in _HALVES else dtype


class _Values:
    """The values of a program's variables, each computed only when a result needs it.

    A tile that nothing uses would make compilation slow: Mosaic takes long to find a layout for it.
    """

    def __init__(self, jaxpr: Jaxpr, shape: tuple[int, ...], given: dict[Any, _Given]) -> None:
        self.shape, self.given, self.result = shape, given, jaxpr.outvars[0]
        self.equations = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}
        self.decisive = _decisive(jaxpr)
        self.parts: dict[Any, Part] = {}
        self.floats: dict[Any, Part] = {}
        # Results by variable, each computed once even if many equations read the variable.
        self.known_axes = {var: given.axes for var, given in given.items()}
        self.known_bounds: dict[Any, tuple[int, int] | None] = {}
        self.known_exact: dict[Any, bool] = {}

    def of(self, var: Any) -> Part:
        if isinstance(var, Literal):
            return Part(jnp.asarray(var.val, _held(var.aval.dtype)), ())
        if var not in self.parts:
            if var in self.given:
                self.parts[var] = Part(self.given[var].array(), self.given[var].axes)
            else:
                self.parts[var] = self.computed(self.equations[var])
        return self.parts[var]

    def axes(self, var: Any) -> tuple[int, ...]:
        if isinstance(var, Literal):
            return ()
        if var not in self.known_axes:
            used = self.equations[var].invars
            self.known_axes[var] = tuple(sorted({axis for v in used for axis in self.axes(v)}))
        return self.known_axes[var]

    def computed(self, eqn: Any) -> Part:
        name, out = eqn.primitive.name, eqn.outvars[0].aval.dtype
        if name in _OF_SHAPES or name in ("copy", "stop_gradient"):
            return self.of(eqn.invars[0])
        if name == "convert_element_type":
            if (
                out == jnp.float32
                and self.axes(eqn.invars[0]) != ()
                and self.is_exact(eqn.invars[0])
            ):
                return self.as_float(eqn.invars[0])
            part = self.of(eqn.invars[0])
            if out in _HALVES:
                rounded = self.converted(part, jnp.float32).array.astype(out)
                return Part(rounded.astype(jnp.float32), part.axes)
            return self.converted(part, out)
        return self.applied(eqn, [self.of(var) for var in eqn.invars])

    def converted(self, part: Part, dtype: Any) -> Part:
        if part.array.dtype == dtype:
            return part
        if part.array.dtype == jnp.bool_:
            one, zero = (jnp.full(part.array.shape, x, dtype) for x in (1, 0))
            return Part(jnp.where(part.array, one, zero), part.axes)
        if dtype == jnp.bool_:
            return Part(part.array != 0, part.axes)
        return Part(part.array.astype(dtype), part.axes)

    def applied(self, eqn: Any, parts: Sequence[Part]) -> Part:
        """Returns an equation's result for operands `parts`, broadcast to all axes of any of them."""
        axes = tuple(sorted({axis for part in parts for axis in part.axes}))
        arrays = [part.over(axes, self.shape) for part in parts]
        name, params = eqn.primitive.name, eqn.params
        if name == "tanh":
            # The GPU's tanh instruction has an error larger than the rounding error of 16-bit floats.
            result = 1.0 - 2.0 * _reciprocal(jnp.exp(2.0 * arrays[0]) + 1.0)
        elif name == "logistic":
            result = _reciprocal(jnp.exp(-arrays[0]) + 1.0)
        elif (
            name == "div"
            and len(parts[1].axes) < len(axes)
            and arrays[0].dtype == jnp.float32
            and eqn.outvars[0] not in self.decisive
        ):
            # One division a row or column and a multiplication an element take less time than a
            # division an element. The inverse is rounded too, so 41 * (1 / 41) is below 1: variables
            # in `decisive` are divided.
            inverse = Part(1.0 / parts[1].array, parts[1].axes)
            result = arrays[0] * inverse.over(axes, self.shape)
        elif name == "not" and arrays[0].dtype == jnp.bool_:
            result = jnp.where(arrays[0], jnp.zeros_like(arrays[0]), jnp.ones_like(arrays[0]))
        elif name == "add_any":
            result = arrays[0] + arrays[1]
        elif name == "integer_pow" and params["y"] < 2:
            power = abs(params["y"])
            result = arrays[0] if power == 1 else lax.integer_pow(arrays[0], power)
            result = 1.0 / result if params["y"] < 0 else result
        else:
            result = eqn.primitive.bind(*arrays, **params)
        return Part(result, axes)

    # --- sums of a term of the query and a term of the key ----------------------------------------

    def added(self, tile: Any) -> Separated | None:
        """Returns what a program adds to the score, as terms of query and key; None if inseparable."""
        found = Separated([], [])
        score, query, key, *_ = self.given
        var, carriers = self.result, {score}
        for out, eqn in self.equations.items():
            if any(not isinstance(given, Literal) and given in carriers for given in eqn.invars):
                carriers.add(out)
        while var is not score:
            eqn = self.equations[var]
            if eqn.primitive.name not in ("add", "add_any", "sub"):
                (var,) = eqn.invars
                continue
            first = eqn.invars[0]
            is_first = not isinstance(first, Literal) and first in carriers
            var, other = eqn.invars if is_first else eqn.invars[::-1]
            terms = self.separate(other, tile, query, key)
            if terms is None:
                return None
            if eqn.primitive.name == "sub":
                terms = terms.mapped(_negative, -1)
            found = found.plus(terms)
        if found.origins:
            origin = Part(tile.query_start.astype(jnp.float32) * found.origins, ())
            found.by_query.append(lambda: origin)
        return found

    def separate(self, var: Any, tile: Any, query: Any, key: Any) -> Separated | None:
        """Returns a variable as a sum of terms of the query and of the key; None if inseparable."""
        if var is query or var is key:
            axis = 0 if var is query else 1
            part = functools.partial(_from_first_query, tile, axis)
            return Separated(*(([part], []) if axis == 0 else ([], [part])), 1)
        axes = self.axes(var)
        eqn = None if isinstance(var, Literal) else self.equations.get(var)
        name = None if eqn is None else eqn.primitive.name
        is_integer = var.aval.dtype == jnp.int32
        if is_integer and not self.is_exact(var):
            return None
        if eqn is not None and name in ("add", "add_any", "sub", "neg"):
            sums = [self.separate(given, tile, query, key) for given in eqn.invars]
            one, *others = sums
            if one is None or None in others:
                return None
            if name == "neg":
                return one.mapped(_negative, -1)
            (other,) = others
            assert other is not None
            return one.plus(other if name != "sub" else other.mapped(_negative, -1))
        if eqn is not None and (name in _OF_SHAPES or name in ("copy", "stop_gradient")):
            return self.separate(eqn.invars[0], tile, query, key)
        if eqn is not None and name == "convert_element_type" and var.aval.dtype == jnp.float32:
            (given,) = eqn.invars
            if given.aval.dtype in (jnp.int32, jnp.float32):
                return self.separate(given, tile, query, key)
        if len(axes) < 2:
            part = functools.partial(self.as_float if is_integer else self.of, var)
            by_key = axes == (1 - tile.query_axis,)
            return Separated([], [part]) if by_key else Separated([part], [])
        if eqn is not None and name == "mul":
            for factor, other in (eqn.invars, eqn.invars[::-1]):
                if self.axes(factor) == () and not is_integer:
                    terms = self.separate(other, tile, query, key)
                    if terms is not None and not terms.origins:
                        return terms.mapped(functools.partial(self.times, factor))
        return None

    def times(self, factor: Any, part: Part) -> Part:
        return Part(self.of(factor).over(part.axes, self.shape) * part.array, part.axes)

    # --- integers as floats: conversions of each element are as slow as exponentials -------------

    def bounds(self, var: Any) -> tuple[int, int] | None:
        """Returns the least and the greatest value of an integer, or None where they are unknown."""
        if isinstance(var, Literal):
            return int(var.val), int(var.val)
        if var in self.given:
            return self.given[var].bounds
        if var not in self.known_bounds:
            self.known_bounds[var] = self.bounds_of_result(self.equations[var])
        return self.known_bounds[var]

    def bounds_of_result(self, eqn: Any) -> tuple[int, int] | None:
        name = eqn.primitive.name
        if name in _OF_SHAPES or name in ("copy", "stop_gradient"):
            return self.bounds(eqn.invars[0])
        if name not in _OF_INTEGERS:
            return None
        of_inputs = [self.bounds(v) for v in eqn.invars if v.aval.dtype == jnp.int32]
        if any(b is None for b in of_inputs) or len(of_inputs) != len(eqn.invars):
            return None
        return _OF_INTEGERS[name](*of_inputs)

    def is_exact(self, var: Any) -> bool:
        """Whether an integer variable, and all from which it is computed, are exact in float32."""
        if var.aval.dtype != jnp.int32:
            return False
        own = self.bounds(var)
        if own is None or not -_EXACT < own[0] <= own[1] < _EXACT:
            return False
        if isinstance(var, Literal) or var in self.given:
            return True
        if var not in self.known_exact:
            self.known_exact[var] = all(map(self.is_exact, self.equations[var].invars))
        return self.known_exact[var]

    def as_float(self, var: Any) -> Part:
        """Returns an integer that `is_exact` in float32, computed from converted inputs."""
        if isinstance(var, Literal):
            return Part(jnp.float32(var.val), ())
        if var not in self.floats:
            eqn = self.equations.get(var)
            if eqn is None:
                array, axes = self.of(var)
                # For 0 <= n < 2^23, the float32 number 2^23 + n has the bits 0x4B000000 + n: two
                # additions take the place of a conversion.
                bits = array + jnp.int32(0x4B000000)
                number = lax.bitcast_convert_type(bits, jnp.float32) - jnp.float32(_EXACT)
                self.floats[var] = Part(number, axes)
            elif eqn.primitive.name in _OF_SHAPES or eqn.primitive.name in (
                "copy",
                "stop_gradient",
            ):
                self.floats[var] = self.as_float(eqn.invars[0])
            else:
                self.floats[var] = self.applied(eqn, [self.as_float(v) for v in eqn.invars])
        return self.floats[var]


def _decisive(jaxpr: Jaxpr) -> set[Any]:
    """Returns the variables from which a comparison, an integer, `rem` or `sign` is computed.

    A rounding error of such a variable may change the result by a whole step.
    """
    found: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        is_step = not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        if is_step or eqn.primitive.name in ("rem", "sign") or found & set(eqn.outvars):
            found |= {var for var in eqn.invars if not isinstance(var, Literal)}
    return found


def _reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x for x above 0 by two instructions, with an error below a 16-bit float's rounding."""
    return jnp.exp2(-jnp.log2(x))


def _negative(part: Part) -> Part:
    return Part(-part.array, part.axes)


def _from_first_query(tile: Any, axis: int) -> Part:
    """Returns the indices of queries or keys in float32, counted from the tile's first query.

    Only the last 3 bits of a column's index in the tile depend on the thread. The other bits are known
    at compile time, and so is their conversion to float32.
    """
    dimension = axis ^ tile.query_axis
    start = (tile.query_start, tile.key_start)[axis] - tile.query_start
    numbers = tile.numbers(axis, from_start=True)
    low = (start + (numbers & 7)).astype(jnp.float32)
    return Part(low + (numbers - (numbers & 7)).astype(jnp.float32), (dimension,))


def _product_bounds(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


_OF_INTEGERS: dict[str, Callable[..., tuple[int, int]]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]),
    "mul": _product_bounds,
    "abs": lambda a: (0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
}
"""Functions from the bounds of an operation's operands to those of its result, by primitive.

float32 computes these operations exactly if operands and result are exact.
"""


def _text(jaxpr: Jaxpr) -> str:
    """Returns a program's text, in which variables are numbered: equal programs have equal texts."""
    numbers: dict[Any, int] = {}

    def name(var: Any) -> str:
        if isinstance(var, Literal):
            return f"{var.val}:{var.aval.dtype}"
        return f"v{numbers.setdefault(var, len(numbers))}:{var.aval.dtype}{var.aval.shape}"

    lines = [" ".join(map(name, jaxpr.invars))]
    for eqn in jaxpr.eqns:
        params = {key: str(value) for key, value in sorted(eqn.params.items())}
        given, results = (" ".join(map(name, vs)) for vs in (eqn.invars, eqn.outvars))
        lines.append(f"{results} = {eqn.primitive.name} {params} {given}")
    return "\n".join([*lines, " ".join(map(name, jaxpr.outvars))])
