"""Emulated CUDA graphs on the host: replay against the eager layer, and the time that capturing a pipeline takes.

    python benchmarks/graphs.py              # writes results/graphs.json

The layers are those of the GPT, graphed by `make_graphed_callables` and called under autograd, so a replay copies its
inputs in and its parameters' gradients out. Emulation is for semantics; it must only not make tests and chapters slow:
replay within 1.1 of eager forward and backward, 32 layers x 16 microbatches captured in under 15 s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Comparison, interleave, report, until_quiet
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.graphs import make_graphed_callables
from labkit.models import GPTModel
from labkit.parallel import single_process_groups
from labkit.schedules import one_f_one_b

SIZES = {
    "h64, sequence 32, batch 1": (64, 32, 1),
    "h256, sequence 128, batch 2": (256, 128, 2),
    "h512, sequence 128, batch 4": (512, 128, 4),
}
LAYERS, MICROBATCHES, STAGES = 32, 16, 4
NOTES = (
    "Forward and backward of 4 layers in fp32, one thread. Aim: at most 1.10 of eager.",
    f"Capture: {LAYERS} layers (h64, sequence 32), first of {STAGES} stages, 1F1B, shared static inputs. Aim: 15 s.",
)


def gpt_layers(count: int, hidden: int, sequence: int) -> list[nn.Module]:
    """Transformer layers of a GPT on one rank."""
    config = ModelConfig(layers=count, hidden=hidden, heads=4, vocab_size=256, seq_length=sequence)
    return list(GPTModel(config, single_process_groups(device="cpu"), layers=range(count), seed=1).layers.values())


def new_input(hidden: int, sequence: int, batch: int) -> Tensor:
    """[S, B, H], as a layer receives it."""
    return torch.randn(sequence, batch, hidden, requires_grad=True)


def measure_replay(case: str, repetitions: int) -> Comparison:
    """Four layers, called one after the other, with graphs and without."""
    size = SIZES[case]
    layers = gpt_layers(4, size[0], size[1])
    graphed = make_graphed_callables(tuple(layers), tuple((new_input(*size),) for _ in layers), impl="emulated")
    x, dy = new_input(*size), torch.randn_like(new_input(*size))

    def stepper(called: list[Callable[..., Any]]) -> Callable[[], None]:
        def step() -> None:
            for layer in layers:
                layer.zero_grad(set_to_none=True)
            y = x.detach().requires_grad_()
            for layer in called:
                y = layer(y)
            y.backward(dy)

        return step

    operations = [one.graphs.forward.num_operations + one.graphs.backward.num_operations for one in graphed]
    found = interleave(case, {"replay": stepper(list(graphed)), "eager": stepper(layers)}, repetitions=repetitions)
    found.facts["operations_a_layer"] = operations[0]
    return found


def measure_capture() -> dict[str, Any]:
    """Seconds and bytes of capturing a stage of a pipeline."""
    hidden, sequence, batch = SIZES["h64, sequence 32, batch 1"]
    layers = gpt_layers(LAYERS, hidden, sequence)
    samples = tuple((new_input(hidden, sequence, batch),) for _ in range(LAYERS * MICROBATCHES))
    order = one_f_one_b(STAGES, MICROBATCHES).order(0)
    start, busy = time.perf_counter(), time.process_time()
    graphed = make_graphed_callables(
        tuple(layers), samples, order=order, num_layers_per_chunk=LAYERS, reuse_buffers=True, impl="emulated"
    )
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    pool = graphed[0].pool
    return {
        "case": f"capture of {LAYERS} layers x {MICROBATCHES} microbatches",
        "seconds": round(seconds, 2),
        "processor_seconds": round(busy, 2),
        "graphs": 2 * len(graphed),
        "milliseconds_a_graph": round(1e3 * seconds / (2 * len(graphed)), 2),
        "static_inputs": len({one.static_inputs[0].data_ptr() for one in graphed}),
        "pool_peak_bytes": pool.peak_bytes,
        "pool_reserved_bytes": pool.reserved_bytes,
    }


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    report(
        "graphs",
        [until_quiet(lambda c=case: measure_replay(c, options.repetitions), attempts=2) for case in SIZES],
        title="Emulated CUDA graphs (CPU, one thread)",
        rows=[measure_capture()],
        notes=NOTES,
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
