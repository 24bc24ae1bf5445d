"""Every key of every family, changed to another value, is refused, or the logits are still those of transformers.

So nothing that a config.json says, and that transformers goes by, is passed over in silence. A change that transformers itself cannot build
or run is left out. Changes are tried together, and apart only where that fails: their effects on random weights do not cancel out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from petatron.base.errors import CheckpointError, ConfigError
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.hf import FAMILIES, family_name_of_config, fill_model, from_hf_config, to_logical
from petatron.models.image_text_batch import make_image_text_batch
from petatron.models.registry import model_spec
from petatron.train.build_run import build_model
from tests.hf.config_keys.changed_keys import Change, Config, all_changes, changed
from tests.hf.encoder_decoder_zoo import ENCODER_DECODERS
from tests.hf.encoder_zoo import ENCODERS
from tests.hf.images_and_text_zoo import MODELS as IMAGES_AND_TEXT
from tests.hf.images_and_text_zoo import grids_of, inputs_of, samples
from tests.hf.ours import run_config
from tests.hf.variant_zoo import VOCABULARY
from tests.hf.zoo import BUILDERS, ONE_OF_EACH_FAMILY
from tests.longform import diagonal, later

OF_IMAGES = ("llava", "llava-siglip", "smolvlm", "qwen2.5-vl")
NAMES = (*ONE_OF_EACH_FAMILY, *ENCODERS, *ENCODER_DECODERS, *OF_IMAGES)
TOKENS = torch.randint(10, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(7))
"""None of them is an id of padding, by which some encoders count positions."""
TARGET = TOKENS.flip(1)[:, :12]
"""What the decoder reads, where the tokens are an encoder's."""
OTHERWISE = {
    # For whole sequences and not token by token; the model's own code has no such bound (`docs/mamba.md`).
    "nemotron_h": ("time_step_min", "mamba_dt_min"),
}
"""Keys by which we deliberately do not go, by family."""
ROPE_TABLES = ("rope_parameters", "rope_scaling")
ImageText = tuple[ModelConfig, list[Any]] | None


def _is_size(change: Change) -> bool:
    return type(change.value) in (int, list, dict)


def _with_random_weights(model: Any) -> PreTrainedModel:
    drawn = torch.Generator().manual_seed(1)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for values in (*model.parameters(), *biases):
            values.add_(torch.randn(values.shape, generator=drawn) * 0.3)
    return model.eval()


@cache
def _model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return _with_random_weights({**BUILDERS, **ENCODERS, **ENCODER_DECODERS, **IMAGES_AND_TEXT}[name]())


def _rebuilt(model: PreTrainedModel, config: Config, images: ImageText) -> tuple[PreTrainedModel, Tensor] | None:
    """The model of a changed config with random weights, and its logits; None if transformers refuses or cannot run it."""
    torch.manual_seed(0)
    try:
        other = _with_random_weights(type(model)(type(model.config).from_dict(copy.deepcopy(config))))
        with torch.no_grad():
            logits = other(**_inputs(other, images), return_dict=True)
            logits = logits.prediction_logits if "prediction_logits" in logits else logits.logits
    except Exception:  # whatever it is, transformers has no such model
        return None
    return other, logits


def _inputs(model: PreTrainedModel, images: ImageText) -> dict[str, Tensor]:
    if images is not None:
        return inputs_of(model, *images)
    return {"input_ids": TOKENS} | ({"decoder_input_ids": TARGET} if _has_encoder(model) else {})


def _images(config: Config) -> ImageText:
    """Images and text as a model of these settings reads them; None if it reads text alone."""
    values, _ = from_hf_config(config)
    if values.get("model_type") != VISION_LANGUAGE_MODEL:
        return None
    settings = ModelConfig(**values)
    return settings, samples(settings, grids_of(settings))


def _our_logits(config: Config, model: PreTrainedModel, folder: Path, images: ImageText) -> Tensor | None:
    """Our logits with the weights of transformers' model; None if the config is refused."""
    try:
        run = run_config(config, folder)
        logical = to_logical(family_name_of_config(config), model.state_dict(), model_spec(run))
    except (
        ConfigError,
        CheckpointError,
    ):  # the second: a head that is tied in the file alone, or depths that have no weights
        return None
    ours = build_model(run, ParallelMesh(Layout.from_config(run.parallel), 0))
    fill_model(ours.module, ours.placements, logical)
    assert isinstance(ours.module, Decoder)
    with torch.no_grad():
        if images is None and not _has_encoder(model):
            return ours.module.eval().logits(TOKENS)
        batch = Batch(TARGET, arrays={"encoder_tokens": TOKENS})
        if images is not None:
            batch = make_image_text_batch(images[1], images[0])
        return ours.module.eval()(batch, collect=("logits",)).collected["logits"]


def _has_encoder(model: PreTrainedModel) -> bool:
    return hasattr(model, "encoder")  # the key may be what was changed


class Comparison:
    """Finds the changes of one model's config under which we compute something else than transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = _model(name)
        self.config = copy.deepcopy(self.model.config.to_dict())
        self._folder = folder
        self._values = from_hf_config(self.config)

    def changes(self) -> list[Change]:
        left_out = OTHERWISE.get(family_name_of_config(self.config), ())
        return [change for change in all_changes(self.model, self.config) if change.path[0] not in left_out]

    def reads(self, change: Change) -> bool | None:
        """Whether it changes settings of ours; None if it is refused."""
        try:
            return from_hf_config(changed(self.config, change)) != self._values
        except ConfigError:
            return None

    def differing_together(self, changes: Iterable[Change]) -> list[str]:
        """What `differing` finds among the changes that nobody here reads, and among those that are read and change no size."""
        reads = {change: self.reads(change) for change in changes}
        unread = [change for change, read in reads.items() if read is False]
        read = [change for change, read in reads.items() if read and not _is_size(change)]
        return [text for group in (unread, read) if group for text in self.differing(group)]

    def differing(self, changes: Sequence[Change]) -> list[str]:
        """The changes, or several of them together, whose logits are others."""
        outcome = self.outcome(changes)
        if outcome == "equal" or (outcome == "none" and len(changes) == 1):
            return []
        half = len(changes) // 2
        parts = [*self.differing(changes[:half]), *self.differing(changes[half:])] if half else []
        return parts if parts or outcome == "none" else [" and ".join(map(str, changes))]

    def outcome(self, changes: Sequence[Change]) -> str:
        """ "equal" or "other" logits; "none" if it is refused, by us or by transformers."""
        config = changed(self.config, *changes)
        try:
            images = _images(config)
        except ConfigError:
            return "none"
        found = _rebuilt(self.model, config, images)
        if found is None:
            return "none"
        model, wanted = found
        logits = _our_logits(config, model, self._folder, images)
        if logits is None:
            return "none"
        if logits.shape != wanted.shape:
            return "other"
        # Scores of the indexer are sums of relus: where two of them are exactly 0, either may be the last of the top k.
        ties = 1 if "index_topk" in config else 0
        distances, norms = (logits - wanted).norm(dim=-1).flatten(), wanted.norm(dim=-1).flatten()
        kept = distances.argsort()[: distances.numel() - ties]
        return "equal" if distances[kept].norm() <= 1e-4 * norms[kept].norm() else "other"


def test_every_family_is_compared():
    assert {_model(name).config.model_type for name in NAMES} == set(FAMILIES)


@diagonal(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_key_is_refused_or_followed(name: str, tmp_path: Path):
    """One value of each key: those that nobody here reads together, and those that are read and change no size together."""
    compared = Comparison(name, tmp_path)
    first = {
        change.path: change for change in reversed(compared.changes()) if change.path[-1] not in ROPE_TABLES
    }.values()
    assert compared.differing_together(first) == []


@pytest.mark.parametrize("name", [later(name) for name in NAMES])
def test_all_values_of_a_key_are_refused_or_followed(name: str, tmp_path: Path):
    """Every value, those of sizes and of whole rope tables one by one."""
    compared = Comparison(name, tmp_path)
    values: dict[tuple[str, ...], list[Change]] = {}
    for change in compared.changes():
        values.setdefault(change.path, []).append(change)
    tables = [path for path in values if path[-1] in ROPE_TABLES]
    alone = [change for path in tables for change in values.pop(path)]
    alone += [change for changes in values.values() for change in changes if _is_size(change)]
    found = [text for change in alone if compared.reads(change) is not None for text in compared.differing([change])]
    for number in range(max(map(len, values.values()))):
        found += compared.differing_together([changes[number] for changes in values.values() if len(changes) > number])
    assert found == []


KIMI_K2 = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "rope_theta": 50000.0}
KIMI_K2 |= {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
COOLED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.8}


@pytest.mark.parametrize(
    ("name", "table"), [("deepseek-v3", KIMI_K2), ("llama-gqa", COOLED)], ids=["kimi-k2", "cooled"]
)
def test_yarn_as_published_is_followed(name: str, table: Config, tmp_path: Path):
    """Kimi-K2's ramp has no width; a temperature below 1 shrinks cos and sin."""
    compared = Comparison(name, tmp_path)
    change = Change(("rope_parameters",), {"rope_theta": 10000.0, **table})
    assert compared.reads(change)
    assert compared.outcome([change]) == "equal"


@pytest.mark.parametrize("name", ["qwen3-next-moe", "kimi-linear-moe", "minimax-moe"])
def test_an_activation_that_is_that_of_convolutions_too_is_refused(name: str):
    with pytest.raises(ConfigError, match='hidden_act "gelu" is not an activation the decoder has'):
        from_hf_config({**_model(name).config.to_dict(), "hidden_act": "gelu"})


SPELLINGS = {"gpt2": ("n_embd", "hidden_size"), "mixtral": ("num_local_experts", "num_experts")}


@pytest.mark.parametrize("name", SPELLINGS)
def test_either_spelling_of_a_key_is_read_and_two_that_disagree_are_refused(name: str):
    config, (key, other) = _model(name).config.to_dict(), SPELLINGS[name]
    respelled = {**config, other: config[key]}
    assert from_hf_config({name: value for name, value in respelled.items() if name != key}) == from_hf_config(config)
    with pytest.raises(ConfigError, match=f"{other} 5 is another spelling of {key}, which is {config[key]}"):
        from_hf_config({**config, other: 5})


def test_either_spelling_of_a_key_in_a_table_is_read_and_two_that_disagree_are_refused():
    config = _model("qwen2.5-vl").config.to_dict()
    vision = dict(config["vision_config"])
    other = {"num_attention_heads": vision["num_heads"]}
    respelled = {name: value for name, value in vision.items() if name != "num_heads"} | other
    assert from_hf_config({**config, "vision_config": respelled}) == from_hf_config(config)
    disagreeing = {**config, "vision_config": {**vision, "num_attention_heads": 5}}
    with pytest.raises(ConfigError, match="num_attention_heads 5 is another spelling of num_heads, which is 2"):
        from_hf_config(disagreeing)
