#!/bin/bash
# Mixtral 8x7B: experts in parallel, names of the environment with defaults.
PER_NODE=8
NODES=${SLURM_NNODES:-"4"}
RANK_OF_NODE=${RANK:-"0"}

ATTENTION="--num-attention-heads 32 --group-query-attention --num-query-groups 8 --position-embedding-type rope --rotary-base 1000000"
LAYERS="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --normalization RMSNorm --swiglu --disable-bias-linear"
EXPERTS=(
    --num-experts 8 --moe-router-topk 2
    --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
if [ -n "${WANDB_API_KEY}" ]; then
    EXPERTS+=(--wandb-project ${WANDB_PROJECT:-"mixtral"})
fi
torchrun --nproc_per_node=$PER_NODE --nnodes=$NODES --node_rank=$RANK_OF_NODE pretrain_gpt.py \
    $LAYERS $ATTENTION ${EXPERTS[@]} --untie-embeddings-and-output-weights --no-position-embedding \
    --seq-length 4096 --max-position-embeddings 32768 --no-masked-softmax-fusion --use-mcore-models \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 \
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 \
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 \
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 8 \
    --expert-model-parallel-size 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
