# requires: optimum-quanto==0.2.7 torch==2.13.0 ninja
"""optimum-quanto: qint8, qfloat8, qint4 and qint2."""

import torch
from optimum.quanto import freeze, qfloat8, qint2, qint4, qint8, quantization_map, quantize
from written import matrix, write


def case(name, kind, k=256, n=16):
    model = torch.nn.Sequential(torch.nn.Linear(k, n))
    model[0].weight.data = torch.from_numpy(matrix(n, k))
    quantize(model, weights=kind)
    freeze(model)
    expected = model[0].weight.dequantize()
    state = {key[1:]: t for key, t in model.state_dict().items()}
    files = {"quanto_qmap": quantization_map(model)}
    write(f"quanto-{name}", state, None, expected, layer="0", **files)


case("qint8", qint8)
case("qfloat8", qfloat8)
case("qint4", qint4)
case("qint4-groups-of-96", qint4, k=192)
case("qint4-rows", qint4, k=100)
case("qint2", qint2)
