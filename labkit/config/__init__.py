"""Configuration of a run: dataclasses, YAML, overrides, rules, presets. Imports no torch.

```python
config = presets.tiny().override({"parallel.tp": 2, "pipeline_model_parallel_size": 2})
config.validate(world_size=4)
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.config.errors import ConfigError
from labkit.config.run_config import RunConfig
from labkit.config.sections import DataConfig, GraphConfig, ModelConfig, MoEConfig, OptimConfig, ParallelConfig

from labkit.config.sections import ScheduleConfig, TrainConfig  # isort: skip

if TYPE_CHECKING:
    from labkit.config import presets

__all__ = ["ConfigError", "DataConfig", "GraphConfig", "MoEConfig", "ModelConfig", "OptimConfig", "ParallelConfig"]
__all__ += ["RunConfig", "ScheduleConfig", "TrainConfig", "presets"]


def __getattr__(name: str) -> Any:
    if name == "presets":
        return importlib.import_module("labkit.config.presets")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
