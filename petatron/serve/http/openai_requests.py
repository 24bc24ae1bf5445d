"""The bodies of OpenAI's routes. Fields that are not listed are ignored, as clients send many."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from petatron.infer.sampling_params import MAX_TOP_LOGPROBS

MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES, MAX_MESSAGES, MAX_GRAMMAR_CHARS = 64, 512, 1024, 4096, 1 << 16
Share = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Prompt = str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]


class OpenAIRequest(BaseModel):
    """Numbers are numbers: a text that looks like one is refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = False


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """The form that the answer must have."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self) -> Self:
        if self.type in ("json_schema", "regex") and getattr(self, self.type) is None:
            raise ValueError(f"response_format of type {self.type} needs {self.type}")
        return self


class SamplingFields(OpenAIRequest):
    """What completions and chat share: OpenAI's fields, then vLLM's."""

    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(kind := given.get("type"), str) and kind != "text":
            raise ValueError(f"a part of type {kind[:40]} is not supported: messages have text alone")
        return given


class ChatMessage(BaseModel):
    """Further fields (tool_calls, name, reasoning_content) reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None


class ChatTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(OpenAIRequest):
    """POST /v1/embeddings; `pooling` is ours."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] = "mean"


class TokenizeRequest(OpenAIRequest):
    """POST /tokenize: a text, or messages through the chat template."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(OpenAIRequest):
    """POST /detokenize."""

    tokens: list[TokenId]
