"""extra.py CASE OUT: variants of a case that are no part of the library, in the machinery of `benchmarks parallel`."""

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
from jaxfused.parallel import parts

TINY = jax.default_backend() == "cpu"
SIZES = programs.TINY if TINY else programs.FULL


def grouped(groups_wanted):
    """`_all_to_all` that moves a device's heads in groups: those of one beside the attention of another."""

    def all_to_all(options, operands):
        query, key, value, segments, sinks = operands
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


OVERLAP = {} if TINY else {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
USER = {} if TINY else {"xla_gpu_enable_nccl_user_buffers": True}


def cases():
    known = bars.cases(SIZES)
    V = bars.Variant
    for name in ("context", "context window"):
        a2a = known[name].variants["all_to_all"].build
        known[name].variants.clear()
        known[name].variants.update({
            "all_to_all overlap 4": V(a2a, 0, "the same or 1 % better", options=OVERLAP),
            "all_to_all 2 groups": V(patched(a2a, cp, "_all_to_all", grouped(2)), 0, "1 % better"),
            "2 groups, overlap 4": V(patched(a2a, cp, "_all_to_all", grouped(2)), 0, "3 % better", options=OVERLAP),
        })
    mlp = known["tensor"].variants
    rows, xla = mlp["whole rows"].build, mlp["xla"].build
    mlp.clear()
    mlp.update({
        "whole rows, 2 parts": V(patched(rows, parts, "_PARTS", 2), 1.88, "1.80x"),
        "xla, user buffers": V(xla, 0, "1.88x", options=USER),
    })
    vit = known["data"].variants
    xla, last = vit["xla"].build, vit["shard_map bfloat16 last"].build
    one_sum = {} if TINY else {"xla_gpu_all_reduce_combine_threshold_bytes": 2**30}
    vit.clear()
    vit.update({
        "xla, one sum": V(xla, 0, "95.5 %", options=one_sum),
        "xla, user buffers": V(xla, 0, "94.5 %", options=USER),
        "xla, no LHS": V(xla, 0, "95 %", options={} if TINY else {"xla_gpu_enable_latency_hiding_scheduler": False}),
    })
    return known


def main(name, out):
    found = []

    def save(row):
        found.append(row)
        json.dump(found, open(f"{out}/extra_{name.replace(' ', '_')}.json", "w"))
        print(bars.line(row), flush=True)

    return bars.run(name, cases()[name], jax.devices(), save)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
