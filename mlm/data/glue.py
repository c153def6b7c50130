"""The tasks of GLUE (Wang et al. 2019, arXiv:1804.07461), from the official folders or the copy on the hub.

- `TASKS` is the table of all facts about them; `read_glue` reads a task for training, `read_part` one part
- labels have the ids of the hub's copy, the order of `GlueTask.labels`
- an official file is split at tabs only: quotes are text, except in QQP, which quotes cells as CSV does
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from mlm.config.errors import InputError
from mlm.config.finetune import DIAGNOSTIC, plain_name
from mlm.config.model import ClassifierConfig, LabelType
from mlm.data.formats import readable, split_lines, text_blocks
from mlm.data.labelled import Examples, LabelledTask, PartSize, Table, is_missing, label_numbers, read_table
from mlm.data.tables import Row, without_quotes

HUB_NAME, HUB_LABEL = "nyu-mll/glue", "label"  # the copy on the hub, and the column of its labels
MSR_TRAIN = "msr_paraphrase_train.txt"
"""MRPC as Microsoft publishes it: `dev_ids.tsv` beside it lists the pairs of dev."""
MSR_IDS = ("#1 ID", "#2 ID")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GluePart:
    """One set of examples of a task."""

    files: tuple[str, ...]  # names that its official file may have
    split: str  # name on the hub
    rows: int | None = None  # official number of examples (of QNLI the second version); None: not checked
    submission: str = ""  # file of answers for the GLUE server; empty: it has labels, and is not submitted
    suffix: str = ""  # added to the names of its scores; such a second validation set may be missing


@dataclass(frozen=True)
class GlueTask:
    """The facts about one task."""

    folder: str  # official name
    texts: tuple[str, ...]  # official columns of the one or two texts
    labels: tuple[str, ...]  # names of the classes by their ids; for numbers the name of the quantity
    parts: Mapping[str, GluePart]  # `train`, the validation set, and others
    metrics: tuple[str, ...] = ("accuracy",)  # official scores; the first one ranks epochs and settings
    label: str = "label"  # official column of the label
    label_type: LabelType = "classification"
    spelling: tuple[str, ...] = ()  # the classes in official files and submissions; empty: as in `labels`
    hub_texts: tuple[str, ...] = ()  # columns of the texts on the hub; empty: the official ones
    header: tuple[str, ...] = ()  # columns of official files that have labels but no header line
    quoted: bool = False  # whether cells of official files are quoted as in CSV
    other_folder: str = ""  # another name of the folder, in small letters


def _parts(folder: str, dev: int, test: int) -> dict[str, GluePart]:
    return {
        "train": GluePart(("train.tsv",), "train"),
        "dev": GluePart(("dev.tsv",), "validation", dev),
        "test": GluePart(("test.tsv",), "test", test, folder),
    }


_BITS = ("0", "1")
_PAIR = ("sentence1", "sentence2")
_NLI_PAIR = ("premise", "hypothesis")
_TWO_WAY = ("entailment", "not_entailment")
_THREE_WAY = ("entailment", "neutral", "contradiction")
_BOTH = ("accuracy", "f1")

TASKS = {
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        ("unacceptable", "acceptable"),
        _parts("CoLA", 1043, 1063),
        metrics=("matthews_correlation",),
        spelling=_BITS,
        header=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueTask(
        "SST-2", ("sentence",), ("negative", "positive"), _parts("SST-2", 872, 1821), spelling=_BITS
    ),
    "mrpc": GlueTask(
        "MRPC",
        ("#1 String", "#2 String"),
        ("not_equivalent", "equivalent"),
        {
            "train": GluePart(("train.tsv", MSR_TRAIN), "train"),
            "dev": GluePart(("dev.tsv", MSR_TRAIN), "validation", 408),
            "test": GluePart(("test.tsv", "msr_paraphrase_test.txt"), "test", 1725, "MRPC"),
        },
        metrics=_BOTH,
        label="Quality",
        spelling=_BITS,
        hub_texts=_PAIR,
    ),
    "stsb": GlueTask(
        "STS-B",
        _PAIR,
        ("score",),
        _parts("STS-B", 1500, 1379),
        metrics=("pearson", "spearman"),
        label="score",
        label_type="regression",
    ),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        ("not_duplicate", "duplicate"),
        _parts("QQP", 40430, 390965),
        metrics=_BOTH,
        label="is_duplicate",
        spelling=_BITS,
        quoted=True,
    ),
    "mnli": GlueTask(
        "MNLI",
        _PAIR,
        _THREE_WAY,
        {
            "train": GluePart(("train.tsv",), "train"),
            "dev_matched": GluePart(("dev_matched.tsv",), "validation_matched", 9815),
            "dev_mismatched": GluePart(
                ("dev_mismatched.tsv",), "validation_mismatched", 9832, suffix="_mismatched"
            ),
            "test_matched": GluePart(("test_matched.tsv",), "test_matched", 9796, "MNLI-m"),
            "test_mismatched": GluePart(("test_mismatched.tsv",), "test_mismatched", 9847, "MNLI-mm"),
        },
        label="gold_label",
        hub_texts=_NLI_PAIR,
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), _TWO_WAY, _parts("QNLI", 5463, 5463)),
    "rte": GlueTask("RTE", _PAIR, _TWO_WAY, _parts("RTE", 277, 3000)),
    "wnli": GlueTask(
        "WNLI", _PAIR, ("not_entailment", "entailment"), _parts("WNLI", 71, 146), spelling=_BITS
    ),
    "ax": GlueTask(
        "AX",
        _PAIR,
        _THREE_WAY,
        {"diagnostic": GluePart(("diagnostic.tsv", "AX.tsv", "test.tsv"), "test", 1104, "AX")},
        metrics=(),
        hub_texts=_NLI_PAIR,
        other_folder="diagnostic",
    ),
}


def read_glue(name: str, glue_dir: str | None) -> LabelledTask:
    """Read the training and validation examples of a task, and its second validation set if it is there.

    `glue_dir` is the folder of the official folders; None: the hub's copy.
    """
    spec, parts = TASKS[name], {}
    for part, facts in spec.parts.items():
        if facts.suffix and not has_part(name, part, glue_dir):
            left_out = f"{spec.metrics[0]}{facts.suffix}"
            log.warning("%s: %s is missing, so %s is left out", name, part, left_out)
        elif not facts.submission:
            parts[part] = read_part(name, part, glue_dir)
    train, validation, *_ = parts.values()
    scored = {spec.parts[part].suffix: one for part, one in parts.items() if spec.parts[part].suffix}
    sizes = tuple(size_of(name, part, len(one)) for part, one in parts.items() if spec.parts[part].rows)
    dev_is = " and ".join(str(size) for size in sizes if not size.is_official)
    if dev_is:
        log.warning("%s: there are %s, so scores cannot be compared with those of others", name, dev_is)
    return LabelledTask(
        name,
        spec.label_type,
        spec.labels,
        train,
        validation,
        dev_is or "the official dev set",
        metrics=spec.metrics,
        scored=scored,
        dev_sizes=sizes,
    )


def submitted_parts(name: str) -> dict[str, str]:
    """Return the parts of a task whose answers are submitted, and the official name of each file."""
    return {part: facts.submission for part, facts in TASKS[name].parts.items() if facts.submission}


def size_of(name: str, part: str, rows: int) -> PartSize:
    """Compare a number of examples with the official one of that part."""
    return PartSize(part, rows, TASKS[name].parts[part].rows or rows)


def check_parts(name: str, glue_dir: str | None, with_test: bool = False) -> None:
    """Check the files of a task before anything is trained; the hub has all.

    Warns of averages that cannot be given, and `with_test` of answers that the server will refuse.
    """
    for part, facts in TASKS[name].parts.items() if glue_dir else ():
        if facts.suffix:
            if not has_part(name, part, glue_dir):
                log.warning("%s: without %s the averages over nine columns cannot be given", name, part)
        elif not facts.submission or with_test or name == DIAGNOSTIC:
            file = _find_part(name, part, str(glue_dir))[0]
            if facts.submission and with_test:
                size = size_of(name, part, len(read_part(name, part, glue_dir)))
                if not size.is_official:
                    log.warning("submit=true: %s has %s; the server refuses that", file, size)


def has_part(name: str, part: str, glue_dir: str | None) -> bool:
    """Return whether a part is there; the hub has all."""
    try:
        return glue_dir is None or bool(_find_part(name, part, glue_dir))
    except InputError:
        return False


def _find_part(name: str, part: str, glue_dir: str) -> list[Path]:
    """Return the official file of a part, or the parquet files of a copy of the hub's."""
    spec, facts = TASKS[name], TASKS[name].parts[part]
    if not Path(glue_dir).is_dir():
        raise InputError(f"glue_dir={glue_dir} is not a folder; looked in {Path.cwd()}")
    folders = [path for path in sorted(Path(glue_dir).iterdir()) if path.is_dir()]
    folders = [path for path in folders if plain_name(path.name) in (name, spec.other_folder)]
    if not folders:
        raise InputError(f"{glue_dir} has no folder {spec.folder}; it must hold the official folders of GLUE")
    for folder in folders:
        if any(folder.glob("*.parquet")):
            files = sorted(folder.glob(f"{facts.split}-*.parquet"))
            if not files:
                raise InputError(f"{folder} has no {facts.split}-*.parquet")
            return files
    found = [folder / file for folder in folders for file in facts.files if (folder / file).is_file()]
    if not found:
        raise InputError(f"{folders[0]} has no {' or '.join(facts.files)}")
    return found[:1]


def _download(name: str, split: str) -> list[Path]:
    """Return the parquet files of a split on the hub, from the local cache if the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    pattern, problem = f"{name}/{split}-*.parquet", "no such files"
    try:
        folder = snapshot_download(HUB_NAME, repo_type="dataset", allow_patterns=[pattern])
        files = sorted(Path(folder).glob(pattern))
    except Exception as error:  # the library has a different one for each way to fail
        files, problem = [], type(error).__name__
    if not files:
        problem = f"the hub's {HUB_NAME} cannot be reached, and {name} is not in the cache ({problem})"
        raise InputError(f"{problem}; give the folder of the official files with --glue_dir")
    return files


def read_part(name: str, part: str, glue_dir: str | None) -> Examples:
    """Read one part of a task, by its name in `GlueTask.parts`; secret labels are None."""
    spec, facts = TASKS[name], TASKS[name].parts[part]
    files = _find_part(name, part, glue_dir) if glue_dir else _download(name, facts.split)
    if files[0].suffix != ".parquet":
        ids: dict[Any, int] = {word: number for number, word in enumerate(spec.spelling or spec.labels)}
        table = _official_table(spec, part, files[0])
        return _examples(spec, table, spec.texts, None if facts.submission else spec.label, ids)
    texts, label = spec.hub_texts or spec.texts, None if facts.submission else HUB_LABEL
    examples = []
    for file in files:
        table = read_table(str(file))
        examples.append(_examples(spec, table, texts, label, _ids_of_copy(spec, file)))
    pairs = [text for one in examples for text in one.pairs or ()]
    labels = np.concatenate([one.labels for one in examples]) if label else None
    return Examples([text for one in examples for text in one.texts], pairs or None, labels)


def _official_table(spec: GlueTask, part: str, path: Path) -> Table:
    is_undivided, has_labels = path.name == MSR_TRAIN, not spec.parts[part].submission
    columns = [*spec.texts, *([spec.label] if has_labels else []), *(MSR_IDS if is_undivided else ())]
    rows = _read_official(path, columns, spec.header if has_labels else (), spec.quoted)
    if is_undivided:
        rows = _divide_mrpc(rows, path, is_dev=part == "dev")
    if not rows:
        raise InputError(f"{path}: has no row of {part} that can be read")
    return Table(str(path), rows)


def _read_official(path: Path, columns: list[str], header: tuple[str, ...], quoted: bool) -> list[Row]:
    """Read some columns of an official file.

    A file without a header line has the columns `header`. With `quoted` the quoting of cells is undone, and
    rows with too few or too many cells are skipped with a warning.
    """
    with readable(str(path)), path.open("rb") as file:
        blocks = text_blocks(file, str(path), "utf-8", advice="convert it: iconv -f {} -t utf-8")
        lines = [
            (number, line.split("\t")) for number, line in enumerate(split_lines(blocks), 1) if line.strip()
        ]
    names = list(header) or [name.strip() for name in (lines.pop(0)[1] if lines else [])]
    if not lines:
        raise InputError(f"{path}: has no rows")
    if missing := [column for column in columns if column not in names]:
        raise InputError(f"{path}, line 1: has no column {missing[0]}, but {', '.join(names)}")
    places = {column: names.index(column) for column in columns}
    rows, odd = [], []
    for number, cells in lines:
        if max(places.values()) < len(cells) <= len(names):
            row = {column: cells[place] for column, place in places.items()}
            row = {column: without_quotes(cell) for column, cell in row.items()} if quoted else row
            rows.append((f"line {number}", row))
        else:
            odd.append(f"{path}, line {number}: {len(cells)} cells under {len(names)} columns")
    if odd and not quoted:
        raise InputError(odd[0])
    if odd:
        log.warning("%s; %d such row(s) are skipped", odd[0], len(odd))
    return rows


def _divide_mrpc(rows: list[Row], path: Path, is_dev: bool) -> list[Row]:
    """Return the rows of train or dev of Microsoft's training file: dev_ids.tsv lists the pairs of dev."""
    lists = [path.with_name(f"{prefix}dev_ids.tsv") for prefix in ("", "mrpc_")]
    found = next((file for file in lists if file.is_file()), None)
    if found is None:
        raise InputError(f"{path.parent} has no dev_ids.tsv, which tells dev from train in {path.name}")
    of_dev = {tuple(line.split()) for line in found.read_text(encoding="utf-8-sig").splitlines()}
    return [row for row in rows if (tuple(row[1][name] for name in MSR_IDS) in of_dev) == is_dev]


def _ids_of_copy(spec: GlueTask, file: Path) -> dict[Any, int]:
    """Return the id of each class by its id in a copy, matched by name if the copy names its classes."""
    from datasets import Features

    features = Features.from_arrow_schema(pq.read_schema(file))
    names = tuple(getattr(features.get(HUB_LABEL), "names", None) or spec.labels)
    if names == tuple(map(str, range(len(spec.labels)))):
        names = spec.labels
    order = ClassifierConfig(spec.labels).order_of(names)
    if order is None:
        theirs, ours = ", ".join(names), ", ".join(spec.labels)
        raise InputError(f"{file}: its classes are {theirs}, those of the task {ours}")
    return dict(enumerate(order))


def _examples(
    spec: GlueTask, table: Table, texts: tuple[str, ...], label: str | None, ids: Mapping[Any, int]
) -> Examples:
    """Return the examples of a table: columns of texts and label (None: secret), ids of classes by values."""
    first, *second = (table.texts(column, "") for column in texts)
    labels: npt.NDArray[Any] | None = None
    if label:
        cells = table.cells(label, "")
        labels = label_numbers(cells) if spec.label_type == "regression" else _class_ids(cells, ids)
    return Examples(first, second[0] if second else None, labels)


def _class_ids(cells: list[tuple[str, Any]], ids: Mapping[Any, int]) -> npt.NDArray[np.int64]:
    found = []
    for place, value in cells:
        key = value.strip() if isinstance(value, str) else value
        if is_missing(key):
            raise InputError(f"{place} is missing")
        if isinstance(key, bool) or key not in tuple(ids):  # not the dictionary: a value may be a list
            shown = repr(key[:60] if isinstance(key, str) else key)
            raise InputError(f"{place} is {shown}, not {' or '.join(map(str, ids))}")
        found.append(ids[key])
    return np.array(found, np.int64)
