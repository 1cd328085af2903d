#!/bin/bash
# $1 this folder, $2 output, then parts of: tests evoformer resnet kernel evoformer2 (all by default); one H200 a part
here=$(realpath "$1"); out=$(realpath "$2"); shift 2
parts=${*:-tests evoformer resnet kernel evoformer2}
python=${PYTHON:-python3}
main=$PWD
patched() { # a copy of the tree with y.patch
  rm -rf "/tmp/evo38-$1" && cp -r "$main" "/tmp/evo38-$1" && cd "/tmp/evo38-$1" && patch -p1 -s < "$here/y.patch"
}
tests() {
  timeout -k 5 120 $python -m pytest -q -p no:cacheprovider -m gpu tests/ops/linear/test_gated_unit.py \
    tests/ops/attention/test_attention_short.py -k "gated_unit or kernels_are or bias" 2>&1 | tail -15
  timeout -k 5 90 $python -u "$here/bias.py" 2>&1 | grep --line-buffered -v cuda_timer
}
steps() { # name, model, seconds, limit, more
  # Level 2 of autotuning times the candidates as the default does, and does not check their results.
  XLA_FLAGS="--xla_gpu_autotune_level=2 $XLA_FLAGS" timeout -k 5 "$4" $python -u "$here/steps.py" "$2" "$3" "${6:-stock,fused}" $5 2>&1 \
    | grep --line-buffered -v cuda_timer | tee "$out/$1.txt"
}
for part in $parts; do
  begin=$(date +%s); echo "== $part"; cd "$main" || exit 1
  export PYTHONPATH=$PWD
  case $part in
    tests) tests ;;
    evoformer) steps evoformer evoformer 150 290 check ;;
    resnet) steps resnet resnet-50-128 1 170 "" fused ;;
    kernel) patched kernel && PYTHONPATH=$PWD tests ;;
    evoformer2) patched evoformer2 && PYTHONPATH=$PWD steps evoformer2 evoformer 150 290 check ;;
  esac
  echo "== $part took $(( $(date +%s) - begin )) s"
done
