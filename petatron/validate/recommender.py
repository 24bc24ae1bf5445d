"""Rules about recommenders (`--model-type recommender`)."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.optimizer_registry import rule_spec
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL

_LEAVE_OUT = "Leave it out."


def check_recommender(config: RawRunConfig) -> Iterator[Problem]:
    if config.model.model_type != RECOMMENDER_MODEL:
        return
    yield from _layers(config)
    yield from _scores(config)
    yield from _layout(config)
    yield from _table_updates(config)


def _layers(config: RawRunConfig) -> Iterator[Problem]:
    model = config.model
    if model.recommender_layers != "hstu":
        return
    others = {
        "--hybrid-layer-pattern": model.hybrid_layer_pattern,
        "--experimental-attention-variant": model.experimental_attention_variant,
        "--multi-latent-attention": "" if model.multi_latent_attention else None,
        "--num-experts": config.moe.num_experts,
    }
    for flag, value in others.items():
        if value is not None:
            rule = "is about other layers, and all of --recommender-layers hstu are HSTU, without MLPs"
            yield Problem(flag, str(value), rule, "Leave one of them out.")


def _scores(config: RawRunConfig) -> Iterator[Problem]:
    """Yields settings of an output head that the scores of items do not have."""
    model, rule = config.model, "is about the logits of a decoder, and a recommender has scores of items"
    if model.use_mup:
        yield Problem(
            "--use-mup", "", "scales the logits of a decoder, and a recommender has scores of items", _LEAVE_OUT
        )
    elif model.logits_scaling != 1.0:
        yield Problem("--logits-scaling", f"{model.logits_scaling:g}", rule, _LEAVE_OUT)
    if model.final_logit_softcapping is not None:
        yield Problem("--final-logit-softcapping", f"{model.final_logit_softcapping:g}", rule, _LEAVE_OUT)


def _layout(config: RawRunConfig) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    if pp > 1 and not model.untie_embeddings_and_output_weights:
        rule = "puts the items of histories and the scores on different stages, which cannot share a table by rows"
        fix = "Add --untie-embeddings-and-output-weights, or use 1."
        yield Problem("--pipeline-model-parallel-size", str(pp), rule, fix)
    if cp > 1 and model.item_loss == "sampled_softmax" and model.item_negatives != "uniform":
        rule = "splits sequences, and --item-negatives takes the targets of whole ones"
        fix = "Use 1, or --item-negatives uniform."
        yield Problem("--context-parallel-size", str(cp), rule, fix)


def _table_updates(config: RawRunConfig) -> Iterator[Problem]:
    rule = rule_spec(config.optim)
    if rule.hidden_matrices_only and rule.scalar_optimizer is not None:
        rule = rule_spec(config.optim, rule.scalar_optimizer)
    if rule.unit != "element":
        why = f"updates a {rule.unit} at a time, and of the table of items only the rows that a step touches"
        yield Problem("--optimizer", config.optim.optimizer, why, "Use adam, sgd, lion or muon.")
    memory = config.memory
    offloads = {
        "--optimizer-cpu-offload": memory.optimizer_cpu_offload,
        "--optimizer-nvme-offload": memory.optimizer_nvme_offload,
    }
    for flag, value in offloads.items():
        if value:
            why = "copies state to the device in long segments, and a step touches few rows of the table of items"
            yield Problem(
                flag, "" if value is True else str(value), why, "Leave it out: more ranks have fewer rows each."
            )
