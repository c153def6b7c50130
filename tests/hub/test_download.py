"""Names of the hub: which words are one, and what is said when there is no such model or no network."""

from __future__ import annotations

import time

import pytest

from mlm.config.errors import InputError
from mlm.config.experiment import is_hub_name
from mlm.hub import load_masked_lm
from mlm.hub.download import model_folder


@pytest.mark.parametrize("name", ["google-bert/bert-base-uncased", "a/b", "FacebookAI/xlm-roberta_base.v1"])
def test_owner_and_name_are_a_hub_name(name):
    assert is_hub_name(name)


@pytest.mark.parametrize("name", ["bert", "a/b/c", "/a/b", "./a", "../b", "a/", "a/..", "a b/c", "a/b\n", ""])
def test_nothing_else_is(name):
    assert not is_hub_name(name)


def test_path_that_begins_with_a_folder_here_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("runs/first")
    (tmp_path / "runs").mkdir()
    assert not is_hub_name("runs/first")
    assert model_folder("runs/first").parts == ("runs", "first")


def test_unreachable_hub_is_one_line_within_seconds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    with pytest.raises(InputError, match="nobody/nothing is no folder here, and the hub cannot be") as caught:
        load_masked_lm("nobody/nothing")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 10


@pytest.mark.network
def test_tiny_model_of_the_hub_is_read(tmp_path):
    assert load_masked_lm("prajjwal1/bert-tiny").config.hidden_size == 128
