"""Draws the picture of docs/proteins.md: contacts that were put into made-up chains, found again by a small ESM-2.

python docs/pictures/contacts.py runs/hairpins            # trains for some minutes, saves the model there, and draws

A chain is a hairpin: residue i touches residue n - 1 - i, and is its partner's partner in a fixed table of pairs; the loop in the
middle is free. The model, of 3 layers, is trained to guess masked residues; it is never told of contacts. Its contact head is then
fitted on 16 chains, as ESM-2's was on 20 proteins, and the picture is of a chain that neither has seen.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.data.fasta import AMINO_ACIDS
from clearhead.inside.contacts import contact_maps
from clearhead.inside.plots import plot_contacts

HERE = Path(__file__).parent
CLS, EOS, MASK, FIRST = 0, 2, 32, 4  # ids; the residues are 4 to 23 in ESM's order
ORDER = "LAGVSERTIDPKQNFYMHWC"
LOOP = 4  # residues in the middle that touch nothing
LENGTHS = range(20, 31, 2)


def chain(length: int, generator: torch.Generator) -> list[int]:
    """Random residues; the second half mirrors the first through a table: residue r touches 19 - r."""
    half = torch.randint(20, ((length - LOOP) // 2,), generator=generator).tolist()
    loop = torch.randint(20, (LOOP,), generator=generator).tolist()
    residues = [*half, *loop, *(19 - r for r in reversed(half))]
    return [CLS, *(FIRST + r for r in residues), EOS]


def touches(length: int) -> Tensor:
    """True for the pairs that touch."""
    at = torch.arange(length)
    pairs = at[:, None] + at == length - 1
    return pairs & ((at[:, None] - at).abs() > LOOP)


def train(model: ch.Encoder, steps: int, generator: torch.Generator) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100, (steps - step) / (steps / 3))
        length = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=generator))]
        rows = torch.tensor([chain(length, generator) for _ in range(64)])
        chosen = torch.rand(rows.shape, generator=generator) < 0.15
        chosen &= (rows != CLS) & (rows != EOS)
        logits = model(rows.masked_fill(chosen, MASK))
        loss = F.cross_entropy(logits[chosen], rows[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)


def features(model: ch.Encoder, row: list[int]) -> Tensor:
    """The corrected, symmetric maps of all heads: the contact head's input, here by the equation."""
    with ch.probe(model, "blocks.*.attention.weights") as seen, torch.no_grad():
        model(torch.tensor([row]))
    maps = torch.cat([seen[site][0] for site in seen])[:, 1:-1, 1:-1]
    maps = maps + maps.mT
    sums = maps.sum(-1)
    return maps - sums[:, :, None] * sums[:, None] / sums.sum(-1)[:, None, None]


def fit(model: ch.Encoder, generator: torch.Generator) -> None:
    """A logistic regression with a small L1 penalty, as for ESM-2, on 16 chains; at least 6 residues apart."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for length in [*LENGTHS] * 3:
        i, j = torch.triu_indices(length, length, 6)
        inputs.append(features(model, chain(length, generator))[:, i, j].T)
        targets.append(touches(length)[i, j].float())
    x, y = torch.cat(inputs), torch.cat(targets)
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(x @ weight + bias, y) + 1e-4 * weight.abs().sum()
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    head = "esm.contact_head.regression"
    model.extras = {f"{head}.weight": weight.detach()[None], f"{head}.bias": bias.detach()}


def main(folder: str, steps: int = 3000) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    sizes = dict(n_layers=3, d_model=96, n_heads=6, d_ff=384, max_len=64)
    model = ch.build(ch.preset("esm2-8m", **sizes, head="tokens", head_transform=True, head_bias="learned"))
    assert isinstance(model, ch.Encoder)
    train(model, steps, generator)
    model.eval()
    fit(model, generator)
    ch.save(model, folder, format="hf")
    special = ["<cls>", "<pad>", "<eos>", "<unk>"]
    (Path(folder) / "vocab.txt").write_text("\n".join([*special, *ORDER, *"XBUZO.-", "<null_1>", "<mask>"]))
    row = chain(30, generator)
    residues = "".join(ORDER[id - FIRST] for id in row[1:-1])
    assert set(residues) <= set(AMINO_ACIDS)
    (contacts,) = contact_maps(model, [row])
    wanted = touches(len(residues))
    best = contacts.triu(6).flatten().topk(int(wanted.triu(6).sum())).indices
    found = wanted.flatten()[best].float().mean()
    print(f">hairpin\n{residues}\nof the {len(best)} likeliest pairs, {float(found):.0%} touch")
    title = "Contacts of a made-up hairpin"
    plot_contacts(contacts, residues, title=title).savefig(HERE / "contacts.png", metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
