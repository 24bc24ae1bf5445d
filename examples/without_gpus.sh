#!/bin/bash
# What the training scripts of this folder do without a cluster. They call it with their entry point and all of their flags:
#
#   TOY=1    trains the flags on this machine: `--toy` shrinks the model, batches and length are the script's toy values
#   PLAN=1   predicts the memory of every pipeline rank at the script's number of GPUs; DEVICE_MEMORY_GB says whether it fits
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z "${PYTHON:-}" ]]; then # the environment that `make` installs, if it is there
    PYTHON=$(command -v "$ROOT/.venv/bin/python" || command -v python3)
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
ENTRY=$1
shift

if [[ -n "${PLAN:-}" ]]; then
    exec "$PYTHON" -m petatron plan memory "$@" --world-size "$NUM_GPUS" --device-memory-gb "${DEVICE_MEMORY_GB:-80}"
fi

FOLDER=$(mktemp -d -t petatron-toy-XXXXXX)
# A typed flag wins over --toy, which shrinks what a file says: so the flags become a file first.
if ! "$PYTHON" -m petatron config show "$@" --world-size "$NUM_GPUS" --yaml > "$FOLDER/flags.yaml" 2> "$FOLDER/notes"; then
    cat "$FOLDER/notes" >&2
    exit 2
fi
read -ra TOY_FLAGS <<< "${TOY_FLAGS:-}" # what --toy cannot shrink
exec "$PYTHON" "$ROOT/$ENTRY" --config "$FOLDER/flags.yaml" --toy --save "$FOLDER/run" --load "$FOLDER/run" \
    --log-interval 1 --eval-iters 0 --live off ${TOY_FLAGS[@]+"${TOY_FLAGS[@]}"}
