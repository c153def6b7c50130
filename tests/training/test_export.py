"""What a run saves is used by others as it was trained."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from mlm.config.data import MaskingConfig, SourceConfig
from mlm.training.pretraining import pretrain

BY_HEART = {
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "trainer": {"max_steps": 300, "global_batch_size": 16, "val_every": 300, "save_every": 300},
    "optimizer": {"name": "muon", "lr": 5e-3},
}


def folder_of(config):
    return Path(config.runs_dir) / config.name


def test_twenty_lines_are_learnt_by_heart_and_filled_in_by_others(tiny, tmp_path, documents):
    """From ln(V) to below 1.0: the wiring of masks, labels, head and optimizer is right."""
    path = tmp_path / "twenty.txt"
    path.write_text("\n".join(documents[:20]))
    config = tiny(data={"sources": [SourceConfig(str(path))]}, **BY_HEART)
    pretrain(config)
    folder = folder_of(config)
    summary = json.loads((folder / "summary.json").read_text())
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["val/loss"]) == pytest.approx(math.log(summary["vocab_size"]), rel=0.05)
    assert np.mean([float(row["train/loss"]) for row in rows[-20:]]) < 1.0
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    assert tokenizer.model_max_length == config.data.seq_len
    assert len(tokenizer) <= model.config.vocab_size
    for name in ("pad", "mask", "cls", "sep"):
        assert getattr(model.config, f"{name}_token_id") == getattr(tokenizer, f"{name}_token_id")
    fill, right, words = pipeline("fill-mask", model=model, tokenizer=tokenizer), 0, 0
    for line in documents[:10]:
        pieces = tokenizer.tokenize(line)
        for place in range(2, min(len(pieces), config.data.seq_len - 2), 3):
            if not pieces[place].startswith("##"):
                masked = tokenizer.convert_tokens_to_string([*pieces[:place], "[MASK]", *pieces[place + 1 :]])
                right += fill(masked)[0]["token_str"] == pieces[place]
                words += 1
    assert words > 10
    assert right / words > 0.8


def test_five_steps_more_by_a_stock_class_keep_the_tables_tied(tiny):
    config = tiny()
    pretrain(config)
    model = AutoModelForMaskedLM.from_pretrained(folder_of(config) / "model").train()
    ids, optimizer = torch.arange(5, 25)[None], torch.optim.SGD(model.parameters(), lr=0.1)
    first = model(input_ids=ids, labels=ids).loss
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    table, decoder = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert table.data_ptr() == decoder.data_ptr()
    assert model(input_ids=ids, labels=ids).loss < first


def test_an_adapted_model_keeps_its_longest_row_and_says_how_it_was_checked(tiny):
    first = tiny(name="first")
    pretrain(first)
    start = folder_of(first) / "model"
    short = replace(tiny(name="short"), init=str(start))
    short = replace(short, data=replace(short.data, seq_len=first.data.seq_len // 2))
    pretrain(short)
    folder = folder_of(short) / "model"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == first.data.seq_len
    card = (folder / "README.md").read_text()
    assert "rows of real text: largest difference of a logit" in card
    assert "by ModernBertForMaskedLM of transformers" in card


def test_a_tokenizer_that_left_ids_out_is_trained_on(tiny, tmp_path):
    """Some published vocabularies have gaps: sizes follow the highest id, and no mask shows an id of none."""
    first = tiny(name="first")
    pretrain(first)
    start = folder_of(first) / "model"
    written = json.loads((start / "tokenizer.json").read_text())
    moved = max(written["model"]["vocab"].items(), key=lambda entry: entry[1])[0]
    written["model"]["vocab"][moved] = 125
    (start / "tokenizer.json").write_text(json.dumps(written))
    second = replace(tiny(name="second"), init=str(start), masking=MaskingConfig(random_token_fraction=0.2))
    assert pretrain(second) == 0
    fitting = AutoModelForMaskedLM.from_pretrained(folder_of(second) / "model")
    assert fitting.get_output_embeddings().bias[125] > -1
    assert fitting.get_output_embeddings().bias[126] < -1000
