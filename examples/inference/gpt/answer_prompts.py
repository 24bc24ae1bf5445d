"""Answers the prompts of a command line of Megatron's with `petatron generate`, and writes answers as its scripts do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from petatron.base.errors import ConfigError, PetatronError  # noqa: E402
from petatron.cli.main import main as petatron  # noqa: E402
from petatron.mesh.launch.environment import read_environment  # noqa: E402
from petatron.port.inference_flags import InferenceArguments, generate_flags, read_arguments  # noqa: E402


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; only the first rank prints and writes."""
    try:
        arguments = read_arguments(argv)
        flags = generate_flags(arguments)
        is_first = read_environment().rank == 0
        prompts = _prompts(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except PetatronError as error:
        print(error, file=sys.stderr)
        return 1
    if is_first:
        print("".join(f"note: {notice}\n" for notice in arguments.notices), end="", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder, "prompts.jsonl"), Path(folder, "answers.jsonl")
        asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        assert arguments.checkpoint is not None
        words = ["generate", arguments.checkpoint, "--prompts", str(asked), "--out", str(answers), *flags]
        code = _generate(words)
        if code == 0 and is_first:
            _write(arguments, prompts, [json.loads(line) for line in answers.read_text().splitlines()])
    return code


def _generate(words: Sequence[str]) -> int:
    """Returns the exit code of `petatron generate`. A rank with peers ends its process when it is done, so it gets a process of its own."""
    if read_environment().launcher == "single":
        return petatron(words)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen([sys.executable, "-m", "petatron", *words], env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sent, _: process.send_signal(sent))
    code = process.wait()
    return code if code >= 0 else 128 - code


def _prompts(arguments: InferenceArguments) -> list[str]:
    """Returns the prompts of the flags or of the file, whose lines are JSON objects with `text` or `prompt`."""
    if arguments.prompt_file is None:
        return arguments.prompts
    try:
        lines = Path(arguments.prompt_file).read_text().splitlines()
        records = [json.loads(line) for line in lines if line.strip()][: arguments.prompt_limit]
        return [str(record["text"] if "text" in record else record["prompt"]) for record in records]
    except OSError as error:
        raise PetatronError(f"--prompt-file {arguments.prompt_file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        rule = "has a line that is not a JSON object with text or prompt"
        raise PetatronError(f"--prompt-file {arguments.prompt_file} {rule}: {error}.") from error


def _write(arguments: InferenceArguments, prompts: Sequence[str], answers: Sequence[dict]) -> None:
    """Writes one JSON object with an entry for each prompt, by its number, or prints the texts."""
    results = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        entries = answer.get("logprobs", [])
        results[str(number)] = {
            "input_prompt": prompt,
            "generated_text": answer["text"],
            "generated_tokens": [entry["token"] for entry in entries],
            "generated_length": answer["new_tokens"],
            "finish_reason": answer["finish_reason"],
        }
        if arguments.return_log_probs or arguments.value_of("--logprobs"):
            results[str(number)]["generated_log_probs"] = [entry["logprob"] for entry in entries]
        if arguments.value_of("--logprobs"):
            results[str(number)]["generated_top_n_logprobs"] = [entry["top"] for entry in entries]
        print(f"{prompt}{answer['text']}\n")
    if arguments.output_path is not None:
        Path(arguments.output_path).write_text(json.dumps(results, indent=1) + "\n")
