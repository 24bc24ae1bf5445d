"""The bodies of OpenAI's routes. What becomes of fields that are not listed, `request_field_rules.py` says."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from petatron.infer.sampling_params import MAX_TOP_LOGPROBS, PoolingName
from petatron.serve.http.request_field_rules import REFUSED

MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES, MAX_MESSAGES, MAX_GRAMMAR_CHARS = 64, 512, 1024, 4096, 1 << 16
MAX_CHOICES, MAX_ALLOWED_IDS, MAX_TOOLS, MAX_SALT_CHARS = 4096, 1 << 17, 256, 1024
Share = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Grammar = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]
RequestId = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
TruncationSide = Literal["left", "right"]
Prompt = str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]


class OpenAIRequest(BaseModel):
    """Numbers are numbers: a text that looks like one is refused. Unknown fields are in `model_extra`, for `read_request` to judge."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None


class NestedFields(BaseModel):
    """An object inside a body. Fields that it does not have are ignored, and named in the answer's header as those of the body are."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)


class StreamOptions(NestedFields):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(NestedFields):
    """strict and description change nothing: the answer always follows the schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(NestedFields):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: Grammar | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """With json_object, as llama.cpp takes it."""

    @model_validator(mode="after")
    def _has_its_grammar(self) -> Self:
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError(
                "response_format.schema belongs to type json_object; type json_schema has json_schema.schema"
            )
        if self.type in ("json_schema", "regex") and getattr(self, self.type) is None:
            raise ValueError(f"response_format of type {self.type} needs {self.type}")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: at most one constraint, and the white space of JSON."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    whitespace_pattern: Grammar | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None
    structural_tag: Any = None

    @field_validator("structural_tag")
    @classmethod
    def _refuse(cls, given: Any) -> None:
        if given is not None:
            raise ValueError(f"is not supported. {REFUSED['structural_tag'].reason}")


class PromptFields(OpenAIRequest):
    """What decides the tokens of a prompt besides its text, whose answer they name (`request_id`)."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None


class ConstraintFields(OpenAIRequest):
    """The form that the answer must have, under the names of OpenAI, vLLM (two generations), SGLang and llama.cpp."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: Grammar | None = None
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    grammar: Grammar | None = None


class SamplingFields(ConstraintFields, PromptFields):
    """What completions and chat share: OpenAI's fields, then those of vLLM, some of which SGLang names otherwise."""

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
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = False
    no_stop_trim: bool | None = False
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    use_beam_search: bool | None = False
    best_of: Annotated[int, Field(ge=1)] | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(kind := given.get("type"), str) and kind != "text":
            raise ValueError(f"a part of type {kind[:40]} is not supported: messages have text and images alone")
        return given


class ImageUrl(BaseModel):
    """detail is OpenAI's; every image is shown as its model was trained to see images."""

    model_config = ConfigDict(strict=True, extra="ignore")

    url: str
    detail: str | None = None


class ImagePart(BaseModel):
    """An image, in OpenAI's form or as {"type": "image", "image": URL}."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["image_url", "image"]
    image_url: ImageUrl | str | None = None
    image: str | None = None

    @property
    def source(self) -> str:
        """Its URL."""
        given = self.image if self.type == "image" else self.image_url
        return given.url if isinstance(given, ImageUrl) else given or ""

    @model_validator(mode="after")
    def _has_its_url(self) -> Self:
        if not self.source:
            raise ValueError(f"a part of type {self.type} needs {self.type}, with the data URL of an image")
        return self


def _part_kind(given: Any) -> str:
    """Returns which part this is; what is none of them is a wrong text."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "[image]" if kind in ("image_url", "image") else "[text]"  # no name of a field, which errors would show


ContentPart = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[ImagePart, Tag("[image]")], Discriminator(_part_kind)
]


class ChatMessage(BaseModel):
    """Further fields (tool_calls, name, reasoning_content) reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionDefinition(BaseModel):
    """A function that the model may call. strict: its arguments follow `parameters` by a grammar."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(pattern=r"^\S{1,256}$")]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class ChatPromptFields(OpenAIRequest):
    """What decides the prompt of a chat besides its messages."""

    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other: send one of them")
        return self


class ChatCompletionRequest(SamplingFields, ChatPromptFields):
    """POST /v1/chat/completions. functions and function_call are OpenAI's older form of tools and tool_choice."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS)] | None = None
    function_call: str | dict[str, Any] | None = None
    return_prompt_text: bool | None = False
    include_reasoning: bool | None = True
    separate_reasoning: bool | None = True


class PoolingFields(PromptFields):
    """What embeddings, rerank and score share; `pooling` is ours, mean by default."""

    pooling: PoolingName | None = None


class EmbeddingRequest(PoolingFields):
    """POST /v1/embeddings. use_activation, or normalize as it was called: vectors are of unit length, unless it is false."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None


class TextDocument(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    text: str


class RerankRequest(PoolingFields):
    """POST /v1/rerank, as Jina, Cohere and vLLM have it."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | TextDocument], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = True


Texts = Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class ScoreRequest(PoolingFields):
    """POST /v1/score, as vLLM has it under several names: one text with each of others, or pair by pair."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class TokenizeRequest(ChatPromptFields):
    """POST /tokenize: a text, or messages (and tools) through the chat template."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(OpenAIRequest):
    """POST /detokenize."""

    tokens: list[TokenId]
