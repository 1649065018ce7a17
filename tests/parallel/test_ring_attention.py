"""Attention over ranks against attention of the whole, for both forms: values, gradients, messages, memory, order."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.config import ParallelConfig
from labkit.models.synthetic_load import sleeping_ring
from labkit.parallel import CommLedger, comm_scope, initialize_model_parallel
from labkit.parallel.context import ring_attention as module
from labkit.parallel.context.ring_attention import _Ring, all_gather_attention, ring_attention
from labkit.parallel.context.ring_plan import LAYOUTS, ring_plan
from labkit.parallel.context.zigzag import join_sequence, sequence_positions, split_sequence
from labkit.parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_tensor_model_parallel_region

FORMS = {"ring": ring_attention, "all-gather": all_gather_attention}
HEADS = (4, 2)


def cp_group(cp: int) -> Group:
    """The context-parallel group of all ranks."""
    return initialize_model_parallel(ParallelConfig(cp=cp)).cp


def whole_tensors(length: int, dim: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a gradient of the output, alike on every rank."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, heads, length, dim) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def in_pieces(form: str, cp: int, tensors: list[Tensor], **how: Any) -> list[Tensor]:
    """Output and gradients of this rank's part."""
    group, layout = cp_group(cp), how.get("layout", "zigzag")
    q, k, v, grad = (split_sequence(x, cp, group.rank, 2, layout).clone() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = FORMS[form](*inputs, group, **how)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def at_once(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    """The same in float64, on one process."""
    q, k, v, grad = (x.double().requires_grad_() for x in tensors)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]


def distances(form: str, cp: int, dtype: torch.dtype, ways: list[dict[str, Any]]) -> list[float]:
    """For each way, the largest relative difference of output and gradients of this rank."""
    group, found = cp_group(cp), []
    tensors = whole_tensors(8 * cp, dtype=dtype)
    for how in ways:
        expected = at_once(tensors, how["causal"])
        parts = [split_sequence(x, cp, group.rank, 2, how["layout"]) for x in expected]
        pairs = zip(in_pieces(form, cp, tensors, **how), parts, strict=True)
        found.append(max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs))
    return found


WAYS = [
    {"causal": causal, "layout": layout, "fused": fused}
    for causal in (True, False)
    for layout in LAYOUTS
    for fused in (True, False)
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_pieces_are_attention_of_the_whole(on_ranks, form, cp):
    ways = WAYS if cp == 4 else WAYS[:1]
    for found in on_ranks(distances, cp, form, cp, torch.float64, ways):
        assert max(found) < 1e-13


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_blocks_are_summed_as_exactly_as_the_type_allows(on_ranks, form, dtype, bound):
    """Within twice the rounding of one number, although eight blocks of four ranks are added."""
    for found in on_ranks(distances, 4, form, 4, dtype, WAYS[:2]):
        assert max(found) < bound


def numerical_gradients(form: str, cp: int, causal: bool, fast: bool) -> bool:
    """torch's gradcheck of the whole function: every rank perturbs the same whole q, k and v in lock step.

    A chunk has two rows, so that the mask inside a block is differentiated, too.
    """
    group = cp_group(cp)

    def attention(*whole: Tensor) -> Tensor:
        q, k, v = (
            split_sequence(copy_to_tensor_model_parallel_region(x, group), cp, group.rank, 2, "zigzag") for x in whole
        )
        out = FORMS[form](q, k, v, group, causal=causal)
        gathered = gather_from_tensor_model_parallel_region(out.movedim(2, -1).contiguous(), group)
        return join_sequence(gathered.chunk(cp, -1), -1, "zigzag")

    inputs = [x.requires_grad_() for x in whole_tensors(4 * cp, dim=2)[:3]]
    return torch.autograd.gradcheck(attention, inputs, fast_mode=fast)


@pytest.mark.parametrize(("cp", "fast"), [(2, False), (4, True), (8, True)])
def test_gradients_of_the_ring_are_those_of_finite_differences(on_ranks, cp, fast):
    assert on_ranks(numerical_gradients, cp, "ring", cp, True, fast) == [True] * cp


@pytest.mark.parametrize(("form", "causal"), [("ring", False), ("all-gather", True), ("all-gather", False)])
def test_so_are_those_of_the_other_forms(on_ranks, form, causal):
    assert on_ranks(numerical_gradients, 4, form, 4, causal, True) == [True] * 4


def on_dirty_memory(form: str, cp: int) -> bool:
    """Whether the results are numbers where torch fills new memory with NaN."""
    torch.use_deterministic_algorithms(True)  # which does so
    try:
        return all(x.isfinite().all().item() for x in in_pieces(form, cp, whole_tensors(8 * cp)))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_no_buffer_is_read_before_it_is_written(on_ranks, form, cp):
    assert on_ranks(on_dirty_memory, cp, form, cp) == [True] * cp


@pytest.mark.parametrize("form", FORMS)
def test_twice_is_bit_equal(on_ranks, form):
    tensors = whole_tensors(32, dtype=torch.float32)
    first, second = (on_ranks(in_pieces, 4, form, 4, tensors) for _ in range(2))
    for mine, again in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


def booked(form: str, cp: int, length: int, dtype: torch.dtype = torch.float64) -> CommLedger:
    """What one forward and backward communicate."""
    with CommLedger() as ledger, comm_scope(layer="layers.3.attention"):
        in_pieces(form, cp, whole_tensors(length, dtype=dtype))
    return ledger


@pytest.mark.parametrize(
    ("cp", "dtype"), [(2, torch.float64), (4, torch.float64), (8, torch.float64), (4, torch.bfloat16)]
)
def test_the_ring_is_cp_minus_1_steps_and_no_all_gather(on_ranks, cp, dtype):
    """The sums of dK and dV of half precision travel in float32: a message of theirs has 4 bytes for KV's 2."""
    length = 4 * cp
    elements = 2 * HEADS[1] * (length // cp) * 4  # of one rank's keys and values
    kv, sums = elements * dtype.itemsize, elements * max(dtype.itemsize, 4)
    for ledger in on_ranks(booked, cp, "ring", cp, length, dtype):
        assert {r.operation for r in ledger.records} == {"send", "recv"}
        assert {r.layer for r in ledger.records} == {"layers.3.attention"}
        for operation in ("send", "recv"):
            forward, backward = ({"operation": operation, "phase": phase} for phase in ("forward", "backward"))
            assert (ledger.count(**forward), ledger.bytes(**forward)) == (cp - 1, (cp - 1) * kv)
            assert (ledger.count(**backward), ledger.bytes(**backward)) == (2 * (cp - 1), (cp - 1) * (kv + sums))


def test_the_other_form_gathers_twice_and_scatters_once(on_ranks):
    for ledger in on_ranks(booked, 4, "all-gather", 4, 16):
        calls = [(r.operation, r.phase) for r in ledger.records]
        assert calls == [("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")]


def ring_buffers(cp: int) -> tuple[int, int, int]:
    """Bytes of the buffers that carried keys and values in one forward, of the whole's, and of what backward keeps."""
    carried: dict[int, Tensor] = {}  # holding them keeps their addresses from being used again
    batch, saved = collectives.batch, []

    def watched(messages):
        carried.update((m.tensor.untyped_storage().data_ptr(), m.tensor) for m in messages)
        return batch(messages)

    group, tensors = cp_group(cp), whole_tensors(8 * cp)
    q, k, v = (split_sequence(x, cp, group.rank, 2, "zigzag").clone().requires_grad_() for x in tensors[:3])
    collectives.batch = watched
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            ring_attention(q, k, v, group)
    finally:
        collectives.batch = batch
    whole = sum(x.nbytes for x in tensors[1:3])
    return sum(x.untyped_storage().nbytes() for x in carried.values()), whole, sum(x.nbytes for x in saved)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_two_buffers_carry_the_keys_and_values_2_over_cp_of_the_whole(on_ranks, cp):
    q, k, v, _ = whole_tensors(8 * cp)
    kept = (2 * q.nbytes + k.nbytes + v.nbytes + q.nbytes // q.shape[-1]) // cp  # q, output, k, v, one number a row
    for carried, whole, saved in on_ranks(ring_buffers, cp, cp):
        assert carried * cp == 2 * whole
        assert saved == kept


class Storages(TorchDispatchMode):
    """Every storage that an operation makes: what of it is alive can be asked for by size."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
        return out

    def alive(self) -> Counter[int]:
        """Bytes of a storage -> how many there are."""
        return Counter(s.nbytes() for s in (ref() for ref in self.made.values()) if s is not None)


def bytes_alive(cp: int) -> dict[str, tuple[int, int]]:
    """At their peaks forward and backward: bytes of keys and values, and of sums of their gradients, over those of the
    rank's own keys and values. bf16, and as many heads that no other tensor has their size."""
    group, found = cp_group(cp), {}
    originals = {name: getattr(module, name) for name in ("attend", "attend_backward")}
    key = 2 * 8 * 4 * 2  # bytes: heads, rows, features, two each

    def counting(name: str) -> Any:
        def counted(*args: Any, **how: Any) -> Any:
            alive = storages.alive()
            now = (alive[key] + 2 * alive[2 * key], 4 * alive[4 * key])  # k, v; both in one; sums of both in float32
            found[name] = tuple(max(a, b) for a, b in zip(now, found.get(name, (0, 0)), strict=True))
            return originals[name](*args, **how)

        return counted

    with Storages() as storages:
        q, k, v = (torch.ones(1, h, 8, 4, dtype=torch.bfloat16).requires_grad_() for h in (10, 2, 2))
        try:
            for name in originals:
                setattr(module, name, counting(name))
            ring_attention(q, k, v, group).sum().backward()
        finally:
            for name, original in originals.items():
                setattr(module, name, original)
    return {name: (kv // 2, sums // 2) for name, (kv, sums) in found.items()}


@pytest.mark.parametrize("cp", [2, 4])
def test_with_the_ranks_own_keys_and_values_there_are_3_over_cp_in_memory(on_ranks, cp):
    """Its own, what is worked on, and what arrives, forward and backward; and at most four sums of dK and dV, twice as
    large in float32: the one on its way out, the one that arrives, the rank's next share, and its own keys'."""
    for found in on_ranks(bytes_alive, cp, cp):
        assert found == {"attend": (3, 0), "attend_backward": (3, 8 if cp > 2 else 6)}


def order_of_work(cp: int) -> list[str]:
    """What the ring does in one forward and backward, in order."""
    done: list[str] = []
    names = {_Ring: ("start", "finish"), module: ("attend", "attend_backward")}
    originals = [(owner, name, getattr(owner, name)) for owner, both in names.items() for name in both]

    def noting(name: str, original: Any) -> Any:
        return lambda *args, **how: (done.append(name), original(*args, **how))[1]

    try:
        for owner, name, original in originals:
            setattr(owner, name, noting(name, original))
        in_pieces("ring", cp, whole_tensors(8 * cp))
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    return done


def test_transfers_run_behind_the_blocks(on_ranks):
    """Forward: every hand-over starts before a block and is waited for after it. Backward: so is KV's (outer), and the
    sums of dK and dV are waited for (inner finish) after the next block has been computed; only their last hop home
    (the last start and finish) has no block between."""
    forward = ["start", "attend", "finish"] * 2 + ["attend"]
    first = ["start", "attend_backward", "finish"]
    second = ["start", "attend_backward", "start", "finish"]
    last = ["attend_backward", "finish", "start", "finish"]
    for done in on_ranks(order_of_work, 3, 3):
        assert done == forward + first + second + last


def refused(heads: tuple[int, int], lengths: tuple[int, int]) -> str:
    q, k = torch.zeros(1, heads[0], lengths[0], 4), torch.zeros(1, heads[1], lengths[1], 4)
    with pytest.raises(ValueError) as error:
        ring_attention(q, k, k, Group("cp", (0,), 0))
    return str(error.value)


def test_what_does_not_fit_is_refused():
    assert "n a multiple of m are needed; got (1, 3, 4, 4), (1, 2, 4, 4)" in refused((3, 2), (4, 4))
    assert "got (1, 2, 4, 4), (1, 2, 6, 4)" in refused((2, 2), (4, 6))
    assert "3 rows cannot be two equal chunks" in refused((2, 2), (3, 3))


def test_one_rank_is_plain_attention():
    tensors = whole_tensors(6)
    q, k, v, grad = tensors
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    for form in FORMS.values():
        out = form(*inputs, Group("cp", (0,), 0))
        found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
        for mine, theirs in zip(found, at_once(tensors, True), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert math.isfinite(out.sum().item())


def asleep(cp: int, layout: Any) -> list[tuple[str, str]]:
    """Names and kinds of a sleeping ring's events on this rank, in order of their end."""
    cut = [sequence_positions(8 * cp, cp, rank, layout).tolist() for rank in range(cp)]
    return [(event.name, event.kind) for event in sleeping_ring(cp_group(cp), cut)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sleeping_ring_runs_the_blocks_of_its_cut(on_ranks, layout):
    for rank, events in enumerate(on_ranks(asleep, 4, 4, layout)):
        blocks = [name for name, kind in events if kind == "forward"]
        plan = ring_plan(4, rank, layout=layout)
        assert blocks == [f"kv {(rank - step) % 4}" for step, block in enumerate(plan) if block is not None]
        assert [kind for _, kind in events].count("recv") == [kind for _, kind in events].count("send") == 3
