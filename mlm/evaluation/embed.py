"""Vectors of whole texts: the `embed` command.

N texts, D hidden.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tqdm import tqdm

from mlm.config.errors import InputError
from mlm.config.evaluation import EmbedConfig
from mlm.cores import share_cores
from mlm.data.examples import EncodedExamples, batches_in_order, encode_examples
from mlm.data.labelled import Examples, read_texts
from mlm.evaluation.predict import max_length, tell_truncated
from mlm.files import replacing
from mlm.hub.download import model_folder
from mlm.hub.pretrained import load_encoder
from mlm.model.encoder import Encoder
from mlm.model.pooling import pool
from mlm.tokenizer import load_tokenizer, num_ids

log = logging.getLogger(__name__)


@torch.no_grad()
def embed_examples(
    encoder: Encoder,
    examples: EncodedExamples,
    pooling: Literal["mean", "cls"] = "mean",
    normalize: bool = True,
    batch_size: int = 64,
) -> npt.NDArray[np.float32]:
    """Return the vectors (N, D) of tokenized texts, in their order.

    Args:
        encoder: on any device.
        examples: (N).
        pooling: the mean over the tokens of a text, special ones included, or its first token.
        normalize: whether to scale each vector to length 1.
        batch_size: texts a pass; similar lengths go together.
    """
    device = next(encoder.parameters()).device
    vectors = np.zeros((len(examples), encoder.config.hidden_size), np.float32)
    with tqdm(total=len(examples), desc="embedding", unit="text", leave=False) as bar:
        for rows in batches_in_order(examples.lengths, batch_size):
            batch = examples[rows]
            mask = batch["attention_mask"].to(device)
            pooled = pool(encoder(batch["input_ids"].to(device), mask), mask, pooling).float()
            vectors[rows] = (F.normalize(pooled, dim=-1) if normalize else pooled).cpu().numpy()
            bar.update(len(rows))
    return vectors


def embed(config: EmbedConfig) -> int:
    """Write the vectors of the texts of a file.

    Raises:
        InputError: no model or no texts where the configuration says.
    """
    folder = model_folder(config.model)
    encoder, tokenizer = load_encoder(folder), load_tokenizer(folder)
    encoder.config.check_fit(num_ids(tokenizer), seq_len=1)
    texts = read_texts(config.input, config.text_column, config.encoding)
    longest = max_length(encoder.config, config.max_length or _trained_length(folder), "max_length")
    examples = encode_examples(tokenizer, Examples(texts), longest)
    tell_truncated(examples.num_truncated, len(examples), config.input, longest)
    share_cores(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vectors = embed_examples(
        encoder.to(device), examples, config.pooling, config.normalize, config.batch_size
    )
    with replacing(Path(config.output), "place") as partial, partial.open("wb") as file:
        np.save(file, vectors)
    print(f"{vectors.shape[0]:,} vectors of {vectors.shape[1]} numbers: {config.output}")
    return 0


def _trained_length(folder: Path) -> int | None:
    """Return how many tokens a sentence-transformers model was trained to read; None: it is none.

    Its vectors of longer texts are, by its own recipe, those of the first so many tokens.
    """
    path = folder / "sentence_bert_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}; remove it to read as far as the model does") from None
    longest = found.get("max_seq_length") if isinstance(found, dict) else None
    return longest if isinstance(longest, int) and longest >= 8 else None
