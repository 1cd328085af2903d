"""Rules over the paths of a model's layers, which say which of them are quantised, and how."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxfused.runtime.quantized_array import Layout

Rounding = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class QuantizationRule:
    """Which layers are quantised, and how.

    Attributes:
      pattern: a regular expression, searched for in the path of a layer, such as "blocks/3/mlp/up".
        The empty one is found in every path.
      dtype: "int8", "int4", "float8_e4m3fn", "float8_e5m2", "nf4", "mxfp4" or "nvfp4"; None leaves the
        layer in floats.
      group_size: input features that share a scale; by default all of them. A pair, such as (128, 128),
        is of the sides of a block of the kernel: input and output features.
      symmetric: whether 0 stands for 0, as in `jaxfused.quantize`.
      input_dtype: to which the layer's inputs are quantised, row by row: "int8", "float8_e4m3fn" or
        "float8_e5m2"; None leaves them as they are.
      layout: "rows" or "columns", as `jaxfused.quantize` has them. None is "rows" for convolutions over
        several positions, and what `jaxfused.quantize` chooses for products.
      rounding: "nearest", or "gptq", where input features that are rounded later compensate for the
        errors of earlier ones. By default "gptq" of int8 and int4 where there is a
        calibration, else "nearest".
      smoothing: how much of the inputs' range is moved into the kernel before both are rounded, from 0
        (none) to 1 (all): input feature j is divided by `max|x_j|**s / max|w_j|**(1 - s)`. None leaves
        both as they are. Needs a calibration.
      input_percentile: gives the quantised inputs one scale, below which so many percent of their
        magnitudes lie; larger ones are clipped. None gives each row its own scale as it comes. Needs a
        calibration, and an input_dtype.

    Example:
      >>> import jaxfused
      >>> jaxfused.QuantizationRule("mlp/(up|down)$", "int4", group_size=64).dtype
      'int4'
    """

    pattern: str
    dtype: str | None
    group_size: int | tuple[int, int] | None = None
    symmetric: bool = True
    input_dtype: str | None = None
    layout: Layout | None = None
    rounding: Rounding | None = None
    smoothing: float | None = None
    input_percentile: float | None = None

    def __post_init__(self) -> None:
        if self.rounding not in (None, "nearest", "gptq"):
            raise ValueError(
                f"QuantizationRule: rounding={self.rounding!r} is not known; pass 'nearest', 'gptq' or"
                " None."
            )
        # The comparison is written with `not`, so that it rejects NaN too.
        if self.smoothing is not None and not 0.0 <= self.smoothing <= 1.0:
            raise ValueError(
                f"QuantizationRule: smoothing is {self.smoothing!r}, but it is a share; pass a number"
                " from 0 to 1."
            )
        if self.input_percentile is None:
            return
        if not 0.0 < self.input_percentile <= 100.0:
            raise ValueError(
                f"QuantizationRule: input_percentile is {self.input_percentile!r}; pass a number above 0"
                " and up to 100, such as 99.9."
            )
        if self.input_dtype is None:
            raise ValueError(
                f"QuantizationRule: input_percentile is {self.input_percentile!r}, but the inputs are"
                " not quantised; pass an input_dtype, or no input_percentile."
            )

    @property
    def needs_calibration(self) -> str | None:
        """Names the first option that needs a calibration, or returns None."""
        wanted = {
            "rounding='gptq'": self.rounding == "gptq",
            "smoothing": self.smoothing is not None,
            "input_percentile": self.input_percentile is not None,
        }
        return next((name for name, given in wanted.items() if given), None)


def as_rules(rules: str | Sequence[QuantizationRule]) -> Sequence[QuantizationRule]:
    """Returns the rules; a dtype means a single rule for all layers."""
    return [QuantizationRule("", rules)] if isinstance(rules, str) else rules


class Chooser:
    """Returns the first rule whose pattern is in a path, and records which rules were used."""

    def __init__(self, rules: Sequence[QuantizationRule]):
        self.rules = rules
        self.used: set[QuantizationRule] = set()
        self.paths: list[str] = []
        self.left_out: dict[str, str] = {}
        """Reasons why layers for which there is a rule stay in floats, by the layers' names."""

    def _find(self, name: str) -> QuantizationRule | None:
        return next((rule for rule in self.rules if re.search(rule.pattern, name)), None)

    def leave_out(self, path: Sequence[Any], reason: str) -> None:
        """Records the reason why the layer at `path` stays in floats, even if a rule fits."""
        name = "/".join(str(key) for key in path)
        rule = self._find(name)
        if rule is not None and rule.dtype is None:
            self.used.add(rule)
        elif rule is not None:
            self.left_out[name] = reason

    def __call__(self, path: Sequence[Any]) -> QuantizationRule | None:
        """Returns the rule for the layer at `path`, or None if the layer stays as it is."""
        name = "/".join(str(key) for key in path)
        self.paths.append(name)
        rule = self._find(name)
        if rule is None:
            return None
        self.used.add(rule)
        return None if rule.dtype is None else rule

    def check_all_used(self) -> None:
        """Checks that each rule applies to a layer, and warns of layers that stay in floats."""
        left_out = "; ".join(f"{name!r}, because {why}" for name, why in self.left_out.items())
        for rule in self.rules:
            if rule not in self.used:
                paths = ", ".join(repr(path) for path in self.paths) or "none"
                raise ValueError(
                    f"quantize_params: the rule for {rule.pattern!r} decides over no layer; pass one"
                    f" whose pattern is found, before other rules', in one of these: {paths}."
                    + (f" No rule can decide over {left_out}." if left_out else "")
                )
        if left_out:
            warnings.warn(
                f"quantize_params: these layers stay in floats: {left_out}. A rule of dtype None for"
                " them says so too, and silences this.",
                stacklevel=3,
            )
