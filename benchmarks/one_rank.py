"""One rank, forward and backward: our GPT against Hugging Face's GPT-2 and a plain one-device model (row C7).

    python benchmarks/one_rank.py            # writes results/one_rank.json

6 layers, hidden 256, 8 heads, sequence 256, batch 4, vocabulary 1024, fp32, one thread. The GEMMs alone are timed
in the same run, so the share of the machine's GEMM rate is that of the same minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from harness import Comparison, interleave, report
from plain_gpt import PlainGPT

from labkit import plan
from labkit.config import ModelConfig
from labkit.models import GPTModel
from labkit.parallel import single_process_groups

MODEL = ModelConfig(layers=6, hidden=256, heads=8, vocab_size=1024, seq_length=256)
BATCH = 4


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


def measure(repetitions: int) -> Comparison:
    """All four in this process."""
    groups = single_process_groups(device="cpu")
    ours = GPTModel(MODEL, groups, layers=range(MODEL.layers), seed=1)
    theirs, plain = hugging_face(MODEL), PlainGPT(MODEL)
    ids = torch.randint(0, MODEL.vocab_size, (BATCH, MODEL.seq_length + 1))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            loss_of().backward()

        return run

    gemms, gemm_flops = gemms_alone(MODEL, BATCH * MODEL.seq_length)
    alternatives = {
        "labkit": step(ours, lambda: ours(tokens, labels_BS=labels).mean()),
        "Hugging Face GPT-2": step(theirs, lambda: theirs(tokens, labels=tokens).loss),
        "plain model": step(plain, lambda: plain(tokens, labels)),
        "GEMMs alone": gemms,
    }
    found = interleave("forward and backward", alternatives, repetitions=repetitions)
    rate = gemm_flops / found.median("GEMMs alone")
    share = plan.step_flops(MODEL, samples=BATCH).total / found.median("labkit") / rate
    causal = plan.step_flops(MODEL, samples=BATCH, causal=True).total / found.median("labkit") / rate
    facts = {"gemm_gflops": round(rate / 1e9, 1), "share_of_gemm_rate": round(share, 3)}
    facts["share_of_gemm_rate_causal"] = round(causal, 3)
    return found if found.rejected else replace(found, facts=facts)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
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
