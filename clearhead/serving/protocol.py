"""The bodies of requests, with a limit on each field. Unknown fields are ignored, as OpenAI's API does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

MAX_TEXTS = 256  # prompts or inputs in one request
MAX_N = 16
MAX_STOPS = 16
MAX_TEXT = 4_000_000  # characters

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TEXT)]
Stops = (
    Annotated[str, Field(min_length=1, max_length=1000)]
    | Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=MAX_STOPS)]
)


class StreamOptions(BaseModel):
    include_usage: bool = False


Head = Annotated[int, Field(ge=0, le=10_000)]
Heads = Head | Annotated[list[Head], Field(min_length=1, max_length=1000)]
Row = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Site = Annotated[str, Field(min_length=1, max_length=200)]


class AttentionChoice(BaseModel):
    """The attention to return: sites by name, some of their heads, and rows by the number of the generated token."""

    site: Site
    head: Heads | None = None
    rows: Annotated[list[Row], Field(max_length=1000)] | None = None


class Ablation(BaseModel):
    """Heads whose output is replaced by zeros, or by their mean over the prompt and the text."""

    site: Site
    head: Heads | None = None
    how: Literal["zero", "mean"] = "zero"


class Explain(BaseModel):
    """The explanation to return with a text."""

    attention: Annotated[list[Site | AttentionChoice], Field(max_length=100)] = []
    lens: bool = False
    ablate: Annotated[list[Ablation], Field(max_length=100)] = []


class TextBody(BaseModel):
    """The fields that completions and chat share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[str, float] | None = None
    stop: Stops | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - MAX_N)
    user: str | None = None
    explain: Explain | None = None

    def options(self) -> dict[str, Any]:
        """The fields of `Strategy`."""
        return dict(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
        )

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class Completion(TextBody):
    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(max_length=MAX_TEXTS)]
        | Annotated[list[Ids], Field(max_length=MAX_TEXTS)]
    )
    max_tokens: int = Field(16, ge=0)  # 0 with echo: the prompt is returned, and nothing is generated
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of ids."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[dict[str, Any]] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as text; other parts are refused."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise ValueError("a message's content is text, or parts of type 'text'; other parts can not be read")
        return "".join(str(text) for text in texts)


class JsonSchema(BaseModel):
    name: str = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class Chat(TextBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None


class Embedding(BaseModel):
    model: str = ""
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class Translation(BaseModel):
    model: str = ""
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    beams: int = Field(4, ge=1, le=16)
    n_best: int = Field(1, ge=1, le=16)
    length_penalty: float = Field(1.0, ge=-10, le=10)
    max_tokens: int | None = Field(None, ge=1)
    alignment: bool = False
    explain: Explain | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input
