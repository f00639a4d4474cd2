"""Draws the picture of docs/sparse.md: what patterns keep of 96 x 96 pairs.

python docs/pictures/patterns.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from clearhead.layers.masks import ALL, causal, documents, sparse

PATTERNS = {
    "Longformer": "window=6, n_global=3",
    "dilated": "window=5, dilation=3",
    "Sparse Transformer": "window=4, stride=8",
    "BigBird": "block=4, window=2, n_global=1, n_random=1",
    "blocks": "block=8, window=2",
}
LENGTH = 96


def main() -> None:
    masks = {f"{name}\n{text}": sparse(text) for name, text in PATTERNS.items()}
    bigbird = masks[f"BigBird\n{PATTERNS['BigBird']}"]
    masks["BigBird, causal\na decoder's half"] = bigbird & causal()
    two = documents((torch.arange(LENGTH) >= 60).long()[None])
    masks["BigBird, causal, two documents\nplaces count anew in each"] = bigbird & causal() & two
    figure, axes = plt.subplots(2, 4, figsize=(12.5, 7.6))
    figure.subplots_adjust(left=0.03, right=0.99, bottom=0.04, top=0.92, wspace=0.12, hspace=0.3)
    colors = ListedColormap(["#eef1f4", "#2f5d8a"])
    for (title, mask), ax in zip(masks.items(), axes.flat, strict=False):
        allowed = mask.allowed(LENGTH, LENGTH, ALL, ALL, torch.device("cpu"))
        assert allowed is not None
        ax.imshow(allowed[0, 0], cmap=colors, interpolation="nearest")
        share = float(allowed.float().mean())
        ax.set_title(title, fontsize=8.5)
        ax.set_xlabel(f"keys ({share:.0%} of the pairs)", fontsize=8)
        ax.set(xticks=[], yticks=[])
    for ax in axes[:, 0]:
        ax.set_ylabel("queries", fontsize=8)
    axes.flat[-1].set_axis_off()
    figure.savefig(Path(__file__).parent / "patterns.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
