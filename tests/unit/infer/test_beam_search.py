"""Beam search against transformers, against all answers there are, and across layouts and kinds of caches."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from petatron.base.errors import ConfigError, DataError
from petatron.infer.beam.beam_search import BeamAnswer, BeamParams, BeamSearch, beam_search
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.open_engine import model_settings, open_engine
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.unit.infer.test_recurrent import HYBRID
from tests.unit.infer.test_sample import LATENT, model_in

PROMPTS = [[5, 3, 1, 7], [2] * 13]
OPTIONS = EngineOptions(page_size=4, max_sequences=16)
EOS = 9


def _engine(flags: str = "", *, world_size: int = 1, options: EngineOptions = OPTIONS) -> Engine:
    model = model_in(
        f"--fp64 --init-method-std 0.3 {flags}", world_size=world_size
    )  # the most likely ids are far apart
    return Engine(model, options=options)


def _search(engine: Engine) -> list[list[BeamAnswer]]:
    params = BeamParams(width=3, max_new_tokens=6, length_penalty=0.7, stop_ids=tuple(range(0, 131, 4)))
    found = beam_search(engine, PROMPTS, params)
    assert engine.stats.pages_used == 0 and engine.stats.running == 0
    return found


def _search_on_ranks(flags: str, world_size: int) -> list[list[BeamAnswer]] | None:
    torch.set_num_threads(1)
    engine = _engine(flags, world_size=world_size)
    if torch.distributed.get_rank() > 0:
        engine.follow()
        return None
    found = _search(engine)
    engine.close()
    return found


def _assert_same(found: list[list[BeamAnswer]] | None, expected: list[list[BeamAnswer]], *, rtol: float = 1e-9) -> None:
    assert found is not None
    assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in expected]
    scores = [torch.tensor([one.score for row in rows for one in row]).double() for rows in (found, expected)]
    torch.testing.assert_close(*scores, rtol=rtol, atol=0)


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0])
def test_a_search_wider_than_all_answers_finds_the_best_of_them(length_penalty: float):
    engine, vocab_size, stop, longest, prompt = _engine("--vocab-size 5"), 5, 2, 3, [1, 0, 3]
    ids_up_to = (itertools.product(range(vocab_size), repeat=count) for count in range(1, longest + 1))
    every = [ids for some in ids_up_to for ids in some]
    whole = [ids for ids in every if stop not in ids[:-1] and (ids[-1] == stop or len(ids) == longest)]
    scored = engine.complete([[*prompt, *ids] for ids in whole], SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    sums = [sum(entry.logprob for entry in one.prompt_logprobs[len(prompt) - 1 :]) for [one] in scored]
    truth = [BeamAnswer(ids, total, total / len(ids) ** length_penalty) for ids, total in zip(whole, sums)]
    params = BeamParams(
        width=vocab_size**longest, max_new_tokens=longest, length_penalty=length_penalty, stop_ids=(stop,)
    )
    _assert_same(beam_search(engine, [prompt], params), [sorted(truth, key=lambda answer: -answer.score)])


def test_one_beam_is_greedy():
    engine = _engine()
    [[greedy]] = engine.complete(PROMPTS[:1], SamplingParams(max_new_tokens=7, temperature=0.0, logprobs=0))
    [[found]] = beam_search(engine, PROMPTS[:1], BeamParams(width=1, max_new_tokens=7, length_penalty=0.0))
    assert list(found.ids) == greedy.ids and found.score == pytest.approx(sum(one.logprob for one in greedy.logprobs))


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    folder = tmp_path_factory.mktemp("beam") / "hf"
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def hf_engine(hf_model: tuple[object, Path]) -> Engine:
    return open_engine(model_settings(hf_model[1], options=OPTIONS), dtype="fp32").engine


@diagonal(2)
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (4, 0.0), (4, 2.0), (5, -0.5)])
def test_answers_and_scores_are_those_of_transformers(
    hf_model, hf_engine: Engine, width: int, length_penalty: float, early_stopping: bool
):
    params = BeamParams(
        width=width, max_new_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping, stop_ids=(EOS,)
    )
    prompts = [[3, 8, 2], [1] * 9, [17, 4, 20, 6, 11]]
    theirs = []
    for prompt in prompts:
        found = hf_model[0].generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=12,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=EOS,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = []
        for ids, score in zip(found.sequences.tolist(), found.sequences_scores.tolist()):
            new = ids[len(prompt) :]
            new = new[: new.index(EOS) + 1] if EOS in new else new
            answers.append(BeamAnswer(tuple(new), 0.0, score))
        theirs.append(answers)
    _assert_same(beam_search(hf_engine, prompts, params), theirs, rtol=1e-4)
    assert length_penalty > 1 or any(answer.ids[-1] == EOS for row in theirs for answer in row), (
        "some end by themselves"
    )


@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2", later("--dp 2"), later("--tp 2 --sequence-parallel --pp 2")])
def test_layouts_find_what_one_process_finds(ranks: RankPool, layout: str):
    world_size = 4 if "sequence" in layout else 2
    found, *_ = ranks.run(_search_on_ranks, world_size, layout, world_size)
    _assert_same(found, _search(_engine()))


@pytest.mark.parametrize("flags", [LATENT, HYBRID])
def test_caches_of_other_kinds_and_pages_that_are_not_shared_change_nothing(flags: str):
    found = _search(_engine(flags))
    alone = _search(_engine(flags, options=EngineOptions(page_size=16, max_sequences=1, prefix_caching=False)))
    _assert_same(found, alone)


def test_pages_of_beams_are_shared():
    engine = _engine()
    _search(engine)
    assert engine.stats.cached_prompt_tokens > engine.stats.prompt_tokens / 2


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"width": 0}, "keeps no beam"),
        ({"width": 2, "max_new_tokens": 0}, "asks for nothing"),
        ({"width": 2, "length_penalty": float("nan")}, "is not between -50 and 50"),
    ],
)
def test_settings_without_sense_are_refused(wrong: dict, rule: str):
    with pytest.raises(ConfigError, match=rule):
        BeamParams(**wrong)


def test_what_an_engine_cannot_search_is_refused():
    with pytest.raises(ConfigError, match="more than the 98 beams"):
        BeamSearch([1], BeamParams(width=99, stop_ids=(1, 2)), vocab_size=1000)
    assert BeamSearch([1], BeamParams(width=99, stop_ids=(1, 2)), vocab_size=100).requests()[0][1].logprobs == 100
    with pytest.raises(DataError, match="leaves room for"):
        beam_search(_engine(), [[1] * 20], BeamParams(width=2, max_new_tokens=30))
