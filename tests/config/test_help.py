from __future__ import annotations

import re

import pytest

from mlm.config.commands import EvaluateConfig, FillMaskConfig, PretrainConfig
from mlm.config.help import format_help
from mlm.config.parse import Keys


@pytest.fixture
def text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return format_help(PretrainConfig, "train.py")


def test_every_key_with_its_docstring_type_and_default(text):
    for key in Keys.of(PretrainConfig).types:
        assert len(re.findall(rf"\n --{key}\s", text)) == 1
    flat = " ".join(text.split())
    assert "--optimizer.lr Peak learning rate. [float = 0.004]" in flat
    assert "[isolate|concat|none = isolate]" in flat
    assert "[list = python-docs]" in flat
    assert "[int|null = null]" in flat
    assert "[2 numbers = 0.9,0.95]" in flat
    assert "bert-base, bert-mini, bert-small, default" in flat


def test_two_screens_at_most(text):
    lines = text.splitlines()
    assert len(lines) <= 160
    assert max(map(len, lines)) <= 120


def test_every_key_has_help(text):
    for config in (PretrainConfig, EvaluateConfig, FillMaskConfig):
        keys = Keys.of(config)
        help_text = format_help(config, "mlm")
        assert "None [" not in help_text
        assert all(f"--{key}" in help_text.split() for key in keys.types)


def test_required_and_positional_keys():
    text = format_help(FillMaskConfig, "mlm fill-mask")
    assert "TEXT ..." in text.splitlines()[0]
    words = "Model folder, checkpoint, or OWNER/NAME on the Hugging Face hub. [text, required]"
    assert words in " ".join(text.split())


def test_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    text = format_help(PretrainConfig, "train.py")
    assert "[adamw|muon = muon]" in text
