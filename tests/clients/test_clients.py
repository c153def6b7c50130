"""Other people's tools read our model folders and give our numbers: `pytest -m clients`.

Each set of tools has an environment of its own, made at the first call and kept (three minutes, 3 GB): in the
folder that MLM_CLIENTS names, or `.clients/`.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from mlm import Predictor
from mlm.config.data import TokenizerConfig
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.data.vocabulary import train_tokenizer
from mlm.hub import load_pretrained, model_card, save_pretrained
from mlm.model import MaskedLM, SequenceClassifier
from mlm.tokenizer import SpecialTokens, num_ids

pytestmark = pytest.mark.clients
ROOT = Path(__file__).parents[2]
TOOLS = {
    "4": ("transformers==4.57.6", "sentence-transformers==5.7.0", "peft==0.21.2", "accelerate"),
    "5": ("transformers==5.24.0", "sentence-transformers==6.2.0", "peft==0.21.2", "accelerate"),
}
LENGTH = 24
MODERN = ModelConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
)
BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "head_bias"), True)
BERT = replace(
    MODERN, norm_position="post", norm_eps=1e-12, position_embedding="learned", activation="gelu",
    type_vocab_size=2, pooling="cls_tanh", **BIASES,
)  # fmt: skip
ROBERTA = replace(BERT, type_vocab_size=1, position_offset=2, norm_eps=1e-5)
TEXTS = [
    "the harbour waits for the evening tide",
    "पोस्ट यहाँ हिन्दी में पढ़ें क़लम",
    "বাংলা ভাষায় লেখা পড়ুন",
    "தமிழ் மொழியில் எழுதுங்கள்",
    "แม่น้ำ ไหล ผ่าน เมือง",
    "パンダ ハンダ かぎ かき ガラス",
    "오늘은 날씨가 좋습니다",
    "漢字 繁體 简体 字典",
    "كِتَابٌ جميل في المكتبة",
    "שָׁלוֹם עולם טוב",
    "Ελλάδα καλημέρα ΣΊΣΥΦΟΣ",
    "Йод ёлка їжак паде́ж ўсё",
    "Łódź café naïve İstanbul straße cafe\u0301",
    "C1CCCCC1 c1ccccc1 def f(x): E11.9 a\x85b\u2028c",
    "the keeper remembers a letter from the north " * 6,
]
ENCODERS = {
    "modernbert": (MODERN, "wordpiece", True),
    "modernbert-bpe": (MODERN, "bpe", False),
    "bert": (BERT, "wordpiece", True),
    "bert-cased": (BERT, "wordpiece", False),
    "roberta": (ROBERTA, "bpe", False),
}
HEADS = {
    "classes": (MODERN, ClassifierConfig(("no", "maybe", "yes")), False),
    "pairs": (BERT, ClassifierConfig(("no", "maybe", "yes"), text_pairs=True), True),
    "number": (BERT, ClassifierConfig(("score",), "regression", text_pairs=True), True),
    "labels": (ROBERTA, ClassifierConfig(("a", "b", "c"), "multilabel"), False),
}


def python_with(tools: str) -> Path:
    """Return the Python of an environment that has a set of tools; make it if there is none."""
    folder = Path(os.environ.get("MLM_CLIENTS", ROOT / ".clients")) / tools
    stamp, python = folder / "tools.txt", folder / "bin" / "python"
    wanted = "\n".join(("torch~=2.13.0", *TOOLS[tools]))
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted.split("\n")], check=True)
        stamp.write_text(wanted)
    return python


@cache
def tokenizer_of(kind, lowercase):
    return train_tokenizer(TEXTS * 3, TokenizerConfig(type=kind, vocab_size=400, lowercase=lowercase))


def write(folder, config, kind, lowercase, head=None):
    tokenizer = tokenizer_of(kind, lowercase)
    special = SpecialTokens.from_tokenizer(tokenizer)
    offset = special.pad + 1 if config.position_offset else 0
    config = replace(config, vocab_size=num_ids(tokenizer), position_offset=offset)
    torch.manual_seed(0)
    model = SequenceClassifier(config, head) if head else MaskedLM(config)
    with torch.no_grad():  # larger than a new model's, so that a mistake shows
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    save_pretrained(folder, model, tokenizer, LENGTH, model_card("clients", config, {}, head))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    work = tmp_path_factory.mktemp("models")
    written = {name: write(work / name, *parts) for name, parts in ENCODERS.items()}
    return written | {
        name: write(work / name, config, "wordpiece", True, head) for name, (config, head, _) in HEADS.items()
    }


@pytest.fixture(scope="module", params=list(TOOLS))
def answers(request, folders, tmp_path_factory):
    """What the tools say of every folder."""
    job = {
        name: {
            "folder": folders[name],
            "texts": TEXTS,
            "token": tokenizer_of(*ENCODERS[name][1:]).id_to_token(4),
        }
        for name in ENCODERS
    }
    job |= {
        name: {"folder": folders[name], "texts": TEXTS, "pairs": TEXTS[::-1] if pairs else None}
        for name, (_, _, pairs) in HEADS.items()
    }
    work = tmp_path_factory.mktemp("client")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(work),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python_with(request.param), ROOT / "tests" / "clients" / "client.py"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transformers"].startswith(request.param)
    return found


@pytest.mark.parametrize("name", list(ENCODERS))
def test_ids_and_words_of_a_text_are_ours(answers, folders, name):
    ours = Predictor(folders[name]).tokenizer
    ours.no_truncation()
    found = answers[name]
    assert found["ids"] == [ours.encode(text).ids for text in TEXTS]
    assert found["model_max_length"] == LENGTH
    assert not any(piece.startswith(" ") for pieces in found["pieces"] for piece in pieces)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_logits_and_fillings_are_ours(answers, folders, name):
    predictor, found = Predictor(folders[name]), answers[name]
    model = load_pretrained(folders[name])
    for text, theirs in zip(TEXTS[:4], found["logits"], strict=True):
        ids = torch.tensor([found["ids"][TEXTS.index(text)][: LENGTH - 1]])
        if len(theirs) < LENGTH:
            with torch.no_grad():
                ours = model(ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None])
            torch.testing.assert_close(torch.tensor(theirs), ours.reshape(len(theirs), -1), atol=2e-4, rtol=0)
    mask = predictor.tokenizer.id_to_token(4)
    (ours,) = predictor.fill_mask(f"{TEXTS[0]} {mask}", top_k=3)
    assert [token for token, _ in found["filled"]] == [
        predictor.tokenizer.token_to_id(one.token) for one in ours
    ]
    assert [score for _, score in found["filled"]] == pytest.approx(
        [one.probability for one in ours], abs=1e-4
    )


@pytest.mark.parametrize("name", list(ENCODERS))
def test_vectors_are_those_of_embed(answers, folders, name):
    np.testing.assert_allclose(answers[name]["vectors"], Predictor(folders[name]).embed(TEXTS[:4]), atol=1e-5)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_every_load_is_the_same_model_and_trains(answers, name):
    found = answers[name]
    assert found["same_pooler"]
    assert found["adapter_survives"]
    assert len(found["trained"]) == 3
    assert all(0 < loss < 20 for loss in found["trained"])


@pytest.mark.parametrize("name", [*ENCODERS, *HEADS])
def test_nothing_is_newly_initialised_and_no_token_differs(answers, name):
    told = [
        text for text in answers[name]["logged"] if "newly initialized" in text or "special tokens" in text
    ]
    assert not told


@pytest.mark.parametrize("name", list(HEADS))
def test_scores_of_classifiers_are_ours(answers, folders, name):
    _, head, has_pairs = HEADS[name]
    pairs = TEXTS[::-1] if has_pairs else None
    predictor = Predictor(folders[name])
    ours, found = predictor.predict(TEXTS, pairs), answers[name]
    for one, theirs in zip(ours, found["scores"], strict=True):
        if head.label_type == "regression":
            assert list(theirs.values()) == pytest.approx([one.label], abs=1e-4)
        else:
            assert theirs == pytest.approx(one.probabilities, abs=1e-4)
    if name == "number":
        assert found["cross"] == pytest.approx([one.label for one in ours], abs=1e-4)
