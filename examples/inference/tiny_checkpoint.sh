#!/bin/bash
# Trains a tiny model of bytes for a few steps into the folder $1: the checkpoint of the examples at TOY=1. Its text is noise.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z "${PYTHON:-}" ]]; then # the environment that `make` installs, if it is there
    PYTHON=$(command -v "$ROOT/.venv/bin/python" || command -v python3)
fi
exec "$PYTHON" "$ROOT/pretrain_gpt.py" --preset tiny-llama --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
    --max-position-embeddings 256 --tokenizer-type ByteTokenizer --mock-data --micro-batch-size 2 --train-iters 2 --lr 1e-3 \
    --eval-iters 0 --num-workers 0 --live off --save "$1" >&2
