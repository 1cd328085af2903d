"""bw.py OUT: GB/s of collectives on two GPUs under NCCL's settings; each setting a process."""
import fcntl, os, subprocess, sys, time
V = {
    "default": {},
    "min channels 16": dict(NCCL_MIN_NCHANNELS="16"),
    "min channels 32": dict(NCCL_MIN_NCHANNELS="32"),
    "min ctas 32": dict(NCCL_MIN_CTAS="32"),
    "p2p nvl": dict(NCCL_P2P_LEVEL="NVL"),
    "p2p channels 32": dict(NCCL_MIN_P2P_NCHANNELS="32", NCCL_MAX_P2P_NCHANNELS="32"),
    "simple": dict(NCCL_PROTO="Simple"),
    "buffers": dict(XLA_FLAGS="--xla_gpu_enable_nccl_user_buffers=true"),
    "cumem off": dict(NCCL_CUMEM_ENABLE="0"),
    "debug": dict(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,GRAPH,TUNING"),
}
def child(name):
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("d",))
    lock = open("/tmp/bw.lock", "w"); fcntl.flock(lock, fcntl.LOCK_EX)
    def timed(f, x, out):
        g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=out, check_vma=False))
        y = jax.block_until_ready(g(x))
        best = 1e9
        for _ in range(4):
            t = time.perf_counter()
            for _ in range(8): y = g(x)
            jax.block_until_ready(y)
            best = min(best, (time.perf_counter() - t) / 8)
        return best
    row = []
    for mb in (16, 128, 512):
        e = mb * 2**20 // 4
        x = jax.device_put(jnp.ones((n, e), jnp.float32), NamedSharding(mesh, P("d")))
        a = timed(lambda x: jax.lax.psum(x, "d"), x, P())
        b = timed(lambda x: jax.lax.all_to_all(x.reshape(n, -1), "d", 0, 0), x, P("d"))
        c = timed(lambda x: jax.lax.all_gather(x[:, : e // n], "d", axis=1, tiled=True), x, P())
        # Bytes that leave a device.
        row.append(f"{mb:4} MB: sum {2 * (n - 1) / n * mb / a / 953.7:4.0f}, all-to-all {(n - 1) / n * mb / b / 953.7:4.0f}, gather {(n - 1) / n * mb / c / 953.7:4.0f}")
    print(f"{name:16}", "; ".join(row), flush=True)
    os._exit(0)
if "--child" in sys.argv: child(sys.argv[sys.argv.index("--child") + 1])
out = sys.argv[1]; c = []
for name, env in V.items():
    log = open(f"{out}/{name.replace(' ', '_')}.log", "w")
    c.append(subprocess.Popen([sys.executable, __file__, "--child", name], env=os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE="false") | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
t = time.time()
while time.time() - t < 55 and any(x.poll() is None for x in c): time.sleep(0.2)
for (name, _), x in zip(V.items(), c):
    if x.poll() is None: os.killpg(x.pid, 9)
    text = open(f"{out}/{name.replace(' ', '_')}.log").read()
    print(name if x.poll() else "", x.poll(), [l for l in text.splitlines() if " MB: " in l] or text[-400:], flush=True)
text = open(f"{out}/debug.log").read()
import re
for l in text.splitlines():
    if re.search(r"Channel|via|coll channels|comm .* nranks|NVLS|P2P", l): print(l[-150:])
