"""Kernels that `python -m benchmarks kernels` reads from a program, without JAX's CUDA plugin."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.sweep import command as sweep
from benchmarks.sweep import configs
from benchmarks.without_gpu import beside_stock, command, hlo, ptx, target

PROGRAM = """HloModule jit_run, is_scheduled=true

%fused_pad (param_0: bf16[4,6]) -> bf16[4,8] {
  %param_0 = bf16[4,6]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  ROOT %pad = bf16[4,8]{1,0} pad(%param_0, %zero), padding=0_0x0_2
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %value = f32[4]{0} get-tuple-element(%state), index=1
  %count = s32[] get-tuple-element(%state), index=0
  %next = f32[4]{0} fusion(%value, %value), kind=kCustom, calls=%f, \
backend_config={"fusion_backend_config":{"kind":"__triton","num_warps":"4"}}
  ROOT %both = (s32[], f32[4]{0}) tuple(%count, %next)
}

%condition (state.1: (s32[], f32[4])) -> pred[] {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT %more = pred[] fusion(%state.1), kind=kLoop, calls=%g
}

ENTRY %main.2 (x: bf16[4,6], w: bf16[8,16]) -> (bf16[4,16], /*index=1*/f32[4]) {
  %x = bf16[4,6]{1,0} parameter(0), metadata={op_name="x"}
  %w = bf16[8,16]{1,0} parameter(1)
  %loop_pad_fusion = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused_pad, \
metadata={op_name="jit(run)/dot_general" stack_frame_id=3}
  %custom-call.1 = (bf16[4,16]{1,0}, s8[33554432]{0}) custom-call(%loop_pad_fusion, %w), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(run)/jvp()/dot_general"}, \
backend_config={"gemm_backend_config":{"epilogue":"BIAS_GELU"}}
  %y = bf16[4,16]{1,0} get-tuple-element(%custom-call.1), index=0
  %start = (s32[], f32[4]{0}) custom-call(), custom_call_target="mosaic_gpu_v2", \
backend_config={module = "a(\\22{", name = "b"}
  %loop = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body
  %sums = f32[4]{0} get-tuple-element(%loop), index=1
  ROOT %tuple = (bf16[4,16]{1,0}, f32[4]{0}) tuple(%y, %sums)
}

"""


def test_kernels_are_read_in_their_order():
    found = hlo.kernels(PROGRAM)
    assert [(k.name, k.what, k.depth) for k in found] == [
        ("loop_pad_fusion", "loop", 0),
        ("custom-call.1", "__cublas$lt$matmul BIAS_GELU", 0),
        ("start", "mosaic_gpu_v2", 0),
        ("more", "loop", 1),
        ("next", "triton", 1),
    ]
    pad, product, *_, following = found
    assert (pad.results, pad.operands) == (("bf16[4,8]",), ("bf16[4,6]",))
    assert pad.source == "jit(run)/dot_general"
    assert pad.megabytes == pytest.approx((64 + 48) / 1e6)
    # A library's scratch memory is no result, and an operand that occurs twice is read once.
    assert product.results == ("bf16[4,16]",)
    assert following.operands == ("f32[4]",)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("bf16[3,5]", 30), ("f32[]", 4), ("pred[7]", 7), ("f8e4m3fn[9]", 9), ("token[]", 0)],
)
def test_sizes_of_arrays(shape, expected):
    assert hlo.size(shape) == expected


def test_a_list_has_a_line_for_each_kernel():
    text = command.listing("ours", hlo.kernels(PROGRAM), {"loop_pad_fusion": "7 instructions"})
    assert text.splitlines()[1].startswith("  ours: kernels 5, at most 0.00 MB")
    assert (
        "custom-call.1 (__cublas$lt$matmul BIAS_GELU)  bf16[4,16] <- bf16[4,8] bf16[8,16]" in text
    )
    assert "    next (triton)" in text
    assert "dot_general; 7 instructions" in text


def test_instructions_are_counted_by_kernel(tmp_path):
    (tmp_path / "module.1.ptx").write_text(
        """.visible .entry loop_pad_fusion(
    .param .u64 p0
)
.reqntid 128, 1, 1
{
    ld.param.b64    %rd1, [p0];
    @%p1 bra    $L__1;
    ld.global.nc.v4.b16    {%rs1, %rs2, %rs3, %rs4}, [%rd1];
    @!%p2 st.global.b16    [%rd1], %rs1;
    st.global.b16    [%rd1+2], %rs2;
    ret;
}
"""
    )
    counted = "6 instructions, 1 ld.global.nc.v4.b16, 2 st.global.b16"
    assert ptx.instructions(tmp_path) == {"loop_pad_fusion": counted}


def test_of_slices_a_kernel_reads_no_more():
    text = """HloModule jit_run, is_scheduled=true

%fused (p: bf16[64,8], q: bf16[64,8]) -> bf16[8] {
  %p = bf16[64,8]{1,0} parameter(0)
  %q = bf16[64,8]{1,0} parameter(1)
  %flat = bf16[512]{0} bitcast(%p)
  %wide = f32[512]{0} convert(%flat)
  %a = f32[8]{0} slice(%wide), slice={[0:8]}
  %b = bf16[8]{0} slice(%flat), slice={[64:72]}
  %sums = bf16[8]{0} reduce(%q, %a), dimensions={0}, to_apply=%add
  ROOT %y = bf16[8]{0} add(%b, %sums)
}

ENTRY %main (x: bf16[64,8], z: bf16[64,8]) -> bf16[8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %z = bf16[64,8]{1,0} parameter(1)
  ROOT %loop_add_fusion = bf16[8]{0} fusion(%x, %z), kind=kLoop, calls=%fused
}

"""
    [kernel] = hlo.kernels(text)
    assert kernel.operands == ("f32[8]", "bf16[8]", "bf16[64,8]")


# --- beside stock ---------------------------------------------------------------------------------

LINE = configs.to_line(configs.drawn("linear", 21, 0))


def test_what_a_kernel_counts_as():
    kernels = [hlo.Kernel("a.1", "loop", ("f32[500000]",), ("f32[500000]",), "")] * 2
    assert beside_stock.microseconds(kernels) == pytest.approx(2 * (0.8 + 4 / 4))


@pytest.mark.parametrize(("status", "returned"), [("like stock", 0), ("more", 1)])
def test_what_does_more_than_stock_is_printed(status, returned, monkeypatch, capsys):
    class Pool(ThreadPoolExecutor):
        def __init__(self, jobs, context, initializer):
            super().__init__(jobs)

    def compare(line, directions):
        return [beside_stock.Found("linear", directions, line, status, ", 3 kernels")]

    monkeypatch.setattr(target, "why_unavailable", lambda: None)
    monkeypatch.setattr(beside_stock, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(beside_stock, "compare", compare)
    case = configs.from_line(LINE)
    assert beside_stock.run([case, case], "forward", 1, 60.0) == returned
    printed = capsys.readouterr().out
    assert (LINE in printed) == (status == "more")
    assert re.search(r"^linear .*\b2\b", printed, re.MULTILINE)


def test_without_the_plugin_nothing_is_compared(monkeypatch, capsys):
    monkeypatch.setattr(target, "why_unavailable", lambda: "there is no plugin")
    assert sweep.main(["linear", "--without-gpu", "--count", "1"]) == 2
    assert "there is no plugin" in capsys.readouterr().out
