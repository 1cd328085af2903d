"""The CUDA library: it builds, contains all targets of the table, and reports why it is unusable."""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.linear import bias_activation_cuda, cublaslt, linear_cuda, mlp_cuda
from jaxfused.ops.norm import layer_norm_cuda
from jaxfused.ops.norm.layer_norm_cuda import MAX_FEATURES, MAX_ROWS, why_unsupported
from jaxfused.ops.rope import rope_cuda
from jaxfused.runtime import cuda_library
from jaxfused.runtime.activation import activate
from tests.support.lowering import kernels, kernels_in, lowered
from tests.support.tolerances import assert_accurate

ROOT = Path(__file__).parents[2]
GOOD = dict(compute_capability=(8, 0), rows=4, features=768, dtype=jnp.bfloat16)
NO_MEAN = dict(
    subtract_mean=False, epsilon=1e-6, scale_offset=1.0, pre_activation=None, activation="silu"
)


@pytest.fixture(scope="session")
def library_path(tmp_path_factory) -> Path:
    """Returns the library that `make test-all` has built, else builds one for one architecture."""
    if cuda_library.PATH.exists():
        return cuda_library.PATH
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc on PATH to build the CUDA library")
    build = tmp_path_factory.mktemp("ffi")
    # In a virtual environment, cmake and ninja are in the interpreter's folder.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = ["-DJAXFUSED_CUDA_ARCHITECTURES=90-real", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["-S", ROOT / "ffi", "-B", build, "-G", "Ninja", *options],
        ["--build", build],
    ):
        done = subprocess.run(
            ["cmake", *command], env=os.environ | {"PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "libjaxfused.so"


@pytest.fixture
def loadable(library_path, monkeypatch):
    """Makes all calls of the kernels use the library of `library_path`."""
    monkeypatch.setattr(cuda_library, "PATH", library_path)
    forget()
    yield library_path
    forget()


def forget() -> None:
    cuda_library.why_unavailable.cache_clear()
    cuda_library.register.cache_clear()


# --- the library ----------------------------------------------------------------------------------


def test_every_target_is_in_the_library(library_path):
    loaded = ctypes.CDLL(str(library_path))
    for target in cuda_library.TARGETS:
        assert hasattr(loaded, target), target


def test_it_was_built_against_the_installed_headers(library_path):
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(library_path)).jaxfused_xla_ffi_version(
        ctypes.byref(major), ctypes.byref(minor)
    )
    assert (major.value, minor.value) == cuda_library.running_ffi_version()


def test_it_is_available(loadable):
    assert cuda_library.why_unavailable() is None
    assert why_unsupported(**GOOD) is None


def test_a_library_for_other_gpus_is_refused_in_one_sentence(loadable, monkeypatch):
    class Gpu:
        compute_capability = "6.1"

    assert all(
        cuda_library.runs_on(a, divmod(int(a.split("-")[0]), 10))
        for a in cuda_library.architectures()
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu])
    reason = cuda_library.why_unavailable()
    assert "this GPU has compute capability 6.1; install jaxfused again" in reason
    assert "\n" not in reason


@pytest.mark.parametrize("running", [(0, 0), (1, 99)])
def test_a_library_for_another_xla_ffi_is_refused_in_one_sentence(loadable, monkeypatch, running):
    monkeypatch.setattr(cuda_library, "running_ffi_version", lambda: running)
    reason = cuda_library.why_unavailable()
    assert f"has version {running[0]}.{running[1]}; install jaxfused again" in reason
    assert "\n" not in reason
    with pytest.raises(RuntimeError, match="was built against version"):
        cuda_library.register()


def test_a_later_minor_version_of_the_xla_ffi_is_accepted(loadable, monkeypatch):
    major, minor = cuda_library.running_ffi_version()
    monkeypatch.setattr(cuda_library, "running_ffi_version", lambda: (major, minor + 1))
    assert cuda_library.why_unavailable() is None


def test_a_library_without_a_target_is_a_reason(loadable, monkeypatch):
    monkeypatch.setattr(cuda_library, "TARGETS", (*cuda_library.TARGETS, "jaxfused_of_tomorrow"))
    assert "lacks jaxfused_of_tomorrow; build it again" in cuda_library.why_unavailable()


def test_a_file_that_is_no_library_is_a_reason(tmp_path, monkeypatch):
    broken = tmp_path / "libjaxfused.so"
    broken.write_text("not a library")
    monkeypatch.setattr(cuda_library, "PATH", broken)
    forget()
    assert "does not load on this system" in cuda_library.why_unavailable()
    forget()


def test_an_installation_without_nvcc_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_library, "PATH", tmp_path / "libjaxfused.so")
    forget()
    with pytest.raises(ValueError, match=r"installed without its CUDA library.*with nvcc on PATH"):
        dispatch.choose(
            "layer_norm", "cuda", {"cuda": layer_norm_cuda.why_unsupported(**GOOD), "xla": None}
        )
    forget()


# --- handlers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", cuda_library.TARGETS)
def test_a_handler_refuses_a_call_of_another_form(library_path, target):
    # A call on the CPU gets as far as the check of its arguments' number.
    handler = jax.ffi.pycapsule(getattr(ctypes.CDLL(str(library_path)), target))
    name = f"{target}_on_cpu"
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
    x = jnp.ones((2, 8))
    with pytest.raises(Exception, match=r"Wrong number of (arguments|results|attributes)"):
        jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def call_forward(x, scale, y, **attributes):
    absent = jnp.zeros((0,))
    attributes = (
        dict(
            subtract_mean=np.bool_(True),
            epsilon=np.float32(1e-6),
            scale_offset=np.float32(0.0),
            pre_activation="none",
            activation="none",
            few_rows=np.bool_(False),
            threads=np.int64(128),
            run=np.int64(-1),
        )
        | attributes
    )
    none = jax.ShapeDtypeStruct((0,), jnp.float32)
    results = (jax.ShapeDtypeStruct(*y), none, none, none)
    call = jax.ffi.ffi_call("jaxfused_layer_norm_forward", results)
    return jax.block_until_ready(call(x, scale, absent, absent, absent, **attributes))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments, attributes, message",
    [
        ((jnp.float32, (2, 8), (7,), (2, 8), jnp.float32), {}, r"scale has shape \[7\], but \[8\]"),
        ((jnp.float32, (2, 8), (8,), (2, 9), jnp.float32), {}, r"y has shape \[2, 9\]"),
        ((jnp.float32, (2, 8), (8,), (2, 8), jnp.bfloat16), {}, "y has another dtype"),
        ((jnp.int32, (2, 8), (8,), (2, 8), jnp.int32), {}, "x must be a matrix of float32"),
        ((jnp.float32, (16,), (8,), (16,), jnp.float32), {}, "x must be a matrix"),
        (
            (jnp.float32, (1, 65537), (65537,), (1, 65537), jnp.float32),
            {},
            "65537 features; 1 to 65536",
        ),
        (
            (jnp.float32, (2, 8), (8,), (2, 8), jnp.float32),
            dict(activation="swish"),
            "activation is not known",
        ),
    ],
)
def test_a_handler_refuses_operands_that_do_not_fit(arguments, attributes, message):
    dtype, x_shape, scale_shape, y_shape, y_dtype = arguments
    cuda_library.register()
    with pytest.raises(Exception, match=message):
        call_forward(
            jnp.ones(x_shape, dtype), jnp.ones(scale_shape), (y_shape, y_dtype), **attributes
        )


def _described(shape):
    with_dtype = len(shape) == 2 and isinstance(shape[1], str)
    return jax.ShapeDtypeStruct(*(shape if with_dtype else (shape, "float32")))


STEP = dict(
    rule="sgd",
    decays=np.array([0]),
    streams=np.int32(0b11),
    clips=np.bool_(False),
    skips_nonfinite=np.bool_(False),
    nesterov=np.bool_(False),
    vectors=np.int32(1),
    rounded=np.int32(0),
)
ROPE = dict(interleaved=np.bool_(False), inverse=np.bool_(False))
BF16 = "bfloat16"
GROUP_NORM = dict(
    groups=np.int64(4),
    activation="none",
    slices=np.int64(2),
    chunk=np.int64(2),
    once=np.bool_(False),
)
FORWARD = dict(epsilon=np.float32(1e-6))
NO_STATISTICS = [(0,)] * 3
DEPTHWISE = {
    name: np.int64(value)
    for name, value in dict(height=3, width=3, stride=1, top=1, left=1).items()
}
TILE = {
    name: np.int64(value)
    for name, value in dict(block_rows=7, images=1, blocks_down=4, blocks_across=4).items()
}
FIVE = dict(height=np.int64(5), width=np.int64(5), top=np.int64(2), left=np.int64(2))
DEPTHWISE_TILES = FIVE | TILE
ALONE = dict(cluster=np.int64(1))
QUANTIZED = dict(activation="none", row_tiles=np.int64(1), sum_warps=np.int64(4))
PRODUCT = dict(transpose_w=np.bool_(False), transpose_x=np.bool_(False))
READING = dict(
    interpolation=np.int64(1),
    reads=np.bool_(True),
    drops=np.bool_(False),
    precise=np.bool_(True),
    widest=np.float32(1),
    fill=np.zeros(4, np.float32),
)
BLUR = dict(
    steps_before=np.int64(0), reach_y=np.int64(0), reach_x=np.int64(0), sharpens=np.bool_(False)
)
POOL = {
    name: np.int64(value)
    for name, value in dict(height=2, width=2, row_stride=2, column_stride=2, top=0, left=0).items()
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("target", "operands", "results", "attributes", "message"),
    [
        pytest.param(target, *rest, id=f"{target}-{rest[-1]}")
        for target, *rest in [
            (
                "rope",
                [(1, 5, 2, 8), (1, 4, 2, 8), (1, 5, 4), (1, 5, 4)],
                [(1, 5, 2, 8), (1, 4, 2, 8)],
                ROPE,
                r"k has shape \[1, 4, 2, 8\], but \[1, 5, 2, 8\]",
            ),
            (
                "rope",
                [(1, 5, 2, 8), (1, 5, 0, 8), (1, 5, 5), (1, 5, 5)],
                [(1, 5, 2, 8), (1, 5, 0, 8)],
                ROPE,
                r"cos has shape \[1, 5, 5\], which does not fit q",
            ),
            (
                "rope",
                [(1, 5, 2, 8), (1, 5, 0, 8), (1, 5, 4), (1, 5, 3)],
                [(1, 5, 2, 8), (1, 5, 0, 8)],
                ROPE,
                r"sin has shape \[1, 5, 3\]",
            ),
            (
                "rope",
                [(5, 2, 8), (0,), (1, 5, 4), (1, 5, 4)],
                [(5, 2, 8), (0,)],
                ROPE,
                "q must be float32, bfloat16 or float16 with axes batch",
            ),
            (
                "gradient_norm",
                [(1,), (5,), ((5,), BF16)],
                [(2,), (2048, 2)],
                {},
                "array 1 has another dtype than that of the first leaf",
            ),
            ("gradient_norm", [(2,), (5,)], [(2,), (2048, 2)], {}, r"factor has shape \[2\]"),
            (
                "optimizer_step",
                [(16,), (0,), (0,), (0,), (5,), (5,)],
                [(0,), (0,), (5,)],
                STEP | dict(rule="rmsprop"),
                "the rule is not known",
            ),
            (
                "optimizer_step",
                [(16,), (0,), (0,), (0,), (5,), (5,)],
                [(0,), (0,), (5,)],
                STEP,
                "array 1 is not updated in place",
            ),
            (
                "optimizer_step",
                [(16,), (0,), (0,), (0,), (5,), (6,)],
                [(0,), (0,), (6,)],
                STEP,
                "array 1 has another size than its leaf",
            ),
            (
                "optimizer_step",
                [(16,), (0,), (0,), (0,), (5,), ((5,), "int32")],
                [(0,), (0,), ((5,), "int32")],
                STEP,
                "array 1 must be float32, bfloat16 or float16",
            ),
            (
                "optimizer_step",
                [(16,), (0,), (0,), (0,), (5,)],
                [(0,), (0,), (5,)],
                STEP,
                "1 leaves have another number of arrays or results than 1 and 1",
            ),
            (
                "linear",
                [(4, 8), (8, 16), (0,), (0,)],
                [(4, 16), (0,), (1024,)],
                dict(PRODUCT, activation="none"),
                "x must be a matrix of bfloat16 or float16",
            ),
            (
                "linear",
                [((4, 12), BF16), ((12, 16), BF16), ((0,), BF16), ((0,), BF16)],
                [((4, 16), BF16), ((0,), BF16), (1024,)],
                dict(PRODUCT, activation="none"),
                r"multiples of 8, but it has shape \[12, 16\]",
            ),
            (
                "linear",
                [((4, 8), BF16), ((8, 16), BF16), ((0,), BF16), ((4, 16), BF16)],
                [((4, 16), BF16), ((0,), BF16), (1024,)],
                dict(PRODUCT, activation="gelu_tanh"),
                "a residual goes with activation none alone",
            ),
            (
                "linear",
                [((4, 8), BF16), ((8, 16), BF16), ((16,), "float32"), ((0,), BF16)],
                [((4, 16), BF16), ((0,), BF16), (1024,)],
                dict(PRODUCT, activation="gelu_tanh"),
                "bias has another dtype",
            ),
            (
                "quantize_rows",
                [(4, 8)],
                [(4, 8), (4,)],
                {},
                "values must be int8, float8_e4m3fn or float8_e5m2",
            ),
            (
                "quantized_matmul",
                [((4, 32), BF16), ((8, 31), "int8"), (1, 8), *7 * [(0,)]],
                [(4, 8), (0,), (0,)],
                QUANTIZED,
                r"the weights have shape \[8, 31\], which does not fit x of shape \[4, 32\]",
            ),
            (
                "quantized_matmul",
                [((4, 32), BF16), ((8, 32), "int8"), (2, 8), *7 * [(0,)]],
                [(4, 8), (0,), (0,)],
                QUANTIZED,
                "groups must be of 32, 64 or a multiple of 128 features",
            ),
            (
                "quantized_matmul",
                [((4, 32), BF16), ((8, 32), "int8"), (1, 8), *7 * [(0,)]],
                [(4, 8), (0,), (2, 1, 4, 7)],
                QUANTIZED,
                r"workspace has shape \[2, 1, 4, 7\], but \[1, 1, 4, 8\]",
            ),
            (
                "quantized_matmul_both",
                [((4, 24), "int8"), (4, 1), ((8, 24), "int8"), (1, 8), (0,), (0,)],
                [(4, 8), (0,)],
                dict(activation="none"),
                "features must be a multiple of 16",
            ),
            (
                "bias_activation",
                [(4, 8), (0,), (7,), (0,), (0,)],
                [(4, 8), (0,), (0,)],
                dict(activation="relu"),
                r"bias has shape \[7\], but \[8\]",
            ),
            (
                "bias_activation",
                [(4, 8), (4, 7), (0,), (0,), (0,)],
                [(4, 8), (0,), (0,)],
                dict(activation="relu"),
                r"up has shape \[4, 7\]",
            ),
            (
                "bias_activation",
                [(4, 8), (0,), (0,), (0,), (0,)],
                [(4, 8), (0,), (0,)],
                dict(activation="swish"),
                "activation is not known: swish",
            ),
            (
                "bias_activation_backward",
                [(4, 8), (4, 8), (0,)],
                [(4, 8), (0,), (0,), (2, 1, 8)],
                dict(activation="relu"),
                r"partials has shape \[2, 1, 8\], but \[1, 1, 8\]",
            ),
            (
                "bias_activation_backward",
                [((4, 8), BF16), (4, 8), (0,)],
                [(4, 8), (0,), (0,), (0,)],
                dict(activation="relu"),
                "dy has another dtype",
            ),
            (
                "group_norm_forward",
                [(2, 5, 8), (0,), (1, 7), (0,)],
                [(2, 5, 8), *NO_STATISTICS, (2, 2, 4, 2), (2, 4, 2), (0,)],
                GROUP_NORM | FORWARD,
                r"scale has shape \[1, 7\], but \[1, 8\]",
            ),
            (
                "group_norm_forward",
                [(2, 5, 8), (0,), (0,), (0,)],
                [(2, 5, 8), *NO_STATISTICS, (2, 2, 4, 2), (2, 4, 2), (0,)],
                GROUP_NORM | FORWARD | dict(groups=np.int64(3)),
                "3 groups do not divide the 8 channels",
            ),
            (
                "group_norm_forward",
                [((2, 5, 7), BF16), (0,), (0,), (0,)],
                [((2, 5, 7), BF16), *NO_STATISTICS, (2, 2, 7, 2), (2, 7, 2), (0,)],
                GROUP_NORM | FORWARD | dict(groups=np.int64(7)),
                "must be even in 16 bits",
            ),
            (
                "group_norm_forward",
                [(2, 5, 8), (0,), (0,), (0,)],
                [(2, 5, 8), *NO_STATISTICS, (2, 3, 4, 2), (2, 4, 2), (0,)],
                GROUP_NORM | FORWARD,
                r"partials has shape \[2, 3, 4, 2\], but \[2, 2, 4, 2\]",
            ),
            (
                "group_norm_forward",
                [(2, 5, 8), (0,), (0,), (0,)],
                [(2, 5, 8), *NO_STATISTICS, (2, 2, 4, 2), (2, 4, 2), (0,)],
                GROUP_NORM | FORWARD | dict(chunk=np.int64(0)),
                "a chunk of 1 or more images",
            ),
            (
                "group_norm_backward",
                [(2, 5, 8), (2, 5, 8), (0,), (2, 4), (2, 3), (0,), (0,), (0,), (0,)],
                [(2, 5, 8), *[(0,)] * 3, (2, 2, 8, 2), (2, 2, 4, 2), (2, 4, 2), (0,)],
                GROUP_NORM,
                r"rstd has shape \[2, 3\], but \[2, 4\]",
            ),
            (
                "group_norm_backward",
                [(2, 5, 8), (2, 5, 8), (0,), (2, 4), (2, 4), (0,), (0,), (0,), (0,)],
                [(2, 5, 8), (0,), (2, 8), (1, 8), (2, 2, 8, 2), (2, 2, 4, 2), (2, 4, 2), (0,)],
                GROUP_NORM,
                r"dbias has shape \[1, 8\], but \[2, 8\]",
            ),
            (
                "depthwise_conv",
                [(2, 5, 6, 8), (9, 7), (0,), (0,)],
                [(2, 5, 6, 8), (0,)],
                DEPTHWISE | dict(activation="none", turned=np.bool_(False)),
                r"weights has shape \[9, 7\], but \[9, 8\]",
            ),
            (
                "depthwise_conv",
                [(2, 5, 6, 8), (4, 8), (0,), (0,)],
                [(2, 5, 6, 8), (0,)],
                DEPTHWISE
                | dict(
                    activation="none",
                    turned=np.bool_(False),
                    height=np.int64(2),
                    width=np.int64(2),
                ),
                "there is no kernel of 2 x 2 with stride 1",
            ),
            (
                "depthwise_conv_weights",
                [(2, 5, 6, 8), (2, 5, 6, 8)],
                [(3, 9, 8)],
                DEPTHWISE,
                r"sums has shape \[3, 9, 8\], but \[3, 10, 8\]",
            ),
            (
                "depthwise_conv_mma",
                [((2, 5, 6, 12), BF16), ((25, 12), BF16), (0,), (0,)],
                [((2, 5, 6, 12), BF16), (0,)],
                DEPTHWISE_TILES | dict(activation="none", turned=np.bool_(False)),
                "channels must be a multiple of 8",
            ),
            (
                "depthwise_conv_mma",
                [((2, 5, 6, 8), BF16), ((25, 8), BF16), (0,), (0,)],
                [((2, 5, 6, 8), BF16), (0,)],
                DEPTHWISE_TILES
                | dict(activation="none", turned=np.bool_(False), images=np.int64(2)),
                "a tile must have 16 blocks",
            ),
            (
                "depthwise_conv_mma_weights",
                [((2, 5, 6, 8), BF16), ((2, 5, 6, 8), BF16)],
                [(3, 26, 8)],
                DEPTHWISE_TILES | dict(block_rows=np.int64(5)),
                "blocks of 7 and 8 rows, not of 5",
            ),
            (
                "max_pool",
                [(2, 6, 6, 8)],
                [(2, 4, 3, 8), (0,)],
                POOL,
                "every window has a value of x",
            ),
            (
                "max_pool_gradient",
                [(2, 3, 3, 8), ((2, 3, 3, 8), "int32")],
                [(2, 6, 6, 8)],
                POOL,
                "places has another dtype",
            ),
            (
                "image_pass",
                [(2, 8, 9, 3), (2, 18), (2, 1, 9), (0,), (0,)],
                [(2, 8, 9, 3)],
                READING | BLUR,
                r"maps has shape \[2, 18\], but \[2, 19\]",
            ),
            (
                "image_pass",
                [(2, 8, 9, 2), (2, 19), (2, 1, 9), (0,), (0,)],
                [(2, 8, 9, 2)],
                READING | BLUR,
                "1, 3 or 4 channels",
            ),
            (
                "image_pass",
                [(2, 8, 9, 3), (2, 19), (2, 1, 9), (0,), (2, 2)],
                [(2, 8, 9, 3)],
                READING | BLUR,
                "a blur reaches over 16 pixels of uint8 images",
            ),
            (
                "image_statistics",
                [(2, 8, 9, 3), (2, 19), (2, 17, 9)],
                [(2, 1, 7), (0,)],
                READING | dict(height=np.int64(8), width=np.int64(9)),
                "at most 16 steps",
            ),
            (
                "upsample",
                [(2, 3, 3, 8)],
                [(2, 6, 5, 8)],
                dict(backward=np.bool_(False)),
                r"y has shape \[2, 6, 5, 8\], but \[2, 6, 6, 8\]",
            ),
        ]
    ],
)
def test_handlers_refuse_what_does_not_fit(target, operands, results, attributes, message):
    """Shapes without a dtype are float32."""
    if target == "linear" and (reason := cublaslt.why_unavailable()):
        pytest.skip(reason)
    assert_refused(target, operands, results, attributes, message)


def assert_refused(target, operands, results, attributes, message):
    cuda_library.register()
    call = jax.ffi.ffi_call(f"jaxfused_{target}", [_described(shape) for shape in results])
    arrays = [jnp.ones(a.shape, a.dtype) for a in map(_described, operands)]
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(call(*arrays, **attributes))


LOSS = dict(
    label_smoothing=np.float32(0.0),
    z_loss=np.float32(0.0),
    soft_cap=np.float32(0.0),
    cluster=np.int64(0),
    threads=np.int64(512),
)
PIXELS = dict(ignores=np.bool_(False), ignore_index=np.int64(0), focal_gamma=np.float32(0.0))
MASK_LOSS = {
    name: np.float32(value)
    for name, value in dict(
        cross_entropy_weight=1,
        dice_weight=1,
        smooth=1,
        tversky_alpha=0.5,
        tversky_beta=0.5,
        tversky_rest=0,
        scale=1,
    ).items()
}
INT32, UINT32 = "int32", "uint32"
FLOAT16 = "float16"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("target", "operands", "results", "attributes", "message"),
    [
        pytest.param(target, *rest, id=f"{target}-{rest[-1]}")
        for target, *rest in [
            (
                "cross_entropy_forward",
                [(4, 8), ((5,), INT32), (0,), (0,)],
                [(0,), (4, 5)],
                LOSS,
                r"classes has shape \[5\], but \[4\]",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), (4,), (0,), (0,)],
                [(0,), (4, 5)],
                LOSS,
                "classes has another dtype",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), ((4,), INT32), (4, 8), (0,)],
                [(0,), (4, 5)],
                LOSS,
                "labels are classes or soft labels, not both",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), (0,), (4, 7), (0,)],
                [(0,), (4, 5)],
                LOSS,
                r"soft has shape \[4, 7\], but \[4, 8\]",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), ((4,), INT32), (0,), (0,)],
                [(4, 8), (4, 5)],
                LOSS,
                r"coefficients has shape \[0\], but \[4\]",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), ((4,), INT32), (0,), (4,)],
                [((4, 8), BF16), (4, 5)],
                LOSS,
                "dlogits has another dtype",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), ((4,), INT32), (0,), (0,)],
                [(0,), (4, 4)],
                LOSS,
                r"statistics has shape \[4, 4\], but \[4, 5\]",
            ),
            (
                "cross_entropy_forward",
                [((4, 8), INT32), ((4,), INT32), (0,), (0,)],
                [(0,), (4, 5)],
                LOSS,
                "logits must be a matrix of float32, bfloat16 or float16",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), ((4,), INT32), (0,), (0,)],
                [(0,), (4, 5)],
                LOSS | dict(cluster=np.int64(3)),
                "cluster must be -1, 0, 1, 2, 4 or 8",
            ),
            (
                "cross_entropy_forward",
                [(4, 8), ((4,), INT32), (0,), (0,)],
                [(0,), (4, 5)],
                LOSS | dict(threads=np.int64(33)),
                "threads must be a multiple of 32",
            ),
            (
                "cross_entropy_forward",
                [(4, 100_000), ((4,), INT32), (0,), (4,)],
                [(4, 100_000), (4, 5)],
                LOSS | dict(cluster=np.int64(1)),
                "a row of 100000 logits does not fit clusters of 1 blocks",
            ),
            (
                "cross_entropy_backward",
                [(4, 8), ((4,), INT32), (0,), (4, 5), (4, 2)],
                [(4, 8)],
                dict(soft_cap=np.float32(0.0)),
                r"cotangents has shape \[4, 2\], but \[4, 3\]",
            ),
            (
                "cross_entropy_backward",
                [(4, 8), ((4,), INT32), (0,), (4, 5), (4, 3)],
                [(4, 8)],
                dict(soft_cap=np.float32(-1.0)),
                "soft_cap must not be negative",
            ),
            ("scale_rows", [(4, 8), (3,)], [(4, 8)], {}, r"factors has shape \[3\]"),
            (
                "sample",
                [(4, 8), ((4, 2), "uint32"), (4, 3)],
                [((4,), INT32)],
                dict(is_filtered=True),
                r"filters has shape \[4, 3\], but \[4, 4\]",
            ),
            (
                "sample",
                [(4, 8), (4, 2), (4, 4)],
                [((4,), INT32)],
                dict(is_filtered=True),
                "seeds has another dtype",
            ),
            (
                "sample",
                [(4, 0), ((4, 2), "uint32"), (4, 4)],
                [((4,), INT32)],
                dict(is_filtered=True),
                "empty or too large",
            ),
            (
                "top_log_probs",
                [(4, 8), ((4,), INT32)],
                [(4,), (4, 9), ((4, 9), INT32)],
                dict(count=np.int64(9)),
                "count must be 0 to the number of words",
            ),
            (
                "csr_matmul",
                [((3,), INT32), ((5,), INT32), (5,), (4, 8)],
                [(3, 8)],
                {},
                r"starts has shape \[3\], but \[4\]",
            ),
            (
                "csr_matmul",
                [((4,), INT32), ((5,), INT32), ((5,), BF16), (4, 8)],
                [(3, 8)],
                {},
                "values has another dtype",
            ),
            (
                "csr_dense",
                [((4,), INT32), ((5,), INT32), (5,)],
                [(4, 8)],
                {},
                r"starts has shape \[4\], but \[5\]",
            ),
            (
                "csr_dense",
                [((5,), INT32), ((5,), INT32), (5,)],
                [((4, 8), BF16)],
                {},
                "the dense copy has another dtype",
            ),
            (
                "csr_starts",
                [((5, 2), INT32)],
                [((4,), INT32), ((4,), INT32)],
                dict(depth=np.int64(8)),
                r"columns has shape \[4\], but \[5\]",
            ),
            (
                "sampled_matmul",
                [((5,), INT32), ((4,), INT32), (3, 8), (2, 8)],
                [(5,)],
                {},
                r"columns has shape \[4\], but \[5\]",
            ),
            (
                "sampled_matmul",
                [((5,), INT32), ((5,), INT32), (3, 8), (2, 7)],
                [(5,)],
                {},
                r"y has shape \[2, 7\], but \[2, 8\]",
            ),
            (
                "sparse24_matmul",
                [((4, 40), BF16), ((8, 20), BF16), ((1, 2, 128), UINT32)],
                [((4, 8), BF16)],
                {},
                "depth must be a multiple of 16",
            ),
            (
                "sparse24_matmul",
                [((4, 64), BF16), ((8, 32), BF16), ((1, 1, 128), UINT32)],
                [((4, 8), BF16)],
                {},
                r"metadata has shape \[1, 1, 128\], but \[1, 2, 128\]",
            ),
            (
                "segmentation_forward",
                [(2, 9, 300), ((2, 9), INT32), (0,)],
                [(2, 1, 902)],
                PIXELS | ALONE,
                "logits have 300 classes; 1 to 256",
            ),
            (
                "segmentation_forward",
                [(2, 9, 3), ((2, 8), INT32), (0,)],
                [(2, 1, 11)],
                PIXELS | ALONE,
                r"labels has shape \[2, 8\], but \[2, 9\]",
            ),
            (
                "segmentation_forward",
                [(2, 9, 3), ((2, 9), BF16), (0,)],
                [(2, 1, 11)],
                PIXELS | ALONE,
                "labels must be int32, uint8, bool or float32",
            ),
            (
                "segmentation_forward",
                [(2, 9, 3), ((2, 9), INT32), (2, 9)],
                [(2, 1, 10)],
                PIXELS | ALONE,
                r"partials has shape \[2, 1, 10\], but \[2, 1, 11\]",
            ),
            (
                "segmentation_forward",
                [(2, 9, 3), ((2, 9), INT32), (0,)],
                [(2, 1, 11)],
                PIXELS | dict(cluster=np.int64(8)),
                "a cluster has 1 block, or 8 that have the whole of a mask",
            ),
            (
                "segmentation_backward",
                [(2, 9, 3), ((2, 9), INT32), (0,), (2, 11)],
                [(2, 9, 2)],
                PIXELS,
                r"dlogits has shape \[2, 9, 2\]",
            ),
            (
                "segmentation_loss",
                [(2, 9, 3), ((2, 9), INT32)],
                [(2,), (2, 9, 3)],
                PIXELS | MASK_LOSS,
                "are of masks alone",
            ),
            (
                "segmentation_loss",
                [((2, 9, 1), FLOAT16), ((2, 9), INT32)],
                [(2,), ((2, 9, 1), FLOAT16)],
                PIXELS | MASK_LOSS,
                "the gradient in float16 is too small",
            ),
            (
                "segmentation_loss",
                [(2, 9, 1), ((2, 9), INT32)],
                [(3,), (2, 9, 1)],
                PIXELS | MASK_LOSS,
                r"losses has shape \[3\], but \[2\]",
            ),
        ]
    ],
)
def test_the_handlers_of_losses_refuse_what_does_not_fit(
    target, operands, results, attributes, message
):
    assert_refused(target, operands, results, attributes, message)


def test_calls_of_handlers_have_the_form_that_is_declared():
    """Calls that do not match their handlers would fail for another reason, and only on a GPU."""
    declared = {}
    for path in (ROOT / "ffi").glob("*/*.cu"):
        for block in path.read_text().split("DEFINE_HANDLER(jaxfused_")[1:]:
            name, binding = block.split(",", 1)
            declared[name] = binding.split(");\n", 1)[0]
    tests = (
        test_handlers_refuse_what_does_not_fit,
        test_the_handlers_of_losses_refuse_what_does_not_fit,
    )
    marks = [mark for test in tests for mark in test.pytestmark if mark.name == "parametrize"]
    calls = [parameter.values for mark in marks for parameter in mark.args[1]]
    assert len(calls) > 50
    for target, operands, results, attributes, _ in calls:
        binding = declared[target]
        names = re.findall(r'\.Attr<[^"]*>\(\s*"(\w+)"', binding)
        assert sorted(attributes) == sorted(names), target
        for kind, given in (("Arg", operands), ("Ret", results)):
            if f".Remaining{kind}s()" not in binding:
                assert len(given) == binding.count(f".{kind}<"), (target, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("alias", ({0: 0}, {}))
def test_rows_are_scaled_in_place_and_elsewhere(alias):
    """XLA allocates a new buffer for the result if x is a slice of another array."""
    cuda_library.register()
    x, factors = jnp.arange(32.0).reshape(4, 8), jnp.array([1.0, 0.5, 0.0, -2.0])
    call = jax.ffi.ffi_call("jaxfused_scale_rows", jax.typeof(x), input_output_aliases=alias)
    expected = np.asarray(x) * np.asarray(factors)[:, None]
    np.testing.assert_array_equal(jax.jit(call)(x, factors), expected)
    np.testing.assert_array_equal(x, np.arange(32.0).reshape(4, 8))


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parameter_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("residual", [False, True])
def test_forward_and_backward_lower_for_cuda(loadable, dtype, parameter_dtype, residual):
    x = jax.ShapeDtypeStruct((6, 197), dtype)
    parameter = jax.ShapeDtypeStruct((197,), parameter_dtype)

    def both(x, scale, bias, pre_bias):
        other = x if residual else None
        y, h, mean, rstd = layer_norm_cuda.forward(
            x, scale, bias, other, pre_bias, save_statistics=True, **NO_MEAN
        )
        assert (h is None) == (not residual) and mean is None
        gradients = layer_norm_cuda.backward(
            y,
            other,
            h if residual else x,
            mean,
            rstd,
            scale,
            bias,
            pre_bias,
            segments=3,
            **NO_MEAN,
        )
        assert [g.shape for g in gradients] == [(6, 197), (3, 197), (3, 197), (3, 197)]
        assert [g.dtype for g in gradients] == [x.dtype, *[jnp.float32] * 3]
        return y, gradients

    text = lowered(both, x, parameter, parameter, parameter)
    assert kernels_in(text) == ["jaxfused_layer_norm_forward", "jaxfused_layer_norm_backward"]
    assert 'activation = "silu"' in text and "scale_offset = 1.0" in text


def test_what_is_not_wanted_is_not_written(loadable):
    x = jax.ShapeDtypeStruct((4, 768), jnp.bfloat16)

    def forward(x):
        outputs = layer_norm_cuda.forward(
            x, None, None, None, None, save_statistics=False, **NO_MEAN
        )
        assert outputs[1:] == (None, None, None)
        return outputs[0]

    line = next(line for line in lowered(forward, x).splitlines() if "custom_call" in line)
    results = line.rsplit("->", 1)[1]
    assert results.count("tensor<4x768xbf16>") == 1
    assert results.count("tensor<0x") == 3


@pytest.mark.parametrize("with_k", [False, True])
def test_rope_lowers_for_cuda(loadable, with_k):
    q = jax.ShapeDtypeStruct((2, 5, 4, 64), jnp.float16)
    k = jax.ShapeDtypeStruct((2, 5, 1, 64), jnp.float16) if with_k else None
    table = jax.ShapeDtypeStruct((1, 5, 16), jnp.float32)

    def rotated(q, k, cos, sin):
        outputs = rope_cuda.rotate(q, k, cos, sin, interleaved=True, inverse=False)
        assert jax.tree.map(jnp.shape, outputs) == jax.tree.map(jnp.shape, (q, k))
        return outputs

    text = lowered(rotated, q, k, table, table)
    assert kernels_in(text) == ["jaxfused_rope"]
    assert "interleaved = true" in text and "inverse = false" in text


AROUND = [
    "jaxfused_bias_activation",
    "jaxfused_bias_activation",
    "jaxfused_bias_activation_backward",
]


@pytest.mark.parametrize(
    ("change", "targets"),
    [
        ({}, ["jaxfused_linear", "jaxfused_linear", AROUND[2]]),
        (dict(residual_dtype="float32"), ["jaxfused_linear", *AROUND[1:]]),
        (dict(activation="silu"), [AROUND[0], "jaxfused_linear", AROUND[2]]),
        (dict(bias_dtype="float32"), ["jaxfused_linear", "jaxfused_linear", AROUND[2]]),
        (dict(dtype="float32", residual_dtype="float32", bias_dtype="float32"), AROUND),
        (dict(features=36), ["jaxfused_linear", *AROUND[1:]]),
        (dict(cublaslt="it is not there"), AROUND),
    ],
)
def test_mlp_takes_the_epilogues_that_cublaslt_has(loadable, monkeypatch, change, targets):
    options = (
        dict(
            dtype="bfloat16",
            bias_dtype="bfloat16",
            residual_dtype="bfloat16",
            features=64,
            activation="gelu_tanh",
            cublaslt=None,
        )
        | change
    )
    monkeypatch.setattr(cublaslt, "why_unavailable", lambda: options["cublaslt"])
    hidden = 2 * options["features"]
    x = jax.ShapeDtypeStruct((5, 32), options["dtype"])
    w1 = jax.ShapeDtypeStruct((32, hidden), options["dtype"])
    w2 = jax.ShapeDtypeStruct((hidden, options["features"]), options["dtype"])
    b1 = jax.ShapeDtypeStruct((hidden,), options["bias_dtype"])
    b2 = jax.ShapeDtypeStruct((options["features"],), options["bias_dtype"])
    residual = jax.ShapeDtypeStruct((5, options["features"]), options["residual_dtype"])

    def both(x, w1, b1, w2, b2, residual):
        keywords = dict(activation=options["activation"], precision=None)
        h, z = linear_cuda.forward(
            x, w1, b1, None, save_preactivation=True, out_dtype=x.dtype, **keywords
        )
        y, _ = linear_cuda.forward(
            h,
            w2,
            b2,
            residual,
            activation=None,
            save_preactivation=False,
            out_dtype=residual.dtype,
            precision=None,
        )
        dz, again, db1 = mlp_cuda.hidden_gradient(
            y.astype(x.dtype), w2, z, sum_rows=True, **keywords
        )
        assert z.dtype == dz.dtype == again.dtype == h.dtype == x.dtype
        assert z.shape == dz.shape == again.shape == h.shape
        assert y.dtype == residual.dtype and (db1.shape, db1.dtype) == (b1.shape, jnp.float32)
        return y, dz, again, db1

    assert kernels_in(lowered(both, x, w1, b1, w2, b2, residual)) == targets


@pytest.mark.parametrize(
    ("implementation", "launched"), [("pallas", "linear"), ("cuda", "jaxfused_linear")]
)
def test_both_layers_of_an_mlp_are_those_of_the_named_implementation(
    loadable, hopper, monkeypatch, implementation, launched
):
    monkeypatch.setattr(cublaslt, "why_unavailable", lambda: None)
    shapes = [(2048, 64), (64, 192), (192,), (192, 64), (64,)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    mlp = functools.partial(jaxfused.mlp, implementation=implementation)
    assert set(kernels(mlp, *args)) == {launched}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("save", [False, True])
def test_gated_mlp_lowers_for_cuda(loadable, monkeypatch, packed, bias, save):
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    width = 96 if packed else 48
    x, w_down = shape(5, 32), shape(48, 32)
    w_gate, w_up = shape(32, width), None if packed else shape(32, 48)
    b_gate, b_up = (shape(width), None if packed else shape(48)) if bias else (None, None)

    def both(x, w_gate, w_up, b_gate, b_up, w_down):
        keywords = dict(activation="silu", precision=None)
        h, *saved = mlp_cuda.gated_forward(
            x, w_gate, w_up, b_gate, b_up, save_preactivations=save, **keywords
        )
        if not save:
            assert saved == [None, None]
            return h
        dgate, dup, again, *sums = mlp_cuda.gated_hidden_gradient(
            x, w_down, *saved, sum_rows=(bias, bias), returns_hidden=True, **keywords
        )
        assert dgate.shape == dup.shape == again.shape == h.shape == (5, 48)
        assert [s is not None and s.shape for s in sums] == [bias and (48,)] * 2
        (dx,) = mlp_cuda.gated_input_gradient(dgate, dup, w_gate, w_up, precision=None)
        assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
        return h, again, dx, sums

    monkeypatch.setattr(cublaslt, "why_unavailable", lambda: None)
    text = lowered(both, x, w_gate, w_up, b_gate, b_up, w_down)
    assert kernels_in(text) == [AROUND[0], *([AROUND[2], "jaxfused_linear"] if save else [])]


# --- linear's kernels against float64 ---------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(40, 5), (300, 197), (133, 3080), (1000, 64)])
@pytest.mark.parametrize(
    ("activation", "gated", "wide"),
    [
        ("gelu_tanh", False, False),
        ("gelu_erf", False, True),
        ("relu2", True, False),
        ("quick_gelu", False, False),
        ("silu", True, False),
        (None, False, True),
    ],
)
def test_bias_activation(activation, gated, wide, shape, dtype):
    """Compares values and gradients; `wide` makes all but the product float32."""
    rows, features = shape
    # Over few columns the largest error of plain jax.numpy is luck, so several draws are taken.
    draws = 8 if features < 8 else 1
    beside = "float32" if wide else dtype

    def operands(seed):
        rng = np.random.default_rng(seed)

        def array(*sizes, dtype=dtype):
            return jnp.asarray(rng.normal(size=sizes), dtype)

        product, bias = array(rows, features), array(features, dtype=beside)
        up, up_bias = (array(rows, features), array(features)) if gated else (None, None)
        residual = None if gated else array(rows, features, dtype=beside)
        return product, up, bias, up_bias, residual, array(rows, features, dtype=beside)

    def of_draws(function, *arguments):
        found = [function(*of_draw) for of_draw in zip(*arguments, strict=True)]
        return jax.tree.map(lambda *results: np.stack(results), *found)

    def plain(product, up, bias, up_bias):
        accumulator = jnp.promote_types(product.dtype, jnp.float32)

        def preactivation(product, bias):
            info = jnp.finfo(product.dtype)
            z = product.astype(accumulator) + bias.astype(accumulator)
            # XLA never removes this, while it may remove a conversion and its inverse.
            return jax.lax.reduce_precision(z, info.nexp, info.nmant)

        y = activate(activation, preactivation(product, bias))
        return y * preactivation(up, up_bias) if gated else y

    def plain_results(product, up, bias, up_bias, residual, dy):
        y, vjp = jax.vjp(plain, product, up, bias, up_bias)
        dproduct, dup, dbias, dup_bias = vjp(dy.astype(y.dtype))
        total = y if residual is None else y + residual.astype(y.dtype)
        return total.astype(dy.dtype), dproduct, dup, y.astype(product.dtype), dbias, dup_bias

    @jax.jit
    def results(product, up, bias, up_bias, residual, dy):
        y, z, up_z = bias_activation_cuda.forward(
            product,
            up,
            bias,
            up_bias,
            residual,
            activation=activation,
            out_dtype=dy.dtype,
            save_preactivation=True,
        )
        dz, dup, h, sums = bias_activation_cuda.backward(
            dy, z, up_z, activation=activation, want_y=True, want_sums=True
        )
        dup_bias = None if up_bias is None else sums[1].astype(up_bias.dtype)
        return y, dz, dup, h, sums[0].astype(bias.dtype), dup_bias

    arguments = [*zip(*map(operands, range(draws)), strict=True)]
    actual = of_draws(results, *arguments)
    low = of_draws(jax.jit(plain_results), *arguments)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: np.asarray(a, np.float64), arguments)
        truth = of_draws(plain_results, *exact)
    names = ("y", "dproduct", "dup", "h", "dbias", "dup_bias")
    for name, a, b, t in zip(names, actual, low, truth, strict=True):
        if t is not None:
            assert_accurate(name, a, b, t)
    chex.assert_trees_all_equal(of_draws(results, *arguments), actual)


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(compute_capability=None), "it needs an NVIDIA GPU"),
        (dict(compute_capability=(7, 0)), "7.5 or later, and this GPU has 7.0"),
        (dict(dtype=jnp.float64), "x has dtype float64"),
        (dict(dtype=jnp.dtype("int8")), "x has dtype int8"),
        (dict(residual_dtype=jnp.float32), "x has bfloat16, residual float32"),
        (dict(features=0), "x has 0"),
        (dict(features=MAX_FEATURES + 1), "x has 65537"),
        (dict(rows=MAX_ROWS + 1), "at most 1073741824 rows, and x has 1073741825"),
    ],
)
def test_limits(loadable, change, reason):
    assert reason in why_unsupported(**GOOD | change)


@pytest.mark.parametrize(
    "change",
    [
        dict(compute_capability=(7, 5)),
        dict(compute_capability=(12, 0)),
        dict(features=1),
        dict(features=MAX_FEATURES),
        dict(rows=MAX_ROWS),
        dict(features=197, dtype=jnp.dtype("float16")),
        dict(residual_dtype=jnp.dtype("bfloat16")),
    ],
)
def test_within_the_limits(loadable, change):
    assert why_unsupported(**GOOD | change) is None
