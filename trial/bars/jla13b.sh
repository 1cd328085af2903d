#!/bin/bash
# jla13b.sh OUT bf16|fp8|tiny SECONDS: jax-linear-attention's trainer on the shape of `language_model train`.
# Its own TOML is not in the wheel; these settings follow its README (no recompute, lean VJPs, its loss).
out=$1 what=$2 seconds=${3:-95} python=${PYTHON:-python3}
mkdir -p /tmp/jla13b
run() {
  name=$1 limit=$2; shift 2
  cat >/tmp/jla13b/$name.toml <<T
name = "$name"
[model]
preset = "transformer-1p3b"
vocab_size = 32000
remat = "none"
scan_layers = false
lean_vjp = true
[optim]
name = "adamw"
lr = 3e-4
schedule = "constant"
[train]
max_steps = 12
seq_len = 4096
micro_batch_per_replica = 4
grad_accum = 4
log_every = 2
dispatch_ahead = true
update_guard = "select"
ce_impl = "auto"
ce_grad_in_forward = true
save_final = false
final_eval = false
resume = "never"
output_dir = "/tmp/jla13b/runs-$name"
[data]
source = "synthetic"
synthetic_kind = "uniform"
eos_id = 256
synthetic_doc_length = 1024
synthetic_samples = 1024
document_masking = true
T
  timeout $limit $python $(dirname $(realpath $0))/jla_run.py train --config /tmp/jla13b/$name.toml "$@" >"$out/$name.txt" 2>&1
  echo "$name: exit status $?"; grep -v "^$" "$out/$name.txt" | cut -c1-220 | tail -n 14
  cp /tmp/jla13b/runs-$name/*.jsonl "$out/" 2>/dev/null
}
fp8=(--set 'model.fp8="delayed"' --set model.fp8_fused=true)
tiny=()
if [ $what = tiny ]; then
  tiny=(--set model.d_model=64 --set model.n_layers=2 --set model.d_ff=96 --set model.attention.num_heads=4
    --set model.attention.num_kv_heads=2 --set model.attention.head_dim=16 --set model.vocab_size=512
    --set train.seq_len=64 --set train.micro_batch_per_replica=2 --set train.grad_accum=2
    --set 'train.ce_impl="xla"' --set train.ce_grad_in_forward=false --set train.max_steps=4)
  run jla-bf16 300 "${tiny[@]}"
  exit
fi
if [ $what = fp8 ]; then run jla-fp8 $seconds "${fp8[@]}"; else run jla-bf16 $seconds; fi
