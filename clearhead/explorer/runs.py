"""One run of a model with the queries and keys of every attention kept, O(T d) a layer; and the last few such runs."""

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
from clearhead.explorer.asking import Params
from clearhead.explorer.inputs import Inputs, Source, Strip, check_length, stack_of
from clearhead.generation.decoding import write
from clearhead.inside.heads import copied_tokens, still
from clearhead.inside.interventions import Intervention, intervene, mean, patch, zero
from clearhead.inside.probe import Seen, probe
from clearhead.inside.sweeps import attentions_of, n_heads_of
from clearhead.models import Encoder, EncoderDecoder
from clearhead.models.encoder_decoder import source_mask

KEPT_BYTES = 2**29
MAX_CHANGES = 4096


@dataclass(frozen=True)
class Change:
    """A head whose output is zero, its mean over the text, or what it was in the second text."""

    site: str
    head: int
    how: str


@dataclass(frozen=True)
class Run:
    """What the model is run on, and with which heads changed."""

    text: str
    target: str | None = None
    second: str | None = None
    changes: tuple[Change, ...] = ()

    @property
    def plain(self) -> Run:
        """The same model unchanged."""
        return Run(self.text, self.target)


@dataclass(eq=False)
class Pass:
    """A run that was made. `states` are those the head reads."""

    run: Run
    source: Source
    seen: Seen  # the weights of every attention
    states: Float[Tensor, "1 T D"]
    residuals: tuple[Float[Tensor, "1 T D"], ...]  # of the stack that answers: before the first block, and after each
    target: Strip | None = None
    target_ids: tuple[int, ...] = ()  # what the decoder read: its start, then the text
    n_prompt: int = 0  # of these, those that are no text

    @property
    def strip(self) -> Strip:
        """The tokens that the states belong to."""
        return self.source.strip if self.target is None else self.target

    @property
    def n_bytes(self) -> int:
        looks = (x for look in self.seen.looks.values() for x in (look.q, look.k))
        return sum(x.numel() * x.element_size() for x in (*looks, self.states, *self.residuals))


class Runs:
    """Makes runs of one model, and keeps the last ones within KEPT_BYTES."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.model = inputs, inputs.model
        self.attentions = attentions_of(self.model)
        self.kept: OrderedDict[Run, Pass] = OrderedDict()

    def read(self, params: Params) -> Run:
        """The run that a request names."""
        run = params.inner("run")
        changes = tuple(self._change(each) for each in run.inners("changes", MAX_CHANGES))
        second = run.maybe_text("second")
        if second is None and any(change.how == "patch" for change in changes):
            raise InputError("a patch comes from a second text; got second=null; write one")
        used = second if any(change.how == "patch" for change in changes) else None
        target = run.maybe_text("target") if isinstance(self.model, EncoderDecoder) else None
        return Run(run.text("text"), target, used, changes)

    def _change(self, given: Params) -> Change:
        site = given.one_of("site", list(self.attentions))
        head = given.whole("head", 0, n_heads_of(self.attentions[site]) - 1)
        return Change(site, head, given.one_of("how", ("zero", "mean", "patch")))

    def make(self, run: Run) -> Pass:
        """The run, made now or kept from before."""
        if run not in self.kept:
            source = self.inputs.read(run.text)
            with self.changed(run):
                target = self._target(run, source)
                place = stack_of(self.model)
                streams = f"{place}embedding", f"{place}blocks.*.residual"
                with probe(self.model, *(f"{site}.weights" for site in self.attentions), *streams) as seen:
                    states = self.states(source, target)
            made = Pass(run, source, seen, states, tuple(seen.tensors.values()))
            if target:
                n_prompt = len(self.inputs.prompt(source))
                made = replace(made, target=self.inputs.strip(target), target_ids=tuple(target), n_prompt=n_prompt)
            self.kept[run] = made
        self.kept.move_to_end(run)
        self._forget()
        return self.kept[run]

    def _forget(self) -> None:
        """The oldest, until those left fit; the newest always stays."""
        sizes = [each.n_bytes for each in self.kept.values()]
        while len(sizes) > 1 and sum(sizes) > KEPT_BYTES:
            self.kept.popitem(last=False)
            sizes.pop(0)

    def first_layer(self, run: Run) -> Seen | None:
        """Of a run that is not kept, the first attention alone, before the rest is computed; None where that gains nothing."""
        if run in self.kept or run.changes or isinstance(self.model, EncoderDecoder):
            return None
        site = next(iter(self.attentions))
        source = self.inputs.read(run.text)
        with probe(self.model, f"{site}.weights") as seen:
            handle = self.attentions[site].o_proj.register_forward_pre_hook(_stop)
            try:
                self.states(source, ())
            except _EnoughError:
                pass
            finally:
                handle.remove()
        return seen

    def states(self, source: Source, target: Sequence[int]) -> Float[Tensor, "1 T D"]:
        """The final states of the stack that answers: no logits are computed."""
        with still(self.model):
            if isinstance(self.model, EncoderDecoder):
                memory = self.model.encode(source.tensor, source.real)
                ids = torch.tensor([list(target)], device=self.inputs.device)
                return self.model.states(ids, memory, source_mask(source.real))
            return self.model.states(source.tensor, source.real)

    def _target(self, run: Run, source: Source) -> list[int]:
        """What the decoder reads: given, or written by the model as it is, greedily."""
        if not isinstance(self.model, EncoderDecoder):
            return []
        prompt = self.inputs.prompt(source)
        if run.target is not None:
            ids = [*prompt, *self.inputs.target(run.target)]
            check_length(ids, self.inputs.target_limit, "target")
            return ids
        room = self.inputs.target_limit - len(prompt)
        most = min(2 * len(source.strip.ids) + 20, room) if source.ask is None else min(source.ask.max_new_tokens, room)
        read = source.strip.ids if source.ask is None else source.tensor[0]
        plain = Request(source=read, prompt=prompt)
        ticket = write(
            self.model, [replace(source.ask or plain, source=read, max_new_tokens=max(most, 1))], 4096, "source"
        )[0]
        return [*prompt, *(ticket.hypotheses[0].tokens if ticket.hypotheses else [])]

    # Changes.

    @contextmanager
    def changed(self, run: Run) -> Generator[None]:
        """The model with the run's changes."""
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
        made: list[Intervention] = []
        for (site, how), heads in _grouped(run.changes).items():
            place = f"{site}.out"
            if how == "zero":
                made.append(zero(place, head=heads))
            elif how == "mean":
                made.append(mean(place, of=outs[how][site], head=heads))
            else:
                # By place, as far as the second text goes; one token alone would be taken for every place's.
                only = [0] if outs[how][site].shape[-2] == 1 else None
                made.append(patch(place, outs[how][site], head=heads, positions=only))
        return made

    def _outs(self, run: Run, sites: Sequence[str]) -> dict[str, Tensor]:
        """What the heads at these sites gave in another run."""
        made = self.make(run)
        with probe(self.model, *(f"{site}.out" for site in sites)) as seen:
            self.states(made.source, made.target_ids)
        return {site: seen[f"{site}.out"] for site in sites}

    # What heads are scored by.

    def scored_by(self, made: Pass, site: str) -> tuple[Tensor | None, Tensor | None]:
        """The ids that an attention's queries stand for, and for cross-attention which source tokens a target copies."""
        device = self.inputs.device
        source = made.source.tensor if made.source.strip.kind == "tokens" else None
        if not made.target_ids:
            return source, None
        target = torch.tensor([made.target_ids], device=device)
        if site.endswith(".cross"):
            shared = source is not None and not self.inputs.config.source_vocab_size
            pairs = copied_tokens(source, target) if shared and source is not None else None
            return None, pairs if pairs is not None and bool(pairs.any()) else None
        return (target if site.startswith("decoder.") else source), None

    def group(self, name: str) -> list[str]:
        """The sites of an attention by the name that the page gives it."""
        groups = self.groups()
        if name not in groups:
            raise InputError(f"there is no attention {name!r:.60}; {did_you_mean(name[:60], groups)}")
        return groups[name]

    def groups(self) -> dict[str, list[str]]:
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


class _EnoughError(Exception):
    """What was wanted of a run is there."""


def _stop(_: nn.Module, __: object) -> None:
    raise _EnoughError
