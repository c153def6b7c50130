"""Nothing is saved that others would read differently; they are transformers and our own reader."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers

import mlm.hub.pretrained as pretrained
import mlm.hub.saving as saving
from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.hub import load_pretrained, save_pretrained
from mlm.hub.families import BERT
from mlm.model import MaskedLM, SequenceClassifier

MODERN = ModelConfig(
    vocab_size=128, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32
)
BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "head_bias"), True)
CLASSIC = replace(
    MODERN,
    norm_position="post",
    position_embedding="learned",
    activation="gelu",
    type_vocab_size=2,
    pooling=None,
    **BIASES,
)
ROWS = {
    "input_ids": torch.arange(5, 35).reshape(2, 15),
    "attention_mask": torch.tensor([[1] * 15, [1] * 9 + [0] * 6]),
}


def card_of(folder):
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("config", [MODERN, CLASSIC], ids=["modern", "classic"])
def test_card_tells_both_differences(config, tmp_path, tokenizer):
    folder = save_pretrained(tmp_path / "model", MaskedLM(config), tokenizer, 32, "# A", ROWS)
    found = re.search(
        r"on 2 rows of real text: largest difference of a logit (\S+) by mlm and (\S+) by (\w+)"
        rf" of transformers {re.escape(transformers.__version__)}",
        card_of(folder),
    )
    assert found, card_of(folder)
    assert float(found[1]) == 0.0
    assert float(found[2]) < 1e-5
    assert found[3] == json.loads((folder / "config.json").read_text())["architectures"][0]


def test_classifier_is_compared_with_its_token_types(tmp_path, tokenizer):
    model = SequenceClassifier(CLASSIC, ClassifierConfig(("no", "yes")))
    rows = ROWS | {"token_type_ids": (ROWS["input_ids"] > 20).long()}
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "", rows)
    assert "by BertForSequenceClassification of transformers" in card_of(folder)


def test_own_format_is_compared_with_our_reader_only(tmp_path, tokenizer):
    folder = save_pretrained(tmp_path / "model", MaskedLM(replace(MODERN, norm="rmsnorm")), tokenizer, 32, "")
    assert "on 1 rows of random tokens: largest difference of a logit 0.0e+00 by mlm." in card_of(folder)


def test_a_table_that_is_wrong_leaves_no_folder(tmp_path, tokenizer, monkeypatch):
    """A field that the stock class reads otherwise: our reader is happy with it, transformers is not."""
    wrong = replace(BERT, values={"activation": {"gelu": "relu", "relu": "gelu"}})
    monkeypatch.setattr(pretrained, "FAMILIES", (wrong,))
    monkeypatch.setattr(saving, "family_of", lambda *_: wrong)
    model = MaskedLM(replace(CLASSIC, initializer_range=0.3))
    with pytest.raises(InputError, match=r"read back by BertForMaskedLM of transformers .* differs by"):
        save_pretrained(tmp_path / "model", model, tokenizer, 32, "", ROWS)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_the_stock_class_does_not_know_leaves_no_folder(tmp_path, tokenizer, monkeypatch):
    wrong = replace(BERT, modules={**BERT.modules, "head.dense": "cls.predictions.transform.layer"})
    monkeypatch.setattr(pretrained, "FAMILIES", (wrong,))
    monkeypatch.setattr(saving, "family_of", lambda *_: wrong)
    with pytest.raises(InputError, match=r"transformers cannot read it .*transform\.layer"):
        save_pretrained(tmp_path / "model", MaskedLM(CLASSIC), tokenizer, 32, "", ROWS)
    assert list(tmp_path.iterdir()) == []


def test_model_is_compared_as_it_is_in_float32_and_left_alone(tmp_path, tokenizer):
    model = MaskedLM(MODERN).bfloat16().train()
    save_pretrained(tmp_path / "model", model, tokenizer, 32, "", ROWS)
    assert model.training
    assert model.head.bias.dtype == torch.bfloat16
    again = load_pretrained(tmp_path / "model")
    assert torch.equal(again.encoder.embeddings.token.weight, model.encoder.embeddings.token.weight.float())


def test_settings_of_the_tokenizer_come_along(tmp_path, tokenizer):
    start = save_pretrained(tmp_path / "start", MaskedLM(MODERN), tokenizer, 32, "")
    path = start / "tokenizer_config.json"
    said = {"truncation_side": "left", "do_lower_case": True, "auto_map": {"AutoTokenizer": "code.Tokenizer"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | said | {"model_max_length": 20}))
    folder = save_pretrained(tmp_path / "model", MaskedLM(MODERN), tokenizer, 20, "", start=start)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.truncation_side, theirs.model_max_length) == ("left", 20)
    assert "auto_map" not in (folder / "tokenizer_config.json").read_text()
    assert saving.describe_tokenizer(tokenizer, MODERN, 20, start)["do_lower_case"] is True


@pytest.mark.parametrize(("said", "expected"), [(20, 20), (10**30, 32), (64, 32), (None, 32)])
def test_longest_row_is_what_the_folder_names_and_the_model_sees(said, expected, tmp_path):
    from mlm.hub import longest_row

    content = {} if said is None else {"model_max_length": said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert longest_row(tmp_path, MODERN) == expected
    assert longest_row(tmp_path, replace(MODERN, max_position_embeddings=None)) == (
        said if said is not None and said < 1e9 else None
    )
