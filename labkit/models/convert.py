"""Full states: whole tensors by `full_name`. Ranks load their parts from them, and Hugging Face checkpoints hold them.

    read = json.loads(Path("config.json").read_text())
    config, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
    full = full_state_from_hugging_face(config, safetensors.torch.load_file("model.safetensors"), moe)
    load_full_state(chunks, full, groups)             # each rank keeps its slices

    full = gather_full_state(chunks, groups)          # whole tensors of the stage, on each of its ranks
    theirs = full_state_to_hugging_face(config, full, moe)

The formats differ:

- labkit stores linear weights as [output, input], with [q .. q k v] for each key/value head, [gate; up] as one matrix,
  and experts stacked.
- GPT-2 stores linear weights as [input, output], and q, k, v as three blocks.
- Llama stores q, k, v, gate and up apart. Mixtral stores each expert by itself: w1 is its gate, w3 its up, w2 its down.
- BERT stores q, k and v apart, each with its bias (`bert/hugging_face_bert.py`).
- Mamba-2 stores the rows of a projection kind after kind (`mamba/hugging_face_mamba.py`).
- T5 stores q, k, v and gate, up apart, also of its cross-attention (`t5/hugging_face_t5.py`).
- transformers 5 stacks Mixtral's experts in memory, as [gate; up]. This module reads both forms; files hold the first.

All rotate features i and i + D/2.

Shapes: H hidden, D head dimension, g key/value heads, r query heads per key/value head, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.config import ModelConfig, MoEConfig
from labkit.models.bert.hugging_face_bert import BIAS, DECODER, bert_names
from labkit.models.full_shapes import full_shapes, shape_fields
from labkit.models.hugging_face_config import family_of
from labkit.models.mamba.hugging_face_mamba import mamba_names
from labkit.models.t5.hugging_face_t5 import UNUSED, WORDS, t5_names
from labkit.parallel.parameters.parameter_record import name_of, record_of
from labkit.parallel.parameters.weights import gather_expert_parameter, gather_parameter, tensor_part


def load_full_state(chunks: Sequence[nn.Module], full: Mapping[str, Tensor], groups: ParallelGroups) -> None:
    """Copy whole tensors, by `full_name`, into this rank's parameters: its slice by tp, or by ep and etp.

    Rows that pad the vocabulary become zero.

    Raises:
        ValueError: a tensor that is missing or has another shape than the model's.
    """
    with torch.no_grad():
        for parameter in _parameters(chunks):
            name, shape = name_of(parameter), record_of(parameter).full_shape
            if name not in full or tuple(full[name].shape) != shape:
                found = f"has shape {tuple(full[name].shape)}" if name in full else "is missing"
                raise ValueError(f"{name} {found}; the model needs {shape}")
            parameter.copy_(_local_part(full[name], parameter, groups))


def gather_full_state(chunks: Sequence[nn.Module], groups: ParallelGroups) -> dict[str, Tensor]:
    """The inverse of `load_full_state`: whole tensors of this rank's chunks, by `full_name`, on each rank of the stage.

    All ranks of the stage call this."""
    return {
        name_of(parameter): gather_expert_parameter(parameter, parameter, etp=groups.etp, ep=groups.ep)
        if record_of(parameter).expert_parallel
        else gather_parameter(parameter, parameter, groups.tp)
        for parameter in _parameters(chunks)
    }


def _parameters(chunks: Sequence[nn.Module]) -> Iterable[nn.Parameter]:
    return (parameter for chunk in chunks for parameter in chunk.parameters())


def _local_part(full: Tensor, like: nn.Parameter, groups: ParallelGroups) -> Tensor:
    record, tp = record_of(like), groups.tp
    if record.expert_parallel:
        full, tp = tensor_part(full, groups.ep.rank, groups.ep.size, 0), groups.etp
    dim, replicated = record.partition_dim, record.replicated
    rows = like.shape[0] * (tp.size if dim == 0 else 1)
    if rows > full.shape[0] and replicated is None:  # a vocabulary table: its padding depends on tp
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if dim < 0:
        return full
    return tensor_part(full, tp.rank, tp.size, dim, record.partition_stride, replicated)


State = dict[str, Tensor]

GATE_UP = ("gate_proj", "up_proj")
"""Llama's names of the halves of fc1."""
EXPERTS = "block_sparse_moe.experts"
"""Mixtral's name of a layer's experts, in files."""
GPT2_PARTS = {
    "attention.norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
"""Our part of a layer -> GPT-2's."""
LLAMA_PARTS = {
    "attention.norm": "input_layernorm",
    "attention.proj": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.fc2": "mlp.down_proj",
    "mlp.router": "block_sparse_moe.gate",
}
"""Our part of a layer -> Llama's or Mixtral's, for parts with the same tensor."""


class HuggingFaceState(Mapping[str, Tensor]):
    """The whole model's tensors under our names, each made of theirs when somebody asks for it.

    So a state that reads its tensors from a file is converted one tensor after the other.
    """

    IGNORED = (".attn.bias", ".attn.masked_bias", ".embeddings.position_ids")
    """Ends of names of tensors that follow from the configuration."""
    RATES = ".rotary_emb.inv_freq"
    """End of the name of another one, which old files of Llama have: it must be that of the `rope_theta`."""

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
        family = family_of(config, moe)
        recipes = _from_llama(config, moe or MoEConfig(), self._names)
        if family == "gpt2":
            recipes = _from_gpt2(config)
        elif config.family == "bert":
            recipes = _from_bert(config)
        elif config.family == "mamba":
            recipes = (_Recipe(each.ours, (each.theirs,), each.from_theirs) for each in mamba_names(config))
        elif family == "t5":
            recipes = _from_t5(config, self._names)
        self._recipes: dict[str, _Recipe] = {}
        unused = dict(self._names)
        for recipe in recipes:
            for part in recipe.parts:
                if part not in self._names:
                    some = ", ".join(list(self._names)[:3])
                    raise ValueError(
                        f"the checkpoint has no tensor {part!r}; it holds {len(self._names)}, such as {some}"
                    )
                unused.pop(part, None)
            self._recipes[recipe.name] = recipe
        for name, original in self._copies():
            if (copy := unused.pop(name, None)) and original:
                self._check_same(self._names[original], copy)
        if unused:
            first = ", ".join(list(unused)[:5])
            raise ValueError(f"no place for the tensors {first}; is the model config the right one?")

    def _copies(self) -> Iterator[tuple[str, str | None]]:
        """(short name, that of the tensor which it is once more); None for tensors that nothing reads."""
        (word,) = self._recipes["embedding.word.weight"].parts
        family, tied = self._config.family, not self._config.untie_embeddings_and_output_weights
        if family == "bert":
            yield from ((DECODER[0], word), (DECODER[1], BIAS)) if tied else ((BIAS, None),)
        elif tied:
            yield "lm_head.weight", word
        if family == "t5":
            yield from ((WORDS[0], word), (WORDS[1], word), (UNUSED, None))

    def _check_same(self, name: str, other: str) -> None:
        """ValueError unless two of their tensors are equal."""
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
        """Their short name -> shape in a model of this configuration."""
        likes = {name: torch.empty(shape, device="meta") for name, shape in self._full_shapes.items()}
        theirs = full_state_to_hugging_face(self._config, likes, self._moe)
        return {_short(name): tuple(like.shape) for name, like in theirs.items()}

    @cached_property
    def _full_shapes(self) -> dict[str, tuple[int, ...]]:
        return full_shapes(self._config, self._moe)

    def __getitem__(self, name: str) -> Tensor:
        recipe = self._recipes[name]
        parts = [self._state[self._names[part]] for part in recipe.parts]
        for short, part in zip(recipe.parts, parts):
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
    """All tensors of a `HuggingFaceState` at once. Raises ValueError as it does."""
    return dict(HuggingFaceState(config, state, moe))


def _short(name: str) -> str:
    """Their name without the outer prefix, which some files have and some have not; BERT's oldest files say `gamma`."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name.removeprefix("transformer.").removeprefix("model.").replace(".block_sparse_moe.", ".mlp.")


def _check_rates(config: ModelConfig, name: str, rates: Tensor) -> None:
    """ValueError unless these are the rotary embedding's, theta ** (-2 i / D), as far as 16 bits can tell."""
    size = config.hidden // config.heads
    expected = config.rope_theta ** (-torch.arange(0, size, 2) / size)
    if rates.shape != expected.shape or not (rates.is_meta or torch.allclose(rates.float(), expected, 0.01, 1e-7)):
        raise ValueError(
            f"{name} is not that of heads of {size} and rope_theta = {config.rope_theta:g}, as config.json has them; "
            "correct rope_theta or num_attention_heads, or remove the tensor"
        )


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Recipe(NamedTuple):
    """One of our tensors as made of theirs."""

    name: str
    """Our name."""
    parts: tuple[str, ...]
    """Their short names."""
    join: Callable[..., Tensor] = _same
    """Makes ours of theirs."""


def interleave_heads(*parts: Tensor, kv_heads: int) -> Tensor:
    """[r g D, ..], [g D, ..], [g D, ..] -> [g (r + 2) D, ..]: queries, key and value of each key/value head."""
    groups = [x.reshape(kv_heads, -1, *x.shape[1:]) for x in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _transposed(tensor: Tensor) -> Tensor:
    """GPT-2's matrices are [input, output]; its norms and biases have one dimension."""
    return tensor.t() if tensor.dim() == 2 else tensor


def _from_gpt2(config: ModelConfig) -> Iterator[_Recipe]:
    yield _Recipe("embedding.word.weight", ("wte.weight",))
    yield _Recipe("embedding.position.weight", ("wpe.weight",))
    for i in range(config.layers):
        for name, layer in GPT2_PARTS.items():
            join = partial(_heads_of_gpt2, heads=config.heads) if name == "attention.qkv" else _transposed
            for part in ("weight", "bias"):
                yield _Recipe(f"layers.{i}.{name}.{part}", (f"h.{i}.{layer}.{part}",), join)
    yield _Recipe("final_norm.weight", ("ln_f.weight",))
    yield _Recipe("final_norm.bias", ("ln_f.bias",))
    yield from _output(config)


def _heads_of_gpt2(mixed: Tensor, *, heads: int) -> Tensor:
    q, k, v = _transposed(mixed).chunk(3)
    return interleave_heads(q, k, v, kv_heads=heads)


def _output(config: ModelConfig) -> Iterator[_Recipe]:
    if config.untie_embeddings_and_output_weights:
        yield _Recipe("output.weight", ("lm_head.weight",))


def _from_llama(config: ModelConfig, moe: MoEConfig, names: Container[str]) -> Iterator[_Recipe]:
    yield _Recipe("embedding.word.weight", ("embed_tokens.weight",))
    heads = partial(interleave_heads, kv_heads=config.kv_heads or config.heads)
    for i in range(config.layers):
        layer = f"layers.{i}"
        yield _Recipe(f"{layer}.attention.norm.weight", (f"{layer}.input_layernorm.weight",))
        qkv = tuple(f"{layer}.self_attn.{part}_proj.weight" for part in "qkv")
        yield _Recipe(f"{layer}.attention.qkv.weight", qkv, heads)
        yield _Recipe(f"{layer}.attention.proj.weight", (f"{layer}.self_attn.o_proj.weight",))
        yield _Recipe(f"{layer}.mlp.norm.weight", (f"{layer}.post_attention_layernorm.weight",))
        if moe.is_moe_layer(i):
            yield from _from_mixtral(f"{layer}.mlp", moe.num_experts, names)
        else:
            yield _Recipe(f"{layer}.mlp.fc1.weight", tuple(f"{layer}.mlp.{half}.weight" for half in GATE_UP), _joined)
            yield _Recipe(f"{layer}.mlp.fc2.weight", (f"{layer}.mlp.down_proj.weight",))
    yield _Recipe("final_norm.weight", ("norm.weight",))
    yield from _output(config)


def _from_bert(config: ModelConfig) -> Iterator[_Recipe]:
    heads = partial(interleave_heads, kv_heads=config.heads)
    for name, theirs in bert_names(config):
        yield _Recipe(name, theirs, _same if len(theirs) == 1 else heads)


def _from_t5(config: ModelConfig, names: Container[str]) -> Iterator[_Recipe]:
    heads = partial(interleave_heads, kv_heads=config.heads)
    for name, theirs in t5_names(config, names):
        whole = _joined if name.endswith("fc1.weight") else heads
        yield _Recipe(name, theirs, _same if len(theirs) == 1 else whole)


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _from_mixtral(name: str, experts: int, names: Container[str]) -> Iterator[_Recipe]:
    """Router and experts of one layer, stacked or each by itself."""
    yield _Recipe(f"{name}.router.weight", (f"{name}.gate.weight",))
    if f"{name}.experts.gate_up_proj" in names:
        yield _Recipe(f"{name}.experts.fc1.weight", (f"{name}.experts.gate_up_proj",))
        yield _Recipe(f"{name}.experts.fc2.weight", (f"{name}.experts.down_proj",))
        return
    w1, w2, w3 = (tuple(f"{name}.experts.{e}.{part}.weight" for e in range(experts)) for part in ("w1", "w2", "w3"))
    yield _Recipe(f"{name}.experts.fc1.weight", w1 + w3, _gates_and_ups)
    yield _Recipe(f"{name}.experts.fc2.weight", w2, _stacked_experts)


def _stacked_experts(*each: Tensor) -> Tensor:
    return torch.stack(each)


def _gates_and_ups(*each: Tensor) -> Tensor:
    """E gates [G, H] and E ups [G, H] -> [E, 2G, H]."""
    half = len(each) // 2
    return torch.cat([torch.stack(each[:half]), torch.stack(each[half:])], dim=1)


# ---- the other way ----


def full_state_to_hugging_face(config: ModelConfig, full: Mapping[str, Tensor], moe: MoEConfig | None = None) -> State:
    """The inverse of `full_state_from_hugging_face`, under the names in a checkpoint's files.

    `full` may be a part of the model, as a pipeline stage holds it.

    Raises:
        ValueError: a model of another family, or a tensor that has no place in the family.
    """
    to_theirs = _to_gpt2 if family_of(config, moe) == "gpt2" else _to_llama
    if config.family == "bert":
        to_theirs = _to_bert
    elif config.family == "mamba":
        to_theirs = _to_mamba
    elif config.family == "t5":
        to_theirs = _to_t5
    theirs: State = {}
    for name, tensor in full.items():
        try:
            theirs |= to_theirs(config, name, tensor)
        except (KeyError, ValueError):
            raise ValueError(f"{name} has no place in a {family_of(config, moe)} of Hugging Face") from None
    return theirs


def split_heads(mixed: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[g (r + 2) D, ..] -> [r g D, ..], [g D, ..], [g D, ..]: the inverse of `interleave_heads`."""
    kv_heads = config.kv_heads or config.heads
    r = config.heads // kv_heads
    q, k, v = mixed.unflatten(0, (kv_heads, r + 2, -1)).split((r, 1, 1), dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


def _to_gpt2(config: ModelConfig, name: str, tensor: Tensor) -> State:
    ends = {"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"}
    layer, part = name.rsplit(".", 1)
    if layer == "output":
        return {f"lm_head.{part}": tensor.contiguous()}
    if layer in ends:
        return {f"transformer.{ends[layer]}.{part}": tensor.contiguous()}
    _, index, module = layer.split(".", 2)
    if module == "attention.qkv":
        tensor = torch.cat(split_heads(tensor, config))
    is_linear = tensor.dim() == 2
    return {f"transformer.h.{index}.{GPT2_PARTS[module]}.{part}": (tensor.t() if is_linear else tensor).contiguous()}


def _to_llama(config: ModelConfig, name: str, tensor: Tensor) -> State:
    ends = {"embedding.word": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"}
    module = name.removesuffix(".weight")
    if module in ends:
        return {f"{ends[module]}.weight": tensor.contiguous()}
    _, index, module = module.split(".", 2)
    parts: State
    if module == "attention.qkv":
        parts = dict(zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), split_heads(tensor, config)))
    elif module == "mlp.fc1":
        parts = dict(zip((f"mlp.{half}" for half in GATE_UP), tensor.chunk(2)))
    elif module == "mlp.experts.fc1":
        halves = zip(("w1", "w3"), tensor.chunk(2, dim=1))
        parts = {f"{EXPERTS}.{e}.{w}": one for w, half in halves for e, one in enumerate(half)}
    elif module == "mlp.experts.fc2":
        parts = {f"{EXPERTS}.{e}.w2": one for e, one in enumerate(tensor)}
    else:
        parts = {LLAMA_PARTS[module]: tensor}
    return {f"model.layers.{index}.{part}.weight": value.contiguous() for part, value in parts.items()}


def _to_bert(config: ModelConfig, name: str, tensor: Tensor) -> State:
    theirs = dict(bert_names(config))[name]
    parts = (tensor,) if len(theirs) == 1 else split_heads(tensor, config)
    return {each: part.contiguous() for each, part in zip(theirs, parts)}


def _to_mamba(config: ModelConfig, name: str, tensor: Tensor) -> State:
    (one,) = (each for each in mamba_names(config) if each.ours == name)
    return {one.theirs: one.to_theirs(tensor).contiguous()}


def _to_t5(config: ModelConfig, name: str, tensor: Tensor) -> State:
    theirs = dict(t5_names(config))[name]
    parts: Sequence[Tensor] = tensor.chunk(len(theirs))
    if len(theirs) > 1 and not name.endswith("fc1.weight"):
        parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (config.heads, len(theirs), -1)).unbind(1)]
    return {each: part.contiguous() for each, part in zip(theirs, parts)}
