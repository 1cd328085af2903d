"""jla's command line; the program of its initial values is compiled without XLA's fusion of several outputs, which takes minutes."""
import runpy, sys
import jax
jit = jax.jit
def quick(f=None, *args, **given):
    if getattr(f, "__name__", "") == "init_arrays":
        given["compiler_options"] = {"xla_disable_hlo_passes": "multi_output_fusion"}
    return jit(f, *args, **given) if f is not None else jit(*args, **given)
jax.jit = quick
runpy.run_module("jla.cli", run_name="__main__", alter_sys=True)
