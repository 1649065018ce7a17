"""Recording the operations of a capture as calls on fixed addresses, which a replay makes again.

A `TorchDispatchMode` sees every operation below autograd, in forward and in backward. It lets the operation run and
moves new tensors into the arena. Then it notes a step that computes the same values into the same place:

| operation                     | at capture                      | step                                               |
|-------------------------------|---------------------------------|----------------------------------------------------|
| makes a new tensor            | result moves into the arena     | its `out=` variant into the address; or it, a copy |
| in place                      | runs                            | the same, on the addresses                         |
| a view, or an empty tensor    | runs; empty tensors move        | none: the address is already known                 |
| a collective (`transfer`)     | starts; its wait is recorded    | start and wait, each at its own point              |
| switching RNG states (`call`) | runs                            | the same call                                      |

Arguments of a step are addresses, not tensors. A step does not keep blocks of the arena (`arena.unmanaged`), so memory
is reused as on a GPU. A step reads the values that lie at an address at the time. A step does keep tensors from
outside, such as parameters, static inputs and main_grad. Their memory could otherwise be unmapped under the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.comm.capturing import GraphCaptureError, call_site, unrecorded
from labkit.comm.ledger import Scope, comm_scope, current_scope
from labkit.comm.pending import Pending
from labkit.graphs.emulated.arena import Arena, unmanaged
from labkit.graphs.emulated.host_syncs import refuse_uncapturable

T = TypeVar("T")
RecordedCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

__all__ = ["AddressRecorder", "RecordedCall"]

_STRUCTURED = frozenset(
    name
    for names in (
        "mm addmm bmm baddbmm add.Tensor sub.Tensor mul.Tensor div.Tensor neg reciprocal exp log sqrt rsqrt sin cos",
        "tanh sigmoid pow.Tensor_Scalar gelu silu gelu_backward silu_backward tanh_backward sigmoid_backward _softmax",
        "_log_softmax _softmax_backward_data _log_softmax_backward_data sum.dim_IntList mean.dim amax cumsum topk cat",
        "linalg_vector_norm gather scatter_add index.Tensor index_add maximum minimum clamp gt.Scalar ge.Scalar",
        "lt.Scalar le.Scalar eq.Scalar ne.Scalar",
    )
    for name in names.split()
)
"""Operations of layers whose `out=` form runs the same kernel on the given tensor ("structured" in torch). Other
operations may run another algorithm, which uses the given tensor for other values first."""
_EMPTY = ("aten::empty", "aten::new_empty", "aten::_empty")
_COPIES = ("aten::clone", "aten::_to_copy")
_ZEROS = ("aten::zeros", "aten::new_zeros", "aten::zeros_like")


class _Traits(NamedTuple):
    """Facts about an operation from its schema."""

    writes: bool
    """It writes to one of its arguments."""
    is_empty: bool
    """Its values are undefined."""
    into: tuple[Callable[..., Any], tuple[str, ...]] | None
    """The variant that computes into given tensors, and the names under which it takes them."""
    is_copy: bool
    is_zeros: bool


@cache
def _traits(func: Any) -> _Traits:
    name, arguments = func.name(), func._schema.arguments
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    if torch.Tag.inplace_view in func.tags:
        writes = False  # unsqueeze_ and the like change the strides of the user's tensor, and no byte
    base = name.split(".")[0]
    into = _into(func) if name.removeprefix("aten::") in _STRUCTURED else None
    return _Traits(writes, name.startswith(_EMPTY), into, base in _COPIES, base in _ZEROS)


def _into(func: Any) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """The `out=` variant with the same arguments besides `out`."""
    schema = func._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    for overload in func._overloadpacket.overloads():
        candidate = getattr(func._overloadpacket, overload)
        arguments = candidate._schema.arguments
        outs = tuple(a.name for a in arguments if a.is_out)
        tensors = len(outs) == len(schema.returns) and all(str(r.type) == "Tensor" for r in schema.returns)
        if outs and tensors and [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted:
            return candidate._op, outs
    return None


class AddressRecorder(TorchDispatchMode):
    """Records the operations inside `with recorder:` as `steps` on addresses of the arena and of outside tensors."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.steps: list[RecordedCall] = []
        self.parameters: list[tuple[weakref.ref[Tensor], int]] = []
        """The parameters that were read, and their addresses."""
        self._arena = arena
        self._paused = False
        self._aliases: dict[Any, Tensor] = {}
        self._seen: set[int] = set()
        self._under_way: dict[_Transfer, str] = {}

    # ---- operations ----

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        refuse_uncapturable(func, args, kwargs)
        given: dict[int, Tensor] = {}  # by storage
        self._note(args, given)
        self._note(kwargs.values(), given)
        result = func(*args, **kwargs)
        many = isinstance(result, (tuple, list))
        outputs = list(result) if many else [result]
        fresh = [i for i, x in enumerate(outputs) if isinstance(x, Tensor) and _identity(x) not in given]
        traits = _traits(func)
        if not fresh:
            if traits.writes:
                self._add(func._op, args, kwargs)
            return result
        for i in fresh:
            outputs[i] = self._place(outputs[i], has_values=not traits.is_empty)
        if not traits.is_empty:
            self._add_computation(func, traits, args, kwargs, outputs, fresh)
        return type(result)(outputs) if many else outputs[0]

    def _note(self, values: Any, given: dict[int, Tensor]) -> None:
        """Collect the tensors among arguments; note parameters and their addresses."""
        for value in values:
            if isinstance(value, Tensor):
                given[_identity(value)] = value
                if isinstance(value, torch.nn.Parameter) and id(value) not in self._seen:
                    self._seen.add(id(value))
                    self.parameters.append((weakref.ref(value), value.data_ptr()))
            elif isinstance(value, (list, tuple)):
                self._note(value, given)

    def _add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps.append((function, self._address(args), {k: self._address(v) for k, v in kwargs.items()}))

    def _add_computation(
        self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: Any, outputs: list[Any], fresh: list[int]
    ) -> None:
        places = [self._address(outputs[i]) for i in fresh]
        if not any(place.numel() for place in places) and not traits.writes:
            return
        if traits.is_copy:
            self.steps.append((torch.ops.aten.copy_.default._op, (places[0], self._address(args[0])), {}))
        elif traits.is_zeros:
            self.steps.append((torch.ops.aten.zero_.default._op, (places[0],), {}))
        elif traits.into is not None and len(fresh) == len(traits.into[1]):
            function, names = traits.into
            self._add(function, args, kwargs | dict(zip(names, (outputs[i] for i in fresh), strict=True)))
        else:
            self._add(partial(_compute_and_copy, func._op, fresh, places), args, kwargs)

    def _place(self, made: Tensor, has_values: bool = True) -> Tensor:
        """A copy of `made` in the arena, with the same type, shape and strides."""
        nbytes = made.untyped_storage().nbytes()
        if nbytes == 0:
            return made
        memory = self._arena.take(nbytes).untyped_storage()
        placed = torch.empty(0, dtype=made.dtype)
        placed.set_(memory, made.storage_offset(), made.size(), made.stride())
        return placed.copy_(made) if has_values else placed

    def _address(self, value: Any) -> Any:
        """`value` with tensors replaced by references to their memory that keep no block of an arena."""
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            sign = value.is_conj(), value.is_neg()
            key = (storage.data_ptr(), value.dtype, value.storage_offset(), value.size(), value.stride(), sign)
            found = self._aliases.get(key)
            if found is None:
                found = self._aliases[key] = unmanaged(value)
            return found
        if isinstance(value, (list, tuple)):
            return type(value)(self._address(v) for v in value)
        return value

    # ---- what dispatch does not see ----

    @contextmanager
    def _off(self) -> Iterator[None]:
        self._paused = True
        try:
            with unrecorded():
                yield
        finally:
            self._paused = False

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` now, unrecorded, and again at each replay."""
        with self._off():
            result = function()
        self.steps.append((function, (), {}))
        return result

    def transfer(self, issue: Callable[..., Pending], *args: Any, **kwargs: Any) -> Pending:
        """Issue a transfer now and at each replay. `wait()` of the result is recorded in the same way.

        The transport gets addresses, so that its threads hold no block. `args` keep the sent tensors alive until the
        wait.
        """
        transfer = _Transfer(issue, self._address(args), {k: self._address(v) for k, v in kwargs.items()})
        with self._off():
            transfer.begin()
        self.steps.append((transfer.begin, (), {}))
        self._under_way[transfer] = call_site(issue.__code__.co_filename)
        return _RecordedPending(self, transfer, [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])

    def completed(self, transfer: _Transfer, given: list[Tensor], event: bool) -> Tensor:
        """Wait for a transfer, now and at each replay; return its result, in a given tensor or in the arena."""
        with self._off():
            result = transfer.complete(event)
            owned = [x for x in given if x.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()]
            if owned:
                placed = _same(owned[0], result)
                place = None
            else:
                placed = self._place(result)
                place = self._address(placed)
        self.steps.append((transfer.complete_into, (event, place), {}))
        del self._under_way[transfer]
        return placed

    def finish(self) -> None:
        """End the capture.

        Raises:
            GraphCaptureError: a transfer was started and not waited for.
        """
        self._aliases.clear()
        for where in self._under_way.values():
            raise GraphCaptureError(
                f"{where}: this transfer was started inside the captured part and not waited for in it; a CUDA graph "
                "must end with all its work joined. Wait for it inside"
            )


def _identity(tensor: Tensor) -> int:
    """Identity of the tensor's storage, equal for views of one another.

    Raises:
        GraphCaptureError: a sparse tensor, which has no storage.
    """
    if tensor.layout is not torch.strided:
        raise GraphCaptureError(
            f"{call_site()}: tensors of layout {tensor.layout} have no address that a replay could use"
        )
    return tensor.untyped_storage()._cdata


def _same(owner: Tensor, result: Tensor) -> Tensor:
    """`result`, which lies in the memory of `owner`, as a tensor that keeps the memory."""
    if owner.size() == result.size() and owner.stride() == result.stride():
        return owner
    return owner.as_strided(result.size(), result.stride(), result.storage_offset())


def _compute_and_copy(
    function: Callable[..., Any], which: list[int], places: list[Tensor], *args: Any, **kwargs: Any
) -> None:
    result = function(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for i, place in zip(which, places, strict=True):
        place.copy_(results[i])


class _Transfer:
    """A collective or message of a graph: started, and waited for, once at capture and once in each replay."""

    __slots__ = ("_args", "_issue", "_kwargs", "_pending", "_scope")

    def __init__(self, issue: Callable[..., Pending], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._issue, self._args, self._kwargs = issue, args, kwargs
        self._scope: Scope = current_scope()  # under which the ledger books it, each time
        self._pending: Pending | None = None

    def begin(self) -> None:
        with comm_scope(*self._scope):
            self._pending = self._issue(*self._args, **self._kwargs)

    def complete(self, event: bool) -> Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None, "a transfer is started before it is waited for"
        return pending.wait(event=event)

    def complete_into(self, event: bool, place: Tensor | None) -> None:
        result = self.complete(event)
        if place is not None:
            place.copy_(result)


class _RecordedPending(Pending):
    """The Pending of a transfer inside a graph."""

    __slots__ = ("_given", "_recorder", "_transfer")

    def __init__(self, recorder: AddressRecorder, transfer: _Transfer, given: list[Tensor]) -> None:
        self._recorder, self._transfer, self._given = recorder, transfer, given
        self._result = None

    def wait(self, *, event: bool = True) -> Tensor:
        if self._result is None:
            self._result = self._recorder.completed(self._transfer, self._given, event)
            self._given = []
        return self._result
