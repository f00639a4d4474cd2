"""torch.compile: settings for which torch has no public name."""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from pathlib import Path

from clearhead.kernels.native_library import cache_folder


def keep_compiled_code() -> None:
    """Keep what torch.compile makes for the next process, in our cache folder; torch's own is among temporary files."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    # By default torch keeps no graph with an autograd.Function in it, as our loss is.
    from torch._functorch import config

    config.autograd_cache_allow_custom_autograd_functions = True
    # A remark to torch's developers about a softmax over few numbers, as a classifier's.
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly", UserWarning)


def missing_for_compile() -> list[str]:
    """What torch.compile needs on the CPU and does not find: a C++ compiler, Python's headers."""
    name, headers = os.environ.get("CXX") or "g++", Path(sysconfig.get_path("include")) / "Python.h"
    return [what for what, there in ((name, shutil.which(name)), ("Python.h", headers.is_file())) if not there]
