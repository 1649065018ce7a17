"""Records of a run: a line of metrics per step, Events of all ranks, rates, and progress for the launching process.

    metrics.jsonl   a line per step: loss (for BERT also its parts `lm_loss` and `sop_loss`), norm, rates, memory,
                    timers, and with experts the numbers of `router_metrics`;
                    lines of evaluations; with CUDA graphs a line before that of the step that captured them
    scalars.jsonl   the same numbers one by one, as TensorBoard takes them: {"step": 3, "tag": "loss", "value": 2.5};
                    `train.loggers` sends them to TensorBoard, Weights & Biases or MLflow
    events.jsonl    one Event per line, if `train.write_events` asks, of every `train.event_interval`th step

Steps count from 1: a line of step N, also of an evaluation, is written when N steps are finished. All files grow during
the run, so the lines of a run that dies are kept, and memory does not grow with the steps.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from labkit.comm.collectives import gather_objects
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import RunConfig
from labkit.config.errors import counted
from labkit.events import Event, EventRecorder, not_recording, recording
from labkit.launch import report_progress
from labkit.plan.flops import hardware_flops, step_flops
from labkit.plan.sizes import decoder_length
from labkit.schedules import Schedule
from labkit.train.cuda_graphs import TrainingGraphs
from labkit.train.forward_step import parts_of
from labkit.train.reporting.device_peaks import peak_of_a_rank
from labkit.train.reporting.loggers import Loggers
from labkit.train.reporting.metrics import JsonLines, Timers, json_lines, min_max_over_ranks, scalars
from labkit.train.reporting.router_metrics import LayerMetrics, RouterMetrics, router_line
from labkit.train.reporting.slow_ranks import Pace, PaceWatch
from labkit.train.reporting.step_lines import EVALUATIONS, evaluations_at
from labkit.train.stepping import StepResult


class Throughput:
    """Turns the seconds of a step into rates, and predicts the end of the run."""

    def __init__(
        self, config: RunConfig, world_size: int, peak: float | None = None, schedule: Schedule | None = None
    ) -> None:
        """peak: TFLOP/s that a rank can reach; None if they are unknown. schedule: see `hardware_flops`."""
        train = config.train
        self._steps = train.steps
        self._tokens = train.global_batch_size * (config.model.seq_length + decoder_length(config.model))
        of_model = step_flops(config.model, samples=train.global_batch_size, moe=config.moe).total
        of_hardware = hardware_flops(config, schedule)
        self._teraflops = {
            ("tflops_per_rank", "mfu"): of_model / 1e12 / world_size,
            ("hardware_tflops_per_rank", "hfu"): of_hardware / 1e12 / world_size,
        }
        self._peak = peak
        self._first: tuple[int, float] | None = None

    def rates(self, seconds: float) -> dict[str, float]:
        """Return the rates of steps that took `seconds` each.

        `tokens_per_second` counts the tokens of all ranks. `tflops_per_rank` is Megatron's TFLOP/s/GPU, of model FLOPs
        (`labkit.plan.flops.step_flops`): all S^2 pairs of attention, nothing that is recomputed.
        `hardware_tflops_per_rank` is the rate of hardware FLOPs (`hardware_flops`), which count recomputation, as the
        TFLOP/s of arXiv 1909.08053 and 2104.04473 do. Operations are those of the configured model, also if a model
        provider builds another. `mfu` and `hfu` are the shares of the peak; they are left out if
        `reporting.device_peaks` does not know the device.
        """
        rates = {"step_time": seconds, "tokens_per_second": self._tokens / seconds}
        for (rate, share), teraflops in self._teraflops.items():
            rates[rate] = teraflops / seconds
            if self._peak is not None:
                rates[share] = rates[rate] / self._peak
        return rates

    def time_left(self, step: int, step_time: float) -> float:
        """Return the seconds from now to the end of the last step. `step` (counted from 1) has just finished.

        The prediction takes the mean wall time since the end of the first step, which also warms up. Validations are
        included.
        """
        now = time.perf_counter()
        if self._first is None:
            self._first = step, now
            return (self._steps - step) * step_time
        first, then = self._first
        return (self._steps - step) * (now - then) / (step - first)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes so far: torch's allocations on a GPU in this process, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Report:
    """Collects metrics on every rank; rank 0 writes the files and reports progress."""

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        timers: Timers,
        recorder: EventRecorder | None,
        routers: RouterMetrics | None,
        schedule: Schedule | None = None,
        *,
        resumed_after: int = 0,
        skipped_steps: int = 0,
        append: bool = False,
    ) -> None:
        """recorder: gets this rank's Events; after each step the report adds them to the timers and clears them.
        routers: the routers of a model with experts. schedule: that of the run, whose recomputation the rates count.
        resumed_after, skipped_steps: steps that were done, and skipped, before this process resumed the run.
        append: append to the files that are there."""
        self.losses: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self._events_of_steps: deque[list[Event]] = deque(maxlen=config.train.keep_event_steps)
        self._recorder = recorder
        self._config, self._groups, self._timers, self._routers = config, groups, timers, routers
        self._writes = groups.world.rank == 0
        self._resumed_after, self._append = resumed_after, append
        self._folder = Path(config.train.output_dir) if config.train.output_dir is not None else None
        self._lines = self._file("metrics.jsonl")
        self._scalar_lines = self._file("scalars.jsonl")
        self._event_lines = self._file("events.jsonl") if config.train.write_events else JsonLines(None)
        self._loggers = Loggers(config, resumed_after, continues=append) if self._writes else None
        peak = peak_of_a_rank(groups, config.optim) if groups.device.type == "cuda" else None
        self._throughput = Throughput(config, groups.world.size, peak, schedule)
        self._pace = PaceWatch(groups)
        self._peak_memory = 0
        self.skipped_steps = skipped_steps
        self._skipped_because: str | None = None
        self._since_last_line = 0
        self._captures_told = 0

    def _file(self, name: str) -> JsonLines:
        path = self._folder / name if self._folder is not None and self._writes else None
        return JsonLines(path, append=self._append)

    @property
    def events(self) -> list[Event]:
        """Events of this rank in the last `train.keep_event_steps` steps, in order of their ends."""
        return [event for events in self._events_of_steps for event in events]

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the files. After an error no rank waits for others: rank 0 adds its own Events since the last step."""
        if kind is None:
            self._take_events(ends_step=False, written=self._config.train.write_events)
        elif self._recorder is not None:
            self._event_lines.write(*(event.record() for event in self._recorder.events))
        for lines in (self._lines, self._scalar_lines, self._event_lines):
            lines.close()
        if self._loggers is not None:
            self._loggers.close(failed=kind is not None)

    @contextmanager
    def naming_what_is_kept(self) -> Iterator[None]:
        """Add a note to the error of a failed evaluation: the training steps done, and the folder of their metrics."""
        try:
            yield
        except Exception as error:
            done, steps = self._resumed_after + len(self.losses), self._config.train.steps
            count = f"{done:,} of {counted(steps, 'training step')}"
            where = f"metrics are in {self._folder}" if self._folder is not None else "train.output_dir was not set"
            last = f", the last with a loss of {self.losses[-1]:.4f}" if self.losses else ""
            error.add_note(f"done: {count}{last}; {where}")
            raise

    def begin_step(self, step: int) -> None:
        """Assign the Events from now on to `step`, counted from 1."""
        self._pace.begin_step()
        if self._recorder is not None:
            self._recorder.step = step

    def recorded(self, step: int) -> AbstractContextManager[None]:
        """Return a context for a step, in which no Events are recorded if nobody asks for those of this step."""
        train = self._config.train
        asked = train.record_events or train.timing_log_level == 2 or self._is_written(step)
        return nullcontext() if asked else not_recording()

    def _is_written(self, step: int) -> bool:
        return self._config.train.write_events and step % self._config.train.event_interval == 0

    def step(self, step: int, result: StepResult, lr: float) -> None:
        """Take in a finished step; every `log_interval` steps, write a line with the spread of the timers.

        step: counted from 1, so it is the number of finished steps.

        Times and rates of a line are those of the slowest rank over the steps since the last line. Memory is that of
        the fullest rank. After every step rank 0 reports progress from its own numbers. `skipped_steps` counts from the
        start of the run. `skipped_because` names the number that was not finite in the last skipped step since the
        last line. `slow_ranks` names ranks that compute longer than their peers (`slow_ranks.py`).
        """
        self._pace.end_step(self._timers("step").seconds)
        self._take_events(ends_step=True, written=self._is_written(step))
        self.losses.append(result.loss)
        self.skipped_steps += result.skipped
        self._skipped_because = result.not_finite or self._skipped_because
        self._since_last_line += 1
        self._peak_memory = max(self._peak_memory, peak_memory_bytes(self._groups.device))
        values = {
            "step": step,
            "loss": result.loss,
            **result.parts,
            "grad_norm": result.grad_norm,
            "learning_rate": lr,
            "loss_scale": result.loss_scale,
            "skipped_steps": self.skipped_steps,
        }
        if step % self._config.train.log_interval == 0 or step == self._config.train.steps:
            self._write_line(values)
        seconds = self._timers("step").seconds
        self._progress(
            **values,
            steps=self._config.train.steps,
            eta=self._throughput.time_left(step, seconds),
            peak_memory_bytes=self._peak_memory,
            **self._throughput.rates(seconds),
        )

    def _write_line(self, values: dict[str, Any]) -> None:
        """Write a line: `values` of the last step; times, memory and routers of all ranks since the last line."""
        timers, routers, paces = self._over_ranks()
        slow = {"slow_ranks": news} if (news := self._pace.news(values["step"], paces)) else {}
        because = {"skipped_because": self._skipped_because} if self._skipped_because else {}
        rates = self._throughput.rates(timers["step"][1] / self._since_last_line)
        self._since_last_line, self._skipped_because = 0, None
        memory = {"peak_memory_bytes": self._peak_memory}
        self._add({**values, **because, **rates, **memory, **routers, "timers": timers, **slow})
        if slow:
            self._progress(step=values["step"], **slow)

    def evaluation(self, step: int, split: str, means: Mapping[str, float]) -> None:
        """Write a line such as `{"step": ..., "validation_loss": ..., "validation_perplexity": ...}`.

        split: `validation` or `test`. means: see `Pipeline.means`. The perplexity is e to the power of the mean over
        words: the loss, or for BERT the part `lm_loss` of it.
        """
        line = {"step": step, **{f"{split}_{name}": mean for name, mean in means.items()}}
        words = means.get("lm_loss") if "lm_loss" in parts_of(self._config.model) else means["loss"]
        if words is not None:
            line[f"{split}_perplexity"] = math.exp(min(words, 50.0))
        self._add(line)
        self._progress(**line)

    def missing_evaluations(self, step: int) -> set[str]:
        """Return the evaluations that the continued files do not have of `step`; the same on all ranks.

        The earlier process may have been stopped between the step and its evaluations.
        """
        if not (self._append and step):
            return set()
        own = evaluations_at(self._folder / "metrics.jsonl", step) if self._folder and self._writes else set()
        return set(EVALUATIONS) - gather_objects(own, self._groups.world)[0]

    def graphs(self, step: int, graphs: TrainingGraphs) -> None:
        """Write a line about the graphs once after each capture, unless the implementation does not know their memory.

        The line has (least, most) over ranks of the number of graphs, the bytes of static inputs, and the bytes of the
        pools at their peak.
        """
        if graphs.num_captures == self._captures_told:
            return
        self._captures_told = graphs.num_captures
        pools = graphs.memory()
        own = {
            "graphs": sum(pool.graphs for pool in pools),
            "static_input_bytes": sum(pool.static_inputs for pool in pools),
            "pool_peak_bytes": sum(pool.pool_peak for pool in pools),
        }
        with not_recording(), comm_scope(layer="graphs", phase="report"):
            by_rank = gather_objects(own if pools else {}, self._groups.world)
        if any(by_rank):
            self._add({"step": step, "graphs": min_max_over_ranks(by_rank)})

    def _take_events(self, *, ends_step: bool, written: bool) -> None:
        """Add the Events since the last call to the timers; keep them if the config asks for that, and write them."""
        if self._recorder is None:
            return
        recorded = self._recorder.events[:]
        self._recorder.events.clear()
        self._timers.feed(recorded)
        if self._config.train.record_events:
            self._keep_events(recorded, ends_step=ends_step)
        if written:
            with recording(self._groups.rank), comm_scope(layer="events", phase="report"):  # no Events of the gather
                lines = json_lines(event.record() for event in recorded)  # each rank makes its own, all at once
                by_rank = gather_objects(lines, self._groups.world)
            self._event_lines.write_text("".join(by_rank))

    def _keep_events(self, recorded: list[Event], *, ends_step: bool) -> None:
        if ends_step or not self._events_of_steps:
            self._events_of_steps.append(recorded)
        else:
            self._events_of_steps[-1] += recorded

    def _add(self, line: dict[str, Any]) -> None:
        self.metrics.append(line)
        self._lines.write(line)
        numbers = list(scalars(line))
        self._scalar_lines.write(*numbers)
        if self._loggers is not None:
            self._loggers.write(numbers)

    def _progress(self, **values: Any) -> None:
        if self._writes:
            report_progress(values)

    def _over_ranks(self) -> tuple[dict[str, tuple[float, float]], dict[str, Any], Sequence[Pace]]:
        """Return (least, most) seconds of each timer over all ranks, the routers' metrics since the last line, and the
        pace of each rank.

        The peak of memory becomes that of all ranks.
        """
        of_routers = {} if self._routers is None else self._routers.take()
        own: tuple[dict[str, float], LayerMetrics, int, Pace]
        own = self._timers.take(), of_routers, self._peak_memory, self._pace.pace()
        with comm_scope(layer="timers", phase="report"):
            timers, routers, peaks, paces = zip(*gather_objects(own, self._groups.world))
        self._peak_memory = max(peaks)
        return min_max_over_ranks(timers), router_line(routers) if any(routers) else {}, paces
