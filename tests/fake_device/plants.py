"""Mistakes that the audit must find, and the same code without the mistake, in which it must find nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fake_device.audit import Audit
from fake_device.cases import CASES
from fake_device.fake_groups import fake_groups
from fake_device.steps import train
from labkit.comm import collectives
from labkit.config import ParallelConfig
from labkit.graphs.cuda.local_backend import LocalGraph
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.parallel.context.ring_attention import _Ring
from labkit.parallel.data_parallel.grad_buffers import GradBucket

Plant = Callable[[Audit], Any]


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


# ---- races ----


def two_streams(_: Audit, *, waits: bool) -> None:
    x, side = on_device(8), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)


def other_bytes(_: Audit) -> None:
    """Two streams on halves of one storage, and on the same half to read: no race."""
    x, side = on_device(8), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:4].add_(1)
    x[4:].add_(1)
    with torch.cuda.stream(side):
        x[:4] + 1
    torch.cuda.current_stream().wait_stream(side)
    x + 1


def event(_: Audit, *, recorded_after: bool) -> None:
    """An event orders only what its stream was given before."""
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    x = on_device(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if not recorded_after:
            done.record()
        x.add_(1)
        if recorded_after:
            done.record()
    done.wait()
    x + 1


def backward_on_a_side_stream(_: Audit, *, waits: bool) -> None:
    """Autograd runs a node's backward on the stream of its forward, and joins the streams when all is done."""
    x, side = on_device(8).requires_grad_(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * x
    torch.cuda.current_stream().wait_stream(side)
    seen = []
    x.register_hook(lambda grad: seen.append(grad))
    y.sum().backward()
    if waits:
        seen[0].add_(1)
    else:
        with torch.cuda.stream(torch.cuda.Stream()):
            seen[0].add_(1)


def all_reduce(audit: Audit, *, waits: bool) -> None:
    with fake_groups(audit, ParallelConfig(tp=2), 2) as groups:
        x = on_device(8)
        pending = collectives.all_reduce_async(x, groups.tp)
        if waits:
            pending.wait()
        x + 1


def read_of_two_streams(read: Callable[[Tensor], Any], *, waits: bool) -> Plant:
    """The host reads what a second stream wrote, and waits only for its current stream."""

    def run(_: Audit) -> None:
        x, side = on_device(1), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        read(x)

    return run


def pinned_read(read: Callable[[Tensor], Any], *, waits: bool) -> Plant:
    """The host reads a pinned buffer to which the device still copies."""

    def run(_: Audit) -> None:
        host = torch.empty(1, pin_memory=True)
        host.copy_(on_device(1, dtype=torch.float32), non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        read(host)

    return run


def to_the_host(_: Audit, *, waits: bool) -> None:
    """torch pins the result of `.to("cpu", non_blocking=True)`, and the host goes on."""
    host = on_device(1).to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    host + 1


def blocking_copies(_: Audit) -> None:
    """A blocking copy from or to pinned memory ends before the host goes on."""
    host = torch.empty(8, pin_memory=True)
    host.copy_(on_device(8, dtype=torch.float32))
    host.add_(1)
    host.to("cuda")
    host.zero_()


def pinned_after_freed(_: Audit) -> None:
    """Pinned memory takes no memory of the device that was freed while a second stream used it."""
    x, side, host = on_device(8), torch.cuda.Stream(), torch.empty(8, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    del x
    host.zero_()


def freed(_: Audit, *, waits: bool = False, records: bool = False) -> None:
    """A tensor is dropped while a second stream still reads it; its own stream may take the memory again."""
    x, side = on_device(8), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    if records:
        x.record_stream(side)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    del x
    on_device(8)


def replay(_: Audit, *, waits: bool, reads: bool = False) -> None:
    """A graph is replayed on a second stream, and the first writes its input, or reads its output."""
    given, out, side, graph = on_device(8), on_device(8), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(given)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    if reads:
        out + given
    else:
        given.add_(1)


def replay_beside_other_bytes(_: Audit) -> None:
    """A graph of the first and the last quarter of a tensor touches nothing between them."""
    x, side, graph = on_device(8), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x[:2].add_(1)
        x[6:].add_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    x[2:6].add_(1)


def entered_twice(_: Audit) -> None:
    """A block of the stream that is current already leaves the outer stream current in the end."""
    x, side = on_device(8), torch.cuda.Stream()
    with torch.cuda.stream(side), torch.cuda.stream(side):
        pass
    x.add_(1)


def event_query(_: Audit, *, asks: bool) -> None:
    """Where `query` says that an event is done, the host may read what came before it."""
    host, done = torch.empty(1, pin_memory=True), torch.cuda.Event()
    host.copy_(on_device(1, dtype=torch.float32), non_blocking=True)
    done.record()
    if asks:
        assert done.query()
    host.item()


def makers(_: Audit) -> None:
    """What takes only shape and type from a tensor does not read it."""
    x, side = on_device(8), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    for make in (torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like):
        make(x)
    torch.full_like(x, 2)
    torch.randint_like(x, 2)
    x.new_zeros(2), x.new_ones(2), x.new_full((2,), 2)


def case_with(name: str, target: Any, attribute: str, value: Any) -> Plant:
    """A case of the steps with an attribute of labkit replaced."""

    def run(audit: Audit) -> None:
        with patch.object(target, attribute, value):
            train(CASES[name], audit)

    return run


def moves_on_early(ring: _Ring) -> None:
    """`_Ring.finish` without its wait."""
    if ring._underway:
        ring.held, ring._spare = ring._spare, ring.held
    ring._underway = []


def replayed_aside(graph: LocalGraph) -> None:
    """`LocalGraph.replay` on a stream of its own, for which nobody waits."""
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.cuda_graph.replay()


def read_at_once(copy: HostCopy) -> Tensor:
    """`HostCopy.wait` without its wait."""
    return copy._host


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x),
}
HOST_READS = READS | {"numpy": lambda x: x.numpy()}

RACES: dict[str, Plant] = {
    "two streams": partial(two_streams, waits=False),
    "event recorded too early": partial(event, recorded_after=False),
    "gradient on another stream": partial(backward_on_a_side_stream, waits=False),
    "all_reduce without wait": partial(all_reduce, waits=False),
    "freed too early": freed,
    "input of a replay written": partial(replay, waits=False),
    "output of a replay read": partial(replay, waits=False, reads=True),
    "no query": partial(event_query, asks=False),
    "to the host, read too early": partial(to_the_host, waits=False),
    **{f"{name} of two streams": read_of_two_streams(read, waits=False) for name, read in READS.items()},
    **{f"{name} of pinned memory too early": pinned_read(read, waits=False) for name, read in HOST_READS.items()},
    "bucket reduced too early": case_with("dp2 shared overlap", GradBucket, "_wait_for_gradients", lambda _: None),
    "ring moves on too early": case_with("cp2 ring first rank", _Ring, "finish", moves_on_early),
    "graphs replayed aside": case_with("graphs gpt", LocalGraph, "replay", replayed_aside),
    "counts read too early": case_with("moe alltoall", HostCopy, "wait", read_at_once),
}
ORDERED: dict[str, Plant] = {
    "two streams in order": partial(two_streams, waits=True),
    "other bytes of one storage": other_bytes,
    "event recorded in time": partial(event, recorded_after=True),
    "gradient after its backward": partial(backward_on_a_side_stream, waits=True),
    "all_reduce with wait": partial(all_reduce, waits=True),
    "freed in time": partial(freed, waits=True),
    "input of a replay written in time": partial(replay, waits=True),
    "output of a replay read in time": partial(replay, waits=True, reads=True),
    "replay beside other bytes": replay_beside_other_bytes,
    "stream entered twice": entered_twice,
    "query": partial(event_query, asks=True),
    "zeros_like, new_zeros": makers,
    "freed and recorded": partial(freed, records=True),
    "to the host, read in time": partial(to_the_host, waits=True),
    **{f"{name} of two streams in order": read_of_two_streams(read, waits=True) for name, read in READS.items()},
    **{f"{name} of pinned memory in time": pinned_read(read, waits=True) for name, read in HOST_READS.items()},
    "blocking copies of pinned memory": blocking_copies,
    "pinned memory after freed memory": pinned_after_freed,
}


# ---- waits of the host ----


WAITS: dict[str, Plant] = {
    "item": lambda _: on_device(1).item(),
    "float": lambda _: float(on_device(1)),
    "bool": lambda _: bool(on_device(1) > 0),
    "tolist": lambda _: on_device(2, 3).tolist(),
    "cpu": lambda _: on_device(2).cpu(),
    "equal": lambda _: torch.equal(on_device(2), on_device(2)),
    "_foreach_copy_ to the host": lambda _: torch._foreach_copy_([torch.empty(2)], [on_device(2)]),
    "copy_ to the host": lambda _: torch.empty(2).copy_(on_device(2, dtype=torch.float32)),
    "to pageable memory, non_blocking": lambda _: torch.empty(2).copy_(
        on_device(2, dtype=torch.float32), non_blocking=True
    ),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "stream": lambda _: torch.cuda.current_stream().synchronize(),
}
"""In each the host waits exactly once."""
NO_WAITS: dict[str, Plant] = {
    "to pinned memory": lambda _: torch.empty(2, pin_memory=True).copy_(
        on_device(2, dtype=torch.float32), non_blocking=True
    ),
    "to the host, non_blocking": lambda _: on_device(2).to("cpu", non_blocking=True),
    "of the host": lambda _: torch.ones(3).tolist(),
}
COPIES: dict[str, Plant] = {
    "from pageable memory": lambda _: torch.ones(2).to("cuda"),
    "from pageable memory, non_blocking": lambda _: torch.ones(2).to("cuda", non_blocking=True),
    "a list": lambda _: torch.tensor([1, 2], device="cuda"),
    "copy_ to the device": lambda _: on_device(2).copy_(torch.ones(2)),
    "_foreach_copy_ to the device": lambda _: torch._foreach_copy_([on_device(2)], [torch.ones(2)]),
    "index of the host": lambda _: on_device(4)[torch.zeros(2, dtype=torch.int64)],
    "from pinned memory, blocking": lambda _: torch.ones(2).pin_memory().to("cuda"),
}
"""Each makes exactly one copy to the device for which the host waits."""
NO_COPIES: dict[str, Plant] = {
    "_foreach_copy_ from pinned memory": lambda _: torch._foreach_copy_(
        [on_device(2)], [torch.ones(2).pin_memory()], non_blocking=True
    ),
    "index of the device": lambda _: on_device(4)[torch.zeros(2, dtype=torch.int64, device="cuda")],
    "number of the host": lambda _: on_device(4) + torch.ones(()),
    "from pinned memory": lambda _: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
}

# ---- GEMMs ----


def product(rows: int, inner: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Plant:
    return lambda _: on_device(rows, inner, dtype=dtype) @ on_device(inner, columns, dtype=dtype)


def offset(_: Audit) -> None:
    """Rows of a good length that begin at the fourth element."""
    on_device(8 * 16 + 4)[4:].view(8, 16) @ on_device(16, 8)


def rows_of_128(_: Audit) -> None:
    """Columns of a wide matrix: the stride counts, not the number of columns."""
    on_device(16, 128)[:, :20] @ on_device(128, 8)[:20]


def float8(*, offset: int) -> Plant:
    """An operand in fp8 that begins at an element of its storage; what else is not aligned, torch itself refuses."""

    def run(audit: Audit) -> None:
        a, one = (
            on_device(32 * 64 + offset).to(torch.float8_e4m3fn)[offset:].view(32, 64),
            on_device(dtype=torch.float32),
        )
        torch._scaled_mm(a, on_device(32, 64).to(torch.float8_e4m3fn).t(), one, one, out_dtype=torch.bfloat16)

    return run


def grouped_float8(*, offset: int) -> Plant:
    """The same of grouped products."""

    def run(_: Audit) -> None:
        a = on_device(64 * 64 + offset).to(torch.float8_e4m3fn)[offset:].view(64, 64)
        b = on_device(2, 32, 64).to(torch.float8_e4m3fn).transpose(-2, -1)
        scale_a, scale_b = on_device(64, dtype=torch.float32), on_device(2, 32, dtype=torch.float32)
        ends = torch.zeros(2, dtype=torch.int32, device="cuda")
        torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16)

    return run


MISALIGNED: dict[str, Plant] = {
    "50257 columns": product(16, 64, 50257),
    "50257 inner": product(16, 50257, 64),
    "fp16": product(16, 64, 100, torch.float16),
    "offset of 4 elements": offset,
    "fp8 at an offset of 8 elements": float8(offset=8),
    "fp8 of groups at an offset of 8 elements": grouped_float8(offset=8),
    "stack": lambda _: torch.bmm(on_device(2, 8, 12), on_device(2, 12, 8)),
    "baddbmm_": lambda _: on_device(2, 8, 8).baddbmm_(on_device(2, 8, 12), on_device(2, 12, 8)),
    "no stride of 1": lambda _: on_device(16, 128)[:, ::8] @ on_device(16, 8),
}
ALIGNED: dict[str, Plant] = {
    "50304 columns": product(16, 64, 50304),
    "fp32": product(16, 50257, 64, torch.float32),
    "rows of 128": rows_of_128,
    "baddbmm_": lambda _: on_device(2, 8, 8).baddbmm_(on_device(2, 8, 16), on_device(2, 16, 8)),
    "transposed": lambda _: on_device(16, 8).t() @ on_device(16, 8),
    "two classes": product(16, 64, 2),
    "fp8": float8(offset=16),
    "fp8 of groups": grouped_float8(offset=16),
}

# ---- captures ----


def captured(body: Callable[[], Any]) -> Plant:
    def run(audit: Audit) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            body()

    return run


def beside(*, joined: bool) -> None:
    """Work on a second stream of the capture."""
    outer, side, x = torch.cuda.current_stream(), torch.cuda.Stream(), on_device(4)
    side.wait_stream(outer)
    with torch.cuda.stream(side):
        x + 1
    if joined:
        outer.wait_stream(side)


REFUSED: dict[str, Plant] = {
    "read": captured(lambda: on_device(1).item()),
    "pageable copy": captured(lambda: torch.ones(2).to("cuda")),
    "blocking copy": captured(lambda: torch.ones(2).pin_memory().to("cuda")),
    "synchronize": captured(lambda: torch.cuda.synchronize()),
    "unjoined stream": captured(lambda: beside(joined=False)),
    "event": captured(lambda: torch.cuda.current_stream().record_event().synchronize()),
}
"""cudaErrorStreamCaptureUnsupported."""
CAPTURED: dict[str, Plant] = {
    "operations of the device": captured(lambda: on_device(4) + 1),
    "copy from pinned memory": captured(lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True)),
    "joined stream": captured(lambda: beside(joined=True)),
}

KINDS = {
    "races": RACES, "ordered": ORDERED, "waits": WAITS, "no waits": NO_WAITS, "copies": COPIES,
    "no copies": NO_COPIES, "misaligned": MISALIGNED, "aligned": ALIGNED, "refused": REFUSED, "captured": CAPTURED,
}  # fmt: skip
PLANTS = {f"{kind}: {name}": plant for kind, plants in KINDS.items() for name, plant in plants.items()}
