"""Solutions of chapter 14, The MoE layer."""

import torch

from labkit.check.solution_source import solves


@solves("14.cheat")
def cheat(tokens, experts):
    """Half of the experts share the tokens; a token's score is on its own expert, and
    as much on each of the empty ones."""
    used = experts // 2
    logits = torch.full((tokens, experts), -20.0)
    logits[:, used:] = 0.0  # nobody goes there
    token = torch.arange(tokens)
    logits[token, token % used] = 1e-4  # the favourite wins by a hair
    return logits


@solves("14.bias")
def next_bias(bias, load):
    """A step in proportion to what is too much: large when the load is far from even,
    small near it."""
    return bias - 0.05 * (load / load.mean() - 1)


@solves("14.groups")
def group_limited(scores, k, groups, keep):
    """Best groups by their best k / keep experts; then the best k of what is left."""
    by_group = scores.view(len(scores), groups, -1)  # [tokens, groups, experts]
    worth = by_group.topk(k // keep).values.sum(-1)
    closed = torch.ones_like(worth).scatter(1, worth.topk(keep).indices, 0.0).bool()
    limited = by_group.masked_fill(closed[..., None], -torch.inf).flatten(1)
    nothing = torch.zeros_like(limited, dtype=torch.bool)
    return nothing.scatter(1, limited.topk(k).indices, True)
