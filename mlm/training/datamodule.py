"""The batches of a pretraining run, for Lightning: which rows, masked how, from where the run stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from mlm.config.experiment import PretrainConfig
from mlm.data.collate import MaskedBatch, MaskedRows, build_masking
from mlm.data.corpus import Corpus
from mlm.data.sampler import TrainingSampler
from mlm.evaluation.masked_lm import frozen_batches
from mlm.masking import mask_rate_at
from mlm.plan import planned_steps
from mlm.training.callbacks import Progress


class TimedLoader(DataLoader[MaskedBatch]):
    """A loader that counts how long training waited for its batches."""

    waited_s = 0.0
    """Seconds, since it was built."""

    def __iter__(self) -> Iterator[MaskedBatch]:  # type: ignore[override]
        start = time.monotonic()
        for batch in super().__iter__():
            self.waited_s += time.monotonic() - start
            yield batch
            start = time.monotonic()


class PretrainDataModule(pl.LightningDataModule):
    """Brings the batches of this rank.

    Args:
        corpus: the prepared text.
        config: masking, batch size and seed.
        progress: tells where to go on.
    """

    def __init__(self, corpus: Corpus, config: PretrainConfig, progress: Progress):
        super().__init__()
        self.corpus, self.config, self.progress = corpus, config, progress

    @property
    def micro_batch_size(self) -> int:
        """Rows per pass on one device."""
        assert self.trainer is not None
        passes = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return self.config.trainer.global_batch_size // passes

    def train_dataloader(self) -> TimedLoader:
        """Return the training batches, without end."""
        assert self.trainer is not None
        workers = self.config.data.num_workers
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        rate = self.config.masking.highest_mask_rate
        masking = build_masking(self.config.masking, rate, self.corpus.tokenizer)
        return TimedLoader(
            MaskedRows(self.corpus.train, masking, self.config.seed),
            sampler=TrainingSampler(
                num_rows=len(self.corpus.train),
                seed=self.config.seed,
                global_batch_size=self.config.trainer.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                rank=self.trainer.global_rank,
                world_size=self.trainer.world_size,
                rows_consumed=self.progress.rows,
                parts=self.corpus.train.parts,
                mask_rate=self.mask_rates(self.trainer.global_step),
            ),
            batch_size=None,
            num_workers=(2 if on_gpu else 0) if workers is None else workers,
            pin_memory=on_gpu,
        )

    def mask_rates(self, done: int) -> Callable[[int], float]:
        """Return the mask rate of the n-th step after `done` ones.

        Loader processes ask ahead of training, so the length of a run comes from its bounds where it can. A
        run with a time limit learns its length on the way: until `Progress.mask_rate_steps` nothing moves.
        """
        masking, trainer = self.config.masking, self.config.trainer
        if trainer.max_time is not None:
            return lambda step: mask_rate_at(
                masking, done + step, *(self.progress.mask_rate_steps or (0, None))
            )
        total = planned_steps(trainer, self.corpus.train.tokens_per_row * trainer.global_batch_size)
        return lambda step: mask_rate_at(masking, done + step, 0, total)

    def val_dataloader(self) -> DataLoader[MaskedBatch]:
        """Return the held-out rows of this rank, with frozen masks at a rate that no schedule moves."""
        assert self.trainer is not None
        masking = build_masking(
            self.config.masking, self.config.masking.validation_mask_rate, self.corpus.tokenizer
        )
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return frozen_batches(self.corpus.validation, masking, self.micro_batch_size, rank, world_size)
