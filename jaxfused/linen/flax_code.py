"""Flax's own code inside modules of this package, and the check whether calls of layers are watched.

Flax wraps each method of a module: interceptors see its calls, and `capture_intermediates` and tables
store its results. If a module here runs Flax's code for a call, all of these must see a single call.
"""

import inspect
from collections.abc import Callable
from typing import Any

from flax.linen.module import _context, _global_interceptor_stack

from jaxfused.modules.fallback import why_intercepted
from jaxfused.ops.fp8.fp8 import DELAYED, is_fp8, is_named


def flax_call(module: type) -> Callable[..., Any]:
    """Returns the `__call__` of the Flax class that `module` extends, without its intercepted wrapper.

    That class is not looked up by its name, because a program may have put a class of this package in
    its place: `flax.linen.Conv = jaxfused.linen.Conv`.
    """
    base: Any = module.__bases__[0]
    return inspect.unwrap(base.__call__)


def why_watched(precision: Any = None) -> str | None:
    """Returns why layers must be called one by one, as Flax observes calls or results, or None.

    Args:
      precision: precision of the products. Products in float8 have one state for several layers, and
        stay together unless JAX's products are intercepted.
    """
    intercepted = why_intercepted()
    if intercepted is not None or is_named(precision, DELAYED) or is_fp8(precision):
        return intercepted
    if _global_interceptor_stack:
        return "nn.intercept_methods sees its layers"
    if _context.capture_stack and _context.capture_stack[-1]:
        return "the results of its layers are captured"
    if _context.call_info_stack:
        return "its layers are listed"
    return None
