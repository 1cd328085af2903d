"""Translation of CUDA C into C++ for the emulator, by tests/cuda_emulator/build.py."""

import pytest

from tests.conftest import LIBRARY_ASKED
from tests.cuda_emulator.build import as_cpp


@pytest.mark.parametrize(
    ("cuda", "cpp"),
    [
        ("threadIdx.x + args.blockIdx", "cuda_emulator::thread_index().x + args.blockIdx"),
        ("#if __CUDA_ARCH__ >= 900", "#if EMULATED_CUDA_ARCH >= 900"),
        (
            "__shared__ float a[kRows][2], b;",
            "EMULATED_SHARED(a, float[kRows][2]); EMULATED_SHARED(b, float);",
        ),
        (
            "extern __shared__ __align__(128) unsigned char memory[];",
            "auto* memory = static_cast<unsigned char*>(cuda_emulator::dynamic_shared());",
        ),
        (
            "add<<<1, kThreads, 0, stream>>>(args);",
            "cuda_emulator::launcher(add, 1, kThreads, 0, stream)(args);",
        ),
        (
            'asm volatile("bar.sync %0, " "%1;" ::"r"(id), "r"(f(x)) : "memory");',
            'EMULATED_PTX("bar.sync %0, %1;", cuda_emulator::input(id), cuda_emulator::input(f(x)));',
        ),
        (
            'asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));',
            'EMULATED_PTX("rcp.approx.ftz.f32 %0, %0;", cuda_emulator::output(x));',
        ),
        ('asm("" : "+r"(value));', "((void)0);"),
    ],
)
def test_cuda_as_cpp(cuda, cpp):
    assert as_cpp(cuda) == cpp


def test_no_module_asks_for_the_library_while_it_is_imported(request):
    """Its answer would be kept, and the fixture `emulated_gpu` names another library."""
    assert request.config.stash[LIBRARY_ASKED] == 0
