"""The body of Megatron's `PUT /api`. Every field that is accepted has an effect; others are refused, with the reason."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_PROMPTS, DEFAULT_TOKENS = 128, 64
_REFUSED = {
    "max_len": "max_len is no longer used. Use tokens_to_generate.",
    "sentences": "sentences is no longer used. Use prompts.",
}
_REFUSED_WITH_BEAMS = (
    *("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound", "random_seed", "logprobs"),
    *("stop_on_eol", "stop_on_double_eol", "prevent_newline_after_colon"),
)
"""Fields of sampling, which a beam search does not do."""


class MegatronRequest(BaseModel):
    """Megatron's defaults. The same names and bounds as its server, which checks most of them and uses six."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    prompts: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    tokens_to_generate: Annotated[int, Field(ge=0)] = DEFAULT_TOKENS
    logprobs: bool = False
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    top_p_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    top_p_bound: Annotated[float, Field(ge=0, le=1)] = 0.0
    add_BOS: bool = False
    stop_on_eol: bool = False
    stop_on_double_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop_token: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    beam_width: Annotated[int, Field(ge=1)] | None = None
    length_penalty: float | None = None
    no_log: bool = False
    """Nothing of a request is logged, with or without it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        for name, why in _REFUSED.items():
            if isinstance(given, dict) and given.get(name) is not None:
                raise ValueError(why)
        return {k: v for k, v in given.items() if k not in _REFUSED} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _agree(self) -> Self:
        wrong = []
        if self.tokens_to_generate == 0 and not self.logprobs:
            wrong.append("tokens_to_generate 0 asks for nothing unless logprobs is true.")
        if self.top_k and self.top_p:
            wrong.append("Use either top_k or top_p, not both.")
        if (self.top_p_decay or self.top_p_bound) and not self.top_p:
            wrong.append("top_p_decay and top_p_bound need top_p.")
        if self.top_p_bound > self.top_p:
            wrong.append("top_p_bound is more than top_p, where it starts.")
        wrong += self._wrong_beams()
        if not self.add_BOS and not all(self.prompts):
            wrong.append("An empty prompt needs add_BOS true.")
        if wrong:
            raise ValueError(" ".join(wrong))
        return self

    def _wrong_beams(self) -> list[str]:
        if self.beam_width is None:
            needless = self.length_penalty not in (None, 1)
            return ["length_penalty is one of beam search, which beam_width asks for."] * needless
        wrong = []
        if len(self.prompts) != 1:
            wrong.append("A beam search takes one prompt: send several requests.")
        if self.tokens_to_generate == 0:
            wrong.append("A beam search generates one token or more.")
        fields = type(self).model_fields
        sampled = [name for name in _REFUSED_WITH_BEAMS if getattr(self, name) != fields[name].default]
        if sampled:
            wrong.append(f"{', '.join(sampled)}: has no effect on a beam search. Leave it out, or beam_width.")
        return wrong
