"""Every task format with results worked out by hand, and what is said about files that do not fit."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.data.prompt.prompt_encoder import bos_ids
from petatron.data.tokenizer import ByteTokenizer, NullTokenizer
from petatron.evaluate.comparison_table import result_table
from petatron.evaluate.confidence_interval import Estimate, accuracy_estimate, ratio_estimate
from petatron.evaluate.eval_task import ContextLimits, ScoredTask, TaskResult
from petatron.evaluate.examples_file import read_examples
from petatron.evaluate.lambada import read_lambada
from petatron.evaluate.language_modeling import detokenize_wikitext, read_text_task, read_wikitext103
from petatron.evaluate.multiple_choice import FORMATS, encode_pairs, read_multiple_choice
from petatron.evaluate.score_sequences import SequenceScore
from petatron.evaluate.task_list import TaskSettings, build_tasks, read_task_list, setting_problems
from tests.integrations.lm_eval.bos_tokenizer import bos_tokenizer

BYTES = ByteTokenizer()
LIMITS = ContextLimits(max_tokens=200, window=4)


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def scores(task: ScoredTask, *logprobs: float | Sequence[float]) -> list[SequenceScore]:
    """Scores in which every token of a sequence has the given log-probability; a token is greedy if it is likelier than 1 / 2."""
    found = []
    for ids, value in zip(task.sequences, logprobs, strict=True):
        each = np.broadcast_to(np.asarray(value, dtype=np.float64), (len(ids) - 1,))
        found.append(SequenceScore(each, each > math.log(0.5)))
    return found


HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "A man [step] mixes dough.",
    "ctx_b": "he",
    "endings": ["bakes it.", "sings [title] Then he  leaves.", "a", "b"],
    "label": "1",
}
ARC = {
    "question": {"stem": "Why?", "choices": [{"text": "so", "label": "A"}, {"text": "no", "label": "B"}]},
    "answerKey": "B",
}
ARC_HUB = {"question": "Why?", "choices": {"text": ["so", "no"], "label": ["1", "2"]}, "answerKey": "2"}
PIQA = {"goal": "Open a jar", "sol1": "twist", "sol2": "shout", "label": 0}
WINOGRANDE = {"sentence": "The cup did not fit since _ was big.", "option1": "it", "option2": "she", "answer": "1"}
MMLU = {"question": "1 + 1? ", "subject": "elementary_mathematics", "choices": ["1", "2", "3", "4"], "answer": 1}
ARC_PAIRS = (("Question: Why?\nAnswer:", " so"), ("Question: Why?\nAnswer:", " no"))
MMLU_HEAD = (
    "The following are multiple choice questions (with answers) about elementary mathematics.\n\n"
    "1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
)


@pytest.mark.parametrize(
    ("name", "record", "pairs", "answer"),
    [
        (
            "hellaswag",
            HELLASWAG,
            tuple(
                ("Baking: A man mixes dough. He", f" {ending}")
                for ending in ("bakes it.", "sings. Then he leaves.", "a", "b")
            ),
            1,
        ),
        ("arc_easy", ARC, ARC_PAIRS, 1),
        ("arc_challenge", ARC_HUB, ARC_PAIRS, 1),
        ("piqa", PIQA, tuple(("Question: Open a jar\nAnswer:", f" {word}") for word in ("twist", "shout")), 0),
        (
            "winogrande",
            WINOGRANDE,
            tuple((f"The cup did not fit since {word}", " was big.") for word in ("it", "she")),
            0,
        ),
        ("mmlu", MMLU, tuple((MMLU_HEAD, f" {letter}") for letter in "ABCD"), 1),
        ("mmlu", {**MMLU, "answer": "B"}, tuple((MMLU_HEAD, f" {letter}") for letter in "ABCD"), 1),
        (
            "multiple_choice",
            {"context": "2 +", "choices": [" 2", "3"], "answer": "3"},
            (("2 +", " 2"), ("2 +", " 3")),
            1,
        ),
        ("multiple_choice", {"context": "a\n", "choices": ["b", "c"], "answer": 0}, (("a\n", "b"), ("a\n", "c")), 0),
    ],
)
def test_formats_of_multiple_choice(name: str, record: dict[str, Any], pairs: tuple[tuple[str, str], ...], answer: int):
    found = FORMATS[name](record)
    assert found.pairs == pairs and found.answer == answer


def test_accuracy_takes_sums_and_the_normalized_one_divides_by_bytes(tmp_path: Path):
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"context": "q", "choices": ["aé", "b"], "answer": 0},  # 3 bytes and 1, with a space 4 tokens and 2
        {"context": "q", "choices": ["c", "d"], "answer": 1},
    )
    task = read_multiple_choice(path, BYTES, LIMITS, format_name="multiple_choice")
    assert task.num_targets == [4, 2, 2, 2]
    metrics, counts = task.metrics(scores(task, -1.0, -1.5, -1.0, -2.0))
    # Sums: -4 and -3, so the second; by bytes: -4 / 3 and -3 / 1, so the first. Then -2 and -4 twice: wrong both times.
    assert metrics["accuracy"].value == 0 and metrics["accuracy_norm"].value == 0.5
    assert counts == {"examples": 2, "correct": 0, "correct_norm": 1}


def test_pairs_are_tokenized_as_one_text(tmp_path: Path):
    ids, number = encode_pairs(BYTES, [("ab ", "c")], source="f")[0]
    assert ids == [*b"ab c"] and number == 2, "the space belongs to the continuation"
    assert encode_pairs(BYTES, [("", "cd")], source="f") == [([BYTES.eod, *b"cd"], 2)]
    without_eod = ByteTokenizer()
    vars(without_eod).update(eod=None)
    with pytest.raises(DataError, match=r"has an empty context, and the tokenizer .* has no end-of-document id"):
        encode_pairs(without_eod, [("", "cd")], source="f")


SHOTS = [{"context": f"{n} is", "choices": ["odd", "even"], "answer": 1 - n % 2} for n in range(6)]


def _prompts(path: Path, **settings: Any) -> list[str]:
    """The text of the first choice of each example."""
    [task] = build_tasks([TaskSettings(task="multiple_choice", data=path, **settings)], BYTES, LIMITS)
    return [BYTES.decode(ids) for ids in task.sequences[::2]]


def test_the_first_other_examples_are_shown_before_each(tmp_path: Path):
    path = write_lines(tmp_path / "f", *SHOTS)
    first, second, third = _prompts(path, num_fewshot=2, limit=3)
    assert first == "1 is odd\n\n2 is even\n\n0 is odd", "its right choice is not given away"
    assert second == "0 is even\n\n2 is even\n\n1 is odd"
    assert third == "0 is even\n\n1 is odd\n\n2 is odd"
    other = write_lines(tmp_path / "g", *SHOTS[3:])
    assert _prompts(path, num_fewshot=1, limit=1, fewshot_data=other) == ["3 is odd\n\n0 is odd"]
    assert _prompts(path, num_fewshot=0) == _prompts(path)


def test_drawn_examples_are_a_function_of_the_seed_and_the_example(tmp_path: Path):
    path = write_lines(tmp_path / "f", *SHOTS)
    found = _prompts(path, num_fewshot=3, fewshot_seed=5)
    assert _prompts(path, num_fewshot=3, fewshot_seed=5, limit=2) == found[:2]
    assert found != _prompts(path, num_fewshot=3, fewshot_seed=6)
    shown = [prompt.split("\n\n") for prompt in found]
    for number, (*before, last) in enumerate(shown):
        assert last == f"{number} is odd" and len({*before}) == 3
        assert all(not text.startswith(f"{number} ") for text in before)
    assert len({tuple(before) for *before, _ in shown}) > 1


def test_a_description_is_said_once_before_the_examples(tmp_path: Path):
    path = write_lines(tmp_path / "f", MMLU, {**MMLU, "question": "2 + 1?", "answer": 2})
    limits = ContextLimits(max_tokens=900, window=4)
    [task] = build_tasks([TaskSettings(task="mmlu", data=path, num_fewshot=1, limit=1)], BYTES, limits)
    listed = "A. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    head, _, _ = MMLU_HEAD.partition("1 + 1?")
    assert BYTES.decode(task.sequences[0]) == f"{head}2 + 1?\n{listed} C\n\n1 + 1?\n{listed} A"


def test_too_few_examples_to_show_are_refused(tmp_path: Path):
    path = write_lines(tmp_path / "f", *SHOTS[:2])
    with pytest.raises(DataError, match=r"f has 1 example to show before example 1, not 2\. Ask for fewer"):
        _prompts(path, num_fewshot=2)


@pytest.mark.parametrize(
    ("puts_it", "bos", "start"),
    [(True, None, [257]), (True, False, []), (True, True, [257]), (False, None, []), (False, True, [257])],
)
def test_texts_begin_with_bos_as_the_tokenizer_does_or_as_asked(
    tmp_path: Path, puts_it: bool, bos: bool | None, start: list[int]
):
    tokenizer = bos_tokenizer(tmp_path / "t", puts_it=puts_it)
    text = write_lines(tmp_path / "text", {"text": "ab cd"})
    choice = write_lines(tmp_path / "choice", {"context": "q", "choices": ["a", "b"], "answer": 0})
    empty = write_lines(tmp_path / "empty", {"context": "", "choices": ["a", "b"], "answer": 0})
    given = (("lambada", text), ("multiple_choice", choice), ("multiple_choice", empty), ("text", text))
    settings = [TaskSettings(task=name, data=data, bos=bos) for name, data in given]
    passage, answer, alone, document = build_tasks(settings, tokenizer, ContextLimits(200, 100))
    assert passage.sequences == [[*start, *b"ab cd"]]
    assert answer.sequences[0] == [*start, *b"q a"]
    first = start or [BYTES.eod]
    assert alone.sequences[0] == [*first, *b"a"] and document.sequences == [[*first, *b"ab cd"]]


def test_a_bos_that_the_text_has_already_is_not_doubled(tmp_path: Path):
    tokenizer = bos_tokenizer(tmp_path, puts_it=True)
    [(ids, number)] = encode_pairs(tokenizer, [("<s>ab", " c")], source="f", bos=bos_ids(tokenizer))
    assert ids == [257, *b"ab c"] and number == 2


def test_a_tokenizer_without_bos_cannot_put_one():
    with pytest.raises(DataError, match="names no BOS token"):
        bos_ids(BYTES, add=True)


def test_long_examples_lose_their_beginning_with_a_note(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", {"context": "x" * 300, "choices": ["a", "bc"], "answer": 0})
    task = read_multiple_choice(path, BYTES, LIMITS, format_name="multiple_choice")
    assert task.sequences[1] == [*b"x" * 197, *b" bc"] and task.num_targets == [2, 3]
    assert task.notes == ["2 choices cut from the left to 200 tokens, with the context"]
    passages = write_lines(tmp_path / "b.jsonl", {"text": "y" * 300 + " end"})
    assert read_lambada(passages, BYTES, LIMITS, strict=True).notes == ["1 passage cut from the left to 200 tokens"]


@pytest.mark.parametrize(("strict", "targets", "accuracy"), [(False, [1, 1], 1.0), (True, [4, 3], 0.5)])
def test_lambada_predicts_the_last_token_or_the_whole_last_word(
    tmp_path: Path, strict: bool, targets: list[int], accuracy: float
):
    path = write_lines(tmp_path / "lambada.jsonl", {"text": "the cat sat "}, {"text": "a cab cab at\n ok"})
    task = read_lambada(path, BYTES, LIMITS, strict=strict)
    assert task.num_targets == targets
    if strict:
        assert task.sequences == [[*b"the cat sat"], [*b"a cab cab at ok"]]
    certain, unlikely = 0.0, -5.0
    last_word_wrong_at_its_space = [certain] * 6 + [unlikely] + [certain] * 3
    first = last_word_wrong_at_its_space if strict else certain
    metrics, counts = task.metrics(scores(task, first, certain))
    assert metrics["accuracy"].value == accuracy
    assert counts == {"examples": 2, "correct": 2 if not strict else 1}
    # The target of the first passage costs 5 nats in all, that of the second nothing.
    assert metrics["perplexity"].value == pytest.approx(math.exp(2.5) if strict else 1)


def test_wikitext_counts_words_before_and_tokens_after_its_spaces_are_removed(tmp_path: Path):
    path = tmp_path / "wikitext103_valid.txt"
    path.write_text(" A @-@ b , c \n")
    task = read_wikitext103(path, BYTES, LIMITS)
    assert detokenize_wikitext(path.read_text()) == " A-b, c\n"
    # Windows of four inputs: targets 1-4 and 5-7 of eight tokens; five words.
    assert [len(ids) for ids in task.sequences] == [5, 4] and task.num_words == 5
    metrics, counts = task.metrics(scores(task, -1.0, -2.0))
    assert counts == {"tokens": 8, "words": 5, "bytes": 7}
    loss = (4 * 1 + 3 * 2) / 7
    assert metrics["loss"].value == pytest.approx(loss)
    assert metrics["perplexity"].value == pytest.approx(math.exp(loss))
    assert metrics["token_ratio"].value == 7 / 4
    assert metrics["adjusted_perplexity"].value == pytest.approx(math.exp(10 / 4))
    assert metrics["bits_per_byte"].value == pytest.approx(10 / math.log(2) / 7), "the first token is not predicted"


def test_overlapping_windows_count_their_last_tokens(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij")
    task = read_wikitext103(path, BYTES, LIMITS, stride=2)
    assert task.sequences == [[*b"abcde"], [*b"cdefg"], [*b"efghi"], [*b"ghij"]]
    metrics, _ = task.metrics(scores(task, 0.0, [-9, -9, -1, -1], [-9, -9, -1, -1], [-9, -9, -3]))
    assert metrics["loss"].value == pytest.approx(7 / 9)


def test_texts_are_documents_that_begin_after_the_end_of_another(tmp_path: Path):
    path = write_lines(tmp_path / "text.jsonl", {"text": "abcdef"}, {"text": "é"})
    task = read_text_task(path, BYTES, LIMITS)
    end = BYTES.eod
    assert task.sequences == [[end, *b"abcd"], [*b"bcdef"], [end, *"é".encode()]], "the last window is full"
    metrics, counts = task.metrics(scores(task, -1.0, [-9, -9, -2, -2], -3.0))
    assert counts == {"documents": 2, "tokens": 8, "bytes": 8}
    assert metrics["loss"].value == pytest.approx((4 + 4 + 6) / 8)
    assert metrics["bits_per_byte"].value == pytest.approx(14 / math.log(2) / 8)
    low, high = metrics["loss"].low, metrics["loss"].high
    assert (low, high) == pytest.approx((8 / 6, 6 / 2)), "documents are resampled"
    assert len(read_text_task(path, BYTES, LIMITS, limit=1).document_bytes) == 1


def test_without_an_end_of_document_first_tokens_do_not_count(tmp_path: Path):
    tokenizer = ByteTokenizer()
    vars(tokenizer).update(eod=None)
    path = write_lines(tmp_path / "text.jsonl", {"text": "abc"}, {"text": "d"})
    task = read_text_task(path, tokenizer, LIMITS)
    assert task.sequences == [[*b"abc"]] and task.document_bytes == [2]
    assert task.notes == ["1 text of fewer than two tokens left out"]


def test_a_text_file_is_one_document_plain_or_compressed(tmp_path: Path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\n"))
    task = read_text_task(tmp_path / "a.txt.gz", BYTES, ContextLimits(200, 100))
    assert task.sequences == [[BYTES.eod, *b"one\n\ntwo\n"]]
    assert task.metrics(scores(task, -1.0))[0]["loss"] == Estimate(1.0), "one window: nothing to resample"


def test_intervals_are_those_of_the_binomial():
    found = accuracy_estimate([True] * 60 + [False] * 40)
    assert (
        found.value == 0.6
        and found.low == pytest.approx(0.504, abs=0.02)
        and found.high == pytest.approx(0.696, abs=0.02)
    )
    assert accuracy_estimate([True] * 60 + [False] * 40) == found, "the same draws every time"
    assert ratio_estimate([2.0, 6.0], [1, 3]) == Estimate(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("lambada", "", "has no example"),
        ("text", "  \n", "has no text"),
        ("wikitext103", "a", "has 1 token. A loss needs at least two"),
        ("lambada", '{"text": "a b"}\n{"txt": "b"}\n', r'f:2: the key "text" is missing; it has txt'),
        (
            "lambada",
            '\n[1]\n{"text": 3}\nno\n',
            r'f:2: not a JSON object\.\n.*f:3: "text" is not a text.*\n.*f:4: not valid',
        ),
        ("lambada", '{"text": "a \\ud800"}', "f:1: not valid JSON"),
        ("lambada", '{"text": "a"}', "nothing is left before the last word"),
        ("lambada strict", '{"text": "word"}', '"text" has only one word'),
        ("hellaswag", json.dumps({**HELLASWAG, "label": 4}), '"label" is 4, which is none of 0, 1, 2, 3'),
        ("hellaswag", json.dumps({**HELLASWAG, "endings": "no"}), '"endings" is not a list of two or more texts'),
        ("arc_easy", json.dumps({**ARC, "answerKey": "E"}), "\"answerKey\" is 'E', which is none of A, B"),
        ("arc_easy", json.dumps({**ARC_HUB, "choices": 3}), '"choices" has no texts and labels'),
        ("piqa", json.dumps({"goal": "x"}), 'the key "sol1" is missing'),
        ("winogrande", json.dumps({**WINOGRANDE, "sentence": "no blank"}), '"sentence" has no "_" with text after it'),
        ("mmlu", json.dumps({**MMLU, "answer": True}), '"answer" is True'),
        (
            "multiple_choice",
            '{"context": "c", "choices": ["a", "b", "a"], "answer": 0}',
            'f:1: "choices" has the same text twice',
        ),
        ("multiple_choice", '{"context": 1, "choices": ["a", "b"], "answer": 0}', '"context" is not a text'),
    ],
)
def test_files_that_do_not_fit_are_refused_with_the_line(tmp_path: Path, task: str, content: str, message: str):
    (tmp_path / "f").write_text(content)
    name, _, strict = task.partition(" ")
    settings = TaskSettings(task=name, data=tmp_path / "f", strict=bool(strict))
    with pytest.raises(DataError, match=f"(?s){message}") as error:
        build_tasks([settings], BYTES, LIMITS)
    assert str(error.value).startswith(f"task {name}: ")


def test_problems_of_all_tasks_come_together(tmp_path: Path):
    (tmp_path / "f").write_text("")
    both = [TaskSettings(task=name, data=tmp_path / "f") for name in ("lambada", "piqa")]
    with pytest.raises(DataError, match=r"(?s)task lambada: .*task piqa: "):
        build_tasks(both, BYTES, LIMITS)
    (tmp_path / "g").write_bytes(b"ok\n\xff")
    with pytest.raises(DataError, match="g:2: not UTF-8 text"):
        build_tasks([TaskSettings(task="text", data=tmp_path / "g")], BYTES, LIMITS)
    (tmp_path / "h").write_text('{"text": "1"}')
    with pytest.raises(DataError, match="NullTokenizer expects token ids"):
        build_tasks([TaskSettings(task="wikitext103", data=tmp_path / "h")], NullTokenizer(9), LIMITS)


def test_a_list_of_tasks_has_paths_beside_it(tmp_path: Path):
    write_lines(tmp_path / "l.jsonl", {"text": "a b"})
    (tmp_path / "tasks.yaml").write_text(
        "- task: LAMBADA\n  data: l.jsonl\n  strict: true\n- {task: text, data: l.jsonl, name: held out, limit: 3, every: 2}\n"
    )
    first, second = read_task_list(tmp_path / "tasks.yaml")
    assert first == TaskSettings(task="lambada", data=tmp_path / "l.jsonl", strict=True)
    assert (second.label, second.limit, second.every) == ("held out", 3, 2)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("{}", ["is not a list of 1 to 100 tasks"]),
        ("- 3", ["task 1: is not `task: NAME` with further settings"]),
        ("- [", ["t.yaml:1 is not valid YAML"]),
        (
            "- task: text\n- data: f\n  size: 3",
            ["task 1: has no `data`", "task 2: size is not a setting", "has no `task`"],
        ),
        ("- {task: text, data: f, limit: many}", ["task 1: limit 'many' has the wrong type. It is a number."]),
        ("- {task: text, data: f, limit: true, strict: 1}", ["limit True has the wrong", "strict 1 has the wrong"]),
        (
            "- {task: text, data: f, name: &a [x, x], limit: &b [*a, *a], every: [*b, *b]}",
            ["name (a list or mapping) has the wrong type", "every (a list or mapping)"],
        ),
        ("- {task: textt, data: f}", ["task 1: textt is not a task. Use one of wikitext103, lambada"]),
        ("- {task: text, data: f, limit: 0, strict: true}", ["limit 0 is below 1", "strict has no effect on text"]),
        ("- {task: text, data: none}", ["none is not a file"]),
        (
            "- {task: text, data: f, num_fewshot: 2}",
            ["num_fewshot has no effect on text. Leave it out; it is for hella"],
        ),
        ("- {task: wikitext103, data: f, bos: false}", ["bos has no effect on wikitext103"]),
        ("- {task: text, data: f, bos: 1}", ["bos 1 has the wrong type. It is true or false."]),
        (
            "- {task: piqa, data: f, num_fewshot: -1, fewshot_seed: -2, fewshot_data: gone}",
            ["num_fewshot -1 is below 0", "fewshot_seed -2 is below 0", "gone is not a file. Give a file of the task"],
        ),
        (
            "- {task: piqa, data: f, fewshot_seed: 1, fewshot_data: f}",
            ["fewshot_data has no effect without num_fewshot", "fewshot_seed has no effect without num_fewshot"],
        ),
        ("- {task: text, data: f}\n- {task: text, data: f}", ["has more than one task of the name text"]),
    ],
)
def test_problems_of_a_list_come_at_once(tmp_path: Path, text: str, messages: list[str]):
    (tmp_path / "f").write_text("x")
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_task_list(tmp_path / "t.yaml")
    assert all(message in str(error.value) for message in messages), error.value


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"The list of tasks .*none\.yaml"):
        read_task_list(tmp_path / "none.yaml")


def test_settings_of_one_task_are_checked(tmp_path: Path):
    problems = setting_problems(TaskSettings(task="wikitext103", data=tmp_path, stride=-1, limit=3), where="--task")
    assert [str(problem).partition(".")[0] for problem in problems] == [
        "--stride -1 is below 1",
        "--limit has no effect on wikitext103",
        f"--data {tmp_path} is not a file",
    ]


def test_the_table_has_a_column_for_each_checkpoint():
    one = TaskResult(metrics={"accuracy": Estimate(0.5, 0.25, 0.75)}, counts={"examples": 4})
    two = TaskResult(
        metrics={"accuracy": Estimate(0.75, 0.5, 1.0), "perplexity": Estimate(31.25)}, counts={"examples": 4}
    )
    assert result_table({"a": {"lambada": one}, "b": {"lambada": two}}).splitlines() == [
        "task     metric      a                        b",
        "lambada  accuracy    0.5000 [0.2500, 0.7500]  0.7500 [0.5000, 1.0000]",
        "lambada  perplexity                           31.25",
    ]
    nan = TaskResult(metrics={"loss": Estimate(math.nan)}, counts={})
    assert json.loads(json.dumps(nan.as_json(), allow_nan=False))["metrics"]["loss"]["value"] == "nan"


def test_that_a_file_was_not_read_to_its_end_is_said(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    for wrong, says in ((4, False), (5, True), (9, True)):
        path.write_text("nothing\n" * wrong)
        with pytest.raises(DataError) as error:
            read_examples(path, dict)
        lines = str(error.value).splitlines()
        assert ("There may be more: the file was read so far." in lines) == says
        assert sum(line.startswith(f"{path}:") for line in lines) == min(wrong, 5)
