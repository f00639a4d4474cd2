"""The bodies of requests, with a limit on each field. Unknown fields are refused, as OpenAI's API does.

Lists and dictionaries fail at their first wrong item: millions of errors would hold up every other client.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from clearhead.sampling.strategy import MIN_TEMPERATURE
from clearhead.serving.strict_fields import Fields

MAX_TEXTS = 256  # prompts or inputs in one request
MAX_N = 16
MAX_STOPS = 16
MAX_TEXT = 4_000_000  # characters
MAX_PARTS = 1000  # of one message's content
MAX_BIASES = 300_000  # more than any vocabulary has tokens
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(max_length=MAX_TEXTS, fail_fast=True)]
Inputs = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TEXT, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(max_length=MAX_TEXTS, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES, fail_fast=True)]
Parts = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]


def _check_temperature(given: float | None) -> float | None:
    if given is not None and 0 < given < MIN_TEMPERATURE:
        said = f"above 0 it is at least {MIN_TEMPERATURE}; got {given}; give 0 to take the likeliest token"
        raise PydanticCustomError("temperature", "{said}", {"said": said})
    return given


Temperature = Annotated[float | None, Field(ge=0, le=100), AfterValidator(_check_temperature)]


class StreamOptions(Fields):
    include_usage: bool = False


Head = Annotated[int, Field(ge=0, le=10_000)]
Heads = Head | Annotated[list[Head], Field(min_length=1, max_length=1000, fail_fast=True)]
Row = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Site = Annotated[str, Field(min_length=1, max_length=200)]


class AttentionChoice(Fields):
    """The attention to return: sites by name, some of their heads, and rows by the number of the generated token."""

    site: Site
    head: Heads | None = None
    rows: Annotated[list[Row], Field(max_length=1000, fail_fast=True)] | None = None


class Ablation(Fields):
    """Heads whose output is replaced by zeros, or by their mean over the prompt and the text."""

    site: Site
    head: Heads | None = None
    how: Literal["zero", "mean"] = "zero"


class Explain(Fields):
    """The explanation to return with a text."""

    attention: list[Site | AttentionChoice] = Field([], max_length=100, fail_fast=True)
    lens: bool = False
    ablate: list[Ablation] = Field([], max_length=100, fail_fast=True)


class TextBody(Fields):
    """The fields that completions and chat share."""

    labels: ClassVar[frozenset[str]] = LABELS
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    temperature: Temperature = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: Biases | None = None
    stop: Stops | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - MAX_N)
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
    prompt: Text | Ids | Texts | IdLists
    max_tokens: int = Field(16, ge=0)  # 0 with echo: the prompt is returned, and nothing is generated
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    special_tokens: Literal["read", "text"] | None = None  # what their names in a prompt are

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of ids."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)


class Message(Fields):
    labels: ClassVar[frozenset[str]] = frozenset({"name"})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None

    @property
    def text(self) -> str:
        """The content as text; other parts are refused."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise ValueError("a message's content is text, or parts of type 'text'; other parts can not be read")
        if others := {name for part in self.content for name in part} - {"type", "text"}:
            raise ValueError(f"a part of a message has type and text; got also {min(others)!r:.60}; leave it out")
        return "".join(str(text) for text in texts)


class JsonSchema(Fields):
    labels: ClassVar[frozenset[str]] = frozenset({"name", "description"})
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class Chat(TextBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None


class Embedding(Fields):
    labels: ClassVar[frozenset[str]] = LABELS
    model: str = ""
    input: Text | Inputs
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class Translation(Fields):
    labels: ClassVar[frozenset[str]] = LABELS
    model: str = ""
    input: Text | Inputs
    beams: int = Field(4, ge=1, le=16)
    n_best: int = Field(1, ge=1, le=16)
    length_penalty: float = Field(1.0, ge=-10, le=10)
    max_tokens: int | None = Field(None, ge=1)
    alignment: bool = False
    explain: Explain | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input
