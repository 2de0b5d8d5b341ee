"""What every test shares: one thread, no network, quiet transformers, and hypothesis profiles without a clock."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests", deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile("tests")
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _seeded():
    """Each test starts from the same global seed, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_token_cache(tmp_path_factory, monkeypatch):
    """Tokens are cached per test, never in the user's folder; kernels and dequantised models stay where they are."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("polydecode.data.token_cache.cache_folder", lambda: folder)


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
