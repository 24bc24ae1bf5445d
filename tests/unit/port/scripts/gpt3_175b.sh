#!/bin/bash
# The largest GPT-3: one array for each topic, paths as arguments of the script.
set -x
NODES=${NODES:-128}
GPUS=8
echo "$((NODES * GPUS)) GPUs"

SAVE_TO=$1       # folder of checkpoints
CURVES=$2
BPE_VOCAB=$3     # vocab.json
BPE_MERGES=$4    # merges.txt
CORPUS=$5

LAUNCH=(--nnodes $NODES --nproc_per_node $GPUS --rdzv_backend c10d --rdzv_endpoint "head:29400")

SHAPE=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96   # 175 billion parameters
    --max-position-embeddings 2048 --seq-length 2048
    --init-method-std 0.006
    --attention-backend flash
)

SPLIT=(
	--pipeline-model-parallel-size 16
	--tensor-model-parallel-size 8
)

OPTIMIZER=(
    --lr 6.0e-5 --min-lr 6.0e-6
    --lr-decay-style cosine --lr-decay-iters 430000 --lr-warmup-fraction .001
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
)

BATCHES=(--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 128 128 5859375 --train-iters 500000 --fp16)

FILES=(
    --vocab-file $BPE_VOCAB
    --merge-file $BPE_MERGES
    --data-path $CORPUS --split 949,50,1
    --save $SAVE_TO
    --load $SAVE_TO
    --save-interval 10000
    --tensorboard-dir $CURVES
)

torchrun ${LAUNCH[@]} pretrain_gpt.py ${SHAPE[@]} ${SPLIT[@]} \
    ${OPTIMIZER[@]} ${BATCHES[@]} \
    ${FILES[@]} --log-interval 100 --eval-interval 1000 --eval-iters 10
