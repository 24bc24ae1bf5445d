"""Sizes of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Memory and batch of generation, for each data-parallel replica.

    page_size: tokens of a page of the key/value cache. num_pages: None takes what memory allows, at most what `max_sequences` of
    `max_length` need. max_sequences: that run at once. max_step_tokens: of one step; longer prompts are cut into chunks, which run
    beside the tokens of others. max_length: of prompt and answer together; None: the model's positions, and one. prefix_caching: pages
    of equal beginnings are computed once. cuda_graphs: steps are replayed on GPUs, those with long prompts excepted. recorded_steps:
    decode steps are repeated on CPUs.
    releasable_cache: `Engine.pause` gives the memory of the cache back, where a device can (`base/releasable_cuda_memory.py`).
    copied_weights: a CPU may hold weights a second time, in float32 or packed, where that makes steps faster.
    fp8_weights: the weights of layers are quantized to FP8 (e4m3, a scale per row); activations are not.
    exact: log-probabilities are those of training, bit for bit, which needs a model with `--exact-rollouts`; weights have no copies and
    CPUs no recorded steps then.
    speculative_tokens: so many next tokens are drafted by multi-token prediction, and verified in one step; 0: none.
    adapters: names that requests may give, each with the folder of an adapter (`served_adapters.py`).
    decoder_start_id: the token before the answers of an encoder-decoder; None: the tokenizer's first one, else its padding.
    """

    page_size: int = 16
    num_pages: int | None = None
    max_sequences: int = 64
    max_step_tokens: int = 2048
    max_length: int | None = None
    prefix_caching: bool = True
    cuda_graphs: bool = True
    recorded_steps: bool = True
    releasable_cache: bool = False
    copied_weights: bool = True
    fp8_weights: bool = False
    exact: bool = False
    speculative_tokens: int = 0
    decoder_start_id: int | None = None
    adapters: tuple[tuple[str, str], ...] = ()
