"""A preference objective and its dataset of pairs, defined outside of the package, train the same in every layout and like transformers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import petatron
from examples import preference
from petatron.base.errors import ConfigError, DataError
from petatron.config import RunConfig
from petatron.config.import_user_modules import PLUGIN_GROUP, import_installed_plugins
from petatron.data.build_datasets import build_datasets, chosen_kind
from petatron.data.tokenizer import ByteTokenizer
from petatron.history.metric_curves import build_panels
from petatron.history.metrics_file import read_metrics
from petatron.history.run_folder import open_runs
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_loaders
from petatron.train.report.format_records import format_record
from petatron.train.report.metric_writers import tagged_scalars
from petatron.verify.compare_traces import Tolerances
from petatron.verify.record_trace import StepTrace, assemble_tensors
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_traces, tiny_run, train, train_recorded

BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)


def train_preference(run: RunConfig) -> tuple[list[StepTrace], list[CommEvent]]:
    """On one rank, which imports this module and with it the objective and the dataset."""
    return train_recorded(run)


def run_of(flags: str, *, world_size: int = 1) -> RunConfig:
    return tiny_run(flags, world_size=world_size, dtype="float64")


def write_pairs(path: Path, count: int, *, seed: int = 0) -> Path:
    """Pairs of token ids of different lengths."""
    random = np.random.default_rng(seed)
    pairs = [
        {
            "prompt": random.integers(0, 131, random.integers(1, 6)).tolist(),
            "chosen": random.integers(0, 131, random.integers(2, 14)).tolist(),
            "rejected": random.integers(0, 131, random.integers(2, 14)).tolist(),
        }
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reference of another size, as any run saves it, and a file of pairs."""
    folder = tmp_path_factory.mktemp("preference")
    reference = run_of("--hidden-size 48 --num-layers 4 --seed 7")
    petatron.save_checkpoint(folder / "run", step=1, model=petatron.build_model(reference, ParallelMesh.single()))
    pairs = write_pairs(folder / "pairs.jsonl", 12)
    objective = f"--objective preference --objective-settings reference={folder / 'run'} beta=0.5"
    return f"--no-mock-data --data-path {pairs} --split 1 {objective}"


@pytest.fixture(scope="module")
def alone(flags: str) -> list[StepTrace]:
    return train(run_of(f"{flags} --micro-batch-size 8"))


@diagonal(2)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        ("--pp 2", 2),
        ("--cp 2", 2),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        later("--tp 2", 2),
        later("--dp 2", 2),
        later("--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        later("--pp 2 --pipeline-schedule zb-h1", 2),
        later("--cp 2 --dp 2 --cp-comm-type all_gather", 4),
        later("--tp 2 --pp 2 --sequence-parallel", 4),
    ],
)
def test_every_layout_prefers_the_same(
    ranks: RankPool, alone: list[StepTrace], flags: str, layout: str, world_size: int
):
    check_traces(ranks, run_of(f"{flags} {layout}", world_size=world_size), alone, BOUNDS, train_rank=train_preference)


def transformers_losses(models: list[Any], batch: petatron.Batch, beta: float) -> torch.Tensor:
    """The formula of DPO in plain torch on two models of transformers: the one that is trained, and the reference."""
    sums: list[torch.Tensor] = []
    for model in models:
        likelihoods = model(batch.tokens).logits.log_softmax(-1).gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
        sums.append((likelihoods * batch.loss_mask).sum(1))
    policy, reference = sums[0], sums[1].detach()
    return -F.logsigmoid(beta * ((policy[0::2] - reference[0::2]) - (policy[1::2] - reference[1::2])))


def test_loss_gradients_and_metrics_are_those_of_transformers(tmp_path: Path):
    """To 1e-6: norms of transformers compute in float32, whatever the model's precision."""
    from transformers import AutoModelForCausalLM

    mesh = ParallelMesh.single()
    for name, seed in (("policy", 1), ("reference", 2)):
        petatron.build_model(run_of(f"--seed {seed}"), mesh).save_pretrained(tmp_path / name)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 6)
    objective = f"--objective preference --objective-settings reference={tmp_path / 'reference'} beta=0.5"
    start = f"--pretrained-checkpoint {tmp_path / 'policy'}"
    run = run_of(f"--no-mock-data --data-path {pairs} --split 1 {start} {objective}")
    model, batches = petatron.build_model(run, mesh), next(petatron.build_loader(run, mesh))
    total = model.train_step(batches)
    assert [batch.num_samples for batch in batches] == [2] * 4 and batches[0].tokens.shape == (4, 16)
    folders = [tmp_path / "policy", tmp_path / "reference"]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    expected = torch.cat([transformers_losses(models, batch, 0.5) for batch in batches])
    expected.mean().backward()
    expected = expected.detach()
    assert float(total) == pytest.approx(float(expected.mean()), rel=1e-6)
    margins = -torch.log(torch.expm1(expected))
    assert float(model.named_metrics["margin"]) == pytest.approx(float(margins.mean()), rel=1e-6)
    assert float(model.named_metrics["accuracy"]) == float((margins > 0).double().mean())
    ours = gradients(model)
    theirs = {name: param.grad for name, param in models[0].named_parameters()}
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "layers.0.attention.out.weight": "model.layers.0.self_attn.o_proj.weight",
        "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
        "norm.weight": "model.norm.weight",
    }
    for name, other in names.items():
        bound = 1e-6 * float(theirs[other].abs().max())
        torch.testing.assert_close(ours[name], theirs[other], rtol=1e-5, atol=bound)
    squares = [sum(float((grad.double() ** 2).sum()) for grad in grads.values()) for grads in (ours, theirs)]
    assert squares[0] == pytest.approx(squares[1], rel=1e-6)


def gradients(model: petatron.Model) -> dict[str, torch.Tensor]:
    from petatron.verify.record_trace import _traced_shards

    return {name: tensor for (_, name), tensor in assemble_tensors(_traced_shards(model, "gradient")).items()}


def test_metrics_reach_the_log_and_every_validation_set_is_evaluated(tmp_path: Path, flags: str):
    """Two sets with names, each under its own; of a loss that is not the next token's no perplexity."""
    sets = [write_pairs(tmp_path / f"{name}.jsonl", 8, seed=seed) for seed, name in enumerate(("easy", "hard"), 1)]
    data = flags.replace("--data-path", "--train-data-path").replace("--split 1", "")
    words = f"{data} --valid-data-path easy={sets[0]} hard={sets[1]} --eval-iters 1 --eval-interval 1 --log-interval 1"
    run = petatron.load(None, [*tiny_words(), *words.split(), "--save", str(tmp_path / "run")])
    assert list(build_loaders(run.config, ParallelMesh.single()).valid) == ["easy", "hard"]
    for metrics in run.train():
        assert set(metrics["objective_metrics"]) == {"margin", "accuracy"}
    assert run.evaluate(dataset="hard").loss != run.evaluate().loss
    with pytest.raises(DataError, match="no validation set 'other'"):
        run.evaluate(dataset="other")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train_records = [record for record in records if record["kind"] == "train"]
    assert all(record["named_losses"] == {"preference loss": record["lm_loss"]} for record in train_records)
    assert all(0 <= record["objective_metrics"]["accuracy"] <= 1 for record in train_records)
    valid = [record for record in records if record["kind"] == "valid"]
    assert [(record["iteration"], record["dataset"]) for record in valid] == [
        (step, name) for step in (1, 2) for name in ("easy", "hard")
    ]
    assert valid[0]["lm_loss"] != valid[1]["lm_loss"] and all("lm_loss_ppl" not in record for record in valid)
    assert set(tagged_scalars(valid[1])) == {
        f"{name} validation/hard" for name in ("preference loss", "margin", "accuracy")
    }
    assert " on hard | preference loss value: " in format_record(valid[1])
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics.named_losses == ("preference loss",) and metrics.objective_metrics == ("margin", "accuracy")
    best = metrics.best_evaluation()
    assert best is not None and best.dataset == "easy" and best.loss == min(valid[0]["lm_loss"], valid[2]["lm_loss"])
    panels = build_panels(open_runs([tmp_path / "run"]), metrics=["loss", "valid"])
    assert [panel.title for panel in panels] == ["Training loss", "margin", "accuracy", "Validation loss"]
    assert [curve.label.rpartition(": ")[2] for curve in panels[-1].curves] == ["easy", "hard"]


def tiny_words() -> list[str]:
    from tests.parity.harness import TINY

    return [*TINY.split(), "--fp64", "--train-iters", "2", "--lr-warmup-iters", "1"]


def test_pairs_are_split_blended_and_made_up_like_any_data(tmp_path: Path, flags: str):
    one, two = (write_pairs(tmp_path / f"{name}.jsonl", 10, seed=seed) for seed, name in enumerate("ab"))
    objective = "--objective preference --objective-settings reference=unused"
    run = run_of(f"--no-mock-data --data-path 3 {one} 1 {two} --split 8,2,0 {objective}")
    built = build_datasets(run, None, (40, 4, 0))
    assert built.train is not None and built.valid is not None and len(built.train) == 40
    of_a = {json.loads(line)["chosen"][0] for line in one.read_text().splitlines()}
    assert (
        built.train.fingerprint
        != build_datasets(run_of(f"--no-mock-data --data-path {one} {objective}"), None, (9, 0, 0)).train
    )
    assert of_a and len(built.valid) == 4
    made_up = build_datasets(run_of(objective), None, (5, 2, 0))
    assert made_up.train is not None and len(made_up.train) == 5
    batch = chosen_kind(run).collate([made_up.train[0], made_up.train[1]], None)  # pyright: ignore[reportArgumentType]
    assert batch.tokens.shape == (4, 16) and batch.num_samples == 2
    with pytest.raises(DataError, match="cannot be read"):
        build_datasets(run_of(f"--no-mock-data --data-path {tmp_path}/none {objective}"), None, (4, 0, 0))
    (tmp_path / "bad").write_text('{"prompt": [1]}\n')
    with pytest.raises(DataError, match="line 1 lacks prompt, chosen or rejected"):
        build_datasets(run_of(f"--no-mock-data --data-path {tmp_path}/bad {objective}"), None, (4, 0, 0))


def test_texts_need_a_tokenizer(tmp_path: Path):
    (tmp_path / "pairs").write_text(json.dumps({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}) + "\n")
    run = run_of(f"--no-mock-data --data-path {tmp_path}/pairs --split 1 --dataset-type pairs")
    train_set = build_datasets(run, ByteTokenizer(), (1, 0, 0)).train
    assert train_set is not None
    sample = train_set[0]
    assert isinstance(sample, Mapping)
    assert sample["ids"][0, :9].tolist() == list(b"2 + 2 = 4") and sample["mask"][1].nonzero()[0].tolist() == [7]
    unreadable = build_datasets(run, None, (1, 0, 0)).train
    assert unreadable is not None
    with pytest.raises(DataError, match="need a tokenizer"):
        unreadable[0]


def test_a_name_of_a_kind_that_is_wrong_is_told(flags: str):
    with pytest.raises(
        ConfigError, match=r"--dataset-type pair is not a registered kind of dataset\. Did you mean pairs"
    ):
        chosen_kind(run_of("--dataset-type pair"))
    with pytest.raises(ConfigError, match="order=2 is no setting of --dataset-type pairs"):
        chosen_kind(run_of("--dataset-type pairs --dataset-settings order=2"))
    with pytest.raises(ConfigError, match="is registered already"):
        petatron.register_dataset("pairs", petatron.DatasetKind)
    assert isinstance(chosen_kind(run_of("--dataset-kind pairs")), preference.Pairs), "the old spelling"


def test_an_installed_package_brings_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package with an entry point in our group, as pip leaves it in a folder of sys.path: no flag imports it."""
    (tmp_path / "installed_kind.py").write_text(
        "import petatron\nfrom examples.preference import Pairs\npetatron.register_dataset('installed-pairs', Pairs)\n"
    )
    metadata = tmp_path / "own_kind-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-kind\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\nown = installed_kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    import_installed_plugins.cache_clear()
    assert isinstance(chosen_kind(run_of("--dataset-type installed-pairs")), preference.Pairs)
