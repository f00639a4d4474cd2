"""Speculative decoding: several drafted tokens of a text are verified in one decode step (Leviathan et al. 2023).

A step of few rows takes little longer than one of a single row: most of the time it reads the weights. So a text gets a row for
each drafted token, which continues the row before it. Each row's next token is chosen as in a step of its own, and stands if all
drafted tokens before it were chosen, too. The text is the same as without drafts: greedy, and also sampled, because the random
numbers depend on the seed and the place alone. A draft without a distribution of its own is thereby accepted with the probability
that the model gives it, as by the rule of Leviathan et al.
"""

from __future__ import annotations

import numpy as np

from clearhead.engine.draft_model import DraftModel
from clearhead.engine.outputs import OutputProcessor
from clearhead.engine.runner import ModelRunner
from clearhead.engine.sampler import SamplingGroup, group_sequences, sample_tokens
from clearhead.engine.scheduler import Scheduler
from clearhead.engine.sequence import Sequence
from clearhead.engine.transfer import HostCopy

DRAFT_ROWS = 8  # of a step with drafts, at most: with more, products take longer than reading the weights


class Speculator:
    """The decode steps in which something is drafted. No row may be a beam."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, outputs: OutputProcessor) -> None:
        self.runner, self.scheduler, self.outputs = runner, scheduler, outputs
        self.draft_models: dict[Sequence, DraftModel] = {}  # of sequences that run

    def step(self) -> bool:
        """One decode step for all rows, and for drafts; tickets get their tokens at once. False: no draft, and nothing is done."""
        drafts = self._draft()
        if not any(drafts):
            return False
        runner, running = self.runner, self.scheduler.running
        self.scheduler.allocate_drafts([len(draft) for draft in drafts])
        runner.add_drafts(drafts)
        try:
            logits = runner.decode()
        except BaseException:  # the rows as they were, for whoever makes another step
            runner.keep_rows(np.cumsum([0, *(len(draft) + 1 for draft in drafts[:-1])]).tolist(), has_beams=False)
            raise
        sequences = [s for s, draft in zip(running, drafts, strict=True) for _ in range(len(draft) + 1)]
        drafted = [draft[:n] for draft in drafts for n in range(len(draft) + 1)]
        rows = range(len(sequences))
        last: dict[int, int] = {}  # the row of each sequence that stands, and holds its last token
        for group in group_sequences(sequences, rows, rows, runner.device, drafted):
            last |= self._append(group, sample_tokens(group, logits, runner))
        runner.keep_rows([last[id(sequence)] for sequence in running], has_beams=False)
        return True

    def _draft(self) -> list[list[int]]:
        """Drafted tokens for each sequence that runs; its last token is never drafted: nothing would come of it."""
        room = min(DRAFT_ROWS, self.runner.max_rows) - len(self.scheduler.running)
        drafts: list[list[int]] = []
        for sequence in self.scheduler.running:
            draft = self._draft_for(sequence, min(room, sequence.limit - sequence.n_scheduled - 1))
            room -= len(draft)
            sequence.ticket.n_drafted += len(draft)
            drafts.append(draft)
        return drafts

    def _draft_for(self, sequence: Sequence, most: int) -> list[int]:
        if sequence.ticket.request.draft is None or most < 1:
            return sequence.draft(most)
        if sequence not in self.draft_models:
            self.draft_models[sequence] = DraftModel(sequence, self.runner.model)
        return self.draft_models[sequence].draft(sequence, most, len(self.scheduler.running))

    def remove_done(self) -> None:
        """Free the caches of draft models whose sequences do not run any more."""
        if self.draft_models:
            self.draft_models = {s: self.draft_models[s] for s in self.scheduler.running if s in self.draft_models}

    def _append(self, group: SamplingGroup, copy: HostCopy) -> dict[int, int]:
        """Append the tokens of the rows that stand to their tickets. Returns each sequence's last such row."""
        parts = copy.wait()
        ids, kept = parts[0].tolist(), list[int]()
        last: dict[int, int] = {}
        for place, (sequence, drafted) in enumerate(zip(group.sequences, group.drafted, strict=True)):
            if drafted and not (kept and kept[-1] == place - 1 and ids[place - 1] == drafted[-1]):
                continue
            kept.append(place)
            last[id(sequence)] = group.places[place][0]
            sequence.ticket.n_accepted += bool(drafted)
        sequences = [group.sequences[place] for place in kept]
        self.outputs.append_tokens(sequences, HostCopy(*(part[kept] for part in parts)), is_simple=group.is_simple)
        self.scheduler.scheduled(sequences)
        return last
