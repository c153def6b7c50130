"""Shared small inputs; every test runs offline, with its caches in a temporary folder."""

import os
import random

import pytest
from glue_folder import write_glue

os.environ.pop("WANDB_MODE", None)  # it would win over what a test configures
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SUBJECTS = ["the harbour", "a small boat", "the old keeper", "every lamp", "our neighbour", "the grey gull"]
VERBS = ["waits for", "remembers", "follows", "answers", "leaves behind", "belongs to"]
OBJECTS = [
    "the evening tide",
    "a letter from the north",
    "the lighthouse",
    "the market",
    "heavy rain",
    "her brother",
]


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Sentences with enough structure to be learnt, 1 to 6 in a document."""
    draw = random.Random(seed)
    return [
        " ".join(
            f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)} ."
            for _ in range(draw.randint(1, 6))
        )
        for _ in range(count)
    ]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MLM_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("MLM_RUN_NAME", raising=False)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(300)


@pytest.fixture
def glue_dir(tmp_path):
    """The ten official folders, with made-up sentences."""
    return write_glue(tmp_path / "glue")


@pytest.fixture(scope="session")
def tokenizer(documents):
    from mlm.config.data import TokenizerConfig
    from mlm.data.vocabulary import train_tokenizer

    return train_tokenizer(documents, TokenizerConfig(vocab_size=120))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny tensors gain nothing from threads, and waiting threads cost a lot on a busy machine."""
    import torch

    torch.set_num_threads(1)
