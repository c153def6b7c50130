"""Pretraining: the module that computes the loss, and the run."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from mlm.config.commands import PretrainConfig
from mlm.config.data import TokenizerConfig
from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.config.parse import from_plain, read_group, to_plain
from mlm.data.collate import MaskedBatch
from mlm.data.corpus import ROWS_VERSION, Corpus, prepare_corpus
from mlm.evaluation.metrics import MaskedLMScores
from mlm.files import write_text
from mlm.hub.checkpoint import Checkpoint, open_checkpoint
from mlm.hub.download import model_folder
from mlm.hub.pretrained import TOKENIZER_CONFIG, load_masked_lm
from mlm.launch import is_first_process
from mlm.model.adapt import extend_vocabulary
from mlm.model.heads import MaskedLM, rule_out_unused_ids
from mlm.model.loss import summed_cross_entropy
from mlm.optim import build_optimizer
from mlm.plan import total_parameters
from mlm.startup.checks import is_model
from mlm.startup.command import find_branch
from mlm.tokenizer import added_pieces, load_tokenizer, num_ids, tokenizer_digest
from mlm.training.datamodule import PretrainDataModule, prepare_text
from mlm.training.engine import StepModule
from mlm.training.processes import enter_run
from mlm.training.run import restore, run_training
from mlm.training.run_folder import find_checkpoint, run_folder
from mlm.training.summary import finish_pretraining, provenance, started_from
from mlm.training.tracking import resolve_tracking

MUST_AGREE = ("model.", "tokenizer", "optimizer.")
"""Beginnings of what two runs must have in common; the rest of their identities says which rows they read."""
MASKING_COLUMNS = ("masking/rate", "masking/mask_token", "masking/random_token", "masking/unchanged")

log = logging.getLogger(__name__)


class PretrainModule(StepModule):
    """A masked language model with its loss, optimizer and schedule.

    Both arguments may be plain values, as a checkpoint holds them; a `model` of None is made for the data.
    """

    config: PretrainConfig
    model: MaskedLM
    validation_columns: tuple[str, ...] = ("val/perplexity", "val/masked_accuracy")
    extra_columns = MASKING_COLUMNS

    def __init__(self, config: PretrainConfig | dict[str, Any], model: dict[str, Any] | None = None):
        super().__init__(from_plain(PretrainConfig, config), model)
        sources = self.config.data.validated_sources
        self.scores = MaskedLMScores(sources=sources)
        self.validation_columns = (*self.validation_columns, *(f"val/loss/{name}" for name in sources))

    def build_model(self) -> MaskedLM:
        """Build the model from its resolved shape, or for the data."""
        if self.hparams["model"] is not None:
            return MaskedLM(from_plain(ModelConfig, self.hparams["model"]))
        return build_model(self.config, self.trainer.datamodule.corpus)  # type: ignore[attr-defined]

    def describe_model(self) -> dict[str, Any]:
        """Return the resolved shape in plain values."""
        return dict(to_plain(self.model.config))

    def identify(self, data: PretrainDataModule) -> dict[str, Any]:
        """Return the facts that a run and its checkpoints must share, in plain values."""
        config, corpus = self.config, data.corpus
        rows = ("seq_len", "packing", "validation_fraction", "max_validation_tokens", "deduplicate")
        return {
            "tokenizer": tokenizer_digest(corpus.tokenizer),  # first: with another one the store differs too
            "corpus": corpus.store.folder.name,
            "packing": ROWS_VERSION,
            "weights": [[part.num_rows, part.per_block] for part in corpus.train.parts] or None,
            "seed": config.seed,
            "optimizer.name": config.optimizer.name,
            **started_from(config.init),
            **{f"data.{name}": getattr(config.data, name) for name in rows},
            "data.validation": corpus.validation.store.folder.name if config.data.validation else None,
            **{f"model.{name}": value for name, value in to_plain(self.model.config).items()},
        }

    def summed_loss(self, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the masked tokens, and the counts of `MaskedBatch`."""
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        counts = batch["num_masked"], batch["num_ordinary"], batch["num_hidden"], batch["num_random"]
        return summed_cross_entropy(logits, batch["labels"]), torch.tensor(counts, dtype=torch.float64)

    def count_metrics(self, counts: Tensor) -> dict[str, Any]:
        """Return the share of ordinary tokens that were predicted, and what was in their places."""
        num_masked, num_ordinary, hidden, random = counts
        predicted = num_masked.clamp(min=1)
        unchanged = num_masked - hidden - random
        rate = num_masked / num_ordinary.clamp(min=1)
        shares = rate, hidden / predicted, random / predicted, unchanged / predicted
        return dict(zip(MASKING_COLUMNS, shares, strict=True))

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return build_optimizer(self.model, self.config.optimizer)

    def validation_step(self, batch: MaskedBatch, batch_idx: int) -> None:
        """Score one batch of held-out rows."""
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        self.scores.update(logits, batch["labels"], batch.get("sources"))

    def compute_validation(self) -> dict[str, float]:
        """Return loss, perplexity and accuracy of the masked tokens, and the loss of each source."""
        scores = {name: float(value) for name, value in self.scores.compute().items() if name != "num_masked"}
        self.scores.reset()
        return scores

    def rank_of(self, scores: dict[str, float]) -> float:
        """Rank validations by their loss."""
        return scores["loss"]

    def save_results(
        self, data: PretrainDataModule, folder: Path, reason: str, kept: int, trainer: pl.Trainer | None
    ) -> None:
        """Save the results of the run."""
        finish_pretraining(self, data.corpus, folder, reason, kept)


def pretrain(config: PretrainConfig) -> int:
    """Run pretraining from text to a saved model, or continue a stopped run; return the exit status.

    It is 0, or 128 + the signal that stopped the run. InputError is a mistake of the user.
    """
    if (status := enter_run(config.trainer, config.name)) is not None:
        return status
    config = replace(config, logging=resolve_tracking(config.logging))
    if config.branch and not config.resume:
        config = _settle_branch(config)
    with run_folder(config) as folder:
        corpus, model = prepare(config, folder if config.resume else None)
        return train(config, folder, corpus, model)


def prepare(config: PretrainConfig, stopped: Path | None = None) -> tuple[Corpus, MaskedLM]:
    """Prepare the text and build the model that fits its vocabulary, or load the one to start from.

    Checkpoints of the `stopped` run serve where `init` is gone.
    """
    checkpoint = find_checkpoint(stopped / "checkpoints") if stopped and config.init else None
    if stopped and checkpoint and not is_model(str(config.init)):
        tokenizer = replace(config.tokenizer, path=str(stopped / "tokenizer"), add_tokens=None)
        values, start = checkpoint.content["identity"], len("model.")
        shape = {name[start:]: value for name, value in values.items() if name.startswith("model.")}
        return prepare_corpus(config.data, tokenizer), MaskedLM(from_plain(ModelConfig, shape))
    if stopped and config.init is None:
        config = replace(config, tokenizer=_kept_tokenizer(config, stopped))
    corpus = prepare_text(config)
    return corpus, build_model(config, corpus)


def _kept_tokenizer(config: PretrainConfig, stopped: Path) -> TokenizerConfig:
    """Return the vocabulary of a run to resume, unless its settings were changed: no other is trained."""
    kept, stored = stopped / "tokenizer" / "tokenizer.json", stopped / "config.yaml"
    same = stored.exists() and read_group(PretrainConfig, stored).tokenizer == config.tokenizer
    return TokenizerConfig(path=str(kept)) if same and kept.exists() else config.tokenizer


def build_model(config: PretrainConfig, corpus: Corpus) -> MaskedLM:
    """Build the model for the vocabulary of a text, or load the one to start from."""
    size = num_ids(corpus.tokenizer)
    torch.manual_seed(config.seed)  # for new weights: of all, of a missing head, of added tokens
    if config.init is None:
        shape = config.model.resolve(size, config.data.seq_len)
        _check_memory(shape)
        model = MaskedLM(shape)
    else:
        start = model_folder(config.init)
        model = load_masked_lm(start)
        if pieces := added_pieces(load_tokenizer(start), corpus.tokenizer):
            log.info("%d words of %s are new tokens", len(pieces), config.tokenizer.add_tokens)
            model = extend_vocabulary(model, pieces)
        model.train()
        model.config.check_fit(size, config.data.seq_len)
    rule_out_unused_ids(model, size)
    model.encoder.gradient_checkpointing = config.trainer.gradient_checkpointing
    if config.trainer.compile:
        log.info("the model is compiled in the first step, which takes half a minute or more for it")
        model.compile()
    return model


def train(config: PretrainConfig, folder: Path, corpus: Corpus, model: MaskedLM) -> int:
    """Train until a bound is reached or a signal arrives, then save; see `pretrain`."""
    module, data = PretrainModule(config), PretrainDataModule(config, corpus)
    module.attach(model)
    module.identity = module.identify(data)
    checkpoint = restore(folder, module)
    if config.branch and checkpoint is None:
        _start_branch(module, _branch_checkpoint(config))
    if is_first_process() and checkpoint is None:
        write_text(folder / "tokenizer" / "tokenizer.json", corpus.tokenizer.to_str(pretty=True))
        if config.init and is_model(config.init):  # with the settings of the model to start from
            settings = model_folder(config.init) / TOKENIZER_CONFIG
            if settings.is_file():
                shutil.copy(settings, folder / "tokenizer")
    facts = {"corpus": {"sources": {source["path"]: source for source in corpus.store.sources}}}
    return run_training(folder, module, data, checkpoint, facts=facts | provenance(corpus))


def _check_memory(config: ModelConfig) -> None:
    """Raise InputError if the weights alone of a model are larger than the memory of this machine."""
    needed = 4 * total_parameters(config)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"a model of model.hidden_size={config.hidden_size} and model.num_hidden_layers="
            f"{config.num_hidden_layers} needs {needed / 1e9:,.0f} GB for its weights alone; "
            f"this machine has {available / 1e9:,.0f} GB"
        )


def _branch_checkpoint(config: PretrainConfig) -> Checkpoint:
    """Return the checkpoint that `config.branch` names, or the newest one of the run that it names."""
    path, _ = find_branch(Path(config.runs_dir), str(config.branch))
    if path.is_file():
        return open_checkpoint(path)
    if (found := find_checkpoint(path / "checkpoints")) is None:
        raise InputError(f"branch={config.branch}: {path / 'checkpoints'} has no checkpoint")
    return found


def _settle_branch(config: PretrainConfig) -> PretrainConfig:
    """Put the checkpoint and the size of its table of positions into the configuration."""
    checkpoint = _branch_checkpoint(config)
    identity, settled = checkpoint.content["identity"], replace(config, branch=str(checkpoint.path))
    if _has_free_length(identity) or config.init:
        return settled
    rows, wanted = identity["model.max_position_embeddings"], config.model.max_position_embeddings
    if config.data.seq_len > rows or wanted not in (None, rows):
        raise InputError(
            f"cannot branch: {checkpoint.path} has a table of {rows} positions, and data.seq_len="
            f"{config.data.seq_len}, model.max_position_embeddings={wanted or 'null'} need another one; "
            "only models with model.position_embedding=rotary can change it"
        )
    return replace(settled, model=replace(config.model, max_position_embeddings=rows))


def _start_branch(module: PretrainModule, checkpoint: Checkpoint) -> None:
    """Give a new run weights, optimizer state and place in the data, if what must agree does."""
    content, mine, theirs = checkpoint.content, module.identity, checkpoint.content["identity"]
    differing = [name for name, value in mine.items() if theirs.get(name) != value]
    for name in differing:
        is_length = name == "model.max_position_embeddings" and _has_free_length(theirs)
        if name.startswith(MUST_AGREE) and not is_length:
            raise InputError(
                f"cannot branch: {name} is {mine[name]}, but {checkpoint.path} was trained with "
                f"{theirs.get(name)}"
            )
    module.start = checkpoint.path
    if all(name.startswith(MUST_AGREE) for name in differing):  # the same text in the same rows and order
        module.progress.rows = content["progress"]["rows"]
    where = f"continue with row {module.progress.rows:,}" if module.progress.rows else "begin with the first"
    log.info("branching off %s, with its weights and optimizer state; the rows %s", checkpoint.path, where)


def _has_free_length(identity: dict[str, Any]) -> bool:  # no weight depends on the longest row
    return identity["model.position_embedding"] in ("rotary", "none")
