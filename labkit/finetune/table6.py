"""Table 6 of Megatron-LM's paper (arXiv 1909.08053, appendix A): batch, learning rate and epochs of each fine-tuning.

The table calls its largest model 3.8B, but Table 4 calls the same model 3.9B, and so does labkit. The paper gives no
other number of the procedure, but says that it follows RoBERTa. So warm-up, linear decay and weight decay are RoBERTa's
(arXiv 1907.11692, table 10). Dropout is that of the paper's pre-training (section 4.2).
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.config import ModelConfig
from labkit.config.presets import TABLE_4

WARMUP = 0.06
"""Share of the steps over which the learning rate rises."""
WEIGHT_DECAY = {"mnli": 0.1, "qqp": 0.1, "race": 0.1, "squad1.1": 0.01, "squad2.0": 0.01}
"""AdamW's weight decay by task."""
DROPOUT = 0.1
"""Probability of dropout after the embeddings, of attention probabilities, and before each residual addition."""
LENGTH = 512
"""Tokens of a sample, as in Megatron-LM's scripts for these tasks; fewer if the model has fewer positions."""


class Row(NamedTuple):
    """The numbers of one fine-tuning."""

    batch: int
    """Samples of one step."""
    lr: float
    """Peak learning rate."""
    epochs: float
    """Passes over the training samples."""

    @property
    def words(self) -> str:
        """`batch 128, lr 1e-05, 10 epochs`."""
        return f"batch {self.batch:,}, lr {self.lr:g}, {self.epochs:g} epoch{'' if self.epochs == 1 else 's'}"


TABLE_6: dict[str, dict[str, Row]] = {
    "mnli": dict.fromkeys(TABLE_4, Row(128, 1e-5, 10)),
    "qqp": {"336M": Row(128, 5e-5, 12), "1.3B": Row(128, 3e-5, 12), "3.9B": Row(256, 4e-5, 12)},
    "squad1.1": {"336M": Row(64, 3e-5, 2), "1.3B": Row(48, 3e-5, 2), "3.9B": Row(48, 1e-5, 2)},
    "squad2.0": {"336M": Row(48, 3e-5, 2), "1.3B": Row(64, 3e-5, 2), "3.9B": Row(48, 1e-5, 2)},
    "race": {"336M": Row(32, 2e-5, 3), "1.3B": Row(16, 1e-5, 3), "3.9B": Row(32, 2e-5, 3)},
}
"""Task -> size of the model -> row."""
SIZES = tuple(TABLE_4)
"""Names of the sizes."""


def size_of(model: ModelConfig) -> str:
    """Return the size of Table 4 whose layers and width the model has; if there is none, the smallest, `336M`."""
    for size, row in TABLE_4.items():
        if (row.layers, row.hidden) == (model.layers, model.hidden):
            return size
    return SIZES[0]


def rows_of(task: str) -> list[Row]:
    """Return the different rows of a task, which a sweep tries."""
    return list(dict.fromkeys(TABLE_6[task].values()))
