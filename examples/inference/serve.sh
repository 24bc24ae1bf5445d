#!/bin/bash
# Serves a checkpoint over HTTP: OpenAI's endpoints and Megatron's PUT /api, on this machine alone unless HOST says otherwise.
#
#   full size       CHECKPOINT=runs/llama-70b TP=8 PORT=5000 bash examples/inference/serve.sh
#   here and now    TOY=1 bash examples/inference/serve.sh     (starts it, asks it both ways, and ends it)
#
# Ask it:
#   curl 'http://localhost:5000/api' -X PUT -H 'Content-Type: application/json' -d '{"prompts": ["Hello world"], "tokens_to_generate": 1}'
#   curl 'http://localhost:5000/v1/completions' -H 'Content-Type: application/json' -d '{"prompt": "Hello world", "max_tokens": 16}'
#   python tools/text_generation_cli.py localhost:5000
#
# Another HOST needs a key for clients (PETATRON_API_KEY): docs/serving.md. What fits: petatron plan cache CHECKPOINT.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z "${PYTHON:-}" ]]; then # the environment that `make` installs, if it is there
    PYTHON=$(command -v "$ROOT/.venv/bin/python" || command -v python3)
fi
export PYTHON PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

if [[ -n "${TOY:-}" ]]; then
    FOLDER=$(mktemp -d -t petatron-toy-XXXXXX)
    bash "$ROOT/examples/inference/tiny_checkpoint.sh" "$FOLDER/run"
    CHECKPOINT="$FOLDER/run"
    PORT=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi

FLAGS=(
    --load "$CHECKPOINT"
    --host "${HOST:-127.0.0.1}"
    --port "${PORT:-5000}"
    --tp "${TP:-1}" # ranks that split every matrix; as many are started
)
if [[ -z "${TOY:-}" ]]; then
    exec "$PYTHON" "$ROOT/tools/run_text_generation_server.py" "${FLAGS[@]}"
fi

"$PYTHON" "$ROOT/tools/run_text_generation_server.py" "${FLAGS[@]}" &
SERVER=$!
trap 'kill "$SERVER" 2> /dev/null || true' EXIT
URL="http://127.0.0.1:$PORT"
until curl --silent --fail "$URL/health" > /dev/null; do # it loads the model first
    kill -0 "$SERVER"
    sleep 0.5
done
curl --silent --show-error --fail "$URL/api" -X PUT -H 'Content-Type: application/json' -d '{"prompts": ["Hello world"], "tokens_to_generate": 1}'
echo
curl --silent --show-error --fail "$URL/v1/completions" -H 'Content-Type: application/json' -d '{"prompt": "Hello world", "max_tokens": 4}'
echo
printf 'Hello world\n4\n' | "$PYTHON" "$ROOT/tools/text_generation_cli.py" "127.0.0.1:$PORT"
kill "$SERVER"
wait "$SERVER"
