"""Checks of operators' arguments, whose messages say the rule, the value and the remedy.

`python_numbers` checks the options of all public functions by their annotations. Operators call the
functions `check_...`.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Integral, Number, Real
from typing import Any, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfused.runtime.activation import ACTIVATIONS, is_known
from jaxfused.runtime.other_arrays import is_of_qwix
from jaxfused.runtime.quantized_array import QuantizedArray


def as_arrays(*operands: Any) -> tuple[Any, ...]:
    """Converts operands (NumPy's arrays, or objects with `__jax_array__` like nnx.Param) to JAX arrays.

    `jax.tree.map` would return a Flax parameter as a parameter, because it is a pytree.
    """
    return tuple(None if operand is None else as_array(operand) for operand in operands)


def as_array(value: Any) -> jax.Array:
    """Converts to a JAX array; NumPy's 64-bit integers are clipped to the range of the array's dtype.

    JAX alone would take the lower 32 bits of each, so that 2**32 would become 0.
    """
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iu":
        value = _limited(value, jax.dtypes.canonicalize_dtype(value.dtype))
    return jnp.asarray(value)


def as_int32(value: Any) -> jax.Array:
    """Converts integers to int32, clipping wider ones to its range; returns other arrays unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        info = np.iinfo(np.int32)
        return jnp.asarray(min(max(value, info.min), info.max), jnp.int32)
    array = as_array(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return array
    if array.dtype.itemsize < 4 or array.dtype == jnp.int32:
        return array.astype(jnp.int32)
    return _limited(array, np.dtype(np.int32))


def _limited(integers: Any, dtype: np.dtype) -> Any:
    """Returns integers converted to a narrower dtype, clipped to its range."""
    if integers.dtype == dtype:
        return integers
    held, to = np.iinfo(integers.dtype), np.iinfo(dtype)
    return integers.clip(max(to.min, held.min), min(to.max, held.max)).astype(dtype)


def python_numbers[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function check its options (all arguments but arrays) against their annotations.

    NumPy scalars and arrays of one known number, which configs or shapes may hold, become Python's
    numbers and flags.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    names = tuple(parameters)
    of_class, _, own_name = function.__qualname__.partition(".")
    annotations = {name: parameter.annotation for name, parameter in parameters.items()}
    checks = _checks(annotations, of_module=bool(own_name))

    @functools.wraps(function)
    def with_numbers(*args: P.args, **kwargs: P.kwargs) -> R:
        # The message names the class of the instance, since several classes share a constructor.
        op = type(args[0]).__name__ if own_name == "__init__" else of_class
        taken = [
            checks[name](op, name, value) if name in checks else value
            for name, value in zip(names, args, strict=False)
        ]
        for name in checks.keys() & kwargs.keys():
            kwargs[name] = checks[name](op, name, kwargs[name])
        return function(*taken, *args[len(names) :], **kwargs)  # type: ignore[arg-type]

    return with_numbers


def python_number_fields(module: Any) -> Any:
    """Makes a Linen module check its fields against their annotations, like `python_numbers`."""
    types = get_type_hints(module)
    annotations = {name: types[name] for name in module.__dataclass_fields__}
    checks = _checks(annotations, of_module=True)
    finish = module.__post_init__

    @functools.wraps(finish)
    def with_numbers(self: Any) -> None:
        for name, check in checks.items():
            value = check(type(self).__name__, name, getattr(self, name))
            object.__setattr__(self, name, value)
        finish(self)

    module.__post_init__ = with_numbers
    return module


_COUNTS = frozenset(
    {
        "num_heads",
        "num_kv_heads",
        "heads",
        "key_heads",
        "head_dim",
        "features",
        "num_features",
        "condition_features",
        "qkv_features",
        "in_kv_features",
        "in_features",
        "out_features",
        "hidden_features",
        "num_experts",
        "num_groups",
        "group_size",
        "feature_group_count",
        "channel_multiplier",
        "kernel_size",
        "chunk_size",
    }
)
"""Options that count something, and so are at least 1."""

_BOUNDS = frozenset({"chunk_size", "ignore_index", "local_window_size", "rounding_seed"})
"""Options that other numbers are compared with, such as a label to ignore, or that have 32 bits and no
sign: they may exceed int32."""

type _Check = Callable[[str, str, Any], Any]


def _checks(annotations: Mapping[str, Any], *, of_module: bool) -> dict[str, _Check]:
    """Returns the check of each option that is a number, flag, word, dtype or axis name, or an array."""
    kinds = _kinds(annotations)
    checks: dict[str, _Check] = {}
    for name, annotation in annotations.items():
        leaves = _leaves(annotation)
        words = tuple(sorted(leaf for leaf in leaves if isinstance(leaf, str)))
        optional = type(None) in leaves
        if name == "axis_name":
            checks[name] = functools.partial(as_axis_name, bound=Hashable in leaves)
        elif name in kinds:
            checks[name] = functools.partial(
                _as_numbers, kind=kinds[name], leaves=leaves, several=_holds(annotation, Sequence)
            )
        elif (
            name.endswith(("dtype", "_element_type"))
            and Any in leaves
            and (name, annotation) != ("dtype", Any)
        ):
            # The `dtype: Any` of `quantize` also has names that JAX does not know; `quantize`
            # checks them.
            checks[name] = as_dtype
        elif bool in leaves and leaves <= {bool, type(None), *words}:
            checks[name] = functools.partial(as_flag, words=words, optional=optional)
        elif lax.Precision in leaves:
            checks[name] = functools.partial(_as_precision, leaves=leaves, of_module=of_module)
        elif leaves <= {str, type(None), *words}:
            checks[name] = functools.partial(_as_word, words=words, optional=optional)
        elif (
            jax.Array in leaves
            and str not in leaves
            # A tree of arrays, such as optax.Params, is no operand.
            and not _holds(annotation, Mapping)
            and not _holds(annotation, Callable)  # type: ignore[arg-type]
        ):
            checks[name] = functools.partial(
                _as_operand,
                optional=optional,
                words=words,
                floats=QuantizedArray not in leaves,
                kinds=tuple(leaf for leaf in leaves if _is_class(leaf)),
                has_others=_holds(annotation, Sequence)
                or not all(map(_is_class, leaves - {*words})),
            )
    return checks


def _kinds(annotations: Mapping[str, Any]) -> dict[str, type[int] | type[float]]:
    """Returns int or float for each parameter that is a number, or a sequence of numbers."""
    kinds: dict[str, type[int] | type[float]] = {}
    for name, annotation in annotations.items():
        leaves = _leaves(annotation)
        if not leaves & {int, float} or leaves & {bool, jax.Array, Any}:
            continue
        if _holds(annotation, Mapping):
            continue
        kinds[name] = float if float in leaves else int
    return kinds


def _leaves(annotation: Any) -> set[Any]:
    """Returns the types that an annotation contains, and the strings of its `Literal`s."""
    annotation = getattr(annotation, "__value__", annotation)  # of an alias, as that of pages
    is_list = isinstance(annotation, list)  # as of the arguments of a Callable
    arguments = annotation if is_list else get_args(annotation)
    return set().union(*map(_leaves, arguments)) if arguments or is_list else {annotation}


def _is_class(leaf: Any) -> bool:
    return isinstance(leaf, type) and leaf is not Any


def _holds(annotation: Any, container: type) -> bool:
    """Returns whether an annotation allows a container of this type, such as a sequence of values."""
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, container):
        return True
    return any(_holds(part, container) for part in get_args(annotation))


def _as_numbers(
    op: str, name: str, value: Any, *, kind: type, leaves: set[Any], several: bool
) -> Any:
    """Returns the value, or each value of a sequence, as `kind`; allowed strings and None unchanged."""
    if (value is None and type(None) in leaves) or (isinstance(value, str) and str in leaves):
        return value
    if not several:
        return _as_number(op, name, value, kind)
    if hasattr(value, "ndim") and value.ndim and not isinstance(value, jax.core.Tracer):
        value = np.asarray(value).tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        entries = [
            _as_numbers(op, name, entry, kind=kind, leaves=leaves, several=True) for entry in value
        ]
        return entries if isinstance(value, list) else tuple(entries)
    return _as_number(op, name, value, kind)


def _as_number(op: str, name: str, value: Any, kind: type) -> int | float:
    """Returns a number as `kind`, or raises if it is unknown while tracing, or out of range."""
    is_array = hasattr(value, "dtype") and hasattr(value, "ndim")
    dtype = value.dtype if is_array else np.dtype(type(value) if isinstance(value, Real) else "O")
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    is_whole = jnp.issubdtype(dtype, jnp.integer) or is_int
    is_number = is_whole or (kind is float and jnp.issubdtype(dtype, jnp.floating))
    if isinstance(value, jax.core.Tracer) or (is_array and value.ndim) or not is_number:
        a_number = "a Python float" if kind is float else "an int"
        raise ValueError(
            f"{op}: {name} is {said(value)}, but it is a constant of the kernel; pass {a_number}."
        )
    bits = 64 if name in _BOUNDS else 1024 if kind is float else 32
    if is_whole and not -(2 ** (bits - 1)) <= operator.index(value) < 2 ** (bits - 1):
        raise ValueError(
            f"{op}: {name} is {said(value)}, beyond the numbers that it can be; pass a smaller one."
        )
    if name in _COUNTS:
        check_count(op, name, operator.index(value))
    return kind(value)


def as_flag(op: str, name: str, value: Any, *, words: Sequence[str], optional: bool) -> Any:
    """Returns a flag as True or False; 1 and 0 are accepted too, since configs may hold them."""
    if (value is None and optional) or (isinstance(value, str) and words):
        return value
    is_array = hasattr(value, "dtype") and hasattr(value, "ndim")
    is_known = is_array and not value.ndim and not isinstance(value, jax.core.Tracer)
    if isinstance(value, bool) or (is_known and value.dtype == jnp.bool_):
        return bool(value)
    if type(value) is int and value in (0, 1):
        return bool(value)
    raise ValueError(
        f"{op}: {name} is {said(value)}, but it is a switch of which the program is made; pass True or"
        f" False{' or None' * optional}."
    )


def _as_word(op: str, name: str, value: Any, *, words: Sequence[str], optional: bool) -> Any:
    """Returns the value if it is a str; the operator checks which strings it accepts."""
    if isinstance(value, str) or (value is None and optional):
        return value
    choices = [*map(repr, words)] or ["a str"]
    raise ValueError(
        f"{op}: {name} is {said(value)}, but it is a word; pass"
        f" {' or '.join(choices + ['None'] * optional)}."
    )


_OF_ARRAYS = ("dtype", "__jax_array__", "__array__", "__array_interface__")
"""Attributes by one of which JAX takes an object as an array."""


def _as_operand(
    op: str,
    name: str,
    value: Any,
    *,
    optional: bool,
    words: Sequence[str],
    floats: bool,
    kinds: tuple[type, ...],
    has_others: bool,
) -> Any:
    """Returns the value if it can be an array, or if it is None and optional.

    With `floats` a `QuantizedArray` is refused. Of objects only `kinds` are taken, unless the annotation
    `has_others`. Operators with `words` check a str themselves.
    """
    if isinstance(value, str) and words:
        return value
    if floats and isinstance(value, QuantizedArray):
        raise ValueError(
            f"{op}: {name} is a QuantizedArray of shape {value.shape}, which {op} does not take; pass"
            f" {name}.dequantize(), or multiply by jaxfused.quantized_matmul."
        )
    if (value is None and optional) or (
        value is not None and _may_be_array(value, kinds, has_others=has_others)
    ):
        return value
    is_object = not isinstance(
        value, str | bytes | dict | Sequence | np.ndarray | np.generic | None
    )
    what = f"a {type(value).__name__}" if is_object and type(value) is not object else said(value)
    dtype = getattr(value, "dtype", None)
    what += f" of dtype {dtype}" * isinstance(value, np.ndarray | np.generic)
    raise ValueError(
        f"{op}: {name} is {what}, but it is {'a number or ' * bool({int, float} & {*kinds})}an array of"
        f" numbers; pass one{' or None' * optional}."
    )


def _may_be_array(value: Any, kinds: tuple[type, ...], *, has_others: bool) -> bool:
    """Returns whether JAX may make an array of numbers of a value, or it is one of `kinds`.

    With `has_others`, and of functions where `kinds` has not only arrays and numbers, operators check
    more.
    """
    if isinstance(value, str | bytes | dict | type | jax.ShapeDtypeStruct) or type(value) is object:
        return False
    if getattr(getattr(value, "dtype", None), "kind", None) in ("O", "S", "U", "M", "m"):
        return False
    if has_others or isinstance(value, (Number, *kinds)):
        return True
    if any(hasattr(value, attribute) for attribute in _OF_ARRAYS):
        return True
    if inspect.isroutine(value):
        return not {*kinds} <= {jax.Array, QuantizedArray, int, float, type(None)}
    if not isinstance(value, Sequence):
        return QuantizedArray in kinds and is_of_qwix(value)
    try:
        # NamedTuples are an operator's own operands. Integers of more than 32 bits raise OverflowError,
        # and operators clip them.
        return type(value) not in (list, tuple) or jnp.asarray(value) is not None
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False


def _as_precision(op: str, name: str, value: Any, *, leaves: set[Any], of_module: bool) -> Any:
    """Returns the value if it is a precision of JAX's products, a precision's name, or a pair."""

    def is_known(one: Any) -> bool:
        if not isinstance(one, str):
            return isinstance(one, tuple(leaf for leaf in leaves if isinstance(leaf, type)))
        if one in leaves or one in lax.DotAlgorithmPreset.__members__:
            return True
        if one.startswith("fp8"):
            # Modules and operators with float8 say which of its precisions they take.
            return of_module or "fp8" in leaves
        try:
            return lax.Precision(one) in lax.Precision
        except ValueError:
            return False

    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if all(map(is_known, value)) if is_pair else is_known(value):
        return value
    raise ValueError(
        f"{op}: {name} is {said(value)}, but it is the precision of a product; pass a"
        " jax.lax.Precision, 'default', 'high' or 'highest', a jax.lax.DotAlgorithmPreset or None."
    )


def as_dtype(op: str, name: str, value: Any) -> Any:
    """Returns the value if it is None or a dtype: a str, a type of numbers or a dtype itself."""
    is_name = isinstance(value, (str, type, np.dtype)) or hasattr(value, "dtype")
    # A name from a NumPy array is both a str and a NumPy scalar.
    is_array = not isinstance(value, str) and isinstance(value, (jax.Array, np.ndarray, np.generic))
    try:
        if value is None or (is_name and not is_array and jnp.dtype(value) is not None):
            return value
    except TypeError:
        pass
    raise ValueError(
        f"{op}: {name} is {said(value)}, which is no dtype; pass one of JAX's, as jnp.float32 or"
        " its name."
    )


def as_axis_name(op: str, name: str, value: Any, *, bound: bool) -> Any:
    """Returns the name or names of mapped axes; if `bound`, checks that the axes are mapped now."""
    for axis in value if isinstance(value, (tuple, list)) else (value,):
        if axis is None and axis is value:
            return None
        if not isinstance(axis, Hashable) or isinstance(axis, (Number, jax.Array, np.generic)):
            raise ValueError(
                f"{op}: {name} is {said(value)}, but mapped axes have names; pass that of"
                " jax.shard_map's mesh or jax.vmap's axis_name, or a tuple of them."
            )
        try:
            if bound:
                lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"{op}: {name} is {said(value)}, but no axis {axis!r} is mapped here; call {op} within"
                " jax.shard_map, jax.pmap or jax.vmap over that axis, or leave it out."
            ) from None
    return tuple(value) if isinstance(value, list) else value


def said(value: Any) -> str:
    """Returns the value for a message; an array is described by its shape."""
    if isinstance(value, (jax.Array, np.ndarray)) and value.ndim:
        return f"an array of shape {value.shape}"
    return repr(value)


def readable_values(array: jax.Array) -> np.ndarray | None:
    """Returns the values of an array, or None if it is traced or not on this process's CPU."""
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return None
    if any(device.platform != "cpu" for device in array.devices()):
        return None
    return np.asarray(array)


def for_each_axis(op: str, name: str, value: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """Returns one positive int for each spatial axis, given one int for all axes or one for each."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * spatial
    if len(values) != spatial or any(not isinstance(v, int) or v < 1 for v in values):
        raise ValueError(
            f"{op}: {name} is {value!r}, but x has {spatial} spatial axes;"
            f" pass one positive int, or {spatial} of them."
        )
    return values


def check_floating(op: str, arrays: Mapping[str, jax.Array | None]) -> None:
    """Checks that all arrays that are not None have floating-point dtypes, the first of 16 bits or more.

    The first one's dtype is that of the result.
    """
    for number, (name, array) in enumerate(arrays.items()):
        if array is None:
            continue
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{op}: {name} has dtype {array.dtype}, but {op} takes a floating-point {name};"
                f" pass {name}.astype(jnp.float32)."
            )
        if number == 0 and array.dtype.itemsize == 1:
            raise ValueError(
                f"{op}: {name} has dtype {array.dtype}, but {op} computes in 16 bits or more; pass"
                f" {name}.astype(jnp.bfloat16)."
            )


def check_images(op: str, x: jax.Array) -> None:
    """Checks that x is [B, *spatial, C]; only the batch may be empty."""
    if x.ndim < 3 or 0 in x.shape[1:]:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but it needs a batch axis, a spatial axis and at least one"
            " channel; pass x of shape [batch, ..., channels]."
        )


def check_shape(
    op: str, name: str, array: jax.Array | None, shape: tuple[int, ...], rule: str
) -> None:
    """Checks that `array`, if not None, has this shape; `rule` says which other argument sets it."""
    if array is not None and array.shape != shape:
        raise ValueError(
            f"{op}: {name} has shape {array.shape}, but {rule}; pass {name} of shape {shape}."
        )


def check_activation(op: str, activation: str | None, name: str = "activation") -> None:
    """Checks that `activation` is None or the name of an activation."""
    if activation is not None and not (isinstance(activation, str) and is_known(activation)):
        names = ", ".join(repr(n) for n in ACTIVATIONS)
        raise ValueError(
            f"{op}: {name}={activation!r} is not known; pass None or one of {names}, or such as"
            " 'leaky_relu(0.2)' for a slope from 0 to 1."
        )


def check_word(op: str, name: str, value: str, words: Any) -> None:
    """Checks that an option is one of the words of a `Literal`."""
    known = get_args(words)
    if value not in known:
        raise ValueError(f"{op}: {name} is {value!r}; pass {' or '.join(map(repr, known))}.")


def check_constant(op: str, name: str, value: object) -> None:
    """Checks that `value` is a Python number, because a kernel is compiled for it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{op}: {name} is {value!r}, but it is a constant of the kernel; pass a Python float."
        )


LARGEST = float(np.finfo(np.float32).max)


def check_finite(op: str, name: str, value: Any) -> None:
    """Checks that `value` is a constant of the kernel, and neither NaN nor infinite in float32."""
    check_constant(op, name, value)
    if not abs(value) <= LARGEST:
        raise ValueError(
            f"{op}: {name} is {value}, with which no result is a number; pass a finite number."
        )


def check_epsilon(op: str, epsilon: Any) -> None:
    """Checks that `epsilon`, added to a variance before its square root, is finite and not negative."""
    check_finite(op, "epsilon", epsilon)
    if epsilon < 0:
        raise ValueError(
            f"{op}: epsilon is {epsilon}, but it keeps a variance above 0; pass 0 or more."
        )


def check_soft_cap(op: str, cap: Any, name: str = "logits_soft_cap") -> None:
    """Checks that `cap`, the bound of logits, is None or a finite number above 0."""
    if cap is None:
        return
    check_constant(op, name, cap)
    if not 0.0 < cap < math.inf:
        raise ValueError(
            f"{op}: {name} is {cap}, but logits are kept below it; pass a finite number"
            " greater than 0, or None for no cap."
        )


def check_count(op: str, name: str, value: object) -> None:
    """Checks that `value` is a whole number, 1 or more."""
    if not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(
            f"{op}: {name} is {value!r}, but it counts something; pass an int of 1 or more."
        )
