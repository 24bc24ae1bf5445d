#!/bin/bash
# T5 220M (an encoder and a decoder of 12 layers each, with learned positions, as Megatron's) on 8 GPUs: 8 replicas that share the
# optimizer state.
#
#   sentences       petatron data preprocess --input corpus.jsonl --output-prefix corpus --split-sentences \
#                   --tokenizer-type BertWordPieceCase --vocab-file vocab.txt
#   on the node     DATA_PATH=corpus_text_sentence VOCAB_FILE=vocab.txt bash examples/t5/train_t5_220m_distributed.sh
#   here and now    TOY=1 bash examples/t5/train_t5_220m_distributed.sh
#   plan            PLAN=1 bash examples/t5/train_t5_220m_distributed.sh
#
# Predicted memory: 11.6 GB per GPU.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if [[ -n "${TOY:-}" ]]; then # the same flags on two ranks
    NNODES=1 GPUS_PER_NODE=2 MICRO_BATCH=2 GLOBAL_BATCH=8 TRAIN_ITERS=3 DECAY_ITERS=3
fi
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
export NUM_GPUS=$((NNODES * GPUS_PER_NODE))

SAVE=${SAVE:-runs/t5-220m}
MICRO_BATCH=${MICRO_BATCH:-64}
GLOBAL_BATCH=${GLOBAL_BATCH:-512}
TRAIN_ITERS=${TRAIN_ITERS:-1000000}
DECAY_ITERS=${DECAY_ITERS:-1000000}

MODEL=(
    --model-type t5 # pretrain_t5.py implies it
    --encoder-num-layers 12
    --decoder-num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
    --init-method-std 0.015
    --openai-gelu # the tanh form of GELU
)

LAYOUT=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style linear
    --lr-decay-iters "$DECAY_ITERS"
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    --bf16
)

DATA=(--mock-data --vocab-size 30622) # without DATA_PATH, to measure speed
if [[ -n "${DATA_PATH:-}" ]]; then
    DATA=(
        --data-path "$DATA_PATH"
        --split 99982,9,9
        --vocab-file "$VOCAB_FILE"
        --vocab-extra-ids 100 # sentinels, one for each corrupted span
        --tokenizer-type BertWordPieceCase
    )
fi

OUTPUT=(
    --save "$SAVE"
    --load "$SAVE" # the same command continues after a stop
    --save-interval 10000
    --log-interval 100
    --eval-interval 1000
    --eval-iters 10
)

FLAGS=("${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}")
if [[ -n "${TOY:-}${PLAN:-}" ]]; then
    exec bash "$ROOT/examples/without_gpus.sh" pretrain_t5.py "${FLAGS[@]}"
fi
exec torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS_PER_NODE" --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$ROOT/pretrain_t5.py" "${FLAGS[@]}"
