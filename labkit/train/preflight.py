"""Check a run before it starts: configuration, schedule, device, memory and folder.

`labkit train` and `labkit.launch.run(pretrain, ...)` call `problems` in the launching process. It returns all problems
at once, a sentence for each, and needs torch only on a machine with a GPU. The ranks check again together (`look`),
because torchrun or a function of the user may have started them.

The memory of a run is computed: `labkit.plan.memory` for each rank, plus the memory of its process. The
sum is compared with the memory that `labkit.launch.machine` finds.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.comm.rank_generator import rank_generators
from labkit.config import ConfigError, RunConfig
from labkit.config.errors import counted, shown
from labkit.graphs.order_table import capture_order
from labkit.graphs.scope import captures_layers
from labkit.launch import info, machine
from labkit.launch.launcher import MOST_RANKS
from labkit.launch.machine import GIB, why_no_transformer_engine
from labkit.output_files import unwritable
from labkit.plan.memory import RankMemory, checkpoint_bytes, rank_memory
from labkit.plan.stages import stage_contents
from labkit.schedules.builders import build_schedule, without_backward
from labkit.schedules.ir import KINDS, Schedule
from labkit.schedules.lowering import Transport
from labkit.schedules.verifier import verify
from labkit.train.checkpoint import resume, step_folders
from labkit.train.reporting.output_folder import RunFolder, folder_problem
from labkit.train.reporting.tensorboard_writer import tensorboard_problem

if TYPE_CHECKING:
    import torch

    from labkit.comm.groups import ParallelGroups

# ---- does the schedule fit the run? ----

TRANSPORTS: dict[bool | None, Transport] = {None: "posted", True: "batched", False: "even_odd"}
"""`schedule.batch_p2p_comm` -> the transport by which the runtime moves tensors between stages."""


def transport_of(config: RunConfig) -> Transport:
    """Return the transport between stages. `overlap_p2p_comm` needs `posted`, which overlaps."""
    return "posted" if config.schedule.overlap_p2p_comm else TRANSPORTS[config.schedule.batch_p2p_comm]


def schedule_of(config: RunConfig, world_size: int) -> Schedule:
    """Build the schedule that a configuration names, for `world_size` ranks.

    Raises ValueError if the schedule cannot be built, and ScheduleError for a file without a valid schedule.
    """
    microbatches, parallel = config.num_microbatches(world_size), config.parallel
    return build_schedule(config.schedule, pp=parallel.pp, vpp=parallel.vpp, microbatches=microbatches)


def check_schedule(schedule: Schedule, config: RunConfig, world_size: int) -> None:
    """Raise ValueError if the schedule does not fit batch, stages or layers of the run."""
    microbatches, parallel = config.num_microbatches(world_size), config.parallel
    if schedule.pp != parallel.pp:
        raise ValueError(
            f"{schedule.name} is for {counted(schedule.pp, 'pipeline rank')}, but parallel.pp is {parallel.pp}"
        )
    if schedule.num_microbatches != microbatches:
        batch = config.train.global_batch_size
        fitting = batch * schedule.num_microbatches // microbatches
        raise ValueError(
            f"{schedule.name} is for {counted(schedule.num_microbatches, 'microbatch')}, but global_batch_size {batch} "
            f"makes {microbatches} on each data-parallel rank; set it to {fitting}"
        )
    if schedule.forward_only:
        raise ValueError(f"{schedule.name} has no backward, so there would be nothing to learn from")
    held = {len(schedule.stages_of(rank)) for rank in range(schedule.pp)}
    if 0 in held:
        raise ValueError(f"{schedule.name} leaves a pipeline rank without a stage; give every rank at least one")
    if parallel.vpp > 1 and held != {parallel.vpp}:
        words = " or ".join(str(number) for number in sorted(held)) + (" stage" if held == {1} else " stages")
        raise ValueError(
            f"{schedule.name} has {words} a rank, but parallel.vpp is {parallel.vpp}; set vpp to 1: then "
            "the schedule decides the number of model chunks"
        )
    if config.model.transformer_impl == "transformer_engine" and (schedule.kinds == KINDS.index("W")).any():
        raise ValueError(
            f"{schedule.name} puts weight gradients into actions of their own, and Transformer Engine's layers compute "
            "them with the input gradients; choose another schedule, or set model.transformer_impl to local"
        )
    if config.graph.cuda_graph_impl != "none" and captures_layers(config.graph):
        for rank in range(schedule.pp):
            split = config.graph.cuda_graph_impl != "transformer_engine"
            capture_order(schedule, rank, weight_gradients=split)
    stage_contents(config, schedule.num_stages)


def schedule_problem(config: RunConfig, world_size: int) -> str:
    """Return why the configured schedule cannot run on `world_size` ranks, or an empty string."""
    return _checked_schedule(config, world_size)[1]


def _checked_schedule(
    config: RunConfig, world_size: int, schedule: Schedule | None = None
) -> tuple[Schedule | None, str]:
    """Return the given or else the configured schedule, and why it cannot drive the run (an empty string if it can).

    A schedule file is verified over the transport of the run. So is a named schedule over `even_odd`, which could hang.
    The runtime verifies a given schedule.
    """
    own, given = config.schedule, schedule is not None
    named = f"schedule.name = {own.name!r}: " if own.path is None else f"schedule.path = {own.path!r}: "
    try:
        schedule = schedule or schedule_of(config, world_size)
        check_schedule(schedule, config, world_size)
        transport = transport_of(config)
        if not given and (own.path is not None or transport == "even_odd"):
            verify(schedule, transport)
            verify(without_backward(schedule), transport)  # validations run it
    except (ValueError, OSError) as error:
        return None, f"{'' if given else named}{error}"
    return schedule, ""


# ---- does the run fit the memory? ----

TORCH_BYTES = 115 << 20
"""Private memory of a rank beyond tensors: modules that AdamW imports (100 MB), gloo and its threads. Measured on Linux
with torch 2.13: 118 MB after a step of the `tiny` preset (4 and 8 ranks), 3 MB of it tensors. On a machine without GPUs
the ranks share the 100 MB with their fork server, so the sum is larger than needed."""
CUDA_BYTES = 500 << 20
"""GPU memory of a process that has made a CUDA context; not measured, 300 to 600 MB by generation and driver."""


@dataclass(frozen=True)
class Need:
    """The memory that several processes need together."""

    ranks: Sequence[RankMemory]
    """Memory of each process's tensors."""
    torch_bytes: int
    """Bytes of each process beside its tensors."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of all processes, by use."""
        names = ("weights", "gradients", "optimizer", "activations", "checkpoint")
        sums = {name: sum(getattr(rank, name) for rank in self.ranks) for name in names}
        if not sums["checkpoint"]:
            del sums["checkpoint"]
        return sums | {"torch": self.torch_bytes * len(self.ranks)}

    @property
    def total(self) -> int:
        """Bytes of all processes."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """`32 ranks need 975.3 GiB, up to 31.2 each (weights 93.1, ..., torch 3.6)`."""
        sums = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())
        count, largest = len(self.ranks), max(rank.total for rank in self.ranks) + self.torch_bytes
        who = "1 rank needs" if count == 1 else f"{count} ranks need"
        each = "" if count == 1 else f", up to {largest / GIB:.1f} GiB each"
        return f"{who} {self.total / GIB:.1f} GiB{each} ({sums})"


def memory_problem(
    config: RunConfig, world_size: int, device: str = "auto", *, schedule: Schedule | None = None
) -> str:
    """Return why `world_size` ranks do not fit the memory of this machine, or an empty string. Ranks of torchrun may be
    on several machines, so they check their memory themselves. The launcher refuses more ranks than it can start."""
    if config.train.allow_oversubscription or info.under_torchrun() or world_size > MOST_RANKS:
        return ""
    schedule, kind = schedule or schedule_of(config, world_size), info.device_kind(device)
    ranks, host = rank_memories(config, world_size, schedule, kind), machine.host_memory()
    in_host = ranks if kind == "cpu" else _host_copies(config, world_size, schedule)
    found = too_much(config, Need(in_host, TORCH_BYTES), host.available, host.words)
    if kind == "cpu":
        return found
    free = machine.free_gpu_memory()
    for gpu, available in enumerate(free):
        if on_gpu := ranks[gpu :: len(free)]:  # rank r is on GPU r % count
            found = found or too_much(config, Need(on_gpu, CUDA_BYTES), available, f"GPU {gpu}")
    return found


def rank_memories(config: RunConfig, world_size: int, schedule: Schedule, kind: info.DeviceKind) -> list[RankMemory]:
    """Return the memory of every rank. Ranks at one place of the pipeline need the same."""
    by_place = [rank_memory(config, world_size, schedule, place, kind) for place in range(schedule.pp)]
    return _by_rank(config, world_size, by_place)


def _host_copies(config: RunConfig, world_size: int, schedule: Schedule) -> list[RankMemory]:
    """Return the host memory for the tensors of every rank on a GPU: those of a checkpoint pass through the host."""
    saves = config.checkpoint.dir is not None
    saved = [checkpoint_bytes(config, world_size, schedule, place) if saves else 0 for place in range(schedule.pp)]
    return _by_rank(config, world_size, [RankMemory(0, 0, 0, 0, size) for size in saved])


def _by_rank(config: RunConfig, world_size: int, by_place: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the memory of every rank from that of each place in the pipeline."""
    parallel = config.parallel
    decoder, _ = rank_generators(
        world_size=world_size, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep, etp=parallel.etp,
        order=parallel.order,
    )  # fmt: skip
    return [by_place[decoder.coordinates(rank).get("pp", 0)] for rank in range(world_size)]


def too_much(config: RunConfig, need: Need, available: int, where: str) -> str:
    """Return a sentence with the sum if `need` is larger than `available`, else an empty string."""
    if need.total <= available:
        return ""
    ways = [*_advice(config, need), "--allow-oversubscription (train.allow_oversubscription) to try anyway"]
    return f"{need.words}; {where} has {available / GIB:.1f} GiB available; take {', '.join(ways[:-1])}, or {ways[-1]}"


def _advice(config: RunConfig, need: Need) -> list[str]:
    """Return settings that make the largest part smaller."""
    parts, half = need.parts, need.total / 2
    if parts["torch"] > half:
        return ["fewer ranks"]
    if parts["activations"] > half:
        recomputes = config.model.recompute_granularity == "full"
        return ["a smaller train.micro_batch_size", *([] if recomputes else ["model.recompute_granularity full"])]
    sharded = config.optim.distributed_optimizer or len(need.ranks) == 1
    copied = config.checkpoint.asynchronous and parts["weights"] > 0  # on a GPU each save passes through the host
    return [
        "a smaller model",
        *(["checkpoint.asynchronous false"] if copied else []),
        *([] if sharded else ["optim.distributed_optimizer true with dp above 1"]),
    ]


# ---- everything together ----


def problems(
    config: RunConfig,
    world_size: int,
    device: str = "auto",
    *,
    schedule: Schedule | None = None,
    own_model: bool = False,
) -> list[str]:
    """Return why `config` cannot be trained on `world_size` ranks of this machine; empty if it can.

    device: cpu, cuda or auto, as in `labkit.launch.run`.
    schedule: used instead of the configured schedule.
    own_model: true for a model that labkit did not build, whose memory it cannot predict.
    """
    if broken := config.problems(world_size):
        return broken  # the other checks need valid sizes
    schedule, problem = _checked_schedule(config, world_size, schedule)
    found = [problem, *model_problems(config, own_model), *_layer_and_device_problems(config, world_size, device)]
    if not info.under_torchrun():  # under torchrun each rank checks its machine, and rank 0 the folder
        found += [*folder_problems(config), *checkpoint_problems(config)]
        if not own_model and schedule is not None:
            found.append(memory_problem(config, world_size, device, schedule=schedule))
    return [problem for problem in found if problem]


def model_problems(config: RunConfig, own_model: bool) -> list[str]:
    """Return what labkit's own model cannot be, and fields of a script in a run that no script reads."""
    unread = () if config.extra_specs else vars(config.extra).items()
    rule = "no field of labkit; run the script that declares it (extra_args_provider), or leave it out"
    found = [f"extra.{name} = {shown(value)}: {rule}" for name, value in unread]
    model = config.model
    if model.has_two_halves and model.family != "t5" and not own_model:
        rule = f"model.family = {model.family} is none; give a model_provider of your own, or leave it out"
        found.append(f"model.model_type = {shown(model.model_type)}: {rule}")
    return found


def checkpoint_problems(config: RunConfig) -> list[str]:
    """Return why the run cannot save its checkpoints or resume from one, as far as files tell without a model."""
    given = config.checkpoint
    if given.dir is None and given.load is None:
        return []
    folder = None if given.dir is None else Path(given.dir)
    cannot = "" if folder is None else unwritable(folder) or step_folders.in_the_way(folder)
    return [f"checkpoint.dir = {shown(given.dir, 200)}: {cannot}"] if cannot else resume.problems(config)


def machine_problems(config: RunConfig, world_size: int, device: str) -> list[str]:
    """Return problems of schedule, layers, graphs or device of a configuration that is valid by itself."""
    found = [schedule_problem(config, world_size), *_layer_and_device_problems(config, world_size, device)]
    return [problem for problem in found if problem]


def _layer_and_device_problems(config: RunConfig, world_size: int, device: str) -> tuple[str, ...]:
    asked_for = device_problem(device, config.parallel.distributed_backend, world_size)
    return asked_for, layer_problem(config), *(problem(config, device) for problem in _ON_DEVICE)


def folder_problems(config: RunConfig) -> list[str]:
    """Return why the folders of a run cannot be written; empty sentences count for nothing."""
    found = []
    if config.train.output_dir is not None:
        continues = resume.continues_folder(config, resume.first_readable(config))
        found.append(folder_problem(config, continues=continues))
    return found if config.train.tensorboard_dir is None else [*found, tensorboard_problem(config.train)]


def device_problem(device: str, backend: str, world_size: int) -> str:
    """Return why ranks of this machine cannot have the GPUs that the user asks for, or an empty string.

    Ranks of torchrun may be on several machines, so each rank checks its own GPU.
    """
    if (device != "cuda" and backend != "nccl") or info.under_torchrun():
        return ""
    try:
        info.choose_backend(backend, info.choose_device(device, 0, 0), world_size)
    except ValueError as error:
        return str(error)
    return ""


def layer_problem(config: RunConfig) -> str:
    """Return why the chosen layers cannot run here, or an empty string."""
    if config.model.transformer_impl == "local":
        return ""
    missing = why_no_transformer_engine()
    return f"model.transformer_impl = 'transformer_engine': {missing}; or set it to local" if missing else ""


def attention_problem(config: RunConfig, device: str) -> str:
    """Return why `device` has no kernel such as `model.attention_backend` demands, or an empty string.

    Limits of a GPU's model and of shapes show at the first call (`attention_by_kernel`).
    """
    model, kind, backend = config.model, info.device_kind(device), config.model.attention_backend
    found = ""
    if kind == "cpu" and backend in ("cudnn", "efficient"):
        found = "a CPU has no such kernel, only flash and math"
    elif kind == "cpu" and backend == "flash" and (model.attention_dropout or model.position == "relative"):
        found = "a CPU's flash kernel takes neither attention dropout nor relative biases"
    elif kind == "cuda" and backend == "flash" and model.family in ("bert", "t5"):
        found = "a GPU's flash kernel takes no padding mask, which BERT and T5 need"
    elif kind == "cuda" and backend == "flash" and config.optim.precision in ("fp32", "fp64"):
        found = f"a GPU's flash kernel takes bf16 and fp16, and optim.precision is {config.optim.precision}"
    return f"model.attention_backend = {backend}: {found}; set it to fused, and torch chooses a kernel" if found else ""


def profile_problem(config: RunConfig, device: str) -> str:
    """Return why the run cannot be profiled on `device`, or an empty string."""
    if config.train.profile != "nsys" or info.device_kind(device) == "cuda":
        return ""
    return "train.profile = nsys: it marks work on a GPU, and this run is on the CPU; set it to pytorch"


def graph_problem(config: RunConfig, device: str) -> str:
    """Return why the chosen CUDA graphs cannot be captured on `device`, or an empty string."""
    impl = config.graph.cuda_graph_impl
    if impl in ("none", "full_iteration"):  # an iteration is captured, or emulated, on any device
        return ""
    kind, needed = info.device_kind(device), "cpu" if impl == "emulated" else "cuda"
    missing = why_no_transformer_engine() if impl == "transformer_engine" and kind == "cuda" else None
    if kind != needed:
        fitting = "local" if kind == "cuda" else "emulated"
        missing = f"it captures on {needed}, and this run is on {kind}; set it to {fitting} or none"
    return f"graph.cuda_graph_impl = {impl}: {missing}" if missing is not None else ""


_ON_DEVICE = (attention_problem, graph_problem, profile_problem)
"""Each returns why a configuration cannot run on a kind of device, or an empty string."""

# ---- the ranks ask together ----


class _Seen(NamedTuple):
    """The findings of one rank."""

    problems: list[str]
    place: tuple[str, str]
    """Machine and GPU, whose memory the rank shares with other ranks; unused if `memory` is None."""
    available: int
    """Bytes available there."""
    memory: RankMemory | None
    """The rank's need beside its process, which runs already; None if the need is unknown or not checked."""


def look(config: RunConfig, groups: ParallelGroups, schedule: Schedule, *, own_model: bool) -> None:
    """Check need and machine of all ranks together, before any rank allocates. All ranks call this.

    All ranks see all findings, so no rank allocates before the last one has checked. Raises ConfigError on all ranks
    for what the device cannot do, a folder that cannot be written, or too little memory.
    """
    found = [*model_problems(config, own_model), *(problem(config, groups.device.type) for problem in _ON_DEVICE)]
    if groups.world.rank == 0:
        found += folder_problems(config)
    skipped = own_model or config.train.allow_oversubscription
    kind = "cuda" if groups.device.type == "cuda" else "cpu"
    memory = None if skipped else rank_memory(config, groups.world.size, schedule, groups.pp.rank, kind)
    here = (("", ""), 0) if memory is None else _memory_here(groups.device)
    seen = _exchanged(_Seen([p for p in found if p], *here, memory), groups)
    refuse([problem for one in seen for problem in one.problems] + _places_too_small(config, seen))


def _memory_here(device: torch.device) -> tuple[tuple[str, str], int]:
    """Return ((host name, its memory or GPU), bytes available there). Each container has its own host name."""
    host = socket.gethostname()
    if device.type != "cuda":
        memory = machine.host_memory()
        return (host, memory.words), memory.available
    import torch

    gpu = torch.cuda.get_device_properties(device).uuid
    return (host, f"GPU {gpu}"), torch.cuda.mem_get_info(device)[0]


def _places_too_small(config: RunConfig, seen: list[_Seen]) -> list[str]:
    """Return a sentence for each place whose ranks need more memory than is available there."""
    problems = []
    for place in dict.fromkeys(one.place for one in seen):
        there = [one for one in seen if one.place == place]
        if needed := [one.memory for one in there if one.memory is not None]:
            where = place[1] if len({one.place[0] for one in seen}) == 1 else " of ".join(place[::-1])
            available = min(one.available for one in there)
            problems.append(too_much(config, Need(needed, torch_bytes=0), available, where))
    return [problem for problem in problems if problem]


@contextmanager
def run_folder(config: RunConfig, groups: ParallelGroups, *, continues_after: int | None = None) -> Iterator[None]:
    """Rank 0 locks `train.output_dir`, if there is one, and marks the run as finished if the block ends without an
    exception. All ranks call this. Raises ConfigError on all ranks if rank 0 cannot lock the folder.

    continues_after: the run resumes the run in the folder, after so many of its steps.
    """
    if config.train.output_dir is None:
        yield
        return
    folder, problems = None, []
    if groups.world.rank == 0:
        folder = RunFolder(config, groups.world.size, continues_after=continues_after)
    try:
        if folder is not None and (said := folder.claim()):
            info.announce(said)
    except ConfigError as error:
        problems = error.problems
    refuse(problem for found in _exchanged(problems, groups) for problem in found)
    try:
        yield
        if folder is not None:
            folder.finish()
    finally:
        if folder is not None:
            folder.let_go()


def _exchanged(own: Any, groups: ParallelGroups) -> list[Any]:
    from labkit.comm.collectives import comm_scope, gather_objects

    with comm_scope(layer="preflight", phase="start"):
        return gather_objects(own, groups.world)


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with every problem once, if there is any."""
    if found := list(dict.fromkeys(problems)):
        raise ConfigError(found, source="the run")
