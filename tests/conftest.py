"""Marks every test that runs Triton kernels, so that `TRITON_INTERPRET=1 pytest -m triton` finds them all."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    for item in items:
        if "triton" in getattr(getattr(item, "callspec", None), "params", {}).values():
            item.add_marker("triton")
