"""Chooses few_rows.cu for int4 too, and in gated units."""
from jaxfused.ops.quantized import few_rows_cuda as few, quantized_gated_unit as g, quantized_matmul_stages as st
from jaxfused.runtime.estimate import Rule
from pallas_kernels.gemm.quantized import Packed

RULE = Rule(("cuda", "pallas", "xla"), "forced")
layer, unit = st.Layer.estimate, g._Unit.estimate


def of_layer(self, device, able, x, x_scale, values, scale, zero_point, bias, residual):
    w = self.options.packed(values, scale, zero_point)
    if "cuda" in able and few.why_unsupported(device.compute_capability, x.shape, w) is None:
        return RULE
    return layer(self, device, able, x, x_scale, values, scale, zero_point, bias, residual)


def of_unit(self, device, able, x, values, scale, zero_point, *others):
    if few.why_unsupported(device.compute_capability, x.shape, Packed(values, scale, zero_point)) is None:
        return RULE
    return unit(self, device, able, x, values, scale, zero_point, *others)


st.Layer.estimate, g._Unit.estimate = of_layer, of_unit
