"""One model measured three ways: lm_eval with the model in process, lm_eval over HTTP, and `petatron eval` have the same scores."""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.cli.main import main
from petatron.data.tokenizer import ByteTokenizer, Tokenizer
from petatron.evaluate.eval_task import ContextLimits
from petatron.evaluate.score_sequences import score_sequences
from petatron.evaluate.task_list import TaskSettings, build_tasks
from petatron.infer.engine_options import EngineOptions
from petatron.integrations.lm_eval.lm_eval_model import PetatronLM
from petatron.mesh.mesh import ParallelMesh
from petatron.serve.open_engine import CheckpointEngine, model_settings
from petatron.serve.served_model_properties import ModelCard
from tests.integrations.lm_eval.bos_tokenizer import BOS, bos_tokenizer
from tests.serve.live_server import LiveServer, live_server

POSITIONS = 64
INPUTS = POSITIONS - 1
"""Over HTTP a prompt and its one new token share the positions, so that this is the longest window both ways have."""
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 --seq-length 64 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --max-position-embeddings 64 --mock-data --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --train-iters 1 --device cpu --init-method-std 0.3"
).split()
CHOICES = [
    {"context": f"{number} and {number} is", "choices": ["even", "odd one", "none"], "answer": number % 3}
    for number in range(9)
]
LONG = {"context": "so it went on and on, " * 5, "choices": ["yes", "no"], "answer": 1}
EMPTY = {"context": "", "choices": ["yes", "no way"], "answer": 0}
TEXTS = [{"text": "The cat sat."}, {"text": "It did not want to leave the mat. " * 6}, {"text": "é!"}]
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    "fewshot_config: {sampler: first_n}\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
    "answer": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: 'cat'\n"
    "generation_kwargs: {until: [' ', 'e'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n",
}


def save_model(folder: Path, tokenizer: Tokenizer) -> None:
    run = petatron.load(None, [*MODEL, "--vocab-size", str(tokenizer.vocab_size)], world_size=1)
    petatron.build_model(run, ParallelMesh.single()).save_pretrained(folder, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, and lm_eval's tasks on local files."""
    folder = tmp_path_factory.mktemp("lm_eval")
    save_model(folder / "model", ByteTokenizer())
    for name, records in (("choice", [*CHOICES, EMPTY]), ("text", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for name, content in TASKS.items():
        data = folder / ("text.jsonl" if name == "answer" else f"{name}.jsonl")
        kwargs = f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}\n"
        head = f"task: mine_{name}\ndataset_path: json\n{kwargs}test_split: test\nfewshot_split: test\n"
        (folder / f"{name}.yaml").write_text(head + content)
    return folder


def in_process(folder: Path, **model_args: Any) -> PetatronLM:
    given = {"pretrained": str(folder), "dtype": "float32", "device": "cpu", **model_args}
    return PetatronLM.create_from_arg_obj(given, {"max_batch_size": None})


@pytest.fixture(scope="module")
def model(folder: Path) -> PetatronLM:
    return in_process(folder / "model", max_length=INPUTS)


def serve(folder: Path) -> Any:
    engine = CheckpointEngine(
        model_settings(folder, options=EngineOptions(num_pages=64, page_size=16, max_sequences=8))
    )
    return live_server(engine, card=ModelCard.of_engine(engine, name="tiny", created_s=1, stop_ids=engine.stop_ids))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serve(folder / "model") as found:
        yield found


def http_args(server: LiveServer, folder: Path, **more: Any) -> dict[str, Any]:
    """What a user types after --model_args; a window of n inputs is max_length n + 2 there."""
    return {
        "base_url": f"{server.url}/v1/completions",
        "model": "tiny",
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": INPUTS + 2,
        **more,
    }


def evaluate(folder: Path, tasks: list[str], **settings: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(tasks=tasks, task_manager=manager, bootstrap_iters=0, **settings)
    assert found is not None
    return found


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def petatron_eval(folder: Path, model: Path, *words: str) -> dict[str, float]:
    out = folder / "out.json"
    assert main(["eval", str(model), "--device", "cpu", "--out", str(out), *words]) == 0
    [result] = json.loads(out.read_text())["checkpoints"][0]["results"].values()
    return {name: metric["value"] for name, metric in result["metrics"].items()}


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """What the model answered to every request of a task, by document."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for [answer] in sample["resps"]]


def test_three_ways_have_the_same_scores(folder: Path, model: PetatronLM, server: LiveServer):
    tasks = ["mine_choice", "mine_text", "mine_answer"]
    ours = evaluate(folder, tasks, model=model)
    http = http_args(server, folder / "model")
    theirs = evaluate(folder, tasks, model="local-completions", model_args=http)
    for task in tasks:
        for name, value in ours["results"][task].items():
            expected = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert theirs["results"][task][name] == expected, (task, name)
    for (logprob, greedy), (other, also) in zip(
        responses(ours, "mine_choice"), responses(theirs, "mine_choice"), strict=True
    ):
        assert logprob == pytest.approx(other, abs=1e-4) and greedy == also
    assert responses(ours, "mine_text") == pytest.approx(responses(theirs, "mine_text"), abs=1e-4)
    answers = responses(ours, "mine_answer")
    assert answers == responses(theirs, "mine_answer") and len({*answers}) > 1

    choice = petatron_eval(
        folder, folder / "model", "--task", "multiple_choice", "--data", str(folder / "choice.jsonl")
    )
    found = ours["results"]["mine_choice"]
    assert choice == {"accuracy": found["acc,none"], "accuracy_norm": found["acc_norm,none"]}
    assert 0 < found["acc,none"] < 1, "a score that can differ"
    window = ["--seq-length", str(INPUTS)]
    text = petatron_eval(folder, folder / "model", "--task", "text", "--data", str(folder / "text.jsonl"), *window)
    assert text["bits_per_byte"] == pytest.approx(ours["results"]["mine_text"]["bits_per_byte,none"], rel=1e-6)


def test_each_example_has_the_log_likelihood_of_petatron_eval(folder: Path):
    whole = in_process(folder / "model")
    assert whole.max_length == POSITIONS
    records = [*CHOICES, LONG, EMPTY]
    path = folder / "all.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    settings = TaskSettings(task="multiple_choice", data=path)
    [task] = build_tasks([settings], ByteTokenizer(), ContextLimits(POSITIONS + 1, POSITIONS))
    scores = score_sequences(petatron.from_pretrained(folder / "model", dtype="float32"), task.sequences)
    expected = [float(each.logprobs[-count:].sum()) for each, count in zip(scores, task.num_targets)]  # type: ignore[attr-defined]
    pairs = [pair for example in task.examples for pair in example.pairs]  # type: ignore[attr-defined]
    found = whole.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert [logprob for logprob, _ in found] == pytest.approx(expected, abs=1e-5)


def test_solved_examples_are_those_of_lm_evals_first_n(folder: Path, model: PetatronLM):
    found = evaluate(folder, ["mine_choice"], model=model, num_fewshot=1, limit=9)
    prompts = [sample["arguments"][0][0] for sample in found["samples"]["mine_choice"]]
    settings = TaskSettings(task="multiple_choice", data=folder / "choice.jsonl", num_fewshot=1, limit=9)
    [task] = build_tasks([settings], ByteTokenizer(), ContextLimits(POSITIONS + 1, POSITIONS))
    assert prompts == [example.pairs[0][0] for example in task.examples]  # type: ignore[attr-defined]
    words = ["--task", "multiple_choice", "--data", str(folder / "choice.jsonl"), "--num-fewshot", "1", "--limit", "9"]
    accuracy = petatron_eval(folder, folder / "model", *words)["accuracy"]
    assert accuracy == found["results"]["mine_choice"]["acc,none"]


def test_a_greedy_continuation_is_told_apart(folder: Path, model: PetatronLM):
    ids = petatron.generate(petatron.from_pretrained(folder / "model"), [97, 98], max_new_tokens=3, temperature=0)
    other = [*ids[:-1], ids[-1] ^ 1]
    verdicts = model._loglikelihood_tokens([(None, [97, 98], ids), (None, [97, 98], other)], disable_tqdm=True)
    assert [greedy for _, greedy in verdicts] == [True, False]
    assert model._loglikelihood_tokens([(None, [97], [])], disable_tqdm=True) == [(0.0, True)]


def test_bos_is_before_every_text_three_ways(tmp_path: Path):
    tokenizer = bos_tokenizer(tmp_path / "tokenizer")
    save_model(tmp_path / "model", tokenizer)
    pairs = [("2 and 2 is", " even"), ("", "yes"), ("a cat ", "sat")]
    texts = [(record["text"],) for record in TEXTS]
    model = in_process(tmp_path / "model", max_length=INPUTS)
    assert model.prefix_token_id == BOS and model.tok_encode("a") == [BOS, 97]
    assert model.tok_encode("<s>a") == [BOS, 97] and model.tok_encode("a", add_special_tokens=False) == [97]
    scored = model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    rolled = model.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    prompts = requests("generate_until", *((text, {"until": [], "max_gen_toks": 6}) for text in ("ab", "cd")))
    answers = model.generate_until(prompts, disable_tqdm=True)
    with serve(tmp_path / "model") as server:
        plain, bos = (
            LocalCompletionsAPI(**http_args(server, tmp_path / "model", add_bos_token=add)) for add in (False, True)
        )
        over_http = bos.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        assert [one for one, _ in scored] == pytest.approx([one for one, _ in over_http], abs=1e-4)
        assert bos.generate_until(prompts, disable_tqdm=True) == answers
        # With add_bos_token lm_eval puts BOS before a document twice.
        found = plain.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
        assert rolled == pytest.approx(found, abs=1e-4)
    lines = tmp_path / "text.jsonl"
    lines.write_text("".join(f"{json.dumps(record)}\n" for record in TEXTS))
    words = ["--task", "text", "--data", str(lines), "--seq-length", str(INPUTS)]
    bits = petatron_eval(tmp_path, tmp_path / "model", *words)["bits_per_byte"]
    assert bits == pytest.approx(-sum(rolled) / math.log(2) / sum(len(text.encode()) for (text,) in texts), rel=1e-6)

    without = in_process(tmp_path / "model", add_bos_token=False)
    assert without.tok_encode("a") == [97] and without.prefix_token_id == ByteTokenizer.eod
    assert without.loglikelihood(requests("loglikelihood", pairs[0]), disable_tqdm=True) != scored[:1]
    other = in_process(tmp_path / "model", prefix_token_id=65)
    first, second, _ = other.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert first == scored[0] and second != scored[1], "it precedes empty contexts alone"

    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I say"}]
    assert model.apply_chat_template(history[:1]) == "<s>[user]Hi[end][assistant]"
    assert model.apply_chat_template(history, add_generation_prompt=False) == "<s>[user]Hi[end][assistant]I say"
    assert "bos_token" in model.chat_template(True) and model.chat_template(False) == ""
    assert "/" not in model.tokenizer_name


def test_batch_sizes_change_no_result(folder: Path, model: PetatronLM):
    small = in_process(folder / "model", max_length=INPUTS, batch_size=2)
    pairs = [(each["context"], " even") for each in CHOICES]
    many, few = (each.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True) for each in (model, small))
    assert [one for one, _ in many] == pytest.approx([one for one, _ in few], abs=1e-5)
    prompts = requests("generate_until", *((context, {"until": ["e"]}) for context, _ in pairs[:4]))
    short = in_process(folder / "model", max_length=INPUTS, batch_size=1, max_gen_toks=5)
    assert short.generate_until(prompts, disable_tqdm=True) == [
        model.generate_until(requests("generate_until", (context, {"until": "e", "max_tokens": 5})), disable_tqdm=True)[
            0
        ]
        for context, _ in pairs[:4]
    ]


def test_repeats_of_a_sampled_prompt_differ(model: PetatronLM):
    sampled = {"until": [], "do_sample": True, "temperature": 1.5, "top_k": 0, "max_gen_toks": 8}
    prompts = requests("generate_until", *([("ab", sampled)] * 3))
    answers = model.generate_until(prompts, disable_tqdm=True)
    assert len({*answers}) > 1 and answers == model.generate_until(prompts, disable_tqdm=True)
    greedy = requests("generate_until", *([("ab", {**sampled, "do_sample": False})] * 2))
    first, second = model.generate_until(greedy, disable_tqdm=True)
    assert first == second


def test_long_prompts_lose_their_beginning_with_a_note(model: PetatronLM, caplog: pytest.LogCaptureFixture):
    asked = {"until": [], "max_gen_toks": 4}
    both = requests("generate_until", ("x" * 200 + "end", asked), ("x" * 57 + "end", asked))
    first, second = model.generate_until(both, disable_tqdm=True)
    assert first == second and f"1 sequence cut from the left to fit into {INPUTS} inputs" in caplog.text
    with pytest.raises(DataError, match="asks for 64 new tokens, and prompt and answer together have 64"):
        model.generate_until(requests("generate_until", ("a", {"until": [], "max_gen_toks": 64})), disable_tqdm=True)


def test_what_a_checkpoint_lacks_is_said(folder: Path, model: PetatronLM, tmp_path: Path):
    with pytest.raises(DataError, match="has no chat template in its tokenizer"):
        model.apply_chat_template([{"role": "user", "content": "Hi"}])
    with pytest.raises(ConfigError, match="--weights ema chooses among the state of a checkpoint"):
        in_process(folder / "model", weights="ema")
    with pytest.raises(ConfigError, match="prefix_token_id 900 is not one of the model's 257 ids"):
        in_process(folder / "model", prefix_token_id=900)


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval reads the thousands of files of its own tasks at every start, which takes many seconds; here it leaves them out."""
    start = TaskManager.__init__
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(start, include_defaults=False))


@pytest.mark.usefixtures("own_tasks")
def test_the_command_line_is_lm_evals(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["run", "--tasks", "mine_choice", "--include_path", str(folder)]
    words += ["--model_args", f"pretrained={folder / 'model'},dtype=float32", "--batch_size", "auto", "--limit", "4"]
    before = list(sys.argv)
    assert main(["lm-eval", *words, "--output_path", str(folder / "results")]) == 0
    said = capsys.readouterr().out
    assert "|mine_choice|" in said and "acc_norm" in said and sys.argv == before
    [written] = (folder / "results").rglob("results_*.json")
    content = json.loads(written.read_text())
    accuracy = content["results"]["mine_choice"]["acc,none"]
    expected = petatron_eval(
        folder, folder / "model", "--task", "multiple_choice", "--data", str(folder / "choice.jsonl"), "--limit", "4"
    )
    assert content["config"]["model"] == "petatron" and accuracy == expected["accuracy"]


@pytest.mark.usefixtures("own_tasks")
def test_mistakes_are_told_with_an_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]):
    tasks = ["--tasks", "mine_choice", "--include_path", str(folder)]
    assert main(["lm-eval", *tasks, "--model_args", "pretrain=x"]) == 2
    said = capsys.readouterr().err
    assert "pretrain x is not an argument of the model petatron" in said and "pretrained is not given" in said
    assert main(["lm-eval", *tasks, "--model_args", f"pretrained={folder / 'none'}"]) == 1
    assert "none is not a folder" in capsys.readouterr().err
    assert main(["lm-eval", "run", "--no-such-flag"]) == 2
    assert main(["lm-eval", "--help"]) == 0


def forget_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of lm_eval has been imported, until the test ends."""
    for name in [name for name in sys.modules if name.startswith(("lm_eval", "petatron.integrations.lm_eval"))]:
        monkeypatch.delitem(sys.modules, name)


def test_lm_evals_own_models_stay_registered(monkeypatch: pytest.MonkeyPatch):
    forget_lm_eval(monkeypatch)
    importlib.import_module("petatron.integrations.lm_eval")
    registry = importlib.import_module("lm_eval.api.registry")
    assert {"petatron", "hf", "local-completions"} <= set(registry.model_registry)


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    forget_lm_eval(monkeypatch)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["lm-eval", "ls", "tasks"]) == 1
    assert "petatron lm-eval needs lm_eval. Install it: pip install 'petatron[lm-eval]'" in capsys.readouterr().err


def test_without_a_network_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def offline() -> None:
        raise ConnectionError("Couldn't reach 'some/data' on the Hub")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", offline)
    assert main(["lm-eval", "--tasks", "hellaswag"]) == 1
    said = capsys.readouterr().err
    assert "Couldn't reach 'some/data' on the Hub. lm_eval downloads" in said and "Traceback" not in said
