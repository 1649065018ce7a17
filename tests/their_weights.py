"""A model of ours with the weights of one of transformers, by way of what a checkpoint folder holds."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import torch

from labkit.models import GPTModel, full_state_from_hugging_face, load_full_state, model_config_from_hugging_face
from labkit.parallel import single_process_groups

Ours = TypeVar("Ours", bound=GPTModel)


def read_of(model: Any) -> dict[str, Any]:
    """The content of their config.json, defaults included."""
    return json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[no-any-return]


def ours_from(model: Any, kind: type[Ours], layers: int | None = None) -> Ours:
    """Our model of this kind with their weights, in float64. layers: of both halves, where there are two."""
    config, groups = model_config_from_hugging_face(read_of(model)), single_process_groups()
    ours = kind(config, groups, layers=range(layers or config.layers), seed=1, dtype=torch.float64)
    load_full_state([ours], full_state_from_hugging_face(config, model.state_dict()), groups)
    return ours
