"""Forward passes for the page: each keeps the queries and keys of every attention, O(T d) per layer. The last few are cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.engine.request import Request
from clearhead.errors import InputError, did_you_mean
from clearhead.explorer.fields import Fields
from clearhead.explorer.model_inputs import Inputs, Source, Strip, check_length
from clearhead.generation.decoding import run_requests
from clearhead.inside.ablation_sweep import attentions_of, n_heads_of
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.head_scores import copied_tokens
from clearhead.inside.interventions import Intervention, intervene, mean, patch, zero
from clearhead.inside.probe import Seen, probe
from clearhead.models import Encoder, EncoderDecoder
from clearhead.models.encoder_decoder import source_mask

CACHE_BYTES = 2**29
MAX_CHANGES = 4096


@dataclass(frozen=True)
class Change:
    """A head whose output is replaced: by zeros, by its mean over the text, or by its output on the second text."""

    site: str
    head: int
    how: str


@dataclass(frozen=True)
class Run:
    """The text that the model is run on, and the heads that are changed."""

    text: str
    target: str | None = None
    second: str | None = None
    changes: tuple[Change, ...] = ()

    @property
    def plain(self) -> Run:
        """The same text without changes."""
        return Run(self.text, self.target)


@dataclass(eq=False)
class ForwardPass:
    """The result of a run. `states` are the final states, which the head reads."""

    run: Run
    source: Source
    seen: Seen  # the weights of every attention
    states: Float[Tensor, "1 T D"]
    residuals: tuple[Float[Tensor, "1 T D"], ...]  # of the last stack: before the first block, and after each
    target: Strip | None = None
    target_ids: tuple[int, ...] = ()  # the decoder's input: its start, then the text
    n_prompt: int = 0  # how many of these come before the text

    @property
    def strip(self) -> Strip:
        """The tokens that the states belong to."""
        return self.source.strip if self.target is None else self.target

    @property
    def n_bytes(self) -> int:
        kept = (x for attention in self.seen.attention.values() for x in (attention.q, attention.k))
        return sum(x.numel() * x.element_size() for x in (*kept, self.states, *self.residuals))


class ForwardPasses:
    """Runs one model, and caches the last forward passes within CACHE_BYTES."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.model = inputs, inputs.model
        self.attentions = attentions_of(self.model)
        self.cached: OrderedDict[Run, ForwardPass] = OrderedDict()

    def parse(self, fields: Fields) -> Run:
        """The run that a request names."""
        run = fields.nested("run")
        changes = tuple(self._change(each) for each in run.nested_list("changes", MAX_CHANGES))
        second = run.optional_text("second")
        if second is None and any(change.how == "patch" for change in changes):
            raise InputError("a patch comes from a second text; got second=null; write one")
        used = second if any(change.how == "patch" for change in changes) else None
        target = run.optional_text("target") if isinstance(self.model, EncoderDecoder) else None
        return Run(run.text("text"), target, used, changes)

    def _change(self, given: Fields) -> Change:
        site = given.choice("site", list(self.attentions))
        head = given.integer("head", 0, n_heads_of(self.attentions[site]) - 1)
        return Change(site, head, given.choice("how", ("zero", "mean", "patch")))

    def run(self, run: Run) -> ForwardPass:
        """The forward pass of a run, from the cache or computed now."""
        if run not in self.cached:
            source = self.inputs.read(run.text)
            with self.changed(run):
                target = self._target(run, source)
                prefix = "decoder." if isinstance(self.model, EncoderDecoder) else ""
                streams = f"{prefix}embedding", f"{prefix}blocks.*.residual"
                with probe(self.model, *(f"{site}.weights" for site in self.attentions), *streams) as seen:
                    states = self.states(source, target)
            forward = ForwardPass(run, source, seen, states, tuple(seen.tensors.values()))
            if target:
                n_prompt = len(self.inputs.prompt(source))
                forward = replace(
                    forward, target=self.inputs.strip(target), target_ids=tuple(target), n_prompt=n_prompt
                )
            self.cached[run] = forward
        self.cached.move_to_end(run)
        self._forget()
        return self.cached[run]

    def _forget(self) -> None:
        """Drop the oldest until the rest fits; the newest always stays."""
        sizes = [each.n_bytes for each in self.cached.values()]
        while len(sizes) > 1 and sum(sizes) > CACHE_BYTES:
            self.cached.popitem(last=False)
            sizes.pop(0)

    def first_layer(self, run: Run) -> Seen | None:
        """The first attention of a run that is not cached, without computing the rest; None if that saves nothing."""
        if run in self.cached or run.changes or isinstance(self.model, EncoderDecoder):
            return None
        site = next(iter(self.attentions))
        source = self.inputs.read(run.text)
        with probe(self.model, f"{site}.weights") as seen:
            handle = self.attentions[site].o_proj.register_forward_pre_hook(_stop)
            try:
                self.states(source, ())
            except _DoneError:
                pass
            finally:
                handle.remove()
        return seen

    def states(self, source: Source, target: Sequence[int]) -> Float[Tensor, "1 T D"]:
        """The final states of the last stack; no logits are computed."""
        with eval_mode(self.model):
            if isinstance(self.model, EncoderDecoder):
                memory = self.model.encode(source.tensor, source.real)
                ids = torch.tensor([list(target)], device=self.inputs.device)
                return self.model.states(ids, memory, source_mask(source.real))
            return self.model.states(source.tensor, source.real)

    def _target(self, run: Run, source: Source) -> list[int]:
        """The decoder's input: the given target, or what the model generates greedily."""
        if not isinstance(self.model, EncoderDecoder):
            return []
        prompt = self.inputs.prompt(source)
        if run.target is not None:
            ids = [*prompt, *self.inputs.target(run.target)]
            check_length(ids, self.inputs.target_limit, "target")
            return ids
        room = self.inputs.target_limit - len(prompt)
        most = (
            min(2 * len(source.strip.ids) + 20, room)
            if source.request is None
            else min(source.request.max_new_tokens, room)
        )
        read = source.strip.ids if source.request is None else source.tensor[0]
        plain = Request(source=read, prompt=prompt)
        ticket = run_requests(
            self.model, [replace(source.request or plain, source=read, max_new_tokens=max(most, 1))], 4096, "source"
        )[0]
        return [*prompt, *(ticket.hypotheses[0].tokens if ticket.hypotheses else [])]

    # Changes.

    @contextmanager
    def changed(self, run: Run) -> Generator[None]:
        """Inside the `with`, the model has the run's changes."""
        if not run.changes:
            yield
            return
        with intervene(self.model, *self._interventions(run)):
            yield

    def _interventions(self, run: Run) -> list[Intervention]:
        outs: dict[str, dict[str, Tensor]] = {"zero": {}}
        for how, other in (("mean", run.plain), ("patch", replace(run.plain, text=run.second or ""))):
            sites = {change.site for change in run.changes if change.how == how}
            outs[how] = self._outs(other, sorted(sites)) if sites else {}
        interventions: list[Intervention] = []
        for (site, how), heads in _grouped(run.changes).items():
            if how == "zero":
                interventions.append(zero(f"{site}.out", head=heads))
            elif how == "mean":
                interventions.append(mean(f"{site}.out", of=outs[how][site], head=heads))
            else:
                # Position by position, as far as the second text goes. A single token would broadcast to all positions.
                only = [0] if outs[how][site].shape[-2] == 1 else None
                interventions.append(patch(f"{site}.out", outs[how][site], head=heads, positions=only))
        return interventions

    def _outs(self, run: Run, sites: Sequence[str]) -> dict[str, Tensor]:
        """The outputs of the heads at these sites in another run."""
        forward = self.run(run)
        with probe(self.model, *(f"{site}.out" for site in sites)) as seen:
            self.states(forward.source, forward.target_ids)
        return {site: seen[f"{site}.out"] for site in sites}

    # Inputs of head scores.

    def score_inputs(self, forward: ForwardPass, site: str) -> tuple[Tensor | None, Tensor | None]:
        """The ids of an attention's queries; for cross-attention, which source tokens each target token copies."""
        device = self.inputs.device
        source = forward.source.tensor if forward.source.strip.kind == "tokens" else None
        if not forward.target_ids:
            return source, None
        target = torch.tensor([forward.target_ids], device=device)
        if site.endswith(".cross"):
            shared = source is not None and not self.inputs.config.source_vocab_size
            pairs = copied_tokens(source, target) if shared and source is not None else None
            return None, pairs if pairs is not None and bool(pairs.any()) else None
        return (target if site.startswith("decoder.") else source), None

    def group(self, name: str) -> list[str]:
        """The attentions of a group, one for each layer."""
        groups = self.groups()
        if name not in groups:
            raise InputError(f"there is no attention {name!r:.60}; {did_you_mean(name[:60], groups)}")
        return groups[name]

    def groups(self) -> dict[str, list[str]]:
        """The attentions by the page's names for them: attention, or encoder, decoder and cross."""
        if not isinstance(self.model, EncoderDecoder):
            return {"attention": list(self.attentions)}
        ends = {
            "encoder": ("encoder.", ".attention"),
            "decoder": ("decoder.", ".attention"),
            "cross": ("decoder.", ".cross"),
        }
        return {
            name: [site for site in self.attentions if site.startswith(start) and site.endswith(end)]
            for name, (start, end) in ends.items()
        }

    @property
    def has_classes(self) -> bool:
        return isinstance(self.model, Encoder) and self.model.config.head == "classes"


def _grouped(changes: Sequence[Change]) -> dict[tuple[str, str], list[int]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for change in changes:
        groups.setdefault((change.site, change.how), []).append(change.head)
    return groups


class _DoneError(Exception):
    """The first attention is computed; the rest is not needed."""


def _stop(_: nn.Module, __: object) -> None:
    raise _DoneError
