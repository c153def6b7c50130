"""Vectors of whole texts: the `embed` command."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlm.config.evaluation import EmbedConfig
from mlm.cores import share_cores
from mlm.data.labelled import read_texts
from mlm.evaluation.predictor import Predictor
from mlm.files import replacing


def embed(config: EmbedConfig) -> int:
    """Write the vectors of the texts of a file.

    Raises:
        InputError: there is no model, or the file has no texts in the given column.
    """
    texts = read_texts(config.input, config.text_column, config.encoding)
    share_cores(1)
    predictor = Predictor(config.model, batch_size=config.batch_size, max_length=config.max_length)
    vectors = predictor.embed(texts, config.pooling, config.normalize, config.input)
    with replacing(Path(config.output), "place") as partial, partial.open("wb") as file:
        np.save(file, vectors)
    print(f"{vectors.shape[0]:,} vectors of {vectors.shape[1]} numbers: {config.output}")
    return 0
