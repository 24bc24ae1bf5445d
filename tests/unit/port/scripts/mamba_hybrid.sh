#!/bin/bash
# A hybrid of Mamba and attention: a string with continuations, sizes by `case`, samples instead of iterations.
SIZE="${SIZE:-small}"
case "${SIZE}" in
    small) TP=1; WIDTH=1024; DEPTH=48; HEADS=16; BATCH=32 ;;
    large | huge)
        TP=4
        WIDTH=4096; DEPTH=56; HEADS=32
        BATCH=8
        ;;
    *) echo "no such size"; exit 1 ;;
esac

SAMPLES=73242188
WARMUP=50000
flags=" \
    --num-layers ${DEPTH} --hidden-size ${WIDTH} --num-attention-heads ${HEADS} --group-query-attention --num-query-groups 8 \
    --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 \
    --position-embedding-type none --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 --hidden-dropout 0.0 --seq-length 4096 --max-position-embeddings 4096 \
    --train-samples ${SAMPLES} --lr-warmup-samples ${WARMUP} --lr-decay-samples $((SAMPLES - WARMUP)) \
    --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --bf16 \
    --micro-batch-size 4 --global-batch-size ${BATCH} --split 99,1,0 \
    --tokenizer-type NullTokenizer --vocab-size 256000 --mock-data --use-mcore-models \
    --tensor-model-parallel-size ${TP} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

torchrun --nproc_per_node 8 ../../pretrain_mamba.py ${flags}
