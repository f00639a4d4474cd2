"""Exercise adamw: one step of the optimizer that trains almost every Transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn
from clearhead.training.optimizers import Optimizers

State = tuple[Tensor, Tensor, Tensor]


def adamw(
    weight: Float[Tensor, " D"],
    gradient: Float[Tensor, " D"],
    m: Float[Tensor, " D"],
    v: Float[Tensor, " D"],
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"], Float[Tensor, " D"]]:
    """One step of AdamW (Loshchilov and Hutter 2019): the new weight, m and v. m and v start at 0, step counts from 1.

    Equation: m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   where (b1, b2) = betas
              m' = m / (1 - b1^step),  v' = v / (1 - b2^step)
              weight = weight - lr weight_decay weight - lr m' / (sqrt(v') + eps)

    m' and v' are for the step alone; what is returned is m and v. Change nothing in place: return new tensors.

    The law: after any number of steps, the weights are those of torch.optim.AdamW.
    """
    raise NotImplementedError("update m and v first; the corrected ones are used only inside the last line")


def answer(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> State:
    m = torch.lerp(gradient, m, betas[0])
    v = torch.lerp(gradient.square(), v, betas[1])
    slope = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return weight * (1 - lr * weight_decay) - lr * slope, m, v


def observe(function: Function, weight: Tensor, gradients: Sequence[Tensor], *options: object) -> tuple[Tensor, ...]:
    """The weights after each step."""
    m, v, path = torch.zeros_like(weight), torch.zeros_like(weight), list[Tensor]()
    for step, gradient in enumerate(gradients, 1):
        weight, m, v = function(weight, gradient, m, v, step, *options)
        path.append(weight)
    return tuple(path)


def reference(
    weight: Tensor, gradients: Sequence[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[Tensor, ...]:
    """torch.optim.AdamW, in float64."""
    parameter, path = torch.nn.Parameter(weight.double()), list[Tensor]()
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)
    for gradient in gradients:
        parameter.grad = gradient.double()
        optimizer.step()
        path.append(parameter.detach().clone())
    return tuple(path)


@dataclass(frozen=True)
class Variant:
    """A step with one thing changed."""

    decay: str = "decoupled"
    corrected: bool = True
    divide: Callable[[Tensor, float], Tensor] = lambda v, eps: v.sqrt() + eps
    swapped: bool = False
    keep: str = "plain"
    ahead: int = 0
    sign: float = 1.0

    def __call__(
        self,
        weight: Tensor,
        gradient: Tensor,
        m: Tensor,
        v: Tensor,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> State:
        b1, b2 = reversed(betas) if self.swapped else betas
        g = gradient + weight_decay * weight if self.decay == "gradient" else gradient
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        step += self.ahead
        m_now, v_now = (m / (1 - b1**step), v / (1 - b2**step)) if self.corrected else (m, v)
        moved = weight - self.sign * lr * m_now / self.divide(v_now, eps)
        weight = moved - self.decayed(moved if self.decay == "after" else weight, lr, weight_decay)
        return (weight, m_now, v_now) if self.keep == "corrected" else (weight, m, v)

    def decayed(self, weight: Tensor, lr: float, weight_decay: float) -> Tensor:
        rates = {"decoupled": lr * weight_decay, "after": lr * weight_decay, "without rate": weight_decay}
        return rates.get(self.decay, 0.0) * weight


def cases() -> dict[str, tuple[Tensor, list[Tensor], float, tuple[float, float], float, float]]:
    weight, gradients = drawn(7), [drawn(7, seed=seed) for seed in range(1, 6)]
    return {
        "one step": (weight, gradients[:1], 0.1, (0.9, 0.99), 1e-8, 0.0),
        "five steps": (weight, gradients, 0.1, (0.8, 0.95), 1e-8, 0.0),
        "weight decay": (weight, gradients, 0.1, (0.8, 0.95), 1e-8, 0.3),
        "tiny gradients, where eps counts": (weight, [g * 1e-3 for g in gradients], 0.1, (0.8, 0.95), 1e-3, 0.0),
    }


EXERCISE = Exercise(
    stub=adamw,
    answer=answer,
    reference=reference,
    observe=observe,
    cases=cases,
    mistakes=(
        Mistake(
            "weight decay is added to the gradient: that is Adam with L2, and v divides the decay away. AdamW takes "
            "lr * weight_decay * weight off the weight itself",
            Variant(decay="gradient"),
        ),
        Mistake("weight decay is not multiplied by the learning rate", Variant(decay="without rate")),
        Mistake(
            "the decay is a share of the new weight; it is one of the weight before the step", Variant(decay="after")
        ),
        Mistake("there is no weight decay", Variant(decay="none")),
        Mistake(
            "m and v are not corrected: they start at 0, so divide them by 1 - b^step; the first steps are too small or too large",
            Variant(corrected=False),
        ),
        Mistake("the corrected m and v are returned; the next step needs the plain ones", Variant(keep="corrected")),
        Mistake("eps is under the root; it is added after it", Variant(divide=lambda v, eps: (v + eps).sqrt())),
        Mistake("the root is missing: you divide by v, not by sqrt(v)", Variant(divide=lambda v, eps: v + eps)),
        Mistake("1 is added to step in b^step; it counts from 1 already", Variant(ahead=1)),
        Mistake("the step goes up the slope: subtract lr m' / (sqrt(v') + eps)", Variant(sign=-1.0)),
        Mistake("b1 and b2 are swapped: b1 is for m, b2 for v", Variant(swapped=True)),
    ),
    hints=(
        "m = b1 * m + (1 - b1) * gradient; v = b2 * v + (1 - b2) * gradient**2.",
        "At step 1, m is only (1 - b1) g: m / (1 - b1**step) makes it g. The same for v.",
        "weight - lr * weight_decay * weight - lr * m_hat / (v_hat.sqrt() + eps): the decay does not pass through v.",
    ),
    proves="your steps are those of torch.optim.AdamW",
    sources=(Optimizers,),
)
