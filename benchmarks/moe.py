"""The MoE layer beside megatron-core's, grouped experts beside a loop over them, bytes beside the least (C10, G5).

    python benchmarks/moe.py                 # writes results/moe.json

layer    Forward and backward of one MoE layer (router, all-to-all dispatcher, SwiGLU experts; no drops), from the same
         weights and inputs as megatron-core's, on one rank and on two with the experts shared out (ep2). Outputs and
         every gradient must agree before anything is timed. Its grouped experts need a GPU, so its experts run one
         after the other (SequentialMLP); ours do both. Where there is a C++ compiler, both are measured with their
         compiled activation as well.
experts  The experts alone on one rank: one product for all, beside one product for each; rows spread evenly, and so
         that each expert has half as many as the one before.
bytes    Counted, not timed: what leaves the ranks in the all-to-alls of a forward, over what this routing needs at
         least (`labkit/plan/traffic.py`), and what weights and counts add to it.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from harness import Comparison, interleave, report, until_quiet
from torch import Tensor, nn

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.launch import run
from labkit.models.compilation import compile_experts
from labkit.moe.experts import Experts, GroupedExperts, SequentialExperts
from labkit.moe.layer import MoELayer
from labkit.parallel import CommLedger, gather_objects, initialize_model_parallel, single_process_groups
from labkit.plan.traffic import all_to_all_bytes

TOKENS = 1024
"""Of all ranks together."""
LAYERS = {
    "h256, 8 experts of 512, top 2": (256, MoEConfig(num_experts=8, ffn_hidden=512, top_k=2)),
    "h256, 32 experts of 128, top 4": (256, MoEConfig(num_experts=32, ffn_hidden=128, top_k=4)),
    "h512, 8 experts of 512, top 2": (512, MoEConfig(num_experts=8, ffn_hidden=512, top_k=2)),
}
EXPERTS = {"8 experts": 8, "64 experts": 64}
HIDDEN, WIDTH, ROWS = 256, 256, 2048
"""Of the experts alone."""
NOTES = (
    f"Layer: {TOKENS} tokens over all ranks, SwiGLU, fp32, one thread per rank; random weights, so the load is uneven.",
    "Aim of the layer: at most 0.9 of megatron-core's time, compiled or not.",
    f"Experts alone: {ROWS} rows, hidden {HIDDEN}, width {WIDTH}.",
    "Bytes: 1.00 is the exact minimum of row-by-row transfer; aim: at most 1% more for weights and counts.",
)
Step = Callable[[], None]


def model_config(hidden: int) -> ModelConfig:
    """What a MoE layer reads of a model."""
    return ModelConfig(layers=1, hidden=hidden, heads=4, seq_length=TOKENS, activation="swiglu")


# ---- the layer ----


def measure_layer(case: str, ep: int, repetitions: int, compiled: bool = False) -> tuple[Comparison, dict[str, Any]]:
    """On each rank: (times of the layers in turn, bytes of all ranks). compiled: both layers compiled, too."""
    import megatron_moe

    hidden, moe = LAYERS[case]
    groups, model = initialize_model_parallel(ParallelConfig(ep=ep)), model_config(hidden)
    ours, one_by_one = (
        MoELayer("layers.0.mlp", model, replace(moe, grouped_gemm=grouped), groups) for grouped in (True, False)
    )
    layers: dict[str, nn.Module] = {"labkit": ours, "labkit, one by one": one_by_one}
    theirs = {"megatron-core": megatron_moe.layer(model, moe, groups)}
    if compiled:
        layers["labkit, compiled"] = fused = MoELayer("layers.0.mlp", model, moe, groups)
        compile_experts(fused.experts)
        theirs["megatron-core, compiled"] = megatron_moe.layer(model, moe, groups, compiled=True)
    for their in theirs.values():
        megatron_moe.copy_weights(ours, their)
    torch.manual_seed(groups.rank)
    x_SBH, grad_SBH = (torch.randn(TOKENS // ep, 1, hidden) for _ in range(2))
    outputs: dict[str, Tensor] = {}

    def stepper(name: str, layer: nn.Module) -> Step:
        def step() -> None:
            layer.zero_grad(set_to_none=True)
            y = layer(x_SBH.clone().requires_grad_())
            outputs[name] = y[0] if isinstance(y, tuple) else y
            outputs[name].backward(grad_SBH)

        return step

    steps = {name: stepper(name, layer) for name, layer in (layers | theirs).items()}
    with CommLedger() as ledger:
        steps["labkit"]()
    if compiled:
        steps["labkit, compiled"]()
        torch.testing.assert_close(outputs["labkit, compiled"], outputs["labkit"], rtol=1e-4, atol=1e-6)
    for name, their in theirs.items():
        steps[name]()
        torch.testing.assert_close(outputs["labkit"], outputs[name], rtol=1e-4, atol=1e-6)
        assert megatron_moe.largest_gradient_difference(ours, their) < 1e-4, f"{name} does not compute the same"
    words = f"layer, {case}, ep{ep}, forward and backward"
    found = interleave(words, steps, repetitions=repetitions, across_ranks=True)
    if compiled:
        pair = {name: found.seconds[name] for name in ("labkit, compiled", "megatron-core, compiled")}
        ratio = replace(found, seconds=pair).ratio("megatron-core, compiled")
        found = replace(found, facts={"compiled_over_compiled": round(ratio, 4)})
    return found, bytes_row(case, ours, x_SBH, ledger)


def bytes_row(case: str, layer: MoELayer, x_SBH: Tensor, ledger: CommLedger) -> dict[str, Any]:
    """What left all ranks in one forward, against the least that its routing needs."""
    dispatcher: Any = layer.token_dispatcher
    sent = {"rows": 0, "weights": 0, "counts": 0}
    for record in ledger.records:
        if record.phase == "forward" and record.operation == "all_to_all":
            rows = record.bytes - record.kept
            sent["weights" if _is_of_weights(record.bytes, ledger) else "rows"] += rows
        elif record.phase == "forward" and record.operation == "all_gather":
            sent["counts"] += record.bytes * (record.group_size - 1)
    everyone = gather_objects(sent, dispatcher.ep)
    total = {kind: sum(of_rank[kind] for of_rank in everyone) for kind in sent}
    counts_RE = dispatcher.gather_counts(layer.route(x_SBH)[1])[0].numpy()
    least = int(all_to_all_bytes(counts_RE, dispatcher.ep.size, x_SBH.shape[-1], 4).forward.sum())
    row: dict[str, Any] = {"case": f"bytes, {case}, ep{dispatcher.ep.size}, forward", "least": least} | total
    if least:
        row["rows_over_least"] = round(total["rows"] / least, 4)
        row["all_over_least"] = round(sum(total.values()) / least, 4)
    return row


def _is_of_weights(size: int, ledger: CommLedger) -> bool:
    """Whether an all-to-all of so many bytes carries one number a row: the others of the layer carry H."""
    largest = max(record.bytes for record in ledger.records if record.operation == "all_to_all")
    return size < largest / 2


# ---- the experts alone ----


def even(experts: int) -> Tensor:
    """As many rows for each."""
    return torch.full((experts,), ROWS // experts)


def skewed(experts: int) -> Tensor:
    """Half of the rows for the first, half of the rest for the next, until none are left; the last takes the rest."""
    counts, left = torch.zeros(experts, dtype=torch.int64), ROWS
    for expert in range(experts - 1):
        counts[expert] = left // 2
        left -= left // 2
    counts[-1] = left
    return counts


def experts_step(kind: type[Experts], counts: Tensor) -> Step:
    """Forward and backward of the experts alone."""
    moe = MoEConfig(num_experts=len(counts), ffn_hidden=WIDTH)
    experts = kind("layers.0.mlp.experts", model_config(HIDDEN), moe, single_process_groups())
    random = torch.Generator().manual_seed(0)
    tokens_NH, grad_NH = (torch.randn(ROWS, HIDDEN, generator=random) for _ in range(2))
    probs_N = torch.rand(ROWS, generator=random)

    def step() -> None:
        experts.zero_grad(set_to_none=True)
        experts(tokens_NH.clone().requires_grad_(), counts, probs_N.clone().requires_grad_()).backward(grad_NH)

    return step


def measure_experts(case: str, load: str, repetitions: int) -> Comparison:
    """One product for all beside one for each."""
    counts = {"even": even, "skewed": skewed}[load](EXPERTS[case])
    steps = {"grouped": experts_step(GroupedExperts, counts), "one by one": experts_step(SequentialExperts, counts)}
    words = f"experts alone, {case}, {load} load, forward and backward"
    return interleave(words, steps, repetitions=repetitions)


# ---- all of it ----


def main() -> None:
    """Run all parts and store the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=25, help="interleaved repetitions; 15 or more to be quoted")
    parser.add_argument("--attempts", type=int, default=4, help="how often a noisy comparison is measured at most")
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, compiled = options.repetitions, shutil.which("g++") is not None
    comparisons, rows = [], []
    for ep in (1, 2):
        for case in LAYERS:
            counted: list[dict[str, Any]] = []

            def layer(case: str = case, ep: int = ep, counted: list[dict[str, Any]] = counted) -> Comparison:
                found, row = run(measure_layer, ep, case, ep, count, compiled, device="cpu", timeout=600.0)[0]
                counted[:] = [row]
                return found

            comparisons.append(until_quiet(layer, attempts=options.attempts))
            rows += counted if ep > 1 else []
    for case in EXPERTS:
        for load in ("even", "skewed"):
            alone = lambda case=case, load=load: measure_experts(case, load, count)  # noqa: E731
            comparisons.append(until_quiet(alone, attempts=options.attempts))
    report("moe", comparisons, rows=rows, title="Mixture of experts", notes=NOTES, write=not options.dry)


if __name__ == "__main__":
    main()
