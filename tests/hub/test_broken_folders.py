"""Model folders that somebody broke: one line that names what and where, before anything is computed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig
from mlm.hub import load_classifier, load_encoder, load_pretrained
from mlm.hub.pretrained import read_classifier

SIZES = {
    "vocab_size": 128,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
KINDS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "classifier": lambda: BertForSequenceClassification(BertConfig(**SIZES)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**SIZES)),
    "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(**SIZES, **SPECIAL)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders that are right, to be copied and broken."""
    folders = {}
    for name, build in KINDS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        build().save_pretrained(folders[name])
    return folders


@pytest.fixture
def broken(whole, tmp_path):
    def build(kind="bert", change=None, weights=None):
        folder = tmp_path / "model"
        shutil.copytree(whole[kind], folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(change or {})}))
        if weights:
            tensors = load_file(folder / "model.safetensors")
            tensors |= {name: change(tensors[name]) for name, change in weights.items()}
            save_file(tensors, folder / "model.safetensors")
        return folder

    return build


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "32"}, r"hidden_size='32' must be a whole number"),
        ({"hidden_size": 32.0}, r"hidden_size=32.0 must be a whole number"),
        ({"hidden_size": True}, r"hidden_size=True must be a whole number"),
        ({"layer_norm_eps": "small"}, r"layer_norm_eps='small' must be a number"),
        ({"hidden_act": []}, r"hidden_act=\[\] must be a word"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings='no' must be true or false"),
        ({"vocab_size": None}, "vocab_size is null"),
        ({"max_position_embeddings": None}, "max_position_embeddings is null"),
        (
            {"hidden_size": 10**9},
            r"describes an encoder of [\d,]+ parameters; the weights beside it are [\d,]+ n",
        ),
        ({"hidden_size": 10**20}, "describes an encoder of"),
        ({"vocab_size": 10**12}, "describes an encoder of"),
        ({"model_type": []}, r"model_type=\[\] is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
    ],
)
def test_values_that_no_model_can_have_are_named(change, message, broken):
    folder = broken(change=change)
    with pytest.raises(InputError, match=message) as raised:
        load_encoder(folder)
    assert "config.json" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("roberta", {"pad_token_id": None}, "pad_token_id=None must be a whole number"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id=-1 must be a whole number from 0"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types of 1 entries"),
        ("modernbert", {"layer_types": []}, "global_attn_every_n_layers=0"),
        ("modernbert", {"layer_types": 3}, "not iterable"),
        ("classifier", {"id2label": ["a", "b"]}, "id2label="),
        ("classifier", {"problem_type": ["x"]}, r"problem_type=\['x'\]"),
        ("classifier", {"classifier_dropout": "0.1"}, "classifier_dropout='0.1' must be a number"),
    ],
)
def test_values_of_other_families_and_heads_too(kind, change, message, broken):
    folder = broken(kind, change)
    with pytest.raises(InputError, match=message):
        load_pretrained(folder)
    with pytest.raises(InputError, match=message):  # the file is named however it is read
        read_classifier(folder)


def test_architectures_that_are_no_list_name_no_classifier(broken):
    assert load_encoder(broken(change={"architectures": 3})).config.hidden_size == 16


def test_number_of_labels_without_names(broken):
    folder = broken(
        "classifier",
        {"id2label": None, "label2id": None, "num_labels": 3},
        {
            "classifier.weight": lambda old: torch.cat([old, old[:1]]),
            "classifier.bias": lambda old: torch.cat([old, old[:1]]),
        },
    )
    assert load_pretrained(folder).classifier_config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: old.index_fill(0, torch.tensor([3]), torch.nan), "holds numbers that are not finite"),
        (lambda old: old.index_fill(0, torch.tensor([3]), torch.inf), "holds numbers that are not finite"),
        (lambda old: old.to(torch.int8), "is of type int8"),
        (lambda old: old.to(torch.float8_e4m3fn), "is of type float8_e4m3fn"),
    ],
)
def test_numbers_that_are_no_weights_are_named(change, message, broken):
    with pytest.raises(InputError, match=f"{WORDS}.*{message}"):
        load_encoder(broken(weights={WORDS: change}))


def test_a_weight_under_two_names_is_refused(broken):
    folder = broken()
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors["bert.embeddings.LayerNorm.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"old and a new name .*: bert\.embeddings\.LayerNorm\.weight$"):
        load_encoder(folder)


@pytest.mark.parametrize(
    "content",
    [
        {1: torch.zeros(2)},
        {"a": torch.zeros(2).to_sparse()},
        {"a": {"b": torch.zeros(2)}},
        {"a": torch.zeros(2, device="meta")},
    ],
    ids=["integer keys", "sparse", "nested", "meta"],
)
def test_odd_pickles_are_refused_in_a_line(content, broken):
    folder = broken()
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="was not opened"):
        load_encoder(folder)


def test_a_folder_in_place_of_the_weights_is_refused(broken):
    folder = broken()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_encoder(folder)


@pytest.mark.parametrize("pooling", ["cls_tanh", "cls_relu", "cls_gelu", "mean", "cls"])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "classifier"])
def test_any_pooling_can_be_put_on_any_model(kind, pooling, whole):
    model = load_classifier(whole[kind], ClassifierConfig(("a", "b")), pooling)
    assert model.config.pooling == pooling
    assert (model.pooler.norm is None) == pooling.startswith("cls_")


def test_pooler_of_a_file_without_head_is_left_out_when_pooling_changes(whole, tmp_path):
    bare = BertForMaskedLM.from_pretrained(whole["bert"]).base_model
    BertModel(bare.config).save_pretrained(tmp_path)  # with a pooler, and without the prefix of its names
    theirs = load_file(tmp_path / "model.safetensors")["pooler.dense.weight"]
    head = ClassifierConfig(("a", "b"))
    assert torch.equal(load_classifier(tmp_path, head).pooler.dense.weight, theirs)
    assert not torch.equal(load_classifier(tmp_path, head, "mean").pooler.dense.weight, theirs)


def test_head_is_described_without_reading_the_weights(broken):
    folder = broken("classifier")
    (folder / "model.safetensors").write_bytes(b"")
    assert read_classifier(folder).labels == ("LABEL_0", "LABEL_1")
