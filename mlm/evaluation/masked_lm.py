"""Loss, perplexity and accuracy of a masked language model on text, with frozen masks."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import torch
import torchmetrics
from torch.utils.data import DataLoader
from tqdm import tqdm

from mlm.config.data import IGNORE_INDEX
from mlm.config.errors import InputError
from mlm.config.evaluation import EvaluateConfig
from mlm.cores import share_cores
from mlm.data.collate import MaskedBatch, MaskedRows, Rows, build_masking
from mlm.data.corpus import prepare_evaluation
from mlm.data.sampler import ValidationSampler
from mlm.evaluation.classifier import evaluate_classifier
from mlm.files import replacing
from mlm.hub.download import model_folder
from mlm.hub.pretrained import holds_classifier, load_masked_lm
from mlm.masking import Masking
from mlm.model.loss import summed_cross_entropy
from mlm.tokenizer import load_tokenizer, num_ids

VALIDATION_SEED = 20_181_011
"""Seed of every validation mask, whatever the seed of the run: scores of different runs can be compared."""


log = logging.getLogger(__name__)


class MaskedLMScores(torchmetrics.Metric):
    """Loss."""

    def __init__(self):
        super().__init__()
        self.add_state("sums", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits, labels):
        logits = logits.float()
        correct = (logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)
        scores = torch.stack(
            [summed_cross_entropy(logits, labels), correct.sum(), (labels != IGNORE_INDEX).sum()]
        )
        self.sums += scores.double()

    def compute(self):
        loss, correct, masked = self.sums.tolist()
        loss = loss / max(masked, 1)
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "masked_accuracy": correct / max(masked, 1),
            "num_masked": int(masked),
        }


def frozen_batches(
    rows: Rows, masking: Masking, batch_size: int, rank: int = 0, world_size: int = 1
) -> DataLoader[MaskedBatch]:
    """Return every row of a rank's share once, always with the same masks."""
    sampler = ValidationSampler(len(rows), batch_size, rank, world_size)
    return DataLoader(MaskedRows(rows, masking, VALIDATION_SEED), sampler=sampler, batch_size=None)


@torch.no_grad()
def score_batches(model, batches):
    scores = MaskedLMScores()
    device = next(model.parameters()).device
    scores.to(device)
    for batch in batches:
        logits = model(
            *(batch[name].to(device) for name in ("input_ids", "attention_mask", "masked_positions"))
        )
        scores.update(logits, batch["labels"].to(device))
    return scores.compute()


def evaluate(config: EvaluateConfig) -> int:
    """Print the scores of a model on a text, or on a labelled file: the `evaluate` command.

    Raises:
        InputError: no model or no text where the configuration says.
    """
    if config.input is not None:
        return evaluate_classifier(config)
    folder = model_folder(config.model)
    if holds_classifier(folder):
        raise InputError(f"{folder} is a fine-tuned model; give a labelled file with --input")
    model, tokenizer = load_masked_lm(folder, needs_head=True), load_tokenizer(folder)
    longest = model.config.max_position_embeddings or config.data.seq_len
    if config.data.seq_len > longest:
        log.info("rows of %d tokens, the longest that %s reads", longest, config.model)
        config = replace(config, data=replace(config.data, seq_len=longest))
    model.config.check_fit(num_ids(tokenizer), config.data.seq_len)
    rows = prepare_evaluation(config.data, tokenizer)
    masking = build_masking(config.masking, config.masking.validation_mask_rate, tokenizer)
    batches = frozen_batches(rows, masking, config.batch_size)
    share_cores(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sums = score_batches(model.to(device).eval(), tqdm(batches, "evaluating", leave=False), device)
    scores = MaskedLMScores.from_sums(sums)
    num_bytes = rows.num_bytes
    num_tokens = rows.table.pieces.num_tokens
    facts = {
        **scores.metrics(),
        "nats_per_byte": scores.loss * num_tokens / num_bytes,
        "num_masked": scores.num_masked,
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
    }
    for name, value in facts.items():
        print(f"{name:16} {value:,.4f}" if isinstance(value, float) else f"{name:16} {value:,}")
    if config.output:
        with replacing(Path(config.output), "place") as unfinished:
            unfinished.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 0
