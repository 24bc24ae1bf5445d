"""Inference under Megatron's names: its flags as ours, answers in its form, the prompt loop, and the examples at toy size."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from petatron.base.errors import ConfigError
from petatron.cli.generation.generate import parser as generate_parser
from petatron.cli.main import main
from petatron.cli.serve.arguments import parser as serve_parser
from tests.cli.text_model import train_text_model
from tests.examples.example_scripts import ROOT, example_environment
from tests.load_deadline import scaled

MODEL = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 1024 --seq-length 1024 --fp16"
ENGINE = "--inference-max-seq-length 256 --inference-max-requests 8 --inference-dynamic-batching-buffer-size-gb 20"


@pytest.fixture
def table() -> ModuleType:
    return importlib.import_module("petatron.port.inference_flags")


@pytest.fixture
def answer_prompts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / "inference" / "gpt"), *sys.path])
    return importlib.import_module("answer_prompts")


def flags_of(table: ModuleType, line: str) -> list[str]:
    return table.generate_flags(table.read_arguments(line.split()))


def test_flags_have_our_names_and_megatrons_defaults(table: ModuleType):
    arguments = table.read_arguments(
        f"--load run {MODEL} {ENGINE} --tensor-model-parallel-size 2 --prompts a b --num-tokens-to-generate 5 --top_k 0 "
        "--return-log-probs --termination-id -1 --stop-words x y --attention-backend flash".split()
    )
    flags = table.generate_flags(arguments)
    options, layout = generate_parser().parse_known_args(["run", "--prompt", "a", *flags])
    assert (options.max_tokens, options.temperature, options.top_k, options.logprobs) == (5, 1.0, None, 0)
    assert (options.max_length, options.max_batch_size, options.stop, options.ignore_eos) == (256, 8, ["x", "y"], True)
    assert layout == ["--fp16", "--tensor-model-parallel-size", "2"]
    assert arguments.prompts == ["a", "b"] and arguments.return_log_probs
    notices = "\n".join(arguments.notices)
    assert "--inference-dynamic-batching-buffer-size-gb is accepted and changes nothing" in notices
    assert "the checkpoint says the model: --num-layers" in notices
    greedy = flags_of(table, "--load run --prompts a")
    assert greedy[:6] == ["--max-tokens", "30", "--temperature", "1.0", "--top-k", "1"]
    assert "--top-k" not in flags_of(table, "--load run --prompts a --top_p 0.9")


def test_a_tokenizer_that_is_unknown_here_is_left_to_the_checkpoint(table: ModuleType):
    arguments = table.read_arguments(
        "--load run --prompts a --tokenizer-type NullMultimodalTokenizer --vocab-file vocab.txt".split()
    )
    assert not [flag for flag in table.generate_flags(arguments) if "token" in flag and flag != "--max-tokens"]
    assert (
        "the checkpoint's tokenizer is used" in arguments.notices[-1]
        and "NullMultimodalTokenizer" in arguments.notices[-1]
    )
    ours = "--tokenizer-type TikTokenizer --tiktoken-pattern v2 --tokenizer-model multi.json".split()
    passed = flags_of(table, f"--load run --prompts a {' '.join(ours)}")
    assert [flag for flag in passed if flag in ours] == ours
    flags = flags_of(table, "--load run --prompts a --tokenizer_type GPT2BPETokenizer --vocab-file v --merge-file m")
    tokenizer = "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m".split()
    assert [flag for flag in flags if flag in tokenizer] == tokenizer
    assert flags_of(table, "--load run --prompts a --recompute-modules something_else --dataloader-type other")


def test_every_mapped_flag_is_one_of_ours(table: ModuleType):
    ours = {option for action in generate_parser()._actions for option in action.option_strings}
    served = {option for action in serve_parser()._actions for option in action.option_strings}
    for name, (flag, _) in table.RENAMED.items():
        assert flag in ours
        if name.startswith("--inference-") and flag != "--page-size":
            assert table.SERVER_NAMES.get(flag, flag) in served
    known = [*table.RENAMED, *table.WITHOUT_EFFECT, *table.REFUSED]
    assert len(known) == len(set(known)), "a flag has one answer"


def test_all_problems_are_told_at_once(table: ModuleType):
    line = (
        "stray --lora-path x --no-such-flag 3 --num-tokens-to-generate --termination-id 7 --prompt-file-num-truncate x"
    )
    with pytest.raises(ConfigError) as error:
        flags_of(table, line)
    text = str(error.value)
    assert text.startswith("8 problems")
    for said in ("stray", "--lora-path", "--no-such-flag", "--num-tokens-to-generate", "--termination-id 7"):
        assert said in text
    assert "--load is not given" in text and "--prompts or --prompt-file" in text


def test_the_server_takes_limits_of_the_engine(table: ModuleType):
    flags = table.server_flags(f"--load run --port 5001 {ENGINE} --max-tokens-to-oom 9 --temperature 1".split())
    assert flags == "--load run --port 5001 --max-length 256 --max-sequences 8 --temperature 1".split()
    with pytest.raises(ConfigError, match="--lora-path"):
        table.server_flags(["--lora-path", "x"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_text_model(tmp_path_factory.mktemp("inference") / "run")


def test_prompts_are_answered_as_megatrons_scripts_write_them(
    run: Path, answer_prompts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "answers.json"
    flags = ["--load", str(run), *MODEL.replace("--fp16", "").split(), "--num-tokens-to-generate", "4"]
    flags += ["--tokenizer-type", "ByteTokenizer", "--model-provider", "gpt"]
    asked = ["--prompts", "Hello", "two words", "--return-log-probs", "--output-path", str(out)]
    assert answer_prompts.main([*flags, *asked]) == 0
    answers = json.loads(out.read_text())
    assert [answers[number]["input_prompt"] for number in ("0", "1")] == ["Hello", "two words"]
    for answer in answers.values():
        count = answer["generated_length"]
        assert len(answer["generated_tokens"]) == len(answer["generated_log_probs"]) == count <= 4
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "Hello", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == answers["0"]["generated_text"].rstrip("\n")

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "Hello"}\n\n{"prompt": "never asked"}\n')
    more = ["--prompt-file", str(prompts), "--prompt-file-num-truncate", "1", "--output-path", str(out)]
    assert answer_prompts.main([*flags, *more]) == 0
    again = json.loads(out.read_text())
    assert list(again) == ["0"] and again["0"]["generated_text"] == answers["0"]["generated_text"]
    assert "generated_log_probs" not in again["0"]


def test_what_is_wrong_ends_without_a_traceback(
    answer_prompts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert answer_prompts.main(["--load", "x", "--lora-path", "y"]) == 2
    assert "--lora-path" in capsys.readouterr().err
    broken = tmp_path / "prompts.jsonl"
    broken.write_text("[]\n")
    for path in (broken, tmp_path / "none.jsonl"):
        assert answer_prompts.main(["--load", "x", "--prompt-file", str(path)]) == 1
        assert str(path) in capsys.readouterr().err


class _Api(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict]] = []

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({**body, "path": self.path, "key": self.headers["Authorization"]})
        refused = body["prompts"] == [""]
        answer = {"message": "An empty prompt needs add_BOS true."} if refused else {"text": [body["prompts"][0] + "!"]}
        self.send_response(400 if refused else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    http = HTTPServer(("127.0.0.1", 0), _Api)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def test_the_prompt_loop_asks_a_server(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    cli = importlib.import_module("text_generation_cli")
    monkeypatch.setenv("PETATRON_API_KEY", "secret")
    typed = iter(["Hello", "3", "Hello", "many", "", "1"])

    def typed_input(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed_input)
    assert cli.main([server]) == 0
    out = capsys.readouterr().out
    assert "Response:\nHello!" in out and "That is not a number of tokens." in out
    assert "the server refused it (400): An empty prompt needs add_BOS true." in out
    asked = _Api.bodies[0]
    assert asked == {"prompts": ["Hello"], "tokens_to_generate": 3, "path": "/api", "key": "Bearer secret"}
    with pytest.raises(RuntimeError, match="does not answer"):
        cli.ask("http://127.0.0.1:1/api", "Hello", 1)
    assert cli.main([]) == 2 and cli.main(["--help"]) == 0


@pytest.mark.docs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bash examples/inference/generate.sh", '"id": "tale"'),
        ("bash examples/inference/serve.sh", '"text":["Hello world'),
        ("torchrun --standalone --nproc_per_node=2 examples/run_simple_mcore_train_loop.py", "bitwise equal: True"),
    ],
)
def test_an_example_runs(command: str, said: str, tmp_path: Path):
    command = command.replace("examples/", f"{ROOT}/examples/")
    if command.startswith("torchrun"):
        command = f"{sys.executable} -m torch.distributed.run {command.removeprefix('torchrun')}"
    done = subprocess.run(
        command.split(),
        cwd=tmp_path,
        env=example_environment(TOY="1", TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=scaled(120),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert said in done.stdout


@pytest.mark.docs
@pytest.mark.timeout(600)
def test_two_ranks_of_torchrun_write_the_answers_of_one(run: Path, answer_prompts: ModuleType, tmp_path: Path):
    asked = [
        "--load",
        str(run),
        "--prompts",
        "Hello",
        "two words",
        "--num-tokens-to-generate",
        "4",
        "--return-log-probs",
    ]
    assert answer_prompts.main([*asked, "--output-path", str(tmp_path / "one.json")]) == 0
    script = ROOT / "examples" / "inference" / "gpt" / "gpt_dynamic_inference.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(
        [*torchrun, *asked, "--tensor-model-parallel-size", "2", "--output-path", "two.json"],
        cwd=tmp_path,
        env=example_environment(),
        capture_output=True,
        timeout=scaled(120),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for number in ("0", "1"):
        assert two[number]["generated_tokens"] == one[number]["generated_tokens"]
        assert two[number]["generated_log_probs"] == pytest.approx(one[number]["generated_log_probs"], abs=1e-5)
