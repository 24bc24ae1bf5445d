"""Every rule of the validator: one bad value each, and the problem it must give."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.config import RawRunConfig
from petatron.config.derived_defaults import derive_defaults, resolve_derived
from petatron.config.saved_config import path_fields
from petatron.config.schema.fields import all_fields, flatten_config, unflatten_config
from petatron.validate import check_config, load_config, resolve_config

PATHS = tuple(info.name for info in path_fields())
BASE = shlex.split("--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100")


def problems_of(flags: str, *, base: list[str] = BASE, world_size: int | None = None) -> list[str]:
    _, problems = resolve_config([*base, *flags.split()], world_size=world_size)
    return [str(problem) for problem in problems]


def test_the_base_is_valid():
    assert problems_of("") == []


def test_latent_attention_has_head_widths_of_its_own():
    assert problems_of(f"{LATENT} --num-attention-heads 6 --num-query-groups 6") == []
    config = load_config([*BASE, *LATENT.split(), "--qk-head-dim", "24", "--qk-pos-emb-head-dim", "12"]).config
    assert config.model.kv_channels == 36


def test_latent_attention_continues_prompts(tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("hello")
    flags = f"--sample-prompts {file} --sample-interval 2 --tokenizer-type ByteTokenizer"
    assert problems_of(f"{LATENT} {flags}") == []


LATENT = "--multi-latent-attention --num-query-groups 8 --no-group-query-attention"
# Flags beside the valid base, and the whole message that must come out, alone.
ONE_PROBLEM = [
    (f"{LATENT} --kv-lora-rank 0", "--kv-lora-rank 0 is below 1. Use 1 or more."),
    (f"{LATENT} --q-lora-rank -2", "--q-lora-rank -2 is below 1. Use 1 or more."),
    (
        f"{LATENT} --qk-pos-emb-head-dim 7",
        "--qk-pos-emb-head-dim 7 is odd, and rotary embedding rotates pairs. Nearest: 6 or 8.",
    ),
    (
        f"{LATENT} --position-embedding-type alibi",
        "--multi-latent-attention rotates a part of each head, but --position-embedding-type is alibi. "
        "Use --position-embedding-type rope, or yarn; or none, which rotates nothing.",
    ),
    (
        f"{LATENT} --qk-layernorm --latent-norm-epsilon 0",
        "--latent-norm-epsilon 0.0 is not above 0. Use a number above 0.",
    ),
    (
        "--multi-latent-attention --group-query-attention",
        "--group-query-attention cannot be combined with --multi-latent-attention, which has no key/value heads to share. "
        "Use --no-group-query-attention, or leave the other out.",
    ),
    ("--mtp-num-layers -1", "--mtp-num-layers -1 is below 1. Use 1 or more."),
    (
        "--mtp-num-layers 1 --mtp-loss-scaling-factor -1",
        "--mtp-loss-scaling-factor -1.0 is below 0. Use 0 or more.",
    ),
    (
        "--mtp-num-layers 1 --position-embedding-type learned_absolute",
        "--mtp-num-layers 1 looks up tokens ahead, for which a table of positions would end too early. "
        "Use --position-embedding-type rope, or none.",
    ),
    (
        "--num-layers 0",
        "--num-layers is not set. Give a positive number, or start from a preset such as --preset llama3-8b.",
    ),
    ("--num-layers -4", "--num-layers -4 is negative. Give a positive number."),
    ("--window-size 0", "--window-size 0 is below 1. Use 1 or more."),
    ("--vocab-size 0", "--vocab-size 0 is below 1. Use 1 or more."),
    ("--ffn-hidden-size -1", "--ffn-hidden-size -1 is below 1. Use 1 or more."),
    (
        "--num-attention-heads 12 --num-query-groups 4",
        "--hidden-size 128 is not a multiple of --num-attention-heads 12, and --kv-channels is not set. "
        "Nearest: 120 or 132. Or set --kv-channels.",
    ),
    ("--num-query-groups 3", "--num-query-groups 3 does not divide --num-attention-heads 8. Use 1, 2, 4 or 8."),
    (
        "--no-group-query-attention --num-query-groups 4",
        "--num-query-groups 4 shares key/value heads, but --group-query-attention is turned off. Leave one out, or use 8.",
    ),
    ("--max-position-embeddings 64", "--max-position-embeddings 64 is shorter than --seq-length 128. Use 128 or more."),
    (
        "--position-embedding-type none --use-rope-scaling",
        "--use-rope-scaling scales rotary embedding, but --position-embedding-type is none. "
        "Use --position-embedding-type rope, or leave it out.",
    ),
    (
        "--use-rope-scaling --rope-low-freq-factor 5",
        "--rope-low-freq-factor 5 is above --rope-high-freq-factor 4. Llama-3 uses 1 and 4.",
    ),
    (
        "--position-embedding-type yarn --yarn-beta-slow 40",
        "--yarn-beta-slow 40 is above --yarn-beta-fast 32. The paper uses 1 and 32.",
    ),
    ("--rotary-percent 0", "--rotary-percent 0 is not in (0, 1]. Use 1 to rotate the whole head."),
    (
        "--kv-channels 15",
        "--rotary-percent 1 rotates 15 of --kv-channels 15, which is not an even number above 0. "
        "Use an even head width, or a fraction that gives one.",
    ),
    ("--rotary-base 1", "--rotary-base 1.0 is not above 1. Use a number above 1."),
    ("--rope-scaling-factor 0.5", "--rope-scaling-factor 0.5 is below 1. Use 1 or more."),
    ("--hidden-dropout 1", "--hidden-dropout 1.0 is out of range. Use a number from 0 to 1, 1 excluded."),
    ("--attention-dropout -0.1", "--attention-dropout -0.1 is out of range. Use a number from 0 to 1, 1 excluded."),
    ("--norm-epsilon 0", "--norm-epsilon 0.0 is not above 0. Use a number above 0."),
    ("--init-method-std 0", "--init-method-std 0.0 is not above 0. Use a number above 0."),
    ("--embedding-init-method-std -1", "--embedding-init-method-std -1.0 is not above 0. Use a number above 0."),
    ("--tp 3", "--tensor-model-parallel-size 3 does not divide --num-attention-heads 8. Use 1, 2, 4 or 8."),
    ("--tp 0", "--tensor-model-parallel-size 0 is below 1. Use 1 or more."),
    (
        "--ffn-hidden-size 333 --tp 2",
        "--ffn-hidden-size 333 is not a multiple of --tensor-model-parallel-size 2. Nearest: 332 or 334.",
    ),
    (
        "--sp --tp 4 --seq-length 126",
        "--seq-length 126 is not a multiple of --tensor-model-parallel-size 4, which --sequence-parallel needs. Nearest: 124 or 128.",
    ),
    (
        "--world-size 6 --tp 4",
        "--world-size 6 is not a multiple of tp 4 x pp 1 x cp 1 = 4. Nearest: 4 or 8; or change the layout. "
        "`petatron train` starts the ranks it needs; a Python script is started on N ranks by `torchrun --nproc-per-node N`.",
    ),
    (
        "--world-size 8 --tp 2 --dp 3",
        "--data-parallel-size 3 x tp 2 x pp 1 x cp 1 is 6, but there are 8 ranks. Use 4, or leave it out.",
    ),
    ("--ddp-bucket-size 0", "--ddp-bucket-size 0 is below 1. Use 1 or more."),
    ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes 0.0 is not above 0. Use a number above 0."),
    ("--nnodes 0", "--nnodes 0 is below 1. Use 1 or more."),
    ("--nproc-per-node 0", "--nproc-per-node 0 is below 1. Use 1 or more."),
    ("--node-rank 1", "--node-rank 1 is out of range. Use a number from 0 to 1, 1 excluded."),
    (
        "--master-port 70000",
        "--master-port 70000 is above 65,535, the most it takes. It is: Port of the first machine; unset means a free "
        "one (single machine only).",
    ),
    (
        "--nnodes 2 --nproc-per-node 1 --master-addr node0",
        "--nnodes 2 machines must agree on a port. Give the same --master-port on all of them.",
    ),
    (
        "--nproc-per-node 4 --world-size 2",
        "--nproc-per-node 4 x --nnodes 1 = 4 is not the world size 2. Give the layout or the number of ranks.",
    ),
    (
        "--nnodes 2 --master-addr node0 --master-port 6000 --world-size 3",
        "--nnodes 2 does not divide the world size 3. Use 1 or 3, or set --nproc-per-node.",
    ),
    ("--fp16 --bf16", "--fp16 cannot be combined with --bf16. Keep one; none of them means fp32."),
    ("--fp16 --loss-scale 0", "--loss-scale 0.0 is not above 0. Use a number above 0."),
    ("--fp16 --min-loss-scale 0", "--min-loss-scale 0.0 is not above 0. Use a number above 0."),
    (
        "--fp16 --initial-loss-scale 1 --min-loss-scale 2",
        "--initial-loss-scale 1 is below --min-loss-scale 2. Start higher.",
    ),
    ("--fp16 --loss-scale-window 0", "--loss-scale-window 0 is below 1. Use 1 or more."),
    ("--fp16 --hysteresis 0", "--hysteresis 0 is below 1. Use 1 or more."),
    (
        "--recompute-method block --recompute-granularity selective",
        "--recompute-method applies to full recompute, but --recompute-granularity is selective. "
        "Use --recompute-granularity full, or leave it out.",
    ),
    ("--optimizer-offload-fraction 2", "--optimizer-offload-fraction 2.0 is out of range. Use a number from 0 to 1."),
    ("--micro-batch-size 0", "--micro-batch-size 0 is below 1. Use 1 or more."),
    ("--global-batch-size -1", "--global-batch-size -1 is below 1. Use 1 or more."),
    (
        "--micro-batch-size 8 --dp 2 --global-batch-size 100",
        "--global-batch-size 100 is not a multiple of micro-batch 8 x data-parallel 2 = 16. Nearest: 96 or 112.",
    ),
    (
        "--global-batch-size 32 --rampup-batch-size 8 8",
        "--rampup-batch-size 8 8 is not three positive numbers. Give START INCREMENT SAMPLES.",
    ),
    (
        "--global-batch-size 32 --rampup-batch-size 64 8 100",
        "--rampup-batch-size 64 8 100 starts above --global-batch-size 32. Start at 32 or less.",
    ),
    (
        "--global-batch-size 32 --rampup-batch-size 8 16 100",
        "--rampup-batch-size 8 16 100 never meets --global-batch-size 32: 32 - 8 is not a multiple of 16. "
        "Change START or INCREMENT.",
    ),
    (
        "--global-batch-size 32 --micro-batch-size 4 --rampup-batch-size 8 6 100",
        "--rampup-batch-size 8 6 100 passes through batches that are not multiples of micro-batch 4 x data-parallel 1 = 4. "
        "Use multiples of 4 for START and INCREMENT.",
    ),
    ("--train-samples 5", "--train-iters 100 cannot be combined with --train-samples 5. Keep one of them."),
    (
        "--train-iters none --train-samples 7 --global-batch-size 8",
        "--train-samples 7 is less than the first batch, --global-batch-size 8, so nothing would be trained. "
        "Use 8 or more, or a smaller batch.",
    ),
    (
        "--train-iters none --train-samples 3 --global-batch-size 8 --rampup-batch-size 4 2 16",
        "--train-samples 3 is less than the first batch, the 4 of --rampup-batch-size, so nothing would be trained. "
        "Use 4 or more, or a smaller batch.",
    ),
    ("--train-iters none --train-samples 0 --global-batch-size 8", "--train-samples 0 is below 1. Use 1 or more."),
    ("--train-iters 0", "--train-iters 0 is below 1. Use 1 or more."),
    ("--eval-interval 0", "--eval-interval 0 is below 1. Use 1 or more."),
    ("--eval-iters -1", "--eval-iters -1 is below 0. Use 0 or more."),
    ("--exit-interval 0", "--exit-interval 0 is below 1. Use 1 or more."),
    ("--exit-duration-in-mins 0", "--exit-duration-in-mins 0.0 is not above 0. Use a number above 0."),
    ("--seed -1", "--seed -1 is below 0. Use 0 or more."),
    (
        "--lr-warmup-samples 5",
        "--lr-warmup-samples 5 counts in another unit than --train-iters. Use --lr-warmup-iters.",
    ),
    ("--lr-decay-samples 5", "--lr-decay-samples 5 counts in another unit than --train-iters. Use --lr-decay-iters."),
    (
        "--train-iters none --train-samples 100 --lr-decay-iters 5",
        "--lr-decay-iters 5 counts in another unit than --train-samples. Use --lr-decay-samples.",
    ),
    ("--lr-warmup-iters -1", "--lr-warmup-iters -1 is below 0. Use 0 or more."),
    ("--lr-decay-iters 0", "--lr-decay-iters 0 is below 1. Use 1 or more."),
    ("--lr-warmup-fraction 1", "--lr-warmup-fraction 1.0 is out of range. Use a number from 0 to 1, 1 excluded."),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 5",
        "--lr-warmup-fraction cannot be combined with --lr-warmup-iters. Keep one form of warm-up.",
    ),
    (
        "--lr-warmup-iters 100",
        "--lr-warmup-iters 100 is not below --lr-decay-iters 100. Use 99 or less, or decay for longer.",
    ),
    (
        "--lr-decay-style WSD",
        "--lr-decay-style WSD needs the length of its final decay. Give --lr-wsd-decay-iters or --lr-wsd-decay-samples.",
    ),
    (
        "--lr-decay-style WSD --lr-warmup-iters 10 --lr-wsd-decay-iters 95",
        "--lr-wsd-decay-iters 95 is longer than --lr-decay-iters 100 less the warm-up. Use 90 or less.",
    ),
    ("--lr 0", "--lr 0.0 is not above 0. Use a number above 0."),
    ("--lr none", "--lr is not set. Give the peak learning rate, for instance --lr 3e-4."),
    ("--min-lr 1", "--min-lr 1 is above --lr 0.001. Use 0.001 or less."),
    ("--min-lr -1", "--min-lr -1 is negative. Use 0 or more."),
    ("--lr-warmup-init 1", "--lr-warmup-init 1 is above --lr 0.001. Use 0.001 or less."),
    ("--decoupled-lr 0", "--decoupled-lr 0.0 is not above 0. Use a number above 0."),
    ("--decoupled-min-lr -1", "--decoupled-min-lr -1.0 is below 0. Use 0 or more."),
    (
        "--decoupled-lr 1e-4 --decoupled-min-lr 2e-4",
        "--decoupled-min-lr 0.0002 is above --decoupled-lr 0.0001. Use 0.0001 or less.",
    ),
    (
        "--decoupled-lr 1e-4 --min-lr 2e-4",
        "--min-lr 0.0002 is above --decoupled-lr 0.0001. Give --decoupled-min-lr, 0.0001 or less.",
    ),
    (
        "--decoupled-lr 1e-4 --lr-warmup-init 2e-4",
        "--lr-warmup-init 0.0002 is above --decoupled-lr 0.0001. Use 0.0001 or less.",
    ),
    (
        "--use-mup --mup-base-hidden-size 32 --mup-width-mult 2",
        "--mup-width-mult 2 is not --hidden-size 128 / --mup-base-hidden-size 32 = 4. Leave it out: it follows from the two.",
    ),
    ("--use-mup --mup-base-hidden-size 0", "--mup-base-hidden-size 0 is below 1. Use 1 or more."),
    ("--use-mup --mup-output-mult 0", "--mup-output-mult 0.0 is not above 0. Use a number above 0."),
    ("--use-mup --mup-attn-scale-power -1", "--mup-attn-scale-power -1.0 is below 0. Use 0 or more."),
    (
        "--use-mup --mup-embedding-mult 3 --scale-embeddings",
        "--mup-embedding-mult 3 and --scale-embeddings are two factors on embeddings. Leave one out.",
    ),
    (
        "--use-mup --mup-embedding-mult 3 --embedding-multiplier 2",
        "--mup-embedding-mult 3 is not --embedding-multiplier, which is 2 here. Leave one out.",
    ),
    (
        "--use-mup --mup-output-mult 0.5 --logits-scaling 4",
        "--mup-output-mult 0.5 is not 1 / --logits-scaling, which is 0.25 here. Leave one out.",
    ),
    (
        "--use-mup --optimizer adafactor --adafactor-scale-parameter",
        "--adafactor-scale-parameter makes steps that --use-mup cannot scale: they do not follow the learning rate. Use "
        "--no-adafactor-scale-parameter.",
    ),
    (
        "--use-mup --optimizer adafactor --adafactor-relative-step",
        "--adafactor-relative-step makes steps that --use-mup cannot scale: they do not follow the learning rate. Use "
        "--no-adafactor-relative-step.",
    ),
    ("--weight-decay -1", "--weight-decay -1.0 is below 0. Use 0 or more."),
    (
        "--start-weight-decay 0.1",
        "--start-weight-decay belongs to a weight-decay schedule, but --weight-decay-incr-style is constant. "
        "Use linear or cosine, or give --weight-decay alone.",
    ),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.1",
        "--weight-decay-incr-style linear needs --start-weight-decay and --end-weight-decay. Give both, or use constant.",
    ),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        "--start-weight-decay 0.2 is not between 0 and --end-weight-decay 0.1. Weight decay may only grow.",
    ),
    ("--adam-beta1 1", "--adam-beta1 1.0 is out of range. Use a number from 0 to 1, 1 excluded."),
    ("--adam-eps 0", "--adam-eps 0.0 is not above 0. Use a number above 0."),
    ("--clip-grad -1", "--clip-grad -1.0 is below 0. Use 0 or more."),
    ("--data-path a", "--mock-data cannot be combined with --data-path. Keep one source of data."),
    (
        "--no-mock-data --vocab-size 9 --valid-data-path v",
        "--train-data-path is not set, but another split has a path of its own. Give the training prefixes too.",
    ),
    (
        "--no-mock-data --vocab-size 9",
        "--data-path is not set. Give dataset prefixes, --train-data-path, or --mock-data to try the run without data.",
    ),
    (
        "--no-mock-data --vocab-size 9 --data-path 0.5 a b",
        "--data-path 0.5 a b mixes weights and prefixes that do not pair up. "
        "Write `prefix prefix` or `weight prefix weight prefix`.",
    ),
    (
        "--no-mock-data --vocab-size 9 --data-path 0 a 0 b",
        "--data-path 0 a 0 b has weights that are negative or all zero. "
        "Write `prefix prefix` or `weight prefix weight prefix`.",
    ),
    (
        "--no-mock-data --vocab-size 9 --data-path a --data-args-path f",
        "--data-path cannot be combined with --data-args-path. Keep one source of data.",
    ),
    ("--split 1,2,3,4", "--split 1,2,3,4 has more than three shares. Write three numbers such as 969,30,1."),
    (
        "--split 9,x",
        "--split 9,x has a share that is not a number of at least 0. Write three numbers such as 969,30,1.",
    ),
    ("--split 0,0", "--split 0,0 has no share above 0. Write three numbers such as 969,30,1."),
    (
        "--no-mock-data --vocab-size 9 --data-path a --split 0,1",
        "--split 0,1 leaves nothing to train on. Give training a share above 0.",
    ),
    (
        "--no-mock-data --data-path a",
        "--tokenizer-type is not set, and neither is --vocab-size. "
        "Give --tokenizer-model, --vocab-file with --merge-file, --tokenizer-type ByteTokenizer, or --vocab-size.",
    ),
    (
        "--tokenizer-type HuggingFaceTokenizer",
        "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model. Give a tokenizer.json or a folder that holds one.",
    ),
    ("--vocab-file v", "--merge-file is not set, and GPT-2 BPE needs --vocab-file and --merge-file. Give both."),
    (
        "--tokenizer-type GPT2BPETokenizer",
        "--vocab-file is not set, and GPT-2 BPE needs --vocab-file and --merge-file. Give both.",
    ),
    (
        "--no-mock-data --data-path a --tokenizer-type NullTokenizer",
        "--vocab-size is not set, and NullTokenizer has no other way to know it. Give it.",
    ),
    (
        "--no-mock-data --data-path a --vocab-size 9 --eod-mask-loss",
        "--eod-mask-loss needs a tokenizer to know the end-of-document token. Give --tokenizer-model.",
    ),
    ("--num-workers -1", "--num-workers -1 is below 0. Use 0 or more."),
    ("--log-interval 0", "--log-interval 0 is below 1. Use 1 or more."),
    ("--wandb-exp-name x", "--wandb-exp-name x needs --wandb-project. Give the project too."),
    ("--save s --save-interval 0", "--save-interval 0 is below 1. Use 1 or more."),
    ("--ckpt-step 5", "--ckpt-step 5 needs --load, the folder to load from. Give it, or leave this out."),
    ("--finetune", "--finetune needs --load, the folder to load from. Give it, or leave this out."),
]


@pytest.mark.parametrize(("flags", "message"), ONE_PROBLEM, ids=[flags for flags, _ in ONE_PROBLEM])
def test_rule(flags: str, message: str):
    assert problems_of(flags) == [message]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("attached", [True, False])
def test_an_empty_path_is_said(name: str, attached: bool):
    flag = "--" + name.replace("_", "-")
    _, problems = resolve_config([*BASE, *([f"{flag}="] if attached else [flag, ""])])
    said = f"{flag} '' is an empty path. Name a file or folder, or leave it out."
    assert [str(problem) for problem in problems if "empty path" in problem.rule] == [said]


def test_every_word_of_the_schema_is_a_path_or_known_not_to_be():
    words = {info.name for info in all_fields() if info.kind == "str"}
    others = {"model_type", "moe_layer_freq", "pipeline_model_parallel_layout", "split", "master_addr"}
    others |= {
        "freeze",
        "train_only",
        "window_attn_skip_freq",
        "linear_attention_freq",
        "no_rope_freq",
        "hybrid_layer_pattern",
        "mtp_hybrid_override_pattern",
        "validation_set_names",
    }
    others |= {
        "longrope_short_factor",
        "longrope_long_factor",
        "imports",
        "objective",
        "objective_settings",
        "dataset_type",
        "rewards",
        "environment",
        "adapter_also_train",
        "adapter_targets",
        "dataset_settings",
        "optimizer",
        "optimizer_settings",
        "muon_scalar_optimizer",
    }
    others |= {
        "high_priority_stream_groups",
        "label_names",
        "wandb_project",
        "wandb_exp_name",
        "wandb_entity",
        "step_batch_size_schedule",
        "tokenizer_special_tokens",
        "special_tokens",
        *(f"fim_{name}_token" for name in ("prefix", "middle", "suffix", "pad", "eod")),
        *("fim_split_sample", "fim_no_prefix"),
    }
    assert words - set(PATHS) == others


def test_query_groups_that_fit_heads_but_not_ranks():
    flags = "--hidden-size 192 --num-attention-heads 12 --num-query-groups 4 --tp 6 --ffn-hidden-size 384"
    assert problems_of(flags) == [
        "--tensor-model-parallel-size 6 is neither a multiple nor a divisor of --num-query-groups 4. Use 1, 2, 4, 12."
    ]


@pytest.mark.parametrize("flags", ["--train-samples 8", "--train-samples 4 --rampup-batch-size 4 2 16"])
def test_one_batch_is_a_run(flags: str):
    assert problems_of(f"--train-iters none --global-batch-size 8 {flags}") == []


def test_fewer_query_groups_than_ranks_is_fine():
    assert problems_of("--tp 8 --num-query-groups 2") == []


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as error:
        load_config(shlex.split("--preset tiny-llama --mock-data --tp 3 --fp16 --bf16 --bogus 1 --lr fast"))
    wheres = [problem.where for problem in error.value.problems]
    assert wheres == ["--bogus", "--lr", "--tensor-model-parallel-size", "--fp16", "--train-iters"]
    assert str(error.value).startswith("5 problems in this configuration:\n  --bogus is not a known flag.")


def test_what_only_training_needs_can_be_left_out():
    assert resolve_config(preset="tiny-llama", require_training=False)[1] == []
    wheres = {problem.where for problem in resolve_config(preset="tiny-llama")[1]}
    assert wheres == {"--train-iters", "--lr", "--data-path", "--tokenizer-type"}


def test_each_problem_names_a_flag_of_the_schema():
    flags = {info.flag for info in all_fields()}
    for text, _ in ONE_PROBLEM:
        for problem in resolve_config([*BASE, *text.split()])[1]:
            assert problem.where in flags, problem
            assert problem.rule, problem
            assert problem.fix.endswith((".", "?")), problem


_INTEGERS = st.one_of(st.none(), st.integers(-3, 40))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_integer_makes_derivation_or_rules_crash(data: st.DataObject):
    base = flatten_config(load_config(BASE).config)
    names = [info for info in all_fields() if info.kind == "int" and not info.is_list]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=8, unique=True))
    for info in chosen:
        base[info.path] = data.draw(_INTEGERS if info.optional else st.integers(-3, 40))
    config, _ = derive_defaults(unflatten_config(base), world_size=data.draw(st.one_of(st.none(), st.integers(1, 64))))
    if check_config(config) == []:
        assert flatten_config(resolve_derived(config)) == flatten_config(config)


@settings(max_examples=30, deadline=None)
@given(tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 9), micro=st.integers(1, 5), steps=st.integers(1, 7))
def test_a_layout_that_multiplies_out_is_accepted(tp: int, dp: int, micro: int, steps: int):
    flags = f"--tp {tp} --micro-batch-size {micro} --global-batch-size {micro * dp * steps}"
    loaded, problems = resolve_config([*BASE, *flags.split()], world_size=tp * dp)
    assert problems == []
    assert loaded.config.parallel.data_parallel_size == dp


def test_a_config_that_was_not_derived_can_be_checked():
    wheres = [problem.where for problem in check_config(RawRunConfig(), require_training=False)]
    assert wheres == ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"]


def test_long_lists_of_fixes_are_cut_short():
    (message,) = problems_of("--num-attention-heads 720 --hidden-size 720 --num-query-groups 7 --kv-channels 8")
    assert message.endswith("Use 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16 or another divisor.")


def test_steps_without_a_learning_rate_are_told():
    decay = "--train-iters 20 --lr-decay-iters 10 --global-batch-size 1"
    told = "--lr-decay-iters 10 ends before --train-iters 20, and from there on the learning rate is 0"
    for flags, is_told in (
        (decay, True),
        (f"{decay} --min-lr 1e-6", False),
        (f"{decay} --lr-decay-style constant", False),
    ):
        notices = load_config(["--mock-data", "--lr", "1e-3", *flags.split()], preset="tiny-llama").notices
        assert any(notice.startswith(told) for notice in notices) == is_told
