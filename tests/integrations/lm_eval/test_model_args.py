"""What lm_eval hands over is read, and everything wrong with it is told at once."""

from __future__ import annotations

from typing import Any

import pytest

from petatron.base.errors import ConfigError
from petatron.cli.subcommands.lm_eval_starter import with_default_model
from petatron.integrations.lm_eval.model_args import read_model_args, sampling_params
from petatron.parallel.forward_sequences import BATCH_TOKENS


def test_batch_sizes_are_sequences_of_full_length():
    four = read_model_args({"pretrained": "x", "batch_size": "4"}, world_size=1)
    assert four.batch_tokens(100) == 400 and four.engine_options(100).max_sequences == 4
    auto = read_model_args(
        {"pretrained": "x", "batch_size": "auto:2", "dtype": "auto", "device": "cuda:0"}, world_size=1
    )
    assert auto.batch_tokens(100) == BATCH_TOKENS and auto.engine_options(100).max_length == 101
    assert auto.dtype is None and auto.flags == []
    assert read_model_args({"pretrained": "x", "device": "cuda"}, world_size=1).flags == ["--device", "cuda"]
    most = read_model_args({"pretrained": "x", "batch_size": "auto", "max_batch_size": 3}, world_size=1)
    assert most.batch_tokens(100) == 300


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({}, ["pretrained is not given. Add pretrained=FOLDER"]),
        ({"batch_size": "some"}, ["batch_size some is neither a number nor auto"]),
        (
            {"batch_size": 0, "max_length": -1},
            ["batch_size 0 is not a number of 1", "max_length -1 is not a number of 1"],
        ),
        ({"max_gen_toks": "many", "max_batch_size": True}, ["max_gen_toks many is not", "max_batch_size True is not"]),
        ({"prefix_token_id": "<s>"}, ["prefix_token_id <s> is not an id"]),
        ({"add_bos_token": "yes"}, ["add_bos_token yes is neither True nor False"]),
        ({"device": "cuda:1"}, ["device cuda:1 is not a device of this model. Use cpu or cuda; CUDA_VISIBLE_DEVICES"]),
        (
            {"tensor_model_parallel_size": 2},
            ["tensor_model_parallel_size 2 are more ranks", "petatron serve CHECKPOINT"],
        ),
        (
            {"parallelize": True},
            ["parallelize True is not an argument of the model petatron. Arguments: pretrained, dtype"],
        ),
    ],
)
def test_problems_come_at_once(given: dict[str, Any], messages: list[str]):
    with pytest.raises(ConfigError) as error:
        read_model_args(given, world_size=1)
    assert all(message in str(error.value) for message in messages), error.value


def test_several_ranks_are_refused():
    with pytest.raises(ConfigError, match="tensor_model_parallel_size 4 are more ranks"):
        read_model_args({"pretrained": "x"}, world_size=4)


def test_generation_settings():
    plain = sampling_params({"until": "end"}, default_max_tokens=7, stop_ids=(3,))
    assert plain.greedy and plain.max_new_tokens == 7 and plain.stop_strings == ("end",) and plain.stop_ids == (3,)
    given = {
        "until": ["", "a"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 9,
        "max_new_tokens": 2,
        "num_beams": 1,
    }
    found = sampling_params(given, default_max_tokens=7, stop_ids=(), sample=2)
    assert (found.temperature, found.top_p, found.top_k, found.seed, found.max_new_tokens) == (0.5, 0.9, 5, 9, 2)
    assert found.stop_strings == ("a",) and found.sample == 2
    assert sampling_params({**given, "do_sample": False}, default_max_tokens=7, stop_ids=()).greedy
    with pytest.raises(ConfigError, match=r"(?s)typical_p 0.5 is not known here.*num_beams 3 is a beam search"):
        sampling_params({"typical_p": 0.5, "num_beams": 3}, default_max_tokens=7, stop_ids=())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --tasks a", "run --model petatron --tasks a"),
        ("run --model hf --tasks a", "run --model hf --tasks a"),
        ("--tasks a -M hf", "run --tasks a -M hf"),
        ("--tasks a --model=hf", "run --tasks a --model=hf"),
        ("--config c.yaml", "run --config c.yaml"),
        ("run", "run"),
        ("validate --tasks a", "validate --tasks a"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_the_model_petatron_is_the_default(words: str, expected: str):
    assert with_default_model(words.split()) == expected.split()
