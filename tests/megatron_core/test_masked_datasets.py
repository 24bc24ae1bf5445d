"""Masked samples for BERT and T5 are those of megatron-core's own datasets, bit for bit."""

from __future__ import annotations

import pytest

from tests.megatron_core.run_core import WHEEL
from tests.megatron_core.run_masked_samples import real_samples
from tests.unit.data.masked.sentence_corpus import CASES, check_against, samples_of, write_corpus, write_vocabulary

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not WHEEL.is_dir(), reason=f"{WHEEL} has no megatron-core: make megatron-core fetches it"),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory):
    return real_samples(tmp_path_factory.mktemp("theirs"), {name: case[-1] for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_megatron_core(name: str, theirs, tmp_path):
    tokenizer, prefix = write_vocabulary(tmp_path), write_corpus(tmp_path)
    ours = samples_of(prefix, tokenizer, name)
    assert len(ours) >= CASES[name][-1]
    check_against(ours, theirs[name], is_t5=CASES[name][0] == "t5")
