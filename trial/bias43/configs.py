"""configs.py: kernel times of the forward with a bias [1 or 4, 16, 1024, 1024], by config; the first is the choice."""
import dataclasses, statistics, time

import jax, jax.numpy as jnp

from pallas_kernels.attention import attention
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.shape import Shape

ON_GPU, START = jax.default_backend() == "gpu", time.time()
B, T, N, H = 4, 1024, 16, 64
logits = Logits(H**-0.5, BlockMask(T, T), has_bias=True)


def arrays(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(B, T, N, H)] * 3 + [(1, N, T, T)]
    return tuple(jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes))


found = attention.forward_candidates(Shape(B, T, T, N, N, H, H), jnp.bfloat16, logits=logits, multiprocessors=132)
sets = [arrays(i) for i in range(3)] if ON_GPU else []
narrow = dataclasses.replace(found[0], key_block=64, stages=4)
for config in (found[0], narrow, *found[1:4], dataclasses.replace(narrow, takes_turns=False)):
    call = jax.jit(lambda q, k, v, bias: attention.forward(
        q, k, v, Operands(bias=bias), logits=logits, multiprocessors=132, config=config)[0])
    value = 0.0
    try:
        if ON_GPU:
            from benchmarks.run import timing

            value = statistics.median(timing.cupti(call, sets, 20).microseconds)
        print(f"{time.time() - START:5.1f}s {value:7.1f} us {config}", flush=True)
    except Exception as error:
        print("FAILED", config, str(error).splitlines()[0][:200], flush=True)
