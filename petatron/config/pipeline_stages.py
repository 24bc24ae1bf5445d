"""Assigns layers to pipeline stages, as data.

A stage is a range of consecutive layers, perhaps with the embedding before them or the head and loss after them. There
are pp x virtual stages, always listed in model order; which rank holds which depends on the schedule. Five ways to split,
and at most one applies:

- even: every stage has the same number of layers;
- first/last: the first and last pipeline rank have a given number, the other ranks share the remaining ones evenly. A rank's
  layers are spread evenly over its virtual stages;
- accounting: embedding and/or loss count as one layer in an even split;
- encoder: the first ranks share the layers of an encoder evenly, and the others those of the decoder;
- a layout string of `--pipeline-model-parallel-layout`.

Depths of multi-token prediction are on the last stage, with the loss, whichever way applies.

`stage_problems` tells why a config cannot be split; `pipeline_stages` splits a config that can.

    layout := item*        item := symbol ['*' N] | '(' layout ')' ['*' N]       symbol := 'E' | 't' | 'm' | 'L' | '|'

E is the embedding, t a transformer layer, m a depth of multi-token prediction, L the output head with the loss; `|` ends a stage.
Commas and blanks mean nothing, so long strings can be grouped visually. `Et|(ttt|)*2tL` is four stages with 1, 3, 3 and 1 layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petatron.base.errors import Problem, raise_problems
from petatron.config.schema.fields import flag_name, join_with_or
from petatron.config.schema.parallel import RawParallelConfig
from petatron.config.schema.run import RawRunConfig, RunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.multi_token_prediction import num_prediction_layers
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL, num_vision_layers
from petatron.config.setting_bounds_and_conflicts import at_least, divisors, multiples_near

EMBEDDING, LAYER, PREDICTION, LOSS, STAGE_END = "E", "t", "m", "L", "|"
_SYMBOLS = EMBEDDING + LAYER + PREDICTION + LOSS + STAGE_END
_IGNORED = ", \t\n"
# Far above any model; keeps `t*999999999` from filling memory before it is refused.
_MAX_SYMBOLS = 100_000


class PipelineLayoutError(ValueError):
    """What is wrong with a layout string, as the predicate of a sentence about it."""


def parse_pipeline_layout(text: str) -> tuple[str, ...]:
    """Returns one string of symbols per stage.

    >>> parse_pipeline_layout("Et|(tt|)*2,L")
    ('Et', 'tt', 'tt', 'L')
    """
    rest = "".join(character for character in text if character not in _IGNORED)
    open_groups = [""]  # parsed content of the layout, and of each open bracket
    while rest:
        if rest[0] == "(":
            open_groups.append("")
            rest = rest[1:]
            continue
        if rest[0] == ")":
            if len(open_groups) == 1:
                raise PipelineLayoutError("closes a bracket that is not open")
            unit = open_groups.pop()
        elif rest[0] in _SYMBOLS:
            unit = rest[0]
        else:
            raise PipelineLayoutError(f"has {rest[0]!r}, which is none of E, t, m, L, |, brackets and * N")
        count, rest = _parse_repeat_count(rest[1:])
        if len(open_groups[-1]) + len(unit) * count > _MAX_SYMBOLS:
            raise PipelineLayoutError(f"has more than {_MAX_SYMBOLS} symbols")
        open_groups[-1] += unit * count
    if len(open_groups) > 1:
        raise PipelineLayoutError("opens a bracket that is not closed")
    return tuple(open_groups[0].split(STAGE_END))


def _parse_repeat_count(text: str) -> tuple[int, str]:
    """Returns the N of a leading `* N` (1 without one), and the remaining text."""
    if not text.startswith("*"):
        return 1, text
    digits = text[1:]
    rest = digits.lstrip("0123456789")
    number = digits[: len(digits) - len(rest)]
    if not number or len(number) > len(str(_MAX_SYMBOLS)) or int(number) < 1:
        raise PipelineLayoutError(f"has a * without a number from 1 to {_MAX_SYMBOLS} after it")
    return int(number), rest


_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_CHUNK, _VIRTUAL = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_ENCODER = "encoder_pipeline_model_parallel_size"
_LAYOUT = "--pipeline-model-parallel-layout"
_PIPELINE = "--pipeline-model-parallel-size"


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """`layer_indices` are indices in the whole model."""

    layer_indices: tuple[int, ...]
    has_embedding: bool
    has_loss: bool


def pipeline_stages(config: RunConfig) -> tuple[PipelineStage, ...]:
    """Returns all pp x virtual stages in model order; `ConfigError` if the layers cannot be split as configured.

    >>> from petatron.config import ModelConfig, ParallelConfig
    >>> parallel = ParallelConfig(pipeline_model_parallel_size=2)
    >>> [stage.layer_indices for stage in pipeline_stages(RunConfig(model=ModelConfig(num_layers=4), parallel=parallel))]
    [(0, 1), (2, 3)]
    """
    raise_problems(stage_problems(config))
    counts = _layers_and_predictions_per_stage(config)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return tuple(
        PipelineStage(tuple(range(start, start + count)), has_embedding=index == 0, has_loss=index == len(counts) - 1)
        for index, (start, count) in enumerate(zip(starts, counts))
    )


def max_layers_per_stage(config: RawRunConfig) -> int | None:
    """Returns the most layers on one stage; None while the layers cannot be split."""
    splits = _has_sizes(config) and not any(stage_problems(config))
    return max(_layers_and_predictions_per_stage(config)) if splits else None


def stage_problems(config: RawRunConfig) -> Iterator[Problem]:
    """Yields why the layers cannot be split into stages; skips sizes that are problems of their own."""
    parallel = config.parallel
    if not _has_sizes(config):
        return
    if parallel.pipeline_model_parallel_layout is not None:
        yield from _layout_problems(config, parallel.pipeline_model_parallel_layout)
    elif _is_uneven(parallel):
        yield from _uneven_problems(config)
    elif _has_encoder_stages(config):
        yield from _encoder_problems(config)
    else:
        yield from _even_problems(config)


def _has_sizes(config: RawRunConfig) -> bool:
    pp, virtual = config.parallel.pipeline_model_parallel_size, _num_virtual_stages(config.parallel)
    return min(config.model.num_layers, pp, virtual) >= 1


def _num_layers(config: RawRunConfig) -> int:
    """Returns the layers that stages share, those of a vision encoder among them."""
    return config.model.num_layers + num_vision_layers(config.model)


def _layers_flag(config: RawRunConfig) -> str:
    """Returns the flags whose sum is the number of layers that stages share."""
    return "--num-layers + --vision-num-layers" if num_vision_layers(config.model) else "--num-layers"


def _num_virtual_stages(parallel: RawParallelConfig) -> int:
    """1 where derivation found no number, because then something else is reported."""
    return 1 if (virtual := getattr(parallel, _VIRTUAL)) is None else virtual


def _is_uneven(parallel: RawParallelConfig) -> bool:
    return getattr(parallel, _FIRST) is not None or getattr(parallel, _LAST) is not None


def _layers_and_predictions_per_stage(config: RawRunConfig) -> Sequence[int]:
    *others, last = _layers_per_stage(config)
    return [*others, last + num_prediction_layers(config.model)]


def _layers_per_stage(config: RawRunConfig) -> Sequence[int]:
    """Returns layers per stage in model order, of a config without stage problems."""
    parallel, layers = config.parallel, _num_layers(config)
    pp, virtual = parallel.pipeline_model_parallel_size, _num_virtual_stages(parallel)
    if parallel.pipeline_model_parallel_layout is not None:
        return [stage.count(LAYER) for stage in parse_pipeline_layout(parallel.pipeline_model_parallel_layout)]
    if _is_uneven(parallel):
        first, last, others = _first_last_layers(config)
        middle = [(layers - (first or 0) - (last or 0)) // others // virtual] * others if others else []
        head, tail = ([] if value is None else [value // virtual] for value in (first, last))
        return [*head, *middle, *tail] * virtual
    if _has_encoder_stages(config):
        return [share for count, stages in _encoder_shares(config) for share in [count // stages] * stages]
    embedding, loss = (int(getattr(parallel, name)) for name in _ACCOUNT)
    counts = [(layers + embedding + loss) // (pp * virtual)] * (pp * virtual)
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _has_encoder_stages(config: RawRunConfig) -> bool:
    parallel, model = config.parallel, config.model
    of_encoder = parallel.pipeline_model_parallel_size > 1 and parallel.encoder_pipeline_model_parallel_size > 0
    return of_encoder and model.model_type in (ENCODER_DECODER_MODEL, VISION_LANGUAGE_MODEL)


def _encoder_shares(config: RawRunConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the layers of encoder and of decoder, each with the number of its stages."""
    stages = config.parallel.encoder_pipeline_model_parallel_size
    encoder = num_vision_layers(config.model) or config.model.encoder_num_layers or 0
    others = config.parallel.pipeline_model_parallel_size - stages
    return (encoder, stages), (_num_layers(config) - encoder, others)


def _encoder_problems(config: RawRunConfig) -> Iterator[Problem]:
    parallel, flag = config.parallel, flag_name(_ENCODER)
    pp, stages = parallel.pipeline_model_parallel_size, parallel.encoder_pipeline_model_parallel_size
    rivals = [flag_name(name) for name in (_CHUNK, *_ACCOUNT) if getattr(parallel, name) not in (None, False)]
    if rivals:
        yield Problem(rivals[0], "", f"cannot be combined with {flag}", "Keep one way to cut the layers.")
    elif _num_virtual_stages(parallel) > 1:
        rule = "gives ranks to the encoder alone, and ranks have several stages, of all parts of the model"
        yield Problem(flag, str(stages), rule, f"Use {_LAYOUT}.")
    elif stages >= pp:
        rule = f"is among the {pp} of {_PIPELINE}, and leaves no stage for the decoder"
        yield Problem(flag, str(stages), rule, f"Use {_PIPELINE} {stages + 1} or more.")
    else:
        names = ("encoder", "decoder")
        for name, (layers, count) in zip(names, _encoder_shares(config), strict=True):
            if layers % count:
                rule = f"gives {count} stages to the {layers} layers of the {name}, which they cannot share evenly"
                yield Problem(flag, str(stages), rule, f"Cut unevenly, with {_LAYOUT}.")


def _first_last_layers(config: RawRunConfig) -> tuple[int | None, int | None, int]:
    """Returns the layers configured for the first and the last rank, and how many ranks share the others."""
    first, last = getattr(config.parallel, _FIRST), getattr(config.parallel, _LAST)
    return first, last, config.parallel.pipeline_model_parallel_size - (first is not None) - (last is not None)


def _even_problems(config: RawRunConfig) -> Iterator[Problem]:
    parallel, layers = config.parallel, _num_layers(config)
    pp, virtual, chunk = parallel.pipeline_model_parallel_size, _num_virtual_stages(parallel), getattr(parallel, _CHUNK)
    extra = [word for word, name in zip(("embedding", "loss"), _ACCOUNT) if getattr(parallel, name)]
    units = layers + len(extra)
    if units % pp:
        counted = f" + {' + '.join(extra)} = {units}" if extra else ""
        sizes = _usable_sizes(units, virtual) or "another number of layers"
        uneven = _LAYOUT if parallel.pipeline_schedule == "zb-v" else flag_name(_LAST)
        fix = f"Use {sizes}, or cut unevenly, for instance with {uneven}."
        yield Problem(_PIPELINE, str(pp), f"does not divide {_layers_flag(config)} {layers}{counted}", fix)
        return
    share = units // pp
    if chunk is not None and chunk > 0 and share % chunk:
        rule = f"does not divide the {share} layers of a pipeline rank"
        yield Problem(flag_name(_CHUNK), str(chunk), rule, f"Use {divisors(share)}.")
    elif chunk is not None and chunk > 0 and share // chunk != virtual:
        rule = f"makes {share // chunk} virtual stages per rank, but {flag_name(_VIRTUAL)} is {virtual}"
        yield Problem(flag_name(_CHUNK), str(chunk), rule, "Leave one of them out.")
    elif share % virtual and parallel.pipeline_schedule == "zb-v":
        noun = "layer" if share == 1 else "layers"
        rule = f"needs two stages per rank, which a pipeline rank's {share} {noun} cannot fill alike"
        enough = -(-units // (2 * pp)) * 2 * pp - len(extra)
        smaller = f"{_PIPELINE} {sizes}, " if (sizes := _usable_sizes(units, 2)) else ""
        fix = f"Use {smaller}--num-layers {enough}, {_LAYOUT}, or another schedule."
        yield Problem("--pipeline-schedule", "zb-v", rule, fix)
    elif share % virtual:
        rule = f"does not divide the {share} layers of a pipeline rank"
        yield Problem(flag_name(_VIRTUAL), str(virtual), rule, f"Use {divisors(share)}.")


def _usable_sizes(units: int, virtual: int) -> str:
    """Returns the pipeline sizes that split `units` layers evenly; one rank only without virtual stages."""
    if virtual == 1:
        return divisors(units)
    sizes = [size for size in range(2, min(units, 4096) + 1) if units % (size * virtual) == 0]
    return join_with_or(sizes[:12]) if sizes else ""


def _uneven_problems(config: RawRunConfig) -> Iterator[Problem]:
    parallel, layers = config.parallel, _num_layers(config)
    pp, virtual = parallel.pipeline_model_parallel_size, _num_virtual_stages(parallel)
    first, last, others = _first_last_layers(config)
    where = flag_name(_FIRST if first is not None else _LAST)
    low = [problem for name in (_FIRST, _LAST) for problem in at_least(name, getattr(parallel, name), 1)]
    if low:
        yield from low
        return
    rivals = [flag_name(name) for name in (_CHUNK, *_ACCOUNT, _ENCODER) if getattr(parallel, name)]
    if rivals:
        yield Problem(rivals[0], "", f"cannot be combined with {where}", "Keep one way to cut the layers.")
    elif pp == 1:
        yield Problem(where, str(first if first is not None else last), f"needs {_PIPELINE} above 1", "Leave it out.")
    elif parallel.pipeline_schedule == "zb-v":
        rule = "sizes the first or last rank, but in zb-v the first rank holds both ends of the model"
        yield Problem(where, "", rule, f"Use {_LAYOUT}.")
    else:
        for name, value in ((_FIRST, first), (_LAST, last)):
            if value is not None and value % virtual:
                rule = f"is not a multiple of the {virtual} virtual stages of a rank"
                yield Problem(flag_name(name), str(value), rule, f"Nearest: {multiples_near(value, virtual)}.")
                return
        yield from _middle_rank_problems(layers, virtual, first, last, others)


def _middle_rank_problems(
    layers: int, virtual: int, first: int | None, last: int | None, others: int
) -> Iterator[Problem]:
    """The remaining layers must divide evenly over the middle ranks, and over their virtual stages."""
    name, value, fixed = (_LAST, last, first or 0) if last is not None else (_FIRST, first or 0, 0)

    def fits(size: int) -> bool:
        rest = layers - fixed - size
        return rest == 0 if others == 0 else rest > 0 and rest % (others * virtual) == 0

    if fits(value):
        return
    usable = [size for size in range(virtual, layers + 1, virtual) if fits(size)]
    beside = f"beside {flag_name(_FIRST)} {fixed} " if fixed else ""
    sharers = f"{others} other pipeline rank{'s' if others != 1 else ''}"
    sharers += f" x {virtual} virtual stages" if virtual > 1 else ""
    rule = f"{beside}leaves {layers - fixed - value} of --num-layers {layers}, which {sharers} cannot share evenly"
    if fixed + value > layers:
        rule = f"{beside}is more than --num-layers {layers}"
    elif others == 0:
        rule = f"{beside}does not add up to --num-layers {layers}, and there are no other pipeline ranks"
    fix = f"Use {join_with_or(usable[:12])}." if usable else "Change --num-layers or the pipeline size."
    yield Problem(flag_name(name), str(value), rule, fix)


def _layout_problems(config: RawRunConfig, text: str) -> Iterator[Problem]:
    parallel, layers = config.parallel, _num_layers(config)
    pp, virtual = parallel.pipeline_model_parallel_size, _num_virtual_stages(parallel)
    names = (_FIRST, _LAST, _CHUNK, *_ACCOUNT, _ENCODER)
    rivals = [flag_name(name) for name in names if getattr(parallel, name)]
    if rivals:
        yield Problem(rivals[0], "", f"cannot be combined with {_LAYOUT}", "Keep one way to cut the layers.")
        return
    try:
        cut = parse_pipeline_layout(text)
    except PipelineLayoutError as error:
        yield Problem(_LAYOUT, text, str(error), "Write it like `Et|(tt|)*2tL`.")
        return
    symbols = "".join(cut)
    if symbols.count(EMBEDDING) != 1 or not cut[0].startswith(EMBEDDING):
        yield Problem(_LAYOUT, text, "does not start with the one E of the embedding", "Write E once, at the start.")
    if symbols.count(LOSS) != 1 or not cut[-1].endswith(LOSS):
        yield Problem(_LAYOUT, text, "does not end with the one L of the loss", "Write L once, at the end.")
    if symbols.count(LAYER) != layers:
        rule = f"has {symbols.count(LAYER)} layers (t), but {_layers_flag(config)} is {layers}"
        yield Problem(_LAYOUT, text, rule, "Write one t per layer.")
    predictions, depths = symbols.count(PREDICTION), config.model.mtp_num_layers or 0
    if predictions and predictions != depths:
        rule = f"has {predictions} depths of multi-token prediction (m), but --mtp-num-layers is {depths}"
        yield Problem(_LAYOUT, text, rule, "Write one m per depth, or none: they are where the loss is.")
    elif not cut[-1].removesuffix(LOSS).endswith(PREDICTION * predictions):
        rule = "has m elsewhere than right before the L, and multi-token prediction is where the loss is"
        yield Problem(_LAYOUT, text, rule, "Write every m right before the L.")
    if len(cut) % pp:
        rule = f"has {len(cut)} stages, which is not a multiple of {_PIPELINE} {pp}"
        yield Problem(_LAYOUT, text, rule, f"Use {multiples_near(len(cut), pp)} stages; | ends a stage.")
    elif len(cut) != pp * virtual:
        rule = f"has {len(cut)} stages, but pp {pp} x virtual {virtual} is {pp * virtual}"
        yield Problem(_LAYOUT, text, rule, f"Write {pp * virtual} stages, or leave out the number of virtual stages.")
    else:
        yield from _empty_rank_problems(config, text, cut)


def _empty_rank_problems(config: RawRunConfig, text: str, cut: Sequence[str]) -> Iterator[Problem]:
    """A rank may have an empty stage among others, but not only empty ones."""
    pp, folded = config.parallel.pipeline_model_parallel_size, config.parallel.pipeline_schedule == "zb-v"
    for rank in range(pp):
        stages = (rank, 2 * pp - 1 - rank) if folded else range(rank, len(cut), pp)
        if not any(cut[stage] for stage in stages):
            rule = f"leaves pipeline rank {rank} without a layer"
            yield Problem(_LAYOUT, text, rule, "Give every rank a t, or use fewer ranks.")
