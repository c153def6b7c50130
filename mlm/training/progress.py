"""The counters of a run: with weights and optimizer state all that a resume needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far a run has come, in plain values."""

    step: int = 0
    """Finished optimizer steps."""
    rows: int = 0
    """Rows trained on."""
    tokens: int = 0
    """Tokens trained on, padding excluded."""
    elapsed_s: float = 0.0
    """Seconds of training over all resumes, including validation."""
    planned_steps: int | None = None
    """Length of the run in optimizer steps; None until a time-limited run has measured its throughput."""
    mask_rate_steps: tuple[int, int] | None = None
    """Steps between which the mask rate moves: from the first whose batch was not drawn before the plan."""
    planned_for: tuple[int | str | None, ...] = ()
    """The bounds that this length follows from."""
    first: dict[str, float] | None = None
    """Validation scores before the first update."""
    validation_s: float = 0.0
    """Seconds of this validation."""
    validations_s: float = 0.0
    """Seconds of all validations after it."""
    last: dict[str, float] | None = None
    """Newest validation scores."""
    validated_at: int = 0
    """Step of the newest validation."""
    best: list[tuple[float, int]] = field(default_factory=list)
    """Rank (lower is better) and step of the best validations, best first, for each checkpoint kept."""
    lowest: tuple[float, int] | None = None
    """Rank and step of the best validation of all, kept or not."""
    skipped: int = 0
    """Optimizer steps skipped for a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """How many of them ended with the newest step."""
    epoch_loss: tuple[float, float] = (0.0, 0.0)
    """Summed training loss since the last validation, and the weight it is divided by."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Fine-tuning: losses and scores of each epoch."""
