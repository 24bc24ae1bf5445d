# A listing whose backslashes were lost, as on a web page.
GPUS_PER_NODE=8 NNODES=8
TP=4
PP=4
HIDDEN_SIZE=8192
torchrun
--nproc_per_node=$GPUS_PER_NODE
--nnodes=$NNODES
pretrain_gpt.py
--tensor-model-parallel-size $TP
--pipeline-model-parallel-size $PP
--sequence-parallel
--num-layers 80
--hidden-size $HIDDEN_SIZE
--num-attention-heads 64
--seq-length 4096
--max-position-embeddings 4096
--micro-batch-size 1
--global-batch-size 1024
--lr 3e-4
--train-iters 100000
--lr-decay-style cosine
--lr-warmup-iters 2000
--weight-decay 0.1
--clip-grad 1.0
--bf16
--use-mcore-models
--transformer-impl transformer_engine
--data-path /path/to/data
--vocab-file /path/to/vocab.json
--merge-file /path/to/merges.txt
