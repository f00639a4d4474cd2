"""torch.compile: settings for which torch has no public name."""

from __future__ import annotations

import os

from clearhead.kernels.native_library import cache_folder


def keep_compiled_code() -> None:
    """Keep what torch.compile makes for the next process, in our cache folder; torch's own is among temporary files."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    # By default torch keeps no graph with an autograd.Function in it, as our loss is.
    from torch._functorch import config

    config.autograd_cache_allow_custom_autograd_functions = True
