"""Flax's own code inside modules of this package, and the check whether calls of layers are watched.

Flax wraps each method of a module: interceptors see its calls, and `capture_intermediates` and tables
keep its results. If a module here runs Flax's code for a call, all of these must see a single call.
"""

import inspect
from collections.abc import Callable
from typing import Any

from flax.linen.module import _context, _global_interceptor_stack

from jaxfused.modules.fallback import why_intercepted
from jaxfused.ops.fp8.fp8 import DELAYED, is_fp8, is_named


def unwrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a Flax method, a function of the module, without the wrapper that is intercepted."""
    return inspect.unwrap(method)


def why_watched(precision: Any = None) -> str | None:
    """Returns why layers must be called one by one, as their calls or results are watched, or None.

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
