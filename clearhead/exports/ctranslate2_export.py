"""CTranslate2's folder: GPT-2, LLaMA and its kin, BERT, Marian and the original Transformer, T5; verified by CTranslate2."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint import save
from clearhead.config import Config
from clearhead.data import Tokenizer
from clearhead.engine.request import start_token
from clearhead.errors import CheckpointError
from clearhead.exports.hugging_face import layout_of
from clearhead.exports.verification import LENGTH, Verification, judge_texts, require, version_of
from clearhead.exports.verification import verify as compare
from clearhead.laws.decoding_laws import NEW, expected_logits
from clearhead.laws.file_laws import load_theirs, quiet_transformers
from clearhead.laws.finding import OUTPUT, Comparison
from clearhead.laws.subject import ROWS, make_subject, measure_rounding
from clearhead.models import Encoder, EncoderDecoder, Model

TYPES = ("float32", "float16", "int8")
# 11 significant bits of a weight; inputs and weights of every product in 8 bits.
BOUNDS = {"float32": 0.0, "float16": 1e-2, "int8": 0.15}
LAYOUTS = ("bert", "gpt2", "llama", "marian", "qwen2", "qwen3", "t5")  # transformers' names
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}


def refuse(model: Model, tokenizer: Tokenizer | None, kind: str, verifying: bool) -> None:
    config = model.config
    if config.window:
        raise CheckpointError(
            f"CTranslate2 is written for models without windows; got window={config.window}; export to onnx"
        )
    if (layout := layout_of(model)) not in LAYOUTS:
        raise CheckpointError(
            f"CTranslate2 is written for {', '.join(LAYOUTS)}; transformers holds this model as {layout!r}; export to onnx"
        )
    if config.feedforward not in ACTIVATIONS:
        raise CheckpointError(
            f"CTranslate2 has {', '.join(ACTIVATIONS)}; got feedforward={config.feedforward!r}; export to onnx"
        )
    if config.shape == "encoder" and config.head != "none":
        raise CheckpointError(
            f"CTranslate2's encoder ends in states, with or without a pooler; got head={config.head!r}; export to onnx"
        )
    if tokenizer is None:
        raise CheckpointError(
            "CTranslate2 calls tokens by their text, and this model came without a tokenizer; put one beside it"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model vocab_size={config.vocab_size}; do they belong together?"
        )
    if isinstance(model, EncoderDecoder):
        start_token(model)
        if not model.generation.eos:
            raise CheckpointError(
                "CTranslate2 ends a translation by eos, and this model's config names none; set generation.eos"
            )
        if config.source_vocab_size or tokenizer.target_core is not tokenizer.core:
            raise CheckpointError(
                "only one vocabulary for source and target is written; this model has two; export to onnx"
            )
    require("ctranslate2", "ctranslate2", "ctranslate2", verify=False)
    require("transformers", "transformers", "ctranslate2", verify=False)


def tokens_of(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    names = {id: token for token, id in tokenizer.vocab.items()}
    return [names.get(id, f"<extra_id_{id}>") for id in range(vocab_size)]


def write(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> None:
    """Through transformers: CTranslate2 brings the tables of names for its models."""
    assert tokenizer is not None
    with tempfile.TemporaryDirectory(prefix="clearhead-export-") as temporary, quiet_transformers():
        save(model, temporary, format="hf")
        theirs, wrong = load_theirs(Path(temporary), model)
        if wrong:
            raise CheckpointError(f"transformers does not load this model: {wrong}; report it")
        spec = make_spec(theirs, model, tokens_of(tokenizer, model.config.vocab_size), tokenizer)
        spec.validate()
        spec.optimize(quantization=None if kind == "float32" else kind)
        folder.mkdir()
        spec.save(str(folder))
    tokenizer.save(folder)


def make_spec(theirs: Any, model: Model, tokens: list[str], tokenizer: Tokenizer) -> Any:
    import ctranslate2.converters.transformers as converters

    kind = type(theirs.config).__name__
    if kind == "BertConfig":  # a field that newer releases of transformers no longer have
        theirs.config.position_embedding_type = "absolute"
    if kind == "MarianConfig":
        # As BART's: Marian's own loader would drop the last token of the vocabulary, and start from a zero embedding.
        theirs.config.normalize_before = theirs.config.normalize_embedding = False
        spec: Any = converters.BartLoader().get_model_spec(theirs)
    else:
        spec = converters._MODEL_LOADERS[kind].get_model_spec(theirs)  # pyright: ignore[reportPrivateUsage]
    if (
        isinstance(model, Encoder) and not model.config.pooler
    ):  # the loader has taken one that transformers drew at random
        spec = type(spec)(spec.encoder)
    for stack in [getattr(spec, name) for name in ("encoder", "decoder") if hasattr(spec, name)]:
        complete(stack, model.config)
    config, rules = spec.config, model.generation
    unk = next(each for each in (tokenizer.unk, tokenizer.eos, 0) if each is not None)
    config.unk_token = tokens[unk]
    if isinstance(model, EncoderDecoder):
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        config.decoder_start_token, config.eos_token = tokens[start_token(model)], tokens[rules.eos[0]]
        config.bos_token = config.decoder_start_token
        config.add_source_eos = config.add_source_bos = False
    else:
        spec.register_vocabulary(tokens)
        if not isinstance(model, Encoder):
            ends = [*rules.eos, *(each for each in (tokenizer.eos, unk) if each is not None)]
            config.bos_token, config.eos_token = (
                tokens[unk if tokenizer.bos is None else tokenizer.bos],
                tokens[ends[0]],
            )
    if model.config.norm != "none" and hasattr(config, "layer_norm_epsilon"):
        config.layer_norm_epsilon = model.config.norm_eps
    return spec


def complete(stack: Any, config: Config) -> None:
    """Set what CTranslate2's loaders take for granted or leave out, though its programs compute it.

    LLaMA's activation, heads of d_model / n_heads, the scale of a tied T5's head, and half of LLaMA 3's scaling.
    """
    from ctranslate2.specs.common_spec import Activation

    stack.activation = np.int8(Activation[ACTIVATIONS[config.feedforward]])
    if config.positions == "t5" and hasattr(stack, "scale_outputs"):
        stack.scale_outputs = config.d_model**-0.5 if config.head_scale else 1.0
    added: dict[str, Any] = {"head_dim": np.int32(config.d_head)}
    if config.rotary_scaling == "llama3":
        added |= {"rotary_scaling_factor": np.float32(config.rotary_factor)}
        added |= {"original_max_position_embeddings": np.int32(config.rotary_original_len)}
    for layer in stack.layer:
        for name in ("self_attention", "attention"):
            if hasattr(layer, name):
                vars(getattr(layer, name)).update(added)  # these objects refuse new names elsewhere


class Generator:
    """A decoder or an encoder in CTranslate2."""

    def __init__(self, folder: Path, model: Model, tokens: list[str]) -> None:
        import ctranslate2

        self.tokens, self.ids = tokens, {token: id for id, token in enumerate(tokens)}
        kind = ctranslate2.Encoder if isinstance(model, Encoder) else ctranslate2.Generator
        self.runner: Any = kind(str(folder), device="cpu", intra_threads=1)

    def outputs(self, args: Sequence[Tensor]) -> Tensor:
        found = self.runner.forward_batch(args[0].tolist())
        return torch.from_numpy(np.array(getattr(found, "last_hidden_state", found)))

    def write(self, source: Sequence[Tensor], prompt: list[int], n: int) -> list[int]:
        words = [self.tokens[id] for id in prompt]
        options: dict[str, Any] = dict(max_length=n, min_length=n, sampling_topk=1, include_prompt_in_result=False)
        return list(self.runner.generate_batch([words], **options)[0].sequences_ids[0])


def verify(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> Verification:
    assert tokenizer is not None
    tokens, name = tokens_of(tokenizer, model.config.vocab_size), version_of("ctranslate2")
    why = f"weights in {kind}" if kind != "float32" else ""
    if isinstance(model, EncoderDecoder):
        return verify_translator(model, Translator(folder, model, tokens), BOUNDS[kind], why)
    ends = [] if isinstance(model, Encoder) else [tokens.index(eos_of(folder))]
    return compare(model, Generator(folder, model, tokens), name, at_least=BOUNDS[kind], why=why, never=ends)


def eos_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token"]


class Translator:
    """An encoder-decoder in CTranslate2, which returns the log-probability of each token of a text, and no logits."""

    def __init__(self, folder: Path, model: EncoderDecoder, tokens: list[str]) -> None:
        import ctranslate2

        self.tokens, self.ids = tokens, {token: id for id, token in enumerate(tokens)}
        self.runner: Any = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1)
        self.longest = model.config.max_len - 1

    def scores(self, source: Sequence[int], target: Sequence[int]) -> Tensor:
        """Of each token of the target, then of its end."""
        words = [[[self.tokens[id] for id in ids]] for ids in (source, target)]
        return torch.tensor(self.runner.score_batch(*words)[0].log_probs)

    def write(self, source: Sequence[Tensor], prompt: list[int], n: int) -> list[int]:
        """Greedy, without an end. It puts the start token, the whole prompt, there itself."""
        n = min(n, self.longest)
        options: dict[str, Any] = dict(beam_size=1, max_decoding_length=n, min_decoding_length=n)
        words = [self.tokens[id] for id in source[0][0].tolist()]
        return [self.ids[word] for word in self.runner.translate_batch([words], **options)[0].hypotheses[0]]


def verify_translator(model: EncoderDecoder, runtime: Translator, least: float, why: str) -> Verification:
    """Log-probabilities of three targets, which is all that it returns of them; and greedy translations without an end."""
    subject, _ = measure_rounding(make_subject(model, length=LENGTH))
    allowed, reason = max(subject.allowed, least), subject.reason if subject.allowed > least else why
    start, end, name = start_token(model), model.generation.eos[0], version_of("ctranslate2")
    comparison = Comparison()
    for row, (source, text) in enumerate(zip(subject.source[0].tolist(), subject.target.tolist(), strict=True)):
        target = [id for id in text[:-2] if id not in (start, end)]
        logits = expected_logits(subject, row, [start, *target]).log_softmax(-1)
        expected = logits.gather(-1, torch.tensor([*target, end])[:, None])[:, 0]
        comparison.add({OUTPUT: runtime.scores(source, target)}, {OUTPUT: expected})
    error = comparison.errors[OUTPUT]
    if not error <= allowed:
        raise CheckpointError(
            f"{name} computes something else from this export: the largest difference of a log-probability is {error:.1e} of the "
            f"largest, allowed {allowed:.1e} ({reason}); nothing was left behind; report it"
        )
    texts = [runtime.write([subject.source[0][row : row + 1]], [start], NEW) for row in range(ROWS)]
    equal = judge_texts(subject, [[start]] * ROWS, texts, name, allowed, never=[end])
    return Verification(name, error, allowed, reason, sum(map(len, texts)), equal)
