"""Write a submission for the GLUE server: a zip of eleven tables, one per test set, in the server's spelling.

CoLA SST-2 MRPC STS-B MNLI-m MNLI-mm QNLI QQP RTE WNLI AX .tsv, each `index <tab> prediction`, index from 0
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig
from mlm.cores import share_cores
from mlm.data.glue import TASKS, read_part
from mlm.evaluation.predictor import Predictor, read_classifier, warn_truncated
from mlm.files import replacing

HIGHEST_SCORE = 5.0
"""Scores of STS-B are between 0 and this."""


def answer(
    model: str, task: str, part: str, glue_dir: str | None, longest: int | None, batch_size: int
) -> list[str]:
    """Return the answers of a fine-tuned model to a part of a task, in the server's spelling.

    Args:
        model: its folder.
        task: the task.
        part: of the task, as in `read_part`.
        glue_dir: folder of the official files; None: the hub.
        longest: most tokens of an example; None: as many as the model reads.
        batch_size: examples per pass.

    Raises:
        InputError: the file cannot be read, or the model has other classes.
    """
    share_cores(1)
    predictor = Predictor(model, batch_size=batch_size, max_length=longest)
    classifier = read_classifier(predictor.folder)
    encoded = predictor.encode(read_part(task, part, glue_dir))
    warn_truncated(encoded.num_truncated, len(encoded), f"{task}, {part}", predictor.max_length)
    return spell(task, predictor.logits(encoded), classifier)


def spell(task: str, logits: npt.NDArray[np.float64], classifier: ClassifierConfig) -> list[str]:
    """Return the answers (N) of logits (N, C); classes are matched by name.

    Raises:
        InputError: the model has other classes than the task.
    """
    spec = TASKS[task]
    if spec.label_type == "regression":
        return [f"{score:.3f}" for score in logits[:, 0].clip(0, HIGHEST_SCORE)]
    order = classifier.order_of(spec.labels)
    if order is None:
        names = ", ".join(classifier.labels)
        raise InputError(f"the model's classes are {names}, those of {task} {', '.join(spec.labels)}")
    words = spec.spelling or spec.labels
    return [words[best] for best in logits[:, order].argmax(1)]


def answer_table(answers: list[str]) -> str:
    """Return the content of one file."""
    rows = [f"{index}\t{prediction}" for index, prediction in enumerate(answers)]
    return "\n".join(["index\tprediction", *rows]) + "\n"


def write_submission(path: Path, answers: Mapping[str, list[str]]) -> None:
    """Write the zip file atomically.

    Args:
        path: the file.
        answers: the answers in their order, by official name of the file, such as `MNLI-mm`.
    """
    with (
        replacing(path, "place") as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in sorted(answers):
            archive.writestr(zipfile.ZipInfo(f"{name}.tsv"), answer_table(answers[name]))
