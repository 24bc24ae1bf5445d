"""Random flags of a run: batches, schedules, optimizer, number formats, memory."""

from __future__ import annotations

from tests.megatron_parser.command_line import SEQ, CommandLine


def batch(line: CommandLine) -> None:
    """Sizes of batches, and the length of the run."""
    draw = line.draw
    micro = draw.choice((1, 1, 2, 4))
    unit = micro * line.dp
    line.add("--micro-batch-size", micro)
    micro_batches = draw.choice((1, 2, 4, 6)) * (line.pp if draw.random() < 0.7 else 1)
    way = draw.choice(("ramp",) * 6 + ("fixed",) if line.ramps else ("fixed",) * 5 + ("default", "steps"))
    final = unit * micro_batches
    in_samples = draw.random() < (0.8 if way == "ramp" else 0.45)
    if way == "fixed":
        line.add("--global-batch-size", final)
    elif way == "steps":
        sizes = sorted(draw.sample((1, 2, 3, 4, 6), draw.choice((2, 3))))
        begins = [0, *sorted(draw.sample(range(20, 400), len(sizes) - 1))]
        unit_text = draw.choice(("", "K"))
        texts = [f"{begin * SEQ}" if not unit_text else f"{begin * SEQ / 1000:g}K" for begin in begins]
        pairs = [f"{text}:{unit * size * line.pp}" for text, size in zip(texts, sizes)]
        line.add("--step-batch-size-schedule", draw.choice((" ", ",")).join(pairs))
    elif way == "ramp":
        step = draw.choice((1, 2)) * unit
        line.add("--global-batch-size", unit + 3 * step * (2 if draw.random() < 0.5 else 1))
        line.add("--rampup-batch-size", unit, step, draw.choice((0, 57, 100, 200)))
    _length(line, final, in_samples)
    if line.maybe(0.15, "--eval-global-batch-size", 8 * line.dp):
        line.maybe(0.5, "--eval-micro-batch-size", draw.choice((1, 2)))
    line.maybe(0.98, "--eval-interval", draw.choice((3, 10, 1000)))
    line.maybe(0.5, "--eval-iters", draw.choice((0, 1, 2, 5)))
    line.maybe(0.1, "--start-eval-at-iter", 5)


def _length(line: CommandLine, batch: int, in_samples: bool) -> None:
    """The length of the run and the schedule of the learning rate, in iterations or in samples."""
    draw = line.draw
    iterations = draw.choice((12, 20, 33, 40))
    unit, scale = ("samples", batch) if in_samples else ("iters", 1)
    partial = draw.randrange(batch) if in_samples else 0
    line.add(f"--train-{unit}", iterations * scale + partial)
    line.add("--lr", draw.choice(("1e-3", "3e-4", "6.0e-5")))
    line.maybe(0.6, "--min-lr", draw.choice(("1e-5", "6.0e-6")))
    style = draw.choice((None, "constant", "linear", "cosine", "cosine", "inverse-square-root", "WSD", "WSD"))
    if style:
        line.add("--lr-decay-style", style)
    decay = draw.choice((None, None, iterations // 2, iterations, 2 * iterations))
    if decay:
        line.add(f"--lr-decay-{unit}", decay * scale)
    warmup = draw.choice((None, "length", "length", "fraction"))
    if warmup == "length":
        line.add(f"--lr-warmup-{unit}", draw.choice((1, 3, 5)) * scale)
    elif warmup == "fraction":
        line.add("--lr-warmup-fraction", draw.choice((0.01, 0.1, 0.333)))
    line.maybe(0.15, "--lr-warmup-init", "1e-6")
    if style == "WSD" and draw.random() < 0.93:
        line.add(f"--lr-wsd-decay-{unit}", draw.choice((3, 5)) * scale)
        line.maybe(0.7, "--lr-wsd-decay-style", draw.choice(("exponential", "linear", "cosine", "minus_sqrt")))
    if line.maybe(0.12, "--decoupled-lr", "5e-4"):
        line.maybe(0.5, "--decoupled-min-lr", "2e-5")


def optimizer(line: CommandLine) -> None:
    """The update rule, and how its state is shared."""
    draw = line.draw
    line.maybe(0.5, "--weight-decay", draw.choice((0.1, 0.05, 0.0)))
    if draw.random() < 0.2:
        line.add("--weight-decay-incr-style", draw.choice(("linear", "cosine")))
        line.add("--start-weight-decay", draw.choice((0.0, 0.01)), "--end-weight-decay", 0.1)
    name = draw.choice(
        (None, None, None, "adam", "sgd", "sgd") if line.ramps else (None, None, None, "adam", "sgd", "muon", "lion")
    )
    if name:
        line.add("--optimizer", name)
    if name in (None, "adam"):
        line.maybe(0.5, "--adam-beta1", 0.9, "--adam-beta2", draw.choice((0.95, 0.98)))
        line.maybe(0.2, "--adam-eps", "1e-5")
    elif name == "sgd":
        line.maybe(0.5, "--sgd-momentum", 0.8)
    elif name == "muon":
        line.maybe(0.5, "--muon-momentum", 0.95)
        line.maybe(0.3, "--muon-scale-mode", draw.choice(("spectral", "unit_rms_norm", "shape_scaling")))
        line.maybe(0.3, "--muon-num-ns-steps", 6)
        line.maybe(0.3, "--muon-tp-mode", "duplicated")
    elif name == "lion":
        line.maybe(0.5, "--lion-beta1", 0.95)
    line.maybe(0.4, "--clip-grad", draw.choice((0.0, 0.5, 1.0)))
    if line.maybe(0.4, "--use-distributed-optimizer"):
        line.maybe(0.5, "--overlap-grad-reduce", "--overlap-param-gather")
    else:
        line.maybe(0.2, "--overlap-grad-reduce")
    line.maybe(0.1, "--ddp-bucket-size", 10000)
    line.maybe(0.1, "--apply-wd-to-qk-layernorm")


def precision(line: CommandLine) -> None:
    """Number formats."""
    draw = line.draw
    kind = draw.choice((None, "--bf16", "--bf16", "--bf16", "--fp16"))
    if kind:
        line.add(kind)
    if kind == "--fp16":
        line.maybe(0.3, "--loss-scale", 1024)
        line.maybe(0.3, "--initial-loss-scale", 65536, "--loss-scale-window", 100)
        line.maybe(0.2, "--hysteresis", 3, "--min-loss-scale", 2.0)
    if kind == "--bf16":
        line.maybe(0.15, "--grad-reduce-in-bf16")
        line.maybe(0.1, "--accumulate-allreduce-grads-in-fp32")
        sharded_adam = "--use-distributed-optimizer" in line.flags and "--optimizer" not in line.flags
        if line.maybe(0.25, "--fp8-format", draw.choice(("hybrid", "e4m3"))):
            line.maybe(0.6, "--fp8-recipe", draw.choice(("tensorwise", "delayed", "blockwise")))
            line.maybe(0.4, "--fp8-amax-history-len", 16, "--fp8-amax-compute-algo", "max")
            line.maybe(0.4 if sharded_adam else 0.02, "--fp8-param-gather")
            if line.maybe(0.25, "--first-last-layers-bf16"):
                line.maybe(0.5, "--num-layers-at-start-in-bf16", draw.choice((0, 1, 2)))
        if line.maybe(0.3 if sharded_adam else 0.01, "--use-precision-aware-optimizer"):
            line.maybe(0.5, "--exp-avg-dtype", draw.choice(("bf16", "fp32")))
            line.maybe(0.4, "--main-grads-dtype", "bf16")


def memory(line: CommandLine) -> None:
    """What is recomputed, and settings of the run that change no number."""
    draw = line.draw
    way = draw.choice((None, None, "old", "selective", "modules", "uniform", "block"))
    if way == "old":
        line.add("--recompute-activations")
    elif way in ("selective", "modules"):
        line.add("--recompute-granularity", "selective")
        if way == "modules":
            modules = ["core_attn", "layernorm", "mlp"] + ["moe_act", "moe"] * line.has_experts
            line.add("--recompute-modules", *draw.sample(modules, draw.choice((1, 2))))
    elif way is not None:
        line.add("--recompute-granularity", "full", "--recompute-method", way)
        line.maybe(0.97, "--recompute-num-layers", draw.choice((1, 2)))
    line.maybe(0.05, "--no-check-for-nan-in-loss-and-grad")
    line.maybe(0.2, "--seed", 42)
    line.maybe(0.2, "--dataloader-type", draw.choice(("single", "cyclic")))
    line.maybe(0.1, "--split", "90,10,0")
    line.maybe(0.05, "--transformer-impl", draw.choice(("local", "transformer_engine")))
    line.add("--mock-data")
