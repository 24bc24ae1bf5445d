"""`--from FOLDER`: a new run of a model that exists, with its settings, tokenizer and weights, in one command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.cli.main import main
from petatron.cli.train import read_checkpoint
from petatron.config import CheckpointConfig, LoadedConfig
from petatron.data.bpe.train_bpe import train_bpe
from petatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.train.state.check_run_dirs import check_run_dirs
from petatron.validate import load_config, resolve_config

RUN = "--mock-data --lr 1e-12 --eval-iters 0 --num-workers 0 --live off --log-interval 1 --train-iters 1 --device cpu".split()
SHAPE = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 --vocab-size 300 --seq-length 8"
LLAMA = f"{SHAPE} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --max-position-embeddings 32"

IDS = 290


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model with a tokenizer, and a run that began with it."""
    folder = tmp_path_factory.mktemp("models")
    words = (f"{first}{second}" for first in "abcdefgh" for second in "ijklmnop")
    assert train_bpe([" ".join(words)] * 2, IDS, folder / "tokenizer" / "tokenizer.json").vocab_size == IDS
    model = petatron.build_model(petatron.load(None, [*LLAMA.split(), *RUN], world_size=1), ParallelMesh.single())
    model.save_pretrained(folder / "base", tokenizer=folder / "tokenizer")
    assert main(["train", "--from", str(folder / "base"), *RUN, "--save", str(folder / "run")]) == 0
    return folder


def read(*argv: str) -> LoadedConfig:
    return load_config([*argv, *RUN], read_checkpoint=read_checkpoint)


def problems(*argv: str) -> list[str]:
    return [str(problem) for problem in resolve_config([*argv, *RUN], read_checkpoint=read_checkpoint)[1]]


def test_a_run_has_the_model_the_tokenizer_and_the_weights(folder: Path):
    base, step = folder / "base", folder / "run" / "step-00000001"
    begin, end = (load_file(path / "model.safetensors") for path in (base, step / "model"))
    assert begin.keys() == end.keys()
    assert all(torch.allclose(begin[key], end[key], rtol=0, atol=1e-9) for key in begin)
    assert (step / "model" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (base, step / "model"))
    assert before == after
    manifest = json.loads((step / "manifest.json").read_text())
    assert manifest["facts"]["facts"]["progress"]["iteration"] == 1
    assert main(["checkpoint", "verify", str(folder / "run")]) == 0


@pytest.mark.parametrize("place", ["base", "run", "run/step-00000001", "run/step-00000001/model"])
def test_any_folder_with_a_model_will_do(folder: Path, place: str, capsys: pytest.CaptureFixture[str]):
    loaded, tokenizer = open_tokenizer(read("--from", str(folder / place)))
    run = loaded.config
    assert (run.model.num_layers, run.model.num_query_groups, run.model.activation) == (2, 2, "swiglu")
    assert run.checkpoint.pretrained_checkpoint == str(folder / place) and run.checkpoint.load is None
    assert tokenizer is not None and tokenizer.vocab_size == IDS and run.model.vocab_size == 300
    [notice] = loaded.notices
    assert notice.startswith(f"--from {folder / place} ") and "fresh, at iteration 0" in notice
    assert "2 layers, hidden size 16, 4 heads, vocabulary 300" in notice and "the tokenizer (" in notice


def test_the_first_lines_say_what_was_taken(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    flags = [*RUN, "--seq-length", "16", "--hidden-dropout", "0.5", "--log-dir", str(tmp_path)]
    assert main(["train", "--from", str(folder / "run"), *flags]) == 0
    said = capfd.readouterr()
    step = folder / "run" / "step-00000001"
    assert said.err.startswith(f"note: --from {folder / 'run'} ({step}) gives this run the model (2 layers, ")
    assert f"first weights from {folder / 'run'}" in said.out and f"{IDS} ids" in said.out


def test_an_empty_folder_to_load_begins_with_the_weights_of_from(folder: Path, tmp_path: Path, capfd):
    words = ["--save", str(tmp_path / "new"), "--load", str(tmp_path / "new")]
    assert main(["train", "--from", str(folder / "base"), *RUN, *words]) == 0
    said = capfd.readouterr()
    begins = f"holds no checkpoint yet; training starts with the weights of {folder / 'base'}"
    assert f"--load {tmp_path / 'new'} {begins}" in said.out + said.err and "beginning" not in said.out + said.err


def test_changed_settings_of_a_folder_are_those_that_are_no_defaults(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "show", "--from", str(folder / "base"), "--changed"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert {"num_layers", "hidden_size", "num_query_groups", "activation", "vocab_size"} <= names
    assert not names & {"mamba_state_dim", "q_lora_rank", "window_size", "ssm_multipliers", "moe_router_topk"}


def test_what_a_run_may_choose_stays_free(folder: Path):
    flags = "--seq-length 16 --max-position-embeddings 64 --hidden-dropout 0.5 --bf16 --tp 2 --lr 1e-4 --moe-aux-loss-coeff 1"
    run = read("--from", str(folder / "base"), *flags.split()).config
    assert (run.model.seq_length, run.model.max_position_embeddings, run.model.hidden_dropout) == (16, 64, 0.5)
    assert run.precision.bf16 and run.parallel.world_size == 2
    assert problems("--from", str(folder / "base"), "--seq-length", "64") == [
        f"--max-position-embeddings 32 of {folder / 'base'} is shorter than --seq-length 64. Use 64 or more."
    ]
    same = "--num-layers 2 --rotary-base 10000 --swiglu --group-query-attention --num-query-groups 2 --vocab-size 300"
    assert problems("--from", str(folder / "base"), *same.split()) == []


def test_every_contradiction_names_both(folder: Path, tmp_path: Path):
    base = str(folder / "base")
    (tmp_path / "more.yaml").write_text("model:\n  hidden_size: 32\n")
    found = problems(
        "--from", base, "--num-layers", "3", "--rotary-base", "500", "--config", str(tmp_path / "more.yaml")
    )
    assert found == [
        f"--num-layers 3 contradicts --from {base}, whose model has 2. Leave it out.",
        f"--hidden-size 32 contradicts --from {base}, whose model has 16 ({tmp_path / 'more.yaml'}:2). Leave it out.",
        f"--rotary-base 500.0 contradicts --from {base}, whose model has 10000.0. Leave it out.",
    ]
    [preset] = problems("--from", base, "--preset", "tiny-gpt", "--seq-length", "8")
    assert preset.startswith(f"--preset tiny-gpt contradicts --from {base} (--num-layers ")
    assert "--normalization LayerNorm, and the folder has RMSNorm" in preset
    assert preset.endswith("Leave it out: the folder says what the model is.")


def test_learned_positions_cannot_get_longer(tmp_path: Path):
    run = petatron.load(None, [*SHAPE.split(), *RUN], world_size=1)
    petatron.build_model(run, ParallelMesh.single()).save_pretrained(tmp_path / "gpt")
    [problem] = problems("--from", str(tmp_path / "gpt"), "--max-position-embeddings", "16")
    assert "--max-position-embeddings 16 contradicts" in problem and "whose model has 8" in problem


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--load {run}",
            "cannot be combined with --load {run}: both say where the weights come from. Leave --load out",
        ),
        ("--load {run} --save other", "cannot be combined with --load {run}: both say"),
        ("--load {run} --use-checkpoint-args", "cannot be combined with --use-checkpoint-args, which takes the model"),
        (
            "--pretrained-checkpoint {run}",
            "cannot be combined with --pretrained-checkpoint {run}: both name the first weights",
        ),
        ("--finetune", "--finetune is for --load; --from takes the weights alone anyway. Leave it out."),
        ("--ckpt-step 3", "Give the step itself: --from {base}/step-00000003."),
    ],
)
def test_flags_that_say_the_same_are_conflicts(folder: Path, flags: str, words: str):
    names = {"run": folder / "run", "base": folder / "base"}
    found = problems("--from", str(folder / "base"), *flags.format(**names).split())
    assert any(words.format(**names) in problem for problem in found), found
    assert all("--from" in problem for problem in found), "nothing else is known to be wrong"


def test_one_command_line_serves_the_first_start_and_every_restart(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    flags = ["--from", str(folder / "base"), "--save", str(tmp_path / "new"), "--load", str(tmp_path / "new")]
    assert main(["train", *flags, *RUN]) == 0
    assert f"unless {tmp_path / 'new'} has a checkpoint to continue" in capfd.readouterr().err
    assert main(["train", *flags, *RUN, "--train-iters", "2", "--lr-decay-iters", "1"]) == 0
    assert "resumed at iteration 1" in capfd.readouterr().out


def test_the_saved_config_starts_it_again(folder: Path):
    again = load_config(files=[folder / "run" / "config.yaml"]).config
    first = read("--from", str(folder / "base")).config
    assert again.model == first.model and again.tokenizer == first.tokenizer
    assert again.checkpoint.pretrained_checkpoint == str(folder / "base")


def test_folders_without_a_model(folder: Path, tmp_path: Path):
    for name, words in {
        "none": r"--from .*none is not a folder\. .*name of a model on the hub",
        "empty": r"--from .*empty holds no model",
        "megatron": r"megatron/latest_checkpointed_iteration.txt names iter_0000005, but there is no folder",
        "pickled": r"holds its weights as pickles",
    }.items():
        if name != "none":
            (tmp_path / name).mkdir()
        if name == "megatron":
            (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("5")
        if name == "pickled":
            shutil.copy(folder / "base" / "config.json", tmp_path / name)
            (tmp_path / name / "pytorch_model.bin").touch()
        with pytest.raises(CheckpointError, match=words):
            read("--from", str(tmp_path / name))
    assert problems("--from") == ["--from needs a value. Give the folder of a model or of a run.", *problems()]


def test_a_command_that_reads_no_checkpoints_says_so(folder: Path):
    found = resolve_config(["--from", str(folder / "base")])[1]
    assert [problem.rule for problem in found] == ["is not known to this command"]


def test_a_file_cannot_say_it(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("from: base\n")
    [problem] = problems("--config", str(tmp_path / "a.yaml"))
    assert "from cannot be set in a file" in problem and "--from FOLDER" in problem


def test_a_setting_that_this_version_does_not_have_is_named(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "base", tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(
        json.dumps(config | {"hidden_act": "wiggle", "num_hidden_layers": "two"})
    )
    with pytest.raises(ConfigError) as caught:
        read("--from", str(tmp_path / "odd"))
    assert f"{tmp_path / 'odd' / 'config.json'}: num_hidden_layers 'two' is not" in str(caught.value)
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    [problem] = problems("--from", str(tmp_path / "odd"))
    assert problem.startswith(f"--num-query-groups 3 of {tmp_path / 'odd'} does not divide --num-attention-heads 4")
    for read_model in (petatron.from_pretrained, open_model_reader):
        with pytest.raises(ConfigError, match=r"odd/config\.json: num_key_value_heads 3 does not divide"):
            read_model(tmp_path / "odd")


def test_load_of_a_model_folder_says_to_use_from(folder: Path):
    base = str(folder / "base")
    for flags in ([], ["--finetune"], ["--preset", "tiny-llama"]):
        [problem] = problems("--load", base, *flags)
        assert problem.startswith(f"--load {base} is the folder of a Hugging Face model"), problem
        assert f"Use --from {base} instead, which takes the model's settings, tokenizer and weights." in problem
    with pytest.raises(CheckpointError, match=f"no run to go on with. Use --from {base} to start"):
        read("--load", base, "--use-checkpoint-args")


def test_a_run_of_its_own_may_not_be_mixed_with_the_one_it_starts_from(folder: Path):
    run = str(folder / "run")
    with pytest.raises(CheckpointError) as caught:
        check_run_dirs(CheckpointConfig(load=run, save=run, finetune=True))
    assert "--finetune starts a new run from their weights, at iteration 0" in str(caught.value)
    assert str(caught.value).endswith("Give --save another folder, or leave --finetune out to continue that run.")
    with pytest.raises(
        CheckpointError, match=r"starts at iteration 0, from the weights of .*/base\. Give --save another"
    ):
        check_run_dirs(CheckpointConfig(save=run, pretrained_checkpoint=str(folder / "base")))


def test_a_model_with_one_expert_per_token_continues(tmp_path: Path):
    """Its router gets no gradient, which is an error only for a model that begins to learn."""
    experts = "--num-experts 2 --moe-router-topk 1 --moe-ffn-hidden-size 12"
    run = load_config([*LLAMA.split(), *experts.split()], require_training=False, world_size=1).config
    petatron.build_model(run, ParallelMesh.single()).save_pretrained(tmp_path / "mixtral")
    loaded = read("--from", str(tmp_path / "mixtral"))
    assert loaded.config.moe.moe_router_topk == 1
    assert any("the loss has no gradient for the router" in notice for notice in loaded.notices)
    assert any("the router cannot learn" in problem for problem in problems(*LLAMA.split(), *experts.split()))


# The tokenizer


def tokenized(*argv: str) -> LoadedConfig:
    return open_tokenizer(read(*argv))[0]


def test_another_tokenizer_is_an_error(folder: Path, tmp_path: Path):
    base, shape = str(folder / "base"), [*LLAMA.split(), "--load", str(folder / "base"), "--finetune"]
    for start in (
        ["--from", base],
        ["--from", str(folder / "run")],
        shape,
        [*LLAMA.split(), "--pretrained-checkpoint", base],
    ):
        with pytest.raises(ConfigError) as caught:
            tokenized(*start, "--tokenizer-type", "ByteTokenizer")
        assert "--tokenizer-type ByteTokenizer is another tokenizer than that of the model in" in str(caught.value)
        assert f"it has 257 ids, where the model has learned {IDS}; id 0 is" in str(caught.value)
        assert "or add --force-tokenizer to train the model with this one" in str(caught.value)
    train_bpe(["other words entirely"], 280, tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*tokenizer.json is another tokenizer"):
        tokenized("--from", base, "--tokenizer-model", str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"--tokenizer-type NullTokenizer is another tokenizer"):
        tokenized("--from", base, "--tokenizer-type", "NullTokenizer")


def test_the_same_tokenizer_under_another_name_is_none(folder: Path, tmp_path: Path):
    content = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    (tmp_path / "copy.json").write_text(json.dumps(content))
    run = tokenized("--from", str(folder / "base"), "--tokenizer-model", str(tmp_path / "copy.json")).config
    assert run.tokenizer.tokenizer_model == str(tmp_path / "copy.json")


def test_the_tokenizer_of_the_model_is_the_default(folder: Path):
    for flag, place in (
        ("--load", folder / "run" / "step-00000001" / "model"),
        ("--pretrained-checkpoint", folder / "base"),
    ):
        start = [flag, str(folder / ("run" if flag == "--load" else "base"))]
        loaded = tokenized(*LLAMA.split(), *start)
        assert loaded.config.tokenizer.tokenizer_model == str(place)
        assert str(loaded.origins["tokenizer.tokenizer_type"]) == f"derived: the tokenizer of {place}"
    declined = [
        *LLAMA.split(),
        "--pretrained-checkpoint",
        str(folder / "base"),
        "--no-use-tokenizer-model-from-checkpoint-args",
    ]
    assert tokenized(*declined).config.tokenizer.tokenizer_type == "NullTokenizer"


def test_a_forced_tokenizer_is_saved_with_the_model(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    flags = ["--tokenizer-type", "ByteTokenizer", "--force-tokenizer", "--save", str(tmp_path / "run")]
    assert main(["train", "--from", str(folder / "base"), *flags, *RUN]) == 0
    said = capfd.readouterr().err
    assert f"--force-tokenizer: ByteTokenizer takes the place of the tokenizer of {folder / 'base'}" in said
    assert "not the tokenizer, since another one is given" in said
    saved = tmp_path / "run" / "step-00000001" / "model"
    for name in ("config.json", "generation_config.json"):
        assert json.loads((saved / name).read_text())["eos_token_id"] == 256
    tokenizer = HuggingFaceTokenizer(saved)
    assert tokenizer.encode("hé \n\x00") == ByteTokenizer().encode("hé \n\x00") and tokenizer.eod == 256
    assert tokenizer.decode(ByteTokenizer().encode("hé 1")) == "hé 1"
    assert "# force_tokenizer: true" in (tmp_path / "run" / "config.yaml").read_text(), "the next start asks again"
    # From now on this is the tokenizer of the model.
    tokenized("--from", str(tmp_path / "run"), "--tokenizer-type", "ByteTokenizer")
    with pytest.raises(ConfigError, match=r"is another tokenizer than that of the model in .*run/step-00000001/model"):
        tokenized("--from", str(tmp_path / "run"), "--tokenizer-model", str(folder / "tokenizer"))


def test_a_damaged_tokenizer_of_a_checkpoint_is_not_the_default(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "step-00000001" / "model" / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"some", b"SOME"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has .* bytes where"):
        tokenized(*LLAMA.split(), "--load", str(tmp_path / "run"))


def test_forcing_has_no_effect_without_a_model():
    assert (
        "--force-tokenizer has no effect: there is neither a model to start from nor data that was tokenized"
        in read(*LLAMA.split(), "--force-tokenizer").notices
    )


def test_params_of_a_folder_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["config", "params", "--from", str(folder / "base")]) == 0
    listed = capsys.readouterr().out
    assert "300 x 16" in listed and "layers.1." in listed and "layers.2." not in listed
