"""One model and its memory, run step by step for the rows of a batch. Which rows, and what they write, is the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.generation.batches import pad, send
from clearhead.generation.constraints import Constraint
from clearhead.generation.requests import Ticket, n_source
from clearhead.generation.strategies import Shaper
from clearhead.layers.linear import recording
from clearhead.layers.masks import Mask, Pages
from clearhead.layers.pages import PagedCache, Pool
from clearhead.models import Decoder, EncoderDecoder
from clearhead.models.encoder_decoder import source_mask

Numbers = NDArray[np.int32]


class Member:
    """A request that was let in: its prompt and the blocks that hold it, and what is known of its text."""

    def __init__(self, ticket: Ticket, prompt: list[int], shaper: Shaper, holder: int) -> None:
        self.ticket, self.prompt, self.shaper, self.holder = ticket, prompt, shaper, holder
        request = ticket.request
        self.limit, self.width = request.max_new_tokens, request.beams
        self.row: Numbers = np.zeros(0, np.int32)
        self.source: Numbers = np.zeros(0, np.int32)
        self.n_source = n_source(request.source)
        self.n_read = 0  # of the prompt
        self.n_asked = 0  # tokens asked of the model; the ticket holds those that have arrived
        # One a row; None for a beam that is not alive.
        self.constraints: list[Constraint | None] = [] if request.grammar is None else [request.grammar.start()]

    @property
    def is_blind(self) -> bool:
        """Whether its next token can be asked for before its last is known."""
        return self.width == 1 and not self.constraints and not self.shaper.looks_back

    @property
    def n_left(self) -> int:
        """Tokens of the prompt still to be read."""
        return len(self.prompt) - self.n_read


class Runner:
    """Rows 0 .. n - 1 of a batch: where their keys and values lie (`table`, `counts`; of a source likewise), and their last
    tokens. The engine writes the tables here, on the CPU; what changed follows to the device before the next step.

    On a GPU a step is recorded once for each of a few numbers of rows and replayed: thousands of small kernels then cost no time
    of the CPU. Rows that pad the batch to such a number are not `live`: they look at nothing and write to nobody's block.
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        *,
        n_blocks: int,
        block: int,
        max_rows: int,
        width: int,
        source_width: int,
    ) -> None:
        self.model, self.block, self.max_rows, self.n = model, block, max_rows, 0
        config, weight = model.config, next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        stack = model if isinstance(model, Decoder) else model.decoder
        self.pool = Pool(
            n_blocks=n_blocks,
            block=block,
            n_layers=config.n_layers if isinstance(model, Decoder) else config.n_decoder_layers,
            n_kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            device=self.device,
            dtype=precision(weight),
        )
        self.table = np.zeros((max_rows, width), np.int32)
        self.counts = np.zeros(max_rows, np.int32)
        self.source_table = np.zeros((max_rows, source_width), np.int32)
        self.source_counts = np.zeros(max_rows, np.int32)
        self.tokens = torch.zeros(max_rows, dtype=torch.long, device=self.device)
        self.is_stale = self.has_moved = True  # tables; who stands where
        self.is_greedy = False  # whether `write` has put each row's likeliest next token in `tokens`
        # A bias needs the distance of every pair, for lengths that a recording does not know.
        records = self.device.type == "cuda" and stack.positions.bias is None
        self.recordings: Recordings | None = Recordings(self) if records else None
        self.watched = list(stack.modules()) if records else []

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay, in this order."""
        n, at = len(rows), np.array(rows, np.int64)
        for held in (self.table, self.counts, self.source_table, self.source_counts):
            held[:n] = held[at]
            held[n : self.n] = 0
        self.tokens[:n] = self.tokens[send(at, self.device)]
        self.n = n
        self.is_stale = self.has_moved = True

    def join(self, members: Sequence[Member]) -> None:
        """New rows, as many for each as it has beams, whose prompts were read."""
        for member in members:
            rows = slice(self.n, self.n + member.width)
            self.table[rows, : len(member.row)] = member.row
            self.counts[rows] = len(member.prompt)
            self.source_table[rows, : len(member.source)] = member.source
            self.source_counts[rows] = member.n_source
            self.n = rows.stop
        self.is_stale = self.has_moved = True

    def copy(self, sources: Numbers, targets: Numbers) -> None:
        """Whole blocks."""
        self.pool.copy(*(send(each.astype(np.int64), self.device) for each in (sources, targets)))

    def read(self, members: Sequence[Member], T: int) -> Float[Tensor, "B V"]:
        """The next T tokens of each one's prompt, or what is left of it; logits after the last of them."""
        starts = [member.n_read for member in members]
        rows = [member.prompt[start : start + T] for member, start in zip(members, starts, strict=True)]
        tokens, real = pad(rows, self.device)
        self.is_greedy = False
        table = self._lay(member.row for member in members)
        cache = PagedCache(self.pool, table, send(np.array(starts), self.device), fresh=not any(starts))
        if isinstance(self.model, EncoderDecoder):
            counts = send(np.array([member.n_source for member in members]), self.device)
            cache.read(Pages(self._lay(member.source for member in members), counts, self.block))
            memory, memory_mask = self._encode(members)
            states = self.model.states(tokens, memory, memory_mask, mask=real, cache=cache)
        else:
            states = self.model.states(tokens, real, cache=cache)
        last = send(np.array([len(row) - 1 for row in rows]), self.device)
        states = states[torch.arange(len(rows), device=self.device), last]
        return self.model.project(states[:, None])[:, 0]

    def _encode(self, members: Sequence[Member]) -> tuple[Float[Tensor, "B S D"], Mask]:
        """What the encoder makes of their sources."""
        model = self.model
        assert isinstance(model, EncoderDecoder)
        sound: list[Tensor] = []
        texts: list[list[int]] = []
        for member in members:
            source = member.ticket.request.source
            if isinstance(source, Tensor):
                sound.append(source)
            elif source is not None:
                texts.append(list(source))
        if sound:
            return model.encode(torch.stack(sound).to(self.device, self.dtype)), source_mask(None)
        source, real = pad(texts, self.device)
        return model.encode(source, real), source_mask(real)

    def write(self) -> Float[Tensor, "n V"]:
        """Each row's last token read; logits for its next."""
        n = self.n
        self.is_greedy = self.recordings is not None and not self._is_watched()
        if self.recordings is not None and self.is_greedy:
            logits = self.recordings.replay()
        else:
            self.has_moved = True  # the recording's own counts did not follow
            used = -(-int(self.counts[:n].max() + 1) // self.block)
            table, counts = send(self.table[:n, :used], self.device), send(self.counts[:n], self.device)
            used = -(-int(self.source_counts[:n].max()) // self.block)
            source = send(self.source_table[:n, :used], self.device), send(self.source_counts[:n], self.device)
            logits = self.step(self.tokens[:n], PagedCache(self.pool, table, counts), *source)
        self.counts[:n] += 1
        return logits

    def _is_watched(self) -> bool:
        """Whether somebody hooked into the model: a recording would pass by unseen."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self.watched)  # pyright: ignore[reportPrivateUsage]

    def step(
        self, tokens: Int[Tensor, " n"], cache: PagedCache, source: Int[Tensor, "n s"], source_counts: Int[Tensor, " n"]
    ) -> Float[Tensor, "n V"]:
        """One token a row through the model."""
        if isinstance(self.model, EncoderDecoder):
            cache.look_at(Pages(source, source_counts, self.block))
            states = self.model.states(tokens[:, None], None, cache=cache)
        else:
            states = self.model.states(tokens[:, None], cache=cache)
        return self.model.project(states)[:, 0]

    def _lay(self, rows: Iterable[Numbers]) -> Int[Tensor, "B m"]:
        """Rows of blocks, side by side."""
        given = list(rows)
        table = np.zeros((len(given), max(map(len, given))), np.int32)
        for at, row in enumerate(given):
            table[at, : len(row)] = row
        return send(table, self.device)


class Recordings:
    """One step of a runner, recorded as a CUDA graph for each of a few numbers of rows.

    A graph reads and writes the same memory each time: here that is the tables, the counts, which it raises, and the tokens,
    which become the likeliest next ones.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, R = runner, runner.max_rows
        held = (runner.table, runner.counts, runner.source_table, runner.source_counts)
        self.table, self.counts, self.source_table, self.source_counts = (
            torch.zeros(each.shape, dtype=torch.int32, device=runner.device) for each in held
        )
        self.live = torch.zeros(R, dtype=torch.int32, device=runner.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.memory = torch.cuda.graph_pool_handle()

    def replay(self) -> Float[Tensor, "n V"]:
        runner, n = self.runner, self.runner.n
        if runner.has_moved:
            self._send()
        elif runner.is_stale:
            used = -(-int(runner.counts[:n].max() + 1) // runner.block)
            self.table[:n, :used] = send(runner.table[:n, :used], runner.device)
        runner.is_stale = runner.has_moved = False
        size = _size(n, runner.max_rows)
        if size not in self.graphs:
            self.graphs[size] = self._record(size)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits[:n]

    def _send(self) -> None:
        """All tables; rows that are no longer there are not live."""
        runner, n = self.runner, self.runner.n
        pairs = (self.table, runner.table), (self.source_table, runner.source_table)
        for ours, theirs in (*pairs, (self.counts, runner.counts), (self.source_counts, runner.source_counts)):
            ours.zero_()
            ours[:n] = send(theirs[:n], runner.device)
        self.live.zero_()
        self.live[:n] = 1

    def _step(self, size: int) -> Float[Tensor, "R V"]:
        runner, live = self.runner, self.live[:size]
        cache = PagedCache(runner.pool, self.table[:size], self.counts[:size], live=live)
        logits = runner.step(runner.tokens[:size], cache, self.source_table[:size], self.source_counts[:size])
        runner.tokens[:size] = logits.argmax(-1)  # the greedy ones are done; the engine replaces the others
        self.counts[:size] += live
        return logits

    def _record(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # The first run compiles and chooses kernels. It must change nothing that is kept: no row is live, the tokens are put
        # back, and the keys and values that it writes are those that the replay writes again.
        stream, live, tokens = torch.cuda.Stream(self.runner.device), self.live.clone(), self.runner.tokens.clone()
        stream.wait_stream(torch.cuda.current_stream(self.runner.device))
        with torch.cuda.stream(stream), recording:
            self.live.zero_()
            for _ in range(2):
                self._step(size)
            self.live.copy_(live)
            self.runner.tokens.copy_(tokens)
        torch.cuda.current_stream(self.runner.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory, stream=stream), recording:
            logits = self._step(size)
        return graph, logits


class Parcel:
    """Tokens, their scores and alternatives on their way from the device; `open` waits for them."""

    def __init__(self, tokens: Tensor, scores: Tensor | None, alternatives: tuple[Tensor, ...] | None) -> None:
        each = [tokens, *([] if scores is None else [scores]), *(alternatives or ())]
        self.has_scores, self.has_others = scores is not None, alternatives is not None
        self.arrival: torch.cuda.Event | None = None
        if tokens.is_cuda:
            # Only into pinned memory does a copy go on while the CPU does.
            each = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in each]
            self.arrival = torch.cuda.Event()
            self.arrival.record()
        self.parts = each

    def open(self) -> tuple[list[int], Sequence[float | None], Sequence[tuple[tuple[int, float], ...] | None]]:
        if self.arrival is not None:
            self.arrival.synchronize()
        ids, *rest = (part.tolist() for part in self.parts)
        nothing = [None] * len(ids)
        if not self.has_others:
            return ids, (rest[0] if self.has_scores else nothing), nothing
        return ids, rest[0], [tuple(zip(*pair, strict=True)) for pair in zip(rest[2], rest[1], strict=True)]


def _size(n: int, most: int) -> int:
    """The number of rows that is recorded for n: 1, 2, 4, 8, then by an eighth more at most."""
    step = max(1, 2 ** ((n - 1).bit_length() - 3)) if n > 8 else 0
    size = -(-n // step) * step if step else 1 << (n - 1).bit_length()
    return min(size, most)


def precision(weight: Tensor) -> torch.dtype:
    """Under autocast, keys and values come in the autocast type, not in the weights'."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
