"""Wrong answers to the exercises of chapter 25, with what each believes and words of its score."""

from itertools import combinations

import pytest

from labkit.check.chapter_25 import AWAITS, BACKWARD, FORWARD, MESSAGE, SPLIT, STARTS, TIMES, bars, illegal, length
from labkit.schedules import LayerTimes
from labkit.schedules.merging import MOE_PARTS, PartRun, pair_lanes, pair_order

# ---- 25.when ----


def clock(*, blocks=False, own_lane=True, waits="own", early=False, to_the_end=False):
    """An answer that keeps two lanes, or what it believes instead."""

    def answer(order, times, message):
        now = free = 0
        arrives = {}
        for part in order:
            if part in AWAITS and waits == "own":
                now = max(now, arrives[AWAITS[part]])
            elif part in AWAITS and waits == "all":
                now = max(now, free)
            leaves = now if early else now + times[part]
            now += times[part]
            if part in STARTS:
                free = (max(leaves, free) if own_lane else leaves) + message
                arrives[STARTS[part]] = free
                now = max(now, free) if blocks else now
        return max(now, free) if to_the_end else now

    return answer


WHEN = {
    "blocks": (clock(blocks=True), "everything is on one lane"),
    # Thinks of a network on which all messages travel at once.
    "no lane": (clock(own_lane=False), "they share one lane"),
    "no waits": (clock(waits="none"), "nobody waits for a message"),
    # Has one variable for the last message, whoever sent it.
    "all sides": (clock(waits="all"), "waits for the other side's messages as well"),
    "early": (clock(early=True), "leaves when its part starts"),
}

# ---- 25.order and 25.weights ----


def repeated(text, last=""):
    return lambda layers: text.split() * layers + last.split()


ORDER = {
    "side by side, whole": (repeated("a e c c' e' a'"), "26 units; the longest wait is 3 units before e, for dispatch"),
    # Lets the forward begin, as in the table of the pipeline.
    "forward first": (repeated("a c' e e' c a'"), "19 units; the longest wait is 2 units before e,"),
    "labkit's": (repeated("c' a e' e a' c"), "32 units; the longest wait is 1 unit before e'"),
    # Takes the backward for a forward with primes.
    "backward runs forwards": (repeated("a' a e' e c' c"), "a' comes where c' has to"),
    "forgot one": (repeated("c' a e' e a'"), "c is there 0 times; each part has to run once"),
    "messages as parts": (repeated("c' a dispatch e' e a' c"), "'dispatch' is no part"),
}
WEIGHTS = {
    "last": (repeated("c' a e' e a' c We Wa"), "18 units"),
    # Forgets that c is on this lane here.
    "as in Megatron's source": (repeated("c' a e' We e a' c Wa"), "16 units; the longest wait is 1 unit before e'"),
    # Takes We for the part that makes the experts' gradients.
    "before its part": (repeated("c' a We e' e a' Wa c"), "We comes before its e'"),
    "left out": (repeated("c' a e' e a' c"), "We is there 0 times"),
    "labkit's": (repeated("c' a e' We e a' Wa c"), "30 units; the longest wait is 1 unit before"),
}

# ---- 25.warmup ----

WARMUP = {
    "1F1B's": (lambda rank, pp: pp - 1 - rank, "that's 1F1B's"),
    # Gives each rank the one that the last rank lacks.
    "one more": (lambda rank, pp: pp - rank, "a rank waits between its pairs"),
    "twice": (lambda rank, pp: 2 * (pp - 1 - rank), "rank 1 waits for an action of its own"),
    "one too many": (lambda rank, pp: 2 * (pp - rank), "fewer are enough"),
    "turned round": (lambda rank, pp: rank, "later ranks warm up longer"),
    "same for all": (lambda rank, pp: 2 * pp - 1, "wait for each other"),
    "too many for the batch": (lambda rank, pp: 100, "cannot begin with 100"),
}

TABLES = {"25.when": WHEN, "25.order": ORDER, "25.weights": WEIGHTS, "25.warmup": WARMUP}


def best_order(layers):
    return ["c'", "a", "e'", "e", "a'", *["c'", "c", "a", "e'", "e", "a'"] * (layers - 1), "c"]


def best_with_weights(layers):
    whole = [each for part in best_order(layers) for each in ([part, "We"] if part == "e'" else [part])]
    return [*whole[:-1], *["Wa"] * layers, "c"]


RIGHT = {
    "25.when": clock(),
    "25.order": best_order,
    "25.weights": best_with_weights,
    "25.warmup": lambda rank, pp: 2 * (pp - rank) - 1,
}

# ---- the clock itself ----

_WORDS = {"F": dict(zip(MOE_PARTS, FORWARD, strict=True)), "B": dict(zip(reversed(MOE_PARTS), BACKWARD, strict=True))}
_LAYER = LayerTimes(
    forward={"attention": 2, "experts": 2, "combine": 1},
    backward={"attention": 2, "experts": 2, "combine": 1},
    weight={"attention": 2, "experts": 2, "combine": 0},
    dispatch=MESSAGE,
    combine=MESSAGE,
)


def words(runs: list[PartRun]) -> list[str]:
    return [f"W{run.part[0]}" if run.side == "W" else _WORDS[run.side][run.part] for run in runs]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("delay", [False, True])
def test_the_clock_is_that_of_the_simulator(layers: int, delay: bool) -> None:
    stage = [_LAYER] * layers
    order = words(pair_order([MOE_PARTS] * layers, [MOE_PARTS] * layers, delay_wgrad=delay))
    mine = bars(order, SPLIT if delay else TIMES, MESSAGE, 1.0)
    lanes = pair_lanes(stage, stage, delay_wgrad=delay)
    assert [(event.start, event.end) for event in mine] == [(lane.start, lane.end) for lane in lanes]
    assert not illegal(order, layers, weights=delay)


@pytest.mark.parametrize(("layers", "best", "by_labkit"), [(1, 16, 16), (2, 31, 32)])
def test_the_targets_are_the_best_of_all_orders(layers: int, best: float, by_labkit: float) -> None:
    """Every mixture of both sides, of which only one is the best."""
    taken = []
    for places in combinations(range(6 * layers), 3 * layers):
        sides = {True: iter(FORWARD * layers), False: iter(BACKWARD * layers)}
        taken.append(length([next(sides[place in places]) for place in range(6 * layers)], TIMES, MESSAGE))
    assert min(taken) == best == length(best_order(layers), TIMES, MESSAGE) and taken.count(best) == 1
    assert length(words(pair_order([MOE_PARTS] * layers, [MOE_PARTS] * layers)), TIMES, MESSAGE) == by_labkit
    apart = words(pair_order([MOE_PARTS] * layers, [MOE_PARTS] * layers, delay_wgrad=True))
    assert length(apart, SPLIT, MESSAGE) == 15 * layers


def test_15_is_the_best_with_weight_gradients_apart() -> None:
    def orders(left: dict[str, int], made: tuple[str, ...]):
        chains = (FORWARD, BACKWARD)
        ready = [chain[left[chain[0]]] for chain in chains if left[chain[0]] < 3]
        ready += [w for w, part in (("We", "e'"), ("Wa", "a'")) if part in made and w not in made]
        if not ready:
            yield made
        for part in ready:
            first = next((chain[0] for chain in chains if part in chain), "")
            yield from orders({**left, **({first: left[first] + 1} if first else {})}, (*made, part))

    assert min(length(order, SPLIT, MESSAGE) for order in orders({"a": 0, "c'": 0}, ())) == 15


@pytest.mark.parametrize(("apart", "units"), [(False, [15, 30]), (True, [14, 28])])
def test_megatrons_order_with_c_on_the_lane_of_messages_takes_what_the_chapter_says(apart, units) -> None:
    """`TransformerLayerSchedulePlan.run` and its two streams, launch by launch."""
    heavy, after = (2, 2) if apart else (4, 0)
    found = []
    for layers in (1, 2):
        computes = sends = ahead = back = 0  # both lanes, and what each side has got to
        for _ in range(layers):
            sends = max(sends, back) + 1 + MESSAGE  # c', combine'
            arrived = sends
            computes = made = max(computes, ahead) + 2  # a
            computes = left = max(computes, arrived) + heavy  # e'
            sends = dispatched = max(sends, made) + MESSAGE
            computes += after  # We
            sends = returned = max(sends, left) + MESSAGE  # dispatch'
            computes = max(computes, dispatched) + 2  # e
            sends = ahead = max(sends, computes) + MESSAGE + 1  # combine, c
            computes = back = max(computes, returned) + heavy  # a'
            computes += after  # Wa
        found.append(max(computes, sends))
    assert found == units
