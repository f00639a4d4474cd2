"""How tokens, pictures and sound enter, and how tokens leave."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from clearhead.errors import InputError
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.layers.media import FrameEmbedding, PatchEmbedding

# float64 against float64, sums of up to a few hundred terms near 1
TIGHT = dict(rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("scale", [False, True])
def test_tokens_are_looked_up(dtype: torch.dtype, scale: bool) -> None:
    embedding = TokenEmbedding(11, 7, scale=scale)
    tokens = torch.tensor([[0, 10, 3], [3, 3, 5]])
    expected = embedding.weight[tokens] * (math.sqrt(7) if scale else 1)
    # one float32 product
    torch.testing.assert_close(embedding(tokens.to(dtype)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("tokens", "got"), [([[0, 11]], "0 .. 11"), ([[3, -1]], "-1 .. 3")])
def test_ids_out_of_range(tokens: list[list[int]], got: str) -> None:
    with pytest.raises(InputError, match=r"token ids must be 0 \.\. 10 \(vocab_size=11\); got .*tokenizer\?") as error:
        TokenEmbedding(11, 7)(torch.tensor(tokens))
    assert got in str(error.value)


@pytest.mark.parametrize(
    "tokens",
    [torch.tensor([1, 2]), torch.zeros(1, 2, 3).long(), torch.zeros(1, 2), torch.zeros(1, 2).bool()],
    ids=["one text", "three axes", "floats", "booleans"],
)
def test_what_is_no_batch_of_ids(unchecked: None, tokens: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"whole numbers, of shape \(batch, length\).*use tokens\[None\]") as error:
        TokenEmbedding(11, 7)(tokens)
    assert f"got {tokens.dtype} of shape {tuple(tokens.shape)}" in str(error.value)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)], ids=["no token", "no text"])
def test_no_token_at_all(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"hold no token; give at least one") as error:
        TokenEmbedding(11, 7)(torch.zeros(shape).long())
    assert str(shape) in str(error.value)


def test_patches_are_unfolded_and_projected() -> None:
    """Each patch's numbers, channel by channel and row by row, times one matrix; the class token in front."""
    embedding = PatchEmbedding(d_model=13, image_size=15, patch_size=5, n_channels=2).double()
    nn.init.normal_(embedding.class_token)
    pictures = torch.randn(3, 2, 15, 15, dtype=torch.float64)
    patches = nn.functional.unfold(pictures, kernel_size=5, stride=5).transpose(1, 2)  # (3, 9, 50)
    projection = embedding.projection
    expected = patches @ projection.weight.flatten(1).T + projection.bias
    out = embedding(pictures)
    torch.testing.assert_close(out[:, 1:], expected, **TIGHT)
    assert torch.equal(out[:, 0], embedding.class_token.expand(3, -1))


def test_patches_are_in_reading_order() -> None:
    embedding = PatchEmbedding(d_model=1, image_size=6, patch_size=2, n_channels=1)
    nn.init.constant_(embedding.projection.weight, 1 / 4)
    nn.init.zeros_(embedding.projection.bias)
    place = torch.arange(9.0).reshape(3, 3)
    picture = place.repeat_interleave(2, 0).repeat_interleave(2, 1)[None, None]
    assert embedding(picture)[0, 1:, 0].tolist() == list(range(9))


@pytest.mark.parametrize("shape", [(3, 2, 15, 14), (3, 3, 15, 15), (2, 15, 15)], ids=["size", "channels", "rank"])
def test_pictures_of_another_shape(unchecked: None, shape: tuple[int, ...]) -> None:
    embedding = PatchEmbedding(d_model=13, image_size=15, patch_size=5, n_channels=2)
    with pytest.raises(InputError, match=r"shape \(batch, 2, 15, 15\); got .*; resize them first") as error:
        embedding(torch.randn(shape))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("n_frames", [8, 11])
def test_frames_are_two_convolutions(n_frames: int) -> None:
    """Each written as a sum over its three taps; the second takes every second frame."""
    embedding = FrameEmbedding(d_model=7, n_mels=5).double()
    frames = torch.randn(2, 5, n_frames, dtype=torch.float64)

    def convolve(x: torch.Tensor, layer: nn.Conv1d, stride: int) -> torch.Tensor:
        padded = nn.functional.pad(x, (1, 1))
        columns = []
        for at in range(0, x.shape[-1], stride):
            taps = [padded[:, :, at + tap] @ layer.weight[:, :, tap].T for tap in range(3)]
            columns.append(sum(taps) + layer.bias)
        return nn.functional.gelu(torch.stack(columns, -1))

    expected = convolve(convolve(frames, embedding.conv1, 1), embedding.conv2, 2).transpose(1, 2)
    torch.testing.assert_close(embedding(frames), expected, **TIGHT)
    assert expected.shape[1] == math.ceil(n_frames / 2)


@pytest.mark.parametrize("shape", [(2, 11, 5), (5, 11)], ids=["axes swapped", "rank"])
def test_sound_of_another_shape(unchecked: None, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"shape \(batch, 5 mel bands, frames\); got .*axis order") as error:
        FrameEmbedding(d_model=7, n_mels=5)(torch.randn(shape))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("bias", ["none", "learned", "fixed"])
@pytest.mark.parametrize("scale", [1.0, 7**-0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_head_is_a_product_with_each_tokens_vector(bias: str, scale: float, tied: bool) -> None:
    head = TokenHead(d_model=7, vocab_size=11, tied=tied, bias=bias, scale=scale).double()
    embedding = torch.randn(11, 7, dtype=torch.float64)
    if head.bias is not None:
        nn.init.normal_(head.bias)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    weight = embedding if tied else head.weight
    expected = x * scale @ weight.T + (0 if head.bias is None else head.bias)
    torch.testing.assert_close(head(x, embedding), expected, **TIGHT)


def test_head_saves_what_is_its_own() -> None:
    """A tied weight is the embedding's and saved there; a fixed bias is saved, and not trained."""
    tied = TokenHead(d_model=7, vocab_size=11, tied=True, bias="fixed")
    assert set(tied.state_dict()) == {"bias"}
    assert not list(tied.parameters())
    learned = TokenHead(d_model=7, vocab_size=11, bias="learned")
    assert {name for name, _ in learned.named_parameters()} == {"weight", "bias"}
    assert set(TokenHead(d_model=7, vocab_size=11).state_dict()) == {"weight"}


def test_a_tied_head_trains_the_embedding() -> None:
    embedding, head = TokenEmbedding(11, 7), TokenHead(d_model=7, vocab_size=11, tied=True)
    head(torch.randn(2, 3, 7), embedding.weight).sum().backward()
    assert (embedding.weight.grad != 0).all()


def test_head_with_berts_transform() -> None:
    """norm(gelu(dense(x))) first, as BERT's masked language model does; the scale falls after it."""
    head = TokenHead(d_model=7, vocab_size=11, bias="learned", transform=("gelu", nn.LayerNorm(7)), scale=0.3).double()
    nn.init.normal_(head.norm.weight)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    inner = head.norm(nn.functional.gelu(x @ head.dense.weight.T + head.dense.bias))
    torch.testing.assert_close(head(x), inner * 0.3 @ head.weight.T + head.bias, **TIGHT)
    assert {"dense.weight", "dense.bias", "norm.weight", "norm.bias"} < set(head.state_dict())
