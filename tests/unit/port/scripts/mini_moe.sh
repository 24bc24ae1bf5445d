# The shortest form: one command, two ranks that a laptop has.
torchrun --nproc_per_node=2 pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel \
  --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 \
  --hidden-size 4096 --num-layers 32 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \
  --bf16 --use-mcore-models --transformer-impl transformer_engine --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 \
  --train-iters 100 --data-path /path/to/data --vocab-file /path/to/vocab.json --merge-file /path/to/merges.txt
