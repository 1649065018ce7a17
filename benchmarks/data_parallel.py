"""Data parallelism over two gloo ranks beside torch's own: time of a step, exposed communication, bytes (C6, C8, C9).

    python benchmarks/data_parallel.py            # writes results/data_parallel.json

step     The same GPT module, weights and batches under six kinds of data parallelism, all in the same two ranks and
         interleaved: labkit's replicated and distributed optimizer; torch's DistributedDataParallel, the same with
         ZeroRedundancyOptimizer, and FSDP2 (`fully_shard`); and nobody talking at all. A step is zeroing gradients,
         forward, backward, reduction, AdamW (fused everywhere) and, where state is sharded, gathering parameters.
         The losses of three steps must agree before anything is timed.
exposed  Layers that sleep in place of computing, since two busy cores have none left to hide a transfer on; gradients
         of the same 27 MB travel for real. Exposed is what communication adds to a step, as a share of what it adds
         when all of it follows the backward.
bytes    Counted, not timed: what autograd keeps for backward beside its closed form, and what parameters, gradients
         and optimizer state take on a rank beside theirs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Comparison, interleave, report, until_quiet
from torch import Tensor, nn

from labkit.comm.groups import single_process_groups
from labkit.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from labkit.launch import run
from labkit.models import GPTModel
from labkit.models.chunks import build_model_chunks
from labkit.models.saved_tensors import SavedTensors
from labkit.models.synthetic_load import SleepingLayer
from labkit.parallel import DistributedDataParallel, ParallelGroups, initialize_model_parallel
from labkit.parallel.data_parallel.distributed_data_parallel import wrap_model_chunks
from labkit.plan.activations import Share, layers_activation_bytes
from labkit.plan.zero_stages import bytes_per_parameter, formula
from labkit.train.pretraining import build_optimizer

MODEL = ModelConfig(layers=8, hidden=256, heads=8, vocab_size=1024, seq_length=64)
"""6.6 million parameters: 27 MB of gradients."""
SAMPLES = 1
MICROBATCHES = (1, 4)
"""Of a step; gradients of all but the last only accumulate."""
LR = 1e-4
BUCKET = 800_000
"""Elements: one layer, 3 MB, and so eight buckets and a small rest."""
OURS = ("labkit distributed optimizer", "labkit")
PEERS = ("torch DDP", "ZeroRedundancyOptimizer", "FSDP2")
ALONE = "no communication"
LATE, SILENT = "labkit, no overlap", "labkit, no communication"
SLEEP = (0.004, 0.012)
"""Seconds of a sleeping layer's forward and backward."""
NOTES = (
    "8 layers, hidden 256, sequence 64, one sample per microbatch, vocabulary 1024, fp32; the same GPT, fused AdamW.",
    "Aim: at most 1.03 of the best peer (`of best peer`), with less optimizer memory than torch DDP.",
    "labkit's buckets have 0.8 million elements (3 MB, one layer); torch DDP has its defaults and bucket views.",
    "Exposed share: time that overlapped communication adds, over what it adds after the backward; aim: at most 0.5.",
    "Sleeping layers: 8 layers that sleep 4 ms forward and 12 ms backward each, but really send 27 MB of gradients.",
    "Saved activations: bytes over s b h, fp32, per layer and rank, against `labkit/plan/activations.py`.",
)
Step = Callable[[], float]


def run_config(**optim: Any) -> RunConfig:
    """The GPT, with weight decay off: who decays what is no matter of data parallelism."""
    return RunConfig(
        model=MODEL,
        optim=OptimConfig(lr=LR, weight_decay=0.0, bucket_size=BUCKET, **optim),
        train=TrainConfig(micro_batch_size=SAMPLES, global_batch_size=2 * SAMPLES, record_events=False),
    )


def batches(rank: int) -> Any:
    """This replica's samples, over and over."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, MODEL.vocab_size, (4, SAMPLES, MODEL.seq_length + 1), generator=generator)
    return itertools.cycle([(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens])


def plain_model(groups: ParallelGroups) -> GPTModel:
    """labkit's GPT, from the same weights each time."""
    (model,) = build_model_chunks(run_config(), groups)
    return model


# ---- steps ----


def backwards(model: nn.Module, data: Any, microbatches: int, no_sync: Callable[[], Any]) -> float:
    """Forward and backward of all microbatches, the last of them outside `no_sync`; returns their mean loss."""
    total = 0.0
    for left in reversed(range(microbatches)):
        tokens, labels = next(data)
        with no_sync() if left else nullcontext():
            loss = model(tokens, labels_BS=labels).mean() / microbatches
            loss.backward()
        total += loss.item()
    return total


def our_step(groups: ParallelGroups, microbatches: int, **optim: Any) -> tuple[Step, Callable[[], int]]:
    """labkit's; and bytes of optimizer state on this rank."""
    config = run_config(**optim)
    (chunk,) = wrap_model_chunks([plain_model(groups)], groups, config.optim)
    optimizer = build_optimizer([chunk], config.optim, layout=groups)
    data = batches(groups.rank)

    def step() -> float:
        chunk.zero_grad_buffer()
        loss = backwards(chunk, data, microbatches, chunk.no_sync)
        chunk.finish_grad_sync()
        optimizer.step(LR)
        return loss

    def state() -> int:
        sizes = optimizer.state_bytes()
        return sizes["master"] + sizes["moments"]

    return step, state


@contextmanager
def fsdp_no_sync(model: Any) -> Iterator[None]:
    """What `no_sync` of the others is, in FSDP2's words."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def torch_step(groups: ParallelGroups, microbatches: int, kind: str) -> tuple[Step, Callable[[], int]]:
    """A peer's, each as its documentation sets it up for speed; and bytes of optimizer state on this rank."""
    model: nn.Module = plain_model(groups)
    no_sync: Callable[[], Any] = nullcontext
    adam: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "fused": True}
    optimizer: Any
    if kind == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (groups.dp.size,))
        for layer in model.layers.values():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        no_sync = partial(fsdp_no_sync, fully_shard(model, mesh=mesh, reshard_after_forward=False))
        optimizer = torch.optim.AdamW(model.parameters(), **adam)
    else:
        if kind != ALONE:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            no_sync = model.no_sync
        if kind == "ZeroRedundancyOptimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **adam
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **adam)
    data = batches(groups.rank)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = backwards(model, data, microbatches, no_sync)
        optimizer.step()
        return loss

    def state() -> int:
        own = getattr(optimizer, "optim", optimizer).state.values()
        tensors = [x for entry in own for x in entry.values() if isinstance(x, Tensor) and x.dim()]
        return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors)

    return step, state


def measure_steps(microbatches: int, repetitions: int) -> Comparison:
    """On each rank: all kinds, checked against each other, then interleaved."""
    groups = initialize_model_parallel(ParallelConfig())
    warnings.filterwarnings("ignore", category=UserWarning)
    made = {
        OURS[0]: our_step(groups, microbatches, distributed_optimizer=True, overlap_param_gather=True),
        OURS[1]: our_step(groups, microbatches),
        **{kind: torch_step(groups, microbatches, kind) for kind in (*PEERS, ALONE)},
    }
    losses = {name: [step() for _ in range(3)] for name, (step, _) in made.items() if name != ALONE}
    wanted = losses["torch DDP"]
    for name, found in losses.items():
        if max(abs(a - b) for a, b in zip(found, wanted)) > 1e-4:
            raise AssertionError(f"{name}: losses {found}, torch DDP {wanted}: these are not the same steps")
    steps, case = {name: step for name, (step, _) in made.items()}, f"{microbatches} microbatches"
    found = interleave(case, steps, repetitions=repetitions, across_ranks=True)
    parameters = sum(p.numel() for p in plain_model(groups).parameters())
    state = {name: size() / parameters for name, (_, size) in made.items()}
    return replace(found, facts={"gradients_mb": 4 * parameters / 1e6, "optimizer_bytes": state})


def beside_peers(found: Comparison, ours: str) -> Comparison:
    """One of ours with all peers, from the measurement of all kinds."""
    names = [ours, *PEERS, ALONE]
    chosen = replace(found, case=f"GPT, {found.case}: {ours}", seconds={name: found.seconds[name] for name in names})
    state = found.facts["optimizer_bytes"]
    facts = {
        "of_best_peer": round(max(chosen.ratio(peer) for peer in PEERS), 3),
        "gradients_mb": round(found.facts["gradients_mb"], 1),
        "optimizer_bytes_per_parameter": {name: round(state[name], 2) for name in names if name != ALONE},
    }
    return replace(chosen, facts={k: v for k, v in facts.items() if k != "of_best_peer" or not chosen.rejected})


# ---- exposed communication ----


def sleeping_model() -> nn.Module:
    """As many gradients as the GPT, in eight layers that sleep."""
    elements = 6_600_000 // 8
    return nn.Sequential(
        *(SleepingLayer(f"layer {i}", elements, forward=SLEEP[0], backward=SLEEP[1]) for i in range(8))
    )


def sleeping_step(groups: ParallelGroups, overlap: bool, sharded: bool) -> Callable[[], None]:
    """Ours without the update: reduction, and where parameters are sharded their gather."""
    chunk = DistributedDataParallel(
        sleeping_model(),
        groups,
        bucket_size=BUCKET,
        overlap_grad_reduce=overlap,
        distributed_optimizer=sharded,
        overlap_param_gather=overlap and sharded,
    )

    def step() -> None:
        chunk.zero_grad_buffer()
        chunk(torch.ones(1)).sum().backward()
        chunk.finish_grad_sync()
        if chunk.param_gather is not None:
            chunk.param_gather.updated()
            if not overlap:
                chunk.param_gather.finish()

    return step


def sleeping_peer(communicates: bool) -> Callable[[], None]:
    """torch's, with buckets as large as ours; or no data parallelism at all."""
    model = sleeping_model()
    if communicates:
        model = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=4 * BUCKET / 2**20, gradient_as_bucket_view=True
        )

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(torch.ones(1)).sum().backward()

    return step


def measure_exposed(sharded: bool, repetitions: int) -> Comparison:
    """On each rank: overlapped, all at the end, and not at all (the same wrapper over a group of one rank)."""
    groups = initialize_model_parallel(ParallelConfig())
    warnings.filterwarnings("ignore", category=UserWarning)
    steps = {
        "labkit": sleeping_step(groups, True, sharded),
        LATE: sleeping_step(groups, False, sharded),
        SILENT: sleeping_step(single_process_groups(), True, sharded),
    }
    if not sharded:
        steps |= {"torch DDP": sleeping_peer(True), ALONE: sleeping_peer(False)}
    what = "reduce-scatter and parameter gather" if sharded else "all-reduce"
    found = interleave(f"sleeping layers, {what}", steps, repetitions=repetitions, across_ranks=True)
    return found if found.rejected else replace(found, facts=exposed(found))


def exposed(found: Comparison) -> dict[str, float]:
    """What communication adds to a step: in ms, and in ours as a share of what it adds when all is sent at the end."""

    def beyond(name: str, silent: str) -> list[float]:
        return [a - b for a, b in zip(found.seconds[name], found.seconds[silent], strict=True)]

    ours, late = beyond("labkit", SILENT), beyond(LATE, SILENT)
    facts = {"exposed_ms": statistics.median(ours), "at_the_end_ms": statistics.median(late)}
    if ALONE in found.seconds:
        facts["torch_ddp_exposed_ms"] = statistics.median(beyond("torch DDP", ALONE))
    facts = {name: round(1e3 * seconds, 2) for name, seconds in facts.items()}
    return {"exposed_share": round(statistics.median(a / b for a, b in zip(ours, late)), 3)} | facts


# ---- bytes ----


def state_bytes(sharded: bool) -> dict[str, tuple[float, float]]:
    """On each rank, by type of the weights: bytes per parameter of all that a rank keeps, and padding as a share."""
    groups = initialize_model_parallel(ParallelConfig())
    found = {}
    for dtype in ("bf16", "fp32"):
        config = run_config(precision=dtype, distributed_optimizer=sharded)
        config = replace(config, train=TrainConfig(global_batch_size=groups.dp.size))
        (model,) = build_model_chunks(config, groups)
        (chunk,) = wrap_model_chunks([model], groups, config.optim)
        sizes = build_optimizer([chunk], config.optim, layout=groups).state_bytes()
        padding = sizes.pop("padding")
        parameters = sum(p.numel() for p in model.parameters())
        found[dtype] = sum(sizes.values()) / parameters, padding / sum(sizes.values())
    return found


def state_rows() -> list[dict[str, Any]]:
    """C9: mean over ranks beside the closed form; the type is the weights', gradients are fp32."""
    rows = []
    for ranks, stage in ((1, 0), (2, 1), (4, 1)):
        found = run(state_bytes, ranks, stage == 1)
        for dtype in found[0]:
            kind: dict[str, Any] = {"param_dtype": dtype, "grad_dtype": "fp32", "stage": stage}
            row: dict[str, Any] = {
                "case": f"bytes per parameter, {dtype}, ZeRO stage {stage}, d = {ranks}",
                "formula": formula(**kind),
            }
            row["predicted"] = float(bytes_per_parameter(dp=ranks, **kind).total)
            row["measured"] = round(statistics.mean(each[dtype][0] for each in found), 4)
            row["padding_share"] = round(max(each[dtype][1] for each in found), 5)
            rows.append(row)
    return rows


SAVED: dict[str, dict[str, Any]] = {
    "fused attention": {},
    "unfused, dropout": {"attention_backend": "unfused", "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "selective": {"recompute_granularity": "selective", "attention_backend": "unfused"},
    "full": {"recompute_granularity": "full"},
}


def saved_bytes(tp: int, sequence_parallel: bool) -> dict[str, tuple[float, float]]:
    """On each rank: what one layer keeps for backward in units of s b h, measured and in closed form."""
    groups = initialize_model_parallel(ParallelConfig(tp=tp, sequence_parallel=sequence_parallel))
    share = Share(samples=SAMPLES, tp=tp, sequence_parallel=sequence_parallel)
    tokens = torch.zeros(SAMPLES, MODEL.seq_length, dtype=torch.int64)
    unit = 2 * SAMPLES * MODEL.seq_length * MODEL.hidden
    found = {}
    for words, choice in SAVED.items():
        model, kept = replace(MODEL, **choice), []
        for layers in (0, 2):
            gpt = GPTModel(model, groups, layers=range(layers), seed=1)
            with SavedTensors(gpt) as saved:
                loss = gpt(tokens, labels_BS=tokens)
            kept.append(saved.bytes)
            del loss
        found[words] = (kept[1] - kept[0]) / unit, layers_activation_bytes(model, share, 2) / unit
    return found


def saved_rows() -> list[dict[str, Any]]:
    """C8: per layer, in units of s b h (fp32)."""
    rows = []
    for layout, tp, sequence_parallel in (("tp1", 1, False), ("tp2", 2, False), ("tp2 and sp", 2, True)):
        for words, (measured, predicted) in run(saved_bytes, tp, tp, sequence_parallel)[0].items():
            sizes = {"predicted_sbh": round(predicted, 2), "measured_sbh": round(measured, 2)}
            difference = round(abs(measured / predicted - 1), 4)
            rows.append({"case": f"saved activations, {words}, {layout}", **sizes, "difference": difference})
    return rows


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=25, help="interleaved repetitions; 15 or more to be quoted")
    parser.add_argument("--only", nargs="*", choices=("step", "exposed", "bytes"), default=("step", "exposed", "bytes"))
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    comparisons: list[Comparison] = []
    rows: list[dict[str, Any]] = []
    if "step" in options.only:
        for count in MICROBATCHES:
            found = until_quiet(lambda m=count: run(measure_steps, 2, m, options.repetitions, timeout=300.0)[0])
            comparisons += [beside_peers(found, ours) for ours in OURS]
    if "exposed" in options.only:
        for sharded in (False, True):
            comparisons.append(
                until_quiet(lambda s=sharded: run(measure_exposed, 2, s, options.repetitions, timeout=300.0)[0])
            )
    if "bytes" in options.only:
        rows = state_rows() + saved_rows()
    report(
        "data_parallel",
        comparisons,
        rows=rows,
        title="Data parallelism on two ranks, against torch (CPU, gloo, one thread per rank)",
        notes=NOTES,
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
