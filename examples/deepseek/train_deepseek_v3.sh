#!/bin/bash
# DeepSeek-V3 671B on 2,048 GPUs: 16 pipeline ranks, the 256 experts over 64 ranks, 128 replicas, FP8 in blocks, no tensor parallelism.
#
#   on every node   NODE_RANK=0 MASTER_ADDR=node000 DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer \
#                   bash examples/deepseek/train_deepseek_v3.sh
#   here and now    TOY=1 bash examples/deepseek/train_deepseek_v3.sh
#   plan            PLAN=1 bash examples/deepseek/train_deepseek_v3.sh
#
# Predicted memory: 57.1 GB per GPU.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if [[ -n "${TOY:-}" ]]; then # the same flags on two ranks
    NNODES=1 GPUS_PER_NODE=2 PP=2 EP=1 GLOBAL_BATCH=4 TRAIN_ITERS=3 WARMUP_ITERS=1
    export TOY_FLAGS="--pipeline-model-parallel-layout Et|t|t|tmL" # of a toy's four layers
fi
NNODES=${NNODES:-256}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
export NUM_GPUS=$((NNODES * GPUS_PER_NODE))

SAVE=${SAVE:-runs/deepseek-v3}
PP=${PP:-16}
EP=${EP:-64}
# Two stages on each pipeline rank: the embedding with one layer, 29 pairs, one layer, and the last with prediction and loss.
STAGES=${STAGES:-"Et|(tt|)*29t|tmL"}
GLOBAL_BATCH=${GLOBAL_BATCH:-15360}
TRAIN_ITERS=${TRAIN_ITERS:-240000}
WARMUP_ITERS=${WARMUP_ITERS:-2000}

MODEL=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --multi-latent-attention
    --q-lora-rank 1536
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
    --mscale 1.0
    --mscale-all-dim 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.006
    --mtp-num-layers 1 # one layer more predicts the token after the next
)

EXPERTS=(
    --num-experts 256
    --moe-layer-freq "([0]*3+[1]*58)" # 3 dense layers first
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-num-groups 8
    --moe-router-group-topk 4 # a token's experts are in 4 of 8 groups: fewer nodes to reach
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias # balances loads without a loss
    --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-router-dtype fp32
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)

PRECISION=(
    --fp8-format e4m3
    --fp8-recipe blockwise # a scale for each 128 x 128 block of weights, and each 128 values of a token
)

LAYOUT=(
    --pipeline-model-parallel-size "$PP"
    --pipeline-model-parallel-layout "$STAGES"
    --expert-model-parallel-size "$EP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

MEMORY=(
    --recompute-memory-budget-gb 45 # what is recomputed is chosen; without it activations would take 231 GB
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr 2.2e-4
    --min-lr 2.2e-5
    --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP_ITERS"
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

DATA=(--mock-data --vocab-size 129280) # without DATA_PATH, to measure speed
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

FLAGS=("${MODEL[@]}" "${EXPERTS[@]}" "${PRECISION[@]}" "${LAYOUT[@]}" "${MEMORY[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}")
if [[ -n "${TOY:-}${PLAN:-}" ]]; then
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_gpt.py "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
