"""The model card is valid Markdown with the front matter the hub expects."""

from __future__ import annotations

import json

import yaml
from huggingface_hub import ModelCard

from mlm.config.model import ModelConfig
from mlm.hub import architecture_of, model_card

CONFIG = ModelConfig(
    vocab_size=128, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=24
)
FACTS = {"validation loss": 3.94871, "tokens": 1_600_000}


def test_front_matter_is_read_by_the_hub_library():
    card = ModelCard(model_card("novels", CONFIG, FACTS, "ModernBertForMaskedLM"))
    assert card.data.pipeline_tag == "fill-mask"
    assert card.data.library_name == "transformers"
    assert card.data.license is None


def test_card_names_model_sizes_and_facts():
    card = model_card("novels", CONFIG, FACTS, "ModernBertForMaskedLM")
    assert "# novels\n" in card
    assert "ModernBertForMaskedLM.from_pretrained(path)" in card
    assert "| validation loss | 3.949 |" in card
    assert "| tokens | 1600000 |" in card
    assert "| hidden_size | 16 |" in card
    assert "| embeddings | 2,048 |" in card


def test_example_of_a_stock_model_runs(tmp_path, monkeypatch, tokenizer):
    from mlm.hub import save_pretrained
    from mlm.model import MaskedLM

    card = model_card("novels", CONFIG, {}, architecture_of(CONFIG))
    save_pretrained(tmp_path / "novels", MaskedLM(CONFIG), tokenizer, 32, card)
    monkeypatch.chdir(tmp_path)
    code = (tmp_path / "novels" / "README.md").read_text().split("```")[1].removeprefix("python\n")
    names: dict[str, object] = {}
    exec(code.replace("path/to/model", "novels"), names)
    assert type(names["model"]).__name__ == "ModernBertForMaskedLM"


def test_card_of_our_own_format_names_our_loader():
    card = model_card("novels", CONFIG, {}, "MaskedLM")
    assert 'load_pretrained("path/to/model")' in card
    assert "transformers" in yaml.safe_load(card.split("---")[1])["library_name"]


def test_card_of_a_classifier_names_its_classes():
    labels = [f"class {number}" for number in range(30)]
    card = model_card("reviews", CONFIG, FACTS, "ModernBertForSequenceClassification", labels)
    assert ModelCard(card).data.pipeline_tag == "text-classification"
    assert "Labels: class 0, class 1," in card
    assert "class 19, ...." in card
    assert "ModernBertForSequenceClassification.from_pretrained(path)" in card
    assert "| head | 782 |" in card  # 16 x 16 dense, 16 norm, 30 x (16 + 1) classifier
    own = model_card("reviews", CONFIG, FACTS, "SequenceClassifier", labels)
    assert 'load_pretrained("path/to/model")' in own


def test_no_file_of_a_model_folder_names_a_path_of_this_machine(tmp_path, tokenizer):
    from mlm.config.model import ClassifierConfig
    from mlm.hub import load_classifier, save_pretrained
    from mlm.model import MaskedLM

    card = model_card("novels", CONFIG, FACTS, architecture_of(CONFIG))
    first = save_pretrained(tmp_path / "runs/novels/model", MaskedLM(CONFIG), tokenizer, 32, card)
    settings = first / "tokenizer_config.json"
    written = json.loads(settings.read_text())
    written |= {"name_or_path": str(first), "vocab_file": str(first)}  # as other programs do
    settings.write_text(json.dumps(written))
    head = ClassifierConfig(("no", "yes"))
    classifier = load_classifier(first, head)
    card = model_card("reviews", CONFIG, FACTS, architecture_of(CONFIG, head), head.labels)
    second = save_pretrained(tmp_path / "runs/reviews/model", classifier, tokenizer, 32, card, start=first)
    settings.unlink()
    for file in (*first.iterdir(), *second.iterdir()):
        assert str(tmp_path).encode() not in file.read_bytes(), file
