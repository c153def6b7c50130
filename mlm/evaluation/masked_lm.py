"""Loss, perplexity and accuracy of a masked language model on text, with frozen masks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from mlm.config.data import IGNORE_INDEX
from mlm.config.errors import InputError
from mlm.config.evaluation import EvaluateConfig
from mlm.cores import share_cores
from mlm.data.collate import MaskedBatch, MaskedRows, Rows, build_masking
from mlm.data.corpus import prepare_evaluation
from mlm.data.sampler import ValidationSampler
from mlm.evaluation.classifier import evaluate_classifier
from mlm.evaluation.metrics import score_table
from mlm.evaluation.predictor import progress_bar
from mlm.evaluation.torch_backend import pick_device
from mlm.files import write_json
from mlm.hub.download import model_folder
from mlm.hub.pretrained import holds_classifier, load_masked_lm
from mlm.masking import Masking
from mlm.model.heads import MaskedLM
from mlm.model.loss import summed_cross_entropy
from mlm.tokenizer import load_tokenizer, num_ids

VALIDATION_SEED = 20_181_011
"""Seed of every validation mask, independent of the seed of the run, so that runs can be compared."""


log = logging.getLogger(__name__)


class MaskedLMScores(Metric):
    """Loss, perplexity and accuracy over masked tokens, summed over batches and ranks in float64.

    Args:
        device: where the sums are kept; in float32 on MPS, which has no float64.
        kwargs: of `torchmetrics.Metric`, such as `sync_on_compute=False` for the batches of one rank alone.
    """

    full_state_update = False
    summed_loss: Tensor
    num_correct: Tensor
    num_masked: Tensor

    def __init__(self, device: torch.device | str = "cpu", **kwargs: Any):
        super().__init__(**kwargs)
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        for name in ("summed_loss", "num_correct", "num_masked"):
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.to(device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (..., V) float.
            labels: (...) int64, IGNORE_INDEX where nothing is predicted.
        """
        logits = logits.detach().float()  # a CPU finds the largest of bfloat16 four times slower
        masked = labels != IGNORE_INDEX
        self.summed_loss += summed_cross_entropy(logits.flatten(0, -2)[None], labels.flatten()[None])
        self.num_correct += ((logits.argmax(-1) == labels) & masked).sum()
        self.num_masked += masked.sum()

    def compute(self) -> dict[str, float]:
        """Return loss in nats, perplexity, masked_accuracy and num_masked as Python numbers.

        The first three are means over the masked tokens; 0, and a perplexity of 1, if there are none.
        """
        sums = torch.stack([self.summed_loss, self.num_correct, self.num_masked])
        loss, correct, masked = sums.tolist()
        loss /= max(masked, 1)
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows
        scores = {"loss": loss, "perplexity": perplexity, "masked_accuracy": correct / max(masked, 1)}
        return scores | {"num_masked": int(masked)}


def frozen_batches(
    rows: Rows, masking: Masking, batch_size: int, rank: int = 0, world_size: int = 1
) -> DataLoader[MaskedBatch]:
    """Return every row of a rank's share once, always with the same masks."""
    sampler = ValidationSampler(len(rows), batch_size, rank, world_size)
    return DataLoader(MaskedRows(rows, masking, VALIDATION_SEED), sampler=sampler, batch_size=None)


@torch.no_grad()
def score_batches(
    model: MaskedLM, batches: Iterable[MaskedBatch], device: torch.device, sync: bool = True
) -> dict[str, float]:
    """Return what `MaskedLMScores` computes over batches, without changing the mode of the model.

    Args:
        model: on the device.
        batches: of this rank.
        device: where to compute.
        sync: add the batches of all ranks, each of which then has to call this.
    """
    scores = MaskedLMScores(device, sync_on_compute=sync)
    for batch in batches:
        inputs = (batch[name].to(device) for name in ("input_ids", "attention_mask", "masked_positions"))
        scores.update(model(*inputs), batch["labels"].to(device))
    return scores.compute()


def evaluate(config: EvaluateConfig) -> int:
    """Print the scores of a model on a text, or on a labelled file: the `evaluate` command.

    Raises:
        InputError: the model or the text does not exist, or the model has another head.
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
    device = pick_device()
    with progress_bar("evaluating", "batch", iterable=batches) as bar:
        scores = score_batches(model.to(device).eval(), bar, device)
    num_tokens, num_bytes = rows.table.pieces.num_tokens, rows.num_bytes
    num_masked = scores.pop("num_masked")
    scores["nats_per_byte"] = scores["loss"] * num_tokens / num_bytes
    counts = {"num_masked": num_masked, "num_tokens": num_tokens, "num_bytes": num_bytes}
    facts = scores | counts
    print("\n".join(score_table(facts)))
    if config.output:
        write_json(Path(config.output), facts)
    return 0
