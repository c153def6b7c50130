"""The model card is valid Markdown with the front matter the hub expects."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard

from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.evaluation.predictor import Predictor
from mlm.hub import load_classifier, model_card, save_pretrained
from mlm.model import MaskedLM
from mlm.model.heads import SequenceClassifier

CONFIG = ModelConfig(
    vocab_size=128, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=24
)
FACTS = {"validation loss": 3.94871, "tokens": 1_600_000}


def test_front_matter_is_read_by_the_hub_library():
    card = ModelCard(model_card("novels", CONFIG, FACTS))
    assert card.data.pipeline_tag == "fill-mask"
    assert card.data.library_name == "transformers"
    assert card.data.license is None
    assert card.data.base_model is None


def test_card_names_the_model_of_the_hub_that_training_began_from():
    start = f"owner/tiny@{7:040x}"
    for head in (None, ClassifierConfig(("no", "yes"))):
        card = ModelCard(model_card("novels", CONFIG, FACTS, head, start))
        assert card.data.base_model == "owner/tiny"
        assert (
            f"| fact | value |\n| --- | --- |\n| started from | {start} |\n| validation loss |" in card.text
        )
    assert "started from" not in model_card("novels", CONFIG, FACTS)


def test_card_names_model_sizes_and_facts():
    card = model_card("novels", CONFIG, FACTS)
    assert "# novels\n" in card
    assert "ModernBertForMaskedLM.from_pretrained(path)" in card
    assert "| validation loss | 3.949 |" in card
    assert "| tokens | 1600000 |" in card
    assert "| hidden_size | 16 |" in card
    assert "| embeddings | 2,048 |" in card


def test_example_of_a_stock_model_runs(tmp_path, monkeypatch, tokenizer):
    card = model_card("novels", CONFIG, {})
    save_pretrained(tmp_path / "novels", MaskedLM(CONFIG), tokenizer, 32, card)
    monkeypatch.chdir(tmp_path)
    code = (tmp_path / "novels" / "README.md").read_text().split("```")[1].removeprefix("python\n")
    names: dict[str, object] = {}
    exec(code.replace("path/to/model", "novels"), names)
    assert type(names["model"]).__name__ == "ModernBertForMaskedLM"


def test_card_of_our_own_format_names_our_loader():
    own = replace(CONFIG, norm="rmsnorm")
    card = model_card("novels", own, {})
    assert 'load_pretrained("path/to/model")' in card
    assert "transformers" in yaml.safe_load(card.split("---")[1])["library_name"]


def test_card_of_a_classifier_names_its_classes():
    labels = [f"class {number}" for number in range(30)]
    head = ClassifierConfig(tuple(labels))
    card = model_card("reviews", CONFIG, FACTS, head)
    assert ModelCard(card).data.pipeline_tag == "text-classification"
    assert "Labels: class 0, class 1," in card
    assert "class 19, ...." in card
    assert "ModernBertForSequenceClassification.from_pretrained(path)" in card
    assert "| head | 782 |" in card  # 16 x 16 dense, 16 norm, 30 x (16 + 1) classifier
    own = model_card("reviews", replace(CONFIG, norm="rmsnorm"), FACTS, head)
    assert 'load_pretrained("path/to/model")' in own


def test_no_file_of_a_model_folder_names_a_path_of_this_machine(tmp_path, tokenizer):
    card = model_card("novels", CONFIG, FACTS)
    first = save_pretrained(tmp_path / "runs/novels/model", MaskedLM(CONFIG), tokenizer, 32, card)
    settings = first / "tokenizer_config.json"
    written = json.loads(settings.read_text())
    written |= {"name_or_path": str(first), "vocab_file": str(first)}  # as other programs do
    settings.write_text(json.dumps(written))
    head = ClassifierConfig(("no", "yes"))
    classifier = load_classifier(first, head)
    card = model_card("reviews", CONFIG, FACTS, head)
    second = save_pretrained(tmp_path / "runs/reviews/model", classifier, tokenizer, 32, card, start=first)
    settings.unlink()
    for file in (file for folder in (first, second) for file in folder.rglob("*") if file.is_file()):
        assert str(tmp_path).encode() not in file.read_bytes(), file


@pytest.mark.parametrize(
    ("label_type", "labels", "pairs"),
    [
        ("classification", ("no", "yes"), None),
        ("classification", ("no", "yes"), True),
        ("multilabel", ("a", "b", "c"), None),
        ("regression", ("stars",), None),
    ],
)
def test_example_of_a_stock_classifier_labels_a_text_as_we_do(
    tmp_path, monkeypatch, tokenizer, label_type, labels, pairs
):
    shape = replace(CONFIG, vocab_size=tokenizer.get_vocab_size(), initializer_range=0.3)
    shape = replace(shape, max_position_embeddings=32)
    classifier = ClassifierConfig(labels, label_type, text_pairs=pairs)
    model = SequenceClassifier(shape, classifier)
    save_pretrained(tmp_path / "m", model, tokenizer, 32, model_card("m", shape, {}, classifier))
    monkeypatch.chdir(tmp_path)
    code = (tmp_path / "m" / "README.md").read_text().split("```")[1].removeprefix("python\n")
    assert "truncation=True" in code
    long, names = "A text. " * 40, {}
    code = (
        code.replace("path/to/model", "m").replace('"A text."', repr(long)).replace('"One text."', repr(long))
    )
    exec(code, names)
    ours = Predictor("m", "cpu").predict([long], ["Another."] if pairs else None)[0]
    answers = names["label"] if isinstance(names["label"], list) else [names["label"]]
    found = {one["label"]: one["score"] for one in answers}
    if label_type == "regression":
        assert found == {"stars": pytest.approx(ours.label, abs=1e-4)}
    else:
        expected = (
            ours.probabilities
            if label_type == "multilabel"
            else {ours.label: max(ours.probabilities.values())}
        )
        assert found == pytest.approx(expected, abs=1e-4)
