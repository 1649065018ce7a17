"""Machines on which a run can be planned: peaks, memory, links and measured efficiencies, read from YAML. No torch.

A machine is a file `machines/NAME.yaml`, or a path to one. Every constant is a mapping with a `value` and a `source`,
and perhaps a `spread` (the relative half width of what was measured). `extends: NAME` takes what the file leaves out
from another machine, except the tables that `without` lists.

    name: A100 Selene
    sms: {value: 108, source: NVIDIA's data sheet}
    peak_flops: {bf16: {value: 312e12, source: NVIDIA's data sheet}, ...}
    levels:
      - name: NVLink
        ranks: {value: 8, source: ...}
        bandwidth: {value: 232e9, source: ...}
        ...

Units are FLOP/s, bytes, bytes/s and seconds.

A machine that `labkit calibrate` has measured, such as a laptop, has tables besides (`labkit.plan.measured`):

    memory_rates:
      norm: {value: 0.4, source: ...}               # of memory_bandwidth x memory_efficiency, for one kind of kernel
    products:
      fp32: {source: ..., rows: [{m: 256, n: 256, k: 64, efficiency: 0.5, spread: 0.02}, ...]}
    levels:
      - ...
        measured:
          all_reduce: {source: ..., rows: [{bytes: 4096, seconds: 1e-4, spread: 0.1}, ...]}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from labkit.config.errors import ConfigError, no_file
from labkit.plan.measured import Product, Products, Transfer, Transfers
from labkit.plan.software import SOFTWARE

_FOLDER = files("labkit.plan") / "machines"


@dataclass(frozen=True, eq=False)
class Level:
    """A level of the network: what connects ranks within a node, or the nodes."""

    name: str
    """Such as `NVLink`."""
    ranks: float
    """Ranks that it connects; infinity for the outermost."""
    bandwidth: float
    """Bytes per second that leave one rank in a large ring: nccl-tests' *bus bandwidth* within a node, and beyond it
    what one rank's share of its node's adapters carries."""
    latency: float
    """Seconds of an empty collective before its first hop."""
    hop: float
    """Seconds of one hop of a ring or a tree."""
    ramp: float
    """Cost of filling the ring's pipeline: c in c sqrt(latency x bytes / bandwidth)."""
    all_reduce_bandwidth: float
    """Bus bandwidth of a large all-reduce, which the switch may speed up (NVLS, SHARP); else `bandwidth`."""
    measured: Mapping[str, Transfers] = field(default_factory=dict)
    """Collective -> its times between two ranks by size, which count instead of the constants above."""


@dataclass(frozen=True, eq=False)
class Machine:
    """One kind of GPU, or the cores of a rank of a CPU, and the network around it."""

    name: str
    gpu: str
    sms: int
    """Streaming multiprocessors, over which the tiles of a GEMM are shared out. On a CPU the cores of a rank."""
    memory_bytes: float
    """HBM of one GPU."""
    memory_bandwidth: float
    """Peak bytes per second of HBM."""
    memory_efficiency: float
    """Share of `memory_bandwidth` that streaming kernels reach."""
    peak_flops: Mapping[str, float]
    """Type -> FLOP/s of dense products in tensor cores."""
    gemm_ceiling: Mapping[str, float]
    """Type -> share of the peak that the best large GEMM reaches."""
    gemm_depth: float
    """Elements of k that a tile of a GEMM costs in prologue and epilogue: efficiency falls as k / (k + gemm_depth)."""
    weight_gradient_efficiency: float
    """Rate of a weight gradient, which adds into fp32, over that of other GEMMs."""
    attention_ceiling: tuple[float, float]
    """Share of the peak that fused attention reaches, forward and backward, counting the pairs that it computes."""
    kernel_launch: float
    """Seconds between two kernels of a stream on the device."""
    host_launch: float
    """Seconds that the host needs to launch a kernel from Python."""
    levels: tuple[Level, ...]
    """Levels of the network, innermost first."""
    software: Mapping[str, float]
    """Generation of software -> its GEMM rate over `gemm_ceiling`; `NAME attention` -> its rate of fused attention over
    `attention_ceiling`; `NAME host` -> seconds of a step in which no kernel runs (data, logging, the loss)."""
    interval: Mapping[str, float]
    """Generation of software -> half width of the interval of a prediction, as log(measured / predicted)."""
    default_software: str = "megatron_core"
    """Generation of software that a run on this machine has, unless another is named."""
    memory_rates: Mapping[str, float] = field(default_factory=dict)
    """Kind of a kernel that moves bytes (`labkit.plan.kernels.kernel_kind`) -> its rate over that of the memory. A CPU
    computes while it moves; what is not here has the rate 1."""
    products: Mapping[str, Products] = field(default_factory=dict)
    """Type -> measured efficiencies of GEMMs by shape, which count instead of ceiling and tiles."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Constant by dotted name, such as `levels.0.bandwidth` -> its source."""
    spreads: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Constant by dotted name -> its spread, where the file states one."""

    @property
    def node(self) -> Level:
        """The innermost level."""
        return self.levels[0]


def known_machines() -> list[str]:
    """Return the names of the machines that labkit has."""
    return sorted(Path(entry.name).stem for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


@cache
def load_machine(name: str) -> Machine:
    """Return the machine with this name, or that of a YAML file at this path.

    Raises:
        ConfigError: no such machine, or a file with missing, unknown or impossible constants; all of them in one error.
    """
    return machine_of(_read(name), name)


def machine_of(values: Mapping[str, Any], source: str) -> Machine:
    """Return the machine of a file's mapping, which extends no other.

    source: the name of the file, for an error. Raises ConfigError as `load_machine`.
    """
    problems: list[str] = []
    machine = _Reader(values, {}, problems).machine()
    if problems:
        raise ConfigError(problems, source=source)
    assert machine is not None
    return machine


def _read(name: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the mapping of a machine's file, completed by the machines that it extends."""
    if name in seen:
        raise ConfigError([f"machines extend each other in a circle: {' -> '.join([*seen, name])}"], source=name)
    known = known_machines()
    path = Path(name)
    if name in known:
        text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    elif path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError([no_file(path)], source=name)
        text = path.read_text(encoding="utf-8")
    else:
        problem = f"no machine is called {name!r}; choose one of {', '.join(known)}, or give a YAML file"
        raise ConfigError([problem], source="the machine")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"not YAML: {' '.join(str(error).split())}"], source=name) from None
    if not isinstance(values, dict):
        raise ConfigError(["the file has no mapping of constants"], source=name)
    base, left_out = values.pop("extends", None), values.pop("without", None) or []
    if base is None:
        return values
    inherited = _read(base, (*seen, name))
    return _merged({key: value for key, value in inherited.items() if key not in left_out}, values)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`; tables are merged key by key, constants and lists replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        is_table = isinstance(value, dict) and "value" not in value
        result[key] = _merged(old, value) if is_table and isinstance(old, dict) else value
    return result


class _Reader:
    """Turns the mapping of a file into a Machine, collecting sources and problems on the way."""

    def __init__(self, values: Mapping[str, Any], sources: dict[str, str], problems: list[str]) -> None:
        self.values, self.sources, self.problems = values, sources, problems
        self.read: set[str] = set()
        self.spreads: dict[str, float] = {}

    def machine(self) -> Machine | None:
        """Return the machine, or None after a problem."""
        made = {
            "name": self.word("name"),
            "gpu": self.word("gpu"),
            "sms": self.count("sms"),
            "levels": tuple(self.levels()),
        }
        for name in ("memory_bytes", "memory_bandwidth", "gemm_depth", "kernel_launch", "host_launch"):
            made[name] = self.number(name, low=0.0)
        for name in ("memory_efficiency", "weight_gradient_efficiency"):
            made[name] = self.number(name, low=0.0, high=1.0)
        for name in ("peak_flops", "software", "interval"):
            made[name] = dict(self.table(name))
        made["gemm_ceiling"] = dict(self.table("gemm_ceiling", high=1.0))
        attention = dict(self.table("attention_ceiling", high=1.0))
        made["attention_ceiling"] = (attention.get("forward", 0.5), attention.get("backward", 0.4))
        if "default_software" in self.values:
            made["default_software"] = self.generation("default_software")
        if "memory_rates" in self.values:
            made["memory_rates"] = dict(self.table("memory_rates"))
        made["products"] = dict(self.products())
        unknown = set(self.values) - self.read
        self.problems += [f"{name} is not a constant of a machine" for name in sorted(unknown)]
        return None if self.problems else Machine(**made, sources=self.sources, spreads=self.spreads)

    def word(self, name: str) -> str:
        self.read.add(name)
        value = self.values.get(name)
        if not isinstance(value, str):
            self.problems.append(f"{name} is missing; give a text")
            return ""
        return value

    def generation(self, name: str) -> str:
        value = self.word(name)
        if value and value not in SOFTWARE:
            self.problems.append(f"{name} is {value!r}; choose one of {', '.join(SOFTWARE)}")
        return value

    def count(self, name: str) -> int:
        number = self.number(name, low=1.0)
        return 0 if math.isnan(number) else int(number)

    def number(self, name: str, *, low: float, high: float = math.inf) -> float:
        self.read.add(name)
        return self.constant(name, self.values.get(name), low, high)

    def table(self, name: str, *, high: float = math.inf) -> Iterator[tuple[str, float]]:
        self.read.add(name)
        entries = self.values.get(name)
        if not isinstance(entries, dict) or not entries:
            self.problems.append(f"{name} is missing; give at least one entry with a value and a source")
            return
        for key, entry in entries.items():
            yield key, self.constant(f"{name}.{key}", entry, 0.0, high)

    def levels(self) -> Iterator[Level]:
        self.read.add("levels")
        entries = self.values.get("levels")
        if not isinstance(entries, list) or not entries:
            self.problems.append("levels is missing; give the levels of the network, the innermost first")
            return
        for number, entry in enumerate(entries):
            yield self.level(f"levels.{number}", entry if isinstance(entry, dict) else {})

    def level(self, where: str, entry: dict[str, Any]) -> Level:
        found = {
            name: self.constant(f"{where}.{name}", entry.get(name), 0.0, math.inf)
            for name in ("ranks", "bandwidth", "latency", "hop", "ramp")
        }
        boosted = entry.get("all_reduce_bandwidth")
        if boosted is not None:
            boosted = self.constant(f"{where}.all_reduce_bandwidth", boosted, 0.0, math.inf)
        if not isinstance(entry.get("name"), str):
            self.problems.append(f"{where}.name is missing; give a text")
        measured = self.transfers(f"{where}.measured", entry.get("measured"))
        boosted = boosted or found["bandwidth"]
        return Level(entry.get("name", ""), **found, all_reduce_bandwidth=boosted, measured=measured)

    def products(self) -> Iterator[tuple[str, Products]]:
        """Yield the measured products of each type."""
        self.read.add("products")
        for kind, rows in self.rows("products", self.values.get("products"), ("m", "n", "k", "efficiency")):
            yield kind, tuple(Product(int(row[0]), int(row[1]), int(row[2]), row[3]) for row in rows)

    def transfers(self, where: str, entries: Any) -> dict[str, Transfers]:
        """Return the measured times of each collective, in the order of their sizes."""
        found = self.rows(where, entries, ("bytes", "seconds"))
        return {kind: tuple(sorted(Transfer(*row) for row in rows)) for kind, rows in found}

    def rows(self, where: str, entries: Any, columns: tuple[str, ...]) -> Iterator[tuple[str, list[list[float]]]]:
        """Yield the rows of each measured table in `entries`: a mapping from a name to {source: ..., rows: [...]}."""
        if entries is None:
            return
        if not isinstance(entries, dict):
            self.problems.append(f"{where} is not a mapping; give NAME: {{source: ..., rows: [...]}}")
            return
        for kind, entry in entries.items():
            name = f"{where}.{kind}"
            rows = entry.get("rows") if isinstance(entry, dict) else None
            if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
                self.problems.append(f"{name} has no rows; give {{source: ..., rows: [{{{', '.join(columns)}}}, ...]}}")
                continue
            source = entry.get("source")
            cells = [
                [self.constant(f"{name}.{number}.{column}", self.cell(row, column, source), 0.0, math.inf)
                 for column in columns]
                for number, row in enumerate(rows)
            ]  # fmt: skip
            yield kind, cells

    @staticmethod
    def cell(row: dict[str, Any], column: str, source: Any) -> dict[str, Any] | None:
        """Return a cell of a measured table as a constant, with the table's source; the spread is the last column's."""
        if column not in row:
            return None
        spread = {"spread": row["spread"]} if "spread" in row and column in ("efficiency", "seconds") else {}
        return {"value": row[column], "source": source, **spread}

    def constant(self, name: str, entry: Any, low: float, high: float) -> float:
        """Return the value of a constant, and keep its source."""
        if not isinstance(entry, dict) or "value" not in entry:
            self.problems.append(f"{name} is missing; give {{value: ..., source: ...}}")
            return math.nan
        value, source = _as_number(entry["value"]), entry.get("source")
        if not isinstance(source, str) or not source:
            self.problems.append(f"{name} has no source; say where the number is from")
        if value is None or not low <= value <= high or (value == 0 and _must_be_positive(name)):
            limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
            limits = "above 0" if low == 0 and _must_be_positive(name) and math.isinf(high) else limits
            shown = repr(entry["value"]) if value is None else f"{value:g}"
            self.problems.append(f"{name} is {shown}; give a number {limits}")
            return math.nan
        self.sources[name] = str(source)
        if "spread" in entry:
            self.spread(name, entry["spread"])
        return value

    def spread(self, name: str, given: Any) -> None:
        """Keep the spread of a constant."""
        spread = _as_number(given)
        if spread is None or not 0 <= spread < math.inf:
            self.problems.append(
                f"{name} has the spread {given!r}; give its relative half width, a number of at least 0"
            )
        else:
            self.spreads[name] = spread


def _must_be_positive(name: str) -> bool:
    may_be_zero = ("latency", "hop", "ramp", "kernel_launch", "host_launch", "gemm_depth")
    return name.rpartition(".")[2] not in may_be_zero and not name.endswith(" host")


def _as_number(value: Any) -> float | None:
    """Return a YAML number; PyYAML reads 1e9 as a text."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number
