"""The model card: README.md of a model folder, in the form that the Hugging Face hub shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlm.config.model import ModelConfig
from mlm.hub.families import OWN
from mlm.plan import count_parameters, total_parameters

_FRONT_MATTER = """---
library_name: transformers
pipeline_tag: {task}
tags: [{head}, encoder]
---"""
MAX_LABELS = 20
"""Names of classes that the card of a classifier lists."""

_STOCK_EXAMPLE = """from transformers import AutoTokenizer, {architecture}

model = {architecture}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")"""

_OWN_EXAMPLE = """from mlm.hub import load_pretrained  # transformers has no class for this architecture

model = load_pretrained("{name}")"""


def model_card(
    name: str,
    model_config: ModelConfig,
    facts: Mapping[str, object],
    architecture: str,
    labels: Sequence[str] | None = None,
) -> str:
    """Return the card as Markdown.

    Args:
        name: title, and the folder or repository in the example.
        model_config: the model; becomes the table of its architecture.
        facts: what to say about training, in this order; floats are shown with four digits.
        architecture: the class that reads the folder, see `mlm.hub.architecture_of`.
        labels: names of a classifier's outputs; None: a masked language model.
    """
    example = _OWN_EXAMPLE if architecture in (OWN.architecture, OWN.classifier) else _STOCK_EXAMPLE
    num_labels = len(labels) if labels else None
    parameters = {part: f"{count:,}" for part, count in count_parameters(model_config, num_labels).items()}
    parameters["total"] = f"{total_parameters(model_config, num_labels):,}"
    sections = {
        "Use": f"```python\n{example.format(name=name, architecture=architecture)}\n```",
        "Training": _table(("fact", "value"), facts),
        "Architecture": _table(("field", "value"), vars(model_config)),
        "Parameters": _table(("part", "parameters"), parameters),
    }
    front = _FRONT_MATTER.format(task="fill-mask", head="masked-lm")
    intro = f"A BERT-style encoder ({architecture}), pretrained with masked language modelling."
    if labels:
        front = _FRONT_MATTER.format(task="text-classification", head="classifier")
        names = ", ".join(labels[:MAX_LABELS]) + (", ..." if len(labels) > MAX_LABELS else "")
        intro = f"A BERT-style encoder ({architecture}), fine-tuned on texts with labels. It gives: {names}."
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"{front}\n\n# {name}\n\n{intro}\n\n{body}\n"


def _table(header: tuple[str, str], rows: Mapping[str, object]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
    lines = [header, ("---", "---"), *shown.items()]
    return "\n".join(f"| {name} | {text} |" for name, text in lines)
