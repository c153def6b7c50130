"""A GLUE folder of a few made-up sentences, in the official layouts with their quirks."""

from __future__ import annotations

import random
from pathlib import Path

COLUMNS = {
    "SST-2": (["sentence", "label"], ["index", "sentence"]),
    "QNLI": (["index", "question", "sentence", "label"], ["index", "question", "sentence"]),
    "RTE": (["index", "sentence1", "sentence2", "label"], ["index", "sentence1", "sentence2"]),
    "WNLI": (["index", "sentence1", "sentence2", "label"], ["index", "sentence1", "sentence2"]),
    "QQP": (
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        ["id", "question1", "question2"],
    ),
    "MRPC": (
        ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        ["index", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    ),
    "STS-B": (["index", "genre", "sentence1", "sentence2", "score"], ["index", "sentence1", "sentence2"]),
    "MNLI": (
        ["index", "promptID", "sentence1", "sentence2", "label1", "gold_label"],
        ["index", "promptID", "sentence1", "sentence2"],
    ),
}
NLI = ["entailment", "neutral", "contradiction"]
LABELS = {"QNLI": ["entailment", "not_entailment"], "RTE": ["entailment", "not_entailment"], "MNLI": NLI}
WORDS = ["harbour", "boat", "keeper", "lamp", "gull", "tide", "market", "letter"]


def make_cell(column: str, row: int, number: int, draw: random.Random, labels: list[str]) -> str:
    if column in ("label", "gold_label", "Quality", "is_duplicate"):
        return labels[number]
    if column == "score":
        return f"{5 * number / max(len(labels) - 1, 1):.3f}"
    if column in ("index", "id"):
        return str(row)
    if column.startswith(("sentence", "question")) or column.endswith("String"):
        words = [draw.choice(WORDS) for _ in range(draw.randint(2, 6))]
        return " ".join(["the", *words, WORDS[number]])
    return f"{column}-{row}".replace(" ", "")


def write_glue(folder: Path, train: int = 24, dev: int = 12, test: int = 5) -> Path:
    """Write all ten folders; the last word of the texts tells the label."""
    draw = random.Random(0)
    for name, (labelled, unlabelled) in COLUMNS.items():
        labels = LABELS.get(name, ["0", "1"])
        (folder / name).mkdir(parents=True)
        parts = {"train": train, "dev": dev, "test": test}
        if name == "MNLI":
            parts = {"train": train, "dev_matched": dev, "dev_mismatched": dev + 1}
            parts |= {"test_matched": test, "test_mismatched": test + 1}
        for part, count in parts.items():
            columns = unlabelled if part.startswith("test") else labelled
            rows = [columns]
            for row in range(count):
                number = row % len(labels)
                rows.append([make_cell(column, row, number, draw, labels) for column in columns])
            text = "\n".join("\t".join(row) for row in rows) + "\n"
            (folder / name / f"{part}.tsv").write_text(text, encoding="utf-8")
    (folder / "CoLA").mkdir()
    for part, count in (("train", train), ("dev", dev)):
        rows = [
            f"made\t{row % 2}\t{'*' if row % 2 else ''}\tthe {WORDS[row % 2]} waits" for row in range(count)
        ]
        (folder / "CoLA" / f"{part}.tsv").write_text("\n".join(rows))
    rows = ["index\tsentence", *(f"{row}\tthe boat waits" for row in range(test))]
    (folder / "CoLA" / "test.tsv").write_text("\n".join(rows))
    (folder / "AX").mkdir()
    rows = ["index\tsentence1\tsentence2", *(f"{row}\tthe lamp\tthe gull" for row in range(test + 2))]
    (folder / "AX" / "diagnostic.tsv").write_text("\n".join(rows))
    return folder
