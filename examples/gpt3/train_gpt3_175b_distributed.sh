#!/bin/bash
# GPT-3 175B on 1,024 GPUs: tensor parallel 8 inside a node, 16 pipeline stages over nodes, 8 replicas.
#
#   on every node   NODE_RANK=0 MASTER_ADDR=node000 DATA_PATH=/data/corpus_text_document \
#                   VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt bash examples/gpt3/train_gpt3_175b_distributed.sh
#   here and now    TOY=1 bash examples/gpt3/train_gpt3_175b_distributed.sh
#   plan            PLAN=1 DEVICE_MEMORY_GB=40 bash examples/gpt3/train_gpt3_175b_distributed.sh
#
# Predicted memory: 21.0 GB per GPU.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if [[ -n "${TOY:-}" ]]; then # the same flags on two ranks
    NNODES=1 GPUS_PER_NODE=2 TP=1 PP=2
    GLOBAL_BATCH=4 RAMPUP_START=2 RAMPUP_STEP=2 RAMPUP_SAMPLES=4 TRAIN_ITERS=3 DECAY_ITERS=3
fi
NNODES=${NNODES:-128}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
export NUM_GPUS=$((NNODES * GPUS_PER_NODE))

SAVE=${SAVE:-runs/gpt3-175b}
TP=${TP:-8}
PP=${PP:-16}
GLOBAL_BATCH=${GLOBAL_BATCH:-1536}
TRAIN_ITERS=${TRAIN_ITERS:-500000}
DECAY_ITERS=${DECAY_ITERS:-430000}
RAMPUP_START=${RAMPUP_START:-16} # the batch grows from 16 samples, by 16, over the first 5.9 million
RAMPUP_STEP=${RAMPUP_STEP:-16}
RAMPUP_SAMPLES=${RAMPUP_SAMPLES:-5859375}

MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --init-method-std 0.006 # smaller than the default, for stability at this width
    --openai-gelu # the tanh form of GELU
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
    --pipeline-model-parallel-size "$PP"
    --num-virtual-stages-per-pipeline-rank 3 # of 2 layers each: a third of the bubble, for a little memory
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH"
    --rampup-batch-size "$RAMPUP_START" "$RAMPUP_STEP" "$RAMPUP_SAMPLES"
    --train-iters "$TRAIN_ITERS"
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-decay-iters "$DECAY_ITERS"
    --lr-warmup-fraction .001
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

DATA=(--mock-data --vocab-size 50257) # without DATA_PATH, to measure speed
if [[ -n "${DATA_PATH:-}" ]]; then
    DATA=(
        --data-path "$DATA_PATH"
        --split 949,50,1
        --tokenizer-type GPT2BPETokenizer
        --vocab-file "$VOCAB_FILE"
        --merge-file "$MERGE_FILE"
    )
fi

OUTPUT=(
    --save "$SAVE"
    --load "$SAVE" # the same command continues after a stop
    --save-interval 1000
    --log-interval 100
    --eval-interval 1000
    --eval-iters 10
)

FLAGS=("${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}")
if [[ -n "${TOY:-}${PLAN:-}" ]]; then
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_gpt.py "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
