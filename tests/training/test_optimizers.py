"""AdamW and Muon: against torch's, against float64 references, and with their state saved and restored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from models.tiny import EVERY, tiny
from torch import Tensor, nn

from clearhead.layers.linear import FusedLinear
from clearhead.training.optimizers import ITERATIONS, Muon, Optimizers, orthogonalise, parts_of, sort_parameters
from clearhead.training.recipe import Train


def reference_orthogonalise(x: Tensor, iteration: str = "quintic") -> Tensor:
    """X <- a X + (b A + c A A) X with A = X X^T, from X / |X|, of the wide matrix (transposed if it is tall); float64."""
    out = x.double() if x.shape[0] <= x.shape[1] else x.double().T
    out = out / max(float(out.norm()), 1e-7)
    for a, b, c in ITERATIONS[iteration]:
        gram = out @ out.T
        out = a * out + (b * gram + c * gram @ gram) @ out
    return out if x.shape[0] <= x.shape[1] else out.T


class ReferenceMuon:
    """One matrix. m <- mu m + (1 - mu) g; u = sqrt(max(1, rows / cols)) orthogonal((1 - mu) g + mu m);
    w <- w - lr wd w - lr u, with `cautious` w <- w - lr wd w [w u >= 0] - lr u.

    With beta2 (NorMuon), for each row i: v_i <- beta2 v_i + (1 - beta2) mean_j u_ij^2, o_ij = u_ij / (sqrt(v_i) + 1e-7), and
    |u| o / |o| takes the place of u.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float,
        momentum: float,
        decay: float,
        cautious: bool = False,
        beta2: float = 0.0,
        iteration: str = "quintic",
    ) -> None:
        self.w, self.m = weight.detach().double().clone(), torch.zeros_like(weight, dtype=torch.float64)
        self.lr, self.mu, self.decay, self.cautious = lr, momentum, decay, cautious
        self.beta2, self.iteration, self.v = beta2, iteration, [0.0] * len(weight)

    def step(self, grad: Tensor) -> None:
        grad = grad.double()
        self.m = self.mu * self.m + (1 - self.mu) * grad
        rows, cols = self.w.shape
        update = reference_orthogonalise((1 - self.mu) * grad + self.mu * self.m, self.iteration)
        update = math.sqrt(max(1, rows / cols)) * update
        if self.beta2:
            norm, out = float(update.norm()), update.clone()
            for i in range(rows):
                mean = sum(float(x) ** 2 for x in update[i]) / cols
                self.v[i] = self.beta2 * self.v[i] + (1 - self.beta2) * mean
                out[i] = update[i] / (math.sqrt(self.v[i]) + 1e-7)
            update = out * norm / float(out.norm())
        for i in range(rows):
            for j in range(cols):
                w, u = float(self.w[i, j]), float(update[i, j])
                decays = not self.cautious or w * u >= 0
                self.w[i, j] = w - self.lr * self.decay * w * decays - self.lr * u


SHAPES = [(7, 11), (11, 7), (5, 5), (7, 11), (29, 3), (1, 13)]


def drive(
    optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: int, seed: int = 3
) -> list[list[Tensor]]:
    """Steps with random gradients; returns the gradients."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[Tensor]] = []
    for _ in range(steps):
        drawn.append([torch.randn(w.shape, generator=generator).to(w) for w in weights])
        for weight, grad in zip(weights, drawn[-1], strict=True):
            weight.grad = grad.clone()
        optimizer.step()
    return drawn


def muon(
    weights: list[nn.Parameter], *, lr: float = 0.02, decay: float = 0.1, cautious: bool = False, **options: Any
) -> Muon:
    decays = dict(weight_decay=0.0 if cautious else decay, cautious_decay=decay if cautious else 0.0)
    made = Muon([dict(params=weights, **decays)], lr=lr, momentum=0.9, **options)
    for weight in weights:
        made.state[weight]["momentum"] = torch.zeros_like(weight)
        made.state[weight]["row_squares"] = torch.zeros(len(weight), dtype=weight.dtype)
    return made


RULES: list[dict[str, Any]] = [{}, dict(iteration="polar"), dict(beta2=0.9), dict(cautious=True)]
RULES.append(dict(iteration="polar", beta2=0.95, cautious=True))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_muon_is_its_equations(dtype: torch.dtype, within: float, rule: dict[str, Any]):
    """float32: five products of matrices, each with errors of 2^-24 that the next may make three times larger (polar: eight)."""
    if rule.get("iteration") == "polar" and dtype == torch.float32:
        within *= 10
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    references = [ReferenceMuon(weight, lr=0.02, momentum=0.9, decay=0.1, **rule) for weight in weights]
    for grads in drive(muon(weights, **rule), weights, steps=5):
        for reference, grad in zip(references, grads, strict=True):
            reference.step(grad)
    for weight, reference in zip(weights, references, strict=True):
        torch.testing.assert_close(weight.detach().double(), reference.w, rtol=0, atol=within)


def test_muon_is_torchs():
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    drive(muon(ours), ours, steps=5)
    drive(torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.1), theirs, steps=5)
    for a, b, (rows, cols) in zip(ours, theirs, SHAPES, strict=True):
        # torch iterates in bfloat16, 8 bits: its singular values are off by some hundredths. Five steps of 0.02.
        moved = 5 * 0.02 * math.sqrt(max(1, rows / cols))
        torch.testing.assert_close(a, b, rtol=0, atol=0.1 * moved)


@pytest.mark.parametrize("shape", [(7, 11), (31, 31), (3, 101)])
def test_singular_values_come_near_one(shape: tuple[int, int]):
    """Those not far below the largest: five steps multiply a small one by at most 3.4445^5."""
    x = torch.randn(13, *shape)
    before, after = torch.linalg.svdvals(x), torch.linalg.svdvals(orthogonalise(x))
    seen = before / before.norm(dim=-1, keepdim=True) > 0.01
    assert after[seen].min() > 0.5
    assert after.max() < 1.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    # and the directions stay: in the matrix's own, the result is diagonal
    turned = u.mT @ orthogonalise(x) @ v.mT
    torch.testing.assert_close(
        turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1)), torch.zeros_like(turned), rtol=0, atol=1e-4
    )


def test_orthogonalise_of_nothing_is_nothing():
    assert not orthogonalise(torch.zeros(2, 3, 5)).any()


def nearest_to_one(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic p with the smallest max |1 - p(x)| on [low, high], by Remez' algorithm: the error is as large, with changing
    sign, at both ends and at the two places between where p is steepest no more."""
    places = [low, (3 * low + high) / 4, (low + 3 * high) / 4, high]
    a = b = c = 0.0
    for _ in range(100):
        rows = [[x, x**3, x**5, (-1.0) ** i] for i, x in enumerate(places)]
        a, b, c, _ = np.linalg.solve(np.array(rows), np.ones(4))
        root = math.sqrt((3 * b) ** 2 - 20 * a * c)
        places[1:3] = sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
    return a, b, c


def test_the_polynomials_of_polar_express():
    """Algorithm 1 of Amsel et al. 2025 from singular values of 0.001 to 1. An interval is widened to 0.024 of its end (else p would
    fall near 0 inside it), and p then scaled so that both ends are as far from 1."""
    low, high = 1e-3, 1.0
    for i, found in enumerate(ITERATIONS["polar"]):
        a, b, c = nearest_to_one(max(low, 0.02407327424182761 * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        scale = 2 / sum(ends) if low < 0.02407327424182761 * high else 1.0
        room = 1.01 if i < 4 else 1.0
        assert found == pytest.approx((a * scale / room, b * scale / room**3, c * scale / room**5), rel=1e-9)
        low = scale * ends[0]
        high = 2 - low


def test_polar_express_is_nearer_to_one():
    """Of singular values from 0.01 to 1, in float64."""
    x = torch.diag(torch.logspace(-2, 0, 31, dtype=torch.float64))
    x = x / torch.linalg.matrix_norm(x)
    far = {
        name: float((torch.linalg.svdvals(orthogonalise(x[None], steps)) - 1).abs().max())
        for name, steps in ITERATIONS.items()
    }
    assert far["polar"] < 0.15
    assert far["quintic"] > 0.25


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_cautious_decay_of_adamw(decay: float):
    """m <- b m + (1 - b) g; v <- c v + (1 - c) g^2; u = m / (sqrt(v) + 1e-8), corrected; w <- w - lr u - lr wd w [w u >= 0]."""
    model = nn.Linear(5, 3, dtype=torch.float64)
    train = Train(lr=0.02, weight_decay=decay, cautious_decay=decay > 0)
    optimizers = Optimizers(model, train, lr=0.02)
    w, m, v = model.weight.detach().clone(), torch.zeros(3, 5).double(), torch.zeros(3, 5).double()
    for t in range(1, 6):
        grad = torch.randn(3, 5).double()
        model.weight.grad, model.bias.grad = grad.clone(), torch.zeros(3).double()
        optimizers.step(skip=torch.tensor(False))
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        u = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        w = w - 0.02 * u - 0.02 * decay * w * (w * u >= 0)
        torch.testing.assert_close(model.weight.detach(), w, rtol=0, atol=1e-12)


def test_a_fused_matrix_is_three():
    parts = {"q": 11, "k": 5, "v": 5}
    fused = FusedLinear(7, parts, bias=set())
    apart = [nn.Parameter(piece.clone()) for piece in fused.weight.detach().split(list(parts.values()))]
    assert parts_of(nn.Sequential(fused)) == {fused.weight: [11, 5, 5]}
    drawn = drive(muon([fused.weight], parts=parts_of(fused)), [fused.weight], steps=3)
    optimizer = muon(apart)
    for (grad,) in drawn:
        for weight, piece in zip(apart, grad.split(list(parts.values())), strict=True):
            weight.grad = piece.clone()
        optimizer.step()
    assert torch.equal(fused.weight.detach(), torch.cat([weight.detach() for weight in apart]))


@pytest.mark.parametrize("name", EVERY)
def test_parameter_groups(name: str):
    model = tiny(name, dtype=torch.float32)
    names = {parameter: place for place, parameter in model.named_parameters()}
    matrices, decayed, plain = ([names[p] for p in group] for group in sort_parameters(model, muon=True))
    assert sorted([*matrices, *decayed, *plain]) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert all("blocks." in n and "norm" not in n for n in matrices)
    assert not any(n.endswith("bias") or "norm." in n for n in [*matrices, *decayed])
    for place in ("tokens", "positions", "head", "segments", "source."):
        assert not any(n.startswith((place, f"decoder.{place}", f"encoder.{place}")) for n in matrices)
    without = sort_parameters(model, muon=False)
    assert without[0] == []
    assert {names[p] for p in without[1]} == {*matrices, *decayed}


def test_what_is_frozen_is_left_out():
    model = tiny("gpt2", dtype=torch.float32)
    model.requires_grad_(False)
    model.tokens.weight.requires_grad_(True)  # type: ignore[union-attr]
    assert len(Optimizers(model, Train(optimizer="muon"), lr=0.1).parameters()) == 1


def fill(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_adamw_is_torchs():
    ours, theirs = (tiny("gpt2", dtype=torch.float32) for _ in range(2))
    optimizer = Optimizers(ours, Train(weight_decay=0.3, betas=(0.8, 0.9)), lr=0.01)
    groups = [
        dict(params=[p for p in theirs.parameters() if (p.ndim >= 2) == decays], weight_decay=0.3 if decays else 0.0)
        for decays in (True, False)
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), foreach=False, fused=False)
    for step in range(5):
        fill(ours, step)
        fill(theirs, step)
        optimizer.scale(0.5)
        for group in reference.param_groups:
            group["lr"] = 0.5 * 0.01
        optimizer.step()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # float32; the fused kernel orders its operations otherwise


def test_norms_and_biases_are_not_decayed():
    model = tiny("gpt2", dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Optimizers(model, Train(optimizer="muon", weight_decay=0.5, muon_lr=0.2), lr=0.1).step()
    for name, parameter in model.named_parameters():
        rate = 0.2 if "blocks." in name and parameter.ndim == 2 else 0.1
        factor = 1 - rate * 0.5 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


NEW: dict[str, Any] = dict(optimizer="muon", muon_iteration="polar", muon_beta2=0.95, cautious_decay=True)


@pytest.mark.parametrize("fields", [dict(optimizer="adamw"), dict(optimizer="muon"), NEW, dict(cautious_decay=True)])
def test_state_comes_back(fields: Any):
    """Tensors copied into a fresh optimizer, before its first step, give the same next steps to the bit."""
    model = tiny("llama", dtype=torch.float32)
    train = Train(**fields)
    optimizer = Optimizers(model, train, lr=0.01)
    for step in range(3):
        fill(model, step)
        optimizer.step()
    copied = tiny("llama", dtype=torch.float32)
    copied.load_state_dict(model.state_dict())
    other = Optimizers(copied, train, lr=0.01)
    assert other.tensors().keys() == optimizer.tensors().keys()
    for name, tensor in other.tensors().items():
        tensor.copy_(optimizer.tensors()[name])
    for step in range(3, 6):
        for made, optimised in ((model, optimizer), (copied, other)):
            fill(made, step)
            optimised.scale(1 / step)
            optimised.step()
    for a, b in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


def test_names_of_the_state():
    model = tiny("llama", dtype=torch.float32)
    names = set(Optimizers(model, Train(optimizer="muon"), lr=0.1).tensors())
    assert {f"tokens.weight.{part}" for part in ("step", "exp_avg", "exp_avg_sq")} <= names
    assert "blocks.0.attention.qkv.weight.momentum" in names
    assert len(names) == sum(1 if "blocks." in n and p.ndim == 2 else 3 for n, p in model.named_parameters())
    more = set(Optimizers(model, Train(**NEW), lr=0.1).tensors()) - names
    assert more == {f"{n}.row_squares" for n, p in model.named_parameters() if "blocks." in n and p.ndim == 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [dict(optimizer="muon"), NEW, dict(cautious_decay=True)])
def test_a_skipped_step_changes_nothing(fields: Any, bad: float):
    model = tiny("llama", dtype=torch.float32)
    optimizers = Optimizers(model, Train(**fields), lr=0.1)
    fill(model, 0)
    optimizers.step(skip=torch.tensor(False))
    before = {n: t.clone() for n, t in {**dict(model.named_parameters()), **optimizers.tensors()}.items()}
    fill(model, 1)
    for parameter in model.parameters():
        parameter.grad.view(-1)[0] = bad  # type: ignore[union-attr]  # the rest are numbers
    optimizers.step(skip=torch.tensor(True))
    for name, tensor in {**dict(model.named_parameters()), **optimizers.tensors()}.items():
        assert torch.equal(tensor, before[name]), name


def test_scale_sets_every_rate():
    optimizers = Optimizers(tiny("gpt2", dtype=torch.float32), Train(optimizer="muon", muon_lr=0.07), lr=0.03)
    for share in (0.5, 0.0, 1.0):
        optimizers.scale(share)
        rates = [group["lr"] for optimizer in optimizers.all for group in optimizer.param_groups]
        assert rates == [0.03 * share, 0.03 * share, 0.07 * share]


def test_recorded_gradients_stay_where_they_are_at_zero():
    model = tiny("gpt2", dtype=torch.float32)
    optimizers = Optimizers(model, Train(), lr=0.1)
    fill(model, 0)
    optimizers.zero_grad()
    assert all(p.grad is None for p in model.parameters())  # the next pass need not read them to add to them
    fill(model, 0)
    optimizers.record = True
    places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    optimizers.zero_grad()
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == places
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_muon_learns():
    """Overfits one batch: a least-squares problem of full rank has an exact solution."""
    weight = nn.Parameter(torch.randn(7, 11))
    wanted, x = torch.randn(7, 11), torch.randn(11, 29)
    optimizer = muon([weight], lr=0.1, decay=0.0)
    for step in range(200):
        weight.grad = None
        loss = ((weight - wanted) @ x).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        optimizer.step()
    assert float(((weight - wanted) @ x).square().mean().detach()) < 1e-3
