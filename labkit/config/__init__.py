"""Configuration of a run: dataclasses, YAML, overrides, rules, presets. Imports no torch.

```python
config = presets.tiny().override({"parallel.tp": 2, "pipeline_model_parallel_size": 2})
config.validate(world_size=4)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.config import presets as presets
    from labkit.config.errors import ConfigError as ConfigError
    from labkit.config.field_spec import field as field
    from labkit.config.run_config import RunConfig as RunConfig
    from labkit.config.sections import DataConfig as DataConfig
    from labkit.config.sections import GraphConfig as GraphConfig
    from labkit.config.sections import ModelConfig as ModelConfig
    from labkit.config.sections import MoEConfig as MoEConfig
    from labkit.config.sections import OptimConfig as OptimConfig
    from labkit.config.sections import ParallelConfig as ParallelConfig
    from labkit.config.sections import ScheduleConfig as ScheduleConfig
    from labkit.config.sections import TrainConfig as TrainConfig

__all__, __getattr__, __dir__ = public_names(__name__)
