#!/bin/bash
# $1 this folder, $2 output, then parts of: evoformer resnet entries blocks (all by default); one H200
out=$(realpath "$2"); shift 2
parts=${*:-evoformer resnet entries blocks}
python=${PYTHON:-python3}
steps() { # model, seconds
  echo "== $1"; timeout -k 5 "$2" $python -u -m benchmarks end_to_end --models "$1" --variants stock,fused --out "$out/$1" 2>&1
}
for part in $parts; do
  begin=$(date +%s)
  case $part in
    evoformer) steps evoformer 240 ;;
    resnet) steps resnet-50-128 360 ;;
    entries) echo "== entries"; timeout -k 5 200 $python -u -m benchmarks sparse_entries \
      --peers xla,jax_csr,dense,dense_tf32,cusparse --seconds 180 --out "$out/entries" 2>&1 ;;
    blocks) echo "== blocks"; timeout -k 5 200 $python -u -m benchmarks sparse --peers xla --seconds 180 --out "$out/blocks" 2>&1 ;;
  esac
  echo "== $part took $(( $(date +%s) - begin )) s"
done
