#!/bin/bash
# Llama 3 8B in FP8 on one node of 8 Hopper GPUs: tensor parallel 2, 4 replicas.
#
#   full size       DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer \
#                   bash examples/llama/train_llama3_8b_fp8.sh
#   here and now    TOY=1 bash examples/llama/train_llama3_8b_fp8.sh
#   plan            PLAN=1 bash examples/llama/train_llama3_8b_fp8.sh
#
# Predicted memory: 62.5 GB per GPU.
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

SAVE=${SAVE:-runs/llama3-8b-fp8}
TP=${TP:-2}
CP=${CP:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
TRAIN_ITERS=${TRAIN_ITERS:-500000}
WARMUP_ITERS=${WARMUP_ITERS:-2000}

MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

PRECISION=(
    --fp8-format hybrid # e4m3 forward, e5m2 for gradients
    --fp8-recipe tensorwise
    --fp8-param-gather # weights are gathered over replicas in FP8: half the bytes
)

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
    --context-parallel-size "$CP" # 2 and more for longer sequences
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING=(
    --micro-batch-size 1
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

DATA=(--mock-data --vocab-size 128256) # without DATA_PATH, to measure speed
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

FLAGS=("${MODEL[@]}" "${PRECISION[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}")
if [[ -n "${TOY:-}${PLAN:-}" ]]; then
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_gpt.py "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
