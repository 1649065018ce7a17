"""Wrong answers to the exercises of chapter 14, with what each believes and words of its score."""

import pytest
import torch

from labkit.check import chapter_14, score
from labkit.moe.balance import switch_load_balancing_loss_func, updated_expert_bias
from labkit.moe.routing import choose

# ---- 14.cheat ----


def logits(used, *, empty=0.0, lead=1e-4, others=-20.0, shift=0.0):
    """`used` experts share the tokens; logits of the favourite, of other used experts, and of empty ones."""

    def answer(tokens, experts):
        found, token = torch.full((tokens, experts), others), torch.arange(tokens)
        found[:, used(experts) :] = empty
        found[token, token % used(experts)] = empty + lead
        return found + shift

    return answer


CHEATS = {
    # Lets every token choose with confidence, so that scores follow the load.
    "confident": (logits(lambda experts: 1, lead=5.0), "let them win by a hair"),
    # One expert for all and equal scores: the loss is that of an even load, and no less.
    "flat": (logits(lambda experts: 1), "use more than one expert"),
    # Believes that low logits make a low loss, as they do with raw sigmoids.
    "shifted": (
        logits(lambda experts: 1, lead=5.0, shift=-60.0),
        "what all logits have in common",
    ),
    "even": (logits(lambda experts: experts, others=0.0), "the load is nearly even"),
    "tied": (lambda tokens, experts: torch.zeros(tokens, experts), "two largest logits"),
    "infinite": (logits(lambda experts: experts // 2, others=-torch.inf), "a router's product is finite"),
    "form": (lambda tokens, experts: torch.zeros(experts, tokens), "64 tokens and 8 experts need [64, 8]"),
    # Leaves as much of the score to the other full experts as to the empty ones.
    "spread": (logits(lambda experts: experts // 2, others=-1e-3), "the other full ones needn't have anything"),
    # Passes all sizes, but with seven of eight experts in use misses the aim.
    "few empty": (logits(lambda experts: max(2, experts // 4)), "share the tokens out over several experts"),
}

# ---- 14.bias ----


def step(size, load):
    return size * (load / load.mean() - 1)


BIASES = {
    # Adds to a full expert's bias, as if it were a reward.
    "wrong way": (lambda bias, load: bias + step(0.05, load), "has to fall"),
    "nothing": (lambda bias, load: bias, "of a full and of an empty expert stay equal"),
    # Takes the bias anew from each load, so that an even load brings the old one back.
    "forgets": (lambda bias, load: -step(0.05, load), "a rule that forgets it"),
    "counts": (lambda bias, load: bias - 1e-3 * (load - load.mean()), "divide by the mean load"),
    "slow": (lambda bias, load: updated_expert_bias(load, bias, 1e-3), "the bias is too slow"),
    "large": (lambda bias, load: bias - step(1.0, load), "the bias overshoots"),
    "fixed": (lambda bias, load: updated_expert_bias(load, bias, 0.05), "small steps near it"),
    "form": (lambda bias, load: bias.mean(), "got IndexError"),
}

# ---- 14.groups ----


def grouped(**misread):
    def answer(scores, k, groups, keep):
        found = torch.zeros_like(scores, dtype=torch.bool)
        for row, chosen in enumerate(chapter_14._by_groups(scores, k, groups, keep, **misread)):
            found[row, chosen] = True
        return found

    return answer


def plain_top(scores, k, groups, keep):
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k).indices, True)


GROUPS = {
    "all": (plain_top, "a token may use those of its best groups only"),
    # Hides the other groups with 0, which beats a negative score.
    "zero": (grouped(hidden=0.0), "0 is more than a negative score"),
    "single": (grouped(worth="single"), "a group counts by its best expert"),
    "sum": (grouped(worth="all"), "by the sum of all its experts"),
    "each": (grouped(each=True), "each group gives k / keep experts"),
    "dealt": (grouped(dealt=True), "groups are dealt out one by one"),
    "form": (lambda scores, k, groups, keep: scores.topk(k).indices, "rows are tokens, columns are experts"),
}

TABLES = {"14.cheat": CHEATS, "14.bias": BIASES, "14.groups": GROUPS}
RIGHT = {
    "14.cheat": logits(lambda experts: experts // 2, lead=1e-2, others=-9.0, shift=3.0),
    "14.bias": lambda bias, load: bias - 0.05 * (load / load.mean()).clamp(min=0.05).log(),
    "14.groups": lambda scores, k, groups, keep: (
        choose(scores.logit(), k, score_function="sigmoid", num_groups=groups, group_topk=keep)
        if (scores > 0).all()
        else grouped()(scores, k, groups, keep)
    ),
}


def test_the_lowest_loss_is_the_one_that_the_chapter_names():
    """E / (r (1 + E - r)) with r of 8 experts in use, by labkit's own loss."""
    for used in range(1, 8):
        found = logits(lambda experts, r=used: r, lead=1e-9)(840, 8).double()
        load, scores = found.argmax(1).bincount(minlength=8), found.softmax(1)
        loss = switch_load_balancing_loss_func(scores, load, 840, top_k=1, num_experts=8, coefficient=1.0)
        assert float(loss) == pytest.approx(8 / (used * (9 - used)), abs=1e-4)


@pytest.mark.parametrize("rate", [3e-4, 1e-3, 3e-3, 1e-2, 1.5e-2, 2e-2, 2.5e-2, 3e-2, 5e-2, 0.1])
def test_no_step_of_a_fixed_size_meets_all_three_aims(rate):
    found = score("14.bias", lambda bias, load: updated_expert_bias(load, bias, rate))
    assert not found.ok and all(outcome.passed for outcome in found.outcomes[:3])


def test_the_drawing_has_the_answer_beside_the_papers_rule():
    figure = chapter_14.draw_bias(lambda bias, load: bias - step(0.05, load))
    assert figure is not None and "paper, rate 0.001" in figure.sentence and "yours" in figure.sentence
