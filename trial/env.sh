# source in a checkout
export PATH=/work/venv/bin:$PATH
export PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=true
export XLA_FLAGS='--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters'
export JAX_COMPILATION_CACHE_DIR=/work/xla-cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
pt() { nice -n 5 python -m pytest -q -p no:cacheprovider "$@"; }
lint() { python -m ruff format --check . && python -m ruff check . && python -m mypy; }
