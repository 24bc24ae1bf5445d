from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.cli.curation import draw_sample as command
from petatron.cli.main import main
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.tokenizer import ByteTokenizer
from tests.unit.data.conftest import MakeDataset

BYTES = ("--tokenizer-type", "ByteTokenizer")


def documents(*texts: str) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts]


def show(capsys: pytest.CaptureFixture[str], prefix: str, *flags: str, code: int = 0) -> str:
    assert main(["data", "show", prefix, "--split", "1", *flags]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_a_sample_of_text(make_dataset: MakeDataset, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make_dataset(documents("a\tb\nc\u00e9", "\x1b[2J", "end"))
    seed = next(seed for seed in range(99) if GPTDataset(IndexedDataset(prefix), range(3), num_samples=1, seq_length=12, seed=seed)
                .pieces(0)[0].sequence == 0)  # fmt: skip
    flags = ("--seq-length", "12", "--seed", str(seed), *BYTES)
    printed = show(capsys, f"{prefix}.bin", *flags, "--eod-mask-loss").splitlines()
    assert printed[0] == "sample 0 of 1 (train, 12 tokens, 1 epoch)"
    assert printed[1] == "-- document 0: tokens 0 to 7 of 8 --"
    assert printed[2:4] == ["|~a|\u21e5|b|\u23ce", "|c|\u00e9|<end of document>"]
    assert printed[5] in ("|~\\u001b|[|2|J|<end of document>", "|~e|n|d|<end of document>")
    assert "; loss on 1" in printed[-1] and "loss on 12" not in printed[-1]
    assert "loss on 12 of 12 predicted tokens" in show(capsys, prefix, *flags)
    assert "|~97|9|98|10|99|195|169|256" in show(capsys, prefix, *flags[:-2])


def test_colors_alternate(
    make_dataset: MakeDataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petatron.history.draw.terminal.can_color", lambda stream: True)
    prefix = make_dataset(documents("ab\n\x1b"))
    flags = ("--seq-length", "4", *BYTES)
    first, second = command._BACKGROUNDS
    mask, reset = command._MASKED_BACKGROUND, command._RESET
    text = (
        f"{mask}a{reset}{second}b{reset}{first}\u23ce{reset}\n{second}\\u001b{reset}{first}<end of document>{reset}\n"
    )
    assert text in show(capsys, prefix, *flags)
    plain = show(capsys, prefix, *flags, "--no-color")
    assert "\x1b" not in plain and "|~a|b|\u23ce\n|\\u001b|<end of document>" in plain


def test_sequences_of_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "sentences")
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([1, 2, 3, 4, 5], sentence_lengths=[2, 3])
    printed = show(capsys, prefix, "--seq-length", "4")
    assert (
        "document 0, sequence 0: tokens 0 to 1 of 2" in printed
        and "document 0, sequence 1: tokens 0 to 2 of 3" in printed
    )


def test_pieces_are_what_a_sample_is_read_from(make_dataset: MakeDataset) -> None:
    indexed = IndexedDataset(make_dataset([list(range(start, start + 3 + start % 5)) for start in range(0, 900, 9)]))
    dataset = GPTDataset(indexed, range(10, 80), num_samples=400, seq_length=7, seed=3)
    for index in range(len(dataset)):
        pieces = dataset.pieces(index)
        tokens = [token for piece in pieces for token in indexed.get(*piece).tolist()]
        assert tokens == dataset[index].tolist() and len(tokens) == 8
        assert all(10 <= piece.sequence < 80 for piece in pieces)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--index", "1"), "--index 1 is not a sample of"),
        (("--seq-length", "0", "--num-samples", "0"), "2 problems"),
        (("--eod-mask-loss",), "--eod-mask-loss looks for the end-of-document token"),
        (("--split", "x"), "--split x"),
    ],
)
def test_problems(
    make_dataset: MakeDataset, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert message in show(capsys, make_dataset(documents("abc")), "--seq-length", "3", *flags, code=2)


def test_epochs_follow_the_samples(make_dataset: MakeDataset, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make_dataset(documents("abc"))
    assert "(train, 3 tokens, 7 epochs)" in show(capsys, prefix, "--seq-length", "3", "--num-samples", "9")


def test_half_a_character_at_the_border() -> None:
    tokens = list(command.shown_tokens(list("\u00e9".encode())[:1], [True], ByteTokenizer()))
    assert [(token.text, token.num_ids) for token in tokens] == [("\ufffd", 1)]


def test_a_row_of_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\x1b"}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(chat)}\n")
    flags = ("data", "show", str(tmp_path / "chats.jsonl"), *BYTES, "--seq-length", "32", "--no-color")
    assert main([*flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "row 0 of 1 in an epoch (train, 32 tokens)"
    assert printed[1].endswith("chats.jsonl:1: 23 tokens --")
    assert printed[2:4] == [
        "|~U|~s|~e|~r|~:|~ |~a|~\u23ce",
        "|~A|~s|~s|~i|~s|~t|~a|~n|~t|~:| |b|\\u001b|<end of document>|~\u23ce",
    ]
    assert printed[-1] == "1 part; loss on 4 of 23 tokens, 9 tokens of padding"
    assert main([*flags, "--dataset-settings", "train_on=all", "--chat-template", "chatml"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "".join(f"|{char}" for char in "<|im_start|>user\u23ce").replace("|<", "|~<", 1)
    assert printed[-1] == "1 part; loss on 31 of 32 tokens, 0 tokens of padding", "it is cut"
    assert main([*flags, "--index", "-1"]) == 2
    assert "--index -1 is not a row of" in capsys.readouterr().err
    assert main([*flags, "--dataset-settings", "train_on=x"]) == 2
    assert "train_on=x is no choice" in capsys.readouterr().err


def test_a_row_of_preferences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    flags = ("data", "show", str(path), *BYTES, "--seq-length", "16", "--no-color")
    assert main([*flags, "--dataset-type", "preferences"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].endswith("pairs.jsonl:1, chosen: 3 tokens --") and printed[2] == "|~a|b|<end of document>"
    assert printed[3].endswith("pairs.jsonl:1, rejected: 3 tokens --") and printed[4] == "|~a|c|<end of document>"
    path.write_text('{"prompt": "a", "completion": "b", "label": 1}\n')
    assert main([*flags, "--dataset-type", "unpaired-preferences"]) == 0
    assert "an answer to another prompt" in capsys.readouterr().out
