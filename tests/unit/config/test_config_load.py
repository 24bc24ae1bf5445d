"""Sources and their order, YAML, derivation, origins."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.config import RawRunConfig, dump_yaml, parse_blend, parse_split, with_vocab_size
from petatron.config.schema.fields import all_fields, flatten_config, unflatten_config
from petatron.config.value_origins import ValueOrigin
from petatron.config.yaml_file import read_yaml_text
from petatron.validate import load_config, resolve_config

MOCK = shlex.split("--mock-data --lr 1e-3 --train-iters 100")


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_sources_win_and_are_remembered(tmp_path: Path):
    file = write(tmp_path, "model:\n  num_layers: 6\n  hidden_size: 256\nlr: 5e-4\n")
    argv = ["--config", str(file), "--num-layers", "8", "--mock-data", "--train-iters", "10"]
    loaded = load_config(argv, preset="tiny-llama")
    config, origins = loaded.config, loaded.origins
    assert (config.model.num_layers, config.model.hidden_size, config.model.seq_length) == (8, 256, 128)
    assert config.optim.lr == 5e-4
    assert origins["model.num_layers"] == ValueOrigin("flag", "--num-layers")
    assert origins["model.hidden_size"] == ValueOrigin("file", f"{file}:3")
    assert origins["optim.lr"] == ValueOrigin("file", f"{file}:4")
    assert origins["model.seq_length"] == ValueOrigin("preset", "tiny-llama")
    assert origins["model.rotary_base"] == ValueOrigin("default")
    assert origins["model.kv_channels"] == ValueOrigin("derived", "hidden size / heads")
    assert set(origins) == {info.path for info in all_fields()}


def test_files_in_order_and_preset_from_argv(tmp_path: Path):
    one = write(tmp_path, "num_layers: 2\nseed: 7\n", "one.yaml")
    two = write(tmp_path, "num_layers: 3\n", "two.yaml")
    config = load_config(["--preset", "tiny-gpt", *MOCK], preset="tiny-llama", files=[one, two]).config
    assert (config.model.num_layers, config.train.seed, config.model.normalization) == (3, 7, "LayerNorm")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  num_layer: 4\n", "{file}:2 num_layer is not a known field. Did you mean num_layers?"),
        ("num_key_value_heads: 4\n", "{file}:1 num_key_value_heads is not a known section or field. Did you mean num_query_groups?"),
        ("optim:\n  learning_rate: 4\n", "{file}:2 learning_rate is not a known field. Did you mean lr?"),
        ("model:\n  tie_word_embeddings: true\n", "{file}:2 tie_word_embeddings is not a known field. Did you mean untie_embeddings_and_output_weights?"),
        ("modle:\n  num_layers: 4\n", "{file}:1 modle is not a known section or field. Did you mean model?"),
        ("zzzz: 4\n", "{file}:1 zzzz is not a known section or field. See `petatron config reference` for all fields."),
        ("train:\n  num_layers: 4\n", "{file}:2 num_layers is not in section train. Move it to model."),
        ("seed: 1\ntrain:\n  seed: 2\n", "{file}:3 seed was already set on line 1. Keep one of them."),
        ("model:\n  num_layers: four\n", "{file}:2 num_layers four is not a whole number. It is: Number of transformer layers."),
        ("num_layers: '4'\n", "{file}:1 num_layers 4 is quoted text, where int is wanted. It is: Number of transformer layers."),
        ("num_layers: [4]\n", "{file}:1 num_layers takes one value. It is: Number of transformer layers."),
        ("num_layers:\n", "{file}:1 num_layers cannot be unset. Leave the line out to get 0."),
        ("bf16: 1\n", "{file}:1 bf16 1 is not true or false. It is: Compute in bfloat16."),
        ("data_path:\n  - {a: 1}\n", "{file}:2 data_path needs plain values. It is: Dataset prefixes, or weight/prefix pairs; one set of files for all splits, cut by `--split`."),
        ("optimizer: adaptive_muon\n", "{file}:1 optimizer adaptive_muon needs the adaptive Muon optimizer, which is not in this version. Use adam, sgd, muon, lion, adafactor or soap."),
        ("optimizer:\n  lr: 1e-3\n", "{file}:1 optimizer is not a section. The section is called optim."),
        ("optimizer: [adam]\n", "{file}:1 optimizer takes one value. It is: adam is AdamW (decoupled weight decay); sgd is SGD with momentum; muon is Muon for the matrices of layers and adam for all else; lion is Lion; adafactor is Adafactor; soap is SOAP for the matrices of layers and adam for all else."),
        ("preset: tiny-gpt\n", "{file}:1 preset cannot be set in a file. A preset is chosen on the command line: --preset NAME."),
        ("train:\n  config: a.yaml\n", "{file}:2 config cannot be set in a file. Files are given on the command line: --config FILE, as often as needed."),
        ("? [a]\n: 1\n", "{file}:1 has a list or a mapping for a key. Write `field: value` lines."),
        ("model: 4\n", "{file}:1 model is a section and needs a mapping. Write its fields on indented lines."),
        ("- 1\n", "{file}:1 is not a mapping. Write `section:` and indented `field: value` lines."),
        ("a: [1\n", "{file}:2 is not valid YAML: expected ',' or ']', but got '<stream end>'. Correct that line."),
    ],
)  # fmt: skip
def test_yaml_mistake(tmp_path: Path, text: str, expected: str):
    file = write(tmp_path, text)
    _, problems = resolve_config(MOCK, preset="tiny-llama", files=[file])
    assert [str(problem) for problem in problems] == [expected.format(file=file)]


def test_a_hint_is_not_buried_in_what_follows_from_the_mistake(tmp_path: Path):
    preset = write(tmp_path, "preset: tiny-llama\n")
    assert len(resolve_config(files=[preset])[1]) == 1
    section = write(tmp_path, "optimizer:\n  lr: 2\n  optimizer: sgd\n")
    loaded, problems = resolve_config(["--mock-data", "--train-iters", "9"], preset="tiny-llama", files=[section])
    assert len(problems) == 1
    assert (loaded.config.optim.lr, loaded.config.optim.optimizer) == (2, "sgd")


def test_a_section_of_earlier_versions_is_read(tmp_path: Path):
    old = write(
        tmp_path, "latent:\n  multi_latent_attention: false\n  kv_lora_rank: 48\n  mtp_loss_scaling_factor: 0.1\n"
    )
    assert load_config(MOCK, preset="tiny-llama", files=[old]).config.model.kv_lora_rank == 48


def test_the_file_of_an_earlier_run_is_read():
    """Written before --dataset-kind became --dataset-type and fields moved to sections of their own."""
    golden = Path(__file__).parents[2] / "golden/config-dataset-kind.yaml"
    run = load_config([], files=[golden]).config
    assert (run.model.num_query_groups, run.model.hidden_dropout, run.data.dataset_type) == (2, 0.1, None)
    assert (run.optim.lr, run.train.global_batch_size, run.checkpoint.save) == (1e-3, 4, "/runs/llama")


def test_a_key_may_be_spelled_like_a_flag(tmp_path: Path):
    path = write(tmp_path, "rope-theta: 500000\nparallel:\n  tp: 2\n")
    run = load_config(MOCK, preset="tiny-llama", files=[path]).config
    assert (run.model.rotary_base, run.parallel.tensor_model_parallel_size) == (500000, 2)


def test_a_file_that_is_made_of_another_names_it(tmp_path: Path):
    text = "# Made of train.sh\nmodel:\n  num_layers: 2  # --num-layers 2 (line 7)\n  hidden_size: two  # x (line 9)\n  nope: 1\n"
    loaded, problems = resolve_config(files=[write(tmp_path, text)])
    assert str(loaded.origins["model.num_layers"]) == "train.sh:7"
    told = [str(problem) for problem in problems if "train.sh" in problem.where]
    assert told[0].startswith("train.sh:9 ") and told[1].startswith("train.sh nope is not")
    assert "run.yaml" not in "".join(map(str, problems))


def test_unreadable_files_are_one_problem_each(tmp_path: Path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as error:
        load_config(["--config", str(tmp_path / "missing.yaml"), "--config", str(binary), "--bogus"])
    assert [str(problem) for problem in error.value.problems] == [
        f"--config {tmp_path / 'missing.yaml'} cannot be read: No such file or directory. Check the path.",
        f"--config {binary} cannot be read: not UTF-8 text. Check the path.",
        "--bogus is not a known flag. See `petatron train --help` for all flags.",
    ]


def test_unknown_preset():
    with pytest.raises(ConfigError, match=r"--preset llama3-8 is not a known preset. Did you mean llama3-8b"):
        load_config(preset="llama3-8")
    with pytest.raises(ConfigError, match=r"`petatron config presets` lists them"):
        load_config(preset="zzzz")


def test_yaml_scalars_follow_the_field_not_yaml(tmp_path: Path):
    file = write(
        tmp_path, "live: on\nlr: 3e-4\nsplit: 9,1\ndata_path: one\ntokenizer_model: none\nwindow_size: ~\nmodel:\n"
    )
    config = resolve_config(files=[file])[0].config
    assert (config.log.live, config.optim.lr, config.data.split) == ("on", 3e-4, "9,1")
    assert (config.data.data_path, config.tokenizer.tokenizer_model) == (("one",), "none")


def test_dump_loads_back_to_the_same_config(tmp_path: Path):
    argv = ["--tp", "2", "--dp", "2", "--save", "out/null", "--tokenizer-model", "none of: these, #1\nnor: that", *MOCK]
    loaded = load_config(
        [*argv, "--rampup-batch-size", "4", "4", "10", "--global-batch-size", "8"], preset="llama3.2-1b"
    )
    again = load_config(files=[write(tmp_path, dump_yaml(loaded.config))])
    assert again.config == loaded.config
    chosen = write(tmp_path, dump_yaml(loaded.config, origins=loaded.origins), "chosen.yaml")
    assert load_config(files=[chosen]).config == loaded.config
    wider = load_config(["--dp", "4", "--global-batch-size", "16"], files=[chosen]).config
    assert (wider.parallel.world_size, wider.parallel.data_parallel_size) == (8, 4)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_config_survives_a_round_trip(data: st.DataObject):
    values = flatten_config(RawRunConfig())
    for info in data.draw(st.lists(st.sampled_from(all_fields()), max_size=10, unique=True)):
        strategy = {
            "int": st.integers(-100, int(info.bounds.high) if info.bounds else 0),
            "float": st.floats(allow_nan=False, allow_infinity=False),
            "bool": st.booleans(),
            "str": st.text(st.characters(codec="ascii", exclude_categories=("Cc",)) | st.sampled_from("\né\t")),
            "choice": st.sampled_from(info.choices or ("",)),
        }[info.kind]
        values[info.path] = tuple(data.draw(st.lists(strategy, max_size=3))) if info.is_list else data.draw(strategy)  # type: ignore[arg-type]
    config = unflatten_config(values)
    document = read_yaml_text(dump_yaml(config), source="dump", kind="file")
    assert document.problems == []
    assert {setting.path: setting.value for setting in document.settings} == flatten_config(config)


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("", None, (1, 1, 1)),
        ("--tp 2", None, (2, 1, 2)),
        ("--tp 2 --dp 3", None, (6, 3, 6)),
        ("--tp 2 --nproc-per-node 4", None, (4, 2, 4)),
        ("--tp 2 --nproc-per-node 4 --nnodes 2 --master-addr node0 --master-port 1", None, (8, 4, 4)),
        ("--tp 2 --world-size 8", None, (8, 4, 8)),
        ("--tp 2", 16, (16, 8, None)),
    ],
)
def test_world_size_has_one_meaning(flags: str, world_size: int | None, expected: tuple[int | None, ...]):
    config = load_config([*MOCK, *flags.split()], preset="tiny-llama", world_size=world_size).config
    parallel = config.parallel
    assert (parallel.world_size, parallel.data_parallel_size, config.launch.nproc_per_node) == expected


def test_the_launcher_contradicts_a_flag():
    with pytest.raises(ConfigError, match="--world-size 4 is not the number of ranks that were started, 2"):
        load_config([*MOCK, "--world-size", "4"], preset="tiny-llama", world_size=2)


@pytest.mark.parametrize(
    ("flags", "path", "value", "why"),
    [
        ("--hidden-size 64", "model.ffn_hidden_size", 256, "4 x hidden size"),
        ("--hidden-size 4096 --swiglu", "model.ffn_hidden_size", 10880, "8/3 x hidden size, down to a multiple of 64, for a gated activation"),
        ("--hidden-size 8 --swiglu", "model.ffn_hidden_size", 64, "8/3 x hidden size, down to a multiple of 64, for a gated activation"),
        ("--num-attention-heads 8", "model.num_query_groups", 8, "the number of heads"),
        ("--num-attention-heads 8 --group-query-attention", "model.num_query_groups", 1, "multi-query, as --group-query-attention alone means"),
        ("--num-attention-heads 8 --num-query-groups 2", "model.group_query_attention", True, "--num-query-groups is set"),
        ("--seq-length 77", "model.max_position_embeddings", 77, "the sequence length"),
        ("--init-method-std 0.5", "model.embedding_init_method_std", 0.5, "--init-method-std"),
        ("--num-experts 2 --hidden-size 64", "moe.moe_ffn_hidden_size", 256, "the MLP width"),
        ("--tp 4", "parallel.expert_tensor_parallel_size", 4, "the tensor-parallel size"),
        ("--dp 64", "parallel.ddp_bucket_size", 64_000_000, "max(40 million, 1 million x dp x cp)"),
        ("--dp 3 --micro-batch-size 4", "train.global_batch_size", 12, "micro batch x data parallel"),
        ("--train-iters 50", "schedule.lr_decay_iters", 50, "--train-iters"),
        ("--train-samples 50", "schedule.lr_decay_samples", 50, "--train-samples"),
        ("--tokenizer-model t", "tokenizer.tokenizer_type", "HuggingFaceTokenizer", "--tokenizer-model is set"),
        ("--vocab-file v --merge-file m", "tokenizer.tokenizer_type", "GPT2BPETokenizer", "--vocab-file and --merge-file are set"),
        ("--mock-data", "tokenizer.tokenizer_type", "NullTokenizer", "mock data has no text"),
        ("--mock-data", "model.vocab_size", 1024, "mock data without a tokenizer"),
        ("--data-path 1 d/a 2 d/b", "data.data_cache_path", "d/cache", "beside the first dataset"),
        ("--save out", "log.log_dir", "out", "the --save folder"),
    ],
)  # fmt: skip
def test_derived(flags: str, path: str, value: object, why: str):
    loaded, _ = resolve_config(flags.split())
    assert flatten_config(loaded.config)[path] == value
    assert loaded.origins[path] == ValueOrigin("derived", why)


def test_a_value_that_was_given_is_never_derived():
    argv = shlex.split("--ffn-hidden-size 99 --kv-channels 3 --data-cache-path c --global-batch-size 5")
    loaded, _ = resolve_config(argv, preset="tiny-llama")
    assert loaded.config.model.ffn_hidden_size == 99
    assert loaded.origins["model.ffn_hidden_size"] == ValueOrigin("flag", "--ffn-hidden-size")


def test_what_only_the_machine_knows_stays_unset():
    config = load_config(
        shlex.split("--lr 1 --train-iters 5 --data-args-path f --tokenizer-model t"), preset="tiny-llama"
    ).config
    assert config.parallel.distributed_backend is None
    assert config.model.vocab_size is None
    assert config.data.data_cache_path is None
    assert config.log.log_dir is None


def test_vocab_size_from_the_tokenizer():
    argv = shlex.split("--lr 1 --train-iters 5 --data-path d --tokenizer-model t")
    loaded = load_config(argv, preset="tiny-llama")
    filled = with_vocab_size(loaded, 300, "the tokenizer t")
    assert filled.config.model.vocab_size == 300
    assert filled.origins["model.vocab_size"] == ValueOrigin("derived", "the tokenizer t")
    assert loaded.config.model.vocab_size is None
    larger = load_config([*argv, "--vocab-size", "512"], preset="tiny-llama")
    assert with_vocab_size(larger, 300, "the tokenizer t").config.model.vocab_size == 512
    smaller = load_config([*argv, "--vocab-size", "256"], preset="tiny-llama")
    with pytest.raises(
        ConfigError, match=r"--vocab-size 256 is smaller than the 300 ids of the tokenizer t. Use 300 or more"
    ):
        with_vocab_size(smaller, 300, "the tokenizer t")


def test_no_position_embedding_depends_on_the_positions():
    accepted = load_config(["--no-position-embedding", *MOCK], preset="tiny-llama")
    assert any(notice.startswith("--no-position-embedding is accepted") for notice in accepted.notices)
    with pytest.raises(ConfigError, match="--no-position-embedding removes the learned positions, but"):
        load_config(["--no-position-embedding", *MOCK], preset="tiny-gpt")


def test_settings_without_effect_are_said_aloud():
    flags = (
        "--sp --initial-loss-scale 65536 --sgd-momentum 0.5 --no-moe-grouped-gemm --split 1,1,1 "
        "--fp8-format none --fp8-recipe delayed"
    )
    loaded = load_config([*MOCK, *flags.split(), "--rotary-base", "5"], preset="tiny-gpt")
    assert set(loaded.notices) == {
        "--initial-loss-scale has no effect: it is for --fp16",
        "--fp8-recipe has no effect: it is for --fp8-format",
        "--rotary-base has no effect: positions are learned_absolute",
        "--sgd-momentum has no effect: the optimizer is adam",
        "--sp has no effect: the tensor-parallel size is 1",
        "--no-moe-grouped-gemm has no effect: the model has no experts",
        "--split has no effect: there is no --data-path to split",
    }


def test_batches_of_an_evaluation_of_everything_are_said_aloud():
    full = ["--preset", "tiny-llama", *MOCK, "--full-validation"]
    told = "--eval-iters 5 has no effect on validation sets: --full-validation evaluates all of them"
    assert any(told in notice for notice in load_config([*full, "--eval-iters", "5"]).notices)
    for argv in (full, [*full, "--no-full-validation", "--eval-iters", "5"]):
        assert not any("--eval-iters" in notice for notice in load_config(argv).notices)


def test_head_widths_that_latent_attention_does_not_use_are_said_aloud():
    latent = (
        "--multi-latent-attention --num-query-groups 8 --no-group-query-attention --kv-channels 32 --rotary-percent 0.5 "
        "--latent-norm-epsilon 1e-6"
    )
    assert set(load_config([*MOCK, *latent.split()], preset="tiny-llama").notices) == {
        "--kv-channels has no effect: latent attention has head widths of its own",
        "--rotary-percent has no effect: latent attention has head widths of its own",
        "--latent-norm-epsilon has no effect: it is for --qk-layernorm",
    }


def test_megatron_s_names_of_yarn_settings():
    flags = "--position-embedding-type yarn --rotary-scaling-factor 40 --mscale 0.7 --mscale-all-dim 0.9"
    model = load_config([*MOCK, *flags.split()], preset="tiny-llama").config.model
    assert (model.rope_scaling_factor, model.yarn_mscale, model.yarn_mscale_all_dim) == (40, 0.7, 0.9)


def test_details_without_their_switch_are_said_aloud():
    """Every setting that only refines another is announced when that other is off."""
    flags = (
        "--kv-lora-rank 64 --v-head-dim 64 --latent-norm-epsilon 1e-6 --mtp-loss-scaling-factor 0.3 --rope-low-freq-factor 2 --yarn-mscale 2 "
        "--rope-scaling-factor 4 --no-load-rng --no-save-rng"
    )
    loaded = load_config([*MOCK, *flags.split()], preset="tiny-llama")
    assert set(loaded.notices) == {
        "--kv-lora-rank has no effect: it is for --multi-latent-attention",
        "--v-head-dim has no effect: it is for --multi-latent-attention",
        "--latent-norm-epsilon has no effect: it is for --multi-latent-attention",
        "--mtp-loss-scaling-factor has no effect: it is for --mtp-num-layers",
        "--rope-low-freq-factor has no effect: it is for --use-rope-scaling",
        "--yarn-mscale has no effect: it is for --position-embedding-type yarn",
        "--rope-scaling-factor has no effect: the rotary embedding is not scaled",
        "--no-load-rng has no effect: there is no --load",
        "--no-save-rng has no effect: there is no --save",
    }
    scaled = load_config([*MOCK, "--use-rope-scaling", "--rope-scaling-factor", "4"], preset="tiny-llama")
    assert scaled.notices == ()


def test_optimizer_settings_of_the_other_optimizer_are_said_aloud():
    loaded = load_config(
        [*MOCK, "--optimizer", "sgd", "--adam-beta2", "0.95", "--sgd-momentum", "0.5"], preset="tiny-llama"
    )
    assert loaded.notices == ("--adam-beta2 has no effect: the optimizer is sgd",)
    loaded = load_config([*MOCK, "--no-compile"], preset="tiny-llama")
    assert loaded.notices == (
        "--no-compile has no effect: nothing of this model is compiled: on GPUs it has kernels of its own",
    )


def test_a_doubtful_value_is_reported_once():
    _, problems = resolve_config(
        ["--num-layers", "x", "--hidden-siz", "64", *MOCK, "--seq-length", "8", "--num-attention-heads", "2"]
    )
    assert [problem.where for problem in problems] == ["--num-layers", "--hidden-siz"]


def test_blend_and_split():
    assert [(part.prefix, part.weight) for part in parse_blend(["a", "b", "c"])] == [
        ("a", None),
        ("b", None),
        ("c", None),
    ]
    assert [(part.prefix, part.weight) for part in parse_blend(["3", "a"])] == [("a", 3.0)]
    assert parse_blend([]) == ()
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split(" 1 ") == (1.0, 0.0, 0.0)


def test_importing_config_needs_neither_torch_nor_numpy_nor_yaml():
    program = "import sys, petatron.config; print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
