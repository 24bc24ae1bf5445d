"""Fill-in-the-middle samples (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle").

A sample of packed text is cut at its end-of-document tokens. A share of the documents is divided at two random characters, and becomes
`PRE prefix SUF suffix MID middle` (PSM), or, with both sentinels in front, `PRE SUF suffix MID prefix middle` (SPM, the paper's second
variant). The three parts are tokenized by themselves. A sample that becomes longer is truncated, one that becomes shorter is padded, and
an empty document is dropped with its end-of-document token. All this is as in Megatron.

Megatron draws from one generator in the order in which samples are read. Here the random draws of a sample are a function of the seed, the
split and the sample index, so that a resumed run, or another layout, sees the same samples. A document that starts or ends inside a UTF-8
character because the sample cuts it is not divided: its decoded text would not encode to its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config.schema.data import DataConfig
from petatron.config.schema.fields import flag_name
from petatron.data.batch_loader import Sample, SampleDataset
from petatron.data.dataset_kinds import Split
from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.data.documents_of_sample import SampleTrace, trace_sample
from petatron.data.index_cache import fingerprint
from petatron.data.tokenizer import Tokenizer, vocabulary_json
from petatron.data.tokenizers_library import load_fast

_REPLACEMENT = "\ufffd"
_STREAMS: dict[Split, int] = {"train": 101, "valid": 102, "test": 103}
"""RNG stream per split, distinct from the shuffles' streams."""
_TOKENS = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token", "fim_eod_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInMiddleRule:
    """How documents are divided: rates, ids of the sentinels, and the text whose documents are not divided."""

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    fragment_end: int | None = None
    fragment_rate: float = 0.0
    no_prefix: str | None = None


def fill_in_middle_rule(data: DataConfig, tokenizer: Tokenizer | None) -> FillInMiddleRule:
    """Returns the rule of the settings; `ConfigError` with every token that the tokenizer does not have."""
    if tokenizer is None:
        rule = "needs a tokenizer, to know the text of documents"
        raise ConfigError([Problem("--fim-data", "", rule, "Give --tokenizer-model.")])
    names = [*_TOKENS, *(["fim_split_sample"] if data.fim_split_sample is not None else [])]
    ids = {name: token_id(tokenizer, getattr(data, name)) for name in names}
    rule = f"is no token of the tokenizer {tokenizer.name}"
    fix = "Name one of its tokens, or add it to the tokenizer."
    if missing := [name for name, number in ids.items() if number is None]:
        raise ConfigError([Problem(flag_name(name), getattr(data, name), rule, fix) for name in missing])
    known = {name: number for name, number in ids.items() if number is not None}
    prefix, middle, suffix, pad, eod = (known[name] for name in _TOKENS)
    return FillInMiddleRule(
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        pad=pad,
        eod=eod,
        fragment_end=known.get("fim_split_sample"),
        fragment_rate=data.fim_fragment_rate or 0.0,
        no_prefix=data.fim_no_prefix,
    )


def padding_id(data: DataConfig, tokenizer: Tokenizer | None) -> int | None:
    """Returns the id that pads samples; None without `--fim-data`, or if the pad token is also the EOD token."""
    if not data.fim_data:
        return None
    rule = fill_in_middle_rule(data, tokenizer)
    return rule.pad if rule.pad != rule.eod else None


def token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """Returns the id of a token by its name in the vocabulary, else by its text; None if it is not a single token.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> token_id(ByteTokenizer(), "<|endoftext|>"), token_id(ByteTokenizer(), "\\n"), token_id(ByteTokenizer(), "ab")
    (256, 10, None)
    """
    content = vocabulary_json(tokenizer)
    if content is None:
        return None
    number = load_fast(content).token_to_id(name)
    if number is None:
        ids = tokenizer.encode(name)
        number = ids[0] if len(ids) == 1 and tokenizer.decode(ids) == name else None
    return number


class FillInMiddleDataset:
    """The samples of a dataset of packed text, with documents divided."""

    def __init__(
        self, dataset: SampleDataset, rule: FillInMiddleRule, tokenizer: Tokenizer, *, seed: int, split: Split
    ) -> None:
        self._dataset, self._rule, self._tokenizer = dataset, rule, tokenizer
        self._seed, self._stream = seed, _STREAMS[split]
        key = {"kind": "fill in the middle", "text": dataset.fingerprint, **asdict(rule), "seed": seed, "split": split}
        self.fingerprint = fingerprint(key)

    def __len__(self) -> int:
        return len(self._dataset)

    def trace(self, index: int) -> SampleTrace:
        """Returns the documents that were divided; the tokens of a sample that grew are cut at its end."""
        change = "documents are divided by --fim-data, and the sample is cut or padded at its end"
        return replace(trace_sample(self._dataset, index), change=change)

    def __getitem__(self, index: int) -> Sample:
        sample = self._dataset[index]
        if not isinstance(sample, np.ndarray):
            raise DataError("--fim-data divides text, and these samples are arrays by name. Leave it out.")
        random = legacy_random_state(self._seed, self._stream, index)
        return divide_sample(sample, self._rule, self._tokenizer, random)


def divide_sample(
    sample: NDArray[np.int64], rule: FillInMiddleRule, tokenizer: Tokenizer, random: np.random.RandomState
) -> NDArray[np.int64]:
    """Divides the documents of a sample, and returns as many ids as it had."""
    divided = _join_parts(sample, rule.eod, partial(_divide_document, rule=rule, tokenizer=tokenizer, random=random))
    missing = len(sample) - len(divided)
    return np.concatenate([divided, np.full(missing, rule.pad)]) if missing > 0 else divided[: len(sample)]


def _join_parts(
    ids: NDArray[np.int64], end: int, change: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Applies `change` to each part of `ids` that an end token (EOD, or fragment end) terminates, and to the rest after the last one.

    An empty part is dropped with its end token.
    """
    ends = np.flatnonzero(ids == end)
    joined: list[NDArray[np.int64]] = []
    for start, stop in zip([0, *(ends + 1).tolist()], ends.tolist()):
        if stop > start:
            joined += [change(ids[start:stop]), np.array([end])]
    last = int(ends[-1]) + 1 if len(ends) else 0
    return np.concatenate([*joined, change(ids[last:])])


def _divide_document(
    document: NDArray[np.int64], *, rule: FillInMiddleRule, tokenizer: Tokenizer, random: np.random.RandomState
) -> NDArray[np.int64]:
    divide = partial(_divide, rule=rule, tokenizer=tokenizer, random=random)
    if rule.fragment_end is None or rule.fragment_end not in document:
        return divide(document, rate=rule.rate)
    if not random.binomial(1, rule.rate):
        return document
    return _join_parts(document, rule.fragment_end, partial(divide, rate=rule.fragment_rate))


def _divide(
    ids: NDArray[np.int64],
    *,
    rate: float,
    rule: FillInMiddleRule,
    tokenizer: Tokenizer,
    random: np.random.RandomState,
) -> NDArray[np.int64]:
    if not random.binomial(1, rate):
        return ids
    text = tokenizer.decode(ids.tolist())
    if _REPLACEMENT in text or (rule.no_prefix is not None and text.startswith(rule.no_prefix)):
        return ids
    # Each of the three parts may be empty.
    first, second = sorted(random.randint(0, len(text) + 1, size=2).tolist())
    prefix, middle, suffix = tokenizer.encode_batch([text[:first], text[first:second], text[second:]])
    if random.binomial(1, rule.spm_rate):
        order = [rule.prefix, rule.suffix, *suffix, rule.middle, *prefix, *middle]
    else:
        order = [rule.prefix, *prefix, rule.suffix, *suffix, rule.middle, *middle]
    return np.array(order, np.int64)
