"""Flax's own code as a part of a module of this package, and whether somebody looks at its calls.

Flax wraps each method of a module: interceptors see its calls, and `capture_intermediates` and tables
keep what it returns. Where a module here runs Flax's code for a call, that is one call to all of these.
"""

import inspect
from collections.abc import Callable
from typing import Any

from flax.linen.module import _context, _global_interceptor_stack

from jaxfused.modules.fallback import why_intercepted
from jaxfused.ops.fp8.fp8 import DELAYED, is_fp8, is_named


def unwrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """The code of a method of Flax's, which takes the module first and which nobody intercepts."""
    return inspect.unwrap(method)


def why_watched(precision: Any = None) -> str | None:
    """Returns who sees the calls of single layers, which one operator would leave out, or None.

    Args:
      precision: of the products. Those in float8 have one state for several layers, and stay together
        where only Flax looks on.
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
