"""Pretraining: the module that computes the loss, the data module that brings its batches, and the run."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
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
from mlm.training.run import Recipe, restore, run_training, take_kept_weights
from mlm.training.run_folder import Checkpoint, find_checkpoint, open_checkpoint, run_folder
from mlm.training.summary import finish_run, provenance
from mlm.training.tracking import build_tracker, resolve_tracking

MUST_AGREE = ("model.", "tokenizer", "optimizer.")
"""Beginnings of what two runs must have in common; the rest of their identities says which rows they read."""
MASKING_COLUMNS = ("masking/rate", "masking/mask_token", "masking/random_token", "masking/unchanged")

log = logging.getLogger(__name__)


class PretrainModule(StepModule):
    """A masked language model with its loss, optimizer and schedule.

    Args:
        config: the configuration, or the plain values of one, as a checkpoint holds it.
        model: the resolved shape in plain values; None: made for the vocabulary of `trainer.datamodule`.
    """

    config: PretrainConfig
    model: MaskedLM

    def __init__(self, config: PretrainConfig | dict[str, Any], model: dict[str, Any] | None = None):
        super().__init__(from_plain(PretrainConfig, config), model)
        self.scores = MaskedLMScores()

    def build_model(self) -> MaskedLM:
        """Build the model from its resolved shape, or for the data."""
        if self.hparams["model"] is not None:
            return MaskedLM(from_plain(ModelConfig, self.hparams["model"]))
        return build_model(self.config, self.trainer.datamodule.corpus)  # type: ignore[attr-defined]

    def describe_model(self) -> dict[str, Any]:
        """Return the resolved shape in plain values."""
        return dict(to_plain(self.model.config))

    def configure_model(self) -> None:
        """Build the model, and note what a run that resumes this one must have in common."""
        super().configure_model()
        data = self.data()
        if isinstance(data, PretrainDataModule) and not self.identity:
            self.identity = identity_of(self.config, data.corpus, self.model)

    def summed_loss(self, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the masked tokens, and the counts of `MaskedBatch`."""
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        counts = batch["num_masked"], batch["num_ordinary"], batch["num_hidden"], batch["num_random"]
        return summed_cross_entropy(logits, batch["labels"]), torch.tensor(counts, dtype=torch.float64)

    def count_metrics(self, counts: Tensor) -> dict[str, Any]:
        """Return the share of ordinary tokens that were predicted, and what was in their places."""
        num_masked, num_ordinary, hidden, random = counts
        predicted = num_masked.clamp(min=1)
        shares = (
            num_masked / num_ordinary.clamp(min=1),
            hidden / predicted,
            random / predicted,
            (num_masked - hidden - random) / predicted,
        )
        return dict(zip(MASKING_COLUMNS, shares, strict=True))

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return build_optimizer(self.model, self.config.optimizer)

    def validation_step(self, batch: MaskedBatch, batch_idx: int) -> None:
        """Score one batch of held-out rows."""
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        self.scores.update(logits, batch["labels"])

    def compute_validation(self) -> dict[str, float]:
        """Return loss, perplexity and accuracy of the masked tokens."""
        scores = {name: float(value) for name, value in self.scores.compute().items() if name != "num_masked"}
        self.scores.reset()
        return scores

    def on_validation_epoch_end(self) -> None:
        """Log the scores under a stock Trainer."""
        scores = self.compute_validation()
        scores["accuracy"] = scores.pop("masked_accuracy")
        self.log_dict({f"val/{name}": value for name, value in scores.items()}, prog_bar=True)

    def rank_of(self, scores: dict[str, float]) -> float:
        """Rank validations by their loss."""
        return scores["loss"]


def pretrain(config: PretrainConfig) -> int:
    """Run pretraining from text to a saved model, or continue a stopped run.

    Returns:
        The exit status: 0, or 128 + the signal that stopped the run.

    Raises:
        InputError: something the user has to change; a run folder made for it is removed again.
    """
    status = enter_run(config.trainer, config.name)
    if status is not None:
        return status
    config = replace(config, logging=resolve_tracking(config.logging))
    if config.branch and not config.resume:
        config = settle_branch(config)
    with run_folder(config) as folder:
        corpus, model = prepare(config, folder if config.resume else None)
        return train(config, folder, corpus, model)


def prepare(config: PretrainConfig, stopped: Path | None = None) -> tuple[Corpus, MaskedLM]:
    """Prepare the text and build the model that fits its vocabulary, or load the one to start from.

    Args:
        config: of the run.
        stopped: folder of a run to resume, whose checkpoints serve where `init` is gone.
    """
    checkpoint = find_checkpoint(stopped / "checkpoints") if stopped and config.init else None
    if stopped and checkpoint and not is_model(str(config.init)):
        tokenizer = replace(config.tokenizer, path=str(stopped / "tokenizer"), add_tokens=None)
        shape = {
            name.removeprefix("model."): value
            for name, value in checkpoint.content["identity"].items()
            if name.startswith("model.")
        }
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
        check_memory(shape)
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
    module.identity = identity_of(config, corpus, model)
    checkpoint = restore(config, folder, module)
    if config.branch and checkpoint is None:
        start_branch(module, branch_checkpoint(config))
    if is_first_process() and checkpoint is None:
        keep_tokenizer(config, folder / "tokenizer", corpus.tokenizer)
    settings = config.trainer
    recipe = Recipe(
        tokens_per_step=corpus.train.tokens_per_row * settings.rows_per_step,
        val_every=settings.val_every,
        save_every=settings.save_every,
        validation_columns=("val/perplexity", "val/masked_accuracy"),
        extra_columns=MASKING_COLUMNS,
        num_workers=config.data.num_workers,
    )
    facts = {"corpus": {"sources": {source["path"]: source for source in corpus.store.sources}}}
    tracker = partial(build_tracker, config, config.logging, folder, facts | provenance(corpus))

    def finish(reason: str, trainer: Any) -> None:
        kept = take_kept_weights(config, folder, module)
        finish_run(config, folder, corpus, module.model, module.progress, reason, kept)

    return run_training(config, folder, module, data, recipe, checkpoint, tracker, finish)


def keep_tokenizer(config: PretrainConfig, folder: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer into the run folder, with the settings of the model the run starts from."""
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    if config.init and is_model(config.init):
        settings = model_folder(config.init) / TOKENIZER_CONFIG
        if settings.is_file():
            shutil.copy(settings, folder)


def check_memory(config: ModelConfig) -> None:
    """Refuse a model whose weights alone are larger than the memory of this machine.

    Raises:
        InputError: they are.
    """
    needed = 4 * total_parameters(config)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"a model of model.hidden_size={config.hidden_size} and model.num_hidden_layers="
            f"{config.num_hidden_layers} needs {needed / 1e9:,.0f} GB for its weights alone; "
            f"this machine has {available / 1e9:,.0f} GB"
        )


def identity_of(config: PretrainConfig, corpus: Corpus, model: MaskedLM) -> dict[str, Any]:
    """Return what two runs must have in common for one to resume the other's checkpoint, in plain values."""
    rows = ("seq_len", "packing", "validation_fraction", "max_validation_tokens", "deduplicate")
    return {
        "tokenizer": tokenizer_digest(corpus.tokenizer),  # first: with another one the store differs too
        "corpus": corpus.store.folder.name,
        "packing": ROWS_VERSION,
        "weights": [[part.num_rows, part.per_block] for part in corpus.train.parts] or None,
        "seed": config.seed,
        "optimizer.name": config.optimizer.name,
        **{f"data.{name}": getattr(config.data, name) for name in rows},
        **{f"model.{name}": value for name, value in to_plain(model.config).items()},
    }


def branch_checkpoint(config: PretrainConfig) -> Checkpoint:
    """Return the checkpoint that `config.branch` names, or the newest one of the run that it names.

    Raises:
        InputError: there is none.
    """
    path, _ = find_branch(Path(config.runs_dir), str(config.branch))
    if path.is_file():
        return open_checkpoint(path)
    found = find_checkpoint(path / "checkpoints")
    if found is None:
        raise InputError(f"branch={config.branch}: {path / 'checkpoints'} has no checkpoint")
    return found


def settle_branch(config: PretrainConfig) -> PretrainConfig:
    """Name the checkpoint in the configuration, and give the model the table of positions that is in it.

    Raises:
        InputError: rows would be longer than that table.
    """
    checkpoint = branch_checkpoint(config)
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


def start_branch(module: Any, checkpoint: Checkpoint) -> None:
    """Give a new run weights, optimizer state and place in the data.

    Args:
        module: the `PretrainModule` of the new run.
        checkpoint: where it starts.

    Raises:
        InputError: it is of another model, tokenizer or optimizer; names what differs.
    """
    content, mine = checkpoint.content, module.identity
    theirs = content["identity"]
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
    where = f"go on with row {module.progress.rows:,}" if module.progress.rows else "begin anew"
    log.info("branching off %s, with its weights and optimizer state; the rows %s", checkpoint.path, where)


def _has_free_length(identity: dict[str, Any]) -> bool:
    """Tell whether no weight of a model depends on its longest row."""
    return identity["model.position_embedding"] in ("rotary", "none")
