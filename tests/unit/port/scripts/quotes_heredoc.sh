#!/bin/bash
# Quotes of every kind, a here-document that looks like flags, eval of a string.
cat > ds_config.json <<EOF
{ "train": "--num-layers 999 ' \" $(touch /tmp/never) `touch /tmp/never`" }
EOF
cat <<-'END'
	--hidden-size 1
	END
name='run one'
LAYOUT='([0]*1+[1]*3)'
CMD="python pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4"
CMD="$CMD --num-experts 4 --moe-layer-freq '$LAYOUT' --seq-length 128 --max-position-embeddings 128"
CMD="$CMD --wandb-exp-name \"$name\" --wandb-project toys"
CMD="${CMD} --micro-batch-size=2 --global-batch-size=4 --train-iters=10 --lr=1e-3 --mock-data --vocab_size=1000"
CMD="${CMD} --tokenizer-type NullTokenizer"
echo "$CMD"
eval $CMD 2>&1 | tee "log of ${name}.txt"
