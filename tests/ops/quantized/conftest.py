"""Fixtures of the tests of quantised products."""

import pytest

from jaxfused.runtime import cuda_library


@pytest.fixture
def built(monkeypatch):
    """Pretends that the CUDA library is loaded; nothing in it is called."""
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "register", lambda: None)
    monkeypatch.setattr(
        cuda_library, "architectures", lambda: ("75-real", "80-real", "89-real", "90")
    )
