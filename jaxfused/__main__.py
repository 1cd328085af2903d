"""`python -m jaxfused`: what of jaxfused runs on this machine, and why the rest does not."""

import importlib.metadata
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfused
from jaxfused import cuda, dispatch

# Of the operators whose kernels have limits of shape, the shape that is asked about: ViT-B/16 at 224
# pixels, 16384 rows. The others are asked about the device alone.
_BF16 = jnp.dtype("bfloat16")
TYPICAL: dict[str, tuple[str, dict[str, Any]]] = {
    "jaxfused.ops.layer_norm": (
        "bfloat16 [16384, 768]",
        dict(rows=16384, features=768, dtype=_BF16),
    ),
    "jaxfused.ops.attention": (
        "bfloat16 [256, 197, 12, 64]",
        dict(dtype=_BF16, query_length=197, key_length=197, head_size=64, value_head_size=64),
    ),
    "jaxfused.ops.linear": (
        "bfloat16 [16384, 768] x [768, 3072]",
        dict(
            rows=16384,
            features=768,
            out_features=3072,
            has_bias=True,
            activation="gelu_tanh",
            dtype=_BF16,
            out_dtype=_BF16,
        ),
    ),
    "jaxfused.ops.mlp": (
        "bfloat16 [16384, 768], 3072 hidden",
        dict(
            x=jax.ShapeDtypeStruct((16384, 768), _BF16),
            hidden=3072,
            out_features=768,
            out_dtype=_BF16,
        ),
    ),
    "jaxfused.ops.qkv_projection": (
        "bfloat16 [50432, 768], 12 heads of 64",
        dict(
            rows=50432,
            dtype=_BF16,
            features=768,
            heads=12,
            key_heads=12,
            head_size=64,
            norm=True,
            rotary_dim=64,
            interleaved=False,
        ),
    ),
    "jaxfused.ops.rope": (
        "bfloat16 [256, 197, 12, 64]",
        dict(
            length=197,
            heads=12,
            key_heads=12,
            head_size=64,
            rotary_dim=64,
            interleaved=False,
            dtype=_BF16,
            k_dtype=_BF16,
        ),
    ),
}


class Operator(NamedTuple):
    """One line of the report."""

    name: str
    shape: str
    reasons: dict[str, str | None]
    """For each implementation, None or why it cannot run."""


def operators(device: dispatch.Device) -> Iterator[Operator]:
    """Every public function that takes `implementation`, and what runs it on `device`."""
    for name, function in sorted(vars(jaxfused).items()):
        if inspect.isfunction(function) and "implementation" in _parameters(function):
            module = sys.modules[function.__module__]
            shape, arguments = TYPICAL.get(module.__name__, ("", {}))
            yield Operator(name, shape, module.implementations(device, **arguments))


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def describe(device: dispatch.Device) -> str:
    """The device in one line."""
    if device.compute_capability is None:
        return f"{device.name} ({device.platform})"
    major, minor = device.compute_capability
    return f"{device.name}, sm_{major}{minor}, {device.multiprocessors} multiprocessors"


def versions() -> str:
    """The packages that decide what runs, with their versions."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "numpy")
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    found = [f"{name} {installed[name]}" for name in names if name in installed]
    return ", ".join([f"jaxfused {jaxfused.__version__}", *found])


def report(device: dispatch.Device) -> str:
    """All that the command prints."""
    lines = [
        f"versions      {versions()}",
        f"device        {describe(device)}",
        f"CUDA library  {cuda.library.why_unavailable() or cuda.library.PATH}",
        "",
    ]
    table = list(operators(device))
    width = max(len(operator.name) for operator in table)
    for name, shape, reasons in table:
        runs = dispatch.choose(name, None, reasons)
        lines.append(f"{name:{width}}  runs on {runs!r}{f' at {shape}' * bool(shape)}")
        for other, reason in reasons.items():
            if other != runs:
                text = f"not {other!r}: {reason or f'{runs!r} comes first'}"
                indent = " " * (width + 2)
                lines += textwrap.wrap(
                    text, 100, initial_indent=indent, subsequent_indent=indent + "    "
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(dispatch.current_device()))
