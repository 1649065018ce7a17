"""Full states from the tensors of Hugging Face's checkpoints, and back.

    read = json.loads(Path("config.json").read_text())
    config, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
    full = full_state_from_hugging_face(config, safetensors.torch.load_file("model.safetensors"), moe)
    theirs = full_state_to_hugging_face(config, full, moe)

The formats differ:

- labkit stores linear weights as [output, input], with [q .. q k v] for each key/value head, [gate; up] as one matrix,
  and experts stacked.
- GPT-2 stores linear weights as [input, output], and q, k, v as three blocks.
- Llama stores q, k, v, gate and up apart. Mixtral stores each expert apart: w1 is its gate, w3 its up, w2 its down.
- BERT stores q, k and v apart, each with its bias (`bert/hugging_face_bert.py`).
- Mamba-2 stores the rows of a projection kind after kind (`mamba/hugging_face_mamba.py`).
- T5 stores q, k, v and gate, up apart, also of its cross-attention (`t5/hugging_face_t5.py`).
- transformers 5 stacks Mixtral's experts in memory, as [gate; up]. This module reads both forms; files hold the first.

All rotate features i and i + D/2.

Shapes: H hidden, D head dimension, g key/value heads, r query heads per key/value head, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.config import ModelConfig, MoEConfig
from labkit.models.bert.hugging_face_bert import BIAS, DECODER, bert_names
from labkit.models.full_shapes import full_shapes, shape_fields
from labkit.models.hugging_face_config import family_of
from labkit.models.mamba.hugging_face_mamba import mamba_names
from labkit.models.t5.hugging_face_t5 import UNUSED, WORDS, t5_names

State = dict[str, Tensor]

GPT2_PARTS = {
    "attention.norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
"""Our part of a layer -> GPT-2's."""


class HuggingFaceState(Mapping[str, Tensor]):
    """The whole model's tensors under our names, each made from theirs when somebody asks for it.

    So a state that reads its tensors from a file is converted one tensor after the other.
    """

    IGNORED = (".attn.bias", ".attn.masked_bias", ".embeddings.position_ids")
    """Suffixes of the names of tensors that follow from the configuration."""
    RATES = ".rotary_emb.inv_freq"
    """Suffix of another one, which old files of Llama have; its values must be those of the `rope_theta`."""

    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor], moe: MoEConfig | None = None) -> None:
        """state: of `GPT2LMHeadModel`, `LlamaForCausalLM`, `BertForPreTraining` or `T5ForConditionalGeneration`; with
            experts in `moe`, of `MixtralForCausalLM`.

        Raises:
            ValueError: a model of another family; tensors that are missing or have no place in our model, by name; two
                tensors for one of our model that differ. Asked for a tensor: a shape that does not fit the model.
        """
        self._state, self._config, self._moe = state, config, moe
        self._names: dict[str, str] = {}
        for name in state:
            if name.endswith(self.RATES):
                _check_rates(config, name, state[name])
            elif not name.endswith(self.IGNORED):
                self._check_same(self._names.setdefault(_short(name), name), name)
        self._recipes: dict[str, _Recipe] = {}
        unused = dict(self._names)
        for recipe in _recipes(config, moe, self._names):
            parts = tuple(map(_short, recipe.theirs))
            for part in parts:
                if part not in self._names:
                    some = ", ".join(list(self._names)[:3])
                    raise ValueError(
                        f"the checkpoint has no tensor {part!r}; it holds {len(self._names)}, such as {some}"
                    )
                unused.pop(part, None)
            self._recipes[recipe.ours] = recipe._replace(theirs=parts)
        for name, original in self._copies():
            if (copy := unused.pop(name, None)) and original:
                self._check_same(self._names[original], copy)
        if unused:
            first = ", ".join(list(unused)[:5])
            raise ValueError(f"no place for the tensors {first}; check that the model config is the right one")

    def _copies(self) -> Iterator[tuple[str, str | None]]:
        """Yield (short name of a copy, short name of its original), with None for tensors that nothing reads."""
        (word,) = self._recipes["embedding.word.weight"].theirs
        family, tied = self._config.family, not self._config.untie_embeddings_and_output_weights
        if family == "bert":
            yield from ((DECODER[0], word), (DECODER[1], BIAS)) if tied else ((BIAS, None),)
        elif tied:
            yield "lm_head.weight", word
        if family == "t5":
            yield from ((WORDS[0], word), (WORDS[1], word), (UNUSED, None))

    def _check_same(self, name: str, other: str) -> None:
        """Raise ValueError unless two of their tensors are equal."""
        if name == other:
            return
        one, two = self._state[name], self._state[other]
        if one.shape != two.shape or not (one.is_meta or torch.equal(one, two)):
            untie = ', or set "tie_word_embeddings": false in config.json' if self._config.family != "t5" else ""
            raise ValueError(
                f"{name} and {other} differ, and the model has one tensor for both; remove the wrong one"
                + untie * other.endswith(("lm_head.weight", DECODER[0]))
            )

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Map their short name to the shape in a model of this configuration."""
        likes = {name: torch.empty(shape, device="meta") for name, shape in self._full_shapes.items()}
        theirs = full_state_to_hugging_face(self._config, likes, self._moe)
        return {_short(name): tuple(like.shape) for name, like in theirs.items()}

    @cached_property
    def _full_shapes(self) -> dict[str, tuple[int, ...]]:
        return full_shapes(self._config, self._moe)

    def __getitem__(self, name: str) -> Tensor:
        recipe = self._recipes[name]
        parts = [self._state[self._names[part]] for part in recipe.theirs]
        for short, part in zip(recipe.theirs, parts):
            if tuple(part.shape) != (needed := self._shapes.get(short, self._full_shapes[name])):
                raise ValueError(
                    f"{self._names[short]} has shape {list(part.shape)}, and config.json says {list(needed)}: "
                    f"{shape_fields(self._config, self._moe, name)} (given there or by default)"
                )
        return recipe.join(*parts)

    def __contains__(self, name: object) -> bool:
        return name in self._recipes

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)


def full_state_from_hugging_face(
    config: ModelConfig, state: Mapping[str, Tensor], moe: MoEConfig | None = None
) -> State:
    """Return all tensors of a `HuggingFaceState` at once. Raises ValueError as it does."""
    return dict(HuggingFaceState(config, state, moe))


def _short(name: str) -> str:
    """Return their name without the outer prefix, which only some files have, and `weight` for BERT's old `gamma`."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name.removeprefix("transformer.").removeprefix("model.").replace(".block_sparse_moe.", ".mlp.")


def _check_rates(config: ModelConfig, name: str, rates: Tensor) -> None:
    """Raise ValueError unless these are the rotary embedding's, theta ** (-2 i / D), as far as 16 bits can tell."""
    size = config.hidden // config.heads
    expected = config.rope_theta ** (-torch.arange(0, size, 2) / size)
    if rates.shape != expected.shape or not (rates.is_meta or torch.allclose(rates.float(), expected, 0.01, 1e-7)):
        raise ValueError(
            f"{name} is not that of heads of {size} and rope_theta = {config.rope_theta:g}, as config.json has them; "
            "correct rope_theta or num_attention_heads, or remove the tensor"
        )


def full_state_to_hugging_face(config: ModelConfig, full: Mapping[str, Tensor], moe: MoEConfig | None = None) -> State:
    """Convert our tensors to theirs, under the names in a checkpoint's files: `full_state_from_hugging_face` inverted.

    `full` may be a part of the model, as a pipeline stage holds it.

    Raises:
        ValueError: a model of another family, or a tensor that has no counterpart in the family.
    """
    recipes = {recipe.ours: recipe for recipe in _recipes(config, moe)}
    theirs: State = {}
    for name, tensor in full.items():
        if name not in recipes:
            raise ValueError(f"{name} has no counterpart in Hugging Face's {family_of(config, moe)}")
        parts = recipes[name].split(tensor)
        theirs |= {their: part.contiguous() for their, part in zip(recipes[name].theirs, parts, strict=True)}
    return theirs


# ---- the tensors of each family ----


def _alone(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return `convert` as the `split` of a recipe with one tensor of theirs."""
    return lambda tensor: (convert(tensor),)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Recipe(NamedTuple):
    """How one of our tensors is made from theirs, and how it becomes theirs again."""

    ours: str
    """Our name."""
    theirs: tuple[str, ...]
    """Their names, as files have them."""
    join: Callable[..., Tensor] = _same
    """Makes ours from theirs."""
    split: Callable[[Tensor], Sequence[Tensor]] = _alone(_same)
    """Makes theirs from ours."""


def _recipes(config: ModelConfig, moe: MoEConfig | None, names: Container[str] | None = None) -> Iterator[_Recipe]:
    """Yield the recipe of every tensor. names: short names of a state to read, which may have one of several forms."""
    family = family_of(config, moe)
    if family == "gpt2":
        return _gpt2(config)
    if config.family == "bert":
        return _bert(config)
    if config.family == "mamba":
        return (
            _Recipe(each.ours, (each.theirs,), each.from_theirs, _alone(each.to_theirs)) for each in mamba_names(config)
        )
    if family == "t5":
        return _t5(config, names)
    return _llama(config, moe or MoEConfig(), names)


def _gpt2(config: ModelConfig) -> Iterator[_Recipe]:
    yield _Recipe("embedding.word.weight", ("transformer.wte.weight",))
    yield _Recipe("embedding.position.weight", ("transformer.wpe.weight",))
    plain = (_transposed, _alone(_transposed))
    heads = (partial(_heads_of_gpt2, heads=config.heads), _alone(partial(_gpt2_of_heads, heads=config.heads)))
    for i in range(config.layers):
        for name, layer in GPT2_PARTS.items():
            join, split = heads if name == "attention.qkv" else plain
            for part in ("weight", "bias"):
                yield _Recipe(f"layers.{i}.{name}.{part}", (f"transformer.h.{i}.{layer}.{part}",), join, split)
    yield _Recipe("final_norm.weight", ("transformer.ln_f.weight",))
    yield _Recipe("final_norm.bias", ("transformer.ln_f.bias",))
    yield from _output(config)


def _llama(config: ModelConfig, moe: MoEConfig, names: Container[str] | None) -> Iterator[_Recipe]:
    yield _Recipe("embedding.word.weight", ("model.embed_tokens.weight",))
    kv_heads = config.kv_heads or config.heads
    heads = _interleaved(kv_heads, config.heads // kv_heads, 1, 1)
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        qkv = tuple(f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv")
        yield _Recipe(f"{ours}.attention.norm.weight", (f"{theirs}.input_layernorm.weight",))
        yield _Recipe(f"{ours}.attention.qkv.weight", qkv, *heads)
        yield _Recipe(f"{ours}.attention.proj.weight", (f"{theirs}.self_attn.o_proj.weight",))
        yield _Recipe(f"{ours}.mlp.norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        if moe.is_moe_layer(i):
            yield from _mixtral(f"{ours}.mlp", f"{theirs}.block_sparse_moe", moe.num_experts, names)
        else:
            halves = tuple(f"{theirs}.mlp.{half}.weight" for half in ("gate_proj", "up_proj"))
            yield _Recipe(f"{ours}.mlp.fc1.weight", halves, _joined, _halves)
            yield _Recipe(f"{ours}.mlp.fc2.weight", (f"{theirs}.mlp.down_proj.weight",))
    yield _Recipe("final_norm.weight", ("model.norm.weight",))
    yield from _output(config)


def _mixtral(ours: str, theirs: str, experts: int, names: Container[str] | None) -> Iterator[_Recipe]:
    """Yield the recipes of a layer's router and experts: each expert apart, or stacked if the state has them so."""
    yield _Recipe(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    if names is not None and _short(f"{theirs}.experts.gate_up_proj") in names:
        yield _Recipe(f"{ours}.experts.fc1.weight", (f"{theirs}.experts.gate_up_proj",))
        yield _Recipe(f"{ours}.experts.fc2.weight", (f"{theirs}.experts.down_proj",))
        return
    w1, w2, w3 = (tuple(f"{theirs}.experts.{e}.{part}.weight" for e in range(experts)) for part in ("w1", "w2", "w3"))
    yield _Recipe(f"{ours}.experts.fc1.weight", w1 + w3, _gates_and_ups, _each_gate_and_up)
    yield _Recipe(f"{ours}.experts.fc2.weight", w2, _stacked_experts, torch.unbind)


def _bert(config: ModelConfig) -> Iterator[_Recipe]:
    heads = _interleaved(config.heads, 1, 1, 1)
    for name, theirs in bert_names(config):
        yield _Recipe(name, theirs) if len(theirs) == 1 else _Recipe(name, theirs, *heads)


def _t5(config: ModelConfig, names: Container[str] | None) -> Iterator[_Recipe]:
    for name, theirs in t5_names(config, names):
        if len(theirs) == 1:
            yield _Recipe(name, theirs)
        elif name.endswith("fc1.weight"):
            yield _Recipe(name, theirs, _joined, _halves)
        else:  # q, k, v of self-attention; k, v of cross-attention
            yield _Recipe(name, theirs, *_interleaved(config.heads, *[1] * len(theirs)))


def _output(config: ModelConfig) -> Iterator[_Recipe]:
    if config.untie_embeddings_and_output_weights:
        yield _Recipe("output.weight", ("lm_head.weight",))


# ---- tensors joined and split ----


def _interleaved(kv_heads: int, *counts: int) -> tuple[Callable[..., Tensor], Callable[[Tensor], Sequence[Tensor]]]:
    """Return `interleave_heads` and `split_heads` for heads of these counts, as the two ways of a recipe.

    counts: heads of each kind per key/value head, such as r, 1, 1 for queries, key and value.
    """
    return partial(interleave_heads, kv_heads=kv_heads), partial(split_heads, kv_heads=kv_heads, counts=counts)


def interleave_heads(*parts: Tensor, kv_heads: int) -> Tensor:
    """[r g D, ..], [g D, ..], [g D, ..] -> [g (r + 2) D, ..]: queries, key and value of each key/value head."""
    groups = [x.reshape(kv_heads, -1, *x.shape[1:]) for x in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def split_heads(mixed: Tensor, *, kv_heads: int, counts: Sequence[int]) -> list[Tensor]:
    """[g (r + 2) D, ..] -> [r g D, ..], [g D, ..], [g D, ..] for counts r, 1, 1: the inverse of `interleave_heads`."""
    parts = mixed.unflatten(0, (kv_heads, sum(counts), -1)).split(list(counts), dim=1)
    return [part.flatten(0, 2) for part in parts]


def _transposed(tensor: Tensor) -> Tensor:
    """Transpose a matrix of GPT-2, which is [input, output]; norms and biases have one dimension and stay."""
    return tensor.t() if tensor.dim() == 2 else tensor


def _heads_of_gpt2(mixed: Tensor, *, heads: int) -> Tensor:
    q, k, v = _transposed(mixed).chunk(3)
    return interleave_heads(q, k, v, kv_heads=heads)


def _gpt2_of_heads(mixed: Tensor, *, heads: int) -> Tensor:
    return _transposed(torch.cat(split_heads(mixed, kv_heads=heads, counts=(1, 1, 1))))


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _halves(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.chunk(2)


def _stacked_experts(*each: Tensor) -> Tensor:
    return torch.stack(each)


def _gates_and_ups(*each: Tensor) -> Tensor:
    """Stack E gates [G, H] and E ups [G, H] -> [E, 2G, H]."""
    half = len(each) // 2
    return torch.cat([torch.stack(each[:half]), torch.stack(each[half:])], dim=1)


def _each_gate_and_up(stacked: Tensor) -> Sequence[Tensor]:
    """Split [E, 2G, H] -> E gates [G, H] and E ups [G, H]."""
    gates, ups = stacked.chunk(2, dim=1)
    return [*gates, *ups]
