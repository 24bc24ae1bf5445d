"""`petatron generate`: prompts of the command line and files of prompts, from any kind of checkpoint, in any layout."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from petatron.cli.main import main
from petatron.data.prompt.prompt_encoder import PromptEncoder
from petatron.data.tokenizer import HuggingFaceTokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_outputs import TokenEvent
from petatron.infer.sampling_params import SamplingParams
from petatron.pretrained.from_pretrained import from_pretrained
from tests.cli.text_model import train_text_model

LINES = [
    {"prompt": "Once", "id": "first"},
    {"text": "there was", "max_tokens": 3, "temperature": 0},
    {"messages": [{"role": "user", "content": "hi"}], "n": 2},
    {"prompt": "Once", "regex": "[ab]{4}", "url": "not an option"},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_text_model(tmp_path_factory.mktemp("generate") / "run")


Captured = pytest.CaptureFixture[str]


def generate(capsys: Captured, *words: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: Captured, *words: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) in (1, 2)
    return capsys.readouterr().err


def greedy_text(folder: Path, prompt: str, count: int) -> str:
    model, tokenizer = from_pretrained(folder), HuggingFaceTokenizer(folder / "model")
    params = SamplingParams(max_new_tokens=count, temperature=0.0, stop_ids=(256,))
    return Engine(model, tokenizer).complete([tokenizer.encode(prompt)], params)[0][0].text


def test_every_kind_of_checkpoint_continues_a_text(run: Path, capsys: Captured, tmp_path: Path):
    step = run / "step-00000001"
    exported = tmp_path / "huggingface"
    shutil.copytree(step / "model", exported)
    words = ["--prompt", "Hello", "--max-tokens", 12, "--temperature", 0]
    texts = [generate(capsys, folder, *words) for folder in (run, step, exported)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].rstrip("\n") == greedy_text(step, "Hello", 12).rstrip("\n")


def test_generation_reads_weights_and_no_other_state(run: Path, capsys: Captured, tmp_path: Path):
    """Of `state/` it reads the digests of the weights; without that folder a step's model is a Hugging Face folder like any other."""
    half = train_text_model(tmp_path / "half", "--bf16") / "step-00000001"  # its fp32 master weights are in state/
    words = ["--prompt", "Hello", "--max-tokens", 12, "--temperature", 0]
    for step in (Path(shutil.copytree(run / "step-00000001", tmp_path / "step-00000001")), half):
        expected = generate(capsys, step, *words)
        for file in (step / "state").glob("*.safetensors"):
            file.unlink()
        assert generate(capsys, step, *words) == generate(capsys, step / "model", *words) == expected
        weights = step / "model" / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert "does not have the content that was saved" in refused(capsys, step / "model", *words)
        weights.write_bytes(whole)
        shutil.rmtree(step / "state")
        assert generate(capsys, step / "model", *words) == expected
        assert "rank-00000.table.json is missing" in refused(capsys, step, *words)


def test_a_misspelt_flag_is_told_before_what_it_leaves_out(run: Path, capsys: Captured):
    assert main(["generate", str(run), "--prom", "a", "--temprature=1"]) == 2
    err = capsys.readouterr().err
    assert "--prom is not a known flag. Did you mean --prompt?" in err and "Did you mean --temperature?" in err
    assert main(["generate", str(run), "--prompt", "a", "--tpp", "2"]) == 2
    assert "--tpp is not a known flag. Did you mean --tp" in capsys.readouterr().err, "the closest is train's"


def test_a_beam_search_prints_the_best_answers(run: Path, capsys: Captured):
    from petatron.infer.beam.beam_search import BeamParams, beam_search

    model, tokenizer = from_pretrained(run), HuggingFaceTokenizer(run / "step-00000001" / "model")
    params = BeamParams(width=3, max_new_tokens=6, length_penalty=0.5, stop_ids=(256,))
    [hello, other] = beam_search(Engine(model), [tokenizer.encode("Hello"), tokenizer.encode("x")], params)
    words = ["--beam-width", 3, "--length-penalty", 0.5, "--max-tokens", 6]
    best = tokenizer.decode(hello[0].text_ids((256,)))
    assert generate(capsys, run, "--prompt", "Hello", "--echo", *words) == f"Hello{best}" + "\n" * (best[-1:] != "\n")
    said = generate(capsys, run, "--prompt", "Hello", "--prompt", "x", "--n", 2, *words)
    titles = re.findall(r"==> (.*) <==", said)
    scores = [(prompt, place, row[place - 1].score) for prompt, row in ((1, hello), (2, other)) for place in (1, 2)]
    assert titles == [f"prompt {prompt}, answer {place}, score {score:.4f}" for prompt, place, score in scores]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--length-penalty", 2], "Add --beam-width N"),
        (["--beam-width", 2, "--n", 3], "more than the 2 answers of --beam-width"),
        (["--beam-width", 2, "--temperature", 0.5], "--temperature has no effect on a beam search"),
        (["--beam-width", 0], "keeps no beam"),
        (["--beam-width", 500], "an engine reports"),
        (["--beam-width", 2, "--length-penalty", 99], "is not between -50 and 50"),
    ],
)
def test_a_beam_search_without_sense_is_refused(run: Path, capsys: Captured, words: list, why: str):
    assert why in refused(capsys, run, "--prompt", "Hello", *words)


def test_a_file_of_prompts_is_not_searched(run: Path, capsys: Captured, tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    words = ["--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out.jsonl", "--beam-width", 2]
    assert "--beam-width 2 is for --prompt" in refused(capsys, run, *words)


def test_several_prompts_and_answers_are_told_apart(run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from the input"))
    words = ["--max-tokens", 4, "--regex", "[a-z]{4}", "--seed", 3]
    said = generate(capsys, run, "--prompt", "one", "--prompt", "-", "--n", 2, "--echo", *words)
    titles = re.findall(r"==> (.*) <==", said)
    assert titles == [f"prompt {prompt}, answer {answer}" for prompt in (1, 2) for answer in (1, 2)]
    answers = re.findall(r"^(one|from the input)([a-z]{4})$", said, re.MULTILINE)
    assert [prompt for prompt, _ in answers] == ["one", "one", "from the input", "from the input"]
    assert len({text for _, text in answers}) > 1


def test_text_is_printed_as_it_comes(run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    """After each step what is certain has been printed."""
    printed: list[str] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (printed.append(capsys.readouterr().out), step(self))[1])
    assert main(["generate", str(run), "--prompt", "x", "--regex", "[a-z]{6}", "--temperature", "9"]) == 0
    assert [len(text) for text in printed] == [0, 1, 1, 1, 1, 1]


def test_logprobs_are_listed(run: Path, capsys: Captured):
    said = generate(capsys, run, "--prompt", "x", "--logprobs", 2, "--max-tokens", 3, "--regex", "a{3}")
    assert said.startswith("aaa\n") and len(re.findall(r"^ +-\d+\.\d{4}  'a' .*'.* -\d", said, re.MULTILINE)) == 3


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_answers(path: Path) -> dict[int, dict[str, Any]]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({answer["line"] for answer in answers}) == len(answers)
    return {answer["line"]: answer for answer in answers}


def test_a_file_of_prompts(run: Path, capsys: Captured, tmp_path: Path):
    prompts, out = write_lines(tmp_path / "prompts.jsonl", [*LINES[:2], "", *LINES[2:]]), tmp_path / "answers.jsonl"
    words = [run, "--prompts", prompts, "--max-tokens", 8, "--seed", 5]
    generate(capsys, *words, "--out", out)
    answers = read_answers(out)
    assert sorted(answers) == [1, 2, 4, 5], "lines are counted as an editor does"
    assert answers[1]["id"] == "first" and answers[1]["prompt_tokens"] == 4
    assert answers[2]["new_tokens"] <= 3 and answers[2]["text"] == greedy_text(run / "step-00000001", "there was", 3)
    assert len(answers[4]["answers"]) == 2
    assert re.fullmatch("[ab]{4}", answers[5]["text"])
    crowded = tmp_path / "crowded.jsonl"
    generate(capsys, *words, "--out", crowded, "--max-batch-size", 2, "--page-size", 4, "--no-prefix-caching")
    assert read_answers(crowded) == answers


def test_a_stopped_run_goes_on_where_it_stopped(
    run: Path, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts, out = write_lines(tmp_path / "prompts.jsonl", LINES), tmp_path / "answers.jsonl"
    words = ["generate", str(run), "--prompts", str(prompts), "--out", str(out), "--max-tokens", "6"]
    assert main(words) == 0
    whole = read_answers(out)
    kept = out.read_text().splitlines(keepends=True)[:2]
    out.write_text("".join(kept) + '{"line": 3, "tex')
    submitted: list[list[int]] = []
    submit = Engine.submit
    monkeypatch.setattr(
        Engine, "submit", lambda self, ids, params: (submitted.append(ids), submit(self, ids, params))[1]
    )
    capsys.readouterr()
    assert main(words) == 0
    assert "2 of 4 prompts are answered already" in capsys.readouterr().err
    assert read_answers(out) == whole and out.read_text().startswith("".join(kept))
    done = {json.loads(line)["line"] for line in kept}
    assert len(submitted) == sum(line.get("n", 1) for number, line in enumerate(LINES, 1) if number not in done)


def test_answers_are_in_the_order_of_their_prompts_at_the_end(run: Path, capsys: Captured, tmp_path: Path):
    """The first prompt has the longest answer, so that it ends last; also of a run that goes on."""
    lines = [{"prompt": "Once", "max_tokens": count} for count in (9, 5, 2)]
    prompts, out = write_lines(tmp_path / "prompts.jsonl", lines), tmp_path / "answers.jsonl"
    words = [run, "--prompts", prompts, "--out", out, "--ignore-eos"]
    generate(capsys, *words)
    whole = out.read_text()
    assert [json.loads(line)["line"] for line in whole.splitlines()] == [1, 2, 3]
    out.write_text(whole.splitlines(keepends=True)[2])
    generate(capsys, *words)
    assert out.read_text() == whole


def test_sigterm_says_how_to_go_on(run: Path, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = [{"prompt": "Once", "max_tokens": count} for count in (2, 9)]
    prompts, out = write_lines(tmp_path / "prompts.jsonl", lines), tmp_path / "answers.jsonl"
    step, steps = Engine.step, []

    def signalled_step(engine: Engine) -> list[TokenEvent]:
        steps.append(engine)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine)

    monkeypatch.setattr(Engine, "step", signalled_step)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(run), "--prompts", str(prompts), "--out", str(out), "--ignore-eos"])
    assert ended.value.code == 128 + signal.SIGTERM
    said = f"stopped: 1 of 2 answers are in {out}. The same command goes on from there."
    assert said in capsys.readouterr().err and list(read_answers(out)) == [1]


def test_flags_that_only_training_reads_are_named(run: Path, caplog: pytest.LogCaptureFixture):
    flags = ["--train-iters", "5", "--lr", "1e-3", "--device", "cpu"]
    assert main(["generate", str(run), "--prompt", "Once", "--max-tokens", "1", *flags]) == 0
    [warning] = [each.getMessage() for each in caplog.records if "only training reads" in each.getMessage()]
    assert warning.endswith(": --lr, --train-iters")


def test_other_settings_do_not_go_on(run: Path, capsys: Captured, tmp_path: Path):
    prompts, out = write_lines(tmp_path / "prompts.jsonl", [LINES[0]]), tmp_path / "answers.jsonl"
    words = [run, "--prompts", prompts, "--out", out, "--max-tokens", 3]
    generate(capsys, *words)
    said = refused(capsys, *words[:-1], 4, "--temperature", 0.5)
    assert "max_new_tokens: 3 then, 4 now; temperature: 1.0 then, 0.5 now" in said and "choose another --out" in said
    write_lines(prompts, [LINES[0], LINES[1]])
    assert re.search(r"prompts: .* then, .* now", refused(capsys, *words))
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("mine\n")
    assert "is no file of answers" in refused(capsys, *words[:-3], foreign, "--max-tokens", 3)
    assert foreign.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is not JSON"),
        ([1], "it is not an object"),
        ({"id": 3}, "one of prompt, text, messages; it has none of them"),
        ({"prompt": "a", "text": "b"}, "it has prompt and text"),
        ({"prompt": 3}, "prompt is not a text"),
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": "a" * 200}, "The prompt has 200 tokens"),
        ({"prompt": "a", "id": 1.5}, "id is neither a text nor a whole number"),
        ({"prompt": "a", "temprature": 1}, "temprature is not an option. Did you mean temperature?"),
        ({"prompt": "a", "temperature": "hot"}, 'temperature "hot" is not a number'),
        ({"prompt": "a", "temperature": -1}, "temperature -1.0 is not 0 or above"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens 1.5 is not a whole number"),
        ({"prompt": "a", "max_tokens": 500}, "leaves room for"),
        ({"prompt": "a", "n": 0}, "n 0 asks for no answer"),
        ({"prompt": "a", "stop": 3}, "stop 3 is neither a text nor a list"),
        ({"prompt": "a", "regex": "("}, "unclosed group"),
        ({"prompt": "a", "regex": 3}, "regex 3 is not a text"),
        ({"prompt": "a", "regex": "a", "json_schema": {}}, "are two constraints"),
        ({"messages": "hi"}, "messages is not a list"),
        ({"messages": [{"role": "user"}]}, 'not an object with "role" and "content"'),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(
    run: Path, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: Any, said: str
):
    monkeypatch.setattr("petatron.serve.open_engine.from_pretrained", None)  # nothing is loaded
    prompts, out = write_lines(tmp_path / "prompts.jsonl", [LINES[0], line]), tmp_path / "answers.jsonl"
    found = refused(capsys, run, "--prompts", prompts, "--out", out)
    assert f"{prompts}:2: " in found and said in found
    assert not out.exists()


def test_all_wrong_lines_are_named(run: Path, capsys: Captured, tmp_path: Path):
    prompts = write_lines(tmp_path / "prompts.jsonl", ["{"] * 12)
    found = refused(capsys, run, "--prompts", prompts, "--out", tmp_path / "out")
    assert "12 of 12 prompts" in found and f"{prompts}:10: " in found and "and 2 more" in found
    write_lines(prompts, [])
    assert "has no prompts" in refused(capsys, run, "--prompts", prompts, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--prompt TEXT or --prompts FILE says what to continue"),
        (["--prompt", "a", "--prompts", "b", "--out", "c"], "one of them alone"),
        (["--prompts", "b"], "--prompts b has no place for its answers"),
        (["--prompt", "a", "--out", "c"], "--out c is for --prompts"),
        (["--prompt", "-", "--prompt", "-"], "reads the input twice"),
        (["--prompt", "a", "--top-p", "7", "--top-k", "0"], "--top-p 7.0 is not a share"),
        (["--prompt", "a", "--top-p", "7", "--top-k", "0"], "--top-k 0 keeps no id"),
        (["--prompt", "a", "--page-size", "0"], "--page-size 0 is below 1"),
        (["--prompt", "a", "--json-schema", "nowhere.json"], "--json-schema nowhere.json cannot be read"),
        (["--prompt", "a", "--regex", "a", "--json-schema", __file__], "is not JSON"),
        (["--prompt", "a", "--fp32", "--bf16"], "and another precision are two"),
        (["--prompt", "a", "--hidden-size", "64"], "--hidden-size 64 contradicts"),
        (["--prompt", "a", "--bogus"], "--bogus is not a known flag"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "a", "--num-pages", "1"], "--num-pages 1 of 16 tokens are fewer"),
    ],
)
def test_a_wrong_command_line_is_refused(run: Path, capsys: Captured, words: list[str], said: str):
    assert said in refused(capsys, run, *words)


def test_a_checkpoint_that_is_none_is_refused(capsys: Captured, tmp_path: Path):
    assert "is not a folder" in refused(capsys, tmp_path / "nowhere", "--prompt", "a")
    assert "holds no checkpoint, and is no Hugging Face model" in refused(capsys, tmp_path, "--prompt", "a")


def test_a_missing_library_is_told_before_the_model_is_read(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("petatron.serve.open_engine.model_settings", None)
    assert "pip install 'petatron[serve]'" in refused(capsys, run, "--prompt", "a", "--regex", "a")


def test_what_a_tokenizer_puts_before_a_text_is_kept(run: Path, tmp_path: Path):
    """As that of Llama does."""
    content = json.loads((run / "step-00000001" / "model" / "tokenizer.json").read_text())
    start = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    encoder = PromptEncoder(HuggingFaceTokenizer(tmp_path))
    assert encoder.encode("hi") == [256, 104, 105]
    template = PromptEncoder(HuggingFaceTokenizer(run / "step-00000001" / "model"))
    assert template.encode("hi") == [104, 105]


@pytest.mark.slow
def test_ranks_answer_like_one_process(run: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path):
    prompts = write_lines(tmp_path / "prompts.jsonl", LINES)
    outs = [tmp_path / "alone.jsonl", tmp_path / "ranks.jsonl"]
    words = ["generate", str(run), "--prompts", str(prompts), "--max-tokens", "6", "--temperature", "0", "--out"]
    assert main([*words, str(outs[0])]) == 0
    assert main([*words, str(outs[1]), "--tp", "2"]) == 0, capfd.readouterr().err
    assert read_answers(outs[0]) == read_answers(outs[1])


def test_a_program_gets_the_text_as_it_is(run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    """Control characters are escaped for terminals alone, which would obey them."""
    words = (run, "--prompt", "Once", "--regex", r"\x1b{6}", "--max-tokens", 6)
    assert generate(capsys, *words) == 6 * "\x1b" + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate(capsys, *words) == 6 * r"\u001b" + "\n"


@pytest.mark.parametrize("text", ["a\udcff", "\ud800"])
def test_text_that_is_not_unicode(run: Path, capsys: Captured, tmp_path: Path, text: str):
    assert "not valid Unicode at character" in refused(capsys, run, "--prompt", text)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": text}) + "\n")
    said = refused(capsys, run, "--prompts", prompts, "--out", tmp_path / "out.jsonl")
    assert f"{prompts.name}" in said and "not valid Unicode" in said


def test_fp8_weights_of_a_checkpoint(run: Path, capsys: Captured):
    words = (run, "--prompt", "Once", "--temperature", 0, "--max-tokens", 5, "--fp8-weights")
    assert generate(capsys, *words) == generate(capsys, *words)


def test_drafts_of_a_checkpoint(tmp_path: Path, capsys: Captured):
    train_text_model(tmp_path / "run", "--mtp-num-layers", "1")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Once"}) + "\n")
    one = (tmp_path / "run", "--temperature", 0, "--max-tokens", 8)
    plain = generate(capsys, *one, "--prompt", "Once")
    for words in (("--prompt", "Once"), ("--prompts", prompts, "--out", tmp_path / "out.jsonl")):
        assert main(["generate", *map(str, one), *map(str, words), "--speculative-tokens", "2"]) == 0
        said = capsys.readouterr()
        assert re.search(
            r"speculative decoding: \d\.\d\d tokens per step; \d+ of \d+ drafts accepted \(\d+%\)", said.err
        )
        assert said.out == (plain if "--prompt" in words else "")
    assert read_answers(tmp_path / "out.jsonl")[1]["text"] == plain.rstrip("\n")


def test_drafts_need_a_depth(run: Path, capsys: Captured):
    said = refused(capsys, run, "--prompt", "Once", "--speculative-tokens", 2)
    assert "--speculative-tokens 2 drafts with multi-token prediction" in said
    assert "--speculative-tokens -1 is below 0" in refused(capsys, run, "--prompt", "Once", "--speculative-tokens", -1)


def test_a_file_of_prompts_that_is_not_there(run: Path, capsys: Captured, tmp_path: Path):
    said = refused(capsys, run, "--prompts", tmp_path / "nope.jsonl", "--out", tmp_path / "out.jsonl")
    assert f"{tmp_path / 'nope.jsonl'} does not exist" in said
