"""What is not a sound Megatron checkpoint of ours is refused, with the file and the remedy, and nothing in it is run."""

from __future__ import annotations

import os
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from petatron.base.errors import CheckpointError, ConfigError
from petatron.checkpoint.megatron import open_megatron
from petatron.checkpoint.megatron.read_megatron_pickles import load_dist_metadata
from tests.unit.checkpoint.megatron.megatron_files import WIDTH, Case, DistFile, write_dist, write_legacy

LLAMA = Case()


class Runs:
    """Its pickle runs a shell command when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def assert_refused(folder: Path, *words: str, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        for lazy in open_megatron(folder).tensors.values():
            lazy.load()
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return text


def dist(tmp_path: Path, case: Case = LLAMA) -> DistFile:
    made = write_dist(tmp_path, case)
    made.finish(case.args())
    return made


# ---- Programs in the place of data


def test_a_program_in_a_legacy_file(tmp_path: Path):
    mark = tmp_path / "ran"
    write_legacy(tmp_path, LLAMA, edit=lambda content: content.update(opt_param_scheduler=Runs(mark)))
    assert_refused(tmp_path, "posix.system", "model_optim_rng.pt", "nothing in it was run", "save it again")
    assert not mark.exists()


def test_a_program_in_common(tmp_path: Path):
    mark, made = tmp_path / "ran", dist(tmp_path)
    torch.save({"args": Runs(mark)}, made.step / "common.pt")
    assert_refused(made.step, "posix.system", "common.pt")
    assert not mark.exists()


def test_a_program_in_the_table(tmp_path: Path):
    mark, made = tmp_path / "ran", dist(tmp_path)
    (made.step / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    assert_refused(made.step, "posix.system", ".metadata", "nothing in it was run")
    assert not mark.exists()


def test_a_program_in_a_chunk(tmp_path: Path):
    mark, made = tmp_path / "ran", write_dist(tmp_path, LLAMA)
    made.add("decoder.final_layernorm.weight", (WIDTH,), [((0,), Runs(mark))])
    made.finish(LLAMA.args())
    assert_refused(made.step, "posix.system", ".distcp")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "builtins.getattr", "torch.load", "torch.nn.Module", "os.fspath"])
def test_the_table_can_name_nothing_else(tmp_path: Path, name: str):
    module, _, attribute = name.rpartition(".")
    path = tmp_path / ".metadata"
    path.write_bytes(b"c" + module.encode() + b"\n" + attribute.encode() + b"\n.")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_dist_metadata(path)


def test_a_class_of_someone_elses(tmp_path: Path):
    """Named, so that its owner can save the file without it."""
    write_legacy(tmp_path, LLAMA, edit=lambda content: setattr(content["args"], "thing", torch.nn.Identity()))
    assert_refused(tmp_path, "torch.nn.modules.linear.Identity", "plain values")


class Scope(Enum):
    """An enum that nobody has heard of."""

    BLOCK = "block"
    NONE = 0


class Settings:
    """A plain container of a run's own."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Table(dict[str, Any]):
    pass


def test_unknown_enums_and_containers_among_the_arguments_are_opaque(tmp_path: Path):
    """They change no model, and every version of Megatron adds some."""

    def edit(content: dict[str, Any]) -> None:
        content["args"].scope, content["args"].scopes = Scope.BLOCK, [Scope.NONE, {"a": Scope.BLOCK}]
        content["args"].settings, content["args"].table = Settings(inner=Scope.NONE), Table(a=1)
        content["args"].counts, content["args"].ids = defaultdict(list, {"a": [1]}), {1, 2}

    write_legacy(tmp_path, LLAMA, edit=edit)
    assert open_megatron(tmp_path).model["num_layers"] == LLAMA.layers


def test_unknown_enums_elsewhere_are_refused(tmp_path: Path):
    write_legacy(tmp_path, LLAMA, edit=lambda content: content.update(scope=Scope.BLOCK))
    assert_refused(tmp_path, "Scope", "nothing in it was run")


def test_a_program_among_the_arguments(tmp_path: Path):
    """It looks like an enum member: a call with one text."""
    mark = tmp_path / "ran"
    write_legacy(tmp_path, LLAMA, edit=lambda content: setattr(content["args"], "scope", [Runs(mark)]))
    assert_refused(tmp_path, "posix.system", "nothing in it was run")
    assert not mark.exists()


# ---- Files that are not whole


def test_a_truncated_legacy_file(tmp_path: Path):
    file = write_legacy(tmp_path, LLAMA) / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:700])
    assert_refused(tmp_path, str(file), "Copy the checkpoint again")


def test_a_missing_rank(tmp_path: Path):
    step = write_legacy(tmp_path, replace(LLAMA, tp=2, pp=2))
    (step / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    assert_refused(
        tmp_path, "mp_rank_01_000 is missing", "tensor 2 x pipeline 2 x expert 1", "Copy the folders of all ranks"
    )


def test_ranks_of_two_layouts(tmp_path: Path):
    step = write_legacy(tmp_path, LLAMA)
    (step / "mp_rank_00").rename(step / "kept")
    write_legacy(tmp_path / "other", replace(LLAMA, tp=2))
    for folder in (tmp_path / "other").glob("*/mp_rank_*"):
        folder.rename(step / folder.name)
    (step / "kept").rename(step / "mp_rank_02")
    assert_refused(tmp_path, "also mp_rank_02", "Keep only")


def test_a_truncated_table_and_other_pickles(tmp_path: Path):
    made = dist(tmp_path)
    whole = (made.step / ".metadata").read_bytes()
    for content in (whole[: len(whole) // 2], b"", pickle.dumps({"a": 1}), b"\x80\x04]\x94."):
        (made.step / ".metadata").write_bytes(content)
        assert_refused(made.step, ".metadata", "Copy the checkpoint again")


def test_a_table_of_something_else(tmp_path: Path):
    made = dist(tmp_path)
    made.table["embedding.word_embeddings.weight"].chunks[0].offsets = torch.Size((3, 0))
    made.finish(LLAMA.args())
    assert_refused(made.step, ".metadata", "not a table that is understood")


def test_a_truncated_or_missing_chunk_file(tmp_path: Path):
    made = dist(tmp_path)
    file = made.step / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert_refused(made.step, str(file), "cut short", "Copy it again")
    file.unlink()
    assert_refused(made.step, str(file), "Copy the folder again")


def test_chunks_that_are_not_what_the_table_says(tmp_path: Path):
    made = dist(tmp_path)
    file = made.step / "__0_0.distcp"
    damaged = bytearray(file.read_bytes())
    damaged[:400] = bytes(400)
    file.write_bytes(bytes(damaged))
    assert_refused(made.step, str(file), "Copy the checkpoint again")


@pytest.mark.parametrize(
    "value, words",
    [(torch.ones(3), "different saves"), (torch.ones(WIDTH).half(), "different saves"), ({"a": 1}, "holds a dict")],
)
def test_a_chunk_of_another_kind(tmp_path: Path, value: Any, words: str):
    made = write_dist(tmp_path, LLAMA)
    made.add("decoder.final_layernorm.weight", (WIDTH,), [((0,), value)])
    made.table["decoder.final_layernorm.weight"].chunks[0].sizes = torch.Size((WIDTH,))
    made.finish(LLAMA.args())
    assert_refused(made.step, words, ".distcp")


def test_chunks_with_a_gap(tmp_path: Path):
    made = write_dist(tmp_path, replace(LLAMA, tp=2))
    made.table["embedding.word_embeddings.weight"].chunks.pop()
    made.finish(replace(LLAMA, tp=2).args())
    assert_refused(made.step, "embedding.word_embeddings.weight do not cover it", "all ranks")


def test_a_table_that_points_elsewhere_or_is_compressed(tmp_path: Path):
    for folder, change, words in (
        ("a", {"relative_path": "../secret"}, "outside of its folder"),
        ("b", {"transform_descriptors": ["zstd"]}, "Save it without compression"),
    ):
        made = write_dist(tmp_path / folder, LLAMA)
        next(iter(made.places.values())).__dict__.update(change)
        made.finish(LLAMA.args())
        assert_refused(made.step, words)


def test_no_common_file(tmp_path: Path):
    made = dist(tmp_path)
    (made.step / "common.pt").unlink()
    assert_refused(made.step, "common.pt", "Copy the whole folder")


def test_a_gate_without_its_up(tmp_path: Path):
    made = write_dist(tmp_path, LLAMA, halves=True)
    del made.table["decoder.layers.mlp.linear_fc1.weight_v"]
    made.finish(LLAMA.args())
    assert_refused(made.step, "nor a gate and an up")


# ---- Other folders and trackers


def test_folders_that_are_none(tmp_path: Path):
    assert_refused(tmp_path / "nowhere", "is not a folder")
    assert_refused(tmp_path, "latest_checkpointed_iteration.txt", "iter_ folder")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    assert_refused(tmp_path, "'soon'", "Write the step")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert_refused(tmp_path, "iter_0000007", "no folder")
    (tmp_path / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    assert_refused(tmp_path, "holds no mp_rank_*/model_optim_rng.pt")


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda c: c.pop("args"), "has no `args`"),
        (lambda c: c.pop("model"), "neither `model` nor `model0`"),
        (lambda c: c.update(model=[1]), "a list where the model's weights"),
        (lambda c: c.update(checkpoint_version=0), "checkpoint version 0"),
        (lambda c: c["args"].__dict__.update(num_experts=2, expert_tensor_parallel_size=2), "Save it as torch_dist"),
        (lambda c: c["model"].update(extra=torch.ones(2)), "extra is not a weight of this model"),
        (lambda c: c["model"].pop("output_layer.weight"), "output_layer.weight is missing"),
        (lambda c: c["model"].update({"output_layer.weight": torch.ones(8, WIDTH)}), "at least [50, 16]"),
        (lambda c: c["model"].update({"decoder.final_layernorm.weight": torch.ones(3)}), "is [3], but"),
    ],
)
def test_legacy_contents(tmp_path: Path, edit: Callable[[dict], None], words: str):
    write_legacy(tmp_path, LLAMA, edit=edit)
    assert_refused(tmp_path, words, "iter_0000030")


def test_a_file_without_a_dictionary(tmp_path: Path):
    step = write_legacy(tmp_path, LLAMA)
    torch.save([1], step / "mp_rank_00" / "model_optim_rng.pt")
    assert_refused(tmp_path, "holds a list instead of a dictionary")


def test_ranks_that_disagree(tmp_path: Path):
    def edit_second(folder: Path, change: Callable[[dict], None]) -> Path:
        file = write_legacy(folder, replace(LLAMA, tp=2)) / "mp_rank_01" / "model_optim_rng.pt"
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)
        return folder

    one = edit_second(tmp_path / "a", lambda c: c["model"].update({"output_layer.weight": torch.ones(2, WIDTH)}))
    assert_refused(one, "output_layer.weight", "differs from that of the other", "one step of one run")
    two = edit_second(tmp_path / "b", lambda c: c["model"].pop("output_layer.weight"))
    assert_refused(two, "do not hold the same weights: output_layer.weight")
    three = edit_second(tmp_path / "c", lambda c: c.update(model0=c["model"], model1=c.pop("model")))
    assert_refused(three, "mixes ranks of 1, 2 virtual stages")


def test_all_arguments_that_do_not_fit_are_named_at_once(tmp_path: Path):
    extra = {"glu_linear_offset": 1.0, "attention_output_gate": True, "softmax_type": "learnable"}
    write_legacy(tmp_path, replace(LLAMA, extra=extra))
    assert_refused(
        tmp_path, "3 problems", "--glu-linear-offset", "--attention-output-gate", "learnable", kind=ConfigError
    )


@pytest.mark.parametrize(
    "values, words",
    [
        ({"num_layers": None}, "--num-layers"),
        ({"hidden_size": "wide"}, "--hidden-size"),
        ({"max_position_embeddings": None, "seq_length": None}, "--max-position-embeddings"),
        ({"vocab_size": None}, "--vocab-size is not in the checkpoint's arguments; its embedding is padded to 56 rows"),
        ({"position_embedding_type": "mrope"}, "--position-embedding-type mrope"),
        ({"window_size": (3, 3)}, "--window-size (3, 3)"),
        ({"position_embedding_type": "yarn"}, "--position-embedding-type yarn cannot be converted"),
        ({"group_query_attention": True, "num_query_groups": 3}, "--num-query-groups 3"),
        ({"multi_latent_attention": True, "kv_lora_rank": "narrow"}, "--kv-lora-rank narrow"),
        ({"multi_latent_attention": True, "kv_lora_rank": 0}, "--kv-lora-rank 0 is below 1"),
        (
            {"multi_latent_attention": True, "rope_type": "rope", "rotary_scaling_factor": 4, "mscale_all_dim": 1},
            "--rotary-scaling-factor 4 scales scores by --mscale-all-dim, but no positions",
        ),
        ({"mtp_num_layers": "two"}, "--mtp-num-layers two is not a whole number"),
        ({"mtp_num_layers": 10**9}, "--mtp-num-layers 1000000000 is above 10,000"),
        ({"is_hybrid_model": True, "hybrid_mlp_ratio": "half"}, "--hybrid-layer-pattern is not in the checkpoint's"),
        ({"hybrid_layer_pattern": "MG"}, "--hybrid-layer-pattern MG has gated delta nets, whose weights"),
        (
            {"hybrid_override_pattern": "M*/M/*"},
            "has depths of different layers, M and *, and all depths have the same",
        ),
        ({"hybrid_override_pattern": "M*", "mtp_num_layers": 1}, "--mtp-num-layers 1 needs the layers of a depth"),
        ({"hybrid_override_pattern": "M", "mamba_head_dim": 0}, "--mamba-head-dim 0"),
        ({"num_experts": 4, "moe_router_dtype": "bf8"}, "--moe-router-dtype bf8 is not one of"),
        ({"num_experts": 4, "moe_layer_freq": [1]}, "--moe-layer-freq [1]"),
        ({"normalization": "L2Norm"}, "--normalization L2Norm"),
        ({"num_experts": 4, "moe_aux_loss_coeff": [0.1, 0.2]}, "--moe-aux-loss-coeff [0.1, 0.2]"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, values: dict[str, Any], words: str):
    write_legacy(tmp_path, LLAMA, edit=lambda content: content["args"].__dict__.update(values))
    assert_refused(tmp_path, words, kind=ConfigError)
