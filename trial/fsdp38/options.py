"""options.py OUT: windowed attention by all-to-all on two GPUs: heads in groups, and four collectives in flight."""

import dataclasses
import functools
import json
import math
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.whole import parallel_bars as bars
from benchmarks.whole import parallel_programs as programs
from jaxfused.ops.attention import context_parallel as cp

TINY = jax.default_backend() == "cpu"
SIZES = programs.TINY if TINY else programs.FULL
OVERLAP = {} if TINY else {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


def grouped(groups_wanted):
    """`_all_to_all` that moves a device's heads in groups: those of one beside the attention of another."""

    def all_to_all(options, operands):
        query, key, value, segments, sinks, _ = operands
        name, size = options.axis_name, lax.axis_size(options.axis_name)
        groups = math.gcd(groups_wanted, key.shape[2] // size)

        def apart(array):
            b, t, n, h = array.shape
            return [*jnp.moveaxis(array.reshape(b, t, size, groups, n // (size * groups), h), (3, 2), (0, 1))]

        def by_heads(moved):
            whole = lax.all_to_all(moved, name, 0, 0, tiled=True)
            _, b, t, n, h = whole.shape
            return cp._in_order(options, jnp.moveaxis(whole, 0, 1).reshape(b, size * t, n, h))

        if segments is not None:
            segments = cp._in_order(options, lax.all_gather(segments, name, axis=1, tiled=True))
        own_sinks = [None] * groups
        if sinks is not None:
            own = query.shape[2] // size
            own_sinks = jnp.split(lax.dynamic_slice_in_dim(sinks, lax.axis_index(name) * own, own), groups)
        outputs = []
        for *moved, of_group in zip(*map(apart, (query, key, value)), own_sinks, strict=True):
            output = options.attend(*map(by_heads, moved), None, segments, segments, sinks=of_group)
            b, t, n, h = output.shape
            split = cp._by_devices(options, output).reshape(b, size, t // size, n, h)
            outputs.append(lax.all_to_all(jnp.moveaxis(split, 1, 0), name, 0, 0, tiled=True))
        joined = jnp.moveaxis(jnp.stack(outputs), (0, 1), (3, 2))
        b, t, *heads, h = joined.shape
        return joined.reshape(b, t, math.prod(heads), h)

    return all_to_all


def patched(build, target, name, value):
    """`build` whose step is traced with `target.name` set to `value`."""

    def make(mesh):
        program = build(mesh)
        inner = program.step

        def with_patch(f, *operands):
            jax.clear_caches()
            with mock.patch.object(target, name, value):
                return f(*operands)

        step = SimpleNamespace(
            lower=functools.partial(with_patch, inner.lower), trace=functools.partial(with_patch, inner.trace)
        )
        return dataclasses.replace(program, step=step)

    return make


def main(out):
    case = bars.cases(SIZES)["context window"]
    a2a = case.variants["all_to_all"].build
    two, four = (patched(a2a, cp, "_all_to_all", grouped(n)) for n in (2, 4))
    case.variants.clear()
    case.variants.update(
        {
            "all_to_all": bars.Variant(a2a, 1.7, "1.64x"),
            "2 groups, overlap": bars.Variant(two, 1.7, "1.70x", options=OVERLAP),
            "2 groups": bars.Variant(two, 1.7, "1.66x"),
            "4 groups, overlap": bars.Variant(four, 1.7, "1.72x", options=OVERLAP),
            "overlap": bars.Variant(a2a, 1.7, "1.66x", options=OVERLAP),
        }
    )
    found = []

    def save(row):
        found.append(row)
        json.dump(found, open(f"{out}/options.json", "w"))
        print(bars.line(row), row.get("rounds", ""), flush=True)

    return bars.run("context window", case, jax.devices()[:2], save)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
