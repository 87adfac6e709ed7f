"""Settings of all tests: one thread (the tensors are tiny), no deadlines for hypothesis (first calls import lazily)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("onegraph", deadline=None, print_blob=True)
settings.load_profile("onegraph")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test that fails must fail again."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
