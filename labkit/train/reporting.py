"""What a run writes down: a line of metrics per step, all ranks' Events, progress for whoever launched it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.config import RunConfig
from labkit.events import Event, EventRecorder, write_jsonl
from labkit.launch import report_progress
from labkit.parallel.collectives import comm_scope, gather_objects
from labkit.parallel.groups import ParallelGroups
from labkit.train.metrics import JsonLines, Timers, min_max_over_ranks
from labkit.train.stepping import StepResult


class Report:
    """Collects metrics on every rank; rank 0 writes metrics.jsonl and events.jsonl and reports progress."""

    def __init__(
        self, config: RunConfig, groups: ParallelGroups, timers: Timers, recorder: EventRecorder | None
    ) -> None:
        """recorder: what this rank does lands there; after each step it is added to the timers and moved on."""
        self.losses: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self._recorder = recorder
        self._config, self._groups, self._timers = config, groups, timers
        self._writes = groups.world.rank == 0
        self._folder = Path(config.train.output_dir) if config.train.output_dir is not None else None
        self._lines = JsonLines(self._folder / "metrics.jsonl" if self._folder and self._writes else None)
        self._skipped = 0
        self._since_last_line = 0

    def step(self, step: int, result: StepResult, lr: float) -> None:
        """Take in a finished step; every `log_interval` steps, write a line with the spread of the timers."""
        self._take_events()
        self.losses.append(result.loss)
        self._skipped += result.skipped
        self._since_last_line += 1
        self._progress(step=step + 1, steps=self._config.train.steps, loss=result.loss)
        if (step + 1) % self._config.train.log_interval and step + 1 < self._config.train.steps:
            return
        timers = self._timers_over_ranks()
        slowest = timers["step"][1]
        train, model = self._config.train, self._config.model
        tokens = train.global_batch_size * model.seq_length * self._since_last_line
        self._since_last_line = 0
        self._add(
            {
                "step": step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": lr,
                "skipped_steps": self._skipped,
                "tokens_per_second": tokens / slowest,
                "timers": timers,
            }
        )

    def evaluation(self, step: int, name: str, loss: float) -> None:
        """Write a line `{"step": ..., name: loss}`, name being `validation_loss` or `test_loss`."""
        self._add({"step": step, name: loss})
        self._progress(**{"step": step, name: loss})

    def close(self) -> None:
        """Write every rank's Events into events.jsonl, rank after rank, and close the files."""
        self._take_events()
        if self._folder is not None:
            with comm_scope(layer="events", phase="report"):
                by_rank = gather_objects(self.events, self._groups.world)
            if self._writes:
                write_jsonl((event for rank in by_rank for event in rank), self._folder / "events.jsonl")
        self._lines.close()

    def _take_events(self) -> None:
        """Feed what was recorded since the last call to the timers; keep it if `train.record_events` is on."""
        if self._recorder is None:
            return
        recorded = self._recorder.events[:]
        self._recorder.events.clear()
        self._timers.feed(recorded)
        if self._config.train.record_events:
            self.events += recorded

    def _add(self, line: dict[str, Any]) -> None:
        self.metrics.append(line)
        self._lines.write(line)

    def _progress(self, **values: Any) -> None:
        if self._writes:
            report_progress(values)

    def _timers_over_ranks(self) -> dict[str, tuple[float, float]]:
        """(minimum, maximum) seconds of each timer over all ranks, since the last line."""
        with comm_scope(layer="timers", phase="report"):
            return min_max_over_ranks(gather_objects(self._timers.take(), self._groups.world))
