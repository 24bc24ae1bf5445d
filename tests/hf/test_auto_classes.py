"""`petatron.integrations.transformers`: models that no family describes are opened, continued, trained and saved by transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import petatron
from petatron.base.errors import CheckpointError
from petatron.data.tokenizer import ByteTokenizer
from petatron.infer.engine import Engine
from petatron.infer.sampling_params import SamplingParams
from petatron.integrations import transformers as petatron_transformers
from petatron.integrations.transformers.weights import logical_parts
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.mtp_and_longrope_arrays import add_shifted_arrays
from petatron.pretrained.saveable_model import Model
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_model
from tests.hf.own_models import IDS, ROWS, opened, own_logits, own_model, padded
from tests.longform import diagonal
from tests.unit.infer.test_sample import MODEL, VOCAB


def test_logits_are_petatrons(saved: tuple[Model, Path]):
    model, folder = saved
    found = opened(folder)(input_ids=IDS).logits
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, own_logits(model, IDS), rtol=0, atol=1e-12)


@diagonal(2)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_changes_nothing(saved: tuple[Model, Path], left: bool):
    model, folder = saved
    rows = [[5, 17, 90, 3], [1, 2, 3, 4, 5, 6, 99], [8]]
    ids, mask = padded(rows, left=left)
    found = opened(folder)(input_ids=ids, attention_mask=mask).logits
    for row, own, logits in zip(rows, mask.bool(), found):
        torch.testing.assert_close(logits[own], own_logits(model, torch.tensor([row]))[0], rtol=0, atol=1e-12)


@diagonal(3)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_generation_is_petatrons(saved: tuple[Model, Path], left: bool, use_cache: bool):
    model, folder = saved
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    wanted = [answer.ids for [answer] in Engine(model).complete(ROWS, params)]
    ids, mask = padded(ROWS, left=left)
    found = opened(folder).generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
        eos_token_id=-1,
    )
    assert found[:, ids.shape[1] :].tolist() == wanted


@diagonal(3)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 3},
    ],
    ids=["beams", "samples", "prompt lookup", "prefill in chunks"],
)
def test_the_cache_serves_every_way_to_generate(saved: tuple[Model, Path], options: dict[str, Any]):
    model = opened(saved[1])
    lookup = "prompt_lookup_num_tokens" in options
    ids = torch.tensor([[5, 6, 5, 6, 5, 6, 5]]) if lookup else IDS
    if lookup and not model.new_cache().is_croppable:
        with pytest.raises(ValueError, match="Recurrent layers cannot forget tokens"):
            model.generate(ids, max_new_tokens=12, do_sample=False, **options)
        return
    answers = []
    for use_cache in (True, None) if lookup else (True, False):
        torch.manual_seed(3)
        given = {} if use_cache is None else {"use_cache": use_cache, **options}
        if use_cache is False:
            given.pop("prefill_chunk_size", None)
        answers.append(
            model.generate(
                ids, **{"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1, **given}
            )
        )
    assert answers[0].shape[1] == 19 and answers[0].tolist() == answers[1].tolist()


def trained_gradients(folder: Path, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of one step of a run, by logical tensor."""
    model = petatron.from_pretrained(folder)
    targets = labels[:, 1:]
    batch = Batch(IDS[:, :-1], targets.clamp(min=0), (targets >= 0).double())
    loss = model.train_step([add_shifted_arrays(batch, depths=model.spec.config.mtp_num_layers or 0)])
    found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in model.spec.logical_shapes().items()}
    for group in model.param_groups:
        for shard, gradient in group_tensor_shards(group, group.grads()):
            found[shard.name][shard.logical_slices()] = gradient
    return loss, found


def test_loss_and_gradients_are_those_of_training(saved: tuple[Model, Path]):
    labels = IDS.clone()
    labels[0, :3] = -100
    wanted_loss, wanted = trained_gradients(saved[1], labels)
    model = opened(saved[1]).train()
    assert all(parameter.requires_grad for parameter in model.parameters())
    loss = model(input_ids=IDS, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), wanted_loss, rtol=0, atol=1e-12, check_dtype=False)
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.decoder.named_parameters()
    }
    for part, gradient in logical_parts(model.spec, gradients):
        torch.testing.assert_close(gradient, wanted[part.name], rtol=0, atol=1e-12)


def test_padding_has_no_gradient(plain: Path):
    gradients = []
    for ids, mask in ((IDS[:1], None), padded([IDS[0].tolist(), [4] * 11], left=True)):
        model = opened(plain).train()
        labels = ids.clone()
        labels[1:] = -100
        if mask is not None:
            labels[mask == 0] = -100
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_model_of_transformers_can_be_fine_tuned_and_saved(plain: Path, tmp_path: Path):
    model = opened(plain).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "tuned", max_shard_size="20KB")
    assert len(list((tmp_path / "tuned").glob("*.safetensors"))) > 1
    again, ours = opened(tmp_path / "tuned"), petatron.from_pretrained(tmp_path / "tuned")
    with torch.no_grad():
        wanted = model.eval()(input_ids=IDS).logits
        torch.testing.assert_close(again(input_ids=IDS).logits, wanted, rtol=0, atol=0)
    torch.testing.assert_close(own_logits(ours, IDS), wanted, rtol=0, atol=1e-12)


def test_a_saved_folder_is_ours(saved: tuple[Model, Path], tmp_path: Path):
    """Settings, tensors with their expert biases, and the precision come back."""
    model = opened(saved[1], dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    before = json.loads((saved[1] / "config.json").read_text())
    assert {name: content[name] for name in ("model_type", "architectures", "model")} == {
        name: before[name] for name in ("model_type", "architectures", "model")
    }
    assert content["dtype"] == "float32" and content.get("moe") == before.get("moe")
    ours = petatron.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(own_logits(ours, IDS).double(), own_logits(saved[0], IDS), rtol=1e-4, atol=1e-4)


def test_tokenizer_and_pipeline_open_the_folder(tmp_path: Path):
    model = own_model("activation")
    model.save_pretrained(tmp_path / "model", tokenizer=ByteTokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("Once")["input_ids"] == ByteTokenizer().encode("Once")
    run = transformers.pipeline("text-generation", model=str(tmp_path / "model"))
    [found] = run("Once", max_new_tokens=6, do_sample=False)
    params = SamplingParams(max_new_tokens=6, temperature=0.0)
    [[wanted]] = Engine(model, ByteTokenizer()).complete([ByteTokenizer().encode("Once")], params)
    assert found["generated_text"] == "Once" + ByteTokenizer().decode(wanted.ids)


def test_a_checkpoint_is_opened_whatever_its_family(tmp_path: Path):
    """A run's newest step, one of its steps, and a folder of a family that transformers has."""
    words = f"{MODEL} --hidden-dropout 0 --attention-dropout 0"
    run = petatron.load_config(words.split()).config
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), 0))
    petatron.save_checkpoint(tmp_path / "run", step=3, model=model)
    content = json.loads((tmp_path / "run" / "step-00000003" / "model" / "config.json").read_text())
    assert content["model_type"] == "llama"
    for path in (tmp_path / "run", tmp_path / "run" / "step-00000003", tmp_path / "run" / "step-00000003" / "model"):
        found = petatron_transformers.from_checkpoint(path)
        torch.testing.assert_close(found(input_ids=IDS).logits, own_logits(model, IDS), rtol=0, atol=1e-6)
    assert petatron_transformers.from_checkpoint(tmp_path / "run", step=3, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(CheckpointError):
        petatron_transformers.from_checkpoint(tmp_path / "run", step=4)
    found.save_pretrained(tmp_path / "own")
    torch.testing.assert_close(
        own_logits(petatron.from_pretrained(tmp_path / "own"), IDS), own_logits(model, IDS), rtol=0, atol=1e-6
    )


def test_precision_and_device(plain: Path):
    assert opened(plain).dtype == torch.float64, "that of the weights"
    assert opened(plain, dtype="auto").dtype == torch.float64
    for option in ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}):
        model = opened(plain, device_map={"": "cpu"}, **option)
        assert model.dtype == torch.bfloat16 and model.config.dtype == torch.bfloat16
    assert opened(plain, device_map="cpu")(input_ids=IDS).logits.shape == (2, 7, VOCAB)
    half = opened(plain).to(torch.float32)
    torch.testing.assert_close(
        half(input_ids=IDS).logits.double(), opened(plain)(input_ids=IDS).logits, rtol=0, atol=1e-4
    )


def test_a_new_model_is_drawn_by_torchs_seed(plain: Path):
    config = AutoConfig.from_pretrained(plain)
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (VOCAB, 2, 32)
    assert (config.num_attention_heads, config.max_position_embeddings) == (4, 24)
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(AutoModelForCausalLM.from_config(config)(input_ids=IDS).logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert 0.01 < float(logits[0].detach().std()) < 100


def test_a_copy_is_a_model_of_its_own(saved: tuple[Model, Path]):
    """As averages of weights and reference models of fine-tuning are made."""
    model = opened(saved[1])
    before = model(input_ids=IDS).logits
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and not {*map(id, copied.modules())} & {*map(id, model.modules())}
    loss = copied(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.grad is not None:  # heads for later tokens have none
                parameter.sub_(parameter.grad)
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert float(copied(input_ids=IDS, labels=IDS).loss) != float(loss)
