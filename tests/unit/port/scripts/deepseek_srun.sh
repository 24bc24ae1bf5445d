#!/bin/bash
# Latent attention and fine-grained experts; a dry list of nodes, a loop over batch sizes, run_cmd in a variable.
NODES=2
run_cmd="cd /workspace && python -u pretrain_gpt.py \
    --multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
    --num-layers 28 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 \
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 \
    --moe-layer-freq '([0]*1+[1]*27)' --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --untie-embeddings-and-output-weights --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 \
    --expert-model-parallel-size 8 --bf16 --lr 2e-4 --train-iters 1000 --lr-decay-style constant \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 102400 --use-distributed-optimizer"
for MBS in 1 2 4; do
    srun -N $NODES --ntasks-per-node=8 --output=log_$MBS sh -c "${run_cmd} --micro-batch-size $MBS --global-batch-size 256"
done
