"""A decoder of Petatron as a model of transformers: `from_pretrained`, `generate`, labels, gradients, `save_pretrained`.

It wraps the decoder that trains, on one device. A batch is packed first (`packed_inputs.py`), so padding costs nothing and has no effect;
a step of `generate` reads and writes pages like a step of the engine (`generation_cache.py`).

B sequences, S columns, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from petatron.base.errors import CheckpointError, ConfigError, Problem, raise_problems
from petatron.base.terminal_escape import printable
from petatron.integrations.transformers.configuration import PetatronConfig
from petatron.integrations.transformers.generation_cache import PetatronCache
from petatron.integrations.transformers.packed_inputs import IGNORED, PackedInputs
from petatron.integrations.transformers.weights import draw_weights, folder_tensors, read_weights
from petatron.kernels.registry import KernelContext
from petatron.layers.mtp import MtpLayerSpec
from petatron.layers.spec.generation_state import GenerationState
from petatron.layers.vocabulary.embedding import TokenEmbedding
from petatron.models.decoder import Decoder
from petatron.models.decoder_spec import DecoderSpec
from petatron.models.hf import folder_shapes
from petatron.models.hf.config_json import own_config_json
from petatron.models.mtp_and_longrope_arrays import mark_long_rows
from petatron.parallel.select_kernels import select_kernels
from petatron.pretrained.hub import local_model
from petatron.pretrained.model_reader import ModelReader, open_model_reader

_ONE_DEVICE = 'Use device_map={"": device}, or leave it out; `petatron generate --tp 2` and the like split a model.'
_MAX_SEED = 2**31
_GENERATION_FILE = "generation_config.json"


class PetatronForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder with its output head, on one device."""

    config_class = PetatronConfig
    base_model_prefix = "decoder"
    main_input_name = "input_ids"
    _no_split_modules: list[str] = []
    _supports_sdpa = True

    def __init__(self, config: PetatronConfig) -> None:
        """Draws weights as a new run does, with a seed from torch's generator."""
        self._build(config)
        draw_weights(self.decoder, self.spec, seed=int(torch.randint(_MAX_SEED, ())))

    def _build(self, config: PetatronConfig) -> None:
        super().__init__(config)
        self.spec: DecoderSpec = config.spec()
        self.decoder: Decoder = self.spec.build_stage(self.spec.whole_model)
        self._kernels_for: tuple[torch.device, torch.dtype] | None = None
        if self.generation_states is None:
            self.generation_config.use_cache = False
        self.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> PetatronForCausalLM:
        """Copies weights and settings; kernels, which layers have as modules of Python, cannot be copied and are shared."""
        for module in self.modules():
            memo |= {id(value): value for value in vars(module).values() if isinstance(value, ModuleType)}
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        config: PetatronConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        **kwargs: Any,
    ) -> PetatronForCausalLM:
        """Opens a folder of ours; `ConfigError` for what only models of transformers can do. Options of its hub have no effect."""
        _check_options(kwargs)
        folder = Path(pretrained_model_name_or_path)
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is not a folder with a config.json. Download a model of the hub first.")
        source = open_model_reader(folder, model_format="huggingface")
        wanted = dtype if dtype is not None else kwargs.get("torch_dtype")
        model = cls._open(source, config, dtype=wanted, device=_only_device(device_map))
        if (folder / _GENERATION_FILE).is_file():
            model.generation_config = _read_generation_config(folder)
            if model.generation_states is None:
                model.generation_config.use_cache = False
        return (model, {}) if kwargs.get("output_loading_info") else model  # pyright: ignore[reportReturnType]

    @classmethod
    def _open(
        cls,
        source: ModelReader,
        config: PetatronConfig | None,
        *,
        dtype: torch.dtype | str | None,
        device: torch.device,
    ) -> PetatronForCausalLM:
        stored = next(iter(source.dtypes.values()))
        if config is None:
            config = PetatronConfig(**own_config_json(source.spec, stored))
        model = cls.__new__(cls)
        model._build(config)
        if folder_shapes(model.spec) != folder_shapes(source.spec):
            rule = f"describes another model than {source.path} has"
            raise ConfigError([Problem("config", "", rule, "Leave it out, or change only how it is used.")])
        compute_dtype = (
            stored if dtype in (None, "auto") else getattr(torch, dtype) if isinstance(dtype, str) else dtype
        )
        model.to(device=device, dtype=compute_dtype)
        config.dtype = compute_dtype
        read_weights(model.decoder, source)
        return model

    def save_pretrained(self, save_directory: str | Path, *, state_dict: Any = None, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Writes a folder that `petatron` and, after `import petatron.integrations.transformers`, transformers open."""
        prefix = f"{self.base_model_prefix}."
        state = self.state_dict() if state_dict is None else state_dict
        values_by_name = {name.removeprefix(prefix): values for name, values in state.items()}
        super().save_pretrained(save_directory, state_dict=folder_tensors(self.spec, values_by_name), **kwargs)

    @property
    def generation_states(self) -> list[tuple[int, GenerationState]] | None:
        """Returns the generation states of layers by layer index; None if a layer cannot generate step by step."""
        layers = [layer for layer in enumerate(self.spec.layers) if not isinstance(layer[1], MtpLayerSpec)]
        branches = [(index, branch) for index, layer in layers for branch in layer.branches]
        if not all(branch.can_generate for _, branch in branches):
            return None
        states = [(index, branch.generation_state(1)) for index, branch in branches]
        return [(index, state) for index, state in states if state is not None]

    def get_input_embeddings(self) -> nn.Module:
        assert isinstance(self.decoder.embedding, TokenEmbedding)
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        return self.decoder.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise NotImplementedError("The vocabulary of this model is fixed. Train one with --vocab-size instead.")

    def new_cache(self) -> PetatronCache:
        """Returns an empty cache for a batch of any size; `ValueError` if a layer cannot generate step by step."""
        states = self.generation_states
        if states is None:
            raise ValueError("This model's layers have no cache. Use use_cache=False.")
        return PetatronCache(states, dtype=self.dtype, device=self.device)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.new_cache()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Leaves out positions: they follow from the attention mask, also where padding is on the right.

        A batch that grows beyond the original context of LongRoPE begins anew, with an empty cache.
        """
        context, cache = self.spec.original_context, kwargs.get("past_key_values")
        columns = (args[0] if args else kwargs["input_ids"]).shape[1]
        if context is not None and cache is not None and 0 < cache.get_seq_length() <= context < columns:
            kwargs |= {"past_key_values": self.new_cache(), "next_sequence_length": None}
        prepared = super().prepare_inputs_for_generation(*args, **kwargs)
        return {name: value for name, value in prepared.items() if name != "position_ids"}

    def _is_long(self, inputs: PackedInputs, position_ids: Tensor | None) -> bool:
        """Whether the batch is beyond the original context of LongRoPE; its longest sequence decides, as in transformers."""
        context = self.spec.original_context
        return context is not None and int(inputs.packed_positions(position_ids).max()) >= context

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PetatronCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Returns logits [B, S, V], the loss if there are labels (-100: none), and the cache if it is used.

        Logits of padding after a token are those of the token; of padding before all tokens they are zero.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("This model takes input_ids, and no inputs_embeds.")
        if kwargs.get("output_hidden_states") or kwargs.get("output_attentions"):
            raise ValueError("This model returns neither hidden states nor attention weights.")
        if self._kernels_for != (wanted := (self.device, self.dtype)):  # the weights have moved
            select_kernels(self.decoder, KernelContext.of(*wanted, allow_compile=False))
            self._kernels_for = wanted
        cache = self._cache_for(past_key_values, use_cache)
        inputs = PackedInputs.of(input_ids, attention_mask, seen_B=None if cache is None else cache.lengths_B)
        columns = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep or None, None)
        if inputs.num_tokens == 0:  # all is padding, or empty
            shape = torch.from_numpy(inputs.rows_BS)[:, columns].shape
            logits = torch.zeros((*shape, self.spec.vocab_size), dtype=self.dtype, device=input_ids.device)
            if cache is not None:
                cache.add_padding(inputs)
        elif cache is None:
            logits = self._whole_sequences(inputs, position_ids, columns)
        else:
            with torch.no_grad():
                logits = self._cached_step(inputs, position_ids, columns, cache)
        loss = None
        if labels is not None:
            loss = _causal_loss(logits, inputs.targets(labels)[:, columns], kwargs.get("num_items_in_batch"))
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # pyright: ignore[reportArgumentType]
        return output.to_tuple() if return_dict is False else output

    def _cache_for(self, given: PetatronCache | None, use_cache: bool | None) -> PetatronCache | None:
        """Returns the cache of a step: the given one, or a new one if asked to use one."""
        if given is None and not use_cache:
            return None
        if self.training and torch.is_grad_enabled():
            raise ValueError("A step with a cache has no gradients. Use use_cache=False, or torch.no_grad().")
        if not isinstance(given, PetatronCache | None):
            raise ValueError(f"This model's cache is a PetatronCache, and not a {type(given).__name__}. Leave it out.")
        return self.new_cache() if given is None else given

    def _whole_sequences(self, inputs: PackedInputs, position_ids: Tensor | None, columns: slice | Tensor) -> Tensor:
        separate = all(branch.separates_documents for layer in self.spec.layers for branch in layer.branches)
        if inputs.is_dense or separate:
            batches = [inputs.batch(position_ids)]
        else:
            batches = inputs.batches_of_sequences(position_ids)
        if self.spec.original_context is not None:
            longest = self.spec.original_context + self._is_long(inputs, position_ids)
            batches = [mark_long_rows(batch, self.spec.original_context, [longest]) for batch in batches]
        parts = [self.decoder.hidden_states(batch).transpose(0, 1).flatten(0, 1) for batch in batches]
        return self._logits(inputs, parts[0] if len(parts) == 1 else torch.cat(parts), columns)

    def _cached_step(
        self, inputs: PackedInputs, position_ids: Tensor | None, columns: slice | Tensor, cache: PetatronCache
    ) -> Tensor:
        step, rows = cache.add(inputs)
        order_T = torch.from_numpy(rows).to(inputs.tokens_BS.device)
        tokens_T, positions_T = inputs.packed(inputs.tokens_BS), inputs.packed_positions(position_ids)
        positions_T = ~positions_T if self._is_long(inputs, position_ids) else positions_T  # `layers/rope.py`
        out = self.decoder.generation_step(tokens_T[order_T], positions_T[order_T], None, step, order_T[:0])
        assert isinstance(out, tuple), "the only stage is the last"
        hidden_TD = torch.empty_like(out[1])
        hidden_TD[order_T] = out[1]
        return self._logits(inputs, hidden_TD, columns)

    def _logits(self, inputs: PackedInputs, hidden_TD: Tensor, columns: slice | Tensor) -> Tensor:
        """Returns logits [B, columns, V] from the head's inputs of all tokens."""
        assert self.decoder.head is not None and self.decoder.embedding is not None
        rows_BC = torch.from_numpy(inputs.rows_BS).to(hidden_TD.device)[:, columns]
        if not (inputs.is_dense and rows_BC.numel() == hidden_TD.shape[0]):
            hidden_TD = hidden_TD[rows_BC.flatten().clamp(min=0)]
        logits_RV = self.decoder.head(hidden_TD.unsqueeze(1), self.decoder.embedding.weight).squeeze(1)
        logits = logits_RV.unflatten(0, rows_BC.shape)
        return logits if inputs.is_dense else logits.masked_fill(rows_BC.unsqueeze(-1) < 0, 0)


def from_checkpoint(
    path: str | Path, *, step: int | None = None, dtype: torch.dtype | str | None = None, device: str | None = None
) -> PetatronForCausalLM:
    """Opens any model that Petatron reads as one of transformers: a run's folder (its newest step, or `step`), a step, or a model.

    >>> import petatron, tempfile
    >>> from petatron.integrations.transformers import from_checkpoint
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> folder = tempfile.mkdtemp()
    >>> petatron.save_checkpoint(folder, step=1, model=petatron.build_model(run, petatron.launch(run)))
    >>> model = from_checkpoint(folder)
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape[:2]
    torch.Size([1, 3])
    """
    source = open_model_reader(local_model(path, where="from_checkpoint"), step=step)
    return PetatronForCausalLM._open(source, None, dtype=dtype, device=torch.device(device or "cpu"))


def _causal_loss(logits_BCV: Tensor, targets_BC: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Returns the mean loss of all targets, or their sum over a number that the caller counted; 0 if there are none."""
    wide = logits_BCV.to(torch.promote_types(logits_BCV.dtype, torch.float32)).flatten(0, 1)
    total = F.cross_entropy(wide, targets_BC.flatten().to(wide.device), ignore_index=IGNORED, reduction="sum")
    count = (targets_BC != IGNORED).sum().clamp(min=1).to(wide.device) if num_items is None else num_items
    return total / count


def _read_generation_config(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        why = f"{folder / _GENERATION_FILE} is not what transformers writes"
        raise CheckpointError(f"{why}: {printable(str(error))}. Copy it again, or remove it.") from error


def _only_device(device_map: Any) -> torch.device:
    """Returns the device that a device map puts the whole model on."""
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, dict) and list(device_map) == [""]:
        device_map = device_map[""]
    if isinstance(device_map, int | str | torch.device) and device_map not in ("auto", "balanced", "sequential"):
        return torch.device(device_map)
    raise ConfigError([Problem("device_map", str(device_map), "splits a model, which this one cannot be", _ONE_DEVICE)])


def _check_options(kwargs: dict[str, Any]) -> None:
    refused = ("quantization_config", "tp_plan", "distributed_config", "gguf_file", "state_dict")
    problems = [
        Problem(name, "", "is an option of models that transformers has itself", "Leave it out.")
        for name in refused
        if kwargs.get(name) is not None
    ]
    raise_problems(problems)
