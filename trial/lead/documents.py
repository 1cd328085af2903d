"""documents.py {ours,peers}: 8 x 8192 tokens, 8 to 32 documents a row, causal, bf16."""
import sys, os
from common import *
import jaxfused
B, L = (8, 8192) if ON_GPU else (2, 512)
def ids_of(least=8, most=32):
    r = np.random.default_rng(0)
    rows = []
    for _ in range(B):
        cuts = np.sort(r.choice(np.arange(1, L), r.integers(least, most + 1) - 1, replace=False))
        rows.append((np.arange(L)[:, None] >= cuts).sum(1))
    return np.asarray(rows, np.int32)
IDS = jnp.asarray(ids_of())
def with_gradients(f):
    def run(q, k, v, do):
        out, vjp = jax.vjp(f, q, k, v)
        out, do = jax.lax.optimization_barrier((out, do))
        return out, *vjp(do)
    return run
def ours(q, k, v):
    return jaxfused.dot_product_attention(q, k, v, is_causal=True, query_segment_ids=IDS, key_value_segment_ids=IDS, implementation="pallas" if ON_GPU else None)
def jla(how):
    def f(q, k, v):
        from jla.ops.mosaic_gpu.attention import flash_attention
        return flash_attention(q, k, v, segment_ids=IDS, backward=how)
    return f
def cudnn(q, k, v):
    mask = (IDS[:, None, :, None] == IDS[:, None, None, :]) & jnp.tril(jnp.ones((L, L), bool))
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")
def causal(q, k, v):
    return jaxfused.dot_product_attention(q, k, v, is_causal=True, implementation="pallas")
PROGRAMS = {"ours": ours, "jla ranged": jla("ranged"), "jla fused": jla("fused"), "cudnn dense mask": cudnn}
names = {"ours": ["ours", "jla ranged", "jla fused"], "peers": ["cudnn dense mask"]}[sys.argv[1]]
for n, k_, h in ((16, 4, 128), (16, 16, 128)):
    shapes = [jax.ShapeDtypeStruct((B, L, m, h), jnp.bfloat16) for m in (n, k_, k_, n)]
    if not ON_GPU:
        from jaxfused import dispatch
        from benchmarks import without_gpu
        with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)):
            jax.jit(with_gradients(lambda q, k, v: jaxfused.dot_product_attention(q, k, v, is_causal=True, query_segment_ids=IDS, key_value_segment_ids=IDS))).trace(*shapes).lower(lowering_platforms=("cuda",))
        say("lowered ours"); break
    calls = {}
    for name in names:
        for what, f in (("fwd", lambda q, k, v, do, f=PROGRAMS[name]: f(q, k, v)), ("fwd+bwd", with_gradients(PROGRAMS[name]))):
            def make():
                calls[name, what] = jax.jit(f).trace(*shapes).lower().compile()
            guarded(make)
    say("documents: compiled", n, k_)
    base = None
    for (name, what), call in calls.items():
        with gpu():
            def measure():
                global base
                args = normal(1, *(s.shape for s in shapes))
                out = call(*args)
                note = ""
                if what == "fwd+bwd":
                    if base is None:
                        base = out
                    else:
                        note = "vs ours " + " ".join("%.1e" % err(a, b)[1] for a, b in zip(out, base))
                t, ks = us(call, [args], 8)
                say(f"DOC [{B}, {L}, {n}/{k_}, {h}] {what} {name}: {t:.0f} us; {note}; {short(ks, 10)}")
            guarded(measure)
