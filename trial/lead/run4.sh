#!/bin/bash
# run4.sh FOLDER OUT: parts by ONLY
. "$1/common.sh"
part decode 106 $py -m benchmarks language_model decode --only "${DECODE:-b1,b1 int4,b16,b16 cudnn}" --seconds 94 --out $out/decode
part ragged_dot 116 $py -m benchmarks ragged_dot --peers jla,tokamax_tiles,torch_grouped --seconds 103 --out $out/ragged_dot
part serving 102 $py -m benchmarks serving --peers xla,cudnn,jax_pages,flash_attn3,torch_cudnn,torch_flash --seconds 89 --out $out/serving
part pipeline 98 $py -m benchmarks pipeline --workers 14 --seconds 86 --out $out/pipeline
timeout 20 $py $here/tell.py $out > $out/bars.told; head -c 5000 $out/bars.told
