"""`attend` compiled is `attend`: no graph break, forward and backward. Run by test_compiled.py in a process of its own.

On a machine with a GPU the flex kernel is also trained there; torch has no backward pass for it on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from clearhead.kernels import attention
from clearhead.layers import strips
from clearhead.layers.attention import attend, lower
from clearhead.layers.masks import Mask, causal, documents, padding, sparse, window
from clearhead.layers.positions import Bias
from clearhead.layers.relative_positions import Alibi, RelativeBuckets

B, H, K, E = 2, 6, 3, 16  # flex on a GPU wants a power of two for E
T, S = 149, 151
LONG = 1031  # several of flex's blocks of 128, and past the length from which clearhead compiles it on the CPU
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# float32 numbers near 1, sums of up to 1,031 weighted terms in another order
FLOAT32 = dict(rtol=0, atol=1e-5)
# the same summed over up to 1,031 queries
GRADIENT = dict(rtol=0, atol=2e-4)


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test compiles for itself, counts its own compilations, and hears a warning that another has heard before."""
    torch._dynamo.reset()
    attention._compiled_flex.cache_clear()
    flex_attention._WARNINGS_SHOWN.clear()


def random_qkv(T: int, S: int, device: str = "cpu", *, grad: bool = False) -> list[Tensor]:
    shapes = (B, H, T, E), (B, K, S, E), (B, K, S, E)
    return [torch.randn(shape).to(device).requires_grad_(grad) for shape in shapes]


def real(S: int, device: str = "cpu") -> Tensor:
    """The second row begins with padding, which sees nothing where the mask is causal."""
    real = torch.ones(B, S, dtype=torch.bool, device=device)
    real[0, 29:31] = False
    real[1, :71] = False
    return real


def ids(S: int, device: str = "cpu") -> Tensor:
    return torch.stack([torch.arange(S) // 31, torch.arange(S) // 83]).to(device)


def check(ours: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, expected, **FLOAT32)
    if not inputs:
        return
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad(out, inputs, weight) for out in (ours, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, **GRADIENT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", ["explicit", "fused"])
def test_one_graph_forward_and_backward(kernel: str, device: str) -> None:
    """Masks are built and lowered inside the graph, as a model does; rows with nothing to see are among them."""
    q, k, v = random_qkv(T, S, device, grad=True)
    table = RelativeBuckets(n_heads=H).to(device)

    def make_mask(real: Tensor, ids: Tensor) -> Mask:
        return causal() & window(53) & padding(real) & documents(ids)

    def run(q: Tensor, k: Tensor, v: Tensor, real: Tensor, ids: Tensor) -> Tensor:
        lowered = lower(make_mask(real, ids), table, T=T, S=S, like=q, kernel=kernel)
        return attend(q, k, v, lowered, kernel=kernel)

    facts = real(S, device), ids(S, device)
    compiled = torch.compile(run, fullgraph=True)(q, k, v, *facts)
    check(compiled, attend(q, k, v, make_mask(*facts), bias=table, kernel="explicit"), [q, k, v, table.weight])


@pytest.mark.parametrize("narrow", [False, True], ids=["computed again", "narrow window"])
def test_strips_are_one_graph(monkeypatch: pytest.MonkeyPatch, narrow: bool) -> None:
    """Long inputs go in strips. The graph is what is tested, not the code made of it: aot_eager is enough, and quick."""
    monkeypatch.setattr(strips, "WRITTEN_OUT", 997)
    length = LONG if narrow else S
    q, k, v = random_qkv(length, length, grad=True)
    mask = causal() & (window(257) if narrow else padding(real(length)))
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, mask, kernel="fused"), fullgraph=True, backend="aot_eager")
    check(compiled(q, k, v), attend(q, k, v, mask, kernel="explicit"), [q, k, v])


FLEX: dict[str, Callable[[str], tuple[Mask, Bias | None]]] = {
    "window": lambda device: (causal() & window(53), None),
    "documents, alibi": lambda device: (causal() & documents(ids(LONG, device)), Alibi(n_heads=H)),
    "sparse": lambda device: (causal() & sparse("block=48, window=2, n_global=1, stride=9, n_random=2"), None),
    "sparse, documents": lambda device: (sparse("window=70, n_random=2") & documents(ids(LONG, device)), None),
    "padding, t5": lambda device: (causal() & padding(real(LONG, device)), RelativeBuckets(n_heads=H).to(device)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FLEX)
def test_flex_compiles_itself(name: str, device: str) -> None:
    mask, bias = FLEX[name](device)
    q, k, v = random_qkv(LONG, LONG, device)
    with torch.no_grad():
        ours = attend(q, k, v, mask, bias=bias, kernel="flex")
        check(ours, attend(q, k, v, mask, bias=bias, kernel="explicit"), [])
    if mask.keys is not None:
        assert (ours[1, :, :71] == 0).all()


# torch's own words about its own code, met while it traces flex
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_flex_within_one_graph() -> None:
    """Fewer queries than keys, their mask built inside the graph."""
    q, k, v = random_qkv(T, S)

    def run(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return attend(q, k, v, causal() & padding(real), bias=Alibi(n_heads=H), kernel="flex")

    with torch.no_grad():
        compiled = torch.compile(run, fullgraph=True)(q, k, v, real(S))
    check(compiled, attend(q, k, v, causal() & padding(real(S)), bias=Alibi(n_heads=H), kernel="explicit"), [])


def test_flex_takes_many_lengths() -> None:
    """Past torch's limit of compilations it must not fall back to writing out every score; torch warns when it does.

    The limit is 8; here it is 1, because each compilation takes seconds.
    """
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for length in (LONG, 1033):
            q, k, v = random_qkv(length, length)
            check(attend(q, k, v, window(53), kernel="flex"), attend(q, k, v, window(53), kernel="explicit"), [])


def test_flex_takes_short_inputs_of_many_lengths() -> None:
    with torch.no_grad():
        for length in range(11, 31):
            q, k, v = random_qkv(length, length)
            check(attend(q, k, v, window(5), kernel="flex"), attend(q, k, v, window(5), kernel="explicit"), [])


@pytest.mark.parametrize("length", [S, LONG])
def test_flex_takes_float64(length: int) -> None:
    q, k, v = (x.double() for x in random_qkv(length, length))
    with torch.no_grad():
        ours = attend(q, k, v, causal(), kernel="flex")
    # float64, sums of up to 1,031 terms
    torch.testing.assert_close(ours, attend(q, k, v, causal(), kernel="explicit"), rtol=0, atol=1e-12)


if torch.cuda.is_available():

    @pytest.mark.parametrize("name", FLEX)
    def test_flex_has_gradients_on_a_gpu(name: str) -> None:
        mask, bias = FLEX[name]("cuda")
        q, k, v = random_qkv(LONG, LONG, "cuda", grad=True)
        inputs = [q, k, v] + ([bias.weight] if isinstance(bias, RelativeBuckets) else [])
        ours = attend(q, k, v, mask, bias=bias, kernel="flex")
        check(ours, attend(q, k, v, mask, bias=bias, kernel="explicit"), inputs)
        if mask.keys is not None:  # queries with nothing to see
            (dq,) = torch.autograd.grad(attend(q, k, v, mask, bias=bias, kernel="flex").sum(), [q])
            assert (dq[1, :, :71] == 0).all()
