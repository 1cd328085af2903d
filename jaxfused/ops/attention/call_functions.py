"""score_mod and mask_mod of a call: turned into a bias and a bool mask, or evaluated in the kernels."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.attention.attention_arguments import places
from jaxfused.ops.attention.index_function import IndexFunction, ScoreMod
from jaxfused.ops.attention.kernel_function import KernelFunction, kernel_function

_FEW_QUERIES, _FEW_KEYS = 64, 256
"""Queries below which, or keys up to which, kernels run that take bias and mask as arrays and evaluate
no functions."""


@dataclass
class CallFunctions:
    """The functions that kernels evaluate in a call."""

    why_no_kernel: str | None
    """Reason why kernels can evaluate no function of this call; None if they can."""
    query_offset: Any
    sizes: tuple[int, int, int, int]
    """Sizes: batch entries B, query heads N, queries T, keys S."""
    score: KernelFunction | None = None
    mask: KernelFunction | None = None
    why_no_score: str | None = None
    """Reason why kernels cannot take the score_mod, so that XLA runs; None otherwise."""

    @functools.cached_property
    def places(self) -> Any:
        """Indices b, h, q and k of all elements, which `IndexFunction.over` takes."""
        return places(self.query_offset, *self.sizes)

    @property
    def has_long_rows(self) -> bool:
        """True if the kernels that run a call of this size can evaluate functions (see _FEW_QUERIES)."""
        return self.sizes[2] >= _FEW_QUERIES and self.sizes[3] > _FEW_KEYS

    def of_score(
        self, score_mod: Callable[..., Any] | None, bias: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array | None, ScoreMod | None]:
        """Returns the bias plus an additive score_mod, and a score_mod for XLA, or None.

        An additive term becomes a bias, so that JAX differentiates its computation. A term that depends
        on query and key together would be as large as the logits, so kernels evaluate it. `dtype` is
        the queries'.
        """
        if score_mod is None:
            return bias, None
        dtype = jnp.float64 if dtype == jnp.float64 else jnp.float32
        function = IndexFunction.of("score_mod", score_mod, dtype)
        score = ScoreMod(function, self.places, dtype)
        own = None
        why_no_kernel = self._why_no_kernel(function)
        if why_no_kernel is None:
            own = kernel_function(function.shifted(self.query_offset), "score_mod")
        if function.is_additive:
            _, _, by_query, by_key = function.used
            by_kernel = own is not None and own.function is not None and not own.reads_matrices
            # Symbolic sizes have no kernel, and are not compared.
            if by_kernel and by_query and by_key and self.has_long_rows:
                self.score = own
                return bias, None
            return (score.bias() if bias is None else bias + score.bias()), None
        if own is None:
            self.why_no_score = f"score_mod does more than add, and {why_no_kernel}"
        elif own.function is None:
            self.why_no_score = own.reason
        elif bias is not None:
            self.why_no_score = (
                "score_mod does more than add, and there is a bias; add it in score_mod"
            )
        else:
            self.score = own
        return bias, score

    def _why_no_kernel(self, function: IndexFunction) -> str | None:
        if self.why_no_kernel is None and function.varies:
            return "its arrays differ between the devices of a shard_map, which XLA alone evaluates"
        return self.why_no_kernel

    def takes_mask(self, function: IndexFunction) -> bool:
        """Returns whether kernels evaluate a mask_mod, not read it as an array; sets `mask` if so."""
        _, _, by_query, by_key = function.used
        if self._why_no_kernel(function) is not None:
            return False
        if not (by_query and by_key and self.has_long_rows):
            return False
        own = kernel_function(function.shifted(self.query_offset), "mask_mod")
        if own.function is None or own.reads_matrices:
            return False
        self.mask = own
        return True

    def reads(self) -> tuple[jax.Array, ...]:
        """Returns the arrays that the kernels read for score_mod, then those for mask_mod."""
        own = [function for function in (self.score, self.mask) if function is not None]
        if not own:
            return ()
        at = places(None, *self.sizes)
        return tuple(array for function in own for array in function.values(at))
