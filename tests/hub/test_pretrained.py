"""Writing a folder whole or not at all, and every way in which reading one can fail."""

from __future__ import annotations

import json
import os
import pickle
import resource
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    ModernBertForMaskedLM,
    RobertaForMaskedLM,
    pipeline,
)

from mlm.config.errors import DiskError, InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.hub import load_classifier, load_pretrained, longest_row, save_pretrained
from mlm.model import MaskedLM, SequenceClassifier
from mlm.tokenizer import SpecialTokens

MODERN = ModelConfig(
    vocab_size=128,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
)
CLASSIC = replace(
    MODERN,
    norm_position="post",
    position_embedding="learned",
    activation="gelu",
    type_vocab_size=2,
    norm_bias=True,
    attention_bias=True,
    mlp_bias=True,
    head_bias=True,
)
FILES = [
    *("1_Pooling", "README.md", "config.json", "model.safetensors", "modules.json"),
    *("sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"),
]


@pytest.fixture
def model() -> MaskedLM:
    torch.manual_seed(0)
    return MaskedLM(MODERN)


@pytest.fixture
def folder(tmp_path, model, tokenizer):
    return save_pretrained(tmp_path / "runs" / "model", model, tokenizer, 32, "# Card")


@pytest.mark.parametrize("config", [MODERN, CLASSIC], ids=["modern", "classic"])
def test_tokenizer_and_pipeline_work(config, tmp_path, tokenizer, documents):
    folder = save_pretrained(tmp_path / "model", MaskedLM(config), tokenizer, 32, "")
    theirs, special = AutoTokenizer.from_pretrained(folder), SpecialTokens.from_tokenizer(tokenizer)
    assert theirs(documents[0])["input_ids"] == tokenizer.encode(documents[0]).ids
    pair = theirs("the harbour", "a letter")
    assert pair["input_ids"] == tokenizer.encode("the harbour", "a letter").ids
    assert ("token_type_ids" in pair) == (config.type_vocab_size > 0)
    assert theirs.model_max_length == 32
    assert theirs("the [MASK] waits")["input_ids"].count(special.mask) == 1
    written = json.loads((folder / "config.json").read_text())
    for name in ("pad", "cls", "sep", "mask"):
        assert written[f"{name}_token_id"] == getattr(special, name) == getattr(theirs, f"{name}_token_id")
    kind = ModernBertForMaskedLM if config is MODERN else BertForMaskedLM
    fill = pipeline("fill-mask", model=kind.from_pretrained(folder), tokenizer=theirs)
    found = fill("the old [MASK] waits for rain", top_k=120)
    assert [row["score"] for row in found] == sorted((row["score"] for row in found), reverse=True)
    assert sum(row["score"] for row in found) == pytest.approx(1.0, abs=1e-4)
    assert {row["token"] for row in found} == set(range(120))


def test_padding_ids_never_win(tmp_path, model, tokenizer):
    with torch.no_grad():
        model.head.bias[120:] = 50.0
    before = model.head.bias.clone()
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    theirs, ids = ModernBertForMaskedLM.from_pretrained(folder), torch.arange(24).view(2, 12)
    assert theirs(input_ids=ids).logits.argmax(-1).max() < 120
    assert load_pretrained(folder)(ids).argmax(-1).max() < 120
    assert torch.equal(model.head.bias, before)


def test_saving_leaves_the_model_and_the_random_numbers_alone(tmp_path, model, tokenizer):
    model.train()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_folder_holds_the_files_and_the_card(folder):
    assert sorted(os.listdir(folder)) == FILES
    assert os.listdir(folder.parent) == ["model"]
    card = (folder / "README.md").read_text()
    assert card.startswith(
        "# Card\n\nRead back after writing, on 1 rows of random tokens: largest difference"
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["ModernBertForMaskedLM"]
    assert config["vocab_size"] == 128


def test_longest_row_is_the_tokenizers_where_the_model_has_none(tmp_path, tokenizer):
    model = MaskedLM(replace(MODERN, max_position_embeddings=None))
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 24, "")
    assert load_pretrained(folder).config.max_position_embeddings == 24


def test_model_folder_is_replaced_whole(folder, model, tokenizer):
    with torch.no_grad():
        model.head.bias[7] = 3.0
    save_pretrained(folder, model, tokenizer, 32, "# New")
    assert load_pretrained(folder).head.bias[7] == 3.0
    assert os.listdir(folder.parent) == ["model"]
    assert sorted(os.listdir(folder)) == FILES


def test_saving_recovers_what_a_killed_process_left(folder, model, tokenizer):
    folder.rename(folder.with_name(".model.12.old"))  # killed between two renames
    folder.with_name(".model.12.part").mkdir()
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        save_pretrained(folder, model, tokenizer, 32, "# New")
    assert os.listdir(folder.parent) == ["model"]
    assert load_pretrained(folder).head.bias[3] == 0


def test_folder_with_other_files_is_left_alone(folder, model, tokenizer):
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"taken by something else \(thesis.txt\)"):
        save_pretrained(folder, model, tokenizer, 32, "")
    assert (folder / "thesis.txt").read_text() == "mine"
    plain = folder.parent / "file"
    plain.write_text("mine")
    with pytest.raises(InputError, match=r"taken by something else \(file\)"):
        save_pretrained(plain, model, tokenizer, 32, "")


def test_failed_check_leaves_what_was_there(folder, model, tokenizer):
    before = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        save_pretrained(folder, model, tokenizer, 32, "# New")
    assert (folder / "model.safetensors").read_bytes() == before
    assert os.listdir(folder.parent) == ["model"]


@pytest.mark.parametrize(
    ("written", "width"), [("config.json", 16), ("model.safetensors", 16), ("tokenizer.json", 2)]
)
def test_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, tokenizer, written, width):
    model = MaskedLM(replace(MODERN, hidden_size=width, num_attention_heads=1, num_hidden_layers=1))
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "# Card")
    before = {name: (folder / name).read_bytes() for name in FILES[1:]}
    order = ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(len(before[name]) < len(before[written]) for name in order[: order.index(written)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[written]) - 1, hard))
    try:
        with pytest.raises(DiskError, match=r"/model: cannot be written: File too large .*; make room"):
            save_pretrained(folder, model, tokenizer, 32, "# New")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {name: (folder / name).read_bytes() for name in FILES[1:]} == before
    assert os.listdir(tmp_path) == ["model"]


def test_larger_tokenizer_is_refused_with_both_sizes(tmp_path, tokenizer):
    with pytest.raises(InputError, match="120 entries, more than the model's vocab_size=64"):
        save_pretrained(tmp_path / "model", MaskedLM(replace(MODERN, vocab_size=64)), tokenizer, 32, "")
    assert not list(tmp_path.iterdir())


def test_half_precision_file_is_read_as_float32(folder, model):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    again = load_pretrained(folder)
    assert all(weight.dtype == torch.float32 for weight in again.parameters())
    torch.testing.assert_close(again(torch.ones(1, 4, dtype=torch.long)).isfinite().all(), torch.tensor(True))


def test_missing_folder_says_what_writes_one(tmp_path, folder):
    with pytest.raises(
        InputError, match=r"nowhere/config.json does not exist.*model.safetensors.*mlm pretrain"
    ):
        load_pretrained(tmp_path / "nowhere")
    with pytest.raises(InputError, match=rf"did you mean {folder}\?"):
        load_pretrained(folder.parent)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"neither model.safetensors nor pytorch_model.bin"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type=gpt2 is not supported, only bert, roberta, distilbert, electra, modernbert",
        ),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"hidden_size": 15}, "config.json: model.hidden_size=15 must be a multiple"),
        ({"hidden_size": "wide"}, "config.json: "),
    ],
)
def test_bad_config_is_one_line(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message) as caught:
        load_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_absurd_sizes_are_refused_before_anything_is_built(folder):
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for name, message in (
        ("num_hidden_layers", "num_hidden_layers=1000000000 is more"),
        ("vocab_size", "describes an encoder of"),
    ):
        path.write_text(json.dumps({**written, "layer_types": None, name: 10**9}))
        with pytest.raises(InputError, match=message):
            load_pretrained(folder)


@pytest.mark.parametrize("text", ["{", "[1, 2]", ""])
def test_config_that_is_no_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config.json"):
        load_pretrained(folder)


def test_weights_that_do_not_fit_are_listed(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.attn.Wo.weight"]
    tensors["model.layers.7.attn.Wo.weight"] = torch.ones(2)
    tensors["model.final_norm.weight"] = torch.ones(9)
    save_file(tensors, path)
    with pytest.raises(InputError) as caught:
        load_pretrained(folder)
    message = str(caught.value)
    assert "missing: model.layers.0.attn.Wo.weight" in message
    assert "unexpected: model.layers.7.attn.Wo.weight" in message
    assert "wrong shape: model.final_norm.weight is (9,), by config.json (16,)" in message
    assert "\n" not in message


def test_wrong_shape_of_a_stacked_part_is_named(tmp_path):
    BertForMaskedLM(
        BertConfig(
            vocab_size=128, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
        )
    ).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    key = "bert.encoder.layer.0.attention.self.key.weight"
    save_file({**load_file(path), key: torch.ones(16, 8)}, path)
    with pytest.raises(InputError, match=rf"{key} is \(16, 8\), by config.json \(16, 16\)"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 500, 3000])
def test_truncated_weights_are_refused(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"model.safetensors is damaged or incomplete"):
        load_pretrained(folder)


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_weights_are_read_only_when_harmless(folder, model, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    ids = torch.arange(10)[None]
    assert torch.equal(load_pretrained(folder)(ids)[..., :120], model.eval()(ids)[..., :120])
    marker = tmp_path / "marker"
    torch.save({**tensors, "extra": Malice(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin was not opened.*could run code") as caught:
        load_pretrained(folder)
    assert "\n" not in str(caught.value)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malice(marker), protocol=2))
    with pytest.raises(InputError, match="could run code"):
        load_pretrained(folder)
    assert not marker.exists()
    for content in (b"", b"nonsense"):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(InputError, match="damaged"):
            load_pretrained(folder)
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="damaged"):
        load_pretrained(folder)


@pytest.fixture(params=["safetensors", "bin"])
def shards(request, folder):
    """The folder with its weights in two files of either kind, and the path of their index."""
    tensors, suffix = load_file(folder / "model.safetensors"), request.param
    (folder / "model.safetensors").unlink()
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    write = {"safetensors": save_file, "bin": torch.save}[suffix]
    files = {name: f"{stem}-0000{1 + number % 2}-of-00002.{suffix}" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        write({name: tensors[name] for name in files if files[name] == file}, folder / file)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def test_weights_in_parts_are_read(shards, folder, model):
    ids = torch.arange(10)[None]
    assert torch.equal(load_pretrained(folder)(ids)[..., :120], model.eval()(ids)[..., :120])


def test_stock_class_splits_what_we_read(tmp_path):
    config = BertConfig(
        vocab_size=128, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    theirs, ids = BertForMaskedLM(config).eval(), torch.arange(10)[None]
    theirs.save_pretrained(tmp_path, max_shard_size="8kB")
    assert not (tmp_path / "model.safetensors").exists()
    torch.testing.assert_close(load_pretrained(tmp_path)(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", ["../{}", "/etc/{}", "sub/{}", "..", "README.md", "", 3])
def test_index_leads_out_of_its_folder_nowhere(bad, shards, folder):
    content = json.loads(shards.read_text())
    first, file = next(iter(content["weight_map"].items()))
    content["weight_map"][first] = bad.format(file) if isinstance(bad, str) else bad
    shards.write_text(json.dumps(content))
    with pytest.raises(InputError, match="index"):
        load_pretrained(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_index_that_is_none_is_refused(text, shards, folder):
    shards.write_text(text)
    with pytest.raises(InputError, match="is not an index of weights"):
        load_pretrained(folder)


def test_parts_that_do_not_fit_their_index_are_named(shards, folder):
    content = json.loads(shards.read_text())
    file = next(iter(content["weight_map"].values()))
    shards.write_text(json.dumps({"weight_map": {**content["weight_map"], "extra.weight": file}}))
    with pytest.raises(
        InputError, match=rf"{file} does not hold the weights that .*index.json lists: extra.weight"
    ):
        load_pretrained(folder)
    shards.write_text(json.dumps(content))
    (folder / file).unlink()
    with pytest.raises(InputError, match=rf"{file} does not exist, but the index"):
        load_pretrained(folder)


def test_tokenizer_of_roberta_keeps_its_settings(tmp_path):
    """Its names of special tokens, a mask that takes the space before it, padding and truncation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, "<mask>"]
    theirs = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, [], unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.add_special_tokens([*tokens[:4], AddedToken("<mask>", lstrip=True, special=True)])
    theirs.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    theirs.enable_padding(pad_id=1, pad_token="<pad>", length=20)
    theirs.enable_truncation(20)
    config = replace(CLASSIC, vocab_size=len(tokens), position_offset=2, type_vocab_size=1)
    folder = save_pretrained(tmp_path / "model", MaskedLM(config), theirs, 32, "")
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(theirs.to_str())
    written = json.loads((folder / "tokenizer_config.json").read_text())
    names = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>"}
    assert {name: written[f"{name}_token"] for name in names} == names
    stock = AutoTokenizer.from_pretrained(folder)
    assert stock("a <mask>")["input_ids"] == [0, tokens.index("a"), tokens.index("<mask>"), 2]
    assert "token_type_ids" not in stock("a", "b")
    again = load_pretrained(folder)
    assert again.config == config
    assert RobertaForMaskedLM.from_pretrained(folder).config.pad_token_id == 1


def test_classes_of_a_classifier_are_taken_over_by_name(model, tokenizer, tmp_path, caplog):
    """A checkpoint whose ids stand for the same classes in another order gives the same chances by name."""
    theirs = ClassifierConfig(("contradiction", "entailment", "NEUTRAL"))
    folder = save_pretrained(tmp_path / "base", model, tokenizer, 16, "")
    trained = load_classifier(folder, theirs)
    folder = save_pretrained(tmp_path / "theirs", trained, tokenizer, 16, "")
    ours = load_classifier(folder, ClassifierConfig(("entailment", "neutral", "contradiction")))
    ids = torch.arange(12)[None]
    assert torch.equal(ours(ids), trained.eval()(ids)[:, [1, 2, 0]])
    nameless = ClassifierConfig(("LABEL_0", "LABEL_1", "LABEL_2"))
    folder = save_pretrained(tmp_path / "nameless", load_classifier(folder, nameless), tokenizer, 16, "")
    load_classifier(folder, theirs)
    assert "does not name its classes; its last layer is left out" in caplog.text


@pytest.mark.parametrize("config", [MODERN, CLASSIC], ids=["modern", "classic"])
def test_config_and_tokenizer_name_the_same_tokens(config, tmp_path, tokenizer):
    folder = save_pretrained(tmp_path / "model", MaskedLM(config), tokenizer, 32, "")
    written = json.loads((folder / "config.json").read_text())
    theirs = AutoTokenizer.from_pretrained(folder)
    for name in ("bos", "eos", "pad", "cls", "sep", "mask"):
        assert written.get(f"{name}_token_id") == getattr(theirs, f"{name}_token_id"), name
    assert (written["dtype"], written["transformers_version"]) == ("float32", "4.48.0")


def test_sentence_vectors_are_described_as_mlm_embed_makes_them(folder):
    modules = json.loads((folder / "modules.json").read_text())
    assert [one["type"].rpartition(".")[2] for one in modules] == ["Transformer", "Pooling", "Normalize"]
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    assert pooling["word_embedding_dimension"] == MODERN.hidden_size
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 32


def test_how_sentence_vectors_are_made_is_carried_over(folder, model, tokenizer, tmp_path):
    modules = json.loads((folder / "modules.json").read_text())[:2]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": MODERN.hidden_size, "pooling_mode_cls_token": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    assert longest_row(folder, MODERN) == 20
    other = save_pretrained(tmp_path / "other", model, tokenizer, 20, "", start=folder)
    assert json.loads((other / "modules.json").read_text()) == modules
    assert json.loads((other / "1_Pooling" / "config.json").read_text()) == pooling


def test_a_score_is_not_squashed_by_a_cross_encoder(tmp_path, tokenizer):
    folder = tmp_path / "model"
    for head, expected in (
        (ClassifierConfig(("stars",), "regression"), "torch.nn.modules.linear.Identity"),
        (ClassifierConfig(("no", "yes")), None),
    ):
        save_pretrained(folder, SequenceClassifier(MODERN, head), tokenizer, 32, "")
        written = json.loads((folder / "config.json").read_text())
        assert written.get("sentence_transformers", {}).get("activation_fn") == expected
        assert not (folder / "modules.json").exists()
