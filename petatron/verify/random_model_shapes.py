"""Draws small models of odd shape that fit a layout, to test combinations nobody thought of.

A model is drawn at random and validated by the config with the layout; if the rules refuse it, another is drawn. So every rule about
divisibility is tested from both sides: what it accepts must train.
"""

from __future__ import annotations

from random import Random
from typing import get_args

from petatron.base.errors import ConfigError
from petatron.config.schema.sections.linear_attention import DELTA_NETS, LinearAttentionName
from petatron.config.schema.sections.norm import NormPlacementName
from petatron.config.schema.sections.recommender import ItemLossName, ItemNegativesName
from petatron.config.schema.sections.task_head import PoolingName
from petatron.data.masked.masking_vocabulary import MIN_MOCK_VOCABULARY
from petatron.validate import load_config
from petatron.verify.proof_matrix import TRAINING_FLAGS, MatrixEntry

_MAX_TRIES = 2000
_FIXED_FLAGS = "--hidden-dropout 0 --attention-dropout 0 --train-iters 1"


def random_model_flags(entry: MatrixEntry, *, seed: int) -> str:
    """Returns the flags of a model that fits the entry's layout, with the entry's optimizer; the same for the same entry and seed."""
    random = Random(f"{seed}:{entry.name}")
    last: ConfigError | None = None
    for _ in range(_MAX_TRIES):
        flags = " ".join([*_random_flags(random, entry), *entry.optimizer_flags.split()])
        if _is_ill_conditioned(flags):
            continue
        try:
            load_config(f"{flags} {_FIXED_FLAGS} {entry.flags}".split(), world_size=entry.world_size)
        except ConfigError as error:
            last = error
        else:
            return flags
    raise AssertionError(f"no model of {_MAX_TRIES} fits {entry.name}: {last}")


def _is_ill_conditioned(flags: str) -> bool:
    """Whether rounding alone moves such a model beyond the bounds within a few steps, on one device too.

    A delta net divides queries and keys by their length. Without a norm before it they are tiny, and errors grow with each layer.
    """
    return "--linear-num-key-heads" in flags and "--norm-placement output" in flags


def _random_flags(random: Random, entry: MatrixEntry) -> list[str]:
    """Latent and linear attention and multi-token prediction are those of the entry's model; others have each now and then, but not
    hybrids, encoders and recommenders."""
    model, encoder = entry.model_flags, "--model-type bert" in entry.model_flags
    recommender = "--model-type recommender" in model
    if "--model-type t5" in model:
        return _encoder_decoder_flags(random, entry)
    if "--model-type vlm" in model:
        return _image_flags(random)
    hybrid = "--hybrid-layer-pattern" in model
    task = _task_flags(random, entry)
    any_mixer = not hybrid and not encoder and not recommender and not task
    latent, linear = "--multi-latent-attention" in model, "--experimental-attention-variant" in model
    return [
        *_shape_flags(random),
        *(_hybrid_flags(random, model.partition("--hybrid-layer-pattern ")[2][:1]) if hybrid else []),
        *(
            _encoder_flags(random)
            if encoder
            else _recommender_flags(random, hstu="--recommender-layers hstu" in model)
            if recommender
            else _component_flags(random)
        ),
        *(_latent_flags(random) if latent or (random.random() < 0.2 and any_mixer) else []),
        *([f"--mtp-num-layers {random.randint(1, 2)}"] if latent or (random.random() < 0.2 and any_mixer) else []),
        *(_linear_attention_flags(random) if linear or (random.random() < 0.2 and any_mixer) else []),
        *(_moe_flags(random) if entry.has_experts else []),
        *_training_flags(random),
        *task,
    ]


def _task_flags(random: Random, entry: MatrixEntry) -> list[str]:
    """Returns the head and the objective of models that read whole texts. What a loss compares is the micro-batch of the entry."""
    if "--objective" not in entry.model_flags:
        return []
    flags = [f"--pooling {random.choice(get_args(PoolingName))}", *["--pooler"] * (random.random() < 0.5)]
    if entry.model == "embedder":
        settings = f"--objective-settings temperature=0.3 --dataset-settings negatives={random.randint(1, 2)}"
        return [*flags, "--objective contrastive", settings, "--micro-batch-size 2 --global-batch-size 16"]
    if random.random() < 0.5:
        return [*flags, f"--objective regression --num-labels {random.randint(1, 3)}"]
    return [*flags, f"--objective classification --num-labels {random.randint(2, 5)}"]


def _training_flags(random: Random) -> list[str]:
    return [TRAINING_FLAGS, f"--micro-batch-size {(micro := random.choice((1, 2, 3)))} --global-batch-size {8 * micro}"]


def _shape_flags(random: Random) -> list[str]:
    groups = random.choice((1, 2, 4, 6))
    heads = groups * random.choice((1, 1, 2, 3))
    length = 4 * random.randint(2, 8)
    flags = [
        f"--num-layers {random.choice((2, 3, 4, 4, 5, 6, 8))}",
        f"--hidden-size {random.choice((12, 20, 28, 32, 36))}",
        f"--num-attention-heads {heads} --num-query-groups {groups} --kv-channels {random.choice((4, 5, 6, 10))}",
        f"--ffn-hidden-size {4 * random.randint(3, 12)} --seq-length {length}",
        f"--vocab-size {random.randint(11, 150)} --make-vocab-size-divisible-by {random.choice((1, 3, 8))}",
    ]
    flags += [f"--window-size {random.randint(1, length)}"] * (random.random() < 0.3)
    return flags


def _hybrid_flags(random: Random, first: str) -> list[str]:
    """The pattern's length replaces the number of layers; it begins with a kind of layer that the entry's model has."""
    pattern = first + "".join(random.choice("MMG*-P") for _ in range(random.randint(1, 7)))
    groups = random.choice((1, 2, 4))
    flags = [
        f"--hybrid-layer-pattern {pattern} --num-layers {len(pattern)}",
        f"--mamba-num-heads {groups * random.choice((1, 2, 3, 4))} --mamba-num-groups {groups}",
        f"--mamba-head-dim {random.choice((4, 6, 10))} --mamba-state-dim {random.choice((3, 8))}",
        f"--mamba-chunk-size {random.choice((1, 4, 7, 64))}",
    ]
    flags += ["--mamba-norm-groups 1"] * (random.random() < 0.5)
    flags += [f"--mamba-gated-norm {random.choice(('gate_then_norm', 'norm_then_gate', 'none'))}"]
    flags += ["--ssm-in-multiplier 1.2 --ssm-multipliers 0.7 0.8 1.3 0.6 1.1 --ssm-out-multiplier 0.5"] * (
        random.random() < 0.3
    )
    return [*flags, *(_delta_sizes(random) if "G" in pattern else [])]


def _encoder_flags(random: Random) -> list[str]:
    placement = random.choice(("post", "post", "pre", "both", "output"))
    flags = [
        f"--model-type bert --norm-placement {placement} --normalization {random.choice(('LayerNorm', 'RMSNorm'))}",
        f"--position-embedding-type {random.choice(('rope', 'rope', 'none', 'learned_absolute'))}",
        f"--activation {random.choice(('gelu', 'geglu', 'relu', 'swiglu'))} --position-offset {random.choice((0, 0, 2))}",
        f"--num-token-types {random.choice((0, 2, 3))} {_masked_vocabulary(random)}",
    ]
    for flag, chance in (
        ("--no-bert-binary-head", 0.3),
        ("--no-prediction-bias", 0.3),
        ("--disable-bias-linear", 0.5),
        ("--qk-layernorm", 0.2),
        ("--untie-embeddings-and-output-weights", 0.3),
        ("--embed-layernorm", 0.5),
        ("--no-first-attention-norm", 0.3 if placement == "pre" else 0.0),
    ):
        flags += [flag] * (random.random() < chance)
    return flags


def _recommender_flags(random: Random, *, hstu: bool) -> list[str]:
    flags = [
        f"--model-type recommender --normalization {random.choice(('LayerNorm', 'RMSNorm'))}",
        f"--position-embedding-type {random.choice(('learned_absolute', 'learned_absolute', 'none', 'rope'))}",
        f"--activation {random.choice(('relu', 'gelu', 'swiglu'))} --num-item-negatives {random.choice((1, 5, 40))}",
        f"--item-loss {random.choice(get_args(ItemLossName))} --item-negatives {random.choice(get_args(ItemNegativesName))}",
    ]
    if hstu:
        flags.append(f"--recommender-layers hstu --hstu-value-dim {random.randint(2, 9)}")
        flags.append(f"--hstu-time-buckets {random.choice((0, 3, 128))}")
    for flag, chance in (
        ("--untie-embeddings-and-output-weights", 0.5),
        ("--scale-embeddings", 0.5),
        ("--embed-layernorm", 0.3),
        ("--disable-bias-linear", 0.5),
        ("--qk-layernorm", 0.0 if hstu else 0.3),
    ):
        flags += [flag] * (random.random() < chance)
    return flags


def _masked_vocabulary(random: Random) -> str:
    """Made-up masked text has special tokens too."""
    return f"--vocab-size {random.randint(MIN_MOCK_VOCABULARY, 150)}"


def _encoder_decoder_flags(random: Random, entry: MatrixEntry) -> list[str]:
    encoder, decoder = random.randint(1, 4), random.randint(1, 4)
    buckets = random.choice((4, 6, 8, 12))
    flags = [
        *_shape_flags(random),
        f"--model-type t5 --encoder-num-layers {encoder} --decoder-num-layers {decoder} --num-layers {encoder + decoder}",
        _masked_vocabulary(random),
        f"--decoder-seq-length {4 * random.randint(4, 8)} --mask-prob {random.choice((0.15, 0.3))}",
        f"--position-embedding-type {random.choice(('relative', 'relative', 'rope', 'none', 'learned_absolute'))}",
        f"--relative-attention-num-buckets {buckets} --relative-attention-max-distance {buckets // 2 + random.randint(1, 9)}",
        f"--norm-placement {random.choice(('pre', 'pre', 'both', 'output'))}",
        f"--normalization {random.choice(('LayerNorm', 'RMSNorm'))} --softmax-scale {random.choice((0.3, 1.0))}",
        f"--activation {random.choice(('gelu', 'geglu_tanh', 'relu', 'swiglu'))}",
    ]
    for flag, chance in (
        ("--disable-bias-linear", 0.5),
        ("--qk-layernorm", 0.2),
        ("--untie-embeddings-and-output-weights", 0.5),
        ("--embed-layernorm", 0.2),
        ("--logits-scaling 3", 0.5),
    ):
        flags += [flag] * (random.random() < chance)
    return [*flags, *(_moe_flags(random) if entry.has_experts else []), *_training_flags(random)]


def _image_flags(random: Random) -> list[str]:
    """A decoder of any shape behind one of the encoders of images; heads and widths that two ranks can share."""
    merge, patch, heads = random.choice((1, 2, 3)), random.choice((1, 2)), random.choice((2, 4))
    width, vocabulary = heads * random.choice((4, 8, 12)), 8 * random.randint(9, 20)
    rotary, inner = random.random() < 0.5, 8 * random.randint(2, 6)
    flags = [
        *_shape_flags(random),
        f"--model-type vlm --vocab-size {vocabulary} --image-token-id {random.randrange(vocabulary)} --max-patches 400 --seq-length 48",
        f"--vision-num-layers {random.choice((2, 4))} --vision-hidden-size {width} --vision-num-attention-heads {heads}",
        f"--vision-ffn-hidden-size {inner} --vision-patch-size {patch} --vision-merge-size {merge}",
        f"--vision-activation {random.choice(('gelu', 'quick_gelu', 'gelu_tanh', 'swiglu'))}",
        f"--vision-normalization {random.choice(('LayerNorm', 'RMSNorm'))} --projector-hidden-size {inner}",
        f"--projector-num-layers {random.choice((1, 2, 2))} --projector-activation {random.choice(('gelu', 'relu'))}",
        f"--normalization {random.choice(('LayerNorm', 'RMSNorm'))} --activation {random.choice(('gelu', 'swiglu'))}",
        f"--position-embedding-type {random.choice(('rope', 'rope', 'none'))}",
    ]
    if rotary:
        flags.append(f"--vision-position-embedding-type rope --vision-temporal-patch-size {random.choice((1, 2))}")
    else:
        flags.append(f"--vision-image-size {2 * patch * merge}" + " --vision-class-token" * (merge == 1))
    if rotary and random.random() < 0.5:
        flags.append(f"--vision-window-size {2 * patch * merge} --vision-full-attention-layers 1")
    for flag, chance in (
        ("--no-vision-final-norm", 0.5),
        ("--vision-input-norm", 0.3),
        ("--no-vision-patch-bias", 0.5),
        ("--no-projector-bias", 0.3),
        ("--projector-norm", 0.3),
        ("--untie-embeddings-and-output-weights", 0.5),
        ("--disable-bias-linear", 0.5),
        ("--qk-layernorm", 0.2),
    ):
        flags += [flag] * (random.random() < chance)
    return [*flags, *_training_flags(random)]


def _linear_attention_flags(random: Random) -> list[str]:
    variant = random.choice(get_args(LinearAttentionName))
    return [
        f"--experimental-attention-variant {variant} --linear-attention-freq {random.choice((1, 2, 3, 4))}",
        *(_delta_sizes(random) if variant in DELTA_NETS else [f"--linear-chunk-size {random.choice((1, 4, 7, 64))}"]),
    ]


def _delta_sizes(random: Random) -> list[str]:
    key_heads = random.choice((1, 2, 4))
    return [
        f"--linear-num-key-heads {key_heads} --linear-num-value-heads {key_heads * random.choice((1, 2, 3, 4))}",
        f"--linear-key-head-dim {random.choice((3, 6, 8))} --linear-value-head-dim {random.choice((4, 5, 10))}",
        f"--linear-chunk-size {random.choice((1, 4, 7, 64))} --linear-conv-kernel-dim {random.choice((2, 3, 4))}",
    ]


def _component_flags(random: Random) -> list[str]:
    positions = random.choice(("rope", "rope", "rope", "learned_absolute", "none", "alibi"))
    activation = random.choice(("swiglu", "geglu", "reglu", "quick_geglu", "gelu", "gelu_tanh", "squared_relu", "silu"))
    flags = [
        f"--position-embedding-type {positions} --activation {activation}",
        f"--normalization {random.choice(('LayerNorm', 'RMSNorm'))}",
    ]
    for flag, chance in (
        ("--disable-bias-linear", 0.5),
        ("--add-qkv-bias", 0.3),
        ("--qk-layernorm", 0.3),
        ("--untie-embeddings-and-output-weights", 0.5),
        ("--attention-output-gate", 0.2),
        ("--no-norm-bias", 0.2),
        ("--embed-layernorm", 0.2),
        ("--clip-qkv 0.4", 0.2),
        ("--reset-attention-mask", 0.3),
        ("--reset-position-ids", 0.3),
        ("--eod-mask-loss", 0.3),
    ):
        flags += [flag] * (random.random() < chance)
    flags += _variant_flags(random, rotary=positions == "rope", gated=activation.endswith("glu"))
    return [*flags, *_input_factor_flags(random, " ".join(flags))]


def _variant_flags(random: Random, *, rotary: bool, gated: bool) -> list[str]:
    """Draws variants of layers; half of all models have none."""
    if random.random() < 0.5:
        return []
    flags = [f"--softmax-type {random.choice(('vanilla', 'vanilla', 'off-by-one', 'learnable'))}"]
    placement = random.choice([name for name in get_args(NormPlacementName) if name != "post"])
    branches = random.choice(("sequential", "parallel", "parallel_shared_norm")) if placement == "pre" else "sequential"
    flags += [f"--norm-placement {placement} --residual-branches {branches}"]
    for flag, chance in (
        ("--window-size 3 --window-attn-skip-freq 2", 0.3),
        ("--attn-logit-softcapping 2", 0.3),
        ("--final-logit-softcapping 3", 0.3),
        ("--softmax-scale 0.4", 0.3),
        ("--embedding-multiplier 1.5 --residual-multiplier 0.7 --logits-scaling 1.3", 0.3),
        ("--attention-out-multiplier 0.9", 0.2),
        ("--mlp-multipliers 0.75 0.65", 0.2 * gated),
        ("--activation-func-clamp-value 0.5 --glu-linear-offset 0.7", 0.2 * gated),
        ("--no-rope-freq 2", 0.3 * rotary),
        ("--no-rope-freq 2 --attention-temperature-scale 0.2 --attention-temperature-floor 3", 0.2 * rotary),
        (f"--attention-chunk-size {random.randint(1, 9)}", 0.3 * rotary),
        ("--qk-l2-norm", 0.2 * rotary),
        ("--rotary-interleaved", 0.3 * rotary),
    ):
        flags += [flag] * (random.random() < chance)
    return flags


def _input_factor_flags(random: Random, others: str) -> list[str]:
    """Draws factors on attention's input and keys, where nothing stands between these and scores or output."""
    between = ("--add-qkv-bias", "--qk-layernorm", "--qk-l2-norm", "--clip-qkv", "--attention-output-gate")
    between += ("--norm-placement both", "--norm-placement output")
    linear = "--disable-bias-linear" in others and not any(flag in others for flag in between)
    return ["--attention-in-multiplier 0.8 --key-multiplier 0.7"] * (linear and random.random() < 0.5)


def _latent_flags(random: Random) -> list[str]:
    flags = [
        f"--multi-latent-attention --kv-lora-rank {random.choice((5, 8, 12))} --qk-head-dim {random.choice((3, 6, 8))}",
        f"--qk-pos-emb-head-dim {random.choice((2, 4))} --v-head-dim {random.choice((3, 7, 8))}",
    ]
    return [*flags, *[f"--q-lora-rank {random.choice((7, 10, 16))}"] * (random.random() < 0.5)]


def _moe_flags(random: Random) -> list[str]:
    """Excludes what the layout defines (a global load-balancing loss), and router noise."""
    score = random.choice(("softmax", "sigmoid"))
    balance = random.choice(("aux_loss", "seq_aux_loss", "sinkhorn", "none"))
    flags = [
        f"--num-experts {random.choice((4, 6, 8, 12))} --moe-router-topk {random.randint(1, 3)}",
        f"--moe-ffn-hidden-size {4 * random.randint(2, 8)} --moe-router-score-function {score}",
        f"--moe-router-load-balancing-type {balance}",
        f"--moe-layer-freq {random.choice(('1', '1', '2'))}",
    ]
    flags += ["--moe-aux-loss-coeff 0.02"] * (balance.endswith("aux_loss"))
    flags += ["--moe-router-pre-softmax"] * (score == "softmax" and random.random() < 0.5)
    flags += ["--moe-router-enable-expert-bias"] * (score == "sigmoid" and random.random() < 0.5)
    flags += ["--moe-z-loss-coeff 1e-3"] * (random.random() < 0.5)
    flags += ["--moe-router-linear-bias"] * (random.random() < 0.3)
    flags += [f"--moe-shared-expert-intermediate-size {4 * random.randint(2, 6)}"] * (random.random() < 0.5)
    flags += [f"--moe-latent-size {random.choice((8, 14))}"] * (random.random() < 0.3)
    flags += ["--moe-grouped-gemm"] * (random.random() < 0.5)
    dispatcher = random.choice(("allgather", "alltoall"))
    return [*flags, f"--moe-token-dispatcher-type {dispatcher}"]
