"""TransformerLens beside `probe` and `intervene`, on a tiny GPT-2: largest differences of what both see, and without a head.

Needs `pip install transformer-lens`; run by itself: HF_HUB_OFFLINE=1 .venv-bench/bin/python benchmarks/correctness/probe_sites.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]
from transformers import GPT2Config, GPT2LMHeadModel

import clearhead as ch
from clearhead.inside import intervene, zero


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=53, n_positions=19, n_layer=2, n_embd=21, n_head=3, n_inner=37)
    random = GPT2LMHeadModel(config)
    for parameter in random.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with tempfile.TemporaryDirectory() as folder:
        random.save_pretrained(folder)
        ours = ch.load(folder)
        theirs = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
        lens = TransformerBridge.boot_transformers(folder, hf_model=theirs)
    tokens = torch.randint(0, 53, (3, 11))
    with ch.probe(ours) as seen:
        ours(tokens)
    _, cache = lens.run_with_cache(tokens)
    for i in range(2):
        pairs = {
            "attention.weights": cache["pattern", i],
            "attention.q": cache["q", i].transpose(1, 2),
            "attention.out": cache["z", i].transpose(1, 2),
            "feedforward.hidden": cache["post", i],
            "residual": cache["resid_post", i],
        }
        for place, tensor in pairs.items():
            print(f"blocks.{i}.{place:20} {(seen[f'blocks.{i}.{place}'] - tensor).abs().max():.1e}")

    def take_away(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, 1] = 0
        return z

    without = lens.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", take_away)])
    with intervene(ours, zero("blocks.1.attention.out", head=1)):
        print(f"without head 1.1: {(ours(tokens) - without).abs().max():.1e}")


if __name__ == "__main__":
    main()
