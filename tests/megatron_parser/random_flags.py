"""Random command lines in Megatron's flags, at toy size: most of them mean something, some do not, and both programs have to agree on it.

A case is a number. Each topic below adds the flags of one feature; what it draws, and from how many ranks, follows from the number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.megatron_parser.command_line import SEQ, CommandLine
from tests.megatron_parser.run_flags import batch, memory, optimizer, precision


def command_line(case: int, *, ramps: bool = False) -> tuple[list[str], int]:
    """Returns the flags of a case and its number of ranks; `ramps` are for 0.17, which has --rampup-batch-size and not all that is newer.

    >>> command_line(3) == command_line(3)
    True
    """
    line = CommandLine(random.Random(f"flags of case {case}"), ramps)
    for topic in _TOPICS:
        topic(line)
    world_size = line.world_size
    if line.draw.random() < 0.12:
        _spoil(line)
    if line.draw.random() < 0.02:
        world_size += 1
    return line.flags, world_size


def _layout(line: CommandLine) -> None:
    draw = line.draw
    line.tp, line.pp = draw.choice((1, 1, 2, 2, 4)), draw.choice((1, 1, 2, 2, 3, 4))
    line.cp, line.dp = draw.choice((1, 1, 1, 2)), draw.choice((1, 2, 2, 3, 4))
    for name, size in (("tensor", line.tp), ("pipeline", line.pp)):
        if size > 1 or draw.random() < 0.3:
            line.add(f"--{name}-model-parallel-size", size)
    if line.cp > 1:
        line.add("--context-parallel-size", line.cp)
        kind = draw.choice(("p2p", "all_gather", "a2a", None))
        if kind:
            line.add("--cp-comm-type", kind)
    line.maybe(0.4, "--sequence-parallel")
    line.maybe(0.08, "--use-tp-pp-dp-mapping")


def _pipeline(line: CommandLine) -> None:
    """How many layers there are, and where they go."""
    draw, pp = line.draw, line.pp
    way = draw.choice(("even", "even", "virtual", "stages", "first", "last", "both", "account", "layout", "layout"))
    if pp == 1:
        way = draw.choice(("even",) * 12 + ("virtual", "layout", "layout"))
    per_stage = draw.choice((1, 2, 2, 3, 4))
    line.layers = pp * per_stage
    match way:
        case "virtual":
            chunk = draw.choice((1, 2))
            line.layers = pp * chunk * draw.choice((1, 2, 3))
            line.add("--num-layers-per-virtual-pipeline-stage", chunk)
            _account(line, 0.3)
        case "stages":
            virtual = draw.choice((1, 2, 2, 3))
            line.layers = pp * virtual * draw.choice((1, 2))
            line.add("--num-virtual-stages-per-pipeline-rank", virtual)
            if draw.random() < 0.3:
                line.layers += virtual
                line.add("--decoder-first-pipeline-num-layers", line.layers // pp)
        case "first" | "last" | "both":
            first, last = draw.choice((1, 2, 3)), draw.choice((1, 2, 4))
            middle = pp - (way != "last") - (way != "first")
            line.layers = first * (way != "last") + last * (way != "first") + middle * per_stage
            if way != "last":
                line.add("--decoder-first-pipeline-num-layers", first)
            if way != "first":
                line.add("--decoder-last-pipeline-num-layers", last)
        case "account":
            _account(line, 1.0)
        case "layout":
            line.add("--pipeline-model-parallel-layout", _layout_text(line))
    line.add("--num-layers", line.layers)


def _account(line: CommandLine, chance: float) -> None:
    if line.draw.random() < chance:
        embedding, loss = line.draw.choice(((1, 0), (0, 1), (1, 1)))
        line.layers = max(line.layers - embedding - loss, 1)
        if embedding:
            line.add("--account-for-embedding-in-pipeline-split")
        if loss:
            line.add("--account-for-loss-in-pipeline-split")


def _layout_text(line: CommandLine) -> str:
    """Returns a layout of as many stages as divide by pp, written in different ways."""
    virtual = line.draw.choice((1, 1, 2))
    counts = [line.draw.choice((0, 1, 1, 2, 3)) for _ in range(line.pp * virtual)]
    counts[-1 if line.draw.random() < 0.5 else 0] += 1
    line.layers = sum(counts)
    stages = ["t" * count if line.draw.random() < 0.5 or count < 2 else f"t*{count}" for count in counts]
    stages[0], stages[-1] = "E" + stages[0], (stages[-1] if len(stages) > 1 else "E" + stages[0]) + "L"
    if len(counts) > 2 and line.draw.random() < 0.3:
        counts[1:-1] = [2] * (len(counts) - 2)
        line.layers = sum(counts)
        return f"{stages[0]}|(tt|)*{len(counts) - 2}{stages[-1]}"
    return "|".join(stages)


def _width(line: CommandLine) -> None:
    draw = line.draw
    line.heads = draw.choice((4, 4, 8, 8, 12))
    line.width = line.heads * draw.choice((8, 16, 16, 20, 32))
    line.add("--hidden-size", line.width, "--num-attention-heads", line.heads)
    line.maybe(0.25, "--ffn-hidden-size", draw.choice((128, 192, 256)))
    line.maybe(0.2, "--kv-channels", draw.choice((8, 16, 24)))
    positions = draw.choice((SEQ, SEQ, 2 * SEQ))
    line.add("--seq-length", SEQ, "--max-position-embeddings", positions)
    activation = draw.choice((None, "--swiglu", "--swiglu", "--squared-relu", "--quick-geglu", "--openai-gelu"))
    if activation:
        line.add(activation)
    if not line.maybe(0.4, "--disable-bias-linear") and activation == "--squared-relu":
        line.maybe(0.95, "--no-bias-gelu-fusion")
    line.maybe(0.2, "--add-qkv-bias")
    if line.maybe(0.5, "--normalization", draw.choice(("RMSNorm", "RMSNorm", "LayerNorm"))):
        line.maybe(0.3, "--norm-epsilon", "1e-6")
    line.maybe(0.1, "--apply-layernorm-1p")
    line.maybe(0.5, "--untie-embeddings-and-output-weights")
    line.maybe(0.15, "--init-method-std", 0.01)
    line.maybe(0.1, "--embedding-init-method-std", 0.1)
    for name in ("attention", "hidden"):
        line.maybe(0.4, f"--{name}-dropout", draw.choice((0, 0.0, 0.05)))
    line.add("--tokenizer-type", "NullTokenizer", "--vocab-size", draw.choice((128, 1000, 1000, 32000, 50257)))
    line.maybe(0.3, "--make-vocab-size-divisible-by", draw.choice((1, 8, 64)))


def _attention(line: CommandLine) -> None:
    draw = line.draw
    line.is_latent = draw.random() < 0.15
    if line.is_latent:
        line.add("--multi-latent-attention")
        line.maybe(0.6, "--kv-lora-rank", 16)
        line.maybe(0.5, "--q-lora-rank", 24)
        line.maybe(0.6, "--qk-head-dim", 16, "--qk-pos-emb-head-dim", 8)
        line.maybe(0.6, "--v-head-dim", draw.choice((16, 24)))
        line.maybe(0.5, "--rope-type", draw.choice(("rope", "yarn")))
        line.maybe(0.3, "--rotary-scaling-factor", 4.0)
        line.maybe(0.2, "--mscale", 0.707, "--mscale-all-dim", 0.707)
        line.maybe(0.4, "--qk-layernorm")
        line.maybe(0.9, "--no-rope-fusion")
        return
    if line.maybe(0.35, "--group-query-attention"):
        line.maybe(0.85, "--num-query-groups", draw.choice((1, 2, 4)))
    elif draw.random() < 0.05:
        line.add("--num-query-groups", 2)
    norm = draw.choice((None, None, None, "--qk-layernorm", "--qk-l2-norm"))
    if norm:
        line.add(norm)
    if line.maybe(0.15, "--window-size", "16,0"):
        line.maybe(0.5, "--window-attn-skip-freq", draw.choice((2, 3, f"([1]*{line.layers - 1}+[0])")))
    line.maybe(0.06, "--softmax-type", draw.choice(("off-by-one", "learnable")))
    line.maybe(0.05, "--attention-output-gate")
    if draw.random() < 0.08:
        line.add(
            "--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", draw.choice((1, 2, 3))
        )
        line.add("--linear-num-key-heads", 4, "--linear-num-value-heads", 8)
        line.add("--linear-key-head-dim", 8, "--linear-value-head-dim", 8)


def _positions(line: CommandLine) -> None:
    draw = line.draw
    way = draw.choice(("learned", "rope", "rope", "rope", "old", "none", "yarn"))
    if line.is_latent or "--qk-l2-norm" in line.flags:
        way = draw.choice(("rope",) * 8 + ("none", "yarn", "old", "learned"))
    line.rotary = way in ("rope", "old")
    if way == "old":
        line.add("--use-rotary-position-embeddings")
        line.maybe(0.5, "--no-position-embedding")
    elif way != "learned":
        line.add("--position-embedding-type", way)
    if way == "yarn" and not line.ramps:
        line.maybe(0.6, "--rotary-scaling-factor", 4.0)
        line.maybe(0.4, "--yarn-original-max-position-embeddings", 32)
        line.maybe(0.3, "--yarn-beta-fast", 16.0, "--yarn-beta-slow", 2.0)
        line.maybe(0.3, "--mscale", 0.707)
        line.maybe(0.3, "--no-yarn-correction-range-round-to-int")
    if way not in ("rope", "old", "yarn"):
        return
    line.maybe(0.4, "--rotary-base", draw.choice((500000, 1000000)))
    line.maybe(0.3, "--rotary-percent", draw.choice((0.25, 0.5)))
    line.maybe(0.1, "--rotary-interleaved")
    line.maybe(0.1, "--rotary-seq-len-interpolation-factor", 2)
    if line.maybe(0.2, "--use-rope-scaling"):
        line.maybe(0.5, "--rope-scaling-factor", 4.0)
    line.maybe(0.1, "--no-rope-freq", draw.choice((2, 3, f"([0]*{line.layers - 1}+[1])")))


def _hybrid(line: CommandLine) -> None:
    """Replaces the layers by a pattern."""
    draw = line.draw
    if line.is_latent or line.ramps or draw.random() > 0.12:
        return
    line.is_hybrid = True
    for name in ("--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage", "--num-layers"):
        line.drop(name, 1)
    for name in ("--num-virtual-stages-per-pipeline-rank", "--decoder-first-pipeline-num-layers"):
        line.drop(name, 1)
    line.drop("--decoder-last-pipeline-num-layers", 1)
    line.drop("--account-for-embedding-in-pipeline-split", 0)
    line.drop("--account-for-loss-in-pipeline-split", 0)
    symbols = "M*-MMG" if draw.random() < 0.2 else "M*-M"
    segments = ["".join(draw.choice(symbols) for _ in range(draw.choice((2, 4)))) for _ in range(line.pp)]
    if draw.random() < 0.7:
        segments = [segments[0]] * line.pp
    segments[0] = "M" + segments[0][1:]
    pattern = ("|" if line.pp > 1 and draw.random() < 0.4 else "").join(segments)
    line.layers = len(pattern.replace("|", ""))
    line.add(draw.choice(("--hybrid-layer-pattern", "--hybrid-layer-pattern", "--hybrid-override-pattern")), pattern)
    line.maybe(0.2, "--num-layers", line.layers)
    line.maybe(0.3, "--is-hybrid-model")
    line.maybe(0.5, "--mamba-state-dim", 16)
    line.maybe(0.5, "--mamba-head-dim", 16)
    line.maybe(0.5, "--mamba-num-groups", draw.choice((2, 4)))
    line.maybe(0.2, "--mamba-num-heads", 8)


def _experts(line: CommandLine) -> None:
    draw = line.draw
    if line.is_hybrid or draw.random() > 0.33:
        return
    line.has_experts = True
    experts = draw.choice((4, 8, 8, 12))
    line.add("--num-experts", experts)
    ranks = line.tp * line.cp * line.dp
    line.maybe(0.6, "--expert-model-parallel-size", draw.choice([ep for ep in (1, 2, 4) if ranks % ep == 0]))
    if line.maybe(0.35, "--expert-tensor-parallel-size", draw.choice((1, 1, 2))) or line.tp > 1:
        line.maybe(0.9, "--disable-bias-linear")
    topk = draw.choice((None, 1, 2, 4, 4))
    if topk:
        line.add("--moe-router-topk", topk)
    line.maybe(0.5, "--moe-ffn-hidden-size", draw.choice((32, 64, 96)))
    line.maybe(
        0.4, "--moe-layer-freq", draw.choice((2, 3, f"([0]+[1]*{line.layers - 1})", f"([0,1]*{line.layers // 2})"))
    )
    balance = draw.choice(("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none", None, None))
    if balance:
        line.add("--moe-router-load-balancing-type", balance)
    line.maybe(0.4, "--moe-aux-loss-coeff", 0.01)
    line.maybe(0.2, "--moe-z-loss-coeff", 0.001)
    line.maybe(0.5, "--moe-token-dispatcher-type", draw.choice(("alltoall", "alltoall", "allgather", "flex")))
    line.maybe(0.4, "--moe-grouped-gemm")
    if line.maybe(0.25, "--moe-shared-expert-intermediate-size", draw.choice((32, 64))):
        line.maybe(0.3, "--moe-shared-expert-gate")
        line.maybe(0.2, "--moe-shared-expert-overlap")
    if line.maybe(0.2, "--moe-expert-capacity-factor", draw.choice((1.0, 1.25))):
        line.maybe(0.4, "--moe-pad-expert-input-to-capacity")
        line.maybe(0.3, "--moe-token-drop-policy", "position")
    if line.maybe(0.3, "--moe-router-score-function", draw.choice(("sigmoid", "softmax"))):
        line.maybe(0.5, "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", 0.002)
    line.maybe(0.2, "--moe-router-topk-scaling-factor", 2.5)
    line.maybe(0.95 if topk == 1 else 0.2, "--moe-router-pre-softmax")
    line.maybe(0.15, "--moe-router-num-groups", 4, "--moe-router-group-topk", 2)
    line.maybe(0.3, "--moe-router-dtype", "fp32")
    line.maybe(0.1, "--moe-input-jitter-eps", 0.01)
    line.maybe(0.1, "--moe-latent-size", 32)


def _prediction(line: CommandLine) -> None:
    if (
        not line.is_hybrid
        and (line.rotary or line.draw.random() < 0.03)
        and line.maybe(0.12, "--mtp-num-layers", line.draw.choice((1, 2)))
    ):
        line.maybe(0.4, "--mtp-loss-scaling-factor", 0.3)


def _spoil(line: CommandLine) -> None:
    """Adds something that does not go with the others, or leaves out what they need."""
    draw = line.draw
    if draw.random() < 0.25:
        line.drop(draw.choice(("--lr", "--hidden-size", "--micro-batch-size", "--num-attention-heads")), 1)
        return
    extra = (
        "--train-samples 100|--lr-decay-samples 50|--lr-warmup-samples 10|--global-batch-size 7|--min-lr 1.0|--fp16|"
        "--num-query-groups 5|--overlap-param-gather|--hidden-size 63|--expert-model-parallel-size 2|--seq-length 63|"
        "--max-position-embeddings 8|--num-experts 7|--end-weight-decay 0.1|--pipeline-model-parallel-size 5|--tp-comm-overlap|"
        "--decoder-last-pipeline-num-layers 1|--num-layers-per-virtual-pipeline-stage 3|--recompute-granularity full|"
        "--moe-layer-freq [1,0]|--fp8-param-gather|--recompute-method block|--lr-warmup-iters 500|--lr-decay-style step|"
        "--group-query-attention|--lr-warmup-fraction 1.5|--mtp-num-layers 1|--num-virtual-stages-per-pipeline-rank 2|"
        "--save /checkpoint|--log-memory-interval 7|--moe-router-topk 99|--eval-micro-batch-size 3|--swiglu|--squared-relu"
    ).split("|")
    line.add(*draw.choice(extra).split())


_TOPICS: tuple[Callable[[CommandLine], None], ...] = (
    _layout,
    _pipeline,
    _width,
    _attention,
    _positions,
    _hybrid,
    _experts,
    _prediction,
    batch,
    optimizer,
    precision,
    memory,
)
