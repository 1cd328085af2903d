#!/usr/bin/env bash
# What: Inside jax.shard_map the gradient of BCOO @ b to the entries of the matrix is wrong in silence, and that to b
# raises.
#
# Version: jax==0.11.2, jaxlib==0.11.2, and so in 0.12.0.1; 4 virtual devices of a CPU, Python 3.12 or newer.
# Expected: What BCOO.todense() @ b gives there: JAX sums the gradient to an operand that all devices hold over the
#   devices, and refuses to return as equal on all of them what is not.
# Seen: The product's type does not say that it varies along the axis that splits the columns of b. So
#   out_specs=P() takes its sum, and returns that of the first device. The gradient to the entries, taken inside
#   of the shard_map, is that of the first device's columns; taken outside, it multiplies the sum of all devices'
#   cotangents with the first device's columns, so that signs are wrong too. That to b is "Expected cotangent
#   type float32[6,2]{V:d} but got float32[6,2]". check_vma is on, as it is by default.
# In jaxfused: jaxfused/ops/sparse/sparse_matmul.py takes gradient rules of its own where operands vary along an axis.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import numpy as np
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

random = np.random.default_rng(0)
matrix = BCOO.fromdense(random.standard_normal((4, 6)).astype(np.float32) * (random.random((4, 6)) < 0.4))
entries, b = matrix.data, random.standard_normal((6, 8)).astype(np.float32)
columns, first = P(None, "d"), b[:, :2]


def sparse(entries, b):
    return BCOO((entries, matrix.indices), shape=matrix.shape) @ b


def dense(entries, b):
    return BCOO((entries, matrix.indices), shape=matrix.shape).todense() @ b


def gradient(product, argument):
    return jax.grad(lambda entries, b: (product(entries, b) ** 2).sum(), argument)


def split(function, out_specs):
    return jax.shard_map(function, in_specs=(P(), columns), out_specs=out_specs)


def by_place(product, argument):
    inside = split(gradient(product, argument), columns if argument else P())
    outside = gradient(split(product, columns), argument)
    return {"inside": jax.jit(inside), "outside": jax.jit(outside)}


with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))):
    for argument in (0, 1):
        for function in by_place(dense, argument).values():
            np.testing.assert_allclose(function(entries, b), gradient(dense, argument)(entries, b), rtol=1e-4)

    right, own = (gradient(sparse, 0)(entries, b) for b in (b, first))
    _, pullback = jax.vjp(lambda entries: sparse(entries, first), entries)
    (mixed,) = pullback(2 * sparse(entries, b).reshape(4, 4, 2).sum(1))
    for place, function in by_place(sparse, 0).items():
        found = function(entries, b)
        print("to the entries, taken", place, found, "where right is", right)
        np.testing.assert_allclose(found, own if place == "inside" else mixed, rtol=1e-4, atol=1e-5)
        assert np.linalg.norm(found - right) > 0.3 * np.linalg.norm(right)

    for place, function in by_place(sparse, 1).items():
        try:
            function(entries, b)
            raise SystemExit("traced")
        except ValueError as error:
            print("to b, taken", place, error)
            assert "Expected cotangent type" in str(error)

    total = split(lambda entries, b: sparse(entries, b).sum(), P())(entries, b)
    print("sum", total, "where right is", sparse(entries, b).sum())
    np.testing.assert_allclose(total, sparse(entries, first).sum(), rtol=1e-5)
    try:
        split(lambda entries, b: dense(entries, b).sum(), P())(entries, b)
        raise SystemExit("taken")
    except ValueError as error:
        assert "require replication" in str(error) or "out_specs" in str(error)
PYTHON
