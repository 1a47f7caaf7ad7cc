"""Fixtures shared by the driver's tests: the real demo model and a tiny random one with the same tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic.models import smollm2_path, tiny_policy


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The local folder of SmolLM2-135M-Instruct, fetched at first use."""
    return smollm2_path()


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def tiny_model(tokenizer):
    """A tiny random Llama with the tokenizer's vocabulary; tests that change weights make their own."""
    return tiny_policy(tokenizer)
