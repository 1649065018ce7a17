"""One step of a rank whose schedule has merged pairs: forwards and backwards run part by part.

Every microbatch runs so, alone too, because its backward may later be merged. `pair_order` gives the order of the parts
(`merging.py`), which are the chunk's own: `in_parts` of a chunk takes the arguments of its forward and returns an
object that runs the parts of one microbatch (`labkit/models/chunk_parts.py`).

While recording, every part leaves an Event of its name, `2F5 0 experts`: the action, the layer in its chunk, the part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from labkit.comm.p2p import Payload
from labkit.events import watchers
from labkit.schedules.execution import RankStep
from labkit.schedules.ir import EVENT_KINDS
from labkit.schedules.lowering import Compute, Pair
from labkit.schedules.merging import PartRun, pair_order


class _Asked:
    """A chunk for the forward step, which keeps what it is called with and returns the parts instead of an output."""

    def __init__(self, chunk: Any) -> None:
        self.chunk = chunk
        self.parts: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.parts = self.chunk.in_parts(*args, **kwargs)
        return self.parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chunk, name)


class MergedStep(RankStep):
    """Runs pairs, and every other action, part by part."""

    RUN: ClassVar[dict[str, Callable[[Any, Any], None]]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts: dict[tuple[int, int], Any] = {}
        """(stage, microbatch) -> its parts, from its forward to its backward."""
        self.left_out: dict[tuple[int, int], list[Any]] = {}
        """The same -> keys of the weight gradients that its I has left to its W."""

    def _compute_in_parts(self, step: Compute) -> None:
        """Run an action that is not merged."""
        if step.verb == "F":
            self._side_by_side(step, None)
        elif step.verb in "BI":
            self._side_by_side(None, step)
        else:
            if step.ends_chunk:
                self.sync.before_last_backward(step.chunk)
            with self._event(step), self.timed("backward-compute", 2):
                for key in self.left_out.pop((step.action.stage, step.action.microbatch)):
                    self.weight_gradients.run(key)
            if step.ends_chunk:
                self.sync.after_last_backward(step.chunk)

    def _merged(self, pair: Pair) -> None:
        self._side_by_side(pair.forward, pair.backward)

    def _side_by_side(self, forward: Compute | None, backward: Compute | None) -> None:
        """Run the parts of both actions, or of one of them, in their order."""
        sides = [step for step in (forward, backward) if step is not None]
        received = {step.verb: None if step.needs is None else self.messages.pop(step.needs) for step in sides}
        if backward is not None and backward.ends_chunk:
            self.sync.before_last_backward(backward.chunk)
        with ExitStack() as timers:
            for step in sides:
                name = "forward-compute" if step is forward else "backward-compute"
                timers.enter_context(self.timed(name, 2))
            back = None if backward is None else self._begin_backward(backward, received[backward.verb])
            ahead, loss_func = (None, None) if forward is None else self._begin_forward(forward, received["F"])
            delay = self.setup.delay_wgrad and (backward is None or backward.verb == "B")
            order = pair_order(ahead.layers if ahead else (), back.layers if back else (), delay_wgrad=delay)
            for run in order:
                self._run_part(run, forward if run.side == "F" else backward, ahead if run.side == "F" else back)
            made = [] if forward is None else [(forward, self._finish_forward(forward, ahead, loss_func))]
            made += [] if backward is None else [(backward, self._finish_backward(backward, back))]
        for step, payload in made:
            if step.gives is not None:
                self._keep(step.gives, payload)
        if backward is not None and backward.ends_chunk:
            self.sync.after_last_backward(backward.chunk)

    def _run_part(self, run: PartRun, step: Any, parts: Any) -> None:
        key = (step.action.stage, step.action.microbatch, run.layer, run.part)
        with self._part_event(step, run):
            if run.side == "F":
                with self.setup.autocast():
                    parts.forward(run.layer, run.part)
            elif run.side == "W":
                self.weight_gradients.run(key)
            else:
                with self._collecting(step, key, run.part):
                    parts.backward(run.layer, run.part)

    def _part_event(self, step: Compute, run: PartRun) -> AbstractContextManager[None]:
        if not watchers:
            return nullcontext()
        action = step.action
        name, kind = f"{action} {run.layer} {run.part}", EVENT_KINDS["W" if run.side == "W" else action.kind]
        return self.span(name, kind, microbatch=action.microbatch, chunk=step.chunk)

    def _collecting(self, step: Compute, key: tuple[Any, ...], part: str) -> AbstractContextManager[None]:
        """Return the context of a part's backward: weight gradients wait for W, or for their place in a pair."""
        if step.verb == "I":
            self.left_out[step.action.stage, step.action.microbatch].append(key)
        elif not self.setup.delay_wgrad or part == "combine":  # which has no weights
            return nullcontext()
        return self.weight_gradients.collecting(key)

    # ---- the two sides ----

    def _begin_forward(self, step: Compute, received: Payload | None) -> tuple[Any, Any]:
        """Return the parts of a forward, and the loss function of the caller's forward step."""
        asked = _Asked(self.setup.chunks[step.chunk])
        if received is not None:
            asked.set_input_tensor(received[0])
        output, loss_func = self._forward_step(step, asked)
        if asked.parts is None or output is not asked.parts:
            raise ValueError(
                "merged pairs run the model part by part, after the forward step: it must call the model once and "
                "return (what the model returned, loss function), and may not read that output itself"
            )
        with self.setup.autocast():
            asked.parts.begin()
        return asked.parts, loss_func

    def _finish_forward(self, step: Compute, parts: Any, loss_func: Any) -> Payload:
        action = step.action
        with self.setup.autocast():
            output = parts.finish()
        key = (action.stage, action.microbatch)
        if action.stage == self.setup.num_stages - 1:
            output = self.losses.loss(action.microbatch, output, loss_func)
            self.saved[key] = ((parts.last_input,), (output,))
        self.parts[key] = parts
        return (output,)

    def _begin_backward(self, step: Compute, received: Payload | None) -> Any:
        """Return the parts of a backward. On the last stage the loss's own backward runs here."""
        key = (step.action.stage, step.action.microbatch)
        parts = self.parts.pop(key)
        if step.verb == "I":
            self.left_out[key] = [key] if received is None else []
        if received is None:
            as_i = replace(step, action=replace(step.action, kind="I")) if parts.ties else step
            received = self._backward(as_i, None)
        parts.begin_backward(received[0])
        return parts

    def _finish_backward(self, step: Compute, parts: Any) -> Payload:
        """Run what comes before the layers; return the gradient of the stage's input.

        Where the embedding is the output layer too, both gradients of the one weight are added as one.
        """
        key = (step.action.stage, step.action.microbatch)
        first, left_out = (*key, "first"), parts.ties or step.verb == "I"
        with self.weight_gradients.collecting(first) if left_out else nullcontext():
            gradient = parts.finish_backward()
        if parts.ties:
            self.weight_gradients.join(key, first)
            if step.verb == "B":
                self.weight_gradients.run(key)
        elif left_out:
            self.left_out[key].append(first)
        return (gradient,)


MergedStep.RUN = {
    **RankStep.RUN,
    **dict.fromkeys("FBIW", MergedStep._compute_in_parts),
    "merged": MergedStep._merged,
}
