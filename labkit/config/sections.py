"""The sections of a run's configuration, as frozen dataclasses.

A section has one concern. Each field is declared once, with its default, its help, its limits and its other names. The
checks, the command line's help, printed configurations and docs/config.md are made from this table.
Names are Megatron's in short form: `tp cp ep etp dp edp pp vpp`. A field's type is one of `int`, `float`, `bool`,
`str`, `tuple[str, ...]`, `tuple[int, ...]`, or one of them `| None`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from types import SimpleNamespace

from labkit.config.choices import CAPTURED_PARTS, DISPATCHERS, FAMILIES, LOGGERS, RECOMPUTED_PARTS, SCHEDULES, in_words
from labkit.config.field_spec import FieldSpec, expanded, field

_ADAPTIVE = "optim.precision=fp16 optim.loss_scale=null"
_DELAYED = "optim.fp8=e4m3|hybrid optim.fp8_recipe=delayed"
_ROUTED = "moe.load_balancing=aux_loss|seq_aux_loss|global_aux_loss|none"
_MAMBA = "model.family=mamba"
_HALVES = "model.model_type=encoder_and_decoder"
_PROFILED = "train.profile=pytorch|nsys"
_DECAYS = "optim.lr_schedule=cosine|linear|inverse-square-root|wsd"
_SAVES = "checkpoint.dir|checkpoint.interval"
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_FIXED = ", ".join(name for name, row in SCHEDULES.items() if row.chunks not in (1, None))
_BY_VPP = "|".join(name for name, row in SCHEDULES.items() if row.chunks is None)
_INTERLEAVED = f"parallel.vpp schedule.path=null schedule.name=auto|{_BY_VPP}"
REASONS = {
    "model.recompute_granularity=selective|full": "which recomputes nothing",
    "moe.dispatcher=alltoall": "which has no all-to-all to hide",
    _ROUTED: "which assigns experts itself",
    _HALVES: "which has no decoder after an encoder, as model.family = t5 has",
    "moe.score_function=sigmoid": "as the bias moves sigmoid scores",
    **dict.fromkeys(_INTERLEAVED.split(), "and only the interleaved schedule reads this"),
    "schedule.path=null": "which takes the place of the name",
    "schedule.variable_seq_lengths=false": "where sizes are sent before every tensor, so nothing is one batch",
    _DECAYS: "which does not decay",
    "optim.precision=fp16": "which scales no loss",
    "optim.precision=bf16": "which has no gradients in bf16",
    "optim.loss_scale=null": "a constant that never moves",
    "optim.data_parallel=bucketed": "which has no gradient buckets",
    "optim.overlap_grad_reduce=true": "which leaves one bucket",
    "optim.distributed_optimizer=true": "which leaves parameters and their states whole on every rank",
}
"""A condition in the `needs` of fields -> the reason that the error gives if the condition does not hold."""
# A table: the declaration of a field, and its text on the lines below where one line is too short.
# fmt: off


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model. Defaults give a small GPT-2."""

    family: str = field("gpt",
        f"{in_words(FAMILIES, 'or')}.", choices=FAMILIES, of_model=True)
    model_type: str | None = field(None,
        "What a model of your own is (Megatron's ModelType): `encoder_or_decoder`, or `encoder_and_decoder`, whose "
        "halves parallel.split_rank puts on different ranks. None follows `family`: a T5 is an encoder_and_decoder.",
        choices="encoder_or_decoder encoder_and_decoder")
    layers: int = field(4, "Transformer layers of the whole model, over all stages; for a T5, its encoder's.", ge=1,
        aliases="num_layers encoder_num_layers", of_model=True)
    decoder_layers: int | None = field(None, "Decoder layers of a T5; None means `layers`.", ge=1,
        aliases="decoder_num_layers", needs=_HALVES, of_model=True)
    hidden: int = field(128, "Width of the residual stream.", ge=1, aliases="hidden_size", of_model=True)
    heads: int = field(4, "Query heads; a head is hidden / heads wide.", ge=1, aliases="num_attention_heads",
        of_model=True)
    kv_heads: int | None = field(None,
        "Key/value heads of grouped-query attention (arXiv 2305.13245), a multiple or a divisor of tp; None means "
        "`heads`. Fewer than tp: neighbouring ranks hold copies and sum their gradients.", ge=1,
        aliases="num_query_groups", of_model=True)
    ffn_hidden: int | None = field(None, "Width of dense MLPs; None means 4 x hidden.", ge=1, aliases="ffn_hidden_size",
        of_model=True)
    vocab_size: int = field(1024, "Tokens before padding, at least the tokenizer's (the bundled one has 1024).", ge=1,
        of_model=True)
    make_vocab_size_divisible_by: int = field(128,
        "The vocabulary is padded to a multiple of this times tp; padded columns never enter the loss.", ge=1)
    seq_length: int = field(64, "Tokens of one sample; for a T5, those that its encoder reads.", ge=1,
        aliases="encoder_seq_length")
    decoder_seq_length: int | None = field(None, "Tokens that a T5's decoder reads; None means seq_length.", ge=1,
        needs=_HALVES)
    position: str = field("learned",
        "Positions: `learned` (a table of seq_length rows), `rope` (arXiv 2104.09864), in Mamba models `none`, in a T5 "
        "`relative` (arXiv 1910.10683): a bias by distance on scores that are not scaled.",
        choices="learned rope none relative", aliases="position_embedding_type",
        synonyms={"learned_absolute": "learned"}, of_model=True)
    relative_buckets: int = field(32, "Distances that `relative` tells apart; near ones have a bucket each.", ge=4,
        aliases="relative_attention_num_buckets", needs="model.position=relative", of_model=True)
    relative_max_distance: int = field(128, "With `relative`, all distances from this one on share a bucket.", ge=4,
        aliases="relative_attention_max_distance", needs="model.position=relative", of_model=True)
    rope_theta: float = field(10000.0, "Base of the rotary frequencies.", gt=0, aliases="rotary_base",
        needs="model.position=rope", of_model=True)
    norm: str = field("layernorm", "`layernorm` or `rmsnorm` (arXiv 1910.07467).", choices="layernorm rmsnorm",
        aliases="normalization", synonyms={"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, of_model=True)
    norm_placement: str = field("pre",
        "`pre`: norms before attention and MLP, and a final one (arXiv 1909.08053, figure 7b). `post`: after each "
        "residual addition and after the embedding, no final one (figure 7a, the original BERT).",
        choices="pre post", needs="model.family=bert", of_model=True)
    bert_binary_head: bool = field(True,
        "BERT learns the order of two sentences in addition to the masked words; False: it has no token types either.",
        needs="model.family=bert", of_model=True)
    norm_eps: float = field(1e-5, "Added to the norm's variance.", gt=0, aliases="norm_epsilon layernorm_epsilon",
        of_model=True)
    activation: str = field("gelu_tanh",
        "`gelu` (erf), `gelu_tanh` (GPT-2's), `swiglu` (arXiv 2002.05202); a T5 also has `relu` and `geglu`.",
        choices="gelu gelu_tanh swiglu relu geglu", of_model=True)
    bias: bool = field(True, "Linear layers carry a bias.", of_model=True)
    untie_embeddings_and_output_weights: bool = field(False,
        "False: the output layer is the word embedding's transpose; first and last stage share it.", of_model=True)
    hybrid_override_pattern: str | None = field(None,
        "The part of each layer of a Mamba model: M Mamba, * attention, - MLP, as in `MM*-`. None: M in all.",
        needs=_MAMBA, of_model=True)
    mamba_state_dim: int = field(128, "Size of the state of a Mamba head, for each of its features.", ge=1,
        needs=_MAMBA, of_model=True)
    mamba_head_dim: int = field(64, "Width of a Mamba head.", ge=1, needs=_MAMBA, of_model=True)
    mamba_num_groups: int = field(8, "Groups of Mamba heads with one B and C each; tp splits them over ranks.", ge=1,
        needs=_MAMBA, of_model=True)
    mamba_num_heads: int | None = field(None, "Heads of a Mamba layer; None: 2 x hidden / mamba_head_dim.", ge=1,
        needs=_MAMBA, of_model=True)
    mamba_conv_width: int = field(4, "Positions that a Mamba layer's convolution sums.", ge=1, needs=_MAMBA,
        of_model=True)
    embedding_dropout: float = field(0.0, "Dropout after the embeddings; in Megatron-LM this is hidden_dropout.",
        ge=0, lt=1)
    attention_dropout: float = field(0.0, "Dropout of attention probabilities, inside tensor-parallel regions.",
        ge=0, lt=1)
    hidden_dropout: float = field(0.0, "Dropout before each residual addition, outside these regions.", ge=0, lt=1)
    init_std: float = field(0.02, "Weights are N(0, init_std); residual projections are scaled by 1/sqrt(2 x layers).",
        gt=0, aliases="init_method_std")
    use_cpu_initialization: bool = field(True,
        "Every rank draws whole weights on the host, the same in every layout, and keeps its part. False: a rank draws "
        "only its part, on its device. This is fast, but two layouts start from different numbers.")
    transformer_impl: str = field("local", "`local`: labkit's layers; `transformer_engine`: NVIDIA's, on GPUs.",
        choices="local transformer_engine")
    attention_backend: str = field("fused",
        "`fused`: the kernel that torch's scaled_dot_product_attention chooses. `flash`, `cudnn`, `efficient` or "
        "`math`: exactly this kernel, or an error; only `math` stores the probabilities. Careful: Megatron's `fused` "
        "is labkit's `cudnn`; labkit's `fused` is Megatron's `auto`. "
        "`unfused` (Megatron's `local`): separate operations, which keep the 5 a s / h of arXiv 2205.05198. With "
        "parallel.cp above 1, `fused` and `flash` run blocks by the flash kernel, `unfused` by separate operations.",
        choices="fused flash cudnn efficient math unfused", synonyms={"auto": "fused", "local": "unfused"})
    compile: str = field("none",
        "`layers`: torch.compile fuses what lies between the linear layers of a transformer layer, once for all layers "
        "of a kind. The first step compiles, for tens of seconds, and needs a C++ compiler.", choices="none layers")
    recompute_granularity: str = field("none",
        "Activations computed again in backward: `none`, `selective` (the parts in recompute_modules) or `full` (whole "
        "layers, of which only the inputs are kept).", choices="none selective full")
    recompute_method: str = field("uniform",
        "With `full`: `uniform` keeps the input of every group of recompute_num_layers layers; `block` recomputes only "
        "the first recompute_num_layers layers of each chunk, one by one.", choices="uniform block",
        needs="model.recompute_granularity=full")
    recompute_num_layers: int = field(1, "See recompute_method.", ge=1, needs="model.recompute_granularity=full")
    recompute_modules: tuple[str, ...] = field(("core_attn",),
        f"With `selective`: any of {in_words(RECOMPUTED_PARTS, 'and')}.",
        needs="model.recompute_granularity=selective")
    num_microbatches_with_partial_activation_checkpoints: int | None = field(None,
        "How many of the microbatches in flight on a rank keep everything; the others are recomputed (arXiv "
        "2205.05198, appendix C). None and 0 recompute all.", ge=0, needs="model.recompute_granularity=selective|full")

    @property
    def has_two_halves(self) -> bool:
        """True for a model with an encoder and a decoder after it."""
        return self.model_type == "encoder_and_decoder" or (self.model_type is None and self.family == "t5")

    @property
    def mamba_heads(self) -> int:
        """Number of heads of a Mamba layer."""
        return self.mamba_num_heads or 2 * self.hidden // self.mamba_head_dim

    def parts_of_layer(self, index: int) -> str:
        """Return the parts of layer `index` in their order: `*` attention, `-` MLP or experts, `M` Mamba."""
        if self.family != "mamba":
            return "*-"
        return "M" if self.hybrid_override_pattern is None else self.hybrid_override_pattern[index]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout. Data parallelism takes the rest of the world: dp = world / (tp cp pp)."""

    tp: int = field(1, "Tensor parallel size.", ge=1, aliases="tensor_model_parallel_size")
    pp: int = field(1, "Pipeline parallel size (stages on ranks).", ge=1, aliases="pipeline_model_parallel_size")
    vpp: int = field(1,
        f"Model chunks on each rank; 1 for schedules that fix the number ({_FIXED}, files).", ge=1,
        aliases="virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank")
    cp: int = field(1, "Context parallel size.", ge=1, aliases="context_parallel_size")
    ep: int = field(1, "Expert parallel size.", ge=1, aliases="expert_model_parallel_size")
    etp: int | None = field(None, "Tensor parallel size of experts; None is tp.", ge=1,
        aliases="expert_tensor_parallel_size")
    order: str = field("tp-cp-ep-dp-pp", "Axes from fastest to slowest varying over ranks.")
    rank_offset: int = field(0, "Number of the first global rank of this layout.", ge=0)
    cp_comm_type: str = field("p2p",
        "Context parallelism: `p2p` sends keys and values round a ring (arXiv 2310.01889); `all_gather` collects.",
        choices="p2p all_gather", synonyms={"allgather": "all_gather"}, needs="parallel.cp")
    sequence_parallel: bool = field(False,
        "Split activations along the sequence between tensor-parallel regions (arXiv 2205.05198).", needs="parallel.tp")
    split_rank: int | None = field(None, "First pipeline rank of the decoder in an encoder-decoder model.", ge=1,
        aliases="pipeline_model_parallel_split_rank")
    standalone_embedding_stage: bool = field(False, "The first stage holds the embedding and no layer.")
    pipeline_layout: str | None = field(None,
        "The parts of each stage, as in `Ettt|tttt|tttt|tttL`: E embedding, t a layer, L final norm and loss, | "
        "between stages; `t*3` and `(tt|)*2` repeat. A stage without letters is empty. None splits the layers equally.",
        aliases="pipeline_model_parallel_layout")
    distributed_backend: str = field("auto", "`auto` is nccl where each rank has a GPU of its own, else gloo.",
        choices="auto gloo nccl")
    distributed_timeout_minutes: float = field(10.0, "Longest wait in a collective; then the run ends.", gt=0, le=10080)

    @property
    def smallest_world_size(self) -> int:
        """Fewest ranks that both generators can lay out: lcm(tp cp pp, etp ep pp)."""
        return math.lcm(self.tp * self.cp * self.pp, self.expert_tp * self.ep * self.pp)

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size inside experts; tp if etp is not given."""
        return self.tp if self.etp is None else self.etp


@dataclass(frozen=True)
class _HasPaths:
    """A section with paths. A `~` at the start of a path becomes the home folder, however the section was made."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if "path" in f.metadata:
                object.__setattr__(self, f.name, expanded(getattr(self, f.name)))


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(_HasPaths):
    """How microbatches go through the pipeline."""

    name: str = field("auto", "`auto` is 1f1b, or interleaved where parallel.vpp is above 1.",
        choices=("auto", *SCHEDULES), needs="schedule.path=null")
    path: str | None = field(None, "A CSV file with a schedule of your own, which replaces `name`.", path="file")
    microbatch_group_size: int | None = field(None,
        "Microbatches that a rank runs on one chunk before the next (interleaving); None means pp.", ge=1,
        aliases="microbatch_group_size_per_vp_stage microbatch_group_size_per_virtual_pipeline_stage",
        needs=_INTERLEAVED)
    all_warmup: bool = field(False,
        "Interleaving with as many microbatches as pp: every rank runs all forwards before its first backward, as "
        "Megatron-LM did in 2023.", needs=_INTERLEAVED)
    overlap_p2p_comm: bool = field(False,
        "Interleaving: post receives early and overlap sends with the computation; not with batch_p2p_comm = true. "
        "Megatron sets batch_p2p_comm = false with it, which is the same here as null.")
    batch_p2p_comm: bool | None = field(None,
        "Transfers between stages: true issues those of a step as one batch, false one by one, even and odd ranks in "
        "opposite order; null posts receives early and overlaps sends with the computation.",
        needs="parallel.pp schedule.variable_seq_lengths=false")
    variable_seq_lengths: bool = field(False,
        "Exchange shapes before each tensor between stages, so receives are not posted early. On several ranks, also "
        "capture CUDA graphs of layers again when microbatches keep a new shape (a single rank always does). Nothing "
        "else reads it.")
    use_ring_exchange_p2p: bool = field(False, "Megatron's custom ring exchange; torch has none, so True is an error.")
    deallocate_pipeline_outputs: bool = field(True, "Free a sent activation, keeping only its autograd graph.",
        needs="parallel.pp")
    overlap_moe_expert_parallel_comm: bool = field(False,
        "Merge forwards with backwards of other microbatches, so that the all-to-alls of experts on either side are "
        "under way while the other side computes (1f1b, interleaved, dualpipe_v).",
        needs="moe.num_experts parallel.ep moe.dispatcher=alltoall")
    delay_wgrad_compute: bool = field(False,
        "In merged pairs compute weight gradients apart: those of experts behind the dispatch of the backward.",
        needs="schedule.overlap_moe_expert_parallel_comm=true")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts (arXiv 1701.06538); num_experts = 0 means a dense model. Experts have no bias."""

    num_experts: int = field(0, "Experts per MoE layer over all ranks; 0: dense.", ge=0, aliases="num_moe_experts",
        of_model=True)
    ffn_hidden: int | None = field(None, "Width of an expert; None: the MLP's.", ge=1, aliases="moe_ffn_hidden_size",
        of_model=True)
    layer_freq: tuple[int, ...] = field((1,),
        "1 for a layer with experts, 0 for a dense one, repeated over the layers. `1` is every layer, `1,0` every "
        "second one from the first, `0,1,1,1` in four layers all but the first.", aliases="moe_layer_freq",
        hint="; 1 is a layer with experts and 0 a dense one, repeated over the layers: Megatron's N = 2, one such "
        "layer in 2, is [1, 0], and its '[0]*1+[1]*3' is [0, 1, 1, 1]", of_model=True)
    top_k: int = field(2, "Experts that a token is sent to.", ge=1, aliases="moe_router_topk", of_model=True)
    score_function: str = field("softmax", "Scores from logits: `softmax` or `sigmoid` (arXiv 2412.19437).",
        choices="softmax sigmoid", aliases="moe_router_score_function", needs=_ROUTED, of_model=True)
    pre_softmax: bool = field(False,
        "Softmax over all experts before the top-k; False: top-k on logits, softmax over the chosen (as Mixtral).",
        aliases="moe_router_pre_softmax", needs=f"{_ROUTED} moe.score_function=softmax", of_model=True)
    num_groups: int | None = field(None, "Group-limited routing: groups of experts; a token uses group_topk of them.",
        ge=1, aliases="moe_router_num_groups", needs=_ROUTED, of_model=True)
    group_topk: int | None = field(None, "Groups that a token may use; given together with num_groups.", ge=1,
        aliases="moe_router_group_topk", needs=_ROUTED, of_model=True)
    topk_scaling_factor: float | None = field(None,
        "Multiplies the weights of the chosen experts; DeepSeek-V3 has 2.5 (arXiv 2412.19437). None is 1.", gt=0,
        aliases="moe_router_topk_scaling_factor", needs=_ROUTED, of_model=True)
    router_dtype: str = field("fp32",
        "Type of the router's product and scores; `model` is that of the activations. With optim.precision fp64 the "
        "type is fp64.", choices="fp32 fp64 model", aliases="moe_router_dtype")
    input_jitter: float = field(0.0,
        "The router's input is multiplied by numbers drawn from 1 - x to 1 + x (arXiv 2101.03961); 0 draws none.",
        ge=0, lt=1, aliases="moe_input_jitter_eps")
    load_balancing: str = field("aux_loss",
        "A loss over the micro batch (`aux_loss`, arXiv 2101.03961), each sequence (`seq_aux_loss`, arXiv 2405.04434) "
        "or the global batch so far (`global_aux_loss`, arXiv 2501.11873); `sinkhorn` assigns without a loss (arXiv "
        "2103.16716).",
        choices="aux_loss seq_aux_loss global_aux_loss sinkhorn none", aliases="moe_router_load_balancing_type")
    aux_loss_coeff: float = field(0.0, "Weight of the load-balancing loss; 0 adds none.", ge=0,
        aliases="moe_aux_loss_coeff", needs="moe.load_balancing=aux_loss|seq_aux_loss|global_aux_loss")
    z_loss_coeff: float = field(0.0, "Weight of the logits' mean squared log-sum-exp (arXiv 2202.08906).", ge=0,
        aliases="moe_z_loss_coeff")
    expert_bias: bool = field(False,
        "A bias on sigmoid scores that only the choice of experts sees, moved after each step against the load "
        "(loss-free balancing, arXiv 2408.15664).", aliases="moe_router_enable_expert_bias",
        needs=f"{_ROUTED} moe.score_function=sigmoid", of_model=True)
    expert_bias_update_rate: float = field(1e-3, "Step by which that bias moves.", gt=0,
        aliases="moe_router_bias_update_rate", needs="moe.expert_bias=true")
    capacity_factor: float | None = field(None,
        "An expert takes at most ceil(tokens x top_k / experts x capacity_factor) tokens of a rank; None: all.", gt=0,
        aliases="moe_expert_capacity_factor", needs=_ROUTED)
    drop_policy: str = field("probs", "A full expert keeps its best tokens (`probs`) or its first (`position`).",
        choices="probs position", aliases="moe_token_drop_policy", needs="moe.capacity_factor")
    pad_to_capacity: bool = field(False,
        "Every expert gets exactly its capacity, filled up with zeros of weight 0, so that all shapes are static.",
        aliases="moe_pad_expert_input_to_capacity", needs="moe.capacity_factor")
    dispatcher: str = field("alltoall",
        f"How tokens reach their experts: {in_words(DISPATCHERS, 'or')}.",
        choices=DISPATCHERS, aliases="moe_token_dispatcher_type")
    grouped_gemm: bool = field(True, "One grouped GEMM for all experts of a rank; False: one expert after the other.",
        aliases="moe_grouped_gemm")
    shared_expert_ffn_hidden: int | None = field(None,
        "Width of the experts that every token passes through, all together (arXiv 2401.06066); None: no such experts.",
        ge=1, aliases="moe_shared_expert_intermediate_size", of_model=True)
    shared_expert_gate: bool = field(False, "Weight the shared experts' output by the sigmoid of a gate of its own.",
        aliases="moe_use_shared_expert_gate moe_shared_expert_gate", needs="moe.shared_expert_ffn_hidden",
        of_model=True)
    shared_expert_overlap: bool = field(False, "Compute the shared experts while tokens travel.",
        aliases="moe_shared_expert_overlap", needs="moe.shared_expert_ffn_hidden moe.dispatcher=alltoall")

    def is_moe_layer(self, index: int) -> bool:
        """Return True if layer `index` of the whole model has experts."""
        return self.num_experts > 0 and self.layer_freq[index % len(self.layer_freq)] == 1


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """CUDA graphs: a computation is recorded once and then replayed, without Python."""

    cuda_graph_impl: str = field("none",
        "Graphs of layers: on a GPU `local` (torch's graphs) or `transformer_engine` (its `make_graphed_callables`); "
        "on the host `emulated`, with the same rules. `full_iteration`: one graph of all microbatches of a step, on a "
        "GPU torch's and on the host emulated.", choices="none local transformer_engine full_iteration emulated")
    cuda_graph_modules: tuple[str, ...] = field((),
        f"Parts of a layer to capture: {in_words(CAPTURED_PARTS, 'and')}; empty is the whole layer. "
        "`full_iteration` alone is Megatron's older form of cuda_graph_impl = full_iteration.",
        aliases="cuda_graph_scope")
    cuda_graph_warmup_steps: int = field(3, "Eager steps before capture.", ge=0,
        needs="graph.cuda_graph_impl=local|transformer_engine|full_iteration|emulated")

    @property
    def is_full_iteration(self) -> bool:
        """True if one graph contains a whole step. Megatron named that among the modules until #4292."""
        return "full_iteration" in (self.cuda_graph_impl, *self.cuda_graph_modules)


@dataclass(frozen=True, kw_only=True)
class DataConfig(_HasPaths):
    """Where the tokens come from."""

    path: str | None = field(None,
        "A UTF-8 text file, or the prefix of an indexed dataset PREFIX.bin and PREFIX.idx; None: the bundled text.",
        aliases="data_path", path="file", ending=".idx")
    blend: tuple[str, ...] = field((),
        "Indexed datasets, mixed by weight: weights and prefixes in turn, as in `0.3,books,0.7,news`. Prefixes alone, "
        "as in `books,news`: by size.", path="any")
    tokenizer: str | None = field(None,
        "A `tokenizers` JSON file, GPT-2's vocab.json (with merges.txt) or BERT's vocab.txt; None: the bundled BPE.",
        aliases="tokenizer_model vocab_file", path="file")
    split: str = field("90,5,5",
        "Shares of the text, or of the documents of an indexed dataset, for training, validation and test; if the "
        "third share is 0, no test runs.")
    num_samples: int | None = field(None,
        "Samples that are shuffled for training (of an indexed dataset, or for BERT and T5); None: train.steps x "
        "global_batch_size. A run that reads its documents more than once and is given more steps later keeps its "
        "order only if this number stays the same.", ge=1)
    cache: str | None = field(None,
        "Folder for the index arrays of indexed datasets; None: PREFIX.cache, if that can be written.",
        aliases="data_cache_path", path="folder")

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of train, valid and test, which sum to 1. Raises ValueError if `split` is not three such shares."""
        words = self.split.split(",")
        parts = [float(word) for word in words if _NUMBER.fullmatch(word.strip())]
        if len(words) != 3 or len(parts) != 3 or min(parts) < 0 or not 0 < sum(parts) < math.inf:
            raise ValueError(
                f"data.split: {self.split!r} is not three shares for train, valid and test; write them like '90,5,5'"
            )
        train, valid, test = (part / sum(parts) for part in parts)
        return train, valid, test

    @property
    def weighted(self) -> bool:
        """True if the blend has weights, that is, if one of its words is a number."""
        return any(map(_NUMBER.fullmatch, self.blend))

    @property
    def sources(self) -> list[tuple[float | None, str]]:
        """Weight (None: by size) and prefix of each indexed dataset; empty if a text is read."""
        if self.path is not None and not os.path.isfile(self.path) and os.path.isfile(f"{self.path}.idx"):
            return [(None, self.path)]
        if self.weighted:
            pairs = zip(self.blend[::2], self.blend[1::2])
            return [(float(weight) if _NUMBER.fullmatch(weight) else None, prefix) for weight, prefix in pairs]
        return [(None, prefix) for prefix in self.blend]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, the learning-rate schedule, clipping and precision."""

    lr: float = field(1e-3, "Peak learning rate.", ge=0)
    min_lr: float = field(0.0, "Learning rate at the end of the decay.", ge=0, needs=_DECAYS)
    lr_schedule: str = field("cosine", "Decay after the linear warm-up.",
        choices="constant cosine linear inverse-square-root wsd", aliases="lr_decay_style", synonyms={"WSD": "wsd"})
    warmup_steps: int = field(0, "Steps of linear warm-up.", ge=0, aliases="lr_warmup_iters")
    decay_steps: int | None = field(None, "Last step of the decay; None: train.steps.", ge=1, aliases="lr_decay_iters",
        needs=_DECAYS)
    wsd_decay_steps: int | None = field(None, "Steps of the tail of `wsd`; None: a tenth of decay_steps.", ge=1,
        aliases="lr_wsd_decay_iters", needs="optim.lr_schedule=wsd")
    wsd_decay_style: str = field("exponential", "Tail of `wsd`.", choices="exponential linear cosine minus-sqrt",
        aliases="lr_wsd_decay_style", synonyms={"minus_sqrt": "minus-sqrt"}, needs="optim.lr_schedule=wsd")
    weight_decay: float = field(0.01, "Decoupled weight decay (arXiv 1711.05101); biases and norms have none.", ge=0)
    beta1: float = field(0.9, "Adam's decay of the first moment.", ge=0, lt=1, aliases="adam_beta1")
    beta2: float = field(0.95, "Adam's decay of the second moment.", ge=0, lt=1, aliases="adam_beta2")
    eps: float = field(1e-8, "Adam's epsilon.", gt=0, aliases="adam_eps")
    clip_grad: float = field(1.0, "Largest global gradient norm; 0 does not clip.", ge=0)
    precision: str = field("fp32",
        "bf16 and fp16 have fp32 master weights and gradients (but see grad_reduce_in_bf16); fp16 scales the loss; "
        "fp64 is for parity.",
        choices="fp32 bf16 fp16 fp64", aliases="params_dtype",
        synonyms={"float32": "fp32", "bfloat16": "bf16", "float64": "fp64", "float16": "fp16"})
    loss_scale: float | None = field(None, "A constant factor of fp16's loss; None adapts it (arXiv 1710.03740).", ge=1,
        needs="optim.precision=fp16")
    initial_loss_scale: float = field(65536.0, "First adaptive loss scale.", gt=0, needs=_ADAPTIVE)
    min_loss_scale: float = field(1.0, "Smallest adaptive loss scale.", gt=0, needs=_ADAPTIVE)
    loss_scale_window: int = field(1000,
        "Steps in a row without overflow after which the scale doubles.", ge=1, needs=_ADAPTIVE)
    hysteresis: int = field(2, "Overflows before the scale is halved; the count restarts when it doubles.", ge=1,
        needs=_ADAPTIVE)
    fp8: str = field("none",
        "Formats of the products of linear layers and experts (arXiv 2209.05433); `hybrid`: e4m3 forward, e5m2 for "
        "gradients. Routers and the output layer keep their types.",
        choices="none e4m3 hybrid", aliases="fp8_format")
    fp8_recipe: str = field("delayed",
        "Scales of fp8 tensors: `delayed` (from a history of amax), `current` (of the tensor itself) or `blockwise` "
        "(of each block of 128 x 128 or 1 x 128 values; labkit's own layers simulate it by fp32 products).",
        choices="delayed current blockwise",
        synonyms={"tensorwise": "current"}, needs="optim.fp8=e4m3|hybrid")
    fp8_amax_history_len: int = field(16, "Steps in the amax history of `delayed`.", ge=1,
        needs=f"{_DELAYED} optim.fp8_amax_compute_algo=max")
    fp8_amax_compute_algo: str = field("max", "The entry of the history that `delayed` takes.",
        choices="max most_recent", needs=_DELAYED)
    fp8_margin: int = field(0, "`delayed` divides its scales by 2 to this power.", ge=0, le=64, needs=_DELAYED)
    gradient_accumulation_fusion: bool = field(True, "Linear layers' backward adds weight gradients into main_grad.")
    data_parallel: str = field("bucketed",
        "`bucketed` (gradient buffers cut into buckets that are reduced during the backward) or `naive` (one buffer, "
        "reduced at the end: the simple version, for teaching and checks).", choices="bucketed naive")
    bucket_size: int | None = field(None,
        "Elements after which a bucket is closed; None is max(40,000,000, 1,000,000 x dp). Without overlap there is "
        "only one bucket.",
        ge=1, aliases="ddp_bucket_size", needs="optim.data_parallel=bucketed optim.overlap_grad_reduce=true")
    overlap_grad_reduce: bool = field(True, "Reduce a bucket as soon as the backward has filled it.")
    grad_reduce_in_bf16: bool = field(False,
        "Gradient buffers in bf16 instead of fp32: 2 fewer bytes per parameter and half the traffic, but sums over "
        "microbatches and ranks keep only bf16's 8 significant bits. The optimizer still updates in fp32.",
        needs="optim.precision=bf16 optim.data_parallel=bucketed")
    average_in_collective: bool = field(False, "The collective averages; False: gradients are scaled, then summed.",
        aliases="ddp_average_in_collective", needs="optim.data_parallel=bucketed")
    calculate_per_token_loss: bool = field(False,
        "Divide the summed gradient once by the global batch's tokens; False: each microbatch's loss is its own mean.")
    distributed_optimizer: bool = field(False, "Shard optimizer state over dp ranks (ZeRO-1, arXiv 1910.02054).",
        aliases="use_distributed_optimizer", needs="optim.data_parallel=bucketed")
    overlap_param_gather: bool = field(False,
        "Overlap the gathering of parameters with the next forward, bucket by bucket.",
        needs="optim.distributed_optimizer=true")
    num_distributed_optimizer_instances: int = field(1,
        "Number of groups into which data-parallel ranks are split: reduce-scatter and shards within a group, "
        "all-reduce across groups.",
        ge=1, needs="optim.distributed_optimizer=true")
    check_for_nan_in_grad: bool = field(True,
        "Name the parameter and the rank where a gradient of a skipped step is not finite.",
        aliases="check_for_nan_in_loss_and_grad")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_HasPaths):
    """Steps, batches, seeds and reports."""

    steps: int = field(20, "Optimizer steps.", ge=1, aliases="train_iters")
    micro_batch_size: int = field(1, "Samples of one forward pass on one data-parallel rank.", ge=1)
    global_batch_size: int = field(16, "Samples of one optimizer step over all ranks.", ge=1)
    seed: int = field(1234, "Seed of weights, dropout and data order.", ge=0, le=2**32 - 1, aliases="random_seed")
    on_not_finite: str = field("stop",
        "A loss or gradient that is not finite ends the run (`stop`), or all ranks skip the step (`skip`) and ten such "
        "steps in a row end the run. Adaptive loss scales always skip a gradient's overflow.", choices="stop skip")
    label_smoothing: float = field(0.0,
        "Share of the target that training spreads over all tokens except padding.", ge=0, lt=1)
    eval_interval: int = field(0, "Steps between validations; 0 validates only at the end.", ge=0,
        needs="train.eval_steps")
    eval_steps: int = field(0, "Global batches of one validation; 0 turns validation off.", ge=0, aliases="eval_iters")
    log_interval: int = field(1, "Steps between lines of metrics.jsonl.", ge=1)
    timing_log_level: int = field(0, "Detail of the named timers.", ge=0, le=2)
    record_events: bool = field(True,
        "Keep an Event of every forward, backward, send, receive and collective for `TrainResult.events`; on a GPU "
        "each waits for the device. `labkit train` returns none and records only for --trace.")
    keep_event_steps: int = field(100,
        "Last steps whose Events stay in memory for TrainResult.events (with record_events) and for --trace.", ge=1)
    write_events: bool = field(False, "Write the Events of all steps and ranks to events.jsonl, often 0.5 MB per step.",
        needs="train.output_dir")
    event_interval: int = field(1,
        "Steps from one whose Events are written to the next; in between `labkit train` records none.", ge=1,
        needs="train.write_events=true")
    profile: str = field("none",
        "Profile some steps: `pytorch` writes a torch.profiler trace per profiled rank (profile-rankN.json) to "
        "output_dir; `nsys` starts and stops Nsight Systems and emits NVTX ranges.",
        choices="none pytorch nsys")
    profile_step_start: int = field(10, "The profile starts after this many steps.", ge=0, needs=_PROFILED)
    profile_step_end: int = field(12, "Last step of the profile.", ge=1, needs=_PROFILED)
    profile_ranks: tuple[int, ...] = field((0,), "Ranks that are profiled; empty: all.", needs=_PROFILED)
    output_dir: str | None = field(None,
        "Folder of the run: configuration, state, metrics, traces, checkpoints; None writes nothing. One run at a time "
        "writes into it, and a folder that already holds a run is rejected.", path="folder")
    loggers: tuple[str, ...] = field((),
        f"Where rank 0 also sends the numbers of scalars.jsonl: {', '.join(LOGGERS)}. Each needs the package of its "
        "name. wandb and mlflow read their own environment variables, such as WANDB_PROJECT and MLFLOW_TRACKING_URI.")
    tensorboard_dir: str | None = field(None,
        "Folder of the logger tensorboard, which need not be named then; None is the folder tensorboard in "
        "train.output_dir.", path="folder")
    overwrite: bool = field(False, "Replace the files of an earlier run in output_dir; other files there stay.",
        needs="train.output_dir")
    allow_oversubscription: bool = field(False, "Start a run that is predicted to need more memory than is available.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_HasPaths):
    """Saved states of a run, from which it or another run can continue, under any layout."""

    dir: str | None = field(None,
        "Folder of the run's checkpoints; None is the folder checkpoints in train.output_dir if checkpoint.interval is "
        "given, otherwise nothing is saved. One run at a time saves into it.", aliases="save", path="folder")
    interval: int | None = field(None, "Steps between checkpoints; the last step always has one. None is 100 if "
        "checkpoint.dir is given.", ge=1, aliases="save_interval", needs="checkpoint.dir|train.output_dir")
    keep: int = field(2, "How many checkpoints to keep; older ones are removed.", ge=1, needs=_SAVES)
    asynchronous: bool = field(False, "Write a copy while later steps run.", aliases="async_save", needs=_SAVES)
    load: str | None = field(None, "`none` starts anew; `latest` resumes from the run's own checkpoints; null does so "
        "if there are any. Or the folder of another run or of its checkpoints, or one step.", none="", path="any")


class ExtraConfig(SimpleNamespace):
    """Fields of a script's own, which labkit keeps and the script reads: `config.extra.NAME`."""

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        return hash(tuple(sorted(vars(self).items())))


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All sections; `RunConfig` adds what you can do with them."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    graph: GraphConfig = dataclasses.field(default_factory=GraphConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    extra: ExtraConfig = dataclasses.field(default_factory=ExtraConfig)
    extra_specs: dict[str, FieldSpec] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """The fields in `extra` that a script has declared, by dotted name (`RunConfig.with_extra`). This is no section."""


SECTIONS: dict[str, type] = {name: type(section) for name, section in vars(Sections()).items() if name != "extra_specs"}
"""Class of each section by its name, in their order in a file."""
