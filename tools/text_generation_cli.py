"""Asks a running server for text, prompt after prompt: `python tools/text_generation_cli.py localhost:5000`.

It sends `PUT /api`, as tools/run_text_generation_server.py answers. A server with keys takes the one in PETATRON_API_KEY.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

_USAGE = "usage: python tools/text_generation_cli.py HOST:PORT"
_TIMEOUT_S = 600.0


def ask(url: str, prompt: str, num_tokens: int) -> str:
    """Returns the text with its prompt; `RuntimeError` with the server's reason, or with why it cannot be reached."""
    body = json.dumps({"prompts": [prompt], "tokens_to_generate": num_tokens}).encode()
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if key := os.environ.get("PETATRON_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, body, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)["text"][0]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the server refused it ({error.code}): {_reason(error.read())}") from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise RuntimeError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


def _reason(content: bytes) -> str:
    """Returns the message of an answer that may be JSON."""
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    message = answer.get("message", answer.get("error", text)) if isinstance(answer, dict) else answer
    return str(message.get("message", message) if isinstance(message, dict) else message)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    address = argv[0].removeprefix("http://").rstrip("/").removesuffix("/api")
    while True:
        try:
            prompt = input("Enter prompt: ")
            count = input("Enter number of tokens to generate: ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not count.strip().isdecimal():
            print("That is not a number of tokens.")
            continue
        try:
            print(f"Response:\n{ask(f'http://{address}/api', prompt, int(count))}")
        except RuntimeError as error:
            print(f"Error: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
