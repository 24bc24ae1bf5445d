"""Fill-in-the-middle samples: their parts are the text, their order and length Megatron's, and their numbers the sample's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from petatron.base.errors import ConfigError
from petatron.cli.main import main
from petatron.config.schema.data import DataConfig
from petatron.data.batch_loader import BatchLoader, LoaderOptions, make_batch
from petatron.data.fill_in_middle import (
    FillInMiddleDataset,
    FillInMiddleRule,
    divide_sample,
    fill_in_middle_rule,
    padding_id,
)
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.tiktoken_tokenizer import DEFAULT_SPECIAL_TOKENS, TikTokenizer
from petatron.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer
from tests.unit.data.vocabularies import LINES, trained_tokens, write_vocabulary

FIM = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
PRE, MID, SUF, PAD, EOD = 7, 8, 9, 10, 2
RULE = FillInMiddleRule(rate=1.0, spm_rate=0.0, prefix=PRE, middle=MID, suffix=SUF, pad=PAD, eod=EOD)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("fim") / "v.json", trained_tokens(420))


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Path) -> Tokenizer:
    return TikTokenizer(vocabulary, num_special_tokens=12, special_tokens=(*DEFAULT_SPECIAL_TOKENS, *FIM))


@pytest.fixture
def corpus(tokenizer: Tokenizer, make_dataset: Callable[..., str]) -> Callable[..., str]:
    """Documents of random stretches of text, each with its end."""

    def make(count: int = 60, name: str = "data", seed: int = 0) -> str:
        chance, words = random.Random(seed), " ".join(LINES)
        starts = [chance.randrange(len(words) - 90) for _ in range(count)]
        texts = [words[start : start + chance.randint(20, 90)] for start in starts]
        return make_dataset([[*ids, EOD] for ids in tokenizer.encode_batch(texts)], name=name)

    return make


def numbers(*seeds: int) -> np.random.RandomState:
    return np.random.RandomState(list(seeds))


def parts_of(document: list[int], tokenizer: Tokenizer) -> tuple[str, str, str]:
    """The prefix, middle and suffix of a document in the order PSM, as text."""
    assert document[0] == PRE and [document.count(token) for token in (PRE, MID, SUF)] == [1, 1, 1]
    suffix, middle = document.index(SUF), document.index(MID)
    parts = (document[1:suffix], document[middle + 1 :], document[suffix + 1 : middle])
    prefix_text, middle_text, suffix_text = map(tokenizer.decode, parts)
    return prefix_text, middle_text, suffix_text


@pytest.mark.parametrize("text", [*LINES[:3], "naïve 東京 🙂", "x", ""])
def test_parts_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = np.array(tokenizer.encode(text), np.int64)
    room = np.concatenate([ids, np.full(len(text.encode()) + 9, EOD)])  # room to grow; empty documents vanish
    cuts = set()
    for seed in range(40):
        psm = divide_sample(room, RULE, tokenizer, numbers(seed)).tolist()
        document = psm[: psm.index(EOD)] if text else psm[:3]
        prefix, middle, suffix = parts_of(document, tokenizer)
        assert prefix + middle + suffix == text
        cuts.add((len(prefix), len(suffix)))
        spm = divide_sample(room, replace(RULE, spm_rate=1.0), tokenizer, numbers(seed)).tolist()
        document = spm[: spm.index(EOD)] if text else spm[:3]
        at = document.index(MID)
        assert document[:2] == [PRE, SUF]
        joined = [*tokenizer.encode(prefix), *tokenizer.encode(middle)]
        assert document[2:at] == tokenizer.encode(suffix) and document[at + 1 :] == joined
    assert len(cuts) > 20 or len(text) < 9, "every place is tried"


def test_samples_keep_their_length(tokenizer: Tokenizer) -> None:
    """Sentinels push the end out; documents without tokens vanish with their ends, and padding fills the room."""
    one = tokenizer.encode("The item one")
    longer = divide_sample(np.array([*one, EOD, *one]), RULE, tokenizer, numbers(3))
    assert len(longer) == 2 * len(one) + 1 and PAD not in longer
    whole = divide_sample(np.array([*one, EOD, *one, *[EOD] * 40]), RULE, tokenizer, numbers(3)).tolist()
    assert whole[: len(longer)] == longer.tolist() and whole[-1] == PAD and whole.count(EOD) == 2
    # The empty text after the last end is divided as well, as Megatron does.
    assert whole[: whole.index(PAD)][-3:] == [PRE, SUF, MID]
    none = np.array([*one, EOD, EOD, *one])
    kept = divide_sample(none, replace(RULE, rate=0.0), tokenizer, numbers(3)).tolist()
    assert kept == [*one, EOD, *one, PAD]


def test_rates_hold(tokenizer: Tokenizer) -> None:
    """Of 3000 draws each; five standard deviations of a share are 0.046, of one among the divided 0.055."""
    text, count = "for item in items", 3000
    ids = np.array([*tokenizer.encode(text), *[EOD] * 20])
    rule = replace(RULE, rate=0.7, spm_rate=0.3)
    made = [divide_sample(ids, rule, tokenizer, numbers(5, seed)).tolist() for seed in range(count)]
    divided = [sample for sample in made if sample[0] == PRE]
    assert abs(len(divided) / count - 0.7) < 0.046
    suffix_first = sum(sample[1] == SUF for sample in divided) / len(divided)
    empty_prefix = 1 - (len(text) / (len(text) + 1)) ** 2  # PSM without a prefix begins alike
    assert abs(suffix_first - (0.3 + 0.7 * empty_prefix)) < 0.055


def test_fragments_are_divided_by_themselves(tokenizer: Tokenizer) -> None:
    split = tokenizer.encode("<mask>")[0]
    files = [tokenizer.encode(text) for text in ("def read(path):", "for item in items:", "print(item)")]
    document = np.array([*files[0], split, *files[1], split, *files[2], *[EOD] * 60])
    rule = replace(RULE, fragment_end=split, fragment_rate=1.0)
    made = divide_sample(document, rule, tokenizer, numbers(1)).tolist()
    made = made[: made.index(EOD)]
    first, second = (place for place, token in enumerate(made) if token == split)
    for part, ids in zip((made[:first], made[first + 1 : second], made[second + 1 :]), files):
        assert "".join(parts_of(part, tokenizer)) == tokenizer.decode(ids)
    never = divide_sample(document, replace(rule, fragment_rate=0.0), tokenizer, numbers(1)).tolist()
    assert never[: never.index(EOD)] == document.tolist()[: document.tolist().index(EOD)]
    alone = np.array([*files[0], *[EOD] * 20])
    assert divide_sample(alone, rule, tokenizer, numbers(1))[0] == PRE, (
        "a document without fragments has the whole rate"
    )


def test_some_documents_stay(tokenizer: Tokenizer) -> None:
    kept = np.array([*tokenizer.encode("# generated\nx = 1"), EOD])
    assert (
        divide_sample(kept, replace(RULE, no_prefix="# gen"), tokenizer, numbers(1)).tolist()[:-1] == kept[:-1].tolist()
    )
    half = np.array([*tokenizer.encode("東")[1:], *tokenizer.encode("a"), EOD])
    if "\ufffd" in tokenizer.decode(half.tolist()):
        assert divide_sample(half, RULE, tokenizer, numbers(1)).tolist()[: len(half) - 1] == half[:-1].tolist()


def test_a_sample_is_a_function_of_seed_and_number(tokenizer: Tokenizer, corpus: Callable[..., str]) -> None:
    text = GPTDataset(IndexedDataset(corpus()), range(60), num_samples=50, seq_length=48, seed=3)
    rule = replace(RULE, rate=0.8, spm_rate=0.5)
    made = FillInMiddleDataset(text, rule, tokenizer, seed=3, split="train")
    again = FillInMiddleDataset(text, rule, tokenizer, seed=3, split="train")
    backwards = [again[index] for index in reversed(range(50))][::-1]
    assert all(np.array_equal(one, other) for one, other in zip([made[index] for index in range(50)], backwards))
    assert made.fingerprint == again.fingerprint and len(made) == len(text)
    for seed, split in ((4, "train"), (3, "valid")):
        other = FillInMiddleDataset(text, rule, tokenizer, seed=seed, split=split)  # type: ignore[arg-type]
        assert other.fingerprint != made.fingerprint
        assert not all(np.array_equal(made[index], other[index]) for index in range(50))
    assert FillInMiddleDataset(text, RULE, tokenizer, seed=3, split="train").fingerprint != made.fingerprint
    # Any data-parallel layout and micro-batch size, and a start in the middle, see the same samples.
    whole = BatchLoader(made, LoaderOptions(micro_batch_size=4, seed=3, pad=PAD))
    (batch,) = whole.next_step(4, 8)
    for rank in range(2):
        part = BatchLoader(again, LoaderOptions(micro_batch_size=1, seed=3, pad=PAD), dp_rank=rank, dp_size=2)
        for place, micro in enumerate(part.next_step(4, 8)):
            row = 2 * place + rank
            assert micro.tokens.tolist()[0] == batch.tokens.tolist()[row]
            assert micro.loss_mask.tolist()[0] == batch.loss_mask.tolist()[row]


def test_padding_is_not_predicted() -> None:
    batch = make_batch([np.array([5, 6, PAD, 7, PAD])], LoaderOptions(micro_batch_size=1, seed=1, pad=PAD))
    assert batch.loss_mask.tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_tokens_are_named(tokenizer: Tokenizer) -> None:
    data = DataConfig(fim_data=True, fim_eod_token="</s>", fim_split_sample="<mask>", fim_fragment_rate=0.5)
    rule = fill_in_middle_rule(data, tokenizer)
    assert (rule.prefix, rule.middle, rule.suffix, rule.pad, rule.eod, rule.fragment_end) == (7, 8, 9, 10, 2, 3)
    assert padding_id(data, tokenizer) == PAD and padding_id(DataConfig(), tokenizer) is None
    assert padding_id(replace(data, fim_pad_token="</s>"), tokenizer) is None
    with pytest.raises(ConfigError) as caught:
        fill_in_middle_rule(DataConfig(fim_data=True, fim_split_sample="\n"), ByteTokenizer())
    told = str(caught.value)
    assert (
        "--fim-prefix-token <fim_prefix> is no token of the tokenizer ByteTokenizer" in told
        and "--fim-pad-token" in told
    )
    assert "--fim-eod-token" not in told and "--fim-split-sample" not in told
    for without in (None, NullTokenizer(9)):
        with pytest.raises(ConfigError):
            fill_in_middle_rule(data, without)


RUN = (
    "train --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --position-embedding-type rope --swiglu "
    "--lr 1e-3 --global-batch-size 4 --num-workers 0 --live off --device cpu --split 8,2,0 --log-interval 1 --eval-iters 1 "
    "--eval-interval 2 --tokenizer-type TikTokenizer --tiktoken-num-special-tokens 12 --fim-data --fim-eod-token </s> --save-interval 2"
).split()
NAMED = ["--tokenizer-special-tokens", *DEFAULT_SPECIAL_TOKENS, *FIM]


def test_a_blend_trains_and_resumes_alike(vocabulary: Path, corpus: Callable[..., str], tmp_path: Path) -> None:
    blend = ["--data-path", "0.3", corpus(name="a"), "0.7", corpus(name="b", seed=1)]
    flags = [*RUN, *NAMED, "--tokenizer-model", str(vocabulary), *blend]

    def train(folder: str, *more: str) -> None:
        assert main([*flags, "--train-iters", "4", "--save", str(tmp_path / folder), "--fim-rate", *more]) == 0

    train("whole", "0.9")
    train("parts", "0.9", "--exit-interval", "2")
    train("parts", "0.9", "--load", str(tmp_path / "parts"))
    train("plain", "0")
    whole, parts, plain = (_losses(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts", "plain"))
    assert whole == parts and len(whole) >= 4 and plain != whole


def _losses(metrics: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


def test_settings_that_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in {
        "--mock-data": "--fim-data divides text, and --mock-data has none. Give --data-path.",
        "--data-path x --vocab-size 9": "--fim-data needs a tokenizer, to know the text of documents",
        "--data-path x --tokenizer-type ByteTokenizer --fim-split-sample a": "--fim-split-sample a needs --fim-fragment-rate",
        "--data-path x --tokenizer-type ByteTokenizer --fim-middle-token a --fim-suffix-token a": (
            "--fim-suffix-token a is --fim-middle-token too"
        ),
        "--data-path x --tokenizer-type ByteTokenizer --dataset-type pairs": "--fim-data is for text of --dataset-type gpt",
    }.items():
        assert main([*RUN[: RUN.index("--tokenizer-type")], "--train-iters", "1", "--fim-data", *flags.split()]) == 2
        assert told in capsys.readouterr().err, flags
