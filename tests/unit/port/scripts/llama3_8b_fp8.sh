#!/bin/bash
# Llama 3 8B in FP8: defaults of arguments, data and precision chosen by conditions, a check that exits.
OUTPUT=${1:-"runs/llama3"}
TOKENIZER=${2:-"none"}
DATASET=${3:-"none"}
PRECISION="fp8"
LENGTH=8192
ENTRY="pretrain_gpt.py"

mkdir -p "$(dirname "$OUTPUT")"
if [ ! -f "$ENTRY" ]; then
    echo "start this where $ENTRY is"
    exit 1
fi

MODEL=(
    --use-mcore-models --transformer-impl transformer_engine
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length $LENGTH --max-position-embeddings $LENGTH
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)

TRAIN=(
    --train-samples 1953125 --lr-decay-samples 1949218 --lr-warmup-samples 3906
    --lr 0.0003 --min-lr 0.00003 --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --micro-batch-size 1 --global-batch-size 128 --bf16 --calculate-per-token-loss --cross-entropy-loss-fusion
)

EIGHT_BITS=()
if [[ "$PRECISION" == "fp8" ]]; then
    EIGHT_BITS+=("--fp8-format hybrid" "--fp8-recipe delayed" "--fp8-amax-history-len 1024" "--fp8-amax-compute-algo max")
fi

INPUT=()
if [[ "$DATASET" == "none" ]] || [[ -z "$TOKENIZER" ]]; then
    INPUT+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    INPUT+=("--data-path $DATASET" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
fi

torchrun --nproc_per_node 8 --nnodes 1 --master_addr ${MASTER_ADDR:-localhost} "$ENTRY" "${MODEL[@]}" "${TRAIN[@]}" \
    ${EIGHT_BITS[@]} --tensor-model-parallel-size 1 --context-parallel-size 2 \
    ${INPUT[@]} --save "$OUTPUT" --load "$OUTPUT" --save-interval 1000 \
    --tensorboard-dir "$OUTPUT/curves" --distributed-timeout-minutes 60 --eval-iters 32 --eval-interval 100 --log-interval 1
