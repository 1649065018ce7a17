"""Rows F7 and F19: every pair of layouts gives back what it got, and a cut run ends as one that was never cut.

`tests/parallel/test_checkpoint_resume.py` has the layouts, and the short form of both rows.
"""

import os
import random
import signal
from pathlib import Path

import pytest
from survival_runs import differing_files, train
from test_checkpoint_resume import CHAINS, DROPOUT, convert, differing

from labkit.launch import RankError, run
from labkit.train import pretrain

sweep = pytest.mark.sweep
SEED = 20_261_123
CUT, STEPS = 10, 20


def pairs(name: str, count: int) -> list[tuple[dict, dict]]:
    """Random ordered pairs of the layouts of a model; each layout is the first of one at least."""
    chance, layouts = random.Random(f"{SEED} {name}"), CHAINS[name][1]
    firsts = [layouts[i % len(layouts)] for i in range(count)]
    return [(first, chance.choice([other for other in layouts if other is not first])) for first in firsts]


@sweep
@pytest.mark.parametrize(("name", "count"), [("dense", 24), ("grouped heads, swiglu, padding", 8), ("experts", 14)])
def test_a_pair_of_layouts_gives_back_what_it_got(tally, tmp_path, name, count):
    counts, config = tally("F7", f"A to B and back, {name}"), CHAINS[name][0]
    for number, (a, b) in enumerate(pairs(name, count)):
        with counts.attempt(f"{a} to {b}"):
            at = [tmp_path / f"{number}-{place}" for place in "aba"]
            folders = [str(path) + str(i) for i, path in enumerate(at)]
            run(pretrain, 4, config.override({**a, "steps": 2, "checkpoint.dir": folders[0]}))
            there = config.override({**b, "checkpoint.dir": folders[1], "checkpoint.load": folders[0]})
            back = config.override({**a, "checkpoint.dir": folders[2], "checkpoint.load": folders[1]})
            run(convert, 4, [there, back])
            steps = [Path(folder) / "step_00000002" for folder in folders]
            assert differing(steps[0], steps[1], but=("rng.",)) == []
            assert differing(steps[0], steps[2], but=("rng.",)) == []


class KilledAfter:
    """An observer of `pretrain` that kills its rank after a step."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.steps, self.mine = rank, steps, False

    def on_model(self, groups, chunks, schedule) -> None:
        """Find out whether this is the rank."""
        self.mine = groups.world.rank == self.rank

    def on_gradients(self, step, chunks) -> None:
        """Nothing to do."""

    def on_update(self, step, chunks) -> None:
        """End at once."""
        if self.mine and step + 1 == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(config, rank: int, steps: int):
    """`pretrain`, in which the rank is killed after so many steps."""
    return train(config, observer=KilledAfter(rank, steps))


def layouts_of(name: str) -> list[dict]:
    """The layouts of a model, and 16-bit and fp8 forms of the first; of experts only the one in fp8."""
    first, *others = CHAINS[name][1]
    more = [{**first, "optim.precision": "fp16", "loss_scale_window": 4}, {**first, "optim.fp8": "hybrid"}]
    return [first, *others, *{"dense": more, "experts": more[1:]}.get(name, [])]


EVERY = [(name, number) for name in CHAINS for number in range(len(layouts_of(name)))]


@sweep
@pytest.mark.parametrize(("name", "number"), EVERY)
def test_twenty_steps_are_ten_and_ten_with_a_kill_between(tally, tmp_path, name, number):
    """Losses, parameters, moments, random states and the order of the data, 0 ulp apart."""
    layout = layouts_of(name)[number]
    counts = tally("F19", f"20 steps against 10 and 10, {name}")
    ring = {"attention_dropout": 0.0} if "cp" in layout else {}  # its kernels drop nothing
    dropout = DROPOUT | ring
    config = CHAINS[name][0].override(
        {**layout, **dropout, "steps": STEPS, "decay_steps": STEPS, "interval": CUT, "keep": 9, "record_events": False}
        | {"checkpoint.dir": "later"}
    )
    straight, cut = (config.override({"checkpoint.dir": str(tmp_path / folder)}) for folder in ("straight", "cut"))
    with counts.attempt(f"{layout}"):
        whole = run(train, 4, straight)
        with pytest.raises(RankError, match="SIGKILL"):
            run(killed, 4, cut, number % 4, CUT + 3)
        after = run(pretrain, 4, cut)
        assert [result.resumed_after for result in after] == [CUT] * 4
        assert [result.losses for result in after] == [whole[0].losses[CUT:]] * 4
        for step in (CUT, STEPS):
            folder = f"step_{step:08d}"
            assert differing_files(tmp_path / "straight" / folder, tmp_path / "cut" / folder) == []
