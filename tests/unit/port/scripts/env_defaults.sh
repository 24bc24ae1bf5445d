#!/usr/bin/env bash
# Everything from the environment, with defaults; a function starts the run.
set -euo pipefail
: "${HIDDEN:=1024}"
LAYERS="${LAYERS:-24}"
HEADS=${HEADS:-16}
HIDDEN=${HIDDEN:-1024}
SEQ=${SEQ:-2048}
MBS=${MBS:-4}
NPROC=${NPROC:-2}
ACCUMULATION=${ACCUMULATION:-8}
GBS=$(( MBS * NPROC * ACCUMULATION ))
PRECISION=${PRECISION:-bf16}
EXTRA_FLAGS=${EXTRA_FLAGS:-}

launch() {
    local entry="$1"; shift
    python -m torch.distributed.run --standalone --nproc-per-node="$NPROC" "$entry" "$@"
}

common=(--num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS")
common+=(--seq-length "$SEQ" --max-position-embeddings "$SEQ")
[ "$PRECISION" = bf16 ] && common+=(--bf16) || common+=(--fp16)
[[ -n "${WANDB_PROJECT:-}" ]] && common+=(--wandb-project "$WANDB_PROJECT")
if (( LAYERS > 12 )); then
    common+=(--recompute-activations)
fi
launch pretrain_gpt.py "${common[@]}" --micro-batch-size "$MBS" --global-batch-size "$GBS" \
    --train-iters 1000 --lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 100 \
    --mock-data --vocab-size 50257 --tokenizer-type NullTokenizer $EXTRA_FLAGS
