"""The command line: every spelling, and every way of getting it wrong."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import CheckpointError, ConfigError
from petatron.cli.main import SUBCOMMANDS
from petatron.cli.train import read_checkpoint
from petatron.config.flags import flag_names_of_other_trainers, megatron_flags
from petatron.config.flags.flag_names_of_other_trainers import ALTERNATIVES, absent_feature
from petatron.config.flags.megatron_table import megatron_flags as megatron_table
from petatron.config.flags.parse_command_line import known_flags, parse_flags
from petatron.config.schema.fields import all_fields, fields_by_name, flag_name
from petatron.validate import load_config, resolve_config


def values(text: str) -> dict[str, object]:
    parsed = parse_flags(text.split())
    assert parsed.problems == []
    return {setting.path.split(".")[1]: setting.value for setting in parsed.settings}


def problems(text: str) -> list[str]:
    return [str(problem) for problem in parse_flags(text.split()).problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--num-layers 2", {"num_layers": 2}),
        ("--num-layers=2", {"num_layers": 2}),
        ("--num_layers=2", {"num_layers": 2}),
        ("--nproc_per_node 8", {"nproc_per_node": 8}),
        ("--tp 2 --pp 3 --cp 4", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 4}),
        ("--ep 2 --etp 3 --dp 4", {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 3, "data_parallel_size": 4}),
        ("--sp", {"sequence_parallel": True}),
        ("--window-size 127,0", {"window_size": 128}),
        ("--window-size (127,0)", {"window_size": 128}),
        ("--window-size 128", {"window_size": 128}),
        ("--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --no-yarn-correction-range-round-to-int", {"activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "yarn_correction_range_round_to_int": False}),
        ("--yarn-original-max-position-embeddings 4096 --yarn-rotary-scaling-factor 32.0", {"original_max_position_embeddings": 4096, "rope_scaling_factor": 32.0}),
        ("--bf16", {"bf16": True}),
        ("--no-bf16", {"bf16": False}),
        ("--bf16=false", {"bf16": False}),
        ("--bf16 true --fp16 false", {"bf16": True, "fp16": False}),
        ("--no-overlap-grad-reduce", {"overlap_grad_reduce": False}),
        ("--no-check-for-nan-in-loss-and-grad", {"check_for_nan_in_loss_and_grad": False}),
        ("--no-load-optim", {"no_load_optim": True}),
        ("--no-load-optim=false", {"no_load_optim": False}),
        ("--lr 3e-4 --min-lr -1", {"lr": 3e-4, "min_lr": -1.0}),
        ("--window-size none", {"window_size": None}),
        ("--rampup-batch-size 16 8 1000 --bf16", {"rampup_batch_size": (16, 8, 1000), "bf16": True}),
        ("--data-path 0.3 a 0.7 b", {"data_path": ("0.3", "a", "0.7", "b")}),
        ("--data-path=a b", {"data_path": ("a", "b")}),
        ("--swiglu", {"activation": "swiglu"}),
        ("--openai-gelu", {"activation": "gelu_tanh"}),
        ("--squared-relu", {"activation": "squared_relu"}),
        ("--disable-bias-linear", {"add_bias_linear": False}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--fp8-hybrid", {"fp8_format": "hybrid"}),
        ("--cuda-graph-impl local --bf16", {"cuda_graphs": "auto", "bf16": True}),
        ("--cuda_graph_impl=full_iteration", {"cuda_graphs": "auto"}),
        ("--cuda-graphs --cuda-graph-impl none", {"cuda_graphs": "off"}),
        ("--enable-cuda-graph", {"cuda_graphs": "auto"}),
        ("--cuda-graphs --bf16", {"cuda_graphs": "on", "bf16": True}),
        ("--cuda-graphs auto", {"cuda_graphs": "auto"}),
        ("--cuda-graphs=off", {"cuda_graphs": "off"}),
        ("--cuda-graphs false", {"cuda_graphs": "off"}),
        ("--cuda-graphs on --no-cuda-graphs", {"cuda_graphs": "off"}),
        ("--moe-layer-recompute", {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe")}),
        ("--recompute-modules core_attn mla_up_proj", {"recompute_modules": ("core_attn", "attention")}),
        ("--encoder-seq-length 64", {"seq_length": 64}),
        ("--distributed-backend nccl2", {"distributed_backend": "nccl"}),
        ("--optimizer dist_muon", {"use_distributed_optimizer": True, "optimizer": "muon"}),
        ("--cpu-optimizer", {"optimizer_cpu_offload": True}),
        ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--rope-theta 5e5", {"rotary_base": 5e5}),
        ("--persistent-save-interval 5", {"save_interval": 5}),
        ("--live on", {"live": "on"}),
        ("--tp 2 --tp 4", {"tensor_model_parallel_size": 4}),
        ("--tensor-model-parallel-size 2 --tp 4", {"tensor_model_parallel_size": 4}),
        ("--fp8-hybrid --fp8-format hybrid --fp8-hybrid", {"fp8_format": "hybrid"}),
        ("--fp8-format e4m3 --fp8-format hybrid --fp8-hybrid", {"fp8_format": "hybrid"}),
        ("--fp8-hybrid --fp8-format none", {"fp8_format": None}),
        ("--enable-cuda-graph --no-cuda-graphs", {"cuda_graphs": "off"}),
        ("--swiglu --activation gelu", {"activation": "gelu"}),
        ("--disable-bias-linear --add-bias-linear", {"add_bias_linear": True}),
        ("", {}),
    ],
)  # fmt: skip
def test_spelling(text: str, expected: dict[str, object]):
    assert values(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--num-layer 2", "--num-layer is not a known flag. Did you mean --num-layers?"),
        ("--mim-lr 2", "--mim-lr is not a known flag. Did you mean --min-lr?"),
        ("--zzz", "--zzz is not a known flag. See `petatron train --help` for all flags."),
        ("--num-layers", "--num-layers needs a value. It is: Number of transformer layers."),
        ("--data-path --bf16", "--data-path needs a value. It is: Dataset prefixes, or weight/prefix pairs; one set of files for all splits, cut by `--split`."),
        ("--num-layers two", "--num-layers two is not a whole number. It is: Number of transformer layers."),
        ("--num-layers 2.5", "--num-layers 2.5 is not a whole number. It is: Number of transformer layers."),
        ("--lr nan", "--lr nan is not a number. It is: Peak learning rate; required to train."),
        ("--bf16=maybe", "--bf16 maybe is not true or false. It is: Compute in bfloat16."),
        ("--cuda-graphs 1", "--cuda-graphs 1 is not one of auto, on or off. Did you mean on?"),
        ("--cuda-graphs autp --bf16", "--cuda-graphs autp is not one of auto, on or off. Did you mean auto?"),
        ("--seed=", "--seed '' is not a whole number. It is: Seed of initial weights, dropout and data order."),
        ("--normalization rmsnorm", "--normalization rmsnorm is not one of LayerNorm or RMSNorm. Did you mean RMSNorm?"),
        ("--rampup-batch-size 1 x", "--rampup-batch-size x is not a whole number. It is: START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT over SAMPLES samples."),
        ("--ckpt-format huggingface", "--ckpt-format huggingface needs saving in another format while training, which is not in this version. Leave it out: a run saves petatron, and `petatron checkpoint convert SOURCE TARGET --to megatron` (or huggingface) writes another; with --to petatron it reads what Megatron saved."),
        ("--port 5000", "--port does not belong to this command. It is for `petatron serve`."),
        ("--optimizer adaptive_muon", "--optimizer adaptive_muon needs the adaptive Muon optimizer, which is not in this version. Use adam, sgd, muon, lion, adafactor or soap."),
        ("--tokenizer-type NullMultimodalTokenizer", "--tokenizer-type NullMultimodalTokenizer needs multimodal models, which is not in this version. Use HuggingFaceTokenizer, GPT2BPETokenizer, TikTokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, BertWordPieceLowerCase, BertWordPieceCase, ByteTokenizer, NullTokenizer or MultimodalTokenizer."),
        (
            "--fp16-lm-cross-entropy",
            "--fp16-lm-cross-entropy needs logits or their loss in half precision, which is not in this version. Leave it out.",
        ),
        ("--spec a b --bf16", "--spec a b needs a model spec from a module, which is not in this version. Use `petatron.register_model` and --model-type NAME (docs/models.md)."),
        ("--fp8-margin 1", "--fp8-margin 1 needs this option of FP8 training, which is not in this version. Leave it out."),
        ("--temperature 1", "--temperature does not belong to this command. It is for `petatron generate`."),
        ("--data-path2 x", "--data-path2 is an old name. Leave it out: Megatron has no such flag any more."),
        ("--cuda-graph-impl locl", "--cuda-graph-impl locl is not one of none, local, transformer_engine or full_iteration. Did you mean local?"),
        ("--cuda-graph-impl --bf16", "--cuda-graph-impl needs a value. Use none, local, transformer_engine or full_iteration."),
        ("--cuda-graph-impl none 3", "'3' is not a flag and follows no flag that takes it. Flags start with two dashes."),
        ("--moe-extended-tp", "--moe-extended-tp is an old name. Use --expert-tensor-parallel-size."),
        ("--cp-comm-type allgather", "--cp-comm-type allgather is not one of p2p, all_gather, a2a or a2a+p2p. Did you mean all_gather?"),
        ("--recompute-modules mpl", "--recompute-modules mpl is not one of core_attn, attention, layernorm, mlp, moe, moe_act, shared_experts, mamba or delta. Did you mean mlp?"),
        ("--recompute-modules zzz", "--recompute-modules zzz is not one of core_attn, attention, layernorm, mlp, moe, moe_act, shared_experts, mamba or delta. It is: With selective recompute: which modules."),
        ("--recompute-modules layer_norm", "--recompute-modules layer_norm is not one of core_attn, attention, layernorm, mlp, moe, moe_act, shared_experts, mamba or delta. Did you mean layernorm?"),
        ("--use_torch_fsdp2=1", "--use_torch_fsdp2 1 is given to a flag that takes no value. Write --use_torch_fsdp2 alone, or leave it out."),
        ("--batch-size 4", "--batch-size is an old name. Use --micro-batch-size."),
        ("--warmup 0.1", "--warmup is an old name. Use --lr-warmup-fraction."),
        ("--model-parallel-size 4", "--model-parallel-size is an old name. Use --tensor-model-parallel-size."),
        ("--checkpoint-activations", "--checkpoint-activations is an old name. Use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1."),
        ("--append-eod", "--append-eod does not belong to this command. It is for `petatron data preprocess`."),
        ("--swiglu --squared-relu", "--squared-relu contradicts --swiglu; both set --activation. Keep one of them."),
        ("--fp8-format e4m3 --fp8-hybrid", "--fp8-hybrid contradicts --fp8-format. Keep one of them."),
        ("--fp8_hybrid --fp8-format=e4m3", "--fp8-format contradicts --fp8_hybrid. Keep one of them."),
        ("--recompute-granularity full --recompute-activations", "--recompute-activations contradicts --recompute-granularity. Keep one of them."),
        ("--cuda-graph-impl none --cuda-graphs", "--cuda-graphs contradicts --cuda-graph-impl. Keep one of them."),
        ("--enable-cuda-graph --cuda-graphs on", "--cuda-graphs contradicts --enable-cuda-graph. Keep one of them."),
        ("--cuda-graph-impl none --enable-cuda-graph", "--enable-cuda-graph contradicts --cuda-graph-impl; both set --cuda-graphs. Keep one of them."),
        ("--swiglu=true", "--swiglu true is given to a flag that takes no value. Write --swiglu alone, or leave it out."),
        ("--no-bf16=true", "--no-bf16 true is given to a flag that takes no value. Write --no-bf16 alone, or leave it out."),
        ("--preset", "--preset needs a value. Give a preset's name."),
        ("--config", "--config needs a value. Give a YAML file."),
        ("llama3-8b", "'llama3-8b' is not a flag and follows no flag that takes it. Flags start with two dashes."),
        ("--tp 2 4", "'4' is not a flag and follows no flag that takes it. Flags start with two dashes."),
        ("--bf16 yes", "'yes' is not a flag and follows no flag that takes it. Flags start with two dashes."),
    ],
)  # fmt: skip
def test_mistake(text: str, expected: str):
    assert problems(text) == [expected]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("--tie-word-embeddings", "--no-untie-embeddings-and-output-weights (the default)"),
        ("--parallel-residual", "--residual-branches parallel"),
        ("--num-key-value-heads 8", "--num-query-groups"),
        ("--intermediate-size 8", "--ffn-hidden-size"),
        ("--num_hidden_layers=8", "--num-layers"),
        ("--rms-norm-eps 1e-6", "--norm-epsilon"),
        ("--learning-rate 1e-3", "--lr"),
        ("--per_device_train_batch_size 8", "--micro-batch-size"),
        ("--gradient-accumulation-steps 8", "--global-batch-size (micro-batch x data-parallel size x accumulation steps)"),
        ("--max-steps 8", "--train-iters"),
        ("--num-train-epochs 3", "--train-epochs"),
        ("--assistant-only-loss", "--sft"),
        ("--warmup-steps 8", "--lr-warmup-iters"),
        ("--max-grad-norm 1", "--clip-grad"),
        ("--gradient-checkpointing", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        ("--tensor-parallel-size 2", "--tensor-model-parallel-size"),
        ("--pipeline-parallel-size 2", "--pipeline-model-parallel-size"),
        ("--context-length 8", "--seq-length"),
        ("--vocab 8", "--vocab-size"),
        ("--eval-steps 8", "--eval-interval"),
        ("--training.seq_len 8", "--seq-length"),
        ("--training.steps 8", "--train-iters"),
        ("--optimizer.lr 8", "--lr"),
        ("--activation_checkpoint.mode full", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
)  # fmt: skip
def test_a_name_of_another_program_is_answered_with_ours(text: str, meant: str):
    assert problems(text) == [f"{re.split('[ =]', text)[0]} is not a known flag. Did you mean {meant}?"]


def test_what_a_name_of_another_program_sets_is_not_missing_too():
    """Neither the field itself, nor all that a model's folder would have set."""
    flags = "--num-hidden-layers 2 --hidden-size 8 --num-attention-heads 2 --batch-size 8 --seq-length 8 --vocab-size 64 --mock-data"
    with pytest.raises(ConfigError) as found:
        load_config([*flags.split(), "--learning-rate", "1", "--train-iters", "2"])
    assert [str(problem).split()[0] for problem in found.value.problems] == [
        "--num-hidden-layers",
        "--batch-size",
        "--learning-rate",
    ]
    with pytest.raises(ConfigError) as found:
        load_config("--model-name-or-path x --mock-data --train-iters 2".split())
    assert [problem.where for problem in found.value.problems] == ["--model-name-or-path"]


@pytest.mark.parametrize(
    ("flags", "feature", "exists"),
    [
        ("--prompt-tuning", "prompt tuning", "--adapter lora"),
        ("--dpo", "training on preferences as flags of other trainers describe it", "--objective dpo"),
        ("--dpo_beta 0.1", "training on preferences as flags of other trainers describe it", "--objective-settings"),
        (
            "--perform-rl-step",
            "reinforcement learning as flags of other trainers describe it",
            "`petatron posttrain grpo`",
        ),
        (
            "--grpo-group-size 8",
            "reinforcement learning as flags of other trainers describe it",
            "--rollout-prompts and --rewards",
        ),
        ("--quantization", "training with quantized weights", "--adapter-base-format nf4"),
    ],
)
def test_what_is_absent_is_named_with_what_exists(flags: str, feature: str, exists: str):
    [problem] = problems(flags)
    assert problem.startswith(f"{flags} needs {feature}") and "which is not in this version" in problem
    assert exists in problem and "Did you mean" not in problem


def test_what_is_absent_is_named_in_a_file_too(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("prefix_tuning: 8\nmodel:\n  dpo: true\n")
    told = [str(problem) for problem in resolve_config(files=[tmp_path / "a.yaml"], preset="tiny-llama")[1][:2]]
    assert "prefix_tuning needs prompt tuning" in told[0] and "dpo needs training on preferences" in told[1]


def test_alternatives_name_flags_and_commands_that_exist():
    for feature, text in ALTERNATIVES.items():
        assert set(flag_names_of_other_trainers.suggested_flags(text)) <= {*known_flags(), "--to"}, feature
        assert {words.split()[0] for words in re.findall(r"`petatron ([^`]+)`", text)} <= set(SUBCOMMANDS), feature
    for flag in [*known_flags(), *flag_names_of_other_trainers.SUGGESTIONS]:
        assert absent_feature(flag) is None, flag


def test_suggestions_name_flags_that_exist():
    for flag, text in flag_names_of_other_trainers.SUGGESTIONS.items():
        assert flag not in known_flags() and flag.startswith("--") and "_" not in flag, flag
        named = flag_names_of_other_trainers.suggested_flags(text)
        assert named and set(named) <= set(known_flags()), flag
        words = re.sub(r"\([^)]*\)", "", text).split(" or ")[0].split()
        assert len(words) == 1 or parse_flags(words).problems == [], flag


def test_a_word_after_a_switch_is_its_choice():
    [problem] = problems("--cuda-graphs maybe")
    assert problem == (
        "--cuda-graphs maybe is not one of auto, on or off. It is: Record the forward and backward passes of a step once and "
        "replay them: faster where kernels are short, on GPUs."
    )


def test_two_names_of_one_setting_with_unlike_values_are_told():
    told = "--tensor-model-parallel-size 4 takes the place of --tp 2: both set --tensor-model-parallel-size, and the last one wins"
    assert parse_flags("--tp 2 --tensor_model_parallel_size 4".split()).notices == [told]
    zero = "--rotary-base 0.0 takes the place of --rope-theta 5.0: both set --rotary-base, and the last one wins"
    assert parse_flags("--rope-theta 5 --rotary-base 0".split()).notices == [zero]
    assert parse_flags("--tp 2 --tp 4 --tensor-model-parallel-size 4 --sp --no-sequence-parallel".split()).notices == []


def test_flags_that_change_nothing_give_one_notice_with_the_spelling_that_was_typed():
    typed = "--use-mcore-models --transformer-impl local --attention_backend=flash --bf16 --fp8-margin 0 --cuda-graph-modules attn mlp"
    parsed = parse_flags(shlex.split(typed))
    assert parsed.problems == []
    assert [setting.path for setting in parsed.settings] == ["precision.bf16"]
    [notice] = parsed.all_notices
    assert notice.startswith(
        "accepted, and nothing changes: --use-mcore-models, --transformer-impl local (there is one model"
    )
    assert all(
        text in notice for text in ("--attention_backend flash", "--fp8-margin 0", "--cuda-graph-modules attn mlp")
    )


def test_residuals_of_normed_streams_are_a_norm_placement():
    parsed = parse_flags(["--apply-residual-connection-post-layernorm"])
    assert parsed.problems == []
    assert [(setting.path, setting.value) for setting in parsed.settings] == [("model.norm_placement", "stream")]


def test_preset_and_files():
    parsed = parse_flags(shlex.split("--preset a --config one.yaml --preset=b --config=two.yaml"))
    assert (parsed.preset, parsed.files) == ("b", ["one.yaml", "two.yaml"])


def test_each_spelling_stands_in_one_table_only():
    own = {info.flag for info in all_fields()}
    own |= {f"--no-{info.flag[2:]}" for info in all_fields() if info.kind == "bool"}
    tables = [
        megatron_flags.ALIASES,
        megatron_flags.SHORTHANDS,
        megatron_flags.CHOICE_FLAGS,
        {flag for flag, answer in megatron_table().items() if answer.kind != "works"},
        flag_names_of_other_trainers.SUGGESTIONS,
    ]
    seen = set(own)
    for table in tables:
        for flag in table:
            assert flag not in seen, flag
            assert flag.startswith("--") and "_" not in flag
            seen.add(flag)


def test_tables_point_at_fields_that_exist():
    for name in [*megatron_flags.ALIASES.values(), *(item.field for item in megatron_flags.SHORTHANDS.values())]:
        assert name in fields_by_name()
    chosen = [choice for choices in megatron_flags.CHOICE_FLAGS.values() for choice in choices.values()]
    for shorthand in [*megatron_flags.SHORTHANDS.values(), *chosen]:
        info = fields_by_name()[shorthand.field]
        assert info.kind == "bool" or shorthand.value in info.choices
    for name, words in megatron_flags.UNSUPPORTED_VALUES.items():
        assert not set(words) & set(fields_by_name()[name].choices)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_field_can_be_typed(data: st.DataObject):
    info = data.draw(st.sampled_from(all_fields()))
    # A slash in a pattern of layers begins those of multi-token prediction, which are settings of their own.
    word = st.text("abc._" if info.name == "hybrid_layer_pattern" else "abc/._", min_size=1)
    strategy = {
        "int": st.integers(-100, int(info.bounds.high) if info.bounds else 0),
        "float": st.floats(allow_nan=False, allow_infinity=False),
        "bool": st.booleans(),
        "str": word,
        "choice": st.sampled_from(info.choices or ("",)),
    }[info.kind]
    once = "repeatable" in info.marks  # what is given twice counts once
    lists = st.lists(strategy, min_size=1, max_size=3, unique=once)
    items = data.draw(lists) if info.is_list else [data.draw(strategy)]
    parsed = parse_flags(
        [flag_name(info.name), *(str(item).lower() if info.kind == "bool" else str(item) for item in items)]
    )
    assert parsed.problems == []
    (setting,) = parsed.settings
    assert (setting.path, setting.value) == (info.path, tuple(items) if info.is_list else items[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(max_size=12) | st.sampled_from(["--tp", "--bf16", "--data-path", "--x=", "--", "--no-", "2"]),
        max_size=8,
    )
)
def test_any_command_line_becomes_values_and_problems_one_can_read(argv: list[str]):
    parsed = parse_flags(argv)
    assert {setting.path for setting in parsed.settings} <= {info.path for info in all_fields()}
    assert all(problem.rule and problem.fix for problem in parsed.problems)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "--freeze layers.0.* tiny-llama",
            "--freeze tiny-llama names a model, and --freeze takes every word up to the next flag. Name the model first: `petatron train tiny-llama --freeze 'layers.0.*'`.",
        ),
        (
            "--import f.py tiny-llama --lr 1",
            "--import tiny-llama names a model, and --import takes every word up to the next flag. Name the model first: `petatron train tiny-llama --import f.py`.",
        ),
        (
            "--train-data-path=a mine.yaml",
            "--train-data-path mine.yaml names a model, and --train-data-path takes every word up to the next flag. Name the model first: `petatron train mine.yaml --train-data-path=a`.",
        ),
    ],
)
def test_a_model_behind_a_flag_with_several_values_is_named(text: str, told: str):
    parsed = parse_flags(text.split(), presets=("tiny-llama",))
    assert [str(problem) for problem in parsed.problems] == [told]
    assert not any("tiny-llama" in str(setting.value) for setting in parsed.settings)
    assert "--num-layers" in parsed.doubtful_flags, "what the model would have set is not reported as missing"


def test_words_of_a_flag_with_several_values_are_no_model_where_another_source_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert parse_flags("--preset gpt2-124m --freeze a tiny-llama".split(), presets=("tiny-llama",)).problems == []
    assert parse_flags("--freeze a tiny-llama".split()).problems == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-llama.idx").touch()
    assert parse_flags("--train-data-path a tiny-llama".split(), presets=("tiny-llama",)).problems == [], (
        "it is a dataset here"
    )


def test_the_format_of_datasets_that_scripts_of_earlier_versions_name_changes_nothing():
    parsed = parse_flags("--data-impl mmap --num-layers 2".split())
    assert not parsed.problems and len(parsed.settings) == 1 and "memory-mapped" in parsed.implied[0].reason


def test_every_flag_of_megatron_has_an_answer():
    rows = (Path(__file__).parent / "megatron_flag_names.tsv").read_text().splitlines()[1:]
    names = [line.split("\t")[0] for line in rows]
    assert len(names) > 900
    assert {name.replace("_", "-") for name in names} <= set(megatron_table())
    for name in names:
        told = " ".join(map(str, parse_flags([name, "1"]).problems))
        assert "is not a known flag" not in told, name


def test_flags_that_the_table_says_work_are_spellings_of_fields():
    others = {flag for flag, answer in megatron_table().items() if answer.kind == "always so"}
    accepted = {*known_flags(), megatron_flags.NO_POSITION_EMBEDDING} - others
    works = {flag for flag, answer in megatron_table().items() if answer.kind == "works"}
    assert works - accepted == set()


def test_the_table_names_flags_and_commands_that_exist():
    for flag, answer in megatron_table().items():
        named = set(flag_names_of_other_trainers.suggested_flags(f"{answer.text} {answer.remedy}"))
        assert named <= {*known_flags(), "--config", "--to"}, flag
        commands = re.findall(r"`petatron ([^`]+)`", f"{answer.text} {answer.remedy} `{answer.command}`")
        assert {words.split()[0] for words in commands} <= set(SUBCOMMANDS), flag


@pytest.mark.parametrize(
    "text",
    [
        "--timing-log-level 0",
        "--rerun-mode disabled",
        "--main-params-dtype fp32",
        "--fp8-margin 0",
        "--tokenizer-library huggingface",
        "--tokenizer-library=sentencepiece",
        "--megatron-fsdp-grad-comm-dtype fp32",
        "--spec local",
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(text: str):
    assert problems(text) == []


@pytest.mark.parametrize("spec", ["hybrid_layer_specs gdp_stack_spec", "hybrid_layer_specs hybrid_dsv4_stack_spec"])
def test_specs_of_other_layers_are_refused(spec: str):
    assert "needs a model spec from a module" in problems(f"--spec megatron.core.models.hybrid.{spec}")[0]


def test_latent_attention_rotates_beside_a_learned_table_as_in_megatron():
    sizes = {"multi_latent_attention": True, "position_embedding_type": "rope", "learned_position_table": True}
    latent = "--multi-latent-attention"
    assert values(f"{latent} --position-embedding-type learned_absolute") == sizes
    assert values(f"--megatron-defaults {latent}") == sizes
    assert values(f"--megatron-defaults {latent} --rotary-scaling-factor 40")["position_embedding_type"] == "yarn"
    assert values(latent) == {"multi_latent_attention": True}
    assert values(f"--megatron-defaults {latent} --position-embedding-type rope") == {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
    }


@pytest.mark.parametrize("switch", ["--use-megatron-fsdp", "--use-megatron-fsdp-v2"])
def test_megatrons_fsdp_goes_on_without_the_overlap_of_experts(switch: str):
    parsed = parse_flags(["--overlap-moe-expert-parallel-comm", switch])
    assert [setting.path for setting in parsed.settings] == ["parallel.data_parallel_sharding_strategy"]
    assert f"{switch} it does not overlap; no number changes" in parsed.implied[0].reason


def test_flags_of_other_versions_of_megatron_change_nothing():
    typed = "--dist-ckpt-use-dtensor-format --inference-dynamic-batching-max-requests-override 8 --mfsdp-cuda-graph attn mlp"
    parsed = parse_flags(typed.split())
    assert not parsed.problems and not parsed.settings and len(parsed.implied) == 3
    [problem] = problems("--tokenizer-library byte-level")
    assert "needs this library of tokenizers" in problem and "--tokenizer-type" in problem


def test_megatrons_scripts_go_on_without_the_overlap_of_experts_where_modules_are_offloaded():
    both = "--overlap-moe-expert-parallel-comm --fine-grained-activation-offloading"
    assert values(f"{both} --megatron-defaults") == {"fine_grained_activation_offloading": True}
    assert values(both)["overlap_moe_expert_parallel_comm"] is True


def test_up_projections_stay_where_core_attention_is_offloaded():
    recompute = "--recompute-granularity selective --recompute-modules layernorm mla_up_proj"
    parsed = parse_flags(f"{recompute} --offload-modules core_attn attn_proj".split())
    made = {setting.path.partition(".")[2]: setting.value for setting in parsed.settings}
    assert made["recompute_modules"] == ("layernorm",) and made["offload_modules"] == ("core_attn", "attn_proj")
    assert ["mla_up_proj recomputes nothing" in notice for notice in parsed.notices] == [True]
    assert values(f"{recompute} --offload-modules mlp")["recompute_modules"] == ("layernorm", "attention")
    own = recompute.replace("mla_up_proj", "attention")
    assert values(f"{own} --offload-modules core_attn")["recompute_modules"] == ("layernorm", "attention")


def test_a_norm_without_weights_takes_the_place_of_the_other_in_megatrons_scripts():
    both = "--qk-layernorm --qk-l2-norm"
    assert values("--qk-layernorm --export-qk-l2-norm") == values(f"{both} --megatron-defaults") == {"qk_l2_norm": True}
    assert values(both) == {"qk_layernorm": True, "qk_l2_norm": True}


def test_formats_of_megatrons_fsdp_are_those_of_all():
    text = "--megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype bf16"
    assert values(text) == {"grad_reduce_in_bf16": True, "main_grads_dtype": "bf16"}
    text = text.replace("bf16", "auto")
    assert values(text) == {"grad_reduce_in_bf16": False, "main_grads_dtype": "fp32"}


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_gradients_of_megatrons_fsdp_are_added_up_in_fp32(strategy: str):
    text = f"--megatron-fsdp-main-grads-dtype bf16 --data-parallel-sharding-strategy {strategy}"
    assert (
        values(text)["main_grads_dtype"] == "fp32"
        and values(text.replace(strategy, "optim"))["main_grads_dtype"] == "bf16"
    )
    assert "takes 2 more bytes" in parse_flags(text.split()).notices[0]
    assert values(text.replace("--megatron-fsdp-main", "--main"))["main_grads_dtype"] == "bf16"


def test_flags_of_tiktoken_and_sentencepiece_are_ours():
    for text in (
        "--tiktoken-pattern v2 --tokenizer-type NullTokenizer",
        "--tokenizer-type TikTokenizer --tokenizer-model x.json --tiktoken-pattern v2 --tiktoken-num-special-tokens 1000",
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model x.model",
        "--tokenizer-type Llama2Tokenizer --tokenizer-model x.model --vocab-extra-ids 0",
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
    ):
        assert problems(text) == []


def test_values_of_megatron_that_are_one_of_ours_are_told():
    parsed = parse_flags("--ckpt-format torch_dist --moe-token-dispatcher-type flex".split())
    assert {setting.path: setting.value for setting in parsed.settings} == {
        "checkpoint.ckpt_format": "petatron",
        "moe.moe_token_dispatcher_type": "alltoall",
    }
    assert [notice.split(":")[0] for notice in parsed.notices] == [
        "--ckpt-format torch_dist is petatron here",
        "--moe-token-dispatcher-type flex is alltoall here",
    ]


LATENT = "--multi-latent-attention --position-embedding-type rope --rotary-scaling-factor 40"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (LATENT, "yarn"),
        (f"{LATENT} --rope-type yarn", "yarn"),
        (f"{LATENT} --rope-type rope", "rope"),
        ("--multi-latent-attention --position-embedding-type rope --rotary-scaling-factor 1.0", "rope"),
        ("--position-embedding-type rope --rotary-scaling-factor 40", "rope"),
    ],
)
def test_latent_attention_with_a_scaling_factor_is_yarn(text: str, kind: str):
    assert values(text)["position_embedding_type"] == kind


def test_yarn_of_latent_attention_has_megatrons_original_context():
    assert values(LATENT)["original_max_position_embeddings"] == 4096
    assert values(f"{LATENT} --yarn-original-max-position-embeddings 64")["original_max_position_embeddings"] == 64
    assert "is YaRN, as in Megatron" in " ".join(parse_flags(LATENT.split()).notices)


def test_all_problems_are_told_where_there_is_no_checkpoint_either(tmp_path: Path):
    argv = [
        "--fp16-lm-cross-entropy",
        "--zzz",
        "--use-checkpoint-args",
        "--load",
        str(tmp_path / "none"),
        "--mock-data",
    ]
    with pytest.raises(ConfigError) as error:
        load_config(argv, read_checkpoint=read_checkpoint)
    assert [problem.where for problem in error.value.problems] == ["--fp16-lm-cross-entropy", "--zzz", "--load"]
    with pytest.raises(CheckpointError):
        load_config(argv[2:], read_checkpoint=read_checkpoint)
