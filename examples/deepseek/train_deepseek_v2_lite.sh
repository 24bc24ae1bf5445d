#!/bin/bash
# DeepSeek-V2-Lite 16B on one node of 8 GPUs: the 64 experts over 8 ranks, 8 replicas of the rest.
#
#   full size       DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer \
#                   bash examples/deepseek/train_deepseek_v2_lite.sh
#   here and now    TOY=1 bash examples/deepseek/train_deepseek_v2_lite.sh
#   plan            PLAN=1 bash examples/deepseek/train_deepseek_v2_lite.sh
#
# Predicted memory: 57.5 GB per GPU.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if [[ -n "${TOY:-}" ]]; then # the same flags on two ranks
    NNODES=1 GPUS_PER_NODE=2 EP=2 GLOBAL_BATCH=4 TRAIN_ITERS=3 WARMUP_ITERS=1
fi
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
export NUM_GPUS=$((NNODES * GPUS_PER_NODE))

SAVE=${SAVE:-runs/deepseek-v2-lite}
EP=${EP:-8}
GLOBAL_BATCH=${GLOBAL_BATCH:-512}
TRAIN_ITERS=${TRAIN_ITERS:-500000}
WARMUP_ITERS=${WARMUP_ITERS:-2000}

MODEL=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 10944
    --num-attention-heads 16
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --qk-layernorm # norms of the latents
    --seq-length 4096
    --max-position-embeddings 163840
    --position-embedding-type yarn # rotary positions, scaled for contexts 40 times as long
    --rotary-base 10000
    --rotary-scaling-factor 40
    --original-max-position-embeddings 4096
    --mscale 0.707
    --mscale-all-dim 0.707
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

EXPERTS=(
    --num-experts 64
    --moe-layer-freq "([0]*1+[1]*26)" # one dense layer first
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816 # two shared experts
    --moe-router-topk 6
    --moe-router-pre-softmax # weights of the chosen experts do not add up to 1
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-router-dtype fp32
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)

LAYOUT=(
    --expert-model-parallel-size "$EP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr 4.2e-4
    --min-lr 4.2e-5
    --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP_ITERS"
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

DATA=(--mock-data --vocab-size 102400) # without DATA_PATH, to measure speed
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

FLAGS=("${MODEL[@]}" "${EXPERTS[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}")
if [[ -n "${TOY:-}${PLAN:-}" ]]; then
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_gpt.py "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
