"""The model card: README.md of a model folder, in the form that the Hugging Face hub shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mlm.config.model import ModelConfig
from mlm.files import shorten
from mlm.hub.families import OWN
from mlm.plan import count_parameters, total_parameters

_FRONT_MATTER = """---
library_name: transformers
pipeline_tag: {task}
tags: [{head}, encoder]
---"""

_STOCK_EXAMPLE = """from transformers import AutoTokenizer, {architecture}

path = "path/to/model"  # this folder, or OWNER/NAME on the hub
model = {architecture}.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)"""

_OWN_EXAMPLE = """from mlm.hub import load_pretrained  # transformers has no class for this architecture

model = load_pretrained("path/to/model")  # this folder, or OWNER/NAME on the hub"""


def model_card(
    title: str,
    model_config: ModelConfig,
    facts: Mapping[str, object],
    architecture: str,
    labels: Sequence[str] | None = None,
) -> str:
    """Return the card as Markdown. It is published with the model, so give it no local paths.

    Args:
        title: the name of the run.
        model_config: shown as a table.
        facts: about training, shown in this order; floats with four digits.
        architecture: the class that reads the folder, see `mlm.hub.architecture_of`.
        labels: names of a classifier's outputs; None: a masked language model.
    """
    example = _OWN_EXAMPLE if architecture in (OWN.architecture, OWN.classifier) else _STOCK_EXAMPLE
    num_labels = len(labels) if labels else None
    parameters = {part: f"{count:,}" for part, count in count_parameters(model_config, num_labels).items()}
    parameters["total"] = f"{total_parameters(model_config, num_labels):,}"
    sections = {
        "Use": f"```python\n{example.format(architecture=architecture)}\n```",
        "Training": _table(("fact", "value"), facts),
        "Architecture": _table(("field", "value"), asdict(model_config)),
        "Parameters": _table(("part", "parameters"), parameters),
    }
    front = _FRONT_MATTER.format(task="fill-mask", head="masked-lm")
    intro = f"A BERT-style encoder ({architecture}), pretrained with masked language modelling."
    if labels:
        front = _FRONT_MATTER.format(task="text-classification", head="classifier")
        intro = (
            f"A BERT-style encoder ({architecture}), fine-tuned on labelled texts. Labels: {shorten(labels)}."
        )
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
    return f"{front}\n\n# {title}\n\n{intro}\n\n{body}\n"


def _table(header: tuple[str, str], rows: Mapping[str, object]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
    lines = [header, ("---", "---"), *shown.items()]
    return "\n".join(f"| {name} | {text} |" for name, text in lines)
