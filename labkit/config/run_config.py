"""`RunConfig`: a whole run, its YAML form, changes to it, and all that is wrong with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from labkit.config import fields, rules
from labkit.config.errors import ConfigError
from labkit.config.field_spec import BadValueError
from labkit.config.sections import SECTIONS, ExtraConfig, Sections


@dataclass(frozen=True, kw_only=True)
class RunConfig(Sections):
    """A whole run."""

    @staticmethod
    def from_yaml(path: str | os.PathLike[str], *, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the configuration in the YAML file at `path`, changed by `overrides`.

        Raises ConfigError with every problem of the file, the overrides and those rules that need no world size.
        """
        from labkit.config import yaml_text

        values, problems = yaml_text.read(path)
        newer, bad_overrides = fields.read(fields.rows(overrides or {}))
        config = RunConfig().replaced(values | newer)
        if problems := [*problems, *bad_overrides, *config.problems()]:
            raise ConfigError(problems, source=os.fspath(path))
        return config

    def replaced(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy with typed `values` by dotted name; nothing is checked."""
        sections: dict[str, dict[str, Any]] = {}
        for dotted, value in values.items():
            section, _, name = dotted.partition(".")
            sections.setdefault(section, {})[name] = value
        extra = {spec.name: spec.default for spec in self.extra_specs.values()}
        extra |= vars(self.extra) | sections.pop("extra", {})
        for spec in self.extra_specs.values():
            with suppress(BadValueError):  # left for the checks
                extra[spec.name] = spec.convert(extra[spec.name])
        changed = {s: dataclasses.replace(getattr(self, s), **v) for s, v in sections.items()}
        return dataclasses.replace(self, extra=ExtraConfig(**extra), **changed)

    def override(self, changes: Mapping[str, Any]) -> RunConfig:
        """Return a copy with `changes`, whose keys are fields (`parallel.tp`, `lr`, `num_layers`) or whole sections.

        Raises ConfigError with every unknown key and every value of a wrong type. Rules between fields are left to
        `validate`, so that you can make changes one after another.
        """
        values, problems = fields.read(fields.rows(changes))
        if problems:
            raise ConfigError(problems, source="the override")
        return self.replaced(values)

    def with_extra(self, provider: type | None) -> RunConfig:
        """Return a copy with the fields that a script declares (Megatron's `extra_args_provider`); None declares none.

        provider: a dataclass whose fields are made by `labkit.config.field`. They are in `config.extra`, and are
        checked like all others. A value that the section already has stays.
        """
        if provider is None:
            return self
        return dataclasses.replace(self, extra_specs=fields.extra_specs(provider)).replaced({})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain nested values: sections, then fields, with lists for tuples."""
        return {
            section: {name: list(v) if isinstance(v, tuple) else v for name, v in vars(getattr(self, section)).items()}
            for section in SECTIONS
        }

    def to_yaml(self) -> str:
        """Return text that `from_yaml` reads back as an equal configuration."""
        from labkit.config import yaml_text

        return yaml_text.dump(self.to_dict())

    def to_commented_yaml(self, width: int | None = None) -> str:
        """Return `to_yaml` with a comment above each section and field: its help, and the values that it may have.

        width: columns of the comments; None means 100.
        """
        from labkit.config import yaml_text

        return yaml_text.dump_commented(self.to_dict(), fields.SPECS | self.extra_specs, width or yaml_text.WIDTH)

    def problems(self, world_size: int | None = None) -> list[str]:
        """Return one sentence for each rule that is broken; empty for a sound configuration.

        Without `world_size` the rules that need the number of ranks are left out.
        """
        return rules.problems(self, world_size)

    def validate(self, world_size: int | None = None) -> RunConfig:
        """Return this configuration, or raise a ConfigError that lists every problem."""
        if found := self.problems(world_size):
            raise ConfigError(found)
        return self

    def data_parallel_size(self, world_size: int) -> int:
        """Return dp = world size / (tp cp pp), for a world size that `validate` accepts."""
        return world_size // (self.parallel.tp * self.parallel.cp * self.parallel.pp)

    def num_microbatches(self, world_size: int) -> int:
        """Return the microbatches of one step on one data-parallel rank: global batch / (micro batch x dp)."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_parallel_size(world_size))
