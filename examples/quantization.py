"""Shared parts of the commands that quantise a trained network: formats, flags, sizes and speeds."""

import argparse
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx

import jaxfused
from examples.errors import ExampleError
from examples.flags import number, whole
from examples.runs import Run

# Products of int8 and fp8 are computed in these dtypes, so inputs are quantised too. int4 weights are
# dequantised.
RULES = {
    "float": [],
    "int8": [jaxfused.QuantizationRule("", "int8", input_dtype="int8")],
    "fp8": [jaxfused.QuantizationRule("", "float8_e4m3fn", input_dtype="float8_e4m3fn")],
    "int4": [jaxfused.QuantizationRule("", "int4")],
}

# Inputs of these layers come straight from a norm, so smoothing can be folded into that norm.
FOLDS = (jaxfused.Fold("norm1", ("qkv",)), jaxfused.Fold("norm2", ("mlp/up",)))

_SECONDS = 1.0
"""Seconds that each of the three timings of a network takes."""


@dataclass(frozen=True)
class Quantized:
    """A network in one of the formats."""

    name: str
    model: nnx.Module
    report: jaxfused.QuantizationReport | None
    """Errors of the layers; None if the network was not calibrated."""

    @property
    def bytes(self) -> int:
        """Returns the bytes of all its arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.model)))


def flags_of(run: Run, args: argparse.Namespace) -> argparse.Namespace:
    """Returns the flags of a run; --data of `args`, if given, replaces the run's folder of images."""
    flags = argparse.Namespace(**run.flags)
    folder = args.data or flags.data
    flags.data = None if folder is None else Path(folder)
    return flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what to quantise and how."""
    parser.add_argument(
        "checkpoint", type=Path, help="the --out of a run, or one of its checkpoints/N"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the run's images are now")
    parser.add_argument(
        "--calibrate",
        type=whole(1),
        metavar="BATCHES",
        help="choose roundings by what the layers read on so many training batches; print errors",
    )
    parser.add_argument(
        "--group-size",
        type=whole(1),
        metavar="FEATURES",
        help="that share a scale in int4, in the layers whose features it divides; by default all",
    )
    parser.add_argument(
        "--smoothing",
        type=number(least=0, below=1),
        metavar="SHARE",
        help="of the inputs' range that moves into int8 kernels; needs --calibrate",
    )
    parser.add_argument(
        "--input-percentile",
        type=number(above=0, below=100.1),
        metavar="PERCENT",
        help="of the inputs' magnitudes that a fixed scale of int8 holds; needs --calibrate",
    )


def check_flags(args: argparse.Namespace) -> None:
    """Checks flags that require another flag."""
    for flag in ("smoothing", "input_percentile"):
        if getattr(args, flag) is not None and args.calibrate is None:
            raise ExampleError(
                f"--{flag.replace('_', '-')} needs inputs of the layers to choose by; pass --calibrate"
                " too."
            )
    if args.input_percentile is not None and args.input_percentile > 100:
        raise ExampleError(
            f"--input-percentile must be at most 100, but is {args.input_percentile:g}; pass 100 to hold"
            " all."
        )


def in_all_formats(
    model: nnx.Module,
    args: argparse.Namespace,
    calibration: Callable[[int], jaxfused.Calibration],
) -> Iterator[Quantized]:
    """Yields the network in each format; `calibration(n)` returns the calibration on n batches."""
    # The rules of all formats are made first, so that an invalid flag is reported before the first
    # format's measurements, which take minutes.
    formats = {name: with_flags(model, given, args) for name, given in RULES.items()}
    for name, rules in formats.items():
        if not rules:
            yield Quantized(name, model, None)
        elif args.calibrate is None:
            yield Quantized(name, jaxfused.quantize_params(model, rules), None)
        else:
            calibrated = jaxfused.calibrate(model, rules, calibration(args.calibrate))
            yield Quantized(name, calibrated.quantized, calibrated.report)


def with_flags(
    model: nnx.Module, rules: Sequence[jaxfused.QuantizationRule], args: argparse.Namespace
) -> list[jaxfused.QuantizationRule]:
    """Returns the rules, with groups for int4 and the flags' options for int8 inputs.

    Grouped and depthwise convolutions stay in floats: they have few weights, and their int8 products are
    no faster than their float products. int4 is stored in pairs, so layers whose outputs sum over an odd
    number of weights stay in floats too.
    """
    layers = _layers(model)
    result = []
    for rule in rules:
        kept = [
            layer.name
            for layer in layers
            if layer.is_in_groups or (rule.dtype == "int4" and layer.weights % 2)
        ]
        if kept:
            result.append(jaxfused.QuantizationRule(_any_of(kept), None))
        if rule.dtype == "int8":
            rule = replace(rule, smoothing=args.smoothing, input_percentile=args.input_percentile)
        if rule.dtype == "int4" and args.group_size is not None:
            result += in_groups(model, rule, args.group_size)
        else:
            result.append(rule)
    return result


def in_groups(
    model: nnx.Module, rule: jaxfused.QuantizationRule, group_size: int
) -> list[jaxfused.QuantizationRule]:
    """Returns rules for all layers, with groups in those whose weights `group_size` divides."""
    layers = [layer for layer in _layers(model) if not layer.is_in_groups]
    names = [layer.name for layer in layers if layer.weights % group_size == 0]
    if not names:
        raise ExampleError(
            f"--group-size is {group_size}, but it divides the features of no layer; pass a divisor of"
            " the network's width, or leave it out."
        )
    grouped = replace(rule, pattern=_any_of(names), group_size=group_size)
    others = [layer for layer in layers if layer.weights % group_size and layer.weights % 2 == 0]
    return [grouped, rule] if others else [grouped]


class _Layer(NamedTuple):
    """A layer that can be quantised."""

    name: str
    """Path of the layer in the model, such as "blocks/0/qkv", which the rules' patterns match."""
    weights: int
    """Number of weights that an output feature sums over."""
    is_in_groups: bool


def _layers(model: nnx.Module) -> list[_Layer]:
    found = []
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Linear | nnx.Conv):
            groups = getattr(layer, "feature_group_count", 1)
            window = math.prod(getattr(layer, "kernel_size", ()))
            weights = window * layer.in_features // groups
            found.append(_Layer("/".join(map(str, path)), weights, groups > 1))
    return found


def _any_of(names: Sequence[str]) -> str:
    return f"^({'|'.join(map(re.escape, names))})$"


def calls_per_second(call: Callable[[], jax.Array]) -> float:
    """Returns the calls per second in the fastest of three loops, each with one wait at its end."""
    jax.block_until_ready(call())

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return time.perf_counter() - begin

    count = max(1, round(_SECONDS / seconds(1)))
    return count / min(seconds(count) for _ in range(3))
