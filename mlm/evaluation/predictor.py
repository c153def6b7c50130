"""`Predictor`: texts in; labels, vectors or fillings out.

Importing this module, reading and tokenizing load no torch, and predicting no torchmetrics.

Sizes: N texts, B a batch, S tokens, M masked positions, C classes (1 for a number), D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mlm.config.commands import LongTexts
from mlm.config.errors import InputError, require
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.data.examples import EncodedExamples, batches_in_order, encode_examples
from mlm.data.labelled import Examples
from mlm.launch import command_for
from mlm.tokenizer import SpecialTokens, load_tokenizer, num_ids

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]
Batch = dict[str, npt.NDArray[np.int64]]
"""input_ids, attention_mask and token_type_ids (B, S); for a masked LM also masked_positions (B, M)."""
Head = Literal["classifier", "encoder", "masked_lm"]
TextPooling = Literal["mean", "cls"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """The answer of a classifier for one text."""

    label: str | float | tuple[str, ...]
    """A class, a number, or all labels of the text."""
    probabilities: dict[str, float]
    """By label; empty for a number."""


class Candidate(NamedTuple):
    """One proposal for a masked position, spelt as in the vocabulary."""

    token: str
    probability: float


class Predictor:
    """A model folder ready for inference; each head is loaded when it is first used.

    Args:
        model: model folder, or OWNER/NAME on the Hugging Face hub.
        device: such as cpu, mps or cuda:1; auto: the best available.
        batch_size: most texts a pass.
        max_length: most tokens of a text, special ones included; None: as many as it was trained with, which
            its folder says.
        long_texts: truncate: cut longer texts, with a warning; windows: for labels read all of them in
            windows of max_length tokens, see `encode_examples`, and take the mean of their logits.

    Raises:
        InputError: the folder is not a model, its tokenizer does not fit, or max_length is too large for it.
    """

    def __init__(
        self,
        model: str | Path,
        device: str = "auto",
        batch_size: int = 64,
        max_length: int | None = None,
        long_texts: LongTexts = "truncate",
    ) -> None:
        from mlm.hub import pretrained

        self.long_texts = long_texts
        self.device, self.batch_size = device, batch_size
        self.folder = pretrained.model_folder(model)
        self.config, self.tokenizer = pretrained.read_shape(self.folder), load_tokenizer(self.folder)
        self.config.check_fit(num_ids(self.tokenizer), seq_len=1)
        asked = max_length or pretrained.longest_row(self.folder, self.config)
        self.max_length = resolve_max_length(self.config, asked, "max_length")
        self._loaded: dict[Head, Any] = {}

    def encode(self, examples: Examples) -> EncodedExamples:
        """Tokenize examples (N) and cut them to `max_length`, or into windows of it."""
        check_windows(self.long_texts, examples.pairs is not None)
        in_windows = self.long_texts == "windows"
        encoded = encode_examples(self.tokenizer, examples, self.max_length, in_windows)
        if encoded.further:
            windows, texts = encoded.further
            number = len(np.unique(texts))
            log.info("%d of %d texts are read in %d windows", number, len(encoded), number + len(windows))
        return encoded

    def logits(self, examples: EncodedExamples, show_progress: bool = True) -> Floats:
        """Return the logits of the classifier, (N, C); InputError: there is no classifier."""
        model, task = self._model("classifier"), "predicting" if show_progress else None
        return predict_logits(model, examples, self.batch_size, task)

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Prediction]:
        """Return the label of each text, or of each pair of texts, with probabilities.

        Raises:
            InputError: the model has no classifier, or needs pairs where there are none or the reverse.
        """
        classifier = self._model("classifier").classifier_config
        check_pairs(classifier, None if pairs is None else "[...]", "pairs")
        encoded = self.encode(_examples(texts, pairs))
        warn_truncated(encoded.num_truncated, len(encoded), "texts", self.max_length)
        labels, probabilities = decide(self.logits(encoded), classifier)
        return [
            Prediction(label, dict(zip(classifier.labels, shares, strict=False)))
            for label, shares in zip(labels, probabilities.tolist(), strict=True)
        ]

    def embed(
        self, texts: Sequence[str], pooling: TextPooling = "mean", normalize: bool = True, name: str = "texts"
    ) -> npt.NDArray[np.float32]:
        """Return one vector a text, (N, D).

        `pooling` takes the mean over the tokens of a text, special ones included, or its first token;
        `normalize` scales each vector to length 1; `name` is for the warning about long texts.
        """
        encoded = encode_examples(self.tokenizer, _examples(texts), self.max_length)
        warn_truncated(encoded.num_truncated, len(encoded), name, self.max_length)
        model = next(iter(self._loaded.values()), None) or self._model("encoder")
        compute = partial(_compute_vectors, model, pooling=pooling, normalize=normalize)
        return _run_batches(encoded, self.batch_size, compute, self.config.hidden_size, "embedding")

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Candidate]]:
        """Return the `top_k` most likely tokens for each mask token in a text, in order.

        Raises:
            InputError: the model has no masked-LM head, or the text no mask token or too many tokens.
        """
        tokenizer, longest = self.tokenizer, self.config.max_position_embeddings
        mask = SpecialTokens.from_tokenizer(tokenizer).mask
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = False  # here a literal mask token is meant as one
        model, ids = self._model("masked_lm"), np.array(tokenizer.encode(text).ids)
        positions = np.flatnonzero(ids == mask)
        if not len(positions):
            raise InputError(f"nothing to fill in {text!r}: write {tokenizer.id_to_token(mask)} for a word")
        if longest is not None and len(ids) > longest:
            raise InputError(f"{text[:40]!r}... has {len(ids)} tokens; the model reads at most {longest}")
        logits = _compute_logits(model, {"input_ids": ids[None], "masked_positions": positions[None]})[0]
        known = np.array(sorted(tokenizer.get_vocab(with_added_tokens=True).values()))
        shares = softmax(logits.astype(np.float64))
        best = known[np.argsort(-shares[:, known], axis=1, kind="stable")[:, :top_k]]
        return [
            [Candidate(str(tokenizer.id_to_token(token)), float(row[token])) for token in tokens]
            for tokens, row in zip(best.tolist(), shares, strict=True)
        ]

    def _model(self, head: Head) -> Any:
        from mlm.hub import pretrained

        if head not in self._loaded:
            loaders: dict[Head, Callable[[Path], Any]] = {
                "classifier": pretrained.load_classifier,
                "encoder": pretrained.load_encoder,
                "masked_lm": partial(pretrained.load_masked_lm, needs_head=True),
            }
            self._loaded[head] = loaders[head](self.folder).to(pick_device(self.device))
        return self._loaded[head]


def _examples(texts: Sequence[str], pairs: Sequence[str] | None = None) -> Examples:
    for name, value in (("texts", texts), ("pairs", pairs)):
        require(not isinstance(value, str), name, repr(value)[:40], "is one text; give a list of texts")
    return Examples(list(texts), None if pairs is None else list(pairs))


def pick_device(device: str = "auto", rank: int = 0) -> torch.device:
    """Return a device by its name; auto: a CUDA GPU (by rank where there are several), else MPS, else CPU."""
    import torch

    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def arguments(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the forward pass in a batch; token types only if the model has them."""
    names = ["input_ids", "attention_mask", "masked_positions"]
    names += ["token_type_ids"] if model.config.type_vocab_size > 1 else []
    return {name: batch[name] for name in names if name in batch}


def _tensors(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    import torch

    device = next(model.parameters()).device
    return {name: torch.from_numpy(values).to(device) for name, values in arguments(model, batch).items()}


def _compute_logits(model: Any, batch: Batch) -> npt.NDArray[np.float32]:
    """Return (B, C) of a classifier, or (B, M, V) of a masked LM at `masked_positions`."""
    import torch

    with torch.no_grad():
        return model(**_tensors(model, batch)).float().cpu().numpy()


def _compute_vectors(
    model: Any, batch: Batch, pooling: TextPooling, normalize: bool
) -> npt.NDArray[np.float32]:
    """Return the pooled hidden state of each text, (B, D)."""
    import torch

    from mlm.model.heads import pool

    inputs, encoder = _tensors(model, batch), getattr(model, "encoder", model)
    with torch.no_grad():
        pooled = pool(encoder(**inputs), inputs["attention_mask"], pooling).float()
        return (torch.nn.functional.normalize(pooled, dim=-1) if normalize else pooled).cpu().numpy()


def predict_logits(model: Any, examples: EncodedExamples, batch_size: int, task: str | None = None) -> Floats:
    """Return the logits of all examples in their order, (N, C), in the current mode of a classifier.

    Those of a text in windows are the mean over its windows.
    """
    compute, width = partial(_compute_logits, model), model.classifier.out_features
    logits = _run_batches(examples, batch_size, compute, width, task).astype(np.float64)
    if examples.further:
        windows, texts = examples.further
        np.add.at(logits, texts, _run_batches(windows, batch_size, compute, width, task))
        logits /= 1 + np.bincount(texts, minlength=len(logits))[:, None]
    return logits


def _run_batches(
    examples: EncodedExamples,
    batch_size: int,
    compute: Callable[[Batch], npt.NDArray[np.float32]],
    width: int,
    task: str | None = None,
) -> npt.NDArray[np.float32]:
    """Return the outputs of `compute`, (B, width) a batch, for all examples in their order, (N, width).

    Examples of similar lengths go together. `task` is the title of a progress bar; None: no bar.
    """
    outputs = np.zeros((len(examples), width), np.float32)
    with progress_bar(task, "text", total=len(examples)) as bar:
        for rows in batches_in_order(examples.lengths, batch_size):
            outputs[rows] = compute(examples.arrays(rows))
            bar.update(len(rows))
    return outputs


def progress_bar(task: str | None, unit: str, **options: Any) -> tqdm:
    """Return a bar with rate and time left that appears after some seconds; it never does without a task."""
    often = 0.3 if sys.stderr.isatty() else 10.0  # a log file need not hold every update
    options |= {"disable": task is None, "leave": False, "delay": 2, "mininterval": often}
    return tqdm(desc=task, unit=unit, dynamic_ncols=True, **options)


def check_pairs(classifier: ClassifierConfig, second: str | None, key: str = "text_pair_column") -> None:
    """Refuse a `second` text, set by `key`, for a model of single texts, and its lack for one of pairs."""
    hint = "leaves a text out: the model was trained on pairs; give the second text of each"
    require(second is not None or not classifier.text_pairs, key, "null", hint)
    hint = "is one too many: the model was trained on single texts"
    require(second is None or classifier.text_pairs is not False, key, second, hint)


def check_windows(long_texts: str, has_pairs: bool) -> None:
    """Refuse windows over pairs of texts."""
    rule = "is for single texts, and these are pairs; leave it out"
    require(long_texts != "windows" or not has_pairs, "long_texts", long_texts, rule)


def resolve_max_length(model: ModelConfig, asked: int | None, key: str) -> int | None:
    """Return the most tokens of an example: as asked, but refuse more than the model reads; or all those."""
    longest = model.max_position_embeddings
    if asked is not None and longest is not None:
        longer = f"make a longer one: {command_for('train.py')} --branch RUN --data.seq_len {asked}"
        hint = f"is longer than the model's max_position_embeddings={longest}; leave it out, or {longer}"
        require(asked <= longest, key, asked, hint)
    return asked or longest


def warn_truncated(number: int, total: int, name: str, longest: int | None) -> None:
    """Log how many of all examples were too long, if any."""
    if number:
        log.warning("%s: %.1f %% of the examples are cut to %s tokens", name, 100 * number / total, longest)


def decide(logits: Floats, classifier: ClassifierConfig) -> tuple[list[Any], Floats]:
    """Return the label of each text, as in `Prediction`, and the probabilities (N, C); (N, 0) for numbers."""
    names = classifier.labels
    if classifier.label_type == "regression":
        return logits[:, 0].tolist(), np.zeros((len(logits), 0))
    if classifier.label_type == "multilabel":
        present = [tuple(names[number] for number in np.flatnonzero(row)) for row in logits > 0]
        return present, np.exp(-np.logaddexp(0.0, -logits))
    return [names[best] for best in logits.argmax(1)], softmax(logits)


def softmax(logits: Floats) -> Floats:
    """Return the probabilities (N, C)."""
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)
