#!/bin/bash
# Llama 70B on 64 GPUs (8 nodes): tensor parallel 4 inside a node, 4 pipeline stages, 4 replicas.
#
#   on every node   NODE_RANK=0 MASTER_ADDR=node000 DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer \
#                   bash examples/llama/train_llama_70b.sh
#   with SLURM      sbatch --nodes=8 --gpus-per-node=8 examples/llama/train_llama_70b.sh, or train_llama_70b.sbatch beside it
#   here and now    TOY=1 bash examples/llama/train_llama_70b.sh
#   plan            PLAN=1 bash examples/llama/train_llama_70b.sh
#
# Predicted memory: 54.5 GB per GPU.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ ! -f "$ROOT/pretrain_gpt.py" && -n "${SLURM_JOB_ID:-}" ]]; then # sbatch runs a copy of this file elsewhere
    SCRIPT=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
    ROOT=$(cd "$(dirname "$SCRIPT")/../.." && pwd)
fi

if [[ -n "${TOY:-}" ]]; then # the same flags on two ranks
    NNODES=1 GPUS_PER_NODE=2 TP=2 PP=1 GLOBAL_BATCH=2 TRAIN_ITERS=3 WARMUP_ITERS=1
fi
NNODES=${NNODES:-${SLURM_JOB_NUM_NODES:-8}}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
export NUM_GPUS=$((NNODES * GPUS_PER_NODE))

SAVE=${SAVE:-runs/llama-70b}
TP=${TP:-4}
PP=${PP:-4}
CP=${CP:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-1024}
TRAIN_ITERS=${TRAIN_ITERS:-100000}
WARMUP_ITERS=${WARMUP_ITERS:-2000}

MODEL=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 10000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP" # 2 and more for sequences above 8K
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

DATA=(--mock-data --vocab-size 32000) # without DATA_PATH, to measure speed
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
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_gpt.py "${FLAGS[@]}"
fi
if [[ -n "${SLURM_JOB_ID:-}" ]]; then # one task for each GPU; nothing else has to be set
    exec srun --ntasks-per-node="$GPUS_PER_NODE" --gpus-per-node="$GPUS_PER_NODE" --kill-on-bad-exit=1 \
        "${PYTHON:-python3}" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
