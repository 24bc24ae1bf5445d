#!/bin/bash
# Answers a file of prompts offline, with all of the engine's throughput.
#
#   full size       CHECKPOINT=runs/llama-70b TP=8 PROMPTS=prompts.jsonl OUT=answers.jsonl bash examples/inference/generate.sh
#   here and now    TOY=1 bash examples/inference/generate.sh
#
# A line of the file is {"prompt": "Once upon a time"}, perhaps with an id and options of its own (max_tokens, temperature, ...); a line of
# the answers has its number and the text. A command that was stopped goes on where it was. The layout of training does not matter.
# What fits: petatron plan cache CHECKPOINT.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z "${PYTHON:-}" ]]; then # the environment that `make` installs, if it is there
    PYTHON=$(command -v "$ROOT/.venv/bin/python" || command -v python3)
fi
export PYTHON PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

if [[ -n "${TOY:-}" ]]; then
    FOLDER=$(mktemp -d -t petatron-toy-XXXXXX)
    bash "$ROOT/examples/inference/tiny_checkpoint.sh" "$FOLDER/run"
    printf '{"prompt": "Once upon a time", "id": "tale"}\n{"prompt": "def ", "temperature": 0}\n' > "$FOLDER/prompts.jsonl"
    CHECKPOINT="$FOLDER/run" PROMPTS="$FOLDER/prompts.jsonl" OUT="$FOLDER/answers.jsonl" MAX_TOKENS=16
fi

FLAGS=(
    --prompts "$PROMPTS"
    --out "${OUT:-answers.jsonl}"
    --max-tokens "${MAX_TOKENS:-256}"
    --temperature "${TEMPERATURE:-0.7}"
    --top-p "${TOP_P:-0.95}"
    --tp "${TP:-1}" # ranks that split every matrix; as many are started
    --dp "${DP:-1}" # replicas that share the prompts
)
"$PYTHON" -m petatron generate "$CHECKPOINT" "${FLAGS[@]}"
if [[ -n "${TOY:-}" ]]; then
    cat "$OUT"
fi
