"""Exercises and bets of chapter 14: scores that cheat a balancing loss, a bias that follows the load, choice by groups.

An answer is judged by what it does: the loss that its scores have, the load that its bias leads to, the experts that it
chooses. Known misunderstandings are told apart by probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.check.bets import ask
from labkit.check.scoring import ONLY_FIRST, Finding, Misreadings, Outcome, asked, exercise, holds, plain

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

# ---- bets ----

ask(
    "14.cheat",
    "The balancing loss has fallen from 4 to less than a tenth of that, and the load is still far from even. "
    "How did the router do it?",
    choices={
        "the counts are small": "The counts add up to k T in every step, whatever the router does.",
        "full experts have small scores": "Then a token's scores would still add up to about as much as before, "
        "and only be somewhere else. Here they add up to nearly nothing.",
        "all scores are small": "Nothing asks a token's scores to add up to anything. Lowering all of its logits "
        "together changes neither the order of the experts nor that the weights are shares.",
    },
)
ask(
    "14.future",
    "256 characters of a text are routed together. Then they are routed again with another second half. How many of "
    "the 128 tokens of the first half get another expert, by Sinkhorn's table?",
    choices={
        "none": "By top-k that would be so, because a token then looks at its own scores only. Here each column is "
        "divided by its sum, and later tokens are part of every sum.",
        "some": "Each column is divided by its sum, and later tokens are part of every sum. A token whose second and "
        "third expert are nearly equal changes, wherever it is in the text.",
        "more than half": "The other half changes the sums of the columns by little, because it is English, too. Only "
        "tokens whose second and third expert are nearly equal follow.",
    },
)
ask(
    "14.price",
    "The repaired loss keeps the load nearly even. How does the language model's loss on unseen text compare with that "
    "of a router which nobody balances?",
    choices={
        "higher by more than 0.2 %": "It is a second aim, and a second aim usually costs something. With a large "
        "coefficient it can. Here experts that would have learned little get tokens to learn from.",
        "the same within 0.2 %": "Then more experts at work would be worth nothing, or just what the second aim costs.",
        "lower by more than 0.2 %": "Left alone, the router feeds a few experts. An even load puts all of them to use, "
        "and here that is worth more than the second aim costs. What experts are worth is measured below.",
    },
)
ask(
    "14.step",
    "Mixtral 8x7B on 64 H100s has one expert on each of 8 ranks. The fullest rank gets twice the mean. By how many "
    "percent does the planner expect the step to get longer?",
    misread=lambda: {
        "That doubles everything. Attention and the output layer don't wait for the router.": 100,
        "Products of experts are most of the step, not a small part.": 10,
        "The mean over the ranks hasn't changed, but the ranks wait for each other in every layer.": 0.0,
    },
    unit="%",
    because="In this model the experts' products are most of the work, and in every layer all ranks wait for the "
    "fullest one. Attention, norms and the pipeline's bubble don't get longer with it.",
)

# ---- scores that cheat ----

_SIZES = ((64, 8), (60, 4), (96, 16))
"""(tokens, experts)."""
_UNEVEN = 1.5
"""How many times the mean the fullest expert has at least."""
_AIM = 0.5
"""Of the loss with the first sizes; 0.4 is as low as it can get there, with 4 or 5 experts in use."""


def _cheated(logits: Any, tokens: int, experts: int) -> tuple[float, Tensor]:
    """Return the loss of these logits by a softmax and its largest entry, and the tokens of each expert.

    Raises ValueError for logits of another form, and for a token without one largest logit.
    """
    found = torch.as_tensor(plain(logits), dtype=torch.float64)
    if found.shape != (tokens, experts):
        raise ValueError(f"{list(found.shape)} logits; {tokens} tokens and {experts} experts need {[tokens, experts]}")
    if not found.isfinite().all():
        raise ValueError("a logit is infinite or no number; a router's product is finite")
    best = found.topk(2).values
    if (best[:, 0] - best[:, 1] < 1e-6).any():
        number = int((best[:, 0] - best[:, 1]).argmin())
        raise ValueError(f"token {number} has two largest logits; it needs one favourite, if only by a hair")
    scores, load = found.softmax(1), found.argmax(1).bincount(minlength=experts)
    return float(experts / tokens**2 * (scores.sum(0) * load).sum()), load


@exercise("14.cheat", "Write cheat(tokens, experts) -> logits of an uneven load whose balancing loss is less than 1.")
def cheat(answer: Any) -> Iterator[Outcome]:
    """Judge three sizes, and with the first of them an aim."""
    for tokens, experts in _SIZES:
        given = f"{tokens} tokens and {experts} experts"
        claim = f"a fullest expert with at least {_UNEVEN} times the mean, and a loss of less than 1"
        yield holds(given, claim, lambda t=tokens, e=experts: _cheats(answer(t, e), t, e, 1.0))
    tokens, experts = _SIZES[0]
    yield holds(
        f"{tokens} tokens and {experts} experts, the aim",
        f"a loss of at most {_AIM}",
        lambda: _cheats(answer(tokens, experts), tokens, experts, _AIM),
    )


def _cheats(logits: Any, tokens: int, experts: int, below: float) -> Finding:
    loss, load = _cheated(logits, tokens, experts)
    fullest = float(load.max()) * experts / tokens
    found = torch.as_tensor(plain(logits), dtype=torch.float64)
    if fullest < _UNEVEN:
        why = "the load is nearly even, so there is nothing to hide; leave some experts empty"
        return why, f"the fullest expert has {fullest:.2f} times the mean: {why}"
    if loss < below - 1e-9 or (below < 1 and loss <= below + 1e-6):
        return True
    said, scores = f"a loss of {loss:.3f} with a fullest expert of {fullest:.2f} times the mean", found.softmax(1)
    if loss < 0.98:
        why = "share the tokens out over several experts, and give every empty one as much of each score as you can"
    elif found.max() < -5:
        why = "a softmax doesn't see what all logits have in common; lowering all of them changes nothing here"
    elif (load > 0).sum() == 1 and loss < 1.01:
        why = "with flat scores and one expert for all, the loss is that of an even load; use more than one expert"
    elif scores.amax(1).mean() > 2 / experts:
        why = "the favourites have most of the score, so what is full is what is punished; let them win by a hair"
    else:
        why = "full experts still have as much of the score as empty ones; a token's favourite must have the most, but "
        why += "the other full ones needn't have anything"
    return why, f"{said}: {why}"


# ---- a bias that follows the load ----

_TOKENS, _EXPERTS, _TOP_K, _BATCHES, _SKIPPED = 256, 8, 2, 60, 10
_AIMS = {"a steady favour": 1.22, "a favour that moves": 1.32, "no favour": 1.22}
"""Largest mean of fullest over mean, after the first ten microbatches."""
Rule = Callable[[Tensor, Tensor], Tensor]


@cache
def recording(name: str) -> Tensor:
    """Return artificial logits [microbatch, token, expert], in which all tokens favour some experts, or none."""
    numbers = torch.Generator().manual_seed(1 + list(_AIMS).index(name))
    own = torch.randn(_BATCHES, _TOKENS, _EXPERTS, generator=numbers)
    first, last = torch.randn(2, _EXPERTS, generator=numbers)
    time = torch.arange(_BATCHES)[:, None] / _BATCHES
    favour = {"a steady favour": first.expand(_BATCHES, -1), "no favour": torch.zeros(_BATCHES, _EXPERTS)}
    return own + favour.get(name, (1 - time) * first + time * last)[:, None]


def loads_under(rule: Rule, name: str) -> Tensor:
    """Return the tokens of each expert by microbatch of a recording, when `rule` moves the bias after each of them.

    Raises ValueError for a bias of another form.
    """
    bias, loads = torch.zeros(_EXPERTS), []
    for logits in recording(name):
        scores = logits.sigmoid() + bias
        loads.append(torch.zeros_like(scores).scatter(1, scores.topk(_TOP_K).indices, 1.0).sum(0))
        bias = torch.as_tensor(rule(bias.clone(), loads[-1].clone()), dtype=torch.float32)
        if bias.shape != (_EXPERTS,):
            raise ValueError(f"the new bias has the shape {list(bias.shape)}; it is one number for each expert")
    return torch.stack(loads)


def papers_rule(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """Return the bias after a step of fixed size against the load (arXiv 2408.15664, algorithm 1)."""
    return bias + rate * (load.mean() - load).sign()


def draw_bias(answer: Any) -> Figure | None:
    """Draw the load under the answer, next to that of the paper's rule with its own rate and with a rate that fits."""
    from labkit.viz.experts.expert_load import load_over_training  # matplotlib, which a score does without

    name = "a favour that moves"
    rules = {
        "paper, rate 0.001": papers_rule,
        "paper, rate 0.03": lambda bias, load: papers_rule(bias, load, 0.03),
        "yours": answer,
    }
    return load_over_training({words: loads_under(rule, name).numpy() for words, rule in rules.items()})


@exercise("14.bias", "Write next_bias(bias, load) -> the bias for the next microbatch, from the load.", draw=draw_bias)
def bias(answer: Any) -> Iterator[Outcome]:
    """Probe direction, memory and scale, then judge three recordings by their aims."""
    probes = [
        holds("bias 0 and a full expert 2", "a bias of expert 2 that is the smallest", lambda: _direction(answer)),
        holds("a bias and an even load", "a bias whose differences stay", lambda: _memory(answer)),
        holds("the same load with ten times the tokens", "the same new bias", lambda: _scale(answer)),
    ]
    yield from probes
    reason = "" if all(outcome.passed for outcome in probes) else ONLY_FIRST
    for name, aim in _AIMS.items():
        claim = f"at most {aim} times the mean, on average over {_BATCHES - _SKIPPED} microbatches"
        outcome = holds(f"a recording with {name}, the fullest expert", claim, lambda n=name: _balances(answer, n))
        yield replace(outcome, reason=reason or outcome.reason)


def _given(answer: Any, bias: list[float], load: list[float]) -> Tensor:
    return torch.as_tensor(answer(torch.tensor(bias), torch.tensor(load)), dtype=torch.float64)


_EVEN = [64.0] * 8
_FULL = [50.0, 50.0, 190.0, 40.0, 52.0, 45.0, 45.0, 40.0]


def _direction(answer: Any) -> Finding:
    found = _given(answer, [0.0] * 8, _FULL)
    if found[2] < found[3]:
        return True
    if found[2] == found[3]:
        return "the biases of a full and of an empty expert stay equal"
    return (
        "expert 2 gets a larger bias than an empty one: a bias is added to the scores, so it has to fall for a full one"
    )


def _memory(answer: Any) -> Finding:
    before = torch.tensor([0.0, 0.1, -0.2, 0.3, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = _given(answer, before.tolist(), _EVEN)
    moved = (found - found.mean()) - (before - before.mean())
    if moved.abs().max() < 0.05:
        return True
    why = "an even load says that the bias is right as it is; a rule that forgets it will have the old load back"
    return why, f"{[round(float(value), 2) for value in found]} from {before.tolist()}: {why}"


def _scale(answer: Any) -> Finding:
    few, many = (_given(answer, [0.0] * 8, [factor * n for n in _FULL]) for factor in (1.0, 10.0))
    if torch.allclose(few, many, rtol=1e-3, atol=1e-6):
        return True
    why = "a larger batch moves the bias further, though its load is as uneven; divide by the mean load"
    return why, f"{float(few[2]):.3g} and {float(many[2]):.3g} for expert 2: {why}"


def _balances(answer: Any, name: str) -> Finding:
    loads = loads_under(answer, name)
    ratio = loads.amax(1) / loads.mean(1)
    mean = float(ratio[_SKIPPED:].mean())
    if mean <= _AIMS[name]:
        return True
    favourite = loads.argmax(1)[_SKIPPED:]
    flips = float((favourite[1:] != favourite[:-1]).double().mean())
    alone = loads_under(lambda bias, _: bias, name)
    untouched = float((alone.amax(1) / alone.mean(1))[_SKIPPED:].mean())
    if mean > untouched + 0.05 or (flips > 0.9 and mean > 1.4):
        why = "the bias overshoots: an expert is full in one microbatch and empty in the next; take smaller steps"
    elif float(ratio[_SKIPPED : _SKIPPED + 15].mean()) > 1.1 * float(ratio[-15:].mean()) or flips < 0.6:
        why = "the bias is too slow: it gets there after many microbatches, or never catches up; take larger steps"
    else:
        why = "the load zigzags around an even one: take small steps near it, and large ones far from it"
    return why, f"{mean:.2f}: {why}"


# ---- choice by groups ----

_CHOICES = ((6, 8, 2, 4, 1), (6, 8, 2, 4, 2), (6, 12, 4, 3, 2), (5, 8, 2, 2, 2))
"""(tokens, experts, k, groups, groups that a token may use)."""


@cache
def _scores(tokens: int, experts: int, biased: bool) -> Tensor:
    numbers = torch.Generator().manual_seed(tokens * experts)
    scores = torch.rand(tokens, experts, generator=numbers, dtype=torch.float64)
    return scores - 0.9 if biased else scores  # a bias can make scores negative


def _by_groups(
    scores: Tensor,
    k: int,
    groups: int,
    keep: int,
    *,
    worth: str = "best",
    hidden: float = -torch.inf,
    each: bool = False,
    dealt: bool = False,
) -> list[list[int]]:
    """Return the experts of each token, right or with a misunderstanding."""
    if dealt:  # expert e in group e % groups
        order = torch.arange(scores.shape[1]).view(-1, groups).T.flatten()
        found = _by_groups(scores[:, order], k, groups, keep)
        return [sorted(int(order[expert]) for expert in row) for row in found]
    by_group = scores.view(len(scores), groups, -1)
    top = by_group.topk(k // keep).values
    of_group = {"best": top.sum(-1), "single": by_group.amax(-1), "all": by_group.sum(-1)}[worth]
    allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, of_group.topk(keep).indices, True)
    if each:
        share = torch.zeros_like(by_group, dtype=torch.bool).scatter(2, by_group.topk(k // keep).indices, True)
        chosen = (share & allowed[..., None]).flatten(1)
        return [row.nonzero().flatten().tolist() for row in chosen]
    limited = by_group.masked_fill(~allowed[..., None], hidden).flatten(1)
    return [sorted(row) for row in limited.topk(k).indices.tolist()]


def _chosen_by(answer: Any, scores: Tensor, k: int, groups: int, keep: int) -> list[list[int]]:
    found = torch.as_tensor(answer(scores.clone(), k, groups, keep))
    if found.shape != scores.shape:
        raise ValueError("the result has not the shape of scores: rows are tokens, columns are experts")
    return [row.nonzero().flatten().tolist() for row in found]


def _misread_groups(tokens: int, experts: int, k: int, groups: int, keep: int, biased: bool) -> Misreadings:
    scores = _scores(tokens, experts, biased)
    of = (scores, k, groups, keep)
    return {
        "these are the best k of all experts; a token may use those of its best groups only": (
            [sorted(row) for row in scores.topk(k).indices.tolist()]
        ),
        "closed groups score 0 here, and 0 is more than a negative score; use minus infinity": _by_groups(
            *of, hidden=0.0
        ),
        "a group counts by its best expert; a token takes k / keep of it, so these count": (
            _by_groups(*of, worth="single")
        ),
        "a group counts by the sum of all its experts; only the best k / keep of them matter": (
            _by_groups(*of, worth="all")
        ),
        "each group gives k / keep experts; the best k of all allowed experts are taken": _by_groups(*of, each=True),
        "groups are dealt out one by one; here neighbours are a group": _by_groups(*of, dealt=True),
    }


@exercise("14.groups", "Write group_limited(scores, k, groups, keep) -> the choice, a map [tokens, experts] of bool.")
def groups(answer: Any) -> Iterator[Outcome]:
    """Judge four sizes with scores that are positive, and the same with negative ones."""
    cases = [(*sizes, biased) for biased in (False, True) for sizes in _CHOICES]
    outcomes = asked(
        cases,
        given=lambda t, e, k, g, keep, biased: (
            f"{t} tokens, {e} experts in {g} groups, k {k}, keep {keep}{', some scores negative' if biased else ''}"
        ),
        right=lambda t, e, k, g, keep, biased: _by_groups(_scores(t, e, biased), k, g, keep),
        tried=lambda t, e, k, g, keep, biased: _chosen_by(answer, _scores(t, e, biased), k, g, keep),
        misread=_misread_groups,
    )
    for outcome in outcomes:
        yield replace(outcome, expected="the experts of each token " + outcome.expected)
