"""The sections of a run's configuration, as frozen dataclasses.

One section per concern. Each field is documented in the string under it; units are in the text. These strings are
the command line's help and the reference page (`docs/config.md`).
The names are the field's (Megatron's where it has one), in short form: `tp cp ep etp dp edp pp vpp`.
A field's type is one of `int`, `float`, `bool`, `str`, `tuple[str, ...]`, `tuple[int, ...]`, or one of them `| None`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model. Defaults give a small GPT-2."""

    family: str = "gpt"
    """Which model: `gpt` (BERT and T5 arrive with their chapters)."""
    layers: int = 4
    """Transformer layers of the whole model, over all stages."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention (query) heads; `hidden / heads` is the head dimension."""
    kv_heads: int | None = None
    """Key/value heads of grouped-query attention (arXiv 2305.13245), a multiple or a divisor of tp; None means `heads`.
    Of fewer than tp, neighbouring ranks hold copies, whose gradients are summed."""
    ffn_hidden: int | None = None
    """Width of the MLP; None means 4 x hidden."""
    vocab_size: int = 1024
    """Tokens of the vocabulary before padding; at least those of the tokenizer (1024: the bundled one's)."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times tp; padded columns never enter the loss."""
    seq_length: int = 64
    """Tokens of one sample."""
    position: str = "learned"
    """Position encoding: `learned` (an embedding table of seq_length rows) or `rope` (arXiv 2104.09864)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm: str = "layernorm"
    """`layernorm` or `rmsnorm` (arXiv 1910.07467)."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norm."""
    activation: str = "gelu_tanh"
    """`gelu` (erf), `gelu_tanh` (GPT-2's) or `swiglu` (arXiv 2002.05202)."""
    bias: bool = True
    """Whether linear layers carry a bias."""
    untie_embeddings_and_output_weights: bool = False
    """False: the output layer is the word embedding's transpose, shared by first and last stage."""
    embedding_dropout: float = 0.0
    """Dropout after the embeddings."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities, inside the tensor-parallel region."""
    hidden_dropout: float = 0.0
    """Dropout before each residual addition, outside the tensor-parallel region."""
    init_std: float = 0.02
    """Weights are N(0, init_std); residual projections are scaled by 1/sqrt(2 x layers)."""
    use_cpu_initialization: bool = True
    """Every rank draws whole weights on the host, the same in every layout, and keeps its part. False: it draws its
    part alone, on its device; that is fast, but two layouts start from different numbers."""
    transformer_impl: str = "local"
    """`local`: labkit's own layers; `transformer_engine`: NVIDIA's, on GPUs that have them installed."""
    attention_backend: str = "fused"
    """`fused`: one kernel (scaled_dot_product_attention), which keeps no probabilities; `unfused`: one operation after
    the other, which keeps the 5 a s / h of arXiv 2205.05198."""
    recompute_granularity: str = "none"
    """Activations computed again in backward: `none`, `selective` (the parts in recompute_modules) or `full` (whole
    layers, of which only the inputs are kept)."""
    recompute_method: str = "uniform"
    """With `full`: `uniform` keeps the input of every group of recompute_num_layers layers; `block` recomputes the
    first recompute_num_layers layers of each chunk one by one, and no other."""
    recompute_num_layers: int = 1
    """See recompute_method."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """With `selective`: any of `core_attn` (softmax and both products), `mlp`, `layernorm`, `moe` (whole MoE layers)
    and `shared_experts`."""
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    """Of the microbatches in flight on a rank, so many keep everything; the others are recomputed as configured
    (arXiv 2205.05198, appendix C). None recomputes all, as 0 does."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout. Data parallelism is what is left of the world: dp = world / (tp cp pp)."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size (stages on different ranks)."""
    vpp: int = 1
    """Virtual pipeline size: model chunks on each rank. Schedules that fix this number (zbv, dualpipe_v, a file) take
    1 for it as well."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size."""
    etp: int | None = None
    """Tensor parallel size inside experts; None means tp."""
    order: str = "tp-cp-ep-dp-pp"
    """Axes from fastest to slowest varying over ranks."""
    rank_offset: int = 0
    """Number of the first global rank of this layout."""
    cp_comm_type: str = "p2p"
    """Context parallelism: `p2p` sends keys and values round a ring (arXiv 2310.01889), `all_gather` collects them."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel regions (arXiv 2205.05198)."""
    split_rank: int | None = None
    """First pipeline rank of the decoder in an encoder-decoder model."""
    standalone_embedding_stage: bool = False
    """The first stage holds the embedding and no layer; the others share the layers."""
    pipeline_layout: str | None = None
    """What each stage holds, as in `Ettt|tttt|tttt|tttL`: E embedding, t a layer, L final norm and loss, | between
    stages; `t*3` and `(tt|)*2` repeat. A stage of no letters is empty. None shares the layers equally."""
    distributed_backend: str = "auto"
    """`auto` (nccl where each rank has a GPU of its own, gloo otherwise), `gloo` or `nccl`."""
    distributed_timeout_minutes: float = 10.0
    """Minutes that a collective may wait before the run is ended."""

    @property
    def smallest_world_size(self) -> int:
        """Fewest ranks that both generators can lay out: lcm(tp cp pp, etp ep pp)."""
        etp = self.tp if self.etp is None else self.etp
        return math.lcm(self.tp * self.cp * self.pp, etp * self.ep * self.pp)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How microbatches move through the pipeline."""

    name: str = "auto"
    """`auto`, `gpipe`, `1f1b`, `interleaved`, `zero_bubble_h1`, `zbv` or `dualpipe_v`; auto is 1f1b, or interleaved
    where parallel.vpp is above 1."""
    path: str | None = None
    """A CSV file with a schedule of one's own; takes the place of `name`."""
    microbatch_group_size: int | None = None
    """Microbatches a rank runs on one chunk before the next (interleaving); None means pp."""
    all_warmup: bool = False
    """Interleaving with as many microbatches as pp: every rank runs all forwards before its first backward, as
    Megatron-LM did in 2023."""
    overlap_p2p_comm: bool = False
    """Post receives ahead and let sends run behind the computation; for the interleaved schedule, and not with
    batch_p2p_comm = true."""
    batch_p2p_comm: bool | None = None
    """Transfers between stages: true issues those of a step as one batch, false one by one, even and odd ranks in
    opposite order; null posts receives ahead and lets sends run behind the computation."""
    variable_seq_lengths: bool = False
    """Exchange shapes before each tensor. With CUDA graphs of layers on several ranks, capture them anew where
    microbatches stay in another shape (one rank alone always does)."""
    use_ring_exchange_p2p: bool = False
    """Megatron's custom ring exchange; torch has none, so True is refused."""
    deallocate_pipeline_outputs: bool = True
    """Free a sent activation, keeping only its graph."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts (arXiv 1701.06538); num_experts = 0 means a dense model. Experts have no bias."""

    num_experts: int = 0
    """Experts per MoE layer over all ranks; 0 is a dense model."""
    ffn_hidden: int | None = None
    """Width of one expert; None means the dense width, model.ffn_hidden."""
    layer_freq: tuple[int, ...] = (1,)
    """Which layers have experts: 1 experts, 0 dense, repeated over the layers. `1` is every layer, `1,0` every second
    one from the first, `0,1,1,1` in four layers all but the first."""
    top_k: int = 2
    """Experts a token is sent to."""
    score_function: str = "softmax"
    """Scores from logits: `softmax` or `sigmoid` (arXiv 2412.19437)."""
    pre_softmax: bool = False
    """Softmax over all experts before the top-k; False: top-k on logits, softmax over the chosen (as Mixtral)."""
    num_groups: int | None = None
    """Group-limited routing: experts are cut into so many groups, and a token's experts come from group_topk of
    them."""
    group_topk: int | None = None
    """Groups that a token may choose from; given together with num_groups."""
    topk_scaling_factor: float | None = None
    """Multiplies the weights of the chosen experts; DeepSeek-V3 has 2.5 (arXiv 2412.19437). None is 1."""
    router_dtype: str = "fp32"
    """Type of the router's product and scores: `fp32`, `fp64` or `model` (that of the activations). With
    optim.precision fp64 it is fp64."""
    input_jitter: float = 0.0
    """The router's input is multiplied by numbers drawn from 1 - x to 1 + x (arXiv 2101.03961); 0 draws none."""
    load_balancing: str = "aux_loss"
    """What evens the load: `aux_loss` (over the micro batch, arXiv 2101.03961), `seq_aux_loss` (each sequence by
    itself, arXiv 2405.04434), `global_aux_loss` (over the global batch so far, arXiv 2501.11873), `sinkhorn`
    (by assignment, no loss; arXiv 2103.16716) or `none`."""
    aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss; 0 adds none."""
    z_loss_coeff: float = 0.0
    """Weight of the mean squared log-sum-exp of the logits (arXiv 2202.08906); 0 adds none."""
    expert_bias: bool = False
    """A bias on sigmoid scores that only the choice of experts sees, moved after each step against the load (loss-free
    balancing, arXiv 2408.15664)."""
    expert_bias_update_rate: float = 1e-3
    """Step of that bias."""
    capacity_factor: float | None = None
    """An expert takes at most ceil(tokens x top_k / experts x capacity_factor) tokens of a rank; None drops nothing."""
    drop_policy: str = "probs"
    """What a full expert keeps: `probs`, its best, or `position`, its first."""
    pad_to_capacity: bool = False
    """Every expert gets exactly its capacity, filled up with zeros of weight 0, so that all shapes are static."""
    dispatcher: str = "alltoall"
    """How tokens reach their experts: `alltoall`, `allgather` (each rank sees all tokens), or `local` (one rank has all
    experts: ep = etp = 1)."""
    grouped_gemm: bool = True
    """All experts of a rank in one grouped product; False computes them one after the other."""
    shared_expert_ffn_hidden: int | None = None
    """Width of the experts that every token passes through, all together (arXiv 2401.06066); None means there is
    none."""
    shared_expert_gate: bool = False
    """Weight the shared experts' output by the sigmoid of a gate of its own."""
    shared_expert_overlap: bool = False
    """Compute the shared experts while tokens travel (dispatcher alltoall)."""

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` of the whole model has experts."""
        return self.num_experts > 0 and self.layer_freq[index % len(self.layer_freq)] == 1


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """CUDA graphs: what is computed is recorded once and then replayed, without Python."""

    cuda_graph_impl: str = "none"
    """`none`; on a GPU `local` (torch's graphs) or `transformer_engine` (its `make_graphed_callables`); on the host
    `emulated`, with the same rules."""
    cuda_graph_scope: tuple[str, ...] = ()
    """Parts of a layer to capture: `attn`, `mlp` (of dense layers), `moe` (drop-and-pad only), `moe_router`,
    `moe_preprocess`; empty is the whole layer. `full_iteration`, alone: all microbatches of a step in one graph."""
    cuda_graph_warmup_steps: int = 3
    """Eager steps before capture."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    path: str | None = None
    """A UTF-8 text file; None is the bundled public-domain text."""
    tokenizer: str | None = None
    """A `tokenizers` JSON file; None is the bundled byte-level BPE."""
    split: str = "90,5,5"
    """Shares of the text for training, validation and test, in this order; without a test share no test is run."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, the learning-rate schedule, clipping and precision."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_schedule: str = "cosine"
    """`constant`, `cosine`, `linear`, `inverse-square-root` or `wsd` (after the linear warm-up)."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """Step at which the decay ends; None means train.steps."""
    wsd_decay_steps: int | None = None
    """Length of the last, decaying phase of `wsd`, in steps; None means a tenth of decay_steps."""
    wsd_decay_style: str = "exponential"
    """Tail of `wsd`: `exponential`, `linear`, `cosine` or `minus-sqrt`."""
    weight_decay: float = 0.01
    """Decoupled weight decay (arXiv 1711.05101); biases and norms have none."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    precision: str = "fp32"
    """`fp32`, `bf16` or `fp16` (both with fp32 master weights and gradients; fp16 scales the loss), or `fp64` (for
    parity)."""
    loss_scale: float | None = None
    """fp16: a constant factor of the loss, at least 1; None adapts it (arXiv 1710.03740)."""
    initial_loss_scale: float = 65536.0
    """Adaptive loss scale: at the start."""
    min_loss_scale: float = 1.0
    """Adaptive loss scale: never below."""
    loss_scale_window: int = 1000
    """Adaptive loss scale: doubled after so many good steps in a row."""
    hysteresis: int = 2
    """Adaptive loss scale: overflows before it is halved; once used up, only a doubling restores them."""
    fp8: str = "none"
    """Formats of the linear layers' GEMMs (arXiv 2209.05433): `none`, `e4m3`, or `hybrid` (e4m3 forward, e5m2 for
    gradients)."""
    fp8_recipe: str = "delayed"
    """Scales of fp8 tensors: `delayed` (from a history of amax), `current` (of the tensor itself) or `blockwise` (of
    each block of 128 x 128 or 1 x 128 values)."""
    fp8_amax_history_len: int = 16
    """Steps of the history of `delayed`."""
    fp8_amax_compute_algo: str = "max"
    """What `delayed` takes from the history: `max` or `most_recent`."""
    fp8_margin: int = 0
    """Powers of two by which `delayed` scales lower than the largest value would allow."""
    gradient_accumulation_fusion: bool = True
    """Weight gradients are added into main_grad by the linear layers' own backward."""
    data_parallel: str = "bucketed"
    """`bucketed` (gradient buffers cut into buckets that are reduced behind the backward) or `naive` (one buffer,
    reduced at the end: the twin that teaches and checks)."""
    bucket_size: int | None = None
    """Elements after which a bucket is closed; None is max(40,000,000, 1,000,000 x dp). Without overlap all is one."""
    overlap_grad_reduce: bool = True
    """Reduce a bucket as soon as the backward has filled it."""
    average_in_collective: bool = False
    """Average by the collective itself; otherwise gradients are scaled first and summed."""
    calculate_per_token_loss: bool = False
    """Divide the summed gradient once by the number of tokens of the global batch; otherwise each microbatch's loss is
    its own mean."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks (ZeRO-1, arXiv 1910.02054)."""
    overlap_param_gather: bool = False
    """Distributed optimizer: gather parameters behind the next forward, bucket by bucket."""
    num_distributed_optimizer_instances: int = 1
    """Data-parallel ranks are cut into so many groups: reduce-scatter and shards within a group, all-reduce across."""
    check_for_nan_in_grad: bool = True
    """Name the parameter and the rank where a gradient is not finite. Either way all ranks skip the step; ten of them
    in a row, with no smaller loss scale to try, end the run."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batches, seeds and reports."""

    steps: int = 20
    """Optimizer steps."""
    micro_batch_size: int = 1
    """Samples of one forward pass on one data-parallel rank."""
    global_batch_size: int = 16
    """Samples of one optimizer step over all ranks."""
    seed: int = 1234
    """Of weights, dropout and data order."""
    label_smoothing: float = 0.0
    """Share of the target given to all tokens of the (global, unpadded) vocabulary."""
    eval_interval: int = 0
    """Steps between validations; 0 validates only at the end."""
    eval_steps: int = 0
    """Global batches of one validation; 0 does none."""
    log_interval: int = 1
    """Steps between lines of metrics.jsonl."""
    timing_log_level: int = 0
    """0, 1 or 2: how fine the named timers are."""
    record_events: bool = True
    """Keep an Event of every forward, backward, send, receive and collective for `TrainResult.events`; on a GPU each
    waits for the device. `labkit train` returns none and records for --trace alone."""
    keep_event_steps: int = 100
    """Steps whose Events stay in memory for `TrainResult.events` and --trace, counted from the end."""
    write_events: bool = False
    """Write the Events of all steps and ranks to events.jsonl, often 0.5 MB a step; needs train.output_dir."""
    output_dir: str | None = None
    """Folder for metrics.jsonl and scalars.jsonl; None writes nothing. One run at a time writes into it, and one that
    holds a run already is refused."""
    overwrite: bool = False
    """Replace the files of an earlier run in output_dir; other files there stay."""
    allow_oversubscription: bool = False
    """Start even where the sum of weights, gradients, optimizer and activations exceeds the memory that is
    available."""


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "schedule": ScheduleConfig,
    "moe": MoEConfig,
    "graph": GraphConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
}
"""Sections of a `RunConfig` by name, in their order in a file."""
