"""The end of pretraining: the model folder, the curves, summary.json and what to do next."""

from __future__ import annotations

import logging
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mlm
from mlm.config.commands import PretrainConfig
from mlm.data.collate import build_masking
from mlm.data.corpus import Corpus
from mlm.evaluation.metrics import (
    frozen_batches,
    score_batches,
)
from mlm.files import write_json
from mlm.hub.download import pinned_name
from mlm.hub.pretrained import longest_row
from mlm.hub.saving import model_card, save_pretrained
from mlm.launch import command_for
from mlm.plan import count_parameters
from mlm.startup.checks import is_hub_name
from mlm.tokenizer import tokenizer_digest
from mlm.training.engine import Progress, StepModule
from mlm.training.reporting import read_metrics
from mlm.training.run_folder import METRICS, SUMMARY, git_commit, resume_command
from mlm.training.tracking import tracked_folders

SCORED_ROWS = 32
"""Held-out rows a pass where no Trainer says how many fit."""
WORSE = 0.02
"""Nats of validation loss, above the noise of frozen masks, from which a model counts as worse."""
LOCAL_FACTS = ("model_dir", "branch", "init", "best", "validation_sources")
"""Entries of the summary that the card leaves out: they mean nothing on another machine."""
SAME = 0.005
"""Nats of validation loss that two passes over the text should gain at least."""
CHECKED = 4
"""Held-out rows or examples on which the saved model is compared with the trained one."""

log = logging.getLogger(__name__)


def finish_pretraining(module: StepModule, corpus: Corpus, folder: Path, reason: str, kept: int) -> None:
    """Save model, curves and summary, and print it; `kept` is the step of the weights."""
    config, model, progress = module.config, module.model, module.progress
    assert progress.first, "a run begins with a validation"
    if progress.validated_at != kept:  # an earlier model, or stopped by a signal before its validation
        masking = build_masking(config.masking, config.masking.validation_mask_rate, corpus.tokenizer)
        size = min(config.trainer.rows_per_step, SCORED_ROWS)
        batches = frozen_batches(corpus.validation, masking, size)
        device, sources = next(model.parameters()).device, config.data.validated_sources
        progress.last = score_batches(model.eval(), batches, device, sync=False, sources=sources)
    assert progress.last, "and ends with one"
    by_source = {
        name.removeprefix("loss/"): loss for name, loss in progress.last.items() if name.startswith("loss/")
    }
    passes = -(-len(corpus.train) // config.trainer.rows_per_step)
    warn_of_losses(progress, read_metrics(folder / METRICS), kept, passes, config.trainer.keep == "best")
    summary = {
        "loss_first": progress.first["loss"],
        "val_loss": progress.last["loss"],
        **({"val_loss_by_source": by_source} if by_source else {}),
        "val_perplexity": progress.last["perplexity"],
        "val_masked_accuracy": progress.last["masked_accuracy"],
        "unigram_entropy": corpus.unigram_entropy,
        "sources": corpus.store.sources,
        **({"validation_sources": corpus.validation.store.sources} if config.data.validation else {}),
        **provenance(corpus),
        "vocab_size": corpus.tokenizer.get_vocab_size(),
        "num_parameters": sum(count_parameters(model.config).values()),
        "steps": progress.step,
        "saved_step": kept,
        "skipped_steps": progress.skipped,
        "best": [{"step": step, "val_loss": loss} for loss, step in progress.best],
        "tokens": progress.tokens,
        "elapsed_s": progress.elapsed_s,
        "tokens_per_second": progress.tokens / progress.elapsed_s,
        "model_dir": str(folder / "model"),
        "stopped_by": reason,
        **({"branch": config.branch} if config.branch else {}),
        **({"init": config.init} if config.init else {}),
        **started_from(config.init),
    }
    facts = {name: summary[name] for name in summary if name not in LOCAL_FACTS}
    facts["sources"] = ", ".join(Path(source.path).name for source in config.data.sources)
    start, rows = folder / "tokenizer" if config.init else None, corpus.validation
    # The first document of a row, as a model that knows nothing of packing gets it.
    ids, documents = rows.render(np.arange(min(len(rows), CHECKED)))
    mask = torch.from_numpy(documents == 1)
    save_pretrained(
        folder / "model",
        model,
        corpus.tokenizer,
        model_max_length=(start and longest_row(start, model.config)) or config.data.seq_len,
        card=model_card(
            str(config.name),
            model.config,
            facts,
            start=summary.get("started_from"),
            options=config.card,
            tokenizer=corpus.tokenizer,
        ),
        rows={
            "input_ids": torch.from_numpy(ids).where(mask, rows.special.pad),
            "attention_mask": mask.long(),
        },
        start=start,
        tokens=None if config.init else progress.tokens,
    )
    from mlm.training.plots import plot_losses  # loads matplotlib

    plot_losses(read_metrics(folder / METRICS), folder / "plots" / "loss.png", corpus.unigram_entropy)
    write_json(folder / SUMMARY, summary)
    print(_pretraining_message(config, folder, summary, progress))


def warn_of_losses(
    progress: Progress, rows: list[dict[str, float]], kept: int, steps_a_pass: int, keeps_best: bool
) -> None:
    """Warn if the model of step `kept` is worse than an earlier one, or the last two passes changed nothing.

    `rows` are those of the metrics table.
    """
    assert progress.last, "a run ends with a validation"
    last, (lowest, step) = progress.last["loss"], progress.lowest or (math.inf, 0)
    before = [row["val/loss"] for row in rows if "val/loss" in row and row["step"] <= kept - 2 * steps_a_pass]
    if last > lowest + WORSE:
        log.warning(
            f"the saved model (loss {last:.3f} at step {kept}) is worse than that of step {step} (loss "
            f"{lowest:.3f}), {(kept - step) / steps_a_pass:.1f} passes over the text before: take "
            f"{'' if keeps_best else '--trainer.keep best, '}a lower --optimizer.lr, fewer steps, more text"
        )
    elif before and last > min(before) - SAME:
        log.warning(
            f"the last two passes over the text changed nothing (loss {min(before):.3f} before, {last:.3f} "
            "now): take more text, a larger model, another --optimizer.lr, or fewer steps"
        )


def started_from(model: str | None) -> dict[str, str]:
    """Return the hub's model that a run began from, with its commit; empty for any other start."""
    name = pinned_name(model) if model and is_hub_name(model) else None
    return {"started_from": name} if name else {}


def provenance(corpus: Corpus) -> dict[str, str | None]:
    """Return the origins of a run: the token store, the vocabulary, and the commit of the code."""
    return {
        "token_store": corpus.store.folder.name,
        "tokenizer_digest": tokenizer_digest(corpus.tokenizer),
        "git_commit": git_commit(Path(mlm.__file__).parent),
    }


def duration(seconds: float) -> str:
    """Return minutes and seconds in words."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def _pretraining_message(
    config: PretrainConfig, folder: Path, summary: dict[str, Any], progress: Progress
) -> str:
    """Return the scores of the run, the places of its files, and the next commands."""
    first, last = progress.first or {}, progress.last or {}
    model, quoted = summary["model_dir"], shlex.quote(summary["model_dir"])
    took, (offline, online) = duration(summary["elapsed_s"]), tracked_folders(folder)
    tracked = str(online[-1]) if online else "none (logging.wandb=disabled)"
    if offline:  # a resumed run has several, which belong together
        tracked = f"{offline[-1]}  (upload: {shlex.join(['wandb', 'sync', *map(str, offline)])})"
    return f"""
{config.name}: {summary["steps"]:,} steps in {took}, ended by {summary["stopped_by"]}

validation           start        end
  loss          {first["loss"]:10.3f} {last["loss"]:10.3f}   (ln V {math.log(summary["vocab_size"]):.3f}, \
word counts alone {summary["unigram_entropy"]:.3f})
  perplexity    {first["perplexity"]:10,.1f} {last["perplexity"]:10,.1f}
  accuracy      {first["masked_accuracy"]:10.1%} {last["masked_accuracy"]:10.1%}   (masked tokens)

tokens seen     {summary["tokens"]:,} at {summary["tokens_per_second"]:,.0f} tokens/s
model           {model}  ({summary["num_parameters"]:,} parameters, of step {summary["saved_step"]:,})
curves          {folder / "plots" / "loss.png"}, {folder / METRICS}
tracked run     {tracked}

next
  fill a mask     mlm fill-mask --model {quoted} "the [MASK] of the function"
  evaluate        mlm evaluate --model {quoted} --data.sources YOUR_TEXT.txt
  fine-tune       {command_for("finetune.py")} --model {quoted}
  train longer    {resume_command(config)} --trainer.max_steps {2 * summary["steps"]}
  your own text   {command_for("train.py")} --data.sources YOUR_FOLDER"""
