"""Watches every operation of torch on the fake device: races, waits, copies through pageable memory, GEMM operands.

The device computes nothing, so where the host reads a number from it, the audit makes one up: 1.0, 0 or False,
depending on the type. A tensor of the host is real if it was made from tensors of the host alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # FakeTensorMode imports it, and it must see torch.cuda as it is
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_device.clocks import HOST, Access
from fake_device.operations import GEMMS, accesses, kind_of, misaligned, span, tensors_of, transfers
from fake_device.places import where
from fake_device.streams import Capturing, Machine, Stream

PAGE = 512
"""Bytes to which the allocator of CUDA rounds up."""
FLASH, EFFICIENT = 1, 2
"""Answers of `_fused_sdp_choice`; flash attention takes no mask."""


@dataclass
class Block:
    """Memory of the device."""

    storage: StorageWeakRef
    address: int
    """Where it would lie; no two overlap."""
    home: int
    """The stream that was current when it was allocated."""
    captured: bool
    """Allocated during a capture: it lies in the pool of the graph, and what follows the capture never takes it."""


class Audit(TorchDispatchMode):
    """What has been found, each with the place in the source."""

    def __init__(self, machine: Machine, *, races: bool = True) -> None:
        """races: follow every access. This takes half of the running time, and memory for every storage."""
        super().__init__()
        self.machine, self.follows = machine, races
        self._blocks: dict[int, Block] = {}
        """By the address of the storage, which no later one gets: the block holds a weak reference."""
        self._shared: set[int] = set()
        """Keys of the blocks that several streams have used."""
        self._next = PAGE
        self._pinned: dict[int, Any] = {}
        self.copies: Counter[str] = Counter()
        """Copies to the device for which the host waits: from pageable memory, which CUDA first copies to a buffer of
        its own, and blocking ones."""
        self.gemms: Counter[str] = Counter()
        """GEMMs with an operand that is not aligned."""

    @property
    def races(self) -> list[str]:
        """Pairs of accesses in no order."""
        return list(self.machine.accesses.races.values())

    @property
    def waits(self) -> Counter[str]:
        """Places where the host waited for the device: to read from it, for an event, a stream or all of them."""
        return self.machine.waits

    def begin(self) -> None:
        """Forget waits, copies and GEMMs; races stay, and so do the accesses with which later ones can race."""
        for found in (self.waits, self.copies, self.gemms):
            found.clear()

    # ---- what the parts of the fixture report ----

    def touch(self, x: Tensor, *, writes: bool, place: int, time: int, what: str) -> None:
        """Operation `time` of the place uses x."""
        low, high = span(x)
        if low < high:
            storage = x.untyped_storage()
            if x.is_cuda and self.block(storage).home != place:
                self._shared.add(storage._cdata)
            self.machine.accesses.add(storage._cdata, Access(low, high, writes, place, time, what))

    def block(self, storage: torch.UntypedStorage) -> Block:
        """The memory of a storage, allocated now on the current stream if it is new."""
        key = storage._cdata
        if key not in self._blocks:
            self.machine.accesses.allocated(self.machine.stream)
            self._blocks[key] = Block(StorageWeakRef(storage), self._next, self.machine.stream, self.machine.capturing)
            self._next += -(-max(storage.nbytes(), 1) // PAGE) * PAGE
        return self._blocks[key]

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        """`Tensor.record_stream`: the memory is not taken again before the stream has done its work so far."""
        self.machine.recorded[x.untyped_storage()._cdata].add(stream.cuda_stream)

    def _bury(self) -> None:
        """Look at what has been freed since the last operation."""
        for key in [key for key in self._shared if self._blocks[key].storage.expired()]:
            self._shared.remove(key)
            if self.machine.capturing or not self._blocks[key].captured:
                self.machine.accesses.end(key, self._blocks[key].home, self.machine.recorded[key])

    def wait(self, what: str) -> None:
        """The host waits for all that the current stream was given."""
        self.machine.host_waits(self.machine.clocks.now(self.machine.stream), what)

    def read(self, what: str, *given: Tensor) -> None:
        """The host reads the numbers of tensors: those of the device by a copy, for which it waits."""
        on_device = any(x.is_cuda for x in given)
        place = self.machine.stream if on_device else HOST
        time = self.machine.clocks.tick(place)
        for x in given if self.follows else ():
            if x.is_cuda or self.is_pinned(x):
                self.touch(x, writes=False, place=place, time=time, what=f"{what} at {where()}")
        if on_device:
            self.wait(what)

    def pin(self, x: Tensor) -> Tensor:
        """x, in pinned memory from now on."""
        storage = x.untyped_storage()
        self._pinned[storage._cdata] = storage
        return x

    def is_pinned(self, x: Tensor) -> bool:
        """Whether its memory is pinned."""
        return x.untyped_storage()._cdata in self._pinned

    # ---- every operation ----

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper of torch's compiler around each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self._bury()
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self.read("read of a number", args[0])
            return _number(args[0].dtype)
        if func is torch.ops.aten.equal.default and args[0].is_cuda:
            self.read("comparison", *args[:2])
            return True
        if func is torch.ops.aten._fused_sdp_choice.default:
            return FLASH if len(args) < 4 or args[3] is None else EFFICIENT
        pins = kwargs.pop("pin_memory", False)
        given = tensors_of(args, kwargs)
        if any(isinstance(x, FakeTensor) for x in given) or torch.device(kwargs.get("device") or "cpu").type != "cpu":
            out = func(*args, **kwargs)
        else:
            with unset_fake_temporarily():  # of the host alone
                out = func(*args, **kwargs)
        if pins or _pins_its_result(func, args, kwargs):
            self.pin(out)
        self._look(func, args, kwargs, given, out)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        """Check one operation that has run."""
        kind, results = kind_of(func), [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if kind.name in GEMMS:
            for x in (*given, *results):
                if misaligned(x):
                    word = f"{kind.name} with {tuple(x.shape)}, strides {x.stride()}, {str(x.dtype)[6:]}"
                    self.gemms[f"{word} at {where()}"] += 1
        for x in results if self.follows else ():
            if x.is_cuda:
                self.block(x.untyped_storage())
        if self.follows and kind.touches:
            on_device = any(x.is_cuda for x in (*given, *results))
            place = self.machine.stream if on_device else HOST
            time, what = self.machine.clocks.tick(place), ""
            for x, writes in accesses(func, args, kwargs, out):
                if x.is_cuda or self.is_pinned(x):
                    what = what or f"{kind.name} at {where()}"
                    self.touch(x, writes=writes, place=place, time=time, what=what)
        for source, target, non_blocking in transfers(func, args, kwargs, out):
            self._check_copy(source, target, non_blocking=non_blocking)

    def _check_copy(self, source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
        """A copy between host and device that has run: the host waits for it, unless it is asked not to and the host's
        memory is pinned. Then it also runs in a capture."""
        if non_blocking and self.is_pinned(target if source.is_cuda else source):
            return
        if source.is_cuda:
            self.wait("copy to the host")
            return
        self.copies[f"copy of {tuple(source.shape)} to the device at {where()}"] += 1
        if self.machine.capturing:
            raise Capturing(f"in a capture torch copies from the host only from pinned memory, non_blocking: {where()}")
        if not non_blocking:
            self.machine.clocks.join(HOST, self.machine.clocks.now(self.machine.stream))


def _number(dtype: torch.dtype) -> Any:
    """The audit's answer to a read."""
    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0


def _pins_its_result(func: Any, args: Any, kwargs: Any) -> bool:
    """`x.to("cpu", non_blocking=True)` of the device: torch copies to new pinned memory (`pin_out` in `_to_copy`)."""
    return (
        func is torch.ops.aten._to_copy.default
        and args[0].is_cuda
        and torch.device(kwargs.get("device") or args[0].device).type == "cpu"
        and bool(kwargs.get("non_blocking"))
    )


@contextmanager
def audited(machine: Machine, *, races: bool = True) -> Iterator[Audit]:
    """Inside the block tensors are fake, and every operation is audited."""
    audit = Audit(machine, races=races)

    as_list, as_array, real = Tensor.tolist, Tensor.numpy, torch.UntypedStorage.data_ptr

    def listed(x: Tensor) -> Any:
        audit.read("read of a list", x)
        if not isinstance(x, FakeTensor):
            return as_list(x)
        with unset_fake_temporarily():  # torch would read number by number
            return as_list(torch.full(x.shape, _number(x.dtype), dtype=x.dtype))

    def array(x: Tensor, **given: Any) -> Any:
        audit.read("numpy", x)
        return as_array(x, **given)

    def storage_address(storage: torch.UntypedStorage) -> int:
        return real(storage) if storage.device.type == "cpu" else audit.block(storage).address

    def tensor_address(x: Tensor) -> int:
        return storage_address(x.untyped_storage()) + x.storage_offset() * x.element_size()

    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "tolist", listed))
        stack.enter_context(patch.object(Tensor, "tolist", listed))
        stack.enter_context(patch.object(Tensor, "numpy", array))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", tensor_address))
        stack.enter_context(patch.object(torch.UntypedStorage, "data_ptr", storage_address))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda x, stream: audit.record_stream(x, stream)))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda x, *_: audit.pin(x)))
        stack.enter_context(patch.object(Tensor, "is_pinned", lambda x, *_: audit.is_pinned(x)))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", property(lambda _: True)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(audit)
        yield audit
