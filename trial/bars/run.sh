#!/bin/bash
# run.sh FOLDER OUT: one GPU, 516 s, in the root of a copy of main; the most valuable first. ONLY="NAME ..." runs some.
. "$1/common.sh"
part quantized_table 172 $py -m benchmarks quantized_table --peers '' --seconds 162 --out $out/quantized_table
part decode 128 $py -m benchmarks language_model decode --seconds 118 --out $out/decode
part ragged_dot 112 $py -m benchmarks ragged_dot --seconds 102 --out $out/ragged_dot
part serving 98 $py -m benchmarks serving --peers xla,cudnn,jax_pages,flash_attn3,torch_cudnn,torch_flash --seconds 88 --out $out/serving
timeout 20 $py $here/tell.py $out > $out/bars.told; head -c 6000 $out/bars.told
