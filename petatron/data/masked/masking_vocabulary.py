"""What masking knows of a vocabulary: special tokens, sentinels, and which tokens continue a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.index_cache import fingerprint
from petatron.data.tokenizer import Tokenizer, vocabulary_json
from petatron.data.tokenizers_library import load_fast

CONTINUATION = "##"
"""What WordPiece writes before a piece that continues a word."""
MOCK_ROLES = ("pad", "cls", "sep", "mask", "bos", "eos")
MAX_MOCK_SENTINELS = 100
MIN_MOCK_VOCABULARY = 24


@dataclass(frozen=True, slots=True, eq=False)
class MaskingVocabulary:
    """size: ids that a random replacement is drawn from. special_ids: by role. continues: by id, whether a token continues a word."""

    size: int
    special_ids: Mapping[str, int]
    sentinel_ids: tuple[int, ...]
    continues: NDArray[np.bool_] = field(repr=False)

    def __getitem__(self, role: str) -> int:
        return self.special_ids[role]

    def fingerprint(self) -> str:
        """Returns a name that is equal for vocabularies with the same samples."""
        pieces = np.flatnonzero(self.continues).tolist()
        return fingerprint({"size": self.size, **self.special_ids, "sentinels": self.sentinel_ids, "continue": pieces})


def masking_vocabulary(
    request: DatasetRequest, kind: str, roles: tuple[str, ...], *, sentinels: bool = False
) -> MaskingVocabulary:
    """Returns what the tokenizer of a run says; `DataError` with all special tokens that it lacks."""
    tokenizer = request.tokenizer
    if tokenizer is None:
        names = ", ".join(_spelling(role) for role in roles)
        raise DataError(
            f"--dataset-type {kind} needs a tokenizer, which says what {names} are. Give --tokenizer-model, or --vocab-file with "
            "--tokenizer-type BertWordPieceLowerCase."
        )
    missing = [_spelling(role) for role in roles if role not in tokenizer.special_ids]
    no_sentinels = sentinels and not tokenizer.sentinel_ids
    if missing or no_sentinels:
        fixes = []
        if missing:
            fixes.append("name them in its tokenizer_config.json, or give a tokenizer that has them")
        if no_sentinels:
            missing.append("the sentinels <extra_id_0>, <extra_id_1>, ...")
            fixes.append("add sentinels with --vocab-extra-ids 100")
        raise DataError(
            f"The tokenizer {tokenizer.name} has no {', '.join(missing)}, which --dataset-type {kind} puts into its samples: "
            f"{'; '.join(fixes)}."
        )
    return MaskingVocabulary(
        tokenizer.vocab_size,
        dict(tokenizer.special_ids),
        tuple(tokenizer.sentinel_ids) if sentinels else (),
        _continuations(tokenizer, max(tokenizer.vocab_size, request.vocab_size or 0)),
    )


def mock_vocabulary(request: DatasetRequest, *, sentinels: bool = False) -> MaskingVocabulary:
    """Returns that of made-up text. What the tokenizer does not name has the last ids of the vocabulary; sentinels at most a quarter."""
    size = request.vocab_size
    if size is None:
        raise DataError("--mock-data needs --vocab-size or a tokenizer, to know which token ids to make up.")
    if size < MIN_MOCK_VOCABULARY:
        raise DataError(
            f"--mock-data with special tokens needs at least {MIN_MOCK_VOCABULARY} ids, and the vocabulary has {size}. "
            "Give a larger --vocab-size."
        )
    named = {} if request.tokenizer is None else request.tokenizer.special_ids
    sentinel_ids = () if request.tokenizer is None else tuple(request.tokenizer.sentinel_ids)
    taken = {*named.values(), *sentinel_ids}
    free = iter(number for number in range(size - 1, -1, -1) if number not in taken)
    special_ids = {role: named[role] if role in named else next(free) for role in MOCK_ROLES}
    if sentinels and not sentinel_ids:
        sentinel_ids = tuple(next(free) for _ in range(min(MAX_MOCK_SENTINELS, size // 4)))
    return MaskingVocabulary(size, special_ids, sentinel_ids if sentinels else (), np.zeros(size, np.bool_))


def _spelling(role: str) -> str:
    return f"[{role.upper()}]"


def _continuations(tokenizer: Tokenizer, size: int) -> NDArray[np.bool_]:
    continues = np.zeros(size, np.bool_)
    content = vocabulary_json(tokenizer)
    if content is not None:
        ids = load_fast(content).get_vocab(with_added_tokens=True)
        continues[[number for token, number in ids.items() if token.startswith(CONTINUATION)]] = True
    return continues
