"""Flag listings as Megatron users publish them parse whole; only what this version lacks, or the listing omits, is refused."""

from __future__ import annotations

import re
import shlex

import pytest

from petatron.config.flags.parse_command_line import parse_flags
from petatron.config.pipeline_stages import pipeline_stages
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.validate import resolve_config

LLAMA_70B = shlex.split("""
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 1 --sequence-parallel
    --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 1 --global-batch-size 1024 --lr 3e-4 --train-iters 100000 --lr-decay-style cosine
    --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 --bf16 --use-mcore-models
    --transformer-impl transformer_engine --data-path /path/to/data --vocab-file /path/to/vocab.json
    --merge-file /path/to/merges.txt
""")

MIXTRAL = shlex.split("""
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4 --num-experts 8
    --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --hidden-size 4096
    --num-layers 32 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16 --use-mcore-models
    --transformer-impl transformer_engine --data-path /path/to/data --vocab-file /path/to/vocab.json
    --merge-file /path/to/merges.txt
""")

# The loose flags of the same pages: throughput, memory and stability advice.
ADVICE = shlex.split("""
    --use-mcore-models --transformer-impl transformer_engine --sequence-parallel --fp8-hybrid --micro-batch-size 4
    --use-flash-attn --tensor-model-parallel-size 2 --recompute-granularity full --recompute-method block
    --recompute-num-layers 1 --cpu-optimizer --cpu-optimizer-type ADAM --num-layers-per-virtual-pipeline-stage 2
    --dataloader-type cyclic --lr-warmup-iters 2000 --clip-grad 1.0 --init-method-std 0.006 --attention-dropout 0.0
    --hidden-dropout 0.0 --overlap-grad-reduce --overlap-param-gather
""")

LAUNCHER = shlex.split("--nproc_per_node=8 --nnodes=1 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1")

EVALUATION = shlex.split("""
    --task WIKITEXT103 --valid-data wikitext103_valid.txt --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --load checkpoints/gpt2_345m --strict-lambada --port 5000
""")

GPT3_175B = shlex.split("""
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
    --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path d --vocab-file v --merge-file m
    --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save c --load c --eval-iters 10
    --tensorboard-dir t
""")


def messages(argv: list[str], *, world_size: int | None = None) -> set[str]:
    return {str(problem) for problem in resolve_config(argv, world_size=world_size)[1]}


def test_llama_70b_on_64_ranks():
    loaded, problems = resolve_config(LLAMA_70B, world_size=64)
    assert problems == []
    config = loaded.config
    assert (config.parallel.data_parallel_size, config.tokenizer.tokenizer_type) == (4, "GPT2BPETokenizer")
    assert (config.model.ffn_hidden_size, config.schedule.lr_decay_iters) == (32768, 100000)
    assert [len(stage.layer_indices) for stage in pipeline_stages(config)] == [20, 20, 20, 20]
    [notice] = loaded.notices
    assert notice.startswith("accepted, and nothing changes: --use-mcore-models, --transformer-impl")


LACKING = {
    "--train-iters is not set. Give --train-iters or --train-samples.",
    "--lr is not set. Give the peak learning rate, for instance --lr 3e-4.",
}


def test_mixtral_listing_lacks_a_length_and_a_learning_rate():
    assert messages(MIXTRAL, world_size=8) == LACKING
    assert messages(MIXTRAL, world_size=2) == LACKING | {
        "--expert-model-parallel-size 4 x etp 2 x pp 1 = 8 does not divide the world size 2. "
        "Use 8 ranks (--dp 4 or --nproc-per-node 8), or fewer for the experts."
    }


def test_mixtral_listing_scaled_down_is_complete_with_a_length_a_rate_and_mock_data():
    start = MIXTRAL.index("--data-path")
    scaled = [*MIXTRAL[:start], *shlex.split("--hidden-size 64 --num-layers 2 --num-attention-heads 4 --seq-length 32")]
    added = shlex.split("--max-position-embeddings 32 --mock-data --train-iters 5 --lr 1e-3")
    loaded, problems = resolve_config([*scaled, *added], world_size=8)
    assert problems == []
    parallel = loaded.config.parallel
    assert (parallel.data_parallel_size, parallel.expert_tensor_parallel_size) == (4, 2)
    assert parallel.sequence_parallel
    assert str(loaded.origins["parallel.sequence_parallel"]).startswith("derived: with experts")
    assert moe_layers(loaded.config) == (True, True)


def test_gpt3_175b():
    assert messages(GPT3_175B, world_size=1024) == set()


def test_advice_flags_all_parse():
    parsed = parse_flags(ADVICE)
    assert parsed.problems == []
    base = ["--preset", "tiny-gpt", "--mock-data", "--lr", "1", "--train-iters", "9999"]
    assert messages([*base, *ADVICE]) == {
        "--num-layers-per-virtual-pipeline-stage 2 needs --pipeline-model-parallel-size above 1. Leave it out.",
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce. Add them, or leave it out.",
    }
    beside = shlex.split("--pp 2 --num-layers 8 --use-distributed-optimizer")
    assert messages([*base, *ADVICE, *beside]) == set()


# As NVIDIA publishes them for DeepSeek-like and long-context runs: each flag is known, and the whole fits together.
MODERN = shlex.split("""
    --use-mcore-models --tp 2 --pp 2 --cp 2 --ep 4 --expert-tensor-parallel-size 1 --num-experts 8 --moe-router-topk 4
    --moe-layer-freq ([0]*1+[1]*5) --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-grouped-gemm
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4
    --moe-router-group-topk 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-per-layer-logging
    --moe-router-fusion --decoder-first-pipeline-num-layers 2 --no-overlap-p2p-communication --cp-comm-type a2a
    --recompute-granularity selective --recompute-modules moe_act layernorm --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --bf16 --grad-reduce-in-bf16 --init-model-with-meta-device
    --dataloader-inter-document-masking
""")


def test_a_modern_mixture_of_experts_listing():
    base = shlex.split("--preset tiny-llama --num-layers 6 --mock-data --lr 1e-3 --train-iters 10")
    loaded, problems = resolve_config([*base, *MODERN], world_size=16)
    assert problems == []
    assert loaded.config.data.reset_attention_mask
    assert {notice.split()[0] for notice in loaded.notices} == {
        "accepted,",
        "--recompute-modules",
        "sequence",  # parallelism is on, which experts need
    }
    assert set(re.findall(r"--[a-z-]+", loaded.notices[0])) == {
        "--use-mcore-models",
        "--moe-permute-fusion",
        "--moe-per-layer-logging",
        "--moe-router-fusion",
        "--no-overlap-p",
        "--init-model-with-meta-device",
    }


def test_launcher_flags_parse():
    loaded, problems = resolve_config(["--preset", "tiny-llama", *LAUNCHER], require_training=False)
    assert problems == []
    assert (loaded.config.parallel.world_size, loaded.config.parallel.data_parallel_size) == (8, 1)


def test_flags_of_other_commands_name_them():
    assert {str(problem) for problem in parse_flags(EVALUATION).problems} == {
        "--task does not belong to this command. It is for `python tasks/main.py`.",
        "--valid-data does not belong to this command. It is for `python tasks/main.py`.",
        "--strict-lambada does not belong to this command. It is for `petatron eval`.",
        "--port does not belong to this command. It is for `petatron serve`.",
    }


TOY = "--preset tiny-llama --mock-data --lr 1e-3 --train-iters 10".split()


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--save-interval 5", "--save-interval has no effect: there is no --save"),
        (
            "--recompute-num-layers 1",
            "--recompute-num-layers has no effect: it is for --recompute-granularity full",
        ),
        (
            "--expert-tensor-parallel-size 1 --tp 2",
            "--expert-tensor-parallel-size has no effect: the model has no experts",
        ),
        (
            "--tp 2 --sp --tp-comm-overlap --bf16 --fp8-format hybrid",
            "--tp-comm-overlap has no effect: scales of FP8 are those of the whole gathered input",
        ),
        (
            "--rotary-scaling-factor 40 --mscale-all-dim 1.0",
            "--mscale-all-dim has no effect: it is for --position-embedding-type yarn",
        ),
    ],
)
def test_what_megatron_allows_without_effect_is_a_notice(flags: str, notice: str):
    loaded, problems = resolve_config([*TOY, *flags.split()])
    assert problems == []
    assert any(text.startswith(notice) for text in loaded.notices), loaded.notices


def test_bars_of_a_hybrid_pattern_are_pipeline_stages():
    base = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 64 --mock-data --lr 1 --train-iters 2"
    argv = [*base.split(), "--hybrid-layer-pattern", "M-M*-|M-M-M|M*|M-", "--mamba-num-groups", "1"]
    loaded, problems = resolve_config([*argv, "--pp", "2"])
    assert problems == []
    config = loaded.config
    assert (config.model.hybrid_layer_pattern, config.model.num_layers) == ("M-M*-M-M-MM*M-", 14)
    assert [len(stage.layer_indices) for stage in pipeline_stages(config)] == [5, 5, 2, 2]
    assert config.parallel.num_virtual_stages_per_pipeline_rank == 2


BARRED = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 64 --mock-data --lr 1 --train-iters 2"


def test_bars_of_a_hybrid_pattern_cut_nothing_on_one_rank():
    argv = [*BARRED.split(), "--hybrid-layer-pattern", "M-M*-|M-M-M", "--mamba-num-groups", "1"]
    loaded, problems = resolve_config(argv)
    assert problems == [] and len(pipeline_stages(loaded.config)) == 1
    assert "the bars of --hybrid-layer-pattern have no effect: the pipeline-parallel size is 1" in loaded.notices
    assert resolve_config([*argv, "--pp", "2"])[0].config.parallel.pipeline_model_parallel_layout == "Ettttt|tttttL"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--hybrid-layer-pattern M-M*-|M-M-|M",
            "--hybrid-layer-pattern M-M*-|M-M-|M has 3 stages, which is not a multiple of --pipeline-model-parallel-size 2. "
            "Use 2 or 4 stages; | ends a stage.",
        ),
        (
            "--hybrid_override_pattern M-|M-M*|-M|M --num-virtual-stages-per-pipeline-rank 3",
            "--hybrid_override_pattern M-|M-M*|-M|M has 4 stages, but pp 2 x virtual 3 is 6. Write 6 stages, or leave out the "
            "number of virtual stages.",
        ),
        (
            "--hybrid-layer-pattern M-M*-|M-M-M --decoder-first-pipeline-num-layers 3",
            "--decoder-first-pipeline-num-layers cannot be combined with the bars of --hybrid-layer-pattern. Keep one way to cut "
            "the layers.",
        ),
        (
            "--hybrid-layer-pattern M-M*|M-M- --pipeline-model-parallel-layout Ettt|tttttL",
            "--pipeline-model-parallel-layout Ettt|tttttL cuts the layers into stages, and so do the bars of --hybrid-layer-pattern "
            "M-M*|M-M-. Keep one way to cut the layers.",
        ),
    ],
)
def test_what_is_wrong_with_bars_is_told_of_the_pattern(flags: str, problem: str):
    assert messages([*BARRED.split(), "--mamba-num-groups", "1", "--pp", "2", *flags.split()]) == {problem}


def test_a_tokenizer_that_is_not_here_asks_for_no_files_of_another():
    argv = [
        *TOY,
        "--no-mock-data",
        "--data-path",
        "a",
        "--vocab-file",
        "v",
        "--tokenizer-type",
        "NullMultimodalTokenizer",
    ]
    assert [problem.where for problem in resolve_config(argv)[1]] == ["--tokenizer-type"]
