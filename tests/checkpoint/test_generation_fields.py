"""What loading reads beside the weights: how texts start and end, numbers of a GGUF header, layouts of tensors in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clearhead.checkpoint import gguf
from clearhead.checkpoint.loading import read_generation
from clearhead.checkpoint.sentence_transformers import max_text_length, write_modules
from clearhead.checkpoint.tensor_names import Match
from clearhead.errors import CheckpointError


def test_minus_one_is_no_token() -> None:
    """As an index it would be the vocabulary's last one."""
    roles = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), -1)
    lists = dict(suppress_tokens=[-1, 7], begin_suppress_tokens=[-1], bad_words_ids=[[-1], [9]])
    for fields in (
        roles | lists,
        {name: value if isinstance(value, list) else [value] for name, value in roles.items()},
    ):
        found = read_generation({}, fields)
        assert (found.bos, found.eos, found.pad, found.decoder_start) == (None, (), None, None)
        assert found.begin_suppress == ()
        assert found.suppress == ((7, 9) if "suppress_tokens" in fields else ())


def test_generation_fields_of_whisper() -> None:
    theirs = {"alignment_heads": [[1, 0], [2, 3]], "forced_decoder_ids": [[1, 7], [2, None], [3, 9], [5, 4]]}
    found = read_generation({"bos_token_id": [5, 6], "eos_token_id": [8, 9], "pad_token_id": []}, theirs)
    assert found.alignment_heads == ((1, 0), (2, 3))
    assert found.forced_start == (7, None, 9)
    assert (found.bos, found.eos, found.pad) == (5, (8, 9), None)


def test_numbers_of_a_gguf_header() -> None:
    path = Path("x.gguf")
    assert gguf._number(path, {}, "a.b", 2.5) == 2.5
    assert gguf._number(path, {"a.b": 3}, "a.b", 2.5) == 3.0
    assert gguf._whole(path, {"n": 2**31 - 1}, "n") == 2**31 - 1
    assert gguf._whole(path, {}, "n", 7) == 7
    for wrong in (0, -1, 2**31, 2.0, True, "3", None):
        with pytest.raises(CheckpointError, match=r"x\.gguf has .* as its 'n'.*one number above 0"):
            gguf._whole(path, {"n": wrong}, "n")


@pytest.mark.parametrize("layout", ["halves_in", "halves_out", "interleaved"])
def test_layouts_of_pairs(layout: str) -> None:
    """Against the definition, index by index: as the file's order and back."""
    n, d_head = 12, 6
    if layout == "interleaved":  # in each head, the file's (2i, 2i + 1) are our (i, i + d_head / 2)
        places = [h * d_head + i + half * d_head // 2 for h in range(n // d_head) for i in range(3) for half in (0, 1)]
    else:  # the file's (i, i + n / 2) are our (2i, 2i + 1)
        places = [*range(0, n, 2), *range(1, n, 2)]
    axis = 1 if layout == "halves_in" else 0
    ours = torch.randn(5, n) if axis else torch.randn(n, 5)
    theirs = ours.index_select(axis, torch.tensor(places))
    match = Match("theirs", ("ours",), layout, d_head)
    assert torch.equal(match.to_file([ours]), theirs)
    assert torch.equal(match.from_file(theirs), ours)


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    assert max_text_length(tmp_path, 512) == 512
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    assert max_text_length(tmp_path, 512) == 128
    assert max_text_length(tmp_path, 64) == 64
    files = write_modules([{"type": "Transformer"}, {"type": "Pooling", "word_embedding_dimension": 4}])
    listed = files["modules.json"]
    assert [(one["idx"], one["name"], one["path"]) for one in listed] == [(0, "0", ""), (1, "1", "1_Pooling")]
    assert files["1_Pooling/config.json"] == {"word_embedding_dimension": 4}
