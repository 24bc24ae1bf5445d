"""Odd inputs of `petatron.integrations.transformers`, its cache, and what it refuses."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from petatron.base.errors import CheckpointError, ConfigError
from petatron.integrations import transformers as petatron_transformers
from petatron.integrations.transformers.packed_inputs import PackedInputs
from petatron.layers.attention import AttentionSpec
from tests.forked_python import run_forked
from tests.hf.own_models import IDS, ROWS, opened, own_model, padded
from tests.unit.infer.test_sample import VOCAB


def test_odd_batches(plain: Path):
    model = opened(plain)
    assert model(input_ids=torch.zeros((0, 5), dtype=torch.int64)).logits.shape == (0, 5, VOCAB)
    assert model(input_ids=torch.zeros((2, 0), dtype=torch.int64)).logits.shape == (2, 0, VOCAB)
    mask = torch.zeros_like(IDS)
    assert not model(input_ids=IDS, attention_mask=mask).logits.any(), "all of it is padding"
    assert float(model(input_ids=IDS, attention_mask=mask, labels=IDS).loss) == 0.0
    mask[0, 2:5] = 1
    found = model(input_ids=IDS, attention_mask=mask, use_cache=True)
    assert not found.logits[1].any() and not found.logits[0, :2].any()
    torch.testing.assert_close(found.logits[0, 5], found.logits[0, 4]), "padding after a token has its logits"
    alone = model(input_ids=IDS[:1, 2:5]).logits
    torch.testing.assert_close(found.logits[:1, 2:5], alone, rtol=0, atol=1e-12)
    assert found.past_key_values.lengths_B.tolist() == [3, 0] and found.past_key_values.get_seq_length() == 7


def test_logits_to_keep_and_positions(plain: Path):
    model = opened(plain)
    whole = model(input_ids=IDS).logits
    torch.testing.assert_close(model(input_ids=IDS, logits_to_keep=2).logits, whole[:, -2:], rtol=0, atol=1e-12)
    chosen = model(input_ids=IDS, logits_to_keep=torch.tensor([0, 3])).logits
    torch.testing.assert_close(chosen, whole[:, [0, 3]], rtol=0, atol=1e-12)
    positions = torch.arange(7)[None]
    torch.testing.assert_close(model(input_ids=IDS, position_ids=positions).logits, whole, rtol=0, atol=1e-12)
    assert not torch.allclose(model(input_ids=IDS, position_ids=2 * positions).logits, whole)
    padded_ids, mask = padded([[5, 17], IDS[0].tolist()], left=True)
    given = model(input_ids=padded_ids, attention_mask=mask, position_ids=2 * positions).logits
    torch.testing.assert_close(given[1:], model(input_ids=IDS[:1], position_ids=2 * positions).logits)
    assert isinstance(model(input_ids=IDS, return_dict=False)[0], torch.Tensor)


def test_the_number_of_targets_may_be_the_callers(plain: Path):
    model = opened(plain)
    loss = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS, num_items_in_batch=24).loss, loss / 2)


def test_a_cache_goes_on_is_cropped_and_reset(plain: Path):
    model = opened(plain)
    whole = model(input_ids=IDS).logits
    cache = model.new_cache()
    with torch.no_grad():
        for begin, end in ((0, 3), (3, 4), (4, 7)):
            found = model(input_ids=IDS[:, begin:end], past_key_values=cache).logits
            torch.testing.assert_close(found, whole[:, begin:end], rtol=0, atol=1e-12)
        for left in (-2, 5):
            cache.crop(left)
            assert cache.get_seq_length() == 5 and cache.get_max_length() == -1 and not cache.is_compileable
        found = model(input_ids=IDS[:, 5:], past_key_values=cache).logits
        torch.testing.assert_close(found, whole[:, 5:], rtol=0, atol=1e-12)
        cache.crop(-1)
        cache.batch_repeat_interleave(2)
        last = model(input_ids=IDS[[0, 0, 1, 1], 6:], past_key_values=cache).logits
        torch.testing.assert_close(last, whole[[0, 0, 1, 1], 6:], rtol=0, atol=1e-12)
        cache.reset()
        found = model(input_ids=IDS[:1], past_key_values=cache).logits
        torch.testing.assert_close(found, whole[:1], rtol=0, atol=1e-12)


def test_recurrent_layers_forget_nothing(tmp_path: Path):
    own_model("recurrent").save_pretrained(tmp_path / "model")
    model = opened(tmp_path / "model")
    whole, cache = model(input_ids=IDS).logits, model.new_cache()
    with torch.no_grad():
        model(input_ids=IDS[:, :4], past_key_values=cache)
        assert not cache.is_croppable
        cache.crop(0)
        with pytest.raises(ValueError, match="Recurrent layers cannot forget"):
            cache.crop(-1)
        cache.batch_select_indices(torch.tensor([1]))
        found = model(input_ids=IDS[1:, 4:], past_key_values=cache).logits
        torch.testing.assert_close(found, whole[1:, 4:], rtol=0, atol=1e-12)
        cache.reset()
        torch.testing.assert_close(model(input_ids=IDS, past_key_values=cache).logits, whole, rtol=0, atol=1e-12)


def test_columns_of_padding_alone_are_counted(plain: Path):
    model, cache = opened(plain), opened(plain).new_cache()
    blank = torch.zeros((2, 4), dtype=torch.int64)
    with torch.no_grad():
        model(input_ids=blank, attention_mask=blank, past_key_values=cache)
        mask = torch.cat((blank, torch.ones_like(IDS)), dim=1)
        found = model(input_ids=IDS, attention_mask=mask, past_key_values=cache).logits
    assert cache.get_seq_length() == 11
    torch.testing.assert_close(found, model(input_ids=IDS).logits, rtol=0, atol=1e-12)


def test_sequences_run_alone_where_layers_mix_documents(plain: Path, monkeypatch: pytest.MonkeyPatch):
    model = opened(plain)
    ids, mask = padded(ROWS, left=True)
    wanted = model(input_ids=ids, attention_mask=mask).logits
    monkeypatch.setattr(AttentionSpec, "separates_documents", False)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, wanted, rtol=0, atol=1e-12)


def test_without_pages_generation_is_uncached(plain: Path, monkeypatch: pytest.MonkeyPatch):
    wanted = opened(plain).generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    monkeypatch.setattr(AttentionSpec, "can_generate", False)
    model = opened(plain)
    assert model.generation_config.use_cache is False
    found = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert found.tolist() == wanted.tolist()
    with pytest.raises(ValueError, match="have no cache"):
        model.generate(IDS, max_new_tokens=5, use_cache=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "no inputs_embeds"),
        ({"output_hidden_states": True}, "neither hidden states nor attention"),
        ({"past_key_values": transformers.DynamicCache()}, "not a DynamicCache"),
    ],
)
def test_what_a_forward_pass_cannot_do(plain: Path, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        opened(plain)(input_ids=IDS, **options)


def test_training_has_no_cache(plain: Path):
    model = opened(plain).train()
    with pytest.raises(ValueError, match="has no gradients"):
        model(input_ids=IDS, use_cache=True)
    with torch.no_grad():
        assert model(input_ids=IDS, use_cache=True).past_key_values is not None
    with pytest.raises(NotImplementedError, match="--vocab-size"):
        model.resize_token_embeddings(200)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_map": "auto"}, "device_map auto splits a model"),
        ({"device_map": {"decoder": "cpu", "head": "cpu"}}, "splits a model"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config is an option"),
    ],
)
def test_options_that_are_refused(plain: Path, options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        petatron_transformers.PetatronForCausalLM.from_pretrained(plain, **options)


def test_another_config_and_another_place_are_refused(plain: Path, tmp_path: Path):
    config = AutoConfig.from_pretrained(plain)
    config.model = {**config.model, "hidden_size": 64}
    with pytest.raises(ConfigError, match="describes another model"):
        AutoModelForCausalLM.from_pretrained(plain, config=config)
    with pytest.raises(CheckpointError, match="Download a model of the hub first"):
        petatron_transformers.PetatronForCausalLM.from_pretrained("someone/something")
    for content in ({}, {"model": [1]}, {"model": {"number_of_layers": 2}}):
        with pytest.raises(ConfigError):
            petatron_transformers.PetatronForCausalLM(petatron_transformers.PetatronConfig(**content))


@pytest.mark.parametrize("content", ["{", "[]", "\x1b[2J"])
def test_a_broken_generation_config_is_named(plain: Path, tmp_path: Path, content: str):
    shutil.copytree(plain, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not what transformers writes") as caught:
        opened(tmp_path / "model")
    assert "\x1b" not in str(caught.value)


def test_without_the_import_transformers_says_what_it_misses(plain: Path):
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(plain)!r})"
    found = run_forked([sys.executable, "-c", code], cwd=plain)
    assert found.returncode and "model type `petatron`" in found.stderr


def test_without_transformers_the_import_says_what_to_install(tmp_path: Path):
    code = "import sys; sys.modules['transformers'] = None; import petatron.integrations.transformers"
    found = run_forked([sys.executable, "-c", code], cwd=tmp_path)
    assert found.returncode and "pip install 'petatron[hf]'" in found.stderr


def test_a_folder_without_a_tokenizer(plain: Path):
    with pytest.raises((OSError, ValueError)):
        AutoTokenizer.from_pretrained(plain)
    assert opened(plain).generate(IDS, max_new_tokens=2, pad_token_id=0).shape == (2, 9)


def test_packed_rows_by_hand():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    inputs = PackedInputs.of(torch.arange(8).view(2, 4), mask, seen_B=np.array([0, 5]))
    assert inputs.packed(inputs.tokens_BS).tolist() == [1, 2, 4, 6, 7]
    assert inputs.packed_positions(None).tolist() == [0, 1, 5, 6, 7]
    assert inputs.rows_BS.tolist() == [[-1, 0, 1, 1], [2, 2, 3, 4]]
    assert inputs.targets(inputs.tokens_BS).tolist() == [[-100, 2, -100, -100], [-100, -100, 7, -100]]
