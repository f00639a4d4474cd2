"""Forward passes for the page: each keeps the queries and keys of every attention, O(T d) per layer. The last few are cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.engine.request import Request
from clearhead.errors import InputError, did_you_mean
from clearhead.explorer.changes import STEER, Change, grouped, made, read_change
from clearhead.explorer.fields import Fields
from clearhead.explorer.model_inputs import Inputs, Source, Strip, check_length
from clearhead.explorer.stepwise import run_blocks
from clearhead.generation.decoding import run_requests
from clearhead.inside.ablation_sweep import attentions_of
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.head_scores import copied_tokens
from clearhead.inside.interventions import Intervention, intervene
from clearhead.inside.probe import Seen, probe
from clearhead.inside.sites import sites
from clearhead.models import Encoder, EncoderDecoder
from clearhead.models.encoder_decoder import source_mask

T = TypeVar("T")
Steps = Generator[None, None, T]  # one block a step, then a result

CACHE_BYTES = 2**29
MAX_BEGUN = 2  # passes that are not finished
MAX_CHANGES = 4096


@dataclass(frozen=True)
class Run:
    """The text that the model is run on, and the heads that are changed."""

    text: str
    target: str | None = None
    second: str | None = None
    away: str | None = None  # steering vectors lead from this text to the second one
    changes: tuple[Change, ...] = ()

    @property
    def plain(self) -> Run:
        """The same text without changes."""
        return Run(self.text, self.target)

    def with_text(self, text: str) -> Run:
        """Another text with the same changes."""
        return replace(self, text=text)


@dataclass(eq=False, kw_only=True)
class Begun:
    """A run that has begun: its tokens, and what the blocks so far have computed."""

    run: Run
    source: Source
    seen: Seen  # the weights of the attentions
    target: Strip | None = None
    target_ids: tuple[int, ...] = ()  # the decoder's input: its start, then the text
    n_prompt: int = 0  # how many of these come before the text

    @property
    def strip(self) -> Strip:
        """The tokens that the states belong to."""
        return self.source.strip if self.target is None else self.target


@dataclass(eq=False, kw_only=True)
class ForwardPass(Begun):
    """The result of a run. `states` are the final states, which the head reads."""

    states: Float[Tensor, "1 T D"]
    residuals: tuple[Float[Tensor, "1 T D"], ...]  # of the last stack: before the first block, and after each

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
        self.begun: OrderedDict[Run, tuple[Begun, Steps[Tensor]]] = OrderedDict()

    def parse(self, fields: Fields) -> Run:
        """The run that a request names."""
        run = fields.nested("run")
        changes = tuple(read_change(self.model, each) for each in run.nested_list("changes", MAX_CHANGES))
        second = run.optional_text("second")
        if second is None and any(change.how == "patch" for change in changes):
            raise InputError("a patch comes from a second text; got second=null; write one")
        hows, away = {change.how for change in changes}, run.optional_text("away")
        if STEER in hows and not (second and away and self.inputs.config.inputs == "tokens"):
            raise InputError(
                f"steering leads from one text to another; got {away!r:.60} and {second!r:.60}; write both"
            )
        target = run.optional_text("target") if isinstance(self.model, EncoderDecoder) else None
        used = second if hows & {"patch", STEER} else None
        return Run(run.text("text"), target, used, away if STEER in hows else None, changes)

    def run(self, run: Run) -> ForwardPass:
        """The forward pass of a run, from the cache or computed now."""
        steps = self.steps(run)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def steps(self, run: Run) -> Steps[ForwardPass]:
        """The same, a block a step. A pass that is left in the middle goes on from there when it is asked for again."""
        while run not in self.cached:
            self._step(run)
            yield
        self.cached.move_to_end(run)
        self._forget()
        return self.cached[run]

    def until(self, run: Run, site: str) -> Steps[Begun]:
        """A run as far as this attention; later blocks wait until they are asked for."""
        while run not in self.cached and (run not in self.begun or site not in self.begun[run][0].seen.attention):
            self._step(run)
            yield
        return self.cached[run] if run in self.cached else self.begun[run][0]

    def progress(self, run: Run) -> tuple[Begun, int]:
        """A run that has begun, and how many of its blocks are done."""
        begun = self.begun[run][0]
        return begun, len({name.rpartition(".")[0] for name in begun.seen.attention})

    def _step(self, run: Run) -> None:
        """One block further; the last one caches the pass."""
        if run not in self.begun:
            begun = self._begin(run)
            self.begun[run] = begun, self._blocks(begun)
            while len(self.begun) > MAX_BEGUN:
                self.begun.popitem(last=False)
        begun, blocks = self.begun[run]
        try:
            next(blocks)
        except StopIteration as end:
            del self.begun[run]
            known = {each.name: getattr(begun, each.name) for each in fields(begun)}
            self.cached[run] = ForwardPass(**known, states=end.value, residuals=tuple(begun.seen.tensors.values()))
        except BaseException:
            del self.begun[run]
            raise

    def _begin(self, run: Run) -> Begun:
        source = self.inputs.read(run.text)
        writes = isinstance(self.model, EncoderDecoder) and run.target is None
        with self.changed(run) if writes else nullcontext():
            target = self._target(run, source)
        begun = Begun(run=run, source=source, seen=Seen())
        if not target:
            return begun
        n_prompt = len(self.inputs.prompt(source))
        return replace(begun, target=self.inputs.strip(target), target_ids=tuple(target), n_prompt=n_prompt)

    def _blocks(self, begun: Begun) -> Steps[Float[Tensor, "1 T D"]]:
        """The final states of the last stack, a block a step."""
        model, source, changes = self.model, begun.source, self._interventions(begun.run)
        kept = [f"{site}.weights" for site in self.attentions]
        with_stream = [site for site in sites(model) if site.endswith(("embedding", ".residual"))]
        if not isinstance(model, EncoderDecoder):
            call = partial(model.states, source.tensor, source.real)
            return run_blocks(model, "", call, seen=begun.seen, kept=[*kept, *with_stream], interventions=changes)
        return self._translator_blocks(begun, [*kept, *(s for s in with_stream if s.startswith("decoder."))], changes)

    def _translator_blocks(
        self, begun: Begun, kept: list[str], changes: list[Intervention]
    ) -> Steps[Float[Tensor, "1 T D"]]:
        model, source = self.model, begun.source
        assert isinstance(model, EncoderDecoder)
        encode = partial(model.encode, source.tensor, source.real)
        memory = yield from run_blocks(model, "encoder.", encode, seen=begun.seen, kept=kept, interventions=changes)
        ids = torch.tensor([begun.target_ids], device=self.inputs.device)
        decode = partial(model.states, ids, memory, source_mask(source.real))
        return (yield from run_blocks(model, "decoder.", decode, seen=begun.seen, kept=kept, interventions=changes))

    def _forget(self) -> None:
        """Drop the oldest until the rest fits; the newest always stays."""
        sizes = [each.n_bytes for each in self.cached.values()]
        while len(sizes) > 1 and sum(sizes) > CACHE_BYTES:
            self.cached.popitem(last=False)
            sizes.pop(0)

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
        values: dict[str, dict[str, Tensor]] = {}
        for how, other in (("mean", run.plain), ("patch", replace(run.plain, text=run.second or ""))):
            found = sorted({change.place for change in run.changes if change.how == how})
            values[how] = self._outs(other, found) if found else {}
        for site in {change.site for change in run.changes if change.how == STEER}:
            towards, away = (self._mean_state(Run(text or ""), site) for text in (run.second, run.away))
            values.setdefault(STEER, {})[site] = towards - away
        return [made(group, values) for group in grouped(run.changes)]

    def _mean_state(self, run: Run, site: str) -> Float[Tensor, " D"]:
        """The mean of a residual stream over a text's tokens, without special ones."""
        states, forward = self._outs(run, [site])[site][0], self.run(run)
        strip = forward.source.strip if site.startswith("encoder.") else forward.strip
        words = [at for at in range(len(states)) if at not in strip.special]
        return states[words].mean(0) if words else states.mean(0)

    def _outs(self, run: Run, places: Sequence[str]) -> dict[str, Tensor]:
        """What another run computes at these sites."""
        forward = self.run(run)
        with probe(self.model, *places) as seen:
            self.states(forward.source, forward.target_ids)
        return {place: seen[place] for place in places}

    # Inputs of head scores.

    def score_inputs(self, forward: Begun, site: str) -> tuple[Tensor | None, Tensor | None]:
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
