"""python lower_cases.py OUT.json SECONDS: hash of each Mosaic module that the benchmark cases of ours lower to (default and 'pallas'), without locations."""
import sys, json, hashlib, re, time, importlib, pkgutil
import jax, jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import lowering
import pytest
seen=[]
orig=lowering.lower_unpipelined_jaxpr_to_module
def wrap(*a,**k):
    r=orig(*a,**k)
    t=r.module.operation.get_asm(enable_debug_info=False)
    seen.append(((re.findall(r'(\w+_mosaic_gpu)',t[:8000]) or ['?'])[0], hashlib.sha256(t.encode()).hexdigest()[:16], len(t)))
    return r
lowering.lower_unpipelined_jaxpr_to_module=wrap
from jaxfused import dispatch
from jaxfused.runtime import cuda_library
from tests.support.calls import have_library
from tests.support.lowering import lowered
mp=pytest.MonkeyPatch(); have_library(mp); mp.setattr(cuda_library,"architectures",lambda:("80","90"))
H200=dispatch.Device("gpu","NVIDIA H200",(9,0),132)
out={}; T=time.time()
import benchmarks.cases as C
with dispatch.assume(H200):
    for m in [m for m in pkgutil.iter_modules(C.__path__) if not sys.argv[3:] or m.name in sys.argv[3:]]:
        mod=importlib.import_module(f"benchmarks.cases.{m.name}")
        if not hasattr(mod,"cases"): continue
        try: cases=mod.cases()
        except Exception as e: print(m.name,"cases",str(e)[:100]); continue
        for c in cases:
            if time.time()-T>float(sys.argv[2]): break
            for name in ("mixed","pallas"):
                f=c.jax.get(name)
                if f is None: continue
                key=f"{m.name} {c.name} {c.shape} {name}"
                seen.clear()
                try:
                    shapes=jax.eval_shape(c.make_inputs, jax.random.key(0))
                    lowered(f,*shapes)
                    out[key]=sorted(map(list,seen))
                except Exception as x:
                    out[key]=[["error",type(x).__name__,str(x)[:150]]]
        print(m.name,len(out),round(time.time()-T),flush=True)
json.dump(out,open(sys.argv[1],"w"),indent=0)
