"""One rank, forward and backward: our GPT against Hugging Face's GPT-2 and a plain one-device model (row C7).

    python benchmarks/one_rank.py            # writes results/one_rank.json
    python benchmarks/one_rank.py --compile  # writes results/one_rank_compiled.json

6 layers, hidden 256, 8 heads, sequence 256, batch 4, vocabulary 1024, fp32, one thread. The GEMMs alone are timed
in the same run, so the share of the machine's GEMM rate is that of the same minute.

With --compile all models stand in one run twice, as they are and with each layer under torch.compile (ours by
`model.compile: layers`), and Hugging Face's once more, compiled as a whole. A row compares like with like. The first
step of each, which compiles into an empty cache on one core, is timed by itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import Comparison, interleave, report, until_quiet
from plain_gpt import PlainGPT

from labkit import plan
from labkit.config import ModelConfig, RunConfig
from labkit.launch import run
from labkit.models import GPTModel
from labkit.models.compilation import compile_layers
from labkit.parallel import ParallelGroups, initialize_model_parallel, single_process_groups

MODEL = ModelConfig(layers=6, hidden=256, heads=8, vocab_size=1024, seq_length=256)
BATCH = 4
WHOLE = "Hugging Face GPT-2, compiled as a whole"


def hugging_face(config: ModelConfig) -> Any:
    """Hugging Face's GPT-2 of the same shape, with SDPA attention and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.seq_length,
            n_embd=config.hidden,
            n_layer=config.layers,
            n_head=config.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


def gemms_alone(config: ModelConfig, tokens: int) -> tuple[Callable[[], None], int]:
    """(the linear layers' and the output layer's GEMMs of a step and nothing else, their operations)."""
    h, f = config.hidden, config.ffn_hidden or 4 * config.hidden
    shapes = [(h, 3 * h), (h, h), (h, f), (f, h)] * config.layers + [(h, config.vocab_size)]
    # One operand set per shape: a step also finds its weights and activations in cache or memory as they come.
    sets = [(torch.randn(tokens, i), torch.randn(o, i), torch.randn(tokens, o)) for i, o in shapes]

    def step() -> None:
        for x, weight, _ in sets:
            torch.mm(x, weight.t())
        for x, weight, grad in reversed(sets):
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return step, sum(6 * tokens * i * o for i, o in shapes)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [B, S]."""
    ids = torch.randint(0, MODEL.vocab_size, (BATCH, MODEL.seq_length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def stepper(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> Callable[[], float]:
    """A function that goes forward and backward and returns the loss."""

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        return float(loss)

    return step


def measure(repetitions: int) -> Comparison:
    """All four in this process."""
    groups = single_process_groups(device="cpu")
    ours = GPTModel(MODEL, groups, layers=range(MODEL.layers), seed=1)
    theirs, plain = hugging_face(MODEL), PlainGPT(MODEL)
    tokens, labels = batch()
    gemms, gemm_flops = gemms_alone(MODEL, BATCH * MODEL.seq_length)
    alternatives = {
        "labkit": stepper(ours, lambda: ours(tokens, labels_BS=labels).mean()),
        "Hugging Face GPT-2": stepper(theirs, lambda: theirs(tokens, labels=tokens).loss),
        "plain model": stepper(plain, lambda: plain(tokens, labels)),
        "GEMMs alone": gemms,
    }
    found = interleave("forward and backward", alternatives, repetitions=repetitions)
    rate = gemm_flops / found.median("GEMMs alone")
    share = plan.step_flops(MODEL, samples=BATCH).total / found.median("labkit") / rate
    causal = plan.step_flops(MODEL, samples=BATCH, causal=True).total / found.median("labkit") / rate
    facts = {"gemm_gflops": round(rate / 1e9, 1), "share_of_gemm_rate": round(share, 3)}
    facts["share_of_gemm_rate_causal"] = round(causal, 3)
    return found if found.rejected else replace(found, facts=facts)


def megatron(groups: ParallelGroups, ours: GPTModel, *, compiled: bool) -> torch.nn.Module:
    """megatron-core's GPT with our weights and activation; each of its layers is compiled, or none."""
    import megatron_peer

    mcore, config = megatron_peer.load(), RunConfig(model=MODEL)
    if not mcore.parallel_state.model_parallel_is_initialized():
        mcore.parallel_state.initialize_model_parallel(1, 1)
    transformer = megatron_peer.transformer_config(mcore, config)
    transformer.activation_func = partial(F.gelu, approximate="tanh")
    model: torch.nn.Module = mcore.GPTModel(
        transformer, mcore.specs.get_gpt_layer_local_spec(), vocab_size=MODEL.vocab_size,
        max_sequence_length=MODEL.seq_length, position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    megatron_peer.copy_weights(ours, model)
    for layer in model.decoder.layers if compiled else ():  # type: ignore[union-attr]
        layer.compile()
    return model


def measure_compiled(repetitions: int) -> list[Comparison]:
    """In a rank, which megatron-core needs: all three models, each as it is and compiled, in turn."""
    import megatron_peer

    groups = initialize_model_parallel(RunConfig().parallel)
    tokens, labels = batch()
    positions, mask = torch.arange(MODEL.seq_length).expand(BATCH, -1), megatron_peer.causal_mask(MODEL.seq_length)
    steps: dict[str, Callable[[], float]] = {}
    for compiled in (False, True):
        ours = GPTModel(MODEL, groups, layers=range(MODEL.layers), seed=1)
        theirs, third = hugging_face(MODEL), megatron(groups, ours, compiled=compiled)
        if compiled:
            compile_layers([ours])
            for block in theirs.transformer.h:
                block.compile()
        end = ", compiled" if compiled else ""
        steps |= {
            f"labkit{end}": stepper(ours, lambda m=ours: m(tokens, labels_BS=labels).mean()),
            f"Hugging Face GPT-2{end}": stepper(theirs, lambda m=theirs: m(tokens, labels=tokens).loss),
            f"megatron-core 0.16.1{end}": stepper(
                third, lambda m=third: m(tokens, positions, mask, labels=labels).mean()
            ),
        }
    whole = hugging_face(MODEL)
    whole.compile()
    steps[WHOLE] = stepper(whole, lambda: whole(tokens, labels=tokens).loss)
    losses, first = {}, {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step()
            first[name] = round(time.perf_counter() - start, 1)
        equal = [loss for name, loss in losses.items() if not name.startswith("Hugging")]
        assert max(equal) - min(equal) < 1e-4, f"the models do not compute the same: {losses}"
        found = until_quiet(lambda: interleave("all", steps, repetitions=repetitions))  # compiling is a load
    rows = []
    for end in ("", ", compiled"):
        alike = [name for name in steps if name != WHOLE and name.endswith(", compiled") == bool(end)]
        seconds = {name: found.seconds[name] for name in alike}
        facts: dict[str, Any] = {"first_step_seconds": {name: first[name] for name in (*alike, WHOLE)}} if end else {}
        rows.append(replace(found, case=f"forward and backward{end}", seconds=seconds, facts=facts))
    pairs = {"labkit, compiled and as it is": "labkit", "labkit's layers beside a whole model": WHOLE}
    for case, other in pairs.items():
        seconds = {name: found.seconds[name] for name in ("labkit, compiled", other)}
        rows.append(replace(found, case=case, seconds=seconds, facts={}))
    return rows


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--compile", action="store_true", help="each model as it is and under torch.compile")
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    if options.compile:
        report(
            "one_rank_compiled",
            run(measure_compiled, 1, options.repetitions, device="cpu", timeout=1800.0)[0],
            title="One rank, forward and backward of a GPT, as it is and under torch.compile (CPU, one thread)",
            notes=[
                "6 layers, hidden 256, 8 heads, sequence 256, batch 4, vocabulary 1024, fp32; no optimizer.",
                "Compiled layer by layer; the last row is Hugging Face's model compiled as a whole.",
                "The first step compiles into an empty cache, by one process on one core.",
            ],
            write=not options.dry,
        )
        return
    torch.set_num_threads(1)
    report(
        "one_rank",
        [measure(options.repetitions)],
        title="One rank, forward and backward of a GPT (CPU, one thread)",
        notes=[
            "6 layers, hidden 256, 8 heads, sequence 256, batch 4, vocabulary 1024, fp32; no optimizer.",
            "`share of gemm rate` counts all attention scores, as the literature does; `causal` only computed ones.",
        ],
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
