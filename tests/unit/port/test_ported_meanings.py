"""The file of a script trains what its flags mean to Megatron, also where ours alone would mean something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.validate import resolve_config
from tests.unit.port.test_ported_run import port


@pytest.mark.parametrize(
    ("flags", "path", "expected"),
    [
        ("--num-query-groups 2", "num_query_groups", None),
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("--no-bias-gelu-fusion", "activation", None),
        ("--disable-bias-linear", "activation", None),
        ("--swiglu", "activation", "swiglu"),
        ("--use-checkpoint-args --load /none", "activation", None),
        ("--position-embedding-type yarn", "rope_scaling_factor", "1.0"),
        ("--experimental-attention-variant dsa", "attention_dropout", "0.0"),
        ("--experimental-attention-variant dsa --attention-dropout 0.1", "attention_dropout", "0.0"),
        (
            "--overlap-moe-expert-parallel-comm --fine-grained-activation-offloading",
            "overlap_moe_expert_parallel_comm",
            None,
        ),
    ],
)
def test_a_flag_of_a_script_means_what_it_means_to_megatron(flags: str, path: str, expected: object, tmp_path: Path):
    run = port(f"torchrun pretrain_gpt.py --num-layers 2 {flags}", tmp_path)
    made = {setting.path.partition(".")[2]: setting.value for setting, _ in run.settings}
    assert str(made.get(path)) == str(expected)


def test_the_file_of_a_script_is_the_model_that_its_flags_are(tmp_path: Path):
    """What Megatron's command runs here by its own name, the file trains too."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 32 --mock-data --lr 1e-3"
    flags += " --max-position-embeddings 32 --micro-batch-size 1 --train-iters 4"
    file = tmp_path / "ported.yaml"
    file.write_text(port(f"torchrun pretrain_gpt.py {flags}", tmp_path).yaml())
    models = [
        resolve_config(words)[0].config.model
        for words in (["--megatron-defaults", *flags.split()], ["--config", str(file)])
    ]
    assert models[0] == models[1] and (models[0].activation, models[0].num_query_groups) == ("gelu_tanh", 4)


@pytest.mark.parametrize("is_here", [True, False])
def test_a_file_of_lists_of_data_is_typed_beside_the_file_of_settings(is_here: bool, tmp_path: Path):
    lists = tmp_path / "lists.json"
    if is_here:
        lists.write_text('{"train": ["0.5", "a", "0.5", "b"], "valid": ["c"]}')
    flags = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --per-split-data-args-path {lists}"
    flags += " --max-position-embeddings 32 --micro-batch-size 1 --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 64"
    run = port(f"torchrun pretrain_gpt.py {flags}", tmp_path)
    assert not run.blocks and run.typed_flags == ["--per-split-data-args-path", str(lists)]
    assert f"--per-split-data-args-path {lists} (line 1): names a file" in run.yaml()
    assert ("cannot be read" in str(run.absent_files)) is not is_here
    file = tmp_path / "ported.yaml"
    file.write_text(run.yaml())
    if is_here:
        loaded, problems = resolve_config(["--config", str(file), *run.typed_flags])
        assert problems == [] and loaded.config.data.train_data_path == ("0.5", "a", "0.5", "b")


def test_a_file_of_lists_of_data_is_still_checked(tmp_path: Path):
    (tmp_path / "lists.json").write_text('{"train": 3}')
    run = port(
        f"torchrun pretrain_gpt.py --num-layers 2 --per-split-data-args-path {tmp_path / 'lists.json'}", tmp_path
    )
    assert "is not lists of prefixes by split" in str(run.problems) and run.blocks
