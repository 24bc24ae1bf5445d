"""The proof matrix as data: which layouts must train the same model as one process.

A layout's flags follow from its name. Parts are joined by dots; a part is an axis with its
size and, after dashes, its options: `tp2-sp.pp2-vpp2.dp2-zero1` is tensor parallel 2 with sequence parallel,
two pipeline ranks of two virtual stages each, and two data-parallel ranks that shard the optimizer's state. Before the
colon is the model: `moe:dp4.ep2`. Experts are on the ranks of the other axes (ep and etp fold over tp x cp x dp), so
ep and etp never add ranks.

What is in it:

  - every axis alone at 2 and at 4 ranks, with each of its options (schedules, key/value exchanges, dispatchers,
    ZeRO stages);
  - every pair of {tp with sequence parallel, pp, virtual stages, cp, ep, dp with a sharded optimizer, fully sharded}. Two of
    these are no pairs of layouts: virtual stages exist only inside a pipeline, so `pp x vpp` is vpp itself; and a sharded
    optimizer and fully_shard are two answers to one question;
  - combinations of three and more axes, most of them on 8 ranks.

Each entry trains the global batch and the micro-batch *size* of its reference: the load-balancing loss of an MoE
is defined over a micro-batch.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from petatron.base.errors import ConfigError, Problem
from petatron.verify.compare_traces import Tolerances

MATRIX_TOLERANCES = {
    "float32": Tolerances(loss=1e-5, gradient=2e-4, parameter=1e-4),
    "float64": Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-7),
}
"""Tolerances of the matrix: tighter than those of `petatron verify` for models of any size.

In float32 rounding grows over 20 steps: the gradient of a step size's bias in a hybrid is 1.2e-4 apart at the 18th, on x86, and
within the tolerance of float64 there.
"""

TRAINING_FLAGS = (
    "--mock-data --num-workers 0 --device cpu --lr 2e-3 --weight-decay 0.1 --init-method-std 0.1 --ddp-bucket-size 3000"
)
"""How every model of the matrix is trained. Buckets are small, so that there are several even in a small model."""
_BATCH_FLAGS = "--global-batch-size 16 --micro-batch-size 2"

_LLAMA_FLAGS = (
    "--hidden-size 32 --num-attention-heads 8 --num-query-groups 4 --ffn-hidden-size 48 --seq-length 16 --vocab-size 131 "
    "--make-vocab-size-divisible-by 8 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
)
# Rope over the whole head: without rope a key bias adds the same to all scores of a query, so its gradient
# is zero in exact arithmetic. In float32 that is noise: over the comparison's floor for such tensors it is 1e-4, the very
# tolerance, and with partial rope Adam makes full steps of it in the other part of the same tensor.
# The small base keeps the slowest rotation away from zero.
_GPT_FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 --vocab-size 67 "
    "--make-vocab-size-divisible-by 2 --position-embedding-type rope --rotary-base 100 --activation gelu_tanh "
    "--untie-embeddings-and-output-weights --add-qkv-bias --qk-layernorm --window-size 9 "
    "--reset-attention-mask --reset-position-ids --eod-mask-loss"
)
_MOE_FLAGS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3 "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 16 --moe-layer-freq [0,1,1,1]"
)
_MAMBA_FLAGS = "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-chunk-size 4"
_MULTIPLIER_FLAGS = (
    "--embedding-multiplier 1.7 --logits-scaling 1.5 --attention-in-multiplier 0.8 --key-multiplier 0.7 --attention-out-multiplier 0.9 "
    "--ssm-in-multiplier 1.2 --ssm-multipliers 0.7 0.8 1.3 0.6 1.1 --ssm-out-multiplier 0.5 --mlp-multipliers 0.75 0.65"
)
# Whole sequences, eight value heads and two taps: a document's first outputs are normalized products of a query and a key, however small
# these are, and strong decays have gradients near zero, so that with more of both the noise of float32 comes close to the tolerance
# after 20 steps. `tests/parity/models/test_delta.py` has packed documents, and three and four taps.
_DELTA_FLAGS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 6 --linear-value-head-dim 5 "
    "--linear-num-key-heads 2 --linear-num-value-heads 8 --linear-conv-kernel-dim 2 --linear-chunk-size 4 --attention-output-gate "
    "--qk-layernorm --apply-layernorm-1p --rotary-percent 0.5 --moe-shared-expert-gate"
)
_LIGHTNING_FLAGS = (
    "--experimental-attention-variant lightning_attention --linear-attention-freq 2 --linear-chunk-size 4 --norm-placement stream "
    "--lightning-stream-multiplier 1.4 --lightning-out-multiplier 0.8 --attention-stream-multiplier 1.3 --attention-out-multiplier 0.9 "
    "--mlp-stream-multiplier 1.2 --mlp-multipliers 1 1.1"
)
_DEEPSEEK_FLAGS = (
    "--num-query-groups 8 --multi-latent-attention --q-lora-rank 20 --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 7 --qk-layernorm --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --num-experts 8 --moe-router-topk 4 "
    "--moe-ffn-hidden-size 12 --moe-shared-expert-intermediate-size 12 --moe-layer-freq [0,1,1,1] --moe-token-dispatcher-type alltoall "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
)
_BERT_FLAGS = (
    "--model-type bert --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 --vocab-size 67 "
    "--make-vocab-size-divisible-by 2 --position-embedding-type rope --rotary-base 100 --learned-position-table --position-offset 2 "
    "--norm-placement post --embed-layernorm --window-size 5 --window-attn-skip-freq 2"
)
_RECOMMENDER_FLAGS = (
    "--model-type recommender --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    "--vocab-size 131 --activation relu"
)
_HSTU_FLAGS = (
    "--recommender-layers hstu --hstu-value-dim 6 --untie-embeddings-and-output-weights --item-loss sampled_softmax --item-negatives both "
    "--num-item-negatives 12 --position-embedding-type none"
)
_T5_FLAGS = (
    "--model-type t5 --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--seq-length 16 --decoder-seq-length 8 --mask-prob 0.3 --vocab-size 67 --make-vocab-size-divisible-by 2 --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type relative --relative-attention-num-buckets 8 --relative-attention-max-distance 6 "
    "--softmax-scale 1 --activation relu --logits-scaling 5.656854249492381"
)
_CONTRASTIVE_FLAGS = "--objective contrastive --objective-settings temperature=0.2 --dataset-settings negatives=1"
_VLM_FLAGS = (
    f"--num-layers 2 {_LLAMA_FLAGS} --model-type vlm --seq-length 32 --vision-num-layers 2 --vision-hidden-size 32 "
    "--vision-num-attention-heads 4 --vision-ffn-hidden-size 32 --vision-patch-size 2 --image-token-id 66 --max-patches 100 "
    "--vision-position-embedding-type rope --vision-merge-size 2 --vision-window-size 8 --vision-full-attention-layers 1 "
    "--vision-temporal-patch-size 2 --vision-activation swiglu --vision-normalization RMSNorm --no-vision-final-norm --projector-norm "
    "--projector-hidden-size 128 --mrope-section 1 1 2 --kv-channels 8"
)
MODEL_FLAGS = {
    "dense": f"--num-layers 4 {_LLAMA_FLAGS}",
    "deep": f"--num-layers 8 {_LLAMA_FLAGS} --hidden-size 16 --ffn-hidden-size 24 --position-embedding-type learned_absolute",
    "gpt": _GPT_FLAGS,
    "moe": f"--num-layers 4 {_LLAMA_FLAGS} --untie-embeddings-and-output-weights {_MOE_FLAGS}",
    "mla": f"--num-layers 4 {_LLAMA_FLAGS} --untie-embeddings-and-output-weights {_DEEPSEEK_FLAGS}",
    "lora": f"--num-layers 4 {_LLAMA_FLAGS} {_MOE_FLAGS} --adapter lora --adapter-rank 3 --adapter-alpha 6",
    "dora": f"--num-layers 4 {_LLAMA_FLAGS} --adapter dora --adapter-rank 3 --adapter-alpha 6",
    "muon": f"--num-layers 4 {_LLAMA_FLAGS} --untie-embeddings-and-output-weights {_MOE_FLAGS}",
    "mamba": f"--hybrid-layer-pattern MMMM {_LLAMA_FLAGS} --position-embedding-type none {_MAMBA_FLAGS} --mamba-norm-groups 1",
    "hybrid": f"--hybrid-layer-pattern M-M* {_LLAMA_FLAGS} {_MAMBA_FLAGS} --reset-attention-mask --reset-position-ids",
    "parallel": f"--hybrid-layer-pattern P-P- {_LLAMA_FLAGS} {_MAMBA_FLAGS} --mamba-gated-norm norm_then_gate {_MULTIPLIER_FLAGS}",
    "delta": f"--num-layers 4 {_LLAMA_FLAGS} --untie-embeddings-and-output-weights {_MOE_FLAGS} {_DELTA_FLAGS}",
    "lightning": f"--num-layers 4 {_LLAMA_FLAGS} --untie-embeddings-and-output-weights {_MOE_FLAGS} {_LIGHTNING_FLAGS}",
    "bert": _BERT_FLAGS,
    "recommender": f"{_RECOMMENDER_FLAGS} --position-embedding-type learned_absolute --scale-embeddings",
    "hstu": f"{_RECOMMENDER_FLAGS} {_HSTU_FLAGS}",
    "t5": _T5_FLAGS,
    "vlm": _VLM_FLAGS,
    "t5moe": f"{_T5_FLAGS} {_MOE_FLAGS} --swiglu --group-query-attention --num-query-groups 2",
    "classifier": f"{_BERT_FLAGS} --objective classification --num-labels 3",
    "embedder": f"--num-layers 4 {_LLAMA_FLAGS} {_CONTRASTIVE_FLAGS}",
}
"""Small models by name: a Llama with tied embeddings; a deeper one with learned positions; one with everything a GPT may have
(biases, LayerNorm, qk-norm, a window, packed documents); an MoE; a DeepSeek-V3 (latent attention, experts in groups with biases,
multi-token prediction); the MoE with LoRA beside all its linears, experts too, and the Llama with DoRA; the MoE
trained with Muon, whose rule needs whole matrices; Mamba-2 with a norm over all channels; a hybrid
of Mamba-2, MLPs and attention over packed documents; a Falcon-H1 (attention and Mamba-2 in parallel, factors);
a Qwen3-Next (gated delta nets, gated attention, a gated shared expert); a MiniMax (lightning attention, norms on the residual stream,
factors); a BERT (masked, padded pairs of segments, two losses, norms after sums, windows on both sides); a SASRec, with a table of
items that is sharded by rows and a softmax over all of them; an HSTU with two tables and sampled items; and a T5 (an encoder whose
output the decoder reads, relative positions, span-corrupted text), dense and with experts; a Qwen2.5-VL (images and videos of several
sizes, windows, rotary rows and columns); the BERT with a head that classifies texts; and
a Llama that learns which texts belong together, with the texts of a micro-batch of all data-parallel ranks."""
OPTIMIZER_FLAGS = {
    "muon": "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high",
}
"""How a model is trained where not with AdamW, also when its shape is drawn at random."""

_AXIS_OPTIONS = {
    # Three chunks do not divide a rank's sequence shard, so their lengths differ.
    "tp": {"sp": "--sequence-parallel", "overlap": "--tp-comm-overlap --tp-comm-overlap-chunks 3"},
    "pp": {
        "gpipe": "--pipeline-schedule gpipe",
        "zbh1": "--pipeline-schedule zb-h1",
        "zbv": "--pipeline-schedule zb-v",
        "vpp2": "--num-virtual-stages-per-pipeline-rank 2",
        "chunk1": "--num-layers-per-virtual-pipeline-stage 1",
        "uneven": "--decoder-first-pipeline-num-layers 1",
        "encoder1": "--encoder-pipeline-model-parallel-size 1",
    },
    "cp": {
        "gather": "--cp-comm-type all_gather",
        "a2a": "--cp-comm-type a2a",
        "both": "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    },
    "dp": {
        "zero1": "--use-distributed-optimizer --overlap-param-gather",
        "zero2": "--data-parallel-sharding-strategy optim_grads",
        "fsdp": "--data-parallel-sharding-strategy optim_grads_params",
        "copies2": "--num-distributed-optimizer-instances 2",
        # Two ranks have the micro-batch of one process together, where a loss compares its samples.
        "micro1": "--micro-batch-size 1",
    },
    "ep": {
        "gather": "--moe-token-dispatcher-type allgather",
        "apart": "--no-moe-shared-expert-overlap",
        "overlap": "--overlap-moe-expert-parallel-comm",
    },
    "etp": {},
    "recompute": {
        "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "selective": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
        "experts": "--recompute-granularity selective --recompute-modules core_attn moe_act shared_experts",
        "mamba": "--recompute-granularity selective --recompute-modules core_attn mlp mamba",
        "delta": "--recompute-granularity selective --recompute-modules core_attn moe delta",
        "attention": "--recompute-granularity selective --recompute-modules attention moe",
    },
}
_LAYOUT_PART = re.compile(r"(?P<axis>[a-z]+)(?P<size>\d*)(?P<forms>(?:-[a-z0-9]+)*)")
_RANK_AXES = ("tp", "pp", "cp", "dp")


@dataclass(frozen=True, slots=True)
class MatrixEntry:
    """One layout of one model."""

    name: str
    model: str
    flags: str
    world_size: int

    @property
    def model_flags(self) -> str:
        return f"{MODEL_FLAGS[self.model]} {self.optimizer_flags} {TRAINING_FLAGS} {_BATCH_FLAGS}"

    @property
    def optimizer_flags(self) -> str:
        return OPTIMIZER_FLAGS.get(self.model, "")

    @property
    def has_experts(self) -> bool:
        return "--num-experts" in self.model_flags


def parse_entry(name: str) -> MatrixEntry:
    """Parses `dense:tp2-sp.dp2` into flags.

    >>> parse_entry("dense:tp2-sp.dp2-zero1")
    MatrixEntry(name='dense:tp2-sp.dp2-zero1', model='dense', flags='--tp 2 --sequence-parallel --dp 2 --use-distributed-optimizer \
--overlap-param-gather', world_size=4)
    """
    model, _, layout = name.partition(":")
    assert model in MODEL_FLAGS, f"{name}: no model {model}"
    flags: list[str] = []
    sizes: list[int] = []
    for part in layout.split("."):
        match = _LAYOUT_PART.fullmatch(part)
        assert match is not None and match["axis"] in _AXIS_OPTIONS, f"{name}: cannot read {part!r}"
        if match["size"]:
            flags.append(f"--{match['axis']} {match['size']}")
        if match["axis"] in _RANK_AXES:
            sizes.append(int(match["size"]))
        flags += [_AXIS_OPTIONS[match["axis"]][form] for form in match["forms"].split("-")[1:]]
    return MatrixEntry(name, model, " ".join(flags), prod(sizes))


_SINGLE_AXIS = """
dense:tp2 dense:tp4 dense:tp2-sp dense:tp4-sp gpt:tp2 gpt:tp4-sp
dense:tp2-sp-overlap dense:tp4-sp-overlap gpt:tp2-sp-overlap gpt:tp4-sp-overlap deep:tp2-sp-overlap
dense:pp2 dense:pp4 dense:pp2-gpipe dense:pp4-gpipe dense:pp2-uneven gpt:pp4
dense:pp2-vpp2 deep:pp4-vpp2 deep:pp2-chunk1 gpt:pp2-chunk1
dense:pp2-zbh1 dense:pp4-zbh1 dense:pp2-zbv deep:pp4-zbv gpt:pp2-zbv
dense:cp2 dense:cp4 dense:cp2-gather dense:cp4-gather dense:cp2-a2a dense:cp4-a2a dense:cp4-both gpt:cp2 gpt:cp4-both
deep:cp2 deep:tp2-sp
dense:dp2 dense:dp4 dense:dp2-zero1 dense:dp4-zero1 dense:dp4-zero1-copies2 gpt:dp4-zero1
dense:dp2-zero2 dense:dp4-zero2 dense:dp2-fsdp dense:dp4-fsdp dense:dp4-fsdp-copies2 dense:dp4-zero2-copies2 gpt:dp2-fsdp
moe:dp2.ep2 moe:dp4.ep4 moe:dp2.ep2-gather moe:dp4.ep4-gather moe:dp2.etp2 moe:dp4.etp4
moe:dp2.ep2-apart moe:dp2.ep2-overlap moe:dp4.ep4-overlap
mla:tp2-sp mla:tp4 mla:pp2 mla:pp4 mla:pp2-vpp2 mla:pp2-zbh1 mla:pp2-zbv mla:cp2 mla:cp2-gather mla:cp4-both mla:dp2.ep2 mla:dp4.ep4
mla:dp2-zero1 mla:dp2-fsdp
lora:tp2 lora:tp4-sp lora:tp2-sp-overlap lora:pp2 lora:pp2-vpp2 lora:pp2-zbh1 lora:pp2-zbv lora:cp2 lora:dp2.ep2 lora:dp2.etp2
lora:dp4-zero1 lora:dp2-zero2 lora:dp2-fsdp dora:tp2 dora:tp2-sp-overlap dora:pp2 dora:cp2 dora:dp2-zero1 dora:dp2-fsdp
muon:tp2-sp muon:dp4-zero1 muon:dp4-fsdp
mamba:tp2 mamba:tp4-sp mamba:pp4 mamba:pp2-zbh1 mamba:cp2 mamba:cp4 mamba:dp4-zero1 mamba:dp2-fsdp
hybrid:tp2-sp hybrid:tp4 hybrid:tp2-sp-overlap hybrid:pp2 hybrid:pp2-zbv hybrid:dp2-fsdp
parallel:tp2-sp parallel:tp4 parallel:tp2-sp-overlap parallel:pp2 parallel:pp2-zbv parallel:dp4-zero1 parallel:dp2-fsdp
parallel:cp2 parallel:cp4 parallel:cp2-gather parallel:cp2-a2a parallel:cp4-both
hybrid:cp2 hybrid:cp4 hybrid:cp2-gather hybrid:cp2-a2a hybrid:cp4-both
delta:tp2 delta:tp4-sp delta:tp2-sp-overlap delta:pp2 delta:pp4 delta:pp2-vpp2 delta:pp2-zbh1 delta:pp2-zbv delta:dp2.ep2 delta:dp4.ep4
delta:dp4-zero1 delta:dp2-fsdp delta:cp2 delta:cp4 delta:cp2-gather delta:cp2-a2a delta:cp4-both
lightning:tp2 lightning:tp4-sp lightning:tp2-sp-overlap lightning:pp2 lightning:pp4 lightning:pp2-vpp2 lightning:pp2-zbh1 lightning:pp2-zbv
lightning:dp2.ep2 lightning:dp4.ep4 lightning:dp4-zero1 lightning:dp2-fsdp lightning:cp2 lightning:cp4 lightning:cp2-gather
lightning:cp2-a2a lightning:cp4-both
bert:tp2 bert:tp4-sp bert:tp2-sp-overlap bert:pp2 bert:pp4 bert:pp2-vpp2 bert:pp2-zbh1 bert:pp2-zbv bert:cp2 bert:cp4 bert:cp2-gather
bert:cp2-a2a bert:cp4-both bert:dp2 bert:dp4-zero1 bert:dp2-zero2 bert:dp2-fsdp
recommender:tp2 recommender:tp4-sp recommender:tp2-sp-overlap recommender:cp2 recommender:cp4 recommender:dp2 recommender:dp4
recommender:dp2-zero1 recommender:dp4-zero1 recommender:dp4-zero1-copies2 recommender:dp2-zero2 recommender:dp2-fsdp recommender:dp4-fsdp
hstu:tp2 hstu:tp4-sp hstu:pp2 hstu:pp4 hstu:pp2-vpp2 hstu:pp2-zbh1 hstu:pp2-zbv hstu:dp2 hstu:dp4-zero1 hstu:dp2-fsdp
t5:tp2 t5:tp4-sp t5:tp2-sp-overlap t5:pp2 t5:pp2-encoder1 t5:pp4 t5:pp2-vpp2 t5:pp2-zbh1 t5:pp2-zbv t5:cp2 t5:cp4 t5:cp2-gather t5:cp2-a2a
t5:cp4-both t5:dp2 t5:dp4-zero1 t5:dp2-zero2 t5:dp2-fsdp
t5moe:dp2.ep2 t5moe:dp4.ep4 t5moe:tp2-sp t5moe:pp2-encoder1
vlm:tp2 vlm:tp4-sp vlm:tp2-sp-overlap vlm:pp2 vlm:pp2-encoder1 vlm:pp4 vlm:pp2-vpp2 vlm:pp2-zbh1 vlm:pp2-zbv vlm:cp2 vlm:cp4
vlm:cp2-gather vlm:cp2-a2a vlm:cp4-both vlm:dp2 vlm:dp4-zero1 vlm:dp2-zero2 vlm:dp2-fsdp
classifier:tp2 classifier:tp4-sp classifier:pp2 classifier:pp4 classifier:pp2-vpp2 classifier:pp2-zbh1 classifier:cp2 classifier:cp4
classifier:dp2 classifier:dp4-zero1 classifier:dp2-fsdp
embedder:tp2-sp embedder:pp2 embedder:cp2 embedder:dp2-micro1 embedder:dp2-zero1-micro1 embedder:dp2-fsdp-micro1
"""
_AXIS_PAIRS = """
dense:tp2-sp.pp2 dense:tp2-sp.pp2-vpp2 dense:tp2-sp.cp2 dense:tp2-sp.cp2-a2a dense:tp2-sp.dp2-zero1 dense:tp2-sp.dp2-fsdp
dense:pp2.cp2 dense:pp2.dp2-zero1 dense:pp2.dp2-fsdp dense:pp2-zbh1.dp2-zero1 dense:pp2-zbv.tp2-sp
dense:pp2-vpp2.cp2 dense:pp2-vpp2.dp2-zero1 dense:pp2-vpp2.dp2-fsdp
dense:cp2.dp2-zero1 dense:cp2.dp2-fsdp gpt:tp2-sp.pp2 gpt:cp2.dp2-zero1 gpt:pp2-vpp2.dp2-fsdp
moe:tp2-sp.ep2.etp1 moe:tp2-sp.dp2.ep2 moe:tp2-sp.dp2.ep2-gather.etp1 moe:pp2.dp2.ep2 moe:pp2-vpp2.dp2.ep2
moe:cp2.ep2 moe:dp4-zero1.ep2 moe:dp4-fsdp.ep2 moe:pp2-zbh1.dp2.ep2 moe:pp2-zbv.tp2-sp
dense:tp2-sp.pp2.recompute-full dense:dp2-fsdp.recompute-selective moe:dp2.ep2.recompute-experts
dense:pp2-zbh1.recompute-full moe:pp2-vpp2.dp2.ep2.recompute-full
dense:tp2-sp-overlap.recompute-full dense:tp4-sp-overlap.recompute-selective dense:tp2-sp-overlap.pp2
dense:tp2-sp-overlap.pp2-zbh1 dense:tp2-sp-overlap.pp2-zbh1.recompute-full dense:tp2-sp-overlap.pp2-zbv
dense:tp2-sp-overlap.cp2 dense:tp2-sp-overlap.dp2-zero1
dense:tp2-sp-overlap.dp2-fsdp moe:tp2-sp-overlap.dp2.ep2 moe:tp4-sp-overlap.ep2.etp1.recompute-experts
moe:tp2-sp.dp2.ep2-overlap.etp1 moe:pp2.dp2.ep2-overlap moe:pp2-vpp2.dp2.ep2-overlap moe:cp2.ep2-overlap
moe:dp4-zero1.ep2-overlap moe:dp2.ep2-overlap.recompute-experts
mla:tp2-sp.pp2 mla:tp2-sp.cp2-a2a mla:tp2-sp.dp2.ep2 mla:pp2.dp2.ep2 mla:pp2-vpp2.dp2.ep2-overlap mla:cp2.ep2 mla:dp4-fsdp.ep2
mla:tp2-sp-overlap.pp2.recompute-full mla:dp2.ep2.recompute-experts
lora:tp2-sp.pp2 lora:tp2-sp.dp2.ep2 lora:dp4-fsdp.ep2 lora:tp2-sp.pp2.recompute-full lora:dp2.ep2.recompute-experts dora:tp2-sp.dp2-fsdp
muon:tp2-sp.dp2-zero1.ep2 muon:tp2-sp.dp2-zero2.ep2.etp1
mamba:tp2-sp.cp2 mamba:pp2.cp2 mamba:cp2.dp2-zero1 hybrid:tp2-sp.cp2 hybrid:tp2-sp.pp2 hybrid:cp2.dp2-fsdp hybrid:cp2.recompute-mamba
parallel:tp2-sp.cp2 parallel:tp2-sp.pp2 parallel:cp2.dp2-fsdp parallel:cp2.recompute-mamba parallel:tp2-sp.pp2.recompute-full
delta:tp2-sp.cp2 delta:tp2-sp.pp2 delta:pp2.cp2 delta:cp2.ep2 delta:cp2.dp2-fsdp delta:tp2-sp.dp2.ep2 delta:cp2.recompute-delta
delta:tp2-sp.pp2.recompute-full
lightning:tp2-sp.cp2 lightning:tp2-sp.pp2 lightning:pp2.cp2 lightning:cp2.ep2 lightning:cp2.dp2-fsdp lightning:tp2-sp.dp2.ep2
lightning:cp2.recompute-attention lightning:tp2-sp.pp2.recompute-full
bert:tp2-sp.pp2 bert:tp2-sp.cp2 bert:pp2.cp2 bert:pp2-vpp2.dp2-zero1 bert:cp2.dp2-fsdp bert:tp2-sp.dp2-fsdp bert:tp2-sp.pp2.recompute-full
bert:cp2.recompute-selective
recommender:tp2-sp.cp2 recommender:tp2-sp.dp2 recommender:tp2-sp.dp2-fsdp recommender:cp2.dp2-zero1 recommender:dp2-fsdp.recompute-selective
recommender:dp2.recompute-full
hstu:tp2-sp.pp2 hstu:pp2.dp2-zero1 hstu:tp2-sp.dp2-fsdp hstu:pp2-vpp2.dp2 hstu:dp2.recompute-attention hstu:tp2-sp.dp2.recompute-selective
vlm:tp2-sp.pp2 vlm:tp2-sp.cp2 vlm:pp2-encoder1.cp2 vlm:pp2-vpp2.dp2-zero1 vlm:cp2.dp2-fsdp vlm:tp2-sp.dp2-fsdp
vlm:tp2-sp.pp2.recompute-full vlm:cp2.recompute-selective
t5:tp2-sp.pp2 t5:tp2-sp.cp2 t5:pp2-encoder1.cp2 t5:pp2-vpp2.dp2-zero1 t5:cp2.dp2-fsdp t5:tp2-sp.dp2-fsdp t5:tp2-sp.pp2.recompute-full
t5:cp2.recompute-selective t5moe:tp2-sp.dp2.ep2 t5moe:cp2.ep2 t5moe:pp2.dp2.ep2
classifier:tp2-sp.pp2 classifier:tp2-sp.cp2 classifier:cp2.dp2-fsdp classifier:pp2-vpp2.dp2-zero1 classifier:tp2-sp.pp2.recompute-full
embedder:tp2-sp.dp2-fsdp-micro1 embedder:cp2.dp2-zero1-micro1 embedder:pp2.dp2-micro1 embedder:dp2-micro1.recompute-full
"""
_MULTI_AXIS = """
dense:tp2-sp.pp2.dp2-zero1 dense:tp2-sp.cp2.dp2 dense:tp2-sp.pp2.cp2 dense:tp2-sp.cp2.dp2-fsdp dense:tp2-sp.pp2.dp2-fsdp
dense:pp2-zbv.cp2.dp2-zero1 dense:pp2-vpp2.cp2-gather.dp2-zero1 dense:tp2-sp.pp2-zbh1.dp2 dense:tp2-sp.dp4-zero1-copies2
dense:tp2-sp.dp4-fsdp-copies2 deep:tp2-sp.pp4-vpp2 dense:cp4-both.dp2-zero1 gpt:tp2-sp.pp2-vpp2.cp2
moe:pp2.dp4.ep2 moe:cp2.dp4.ep2 moe:pp2.dp4-fsdp.ep2 moe:tp2-sp.dp4.ep4.etp2 moe:tp2-sp.dp4.ep4.etp1
lora:tp2-sp.pp2.cp2.ep2 moe:tp2-sp.cp2.dp2-fsdp.ep2 moe:tp2-sp.pp2-vpp2.dp2.ep2 moe:tp2-sp.pp2-vpp2.dp2-zero1.ep2
dense:tp2-sp-overlap.pp2-zbh1.dp2-zero1 moe:tp2-sp-overlap.pp2-vpp2.cp2.ep2
moe:tp2-sp.pp2.cp2.ep2 moe:tp2-sp.pp2.cp2.ep4.etp1 moe:pp2.cp2.dp2-zero1.ep2 moe:dp8-zero1-copies2.ep4
moe:tp2-sp.pp2-vpp2.dp2-zero1.ep2-overlap
hybrid:tp2-sp.pp2.cp2 parallel:tp2-sp.pp2.cp2 mamba:tp2-sp.cp2.dp2-zero1
delta:tp2-sp.pp2.cp2.ep2 delta:pp2.cp2.dp2-zero1.ep2 lightning:tp2-sp.pp2.cp2.ep2 lightning:pp2.cp2.dp2-zero1.ep2
bert:tp2-sp.pp2.cp2 bert:pp2.cp2.dp2-zero1 recommender:tp2-sp.cp2.dp2-zero1 hstu:tp2-sp.pp2.dp2-zero1
vlm:tp2-sp.pp2-encoder1.cp2 vlm:pp2.cp2.dp2-zero1 t5:tp2-sp.pp2-encoder1.cp2 t5:pp2.cp2.dp2-zero1 t5moe:tp2-sp.pp2.cp2.ep2
classifier:pp2.cp2.dp2-zero1 embedder:tp2-sp.cp2.dp2-zero1-micro1 embedder:tp2-sp.pp2.dp2-fsdp-micro1
mla:pp2.dp4.ep4 mla:tp2-sp.pp2.cp2.ep2 mla:pp2.cp2.dp2-zero1.ep2 mla:pp4-zbh1.dp2.ep2
"""
MATRIX = tuple(parse_entry(name) for names in (_SINGLE_AXIS, _AXIS_PAIRS, _MULTI_AXIS) for name in names.split())


def select_entries(
    *, pattern: str | None = None, sample: int | None = None, seed: int = 1234, max_ranks: int = 8
) -> tuple[MatrixEntry, ...]:
    """Selects entries of at most `max_ranks` by name, and of these a random sample.

    A full name selects that entry alone, any other word every entry whose name contains it; *, ? and [] are as in a shell.
    """
    named = [entry for entry in MATRIX if pattern is None or _matches(entry.name, pattern)]
    chosen = [entry for entry in named if entry.world_size <= max_ranks]
    if not named:
        names = ", ".join(entry.name for entry in random.Random(seed).sample(MATRIX, 3))
        rule = "fits no layout of the matrix"
        raise ConfigError([Problem("--only", pattern or "", rule, f"Names look like {names}; * stands for anything")])
    if not chosen:
        rule = f"is too few for {named[0].name if len(named) == 1 else f'any of the {len(named)} layouts chosen'}"
        fix = f"Use {min(entry.world_size for entry in named)} or more"
        raise ConfigError([Problem("--nproc", str(max_ranks), rule, fix)])
    if sample is None or sample >= len(chosen):
        return tuple(chosen)
    sampled = set(random.Random(seed).sample(range(len(chosen)), sample))
    return tuple(entry for index, entry in enumerate(chosen) if index in sampled)


def _matches(name: str, pattern: str) -> bool:
    if any(entry.name == pattern for entry in MATRIX):
        return name == pattern
    return fnmatchcase(name, pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*")
