"""The reference of presets: the sizes of each, counted by `labkit.plan`."""

from __future__ import annotations

from labkit.config import RunConfig, presets
from labkit.plan import active_parameters, all_layers, model_parameters
from site_pages.tables import table

_HEAD = """\
# Presets

`labkit train --preset NAME` starts from one of these configurations, and so do `labkit parity` and
`labkit.config.presets.get`. `labkit train --preset NAME --print-config` prints every field of it. `tokens` is the
length of a sequence. The presets `table1_` to `figure7_` are the models of Megatron-LM's paper
([arXiv 1909.08053](https://arxiv.org/abs/1909.08053)).
"""


def presets_page() -> str:
    """Return the page: one row for each preset."""
    head = ("preset", "family", "layers", "hidden", "heads", "tokens", "parameters in millions", "experts")
    return f"{_HEAD}\n{table(head, (_row(name, presets.get(name)) for name in presets.names()))}"


def _row(name: str, config: RunConfig) -> tuple[str, ...]:
    model, moe = config.model, config.moe
    layers = f"{model.layers} + {model.layers}" if all_layers(model) == 2 * model.layers else str(model.layers)
    sizes = (f"{size:,}" for size in (model.hidden, model.heads, model.seq_length))
    parameters = _millions(model_parameters(model, moe))
    experts = f"{moe.num_experts}; a token uses {_millions(active_parameters(model, moe))}" if moe.num_experts else ""
    return f"`{name}`", model.family, layers, *sizes, parameters, experts


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}" if count >= 10**6 else f"{count / 1e6:.2f}"
