"""Draws the picture of docs/proteins.md: contacts that were put into made-up chains, found again by a small ESM-2.

python docs/pictures/contacts.py runs/sheets              # trains for a minute or two, saves the model there, and draws

A chain is two pairs of strands side by side: each residue of a strand touches its partner in the other, by a fixed table of pairs;
the loops between them, of glycine, proline, serine and asparagine, touch nothing. The model, of 2 layers, is trained to guess
masked residues; it is never told of contacts. Its contact head is then fitted on 16 chains, as ESM-2's was on 20 proteins, and
the picture is of a chain that neither has seen.
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
LOOPS = [ORDER.index(letter) for letter in "GPSN"]
REST = [each for each in range(20) if each not in LOOPS]
STRANDS, STRAND, LOOP = 4, 8, 4
LENGTH = STRANDS * STRAND + (STRANDS - 1) * LOOP


def chain(generator: torch.Generator) -> list[int]:
    """Strands and loops of random residues; but every second strand has the partner 15 - r of each residue r of the one before."""
    strand, residues = list[int](), list[int]()
    for number in range(STRANDS):
        if number:
            residues += [LOOPS[each] for each in torch.randint(4, (LOOP,), generator=generator).tolist()]
        is_second = number % 2 == 1
        drawn = torch.randint(len(REST), (STRAND,), generator=generator).tolist()
        strand = [15 - each for each in strand] if is_second else drawn
        residues += [REST[each] for each in strand]
    return [CLS, *(FIRST + each for each in residues), EOS]


def touches() -> Tensor:
    """True for the pairs that touch: a residue of a strand, and the one as far along in the other strand of its pair."""
    at = torch.arange(LENGTH)
    strand, along = at // (STRAND + LOOP), at % (STRAND + LOOP)
    is_pair = (strand[:, None] // 2 == strand // 2) & (strand[:, None] != strand)
    return is_pair & (along[:, None] == along) & (along < STRAND)


def train(model: ch.Encoder, steps: int, generator: torch.Generator) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100, (steps - step) / (steps / 3))
        rows = torch.tensor([chain(generator) for _ in range(64)])
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
    i, j = torch.triu_indices(LENGTH, LENGTH, 6)
    for _ in range(16):
        inputs.append(features(model, chain(generator))[:, i, j].T)
        targets.append(touches()[i, j].float())
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


def main(folder: str, steps: int = 800) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    sizes = dict(n_layers=2, d_model=64, n_heads=4, d_ff=256, max_len=64)
    model = ch.build(ch.preset("esm2-8m", **sizes, head="tokens", head_transform=True, head_bias="learned"))
    assert isinstance(model, ch.Encoder)
    train(model, steps, generator)
    model.eval()
    fit(model, generator)
    ch.save(model, folder, format="hf")
    special = ["<cls>", "<pad>", "<eos>", "<unk>"]
    (Path(folder) / "vocab.txt").write_text("\n".join([*special, *ORDER, *"XBUZO.-", "<null_1>", "<mask>"]))
    row = chain(generator)
    residues = "".join(ORDER[id - FIRST] for id in row[1:-1])
    assert set(residues) <= set(AMINO_ACIDS)
    (contacts,) = contact_maps(model, [row])
    wanted = touches()
    best = contacts.triu(6).flatten().topk(int(wanted.triu(6).sum())).indices
    found = wanted.flatten()[best].float().mean()
    print(f">sheet\n{residues}\nof the {len(best)} likeliest pairs, {float(found):.0%} touch")
    title = "Contacts of a made-up chain of two pairs of strands"
    plot_contacts(contacts, residues, title=title).savefig(HERE / "contacts.png", metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
