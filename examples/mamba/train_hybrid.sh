#!/bin/bash
# A hybrid of the shape of Nemotron-H 8B on one node of 8 GPUs: Mamba-2, attention and MLPs in one pattern; tensor parallel 2, 4 replicas.
#
#   full size       DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer \
#                   bash examples/mamba/train_hybrid.sh
#   here and now    TOY=1 bash examples/mamba/train_hybrid.sh
#   plan            PLAN=1 bash examples/mamba/train_hybrid.sh
#
# Predicted memory: 53.1 GB per GPU.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if [[ -n "${TOY:-}" ]]; then # the same flags on two ranks
    NNODES=1 GPUS_PER_NODE=2 TP=2 GLOBAL_BATCH=2 TRAIN_ITERS=3 WARMUP_ITERS=1
fi
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
export NUM_GPUS=$((NNODES * GPUS_PER_NODE))

SAVE=${SAVE:-runs/nemotron-h-8b}
TP=${TP:-2}
GLOBAL_BATCH=${GLOBAL_BATCH:-768}
TRAIN_ITERS=${TRAIN_ITERS:-400000}
WARMUP_ITERS=${WARMUP_ITERS:-2000}

MODEL=(
    # M is a Mamba-2 layer, * attention, - an MLP
    --hybrid-layer-pattern "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    --num-layers 52
    --hidden-size 4096
    --ffn-hidden-size 21504
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --mamba-state-dim 128
    --mamba-head-dim 64
    --mamba-num-groups 8
    --mamba-num-heads 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type none
    --normalization RMSNorm
    --squared-relu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr 4e-4
    --min-lr 4e-6
    --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP_ITERS"
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

DATA=(--mock-data --vocab-size 131072) # without DATA_PATH, to measure speed
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
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_hybrid.py "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_hybrid.py" "${FLAGS[@]}"
