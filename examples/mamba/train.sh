#!/bin/bash
# Mamba-2 2.7B on one node of 8 GPUs: no attention, 8 replicas. train_hybrid.sh beside it mixes Mamba-2 with attention.
#
#   full size       DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer \
#                   bash examples/mamba/train.sh
#   here and now    TOY=1 bash examples/mamba/train.sh
#   plan            PLAN=1 bash examples/mamba/train.sh
#
# Predicted memory: 51.7 GB per GPU.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if [[ -n "${TOY:-}" ]]; then # the same flags on two ranks
    NNODES=1 GPUS_PER_NODE=2 MICRO_BATCH=1 GLOBAL_BATCH=4 TRAIN_ITERS=3 WARMUP_ITERS=1
fi
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
export NUM_GPUS=$((NNODES * GPUS_PER_NODE))

SAVE=${SAVE:-runs/mamba2-2.7b}
TP=${TP:-1}
MICRO_BATCH=${MICRO_BATCH:-4}
GLOBAL_BATCH=${GLOBAL_BATCH:-256}
TRAIN_ITERS=${TRAIN_ITERS:-600000}
WARMUP_ITERS=${WARMUP_ITERS:-6000}

MODEL=(
    --is-hybrid-model # all layers are Mamba-2 unless a pattern or a ratio says otherwise
    --num-layers 64
    --hidden-size 2560
    --mamba-state-dim 128
    --mamba-head-dim 64
    --mamba-num-groups 1
    --mamba-chunk-size 256
    --seq-length 2048
    --max-position-embeddings 2048
    --position-embedding-type none
    --normalization RMSNorm
    --disable-bias-linear
    --hidden-dropout 0.0
    --make-vocab-size-divisible-by 16
)

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP_ITERS"
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

DATA=(--mock-data --vocab-size 50288) # without DATA_PATH, to measure speed
if [[ -n "${DATA_PATH:-}" ]]; then
    DATA=(--data-path "$DATA_PATH" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
fi

OUTPUT=(
    --save "$SAVE"
    --load "$SAVE" # the same command continues after a stop
    --save-interval 500
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
)

FLAGS=("${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}")
if [[ -n "${TOY:-}${PLAN:-}" ]]; then
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_mamba.py "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_mamba.py" "${FLAGS[@]}"
