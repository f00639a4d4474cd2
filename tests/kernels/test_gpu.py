"""The Triton kernels, against float64 on the CPU.

On a machine with a CUDA GPU they run there. Without one, they run in Triton's interpreter if triton is installed (slow: the
sizes are small), and are skipped otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.layers.linear import ACTIVATIONS
from clearhead.layers.positions import Rotary
from clearhead.layers.positions import rotate as plain_rotate
from tests.triton_interpreter import DEVICE, need_triton

need_triton()
gpu: Any = pytest.importorskip("clearhead.kernels.gpu")

# Against float64 on the same rounded inputs: float32 sums, then one rounding to the type.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
DTYPES = list(TOLERANCE)
# Triton 3.6's interpreter multiplies bfloat16's bits as integers in tl.dot.
DOTTED = DTYPES if DEVICE == "cuda" else [torch.float32, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    expected = expected.cpu().double()
    assert found.dtype == dtype
    assert found.shape == expected.shape
    error = (found.cpu().double() - expected).abs() / (1 + expected.abs())
    assert error.max() <= TOLERANCE[dtype]  # also false for NaN


@pytest.mark.parametrize("dtype", DOTTED)
@pytest.mark.parametrize(
    ("R", "N", "D"), [(1, 37, 72), (2, 5, 520), (3, 70, 136), (8, 33, 264), (16, 19, 40), (37, 35, 72)]
)
def test_linear_is_the_product(R: int, N: int, D: int, dtype: torch.dtype) -> None:
    x, weight, bias = (t.to(dtype) for t in (draw(R, D), draw(N, D) / D**0.5, draw(N)))
    product = x.double() @ weight.double().T
    if gpu.linear_plan(R, N, D, dtype) is None:
        assert R > 16
        assert dtype == torch.float32
        return
    assert_near(gpu.linear(x, weight), product, dtype)
    kept = torch.nn.Parameter(weight, requires_grad=False)  # read ahead of the kernel before
    assert_near(gpu.linear(x, kept, bias), product + bias.double(), dtype)
    for activation in ("relu", "gelu_tanh"):
        expected = ACTIVATIONS[activation](x.double() @ weight.double().T + bias.double())
        assert_near(gpu.linear(x, kept, bias, activation=activation), expected, dtype)


@pytest.mark.parametrize("dtype", DOTTED)
@pytest.mark.parametrize("R", [1, 4, 16])
def test_both_kernels_of_linear(R: int, dtype: torch.dtype) -> None:
    x, weight = draw(R, 72, dtype=dtype), draw(37, 72, dtype=dtype) / 8
    expected = x.double() @ weight.double().T
    summed = gpu.linear(x, weight, plan=dict(kernel="sum", OUTS=2, BLOCK=64, UNROLL=2, num_warps=1))
    dotted = gpu.linear(x, weight, plan=dict(kernel="dot", OUTS=16, BLOCK=64, STAGES=2, num_warps=4))
    assert_near(summed, expected, dtype)
    assert_near(dotted, expected, dtype)


def test_what_the_kernels_do_not_know_is_refused() -> None:
    """Before a kernel is launched."""
    assert all(map(gpu.knows, ACTIVATIONS))
    assert not gpu.knows("tanh")
    x, weight = draw(1, 72), draw(37, 72)
    with pytest.raises(AssertionError):
        gpu.linear(x, weight, activation="tanh")
    with pytest.raises(AssertionError):
        gpu.linear(x, draw(72, 37).T)
    with pytest.raises(AssertionError):
        gpu.linear(draw(17, 72), weight)
    with pytest.raises(AssertionError):
        gpu.gated(draw(2, 10), "tanh")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("R", "N", "D"), [(1, 37, 1100), (3, 5, 72), (8, 6, 520)])
def test_linear_int8(R: int, N: int, D: int, dtype: torch.dtype) -> None:
    x, bias, scales = draw(R, D, dtype=dtype), draw(N, dtype=dtype), (draw(N, -(-D // 64)) / 1000).half()
    q = torch.randint(-127, 128, (N, D), dtype=torch.int8, device=DEVICE)
    weight = q.double() * scales.double().repeat_interleave(64, 1)[:, :D]
    assert_near(gpu.linear_int8(x, q, scales), x.double() @ weight.T, dtype)
    assert_near(gpu.linear_int8(x, q, scales, bias), x.double() @ weight.T + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("R", "N", "D"), [(1, 37, 1120), (3, 5, 96), (8, 6, 544)])
def test_linear_int4(R: int, N: int, D: int, dtype: torch.dtype) -> None:
    x, bias = draw(R, D, dtype=dtype), draw(N, dtype=dtype)
    scales, mins = ((draw(N, D // 32) / 100).half() for _ in range(2))
    q = torch.randint(0, 256, (N, D // 2), dtype=torch.uint8, device=DEVICE)
    u = torch.stack([q & 15, q >> 4], -1).flatten(1).double()
    weight = u * scales.double().repeat_interleave(32, 1) + mins.double().repeat_interleave(32, 1)
    assert_near(gpu.linear_int4(x, q, scales, mins), x.double() @ weight.T, dtype)
    assert_near(gpu.linear_int4(x, q, scales, mins, bias), x.double() @ weight.T + bias.double(), dtype)


def new_pool(blocks: int, K: int, slots: int, E: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as views of one pool, full of NaN: what nobody wrote must not be read."""
    pool = torch.full((blocks, 2, K, slots, E), float("nan"), dtype=dtype, device=DEVICE)
    return pool[:, 0], pool[:, 1]


def new_table(B: int, m: int) -> Tensor:
    """Blocks in random order, with room beside each row."""
    return torch.randperm(B * (m + 1)).reshape(B, m + 1).to(DEVICE, torch.int32)[:, :m]


def look(q: Tensor, k: Tensor, v: Tensor, table: Tensor, counts: Tensor, scale: float, window: int) -> Tensor:
    """Attention row by row in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b, count in enumerate(counts.tolist()):
        first = max(0, count - window) if window else 0
        if count == 0:
            continue
        own = [pool[table[b].long()].transpose(0, 1).flatten(1, 2)[:, first:count] for pool in (k, v)]  # (K, S, E)
        keys, values = (t.cpu().double().repeat_interleave(group, 0) for t in own)
        weights = (torch.einsum("he,hse->hs", q[b].cpu().double(), keys) * scale).softmax(-1)
        out[b] = torch.einsum("hs,hse->he", weights, values)
    return out


@pytest.mark.parametrize("dtype", DOTTED)
@pytest.mark.parametrize(("H", "K", "E", "slots"), [(3, 3, 32, 16), (4, 2, 80, 32), (8, 1, 64, 16), (5, 5, 96, 16)])
@pytest.mark.parametrize(("splits", "window"), [(1, 0), (3, 19)])
def test_paged_attention(H: int, K: int, E: int, slots: int, splits: int, window: int, dtype: torch.dtype) -> None:
    B, m = 4, 96 // slots
    k, v = new_pool(B * (m + 1), K, slots, E, dtype)
    table = new_table(B, m)
    counts = torch.tensor([71, 0, 1, m * slots], dtype=torch.int32, device=DEVICE)
    for b, count in enumerate(counts.tolist()):
        for p in range(count):
            for pool in (k, v):
                pool[table[b, p // slots].long(), :, p % slots] = draw(K, E, dtype=dtype)
    q, scale = draw(B, H, E, dtype=dtype), E**-0.5
    plan = dict(TILE=16, SPLITS=splits, LEAST=32, STAGES=2, num_warps=4)
    expected = look(q, k, v, table, counts, scale, window)
    for _ in range(min(splits, 2)):  # twice: the counters are left as they were found
        found = gpu.paged_attention(q, k, v, table, counts, scale, window, plan=plan)
        assert_near(found, expected, dtype)
    assert_near(gpu.paged_attention(q, k, v, table, counts, scale, window), expected, dtype)


@pytest.mark.parametrize(("H", "K", "splits", "window"), [(3, 3, 1, 0), (4, 2, 3, 0), (3, 3, 2, 19)])
def test_paged_attention_token_by_token(H: int, K: int, splits: int, window: int) -> None:
    """Texts that share some tokens and not their neighbours, as beams do."""
    B, L, E, slots = 4, 71, 32, 16
    k, v = new_pool(20, K, slots, E, torch.float32)
    paths = torch.stack([torch.randperm(20 * slots)[:L] for _ in range(B)]).to(DEVICE, torch.int32)
    counts = torch.tensor([L, 0, 1, 40], dtype=torch.int32, device=DEVICE)
    for b, count in enumerate(counts.tolist()):
        for place in paths[b, :count].tolist():
            for pool in (k, v):
                pool[place // slots, :, place % slots] = draw(K, E)
    q, scale = draw(B, H, E), E**-0.5
    keys, values = (pool.transpose(1, 2).reshape(-1, 1, K, E).transpose(1, 2) for pool in (k, v))  # blocks of one token
    expected = look(q, keys, values, paths, counts, scale, window)
    plan = dict(TILE=16, SPLITS=splits, LEAST=32, STAGES=2, num_warps=4)
    assert_near(
        gpu.paged_attention(q, k, v, paths, counts, scale, window, each=True, plan=plan), expected, torch.float32
    )
    assert_near(gpu.paged_attention(q, k, v, paths, counts, scale, window, each=True), expected, torch.float32)


@pytest.mark.parametrize(("E", "heads_a_program"), [(32, 1), (80, 8)])
def test_store_writes_one_token_a_row(E: int, heads_a_program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kv_store, "_heads", lambda B, heads: heads_a_program)
    B, K, slots = 3, 2, 16
    pool_k, pool_v = new_pool(12, K, slots, E, torch.bfloat16)
    table = new_table(B, 3)
    positions = torch.tensor([0, 47, -1], device=DEVICE)
    fused = draw(B, 3 * K, E, dtype=torch.bfloat16)
    k, v = fused[:, K : 2 * K], fused[:, 2 * K :]
    gpu.store(k, v, pool_k, pool_v, table, positions)
    for b, p in enumerate(positions.tolist()[:2]):
        for pool, written in ((pool_k, k), (pool_v, v)):
            place = table[b, p // slots].long()
            assert torch.equal(pool[place, :, p % slots], written[b])
    assert int(pool_k.isfinite().sum()) == int(pool_v.isfinite().sum()) == 2 * K * E


@pytest.mark.parametrize("heads_a_program", [1, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("E", "dtype"), [(32, torch.bfloat16), (80, torch.float32)])
def test_rotation_is_that_of_positions(
    E: int, dtype: torch.dtype, interleaved: bool, heads_a_program: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    B, H, K, slots = 3, 4, 2, 16
    monkeypatch.setattr(gpu.kv_store, "_heads", lambda B, heads: heads_a_program)
    positions = torch.tensor([5, 0, 33])
    angles = Rotary(d_head=E, interleaved=interleaved).angles(positions[:, None])
    cos, sin = (a[:, 0, 0].to(DEVICE) for a in angles)
    fused = draw(B, H + 2 * K, E, dtype=dtype)
    q, k, v = fused.split([H, K, K], 1)
    turned = [plain_rotate(t.cpu().double()[:, :, None], angles)[:, :, 0] for t in (q, k)]
    assert_near(gpu.rotate(q, cos, sin), turned[0], dtype)
    pool_k, pool_v = new_pool(12, K, slots, E, dtype)
    table = new_table(B, 3)
    found = gpu.rotate_store(q, k, v, cos, sin, pool_k, pool_v, table, positions.to(DEVICE, torch.int32))
    assert_near(found, turned[0], dtype)
    for b, p in enumerate(positions.tolist()):
        place = table[b, p // slots].long()
        assert_near(pool_k[place, :, p % slots], turned[1][b], dtype)
        assert torch.equal(pool_v[place, :, p % slots], v[b])
    assert int(pool_k.isfinite().sum()) == int(pool_v.isfinite().sum()) == B * K * E


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated(activation: str, dtype: torch.dtype) -> None:
    both = 3 * draw(3, 2 * 301, dtype=dtype)
    gate, up = both.double().chunk(2, -1)
    assert_near(gpu.gated(both, activation), ACTIVATIONS[activation](gate) * up, dtype)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm(kind: str, biased: bool, dtype: torch.dtype) -> None:
    D, eps = 97, 1e-5
    x, residual, weight, bias = draw(3, D), 2 + draw(3, D), draw(D), draw(D)
    x, residual, weight, bias = (t.to(dtype) for t in (x, residual, weight, bias))
    total, normed = gpu.add_norm(x, residual, weight, bias if biased else None, eps, kind)
    assert_near(total, x.double() + residual.double(), dtype)
    stream = total.double()
    wide = weight.double()
    expected = F.rms_norm(stream, (D,), wide, eps) if kind == "rms" else F.layer_norm(stream, (D,), wide, None, eps)
    assert_near(normed, expected + bias.double() if biased else expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 8, 32])
def test_top_log_probs(k: int, dtype: torch.dtype) -> None:
    logits = 3 * draw(3, 1031, dtype=dtype)
    logits[1, ::3] = logits[1, 0]  # ties, within a part and across
    logits[1, 1::3] = -1.0
    logits[2, 20:] = float("-inf")  # fewer than 32 tokens are allowed
    logits[2, 3], logits[2, 5] = 0.0, -0.0
    values, ids = gpu.top_log_probs(logits, k, part=256, width=16)
    expected = logits.cpu().double().log_softmax(-1)
    order = torch.sort(expected, descending=True, stable=True)
    assert torch.equal(ids.cpu(), order.indices[:, :k])
    wanted = order.values[:, :k]
    assert torch.equal(values.cpu().isinf(), wanted.isinf())
    torch.testing.assert_close(values.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU: graphs")
def test_kernels_replay_in_a_graph() -> None:
    x = draw(1, 256, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(draw(512, 256, dtype=torch.bfloat16), requires_grad=False)
    k, v = (draw(8, 4, 16, 64, dtype=torch.bfloat16) for _ in range(2))
    table = torch.arange(8, dtype=torch.int32, device=DEVICE)[None]
    counts = torch.tensor([100], dtype=torch.int32, device=DEVICE)
    q = draw(1, 4, 64, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        looked = gpu.paged_attention(q, k, v, table, counts, 0.125)
        return gpu.linear(x, weight), looked, *gpu.top_log_probs(gpu.linear(x, weight), 4)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for new_count in (100, 3, 128):
        counts.fill_(new_count)
        x.normal_()
        graph.replay()
        for replayed, plain in zip(outputs, step(), strict=True):
            assert torch.equal(replayed, plain)
