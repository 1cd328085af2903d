"""scale.py OUT SECONDS: `benchmarks parallel --scaling` on 1, 2, 4 GPUs, all compiled at the same time, timed one after the other."""

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import trial

trial.SCRIPT = os.path.abspath(__file__)
COUNTS = (1, 2, 4)
WORK = ("lm-1b fsdp", "attention window all_to_all", "gated_mlp xla", "vit-b16 xla", "attention window ring")
if trial.TINY:
    WORK = ("lm-byte fsdp", "attention window all_to_all", "gated_mlp xla", "vit-digits xla")
trial.VARIANTS = {
    f"{work} {n}": ("", {}, "") for work in WORK for n in COUNTS if not (work.endswith("ring") and n == 1)
}


def share_of(name, times):
    work, _, n = name.rpartition(" ")
    alone = times.get(f"{work.replace(' ring', ' all_to_all')} 1")
    if alone is None:
        return ""
    share = alone / times[name]
    return f"{share:.1%}" if "fsdp" in name or "vit" in name else f"{share:.3f}x {share / int(n):.1%}"


trial.share_of = share_of


def child(name):
    begin = time.time()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.run import timing
    from benchmarks.whole import parallel_programs as programs
    from benchmarks.whole import parallel_scaling as scaling
    from benchmarks.whole.parallel_timing import lowered
    from examples.multi_gpu import mesh as meshes

    name, _, count = name.rpartition(" ")
    sizes = programs.TINY if trial.TINY else programs.FULL
    work = next(w for w in scaling.workloads(sizes) if w.name == name and (w.kind == "weak") == ("fsdp" in name or "vit" in name))

    def shapes_only(self, f, shardings, *args):
        shapes = jax.eval_shape(f, *args)
        return jax.tree.map(
            lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to), shapes, shardings
        )

    meshes.OnMesh._made = shapes_only
    make = lowered(work.build, jax.devices()[: int(count)])
    trial.say(f"LOWERED {time.time() - begin:.0f}")
    trial.wait_for("compile")
    begin = time.time()
    ready = make()

    def value(a, seed):
        # Zeros for the moments (no seed), and noise for the parameters, in place of their draws.
        if not isinstance(a, jax.ShapeDtypeStruct):
            return lambda: a

        def f(seed_of):
            if seed is None:
                return jnp.zeros(a.shape, a.dtype)
            if len(a.shape) < 2 or a.dtype != jnp.float32:
                return jnp.ones(a.shape, a.dtype)
            i = jnp.zeros((), jnp.uint32)
            for k, size in enumerate(a.shape):
                i = i * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, a.shape, k)
            for _ in range(2):
                i = (i ^ (i >> 16) ^ seed_of) * np.uint32(0x45D9F3B)
            return ((i >> 8).astype(jnp.float32) * 2.0**-24 - 0.5) * 0.07

        key = (a.shape, a.dtype, a.sharding, seed is None)
        if key not in made:
            one = jax.ShapeDtypeStruct((), jnp.uint32)
            made[key] = jax.jit(f, out_shardings=a.sharding).lower(one).compile()
        return lambda: made[key](np.uint32(seed or 0))

    made = {}
    first, *rest = ready.operands
    leaves, treedef = jax.tree.flatten(first)
    makers = [treedef.unflatten([value(a, i) for i, a in enumerate(leaves)])]
    makers += [jax.tree.map(lambda a: value(a, None), each) for each in rest]
    del first, rest, leaves
    count_of = ready.counted()
    trial.say(f"COMPILED {time.time() - begin:.0f} s, peak {count_of['peak'] / 1e9:.2f} GB, {sum(count_of['received'].values()) / 1e6:,.0f} MB received")
    trial.wait_for("go")
    begin = time.time()
    ready.operands[:] = jax.tree.map(lambda f: f(), makers)
    del makers

    def run(times):
        for _ in range(times):
            results = ready.call()
            if trial.TINY:
                jax.block_until_ready(results)
        jax.block_until_ready(results)

    row = timing.steps(run)
    trial.say("RESULT", json.dumps(dict(name=f"{name} {count}", **row)), f"{time.time() - begin:.0f} s")
    try:
        trial.say("PROFILE", json.dumps(trial.profile(ready, int(count))))
    except Exception as error:
        trial.say("PROFILE none:", repr(error)[:200])
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2])
    else:
        trial.main(sys.argv[1], float(sys.argv[2]))
