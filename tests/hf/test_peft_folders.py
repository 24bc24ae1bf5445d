"""Folders of adapters: PEFT opens ours, we open PEFT's, and merged models compute what adapted ones do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import petatron
from petatron.base.errors import CheckpointError, ConfigError, DataError
from petatron.cli.main import main
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.dist import RankPool
from tests.hf.test_peft import KINDS
from tests.hf.zoo import BUILDERS, VOCABULARY

TOKENS = torch.arange(48).reshape(2, 24) % VOCABULARY


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_model(tmp_path, "qwen2-qkv-bias")


def base_model(folder: Path, name: str) -> Path:
    torch.manual_seed(5)
    model = BUILDERS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "base")
    return folder / "base"


def theirs(folder: Path, adapter: Path | None = None) -> Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def ours(folder: Path, **options: Any) -> Tensor:
    with torch.no_grad():
        return petatron.from_pretrained(folder, dtype="fp32", **options).module.eval().logits(TOKENS)


def peft_adapter(base: Path, kind: str) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, KINDS[kind])
    for name, parameter in adapted.named_parameters():
        if "ia3" in name or "magnitude" in name:
            parameter.data.mul_(1.0 + 0.3 * torch.rand_like(parameter))
    adapted.save_pretrained(base.parent / kind)
    return base.parent / kind


@pytest.mark.parametrize("kind", KINDS)
def test_petatron_opens_and_merges_what_peft_wrote(base: Path, kind: str):
    adapter = peft_adapter(base, kind)
    expected = theirs(base, adapter)
    assert (expected - theirs(base)).abs().max() > 0.1
    torch.testing.assert_close(ours(adapter), expected, rtol=0, atol=2e-5)
    merged, again = base.parent / "merged", base.parent / "again"
    convert(open_model_reader(adapter), merged, ConversionOptions(target_format="huggingface"))
    torch.testing.assert_close(theirs(merged), expected, rtol=0, atol=2e-5)
    convert(open_model_reader(adapter), again, ConversionOptions(target_format="peft", base_model=str(base)))
    torch.testing.assert_close(theirs(base, again), expected, rtol=0, atol=2e-5)


def train(base: Path, *flags: str) -> Path:
    """Trains the first steps of a run that starts from a folder, and saves it."""
    more = "--mock-data --lr 1e-2 --train-iters 2 --num-workers 0 --micro-batch-size 2 --seq-length 16".split()
    run = petatron.load(flags=["--from", str(base), *more, *flags])
    model = petatron.build_model(run, petatron.launch(run))
    optimizer = petatron.build_optimizer(run, model)
    loader = petatron.build_loader(run, model.mesh)
    for _ in range(2):
        model.train_step(next(loader))
        optimizer.step()
    petatron.save_checkpoint(base.parent / "run", step=2, model=model, optimizer=optimizer)
    return base.parent / "run"


@pytest.mark.parametrize("name", ["qwen2-qkv-bias", "gpt2", "phi3"])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_peft_opens_what_was_trained(tmp_path: Path, name: str, kind: str):
    base = base_model(tmp_path, name)
    run = train(base, "--adapter", kind, "--adapter-targets", "all-linear")
    trained = ours(run)
    assert (trained - ours(base)).abs().max() > 1e-3
    options = ConversionOptions(target_format="peft", base_model=str(base))
    convert(open_model_reader(run), tmp_path / "adapter", options)
    torch.testing.assert_close(theirs(base, tmp_path / "adapter"), trained, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours(tmp_path / "adapter"), trained, rtol=0, atol=2e-5)
    convert(open_model_reader(run), tmp_path / "merged", ConversionOptions(target_format="huggingface"))
    torch.testing.assert_close(theirs(tmp_path / "merged"), trained, rtol=0, atol=2e-5)


def greedy(folder: Path) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=6, temperature=0.0)
    answers = Engine(petatron.from_pretrained(folder, dtype="fp32")).complete(TOKENS[:, :8].tolist(), params)
    return [answer.ids for [answer] in answers]


def test_adapters_generate_what_merged_weights_do(base: Path):
    adapter, merged = peft_adapter(base, "lora"), base.parent / "merged"
    assert main(["checkpoint", "convert", str(adapter), str(merged), "--to", "huggingface"]) == 0
    assert greedy(adapter) == greedy(merged) != greedy(base)


def test_a_run_starts_with_adapters_of_peft(base: Path):
    adapter = peft_adapter(base, "lora")
    run = petatron.load(
        flags=["--from", str(adapter), "--mock-data", "--lr", "1", "--train-iters", "1", "--seq-length", "8"]
    )
    assert (run.config.model.adapter, run.config.model.adapter_rank) == ("lora", 4)
    model = petatron.build_model(run, petatron.launch(run))
    with torch.no_grad():
        torch.testing.assert_close(model.module.eval().logits(TOKENS), ours(adapter), rtol=0, atol=1e-5)


def test_merging_keeps_a_run_of_ours(base: Path, capsys: pytest.CaptureFixture[str]):
    run, merged = train(base, "--adapter", "lora"), base.parent / "merged"
    assert main(["checkpoint", "convert", str(run), str(merged), "--to", "petatron", "--merge"]) == 0
    assert "the adapters (lora) are merged" in capsys.readouterr().out
    assert open_model_reader(merged).spec.config.adapter is None
    torch.testing.assert_close(ours(merged), ours(run), rtol=0, atol=2e-5)
    assert main(["checkpoint", "convert", str(run), str(base.parent / "peft"), "--to", "peft"]) == 0
    told = json.loads((base.parent / "peft" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(base)


def edited(adapter: Path, **changes: Any) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return adapter


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "is an adapter of the kind PREFIX_TUNING. LoRA, rsLoRA"),
        ({"bias": "all", "modules_to_save": ["lm_head"]}, "has bias, modules_to_save, which is not read"),
        ({"base_model_name_or_path": None}, "names no model that the adapter is beside"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "is an adapter of /nowhere/at/all, which is not here"),
    ],
)
def test_an_adapter_that_cannot_be_read_says_why(base: Path, changes: dict[str, Any], told: str):
    with pytest.raises(CheckpointError, match=told):
        open_model_reader(edited(peft_adapter(base, "lora"), **changes))


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path):
    adapter = peft_adapter(base, "lora")
    other = base_model(tmp_path / "other", "gpt2")
    with pytest.raises(CheckpointError, match="beside what this model has linears for"):
        open_model_reader(edited(adapter, base_model_name_or_path=str(other)))
    wider = base_model(tmp_path / "wider", "qwen3-head-norm")
    with pytest.raises(CheckpointError, match="have other shapes than the model's linears"):
        open_model_reader(edited(adapter, base_model_name_or_path=str(wider)))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has adapter_config.json and no adapter_model.safetensors"):
        open_model_reader(adapter)


def test_adapters_need_their_model_and_a_model_its_adapters(base: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        main(["checkpoint", "convert", str(base), str(base.parent / "none"), "--to", "peft", "--base-model", "x"]) == 1
    )
    assert "has no adapters" in capsys.readouterr().err
    flags = ["--to", "huggingface", "--base-model", "x"]
    assert main(["checkpoint", "convert", str(base), str(base.parent / "none"), *flags]) == 2
    assert "--base-model is about --to peft" in capsys.readouterr().err
    adapter = peft_adapter(base, "lora")
    with pytest.raises(CheckpointError, match="does not say which model its adapters are beside"):
        convert(open_model_reader(adapter), base.parent / "none", ConversionOptions(target_format="peft"))


def test_an_adapter_is_beside_no_adapter(base: Path):
    run = train(base, "--adapter", "lora")
    with pytest.raises(CheckpointError, match=r"which has adapters too\. Merge those first"):
        open_model_reader(edited(peft_adapter(base, "lora"), base_model_name_or_path=str(run)))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "falcon-h1"])
def test_other_layers_generate_and_merge(tmp_path: Path, name: str):
    base = base_model(tmp_path, name)
    run, merged = train(base, "--adapter", "lora", "--lr", "0.05"), tmp_path / "merged"
    trained = ours(run)
    assert (trained - ours(base)).abs().max() > 0.01
    convert(open_model_reader(run), merged, ConversionOptions(target_format="huggingface"))
    torch.testing.assert_close(ours(merged), trained, rtol=0, atol=5e-5)
    assert greedy(run) == greedy(merged)


def with_adapters(folders: Mapping[str, str | Path]) -> EngineOptions:
    return EngineOptions(adapters=tuple((name, str(folder)) for name, folder in folders.items()))


def test_adapters_of_one_step_answer_as_merged_weights_do(base: Path):
    folders = {kind: peft_adapter(base, kind) for kind in ("lora", "some", "ranks")}
    expected = {kind: greedy(folder) for kind, folder in folders.items()} | {"": greedy(base)}
    engine = Engine(petatron.from_pretrained(base, dtype="fp32"), options=with_adapters(folders))
    prompts = [prompt for prompt in TOKENS[:, :8].tolist() for _ in expected]
    params = [SamplingParams(max_new_tokens=6, temperature=0.0, adapter=kind) for _ in TOKENS for kind in expected]
    for _ in range(2):  # the second time prefixes are cached
        answers = [answer.ids for [answer] in engine.complete(prompts, [[one] for one in params])]
        assert answers == [expected[kind][row] for row in range(len(TOKENS)) for kind in expected]
    with pytest.raises(DataError, match=r"The engine has no adapter 'other'\. It has lora, some, ranks"):
        engine.submit([1], SamplingParams(adapter="other"))


def answers_with_adapters(base: str, folders: dict[str, str], prompts: list[list[int]], params: list[SamplingParams]):
    torch.set_num_threads(1)
    model = petatron.from_pretrained(base, ParallelMesh(Layout(tp=2), dist.get_rank()), dtype="fp32")
    engine = Engine(model, options=with_adapters(folders))
    return [answer.ids for [answer] in engine.complete_on_all_ranks(prompts, [[one] for one in params])]


def test_adapters_are_sharded_as_weights(ranks: RankPool, base: Path):
    folders = {kind: str(peft_adapter(base, kind)) for kind in ("lora", "some")}
    prompts, kinds = TOKENS[:, :8].tolist(), ["lora", "some"]
    params = [SamplingParams(max_new_tokens=6, temperature=0.0, adapter=kind) for kind in kinds]
    expected = [greedy(Path(folders[kind]))[row] for row, kind in enumerate(kinds)]
    assert ranks.run(answers_with_adapters, 2, str(base), folders, prompts, params) == [expected, expected]


def test_what_is_not_served_by_request_says_why(base: Path):
    model = petatron.from_pretrained(base, dtype="fp32")
    with pytest.raises(CheckpointError, match=r"kind dora, which is not served by request\. Merge it"):
        Engine(model, options=with_adapters({"a": peft_adapter(base, "dora")}))
    adapted = petatron.from_pretrained(peft_adapter(base, "lora"), dtype="fp32")
    with pytest.raises(ConfigError, match="beside a model that has adapters of its own"):
        Engine(adapted, options=with_adapters({"a": peft_adapter(base, "lora")}))
    experts = base_model(base.parent / "moe", "qwen3-moe")
    with pytest.raises(DataError, match="has none: start it with --lora"):
        Engine(petatron.from_pretrained(experts)).submit([1], SamplingParams(adapter="a"))
