"""Where polydecode keeps files of its own."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where converted GGUF files and compiled kernels are kept: $POLYDECODE_CACHE, or the platform's own cache folder."""
    import platformdirs

    given = os.environ.get("POLYDECODE_CACHE")
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("polydecode"))
