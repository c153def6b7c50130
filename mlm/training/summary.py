"""The end of a run: the model folder, the curves, summary.json and what to do next."""

from __future__ import annotations

import logging
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mlm
from mlm.config.commands import PretrainConfig
from mlm.data.collate import Rows, build_masking
from mlm.data.corpus import Corpus
from mlm.evaluation.metrics import frozen_batches, score_batches
from mlm.files import write_json
from mlm.hub.pretrained import longest_row
from mlm.hub.saving import model_card, save_pretrained
from mlm.launch import command_for
from mlm.model.heads import MaskedLM
from mlm.plan import count_parameters
from mlm.tokenizer import tokenizer_digest
from mlm.training.progress import Progress
from mlm.training.reporting import read_metrics
from mlm.training.run_folder import resume_command
from mlm.training.tracking import tracked_folders

SCORED_ROWS = 32
"""Held-out rows a pass where no Trainer says how many fit."""
WORSE = 0.02
"""Nats of validation loss, above the noise of frozen masks, from which a model counts as worse."""
CHECKED_ROWS = 4
"""Held-out rows on which the saved model is compared with the trained one."""


log = logging.getLogger(__name__)


def finish_run(
    config: PretrainConfig,
    folder: Path,
    corpus: Corpus,
    model: MaskedLM,
    progress: Progress,
    reason: str,
    kept: int,
) -> None:
    """Save model, curves and summary, and print the summary; `kept` is the step of the weights."""
    assert progress.first, "a run begins with a validation"
    steps = progress.step
    if progress.validated_at != kept:  # an earlier model, or stopped by a signal before its validation
        progress.last = score_held_out(config, corpus, model)
    assert progress.last, "and ends with one"
    warn_if_worse(progress, kept, -(-len(corpus.train) // config.trainer.rows_per_step))
    summary = {
        "loss_first": progress.first["loss"],
        "val_loss": progress.last["loss"],
        "val_perplexity": progress.last["perplexity"],
        "val_masked_accuracy": progress.last["masked_accuracy"],
        "unigram_entropy": corpus.unigram_entropy,
        "sources": corpus.store.sources,
        **provenance(corpus),
        "vocab_size": corpus.tokenizer.get_vocab_size(),
        "num_parameters": sum(count_parameters(model.config).values()),
        "steps": steps,
        "saved_step": kept,
        "skipped_steps": progress.skipped,
        "best": [{"step": step, "val_loss": loss} for loss, step in progress.best],
        "tokens": progress.tokens,
        "elapsed_s": progress.elapsed_s,
        "tokens_per_second": progress.tokens / progress.elapsed_s,
        "model_dir": str(folder / "model"),
        "stopped_by": reason,
        **({"branch": config.branch} if config.branch else {}),
    }
    # A folder of this machine means nothing to whoever reads the card.
    facts = {name: summary[name] for name in summary if name not in ("model_dir", "branch", "best")}
    facts["sources"] = ", ".join(Path(source.path).name for source in config.data.sources)
    start = folder / "tokenizer" if config.init else None
    save_pretrained(
        folder / "model",
        model,
        corpus.tokenizer,
        model_max_length=(start and longest_row(start, model.config)) or config.data.seq_len,
        card=model_card(str(config.name), model.config, facts),
        rows=first_documents(corpus.validation),
        start=start,
    )
    from mlm.training.plots import plot_losses  # loads matplotlib

    plot_losses(read_metrics(folder / "metrics.csv"), folder / "plots" / "loss.png", corpus.unigram_entropy)
    write_json(folder / "summary.json", summary)
    print(closing_message(config, folder, summary, progress))


def warn_if_worse(progress: Progress, kept: int, steps_per_pass: int) -> None:
    """Warn if an earlier validation was clearly better than that of the saved model."""
    loss, step = progress.lowest or (math.inf, 0)
    last = (progress.last or {}).get("loss", math.inf)
    if last > loss + WORSE:
        passes = (kept - step) / steps_per_pass
        log.warning(
            "the saved model (loss %.3f at step %d) is worse than that of step %d (loss %.3f), %.1f passes"
            " over the text before: take --trainer.keep best, a lower --optimizer.lr, fewer steps, more text",
            last,
            kept,
            step,
            loss,
            passes,
        )


def first_documents(rows: Rows) -> dict[str, Tensor]:
    """Return the first document of some rows, as a model that knows nothing of packing is given them."""
    ids, documents = rows.render(np.arange(min(len(rows), CHECKED_ROWS)))
    mask = torch.from_numpy(documents == 1)
    return {"input_ids": torch.from_numpy(ids).where(mask, rows.special.pad), "attention_mask": mask.long()}


def provenance(corpus: Corpus) -> dict[str, str | None]:
    """Return what a run was made from: the token store, the vocabulary, and the commit of the code."""
    return {
        "token_store": corpus.store.folder.name,
        "tokenizer_digest": tokenizer_digest(corpus.tokenizer),
        "git_commit": git_commit(Path(mlm.__file__).parent),
    }


def score_held_out(config: PretrainConfig, corpus: Corpus, model: MaskedLM) -> dict[str, float]:
    """Score a model that no Trainer holds, on what a run validates on, in float32."""
    masking = build_masking(config.masking, config.masking.validation_mask_rate, corpus.tokenizer)
    rows = min(config.trainer.rows_per_step, SCORED_ROWS)
    batches = frozen_batches(corpus.validation, masking, rows)
    return score_batches(model.eval(), batches, next(model.parameters()).device, sync=False)


def git_commit(package: Path) -> str | None:
    """Return the commit of a package, with -dirty where files were changed; None outside a checkout."""
    tracked = ["ls-files", "--error-unmatch", "__init__.py"]  # not merely installed below somebody's checkout
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        for arguments in (tracked, describe):
            done = subprocess.run(
                ["git", "-C", str(package), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def closing_message(config: PretrainConfig, folder: Path, summary: dict[str, Any], progress: Progress) -> str:
    """Return what the run achieved, where things are, and the next commands."""
    first, last = progress.first or {}, progress.last or {}
    model, quoted = summary["model_dir"], shlex.quote(summary["model_dir"])
    minutes, seconds = divmod(round(summary["elapsed_s"]), 60)
    return f"""
{config.name}: {summary["steps"]:,} steps in {minutes} min {seconds} s, ended by {summary["stopped_by"]}

validation           start        end
  loss          {first["loss"]:10.3f} {last["loss"]:10.3f}   (ln V {math.log(summary["vocab_size"]):.3f}, \
word counts alone {summary["unigram_entropy"]:.3f})
  perplexity    {first["perplexity"]:10,.1f} {last["perplexity"]:10,.1f}
  accuracy      {first["masked_accuracy"]:10.1%} {last["masked_accuracy"]:10.1%}   (masked tokens)

tokens seen     {summary["tokens"]:,} at {summary["tokens_per_second"]:,.0f} tokens/s
model           {model}  ({summary["num_parameters"]:,} parameters, of step {summary["saved_step"]:,})
curves          {folder / "plots" / "loss.png"}, {folder / "metrics.csv"}
tracked run     {_tracked_run(folder)}

next
  fill a mask     mlm fill-mask --model {quoted} "the [MASK] of the function"
  evaluate        mlm evaluate --model {quoted} --data.sources YOUR_TEXT.txt
  fine-tune       {command_for("finetune.py")} --model {quoted}
  train longer    {resume_command(config)} --trainer.max_steps {2 * summary["steps"]}
  your own text   {command_for("train.py")} --data.sources YOUR_FOLDER"""


def _tracked_run(folder: Path) -> str:
    offline, online = tracked_folders(folder)
    if offline:  # a resumed run has several, which belong together
        command = shlex.join(["wandb", "sync", *map(str, offline)])
        return f"{offline[-1]}  (upload: {command})"
    return str(online[-1]) if online else "none (logging.wandb=disabled)"
