"""Sizes at which a computation changes its form, and bits. Without torch, so that costs/ forecasts with the same numbers."""

# Up to this many pairs of a query and a key a mask or bias is written out, once for all layers; above, strip by strip.
WRITTEN_OUT = 2**24

# From so many keys on, kernels skip what a sparse pattern leaves out; below, its pairs are written out.
SPARSE_KEYS = {"cpu": 1024, "cuda": 2048}

# Products in float32 on the CPU go to oneDNN from so many rows on (below, our own kernels win), and for weights of up to so many
# numbers (it copies the weight into its own layout).
ONEDNN_ROWS, ONEDNN_WEIGHT = 33, 2**24

# Logits that the chunked loss holds at once.
LOSS_CHUNK = {"cpu": 2**26, "cuda": 2**28}


# Kinds of quantization: bits of a weight, and of the inputs that it is multiplied with (quantization/integer.py).
QUANTIZATIONS = {"int8": (8, 16), "int4": (4, 16), "w8a8": (8, 8), "w4a8": (4, 8)}


def is_narrow(window: int, length: int) -> bool:
    """Whether a window is so small against the length that leaving keys out beats one large call."""
    return 0 < 2 * window < length and length >= 1024


def is_skipped(window: int, sparsity: str, length: int, *, cuda: bool) -> bool:
    """Whether a kernel leaves out what a window or a pattern forbids, so that no pairs are written out."""
    return is_narrow(window, length) or (bool(sparsity) and length >= SPARSE_KEYS["cuda" if cuda else "cpu"])
