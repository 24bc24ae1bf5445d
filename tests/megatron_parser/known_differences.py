"""Where Petatron and Megatron differ on the same flags, and why: every difference that the comparison may find, and no other.

`docs/coming-from.md` has the same reasons, word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One command line, what Megatron derives from it (nothing, where it refuses it), and ours."""

    version: str
    flags: Sequence[str]
    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]

    def has(self, *names: str) -> bool:
        return all(name in self.flags for name in names)

    def value(self, name: str) -> str:
        return self.flags[self.flags.index(name) + 1] if name in self.flags else ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Numbers that differ where `holds`, and why."""

    names: tuple[str, ...]
    holds: Callable[[Case], bool]
    reason: str


_STEPS = "--step-batch-size-schedule"

NUMBERS = (
    Difference(
        ("global_batch_size", "eval_global_batch_size"),
        lambda case: case.has(_STEPS),
        "with --step-batch-size-schedule the global batch size is that of the last step; Megatron's is micro batch x data parallel, which "
        "evaluations then have",
    ),
    Difference(
        ("samples",),
        lambda case: case.has(_STEPS),
        "with --step-batch-size-schedule the samples of training and evaluation are counted with the sizes of the batches; Megatron counts "
        "them with micro batch x data parallel",
    ),
    Difference(
        ("over_time",),
        lambda case: case.has(_STEPS, "--train-iters"),
        "with --step-batch-size-schedule and --train-iters, schedules go by iterations; Megatron's go by samples over a length that it "
        "counts with micro batch x data parallel, so that the learning rate ends early",
    ),
    Difference(
        ("iterations", "batches", "samples"),
        lambda case: (
            (case.has(_STEPS) or case.has("--rampup-batch-size"))
            and case.has("--train-samples")
            and case.theirs["iterations"] == case.ours["iterations"] + 1
        ),
        "with --train-samples that end on --step-batch-size-schedule or --rampup-batch-size, a last partial batch is left out, as it is "
        "without them; Megatron trains a whole one",
    ),
    Difference(
        ("padded_vocab_size",),
        lambda case: case.version == "0.17.1",
        "NullTokenizer has --vocab-size ids; until 0.17 Megatron's had one more",
    ),
    Difference(
        ("overlap_grad_reduce",),
        lambda case: not case.has("--overlap-grad-reduce"),
        "gradients are always reduced while the backward pass runs; no number changes",
    ),
    Difference(
        ("sequence_parallel",),
        lambda case: case.has("--num-experts") and case.ours["sequence_parallel"],
        "with experts and tensor parallelism, sequence parallelism is on, so that every token is routed by one rank; no number changes",
    ),
    Difference(
        ("grads_in_fp32",),
        lambda case: case.has("--fp16"),
        "with --fp16 gradients are summed and reduced in fp32, as with --bf16; Megatron sums them in fp16 unless "
        "--accumulate-allreduce-grads-in-fp32 is given",
    ),
    Difference(
        ("check_for_nan_in_loss_and_grad",),
        lambda case: case.has("--fp16") and not case.has("--loss-scale"),
        "with --fp16 the check for NaN stays on beside dynamic loss scaling, and leaves overflows to it; Megatron turns the check off",
    ),
    Difference(
        ("activation",),
        lambda case: case.has("--openai-gelu"),
        "--openai-gelu is the tanh approximation of gelu; Megatron's models do not read the flag",
    ),
    Difference(
        ("muon_tp_mode",),
        lambda case: case.value("--muon-tp-mode") == "",
        "Muon orthogonalizes whole matrices whatever the layout; Megatron's default, blockwise, orthogonalizes the shards of "
        "tensor-parallel ranks",
    ),
    Difference(
        ("layers",),
        lambda case: case.has("--qk-l2-norm", "--no-rope-freq"),
        "--qk-l2-norm leaves out layers without rotary positions, as in Llama 4; Megatron's normalize in all layers",
    ),
)
"""What both derive, and differently."""


@dataclass(frozen=True, slots=True)
class OurRefusal:
    """A problem that we tell of flags which Megatron's parser takes, by its flag and a part of its text."""

    flag: str
    text: str
    reason: str


_NOT_HERE = "not in this version"
_LATER = "Megatron stops when it builds or runs the model"
_NOTHING = "it would do something else than it says"

OUR_REFUSALS = (
    OurRefusal(
        "--recompute-num-layers", "is more than the", "a stage has fewer layers, which Megatron cuts down silently"
    ),
    OurRefusal(
        "--eval-micro-batch-size",
        "shape transfers between pipeline stages",
        f"{_NOT_HERE}: other sizes there",
    ),
    OurRefusal("--qk-l2-norm", "is for layers with rotary positions", f"{_NOT_HERE}: the L2 norm is that of Llama 4"),
    OurRefusal("--rotary-percent", "which is not an even number", "channels are rotated in pairs; Megatron rounds up"),
    OurRefusal(
        "--rotary-percent",
        "would rotate less than the rotary part",
        f"{_NOT_HERE}: latent heads that are rotated in part",
    ),
    OurRefusal("--mscale-all-dim", "without YaRN", f"{_NOT_HERE}: the temperature of YaRN without its frequencies"),
    OurRefusal(
        "--rotary-seq-len-interpolation-factor", "one way to scale", f"{_NOT_HERE}: two scalings of positions at once"
    ),
    OurRefusal("--moe-aux-loss-coeff", "sinkhorn has none", _LATER),
    OurRefusal("--moe-router-group-topk", "which assigns tokens by itself", _NOTHING),
    OurRefusal("--moe-router-group-topk", "hold fewer than the --moe-router-topk", _LATER),
    OurRefusal("--moe-router-enable-expert-bias", "which assigns tokens by itself", _NOTHING),
    OurRefusal("--experimental-attention-variant", "both say which layers have one", _NOTHING),
    OurRefusal(
        "--no-rope-freq",
        "cannot be combined with --multi-latent-attention",
        "Megatron's latent attention rotates in every layer",
    ),
    OurRefusal("--cp-comm-type", "which does not divide", _LATER),
    OurRefusal(
        "--num-layers-per-virtual-pipeline-stage",
        "above 1",
        "one rank has no virtual stages; a chunk of all layers is one",
    ),
    OurRefusal("--fp8-format", "takes sizes that are multiples of 128", _LATER),
    OurRefusal("--first-last-layers-bf16", "in FP8", "nothing would be in FP8"),
    OurRefusal("--mamba-num-groups", "does not divide --mamba-num-heads", _LATER),
    OurRefusal("--mamba-head-dim", "does not divide", _LATER),
    OurRefusal("--lr-wsd-decay-samples", "is longer than", "the learning rate would fall before the warm-up has ended"),
    OurRefusal("--pipeline-model-parallel-layout", "without a layer", f"{_NOT_HERE}: a pipeline rank without a layer"),
)
"""What we refuse and Megatron's parser does not."""


@dataclass(frozen=True, slots=True)
class TheirRefusal:
    """Flags that Megatron refuses and we take."""

    holds: Callable[[Case], bool]
    reason: str


def _has_gelu_alone(case: Case) -> bool:
    return case.has("--squared-relu") and not case.has("--no-bias-gelu-fusion")


THEIR_REFUSALS = (
    TheirRefusal(lambda case: not case.has("--micro-batch-size"), "--micro-batch-size is 1 where it is not given"),
    TheirRefusal(
        lambda case: not case.has("--eval-interval"), "without --eval-interval it cannot count its validation samples"
    ),
    TheirRefusal(
        lambda case: case.has("--rampup-batch-size", "--train-iters"),
        "schedules in iterations go with a ramp of the batch size",
    ),
    TheirRefusal(
        lambda case: case.has("--use-tp-pp-dp-mapping"),
        "ranks may have any order beside context and expert parallelism",
    ),
    TheirRefusal(lambda case: case.has("--first-last-layers-bf16"), "the delayed recipe may leave layers out of FP8"),
    TheirRefusal(
        lambda case: case.has("--mtp-num-layers"),
        "multi-token prediction needs no rope and no place in a layout",
    ),
    TheirRefusal(
        lambda case: case.has("--main-grads-dtype", "--accumulate-allreduce-grads-in-fp32"),
        "the second asks for nothing",
    ),
    TheirRefusal(
        lambda case: case.has("--fp8-format", "--recompute-modules"),
        "the delayed recipe may recompute norms and activations",
    ),
    TheirRefusal(
        lambda case: case.has("--moe-shared-expert-overlap"),
        "other dispatchers have no overlap, as a notice tells",
    ),
    TheirRefusal(
        lambda case: case.has("--no-rope-freq"), "every N-th layer has no positions, whatever the number of layers"
    ),
    TheirRefusal(
        lambda case: case.has("--use-precision-aware-optimizer"), "formats of optimizer state need no other optimizer"
    ),
    TheirRefusal(
        lambda case: case.has("--recompute-modules") and not case.has("--moe-grouped-gemm"),
        "recompute needs no grouped GEMM",
    ),
    TheirRefusal(
        lambda case: case.has("--linear-attention-freq"), "gated delta nets have layouts that Megatron's have not"
    ),
    TheirRefusal(
        lambda case: case.has("--fp8-param-gather") and not case.has("--fp8-format"),
        "without FP8 a notice tells it",
    ),
    TheirRefusal(
        lambda case: case.has("--num-virtual-stages-per-pipeline-rank") and "hybrid" in " ".join(case.flags),
        "patterns are cut evenly",
    ),
    TheirRefusal(_has_gelu_alone, "no kernel of another activation has to be turned off"),
    TheirRefusal(
        lambda case: case.has("--num-experts") and not case.has("--disable-bias-linear"),
        "biases of experts may be split",
    ),
)
"""What Megatron refuses and we do not."""
