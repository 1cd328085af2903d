#!/usr/bin/env bash
# What: Inside jax.shard_map every collective over the axis of a jax.vmap raises an AssertionError without a word.
#
# Version: jax==0.11.2, jaxlib==0.11.2, and so in 0.12.0.1; 4 virtual devices of a CPU, Python 3.12 or newer.
# Expected: What the same jax.vmap gives outside of the shard_map, as its axis is none of the mesh.
# Seen: psum, pmean, pmax, all_gather, all_to_all and ppermute raise; axis_index works, and so does psum over the mesh's
#   own axis inside of the vmap. With check_vma=False all of them are right: the check wants the operand to vary
#   along the axis, which it only knows of axes of the mesh.
# In jaxfused: jaxfused/ops/norm/batch_norm_xla.py passes its axis_name to psum, so such a call needs check_vma=False;
#   its operators name no axis of a vmap themselves.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

lax = jax.lax
collectives = {
    "psum": lambda x: lax.psum(x, "c"),
    "pmean": lambda x: lax.pmean(x, "c"),
    "pmax": lambda x: lax.pmax(x, "c"),
    "all_gather": lambda x: lax.all_gather(x, "c"),
    "all_to_all": lambda x: lax.all_to_all(x, "c", 0, 0),
    "ppermute": lambda x: lax.ppermute(x, "c", [(0, 1), (1, 0)]),
    "axis_index": lambda x: x * lax.axis_index("c"),
}
x = np.random.default_rng(0).standard_normal((2, 8, 2)).astype(np.float32)
split = P(None, "d")
with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))):
    for options in ({}, {"check_vma": False}):
        raised = set()
        for name, collective in collectives.items():
            # Rows of x are mapped apart, so that devices only hold other rows.
            by_row = jax.vmap(jax.vmap(collective, axis_name="c"), in_axes=1, out_axes=1)
            function = jax.shard_map(by_row, in_specs=split, out_specs=split, **options)
            try:
                found = jax.jit(function)(x)
            except AssertionError as error:
                assert str(error) == ""
                raised.add(name)
                continue
            np.testing.assert_allclose(found, by_row(x), rtol=1e-6)
        print(options, "raised by", sorted(raised))
        assert raised == (set() if options else set(collectives) - {"axis_index"})

    over_devices = jax.vmap(lambda x: lax.psum(x, "d"), axis_name="c")
    found = jax.jit(jax.shard_map(over_devices, in_specs=split, out_specs=P()))(x)
    np.testing.assert_allclose(found, x.reshape(2, 4, 2, 2).sum(1), rtol=1e-5)
PYTHON
