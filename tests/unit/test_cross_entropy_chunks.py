"""Chunks of the loss go by the type of device; at real sizes on tensors without memory, whose operations are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.parallel import single_process_groups
from labkit.parallel.vocab import cross_entropy as ce

TOKENS, HIDDEN, VOCAB, PADDED = 16_384, 64, 50_257, 50_304
MIB = 2**20


class Products(TorchDispatchMode):
    """Rows of every matrix product by what it makes, and the bytes of every new tensor but of the kept exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[int]] = {"logits": [], "dgrad": [], "wgrad": []}
        self.bytes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in func._schema.returns):  # no view, nothing in place
            found = (x for x in tree_leaves(made) if isinstance(x, Tensor) and x.shape[0] != TOKENS)
            self.bytes |= {x.nbytes for x in found}
        if func.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm_"):
            *_, a, b = args
            kind = {b.shape[1]: "logits", a.shape[0]: "wgrad", a.shape[1]: "dgrad"}[PADDED]  # no odd number of columns
            self.rows[kind].append(a.shape[1] if kind == "wgrad" else a.shape[0])
        return made


def products(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype) -> Products:
    """Of a forward and backward with the chunks of a type of device."""
    monkeypatch.setitem(ce.CHUNKS, "meta", ce.CHUNKS[device])
    hidden = torch.empty(TOKENS, 1, HIDDEN, device="meta", dtype=dtype, requires_grad=True)
    weight = torch.empty(PADDED, HIDDEN, device="meta", dtype=dtype, requires_grad=True)
    labels = torch.empty(TOKENS, 1, device="meta", dtype=torch.int64)
    sizes = {"vocab_size": VOCAB, "padded_vocab_size": PADDED, "check_ids": False}
    with Products() as seen:
        loss = ce.linear_cross_entropy(hidden, weight, labels, single_process_groups().tp, **sizes)
        loss.backward(torch.empty_like(loss))
    return seen


def test_a_gpu_takes_few_large_chunks_within_a_bound_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = (products(monkeypatch, device, torch.bfloat16) for device in ("cpu", "cuda"))
    for seen in (cpu, gpu):
        assert all(sum(rows) == TOKENS for rows in seen.rows.values()), "every token once in every product"
    assert (len(cpu.rows["logits"]), len(cpu.rows["wgrad"])) == (50, 64), "as it was for both"
    assert (len(gpu.rows["logits"]), len(gpu.rows["wgrad"])) == (7, 7)
    assert gpu.rows["dgrad"] == gpu.rows["wgrad"]
    logits, gradients = 256 * MIB, 512 * MIB  # in bf16 and in float32
    assert 0.99 * gradients < max(gpu.bytes) <= gradients
    assert max(size for size in gpu.bytes if size < 0.99 * gradients) <= logits


def test_a_type_of_device_without_sizes_takes_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ce.CHUNKS, "meta", ce.CHUNKS["cuda"])
    assert ce.chunk_sizes(torch.device("meta")) is ce.CHUNKS["cuda"] is ce.chunk_sizes(torch.device("cuda", 0))
    monkeypatch.delitem(ce.CHUNKS, "meta")
    assert ce.chunk_sizes(torch.device("meta")) is ce.CHUNKS["cpu"] is ce.chunk_sizes(torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_given_logits_are_worked_on_in_place(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On a GPU in one chunk: a chunk costs seven launches and saves no memory."""
    monkeypatch.setitem(ce.CHUNKS, "meta", ce.CHUNKS[device])
    logits = torch.empty(TOKENS, 1, PADDED, device="meta")
    labels = torch.empty(TOKENS, 1, device="meta", dtype=torch.int64)
    monkeypatch.setattr(ce, "check_token_ids", lambda ids, *_: ids)
    counted = 0

    class Amax(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal counted
            counted += "amax" in func.name()
            return func(*args, **(kwargs or {}))

    with Amax():
        ce.vocab_parallel_cross_entropy(logits, labels, single_process_groups().tp, vocab_size=VOCAB)
    assert counted == (1 if device == "cuda" else TOKENS // 16)
