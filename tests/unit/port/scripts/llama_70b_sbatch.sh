#!/bin/bash
#SBATCH --job-name=llama-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00   # a day

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
module load cuda
source /opt/venv/bin/activate

TP=4; PP=4; CP=1
WORLD=$SLURM_NTASKS
DP=$(( WORLD / (TP * PP * CP) ))
ARGS="--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --context-parallel-size $CP --sequence-parallel"
ARGS="$ARGS --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8"
ARGS+=" --group-query-attention --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm"
ARGS+=" --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
ARGS+=" --micro-batch-size 1 --global-batch-size $((DP * 64)) --lr 3e-4 --min-lr 3e-5 --train-iters 100000"
ARGS+=" --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 --bf16"
ARGS+=" --use-mcore-models --transformer-impl transformer_engine"
ARGS+=" --data-path /path/to/data --vocab-file /path/to/vocab.json --merge-file /path/to/merges.txt"

srun --mpi=none --container-image=pytorch bash -c "
    export RANK=\$SLURM_PROCID
    python -u /workspace/megatron/pretrain_gpt.py $ARGS
"
