"""What other people's tools make of model folders; run by a Python that has them and lacks mlm.

    PYTHON tests/clients/client.py < JOB.json      # prints the answers as JSON

A job names folders and texts; test_clients.py compares the answers with those of mlm.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

Json = dict[str, Any]


class Records(logging.Handler):
    """Keeps what transformers logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def read_encoder(folder: str, texts: list[str], token: str) -> Json:
    """Ids, offsets, logits, fillings and vectors of a masked language model."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder)
    encoded = [tokenizer(text, return_offsets_mapping=True) for text in texts]
    offsets = [
        [text[a:b] for a, b in one["offset_mapping"] if a < b]
        for text, one in zip(texts, encoded, strict=True)
    ]
    batch = tokenizer(texts[:4], padding=True, truncation=True, return_tensors="pt")
    filled = pipeline("fill-mask", folder)(f"{texts[0]} {token}", top_k=3)
    vectors = SentenceTransformer(folder, device="cpu").encode(texts[:4])
    with torch.no_grad():
        logits = model.eval()(**batch).logits
        pooled = [AutoModel.from_pretrained(folder).eval()(**batch) for _ in range(2)]
    poolers = [one.pooler_output for one in pooled if getattr(one, "pooler_output", None) is not None]
    return {
        "model_max_length": tokenizer.model_max_length,
        "ids": [one["input_ids"] for one in encoded],
        "pieces": offsets,
        "logits": [
            row[: mask.sum()].tolist() for row, mask in zip(logits, batch["attention_mask"], strict=True)
        ],
        "filled": [[one["token"], one["score"]] for one in filled],
        "vectors": vectors.tolist(),
        "same_pooler": len(poolers) < 2 or bool(torch.equal(*poolers)),
        "adapter_survives": _adapter_survives(folder, batch),
        "trained": _train(folder, tokenizer, texts),
    }


def _adapter_survives(folder: str, batch: Json) -> bool:
    """Whether a LoRA adapter gives the same vectors after it is saved and read back."""
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(AutoModel.from_pretrained(folder), config).eval()
    with tempfile.TemporaryDirectory() as work, torch.no_grad():
        model.save_pretrained(work)
        again = PeftModel.from_pretrained(AutoModel.from_pretrained(folder), work).eval()
        first, second = (one(**batch).last_hidden_state for one in (model, again))
    return torch.allclose(first, second, atol=1e-6)


def _train(folder: str, tokenizer: Any, texts: list[str]) -> list[float]:
    """The losses of three steps of the stock Trainer."""
    rows = [tokenizer(text, truncation=True) for text in texts * 4]
    with tempfile.TemporaryDirectory() as work:
        trainer = Trainer(
            AutoModelForMaskedLM.from_pretrained(folder),
            TrainingArguments(work, max_steps=3, logging_steps=1, report_to=[], use_cpu=True, seed=0),
            DataCollatorForLanguageModeling(tokenizer),
            rows,
            processing_class=tokenizer,
        )
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def read_classifier(folder: str, texts: list[str], pairs: list[str] | None) -> Json:
    """Scores of a classifier by the stock pipeline and by sentence-transformers."""
    stock = pipeline("text-classification", folder, top_k=None)
    inputs = (
        texts if pairs is None else [{"text": a, "text_pair": b} for a, b in zip(texts, pairs, strict=True)]
    )
    kind = AutoModelForSequenceClassification.from_pretrained(folder).config.problem_type
    function = {"function_to_apply": "none"} if kind == "regression" else {}
    answers = [stock(one, truncation=True, **function) for one in inputs]
    # One text gives a list of scores; some versions put it into another list.
    answers = [one[0] if isinstance(one[0], list) else one for one in answers]
    scores = [{score["label"]: score["score"] for score in one} for one in answers]
    cross = None
    if pairs is not None:
        cross = CrossEncoder(folder, device="cpu").predict(list(zip(texts, pairs, strict=True))).tolist()
    return {"scores": scores, "cross": cross}


def main() -> None:
    job, records = json.load(sys.stdin), Records()
    logging.getLogger("transformers").addHandler(records)
    answers = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, one in job.items():
            start = len(records.texts)
            read = read_encoder if "token" in one else read_classifier
            answers[name] = {**read(**one), "logged": records.texts[start:]}
    print(json.dumps({"transformers": transformers.__version__, **answers}))
    print(*{str(one.message) for one in caught}, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
