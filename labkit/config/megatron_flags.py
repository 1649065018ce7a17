"""Flags of Megatron-LM that are no field here: what they set, what to write instead, and what labkit lacks.

Most of its flags are the name or an alias of a field (`labkit.config.fields`), and need nothing from this module.
Source: the parser of megatron/training/arguments.py in core_v0.16.1 and core_v0.19.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from labkit.config.sections import Sections

SWITCHES: dict[str, dict[str, str]] = {
    "bf16": {"optim.precision": "bf16"},
    "fp16": {"optim.precision": "fp16"},
    "swiglu": {"model.activation": "swiglu"},
    "openai_gelu": {"model.activation": "gelu_tanh"},
    "use_flash_attn": {"model.attention_backend": "flash"},
    "disable_bias_linear": {"model.bias": "false"},
    "group_query_attention": {},
    "use_rotary_position_embeddings": {"model.position": "rope"},
    "bert_no_binary_head": {"model.bert_binary_head": "false"},
    "recompute_activations": {"model.recompute_granularity": "selective"},
    "no_gradient_accumulation_fusion": {"optim.gradient_accumulation_fusion": "false"},
    "accumulate_allreduce_grads_in_fp32": {"optim.grad_reduce_in_bf16": "false"},
    "no_check_for_nan_in_loss_and_grad": {"optim.check_for_nan_in_grad": "false"},
    "no_overlap_p2p_communication": {"schedule.overlap_p2p_comm": "false", "schedule.batch_p2p_comm": "true"},
    "use_tp_pp_dp_mapping": {"parallel.order": "tp-cp-ep-pp-dp"},
    "enable_cuda_graph": {"graph.cuda_graph_impl": "local"},
    "external_cuda_graph": {"graph.cuda_graph_impl": "transformer_engine"},
}
"""Flag without a value -> the fields that it sets, as the command line writes them. `derived` sets more for some."""
CHUNK = "num_layers_per_virtual_pipeline_stage"
"""The flag that gives the layers of a virtual stage, whereas `parallel.vpp` gives the virtual stages of a rank."""
POSITIONS = "max_position_embeddings"
"""The flag that gives the rows of the table of positions, which here are `model.seq_length`."""
NUMBERS = (CHUNK, POSITIONS)

_LAYOUT = "set parallel.pipeline_layout, which gives the layers of every stage, as in"
DIFFERENT: dict[str, str] = {
    "grad_reduce_in_fp32": "gradients are reduced in fp32 unless optim.grad_reduce_in_bf16 is true",
    "use_pytorch_profiler": "set train.profile to pytorch, or to nsys for Nsight Systems",
    "decoder_first_pipeline_num_layers": f'{_LAYOUT} "E t | ttt | ttt L" for a first stage of one layer',
    "decoder_last_pipeline_num_layers": f'{_LAYOUT} "E ttt | ttt | t L" for a last stage of one layer',
    "account_for_embedding_in_pipeline_split": f'{_LAYOUT} "E t | tt | tt L", one layer fewer by the embedding',
    "account_for_loss_in_pipeline_split": f'{_LAYOUT} "E tt | tt | t L", one layer fewer by the loss',
    "train_samples": "labkit counts steps; set train.steps to samples / global batch size",
    "lr_decay_samples": "labkit counts steps; set optim.decay_steps to samples / global batch size",
    "lr_warmup_samples": "labkit counts steps; set optim.warmup_steps to samples / global batch size",
    "lr_wsd_decay_samples": "labkit counts steps; set optim.wsd_decay_steps to samples / global batch size",
    "lr_warmup_fraction": "labkit counts steps; set optim.warmup_steps to this fraction of optim.decay_steps",
    "exit_interval": "set train.steps to the step at which to stop, and optim.decay_steps to the whole run's",
    "kv_channels": "a head is model.hidden / model.heads wide; change these, or leave it out",
    "no_position_embedding": "it goes only with rotary positions, which need no table; leave it out",
    "apply_layernorm_1p": "a norm's weight is stored whole and not less 1, which is the same function; leave it out",
    "no_bias_gelu_fusion": "without its fused kernel Megatron-LM computes GELU by erf: set model.activation to gelu",
    "moe_layer_recompute": "set model.recompute_granularity to selective and model.recompute_modules to moe",
    "checkpoint_activations": "set model.recompute_granularity to full",
    "batch_size": "set train.micro_batch_size",
    "model_parallel_size": "set parallel.tp",
    "hybrid_layer_pattern": "set model.hybrid_override_pattern, with the letters M, * and -",
    "optimizer": "labkit trains with AdamW, which is Megatron-LM's adam; leave it out",
    "merge_file": "merges.txt is read from the folder of vocab.json; leave it out",
    "spec": "a layer spec of your own is an argument of labkit.train.pretrain (docs/models.md)",
    "exit_signal_handler": "labkit always saves a checkpoint when SIGTERM ends a run that has a folder for it; "
    "leave it out",
}
"""Flag -> what to write in labkit, which says the same thing in another way."""

LACKING: dict[str, str] = {
    "labkit has only multi-head and grouped-query attention": "add_qkv_bias attention_output_gate "
    "apply_query_key_layer_scaling qk_clip qk_clip_alpha qk_clip_threshold qk_l2_norm qk_layernorm softmax_type "
    "apply_wd_to_qk_layernorm window_size window_attn_skip_freq experimental_attention_variant dsa_* flash_decode "
    "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads "
    "linear_value_head_dim multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
    "v_head_dim cache_mla_latents mla_down_proj_fusion no_dsa_indexer_* disable_dsa_indexer_* use_kitchen_attention "
    "kitchen_attention_backend",
    "rotary positions rotate whole heads, and their frequencies are not scaled": "rotary_percent rotary_interleaved "
    "rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor rope_type rotary_scaling_factor mscale "
    "mscale_all_dim mrope_section no_rope_freq yarn_* no_yarn_*",
    "model.activation lists the activations that labkit has": "squared_relu quick_geglu glu_linear_offset "
    "activation_func_clamp_value use_fused_weighted_squared_relu",
    "labkit predicts one token at a time": "mtp_*",
    "labkit runs without user buffers of Transformer Engine; `labkit plan` can count on them": "tp_comm_* "
    "no_tp_comm_* disable_tp_comm_*",
    "of ZeRO, labkit shards the optimizer's states (--use-distributed-optimizer)": "use_torch_fsdp2 "
    "use_megatron_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer "
    "fsdp_manual_registration torch_fsdp2_no_reshard_after_forward enable_full_sharding_in_hsdp "
    "no_strict_fsdp_dtensor_load disable_strict_fsdp_dtensor_load suggested_communication_unit_size "
    "keep_fp8_transpose_cache init_model_with_meta_device megatron_fsdp_* fsdp_db_use_persist_buf_on_alloc_fail",
    "labkit's optimizer is plain AdamW, whose fields are in the section optim": "sgd_momentum muon_* lion_* "
    "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
    "overlap_cpu_optimizer_d2h_h2d no_pin_cpu_grads no_pin_cpu_params use_precision_aware_optimizer main_grads_dtype "
    "main_params_dtype exp_avg_dtype exp_avg_sq_dtype decoupled_lr decoupled_min_lr dump_param_to_param_group_map "
    "no_weight_decay_cond_type start_weight_decay end_weight_decay weight_decay_incr_style lr_warmup_init "
    "override_opt_param_scheduler",
    "the global batch keeps its size for the whole run": "rampup_batch_size decrease_batch_size_if_needed "
    "phase_transition_iterations step_batch_size_schedule",
    "labkit reads data.path or data.blend, and data.split divides it": "train_data_path valid_data_path test_data_path "
    "data_args_path per_split_data_args_path per_dataset_sequences_path mid_level_dataset_surplus reset_position_ids "
    "reset_attention_mask eod_mask_loss multiple_validation_sets full_validation mask_prob short_seq_prob "
    "sample_rate allow_ambiguous_pad_tokens fim_* start_eval_at_iter eval_global_batch_size eval_micro_batch_size "
    "validation_set_names dataloader_inter_document_masking",
    "fp8 has the fields optim.fp8 and those that begin with it": "fp4_format fp4_param_gather fp4_quantizer_factory "
    "fp4_recipe fp8_param_gather fp8_quantizer_factory no_fp8_wgrad disable_fp8_wgrad first_last_layers_bf16 "
    "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 te_precision_config_file "
    "reuse_grad_buf_for_mxfp8_param_ag fp8_output_proj",
    "labkit fills up the rows of each expert to a multiple of 16 inside its fp8 products": "moe_router_padding_for_fp8 "
    "moe_router_padding_for_quantization",
    "the section moe has all that labkit's experts can do": "moe_enable_deepep moe_flex_dispatcher_backend "
    "moe_deepep_num_sms moe_apply_probs_on_input moe_latent_size moe_enable_routing_replay "
    "moe_router_force_load_balancing "
    "moe_use_upcycling moe_upcycling_granularity moe_pad_experts_for_cuda_graph_inference moe_extended_tp "
    "ep_overlap_early_attn_memory_release moe_router_quantile_balancing_ema "
    "overlap_dispatch_backward_with_experts_wgrad moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size "
    "moe_router_force_biased moe_single_grouped_weight moe_single_grouped_bias moe_permute_fusion_into_hybridep "
    "moe_hybridep_* moe_ncclep_* moe_flex_dispatcher_num_sms moe_expert_rank_capacity_factor moe_paged_stash*",
    "labkit computes activations again (--recompute-granularity) but does not move them": "cpu_offloading_num_layers "
    "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size distribute_saved_activations "
    "cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks "
    "activation_offload_fraction fine_grained_offloading_max_inflight_offloads",
    "labkit has no reinforcement learning": "rl_* no_rl_* grpo_* langrl_* no_langrl_external_server perform_rl_step "
    "refit_method",
    "labkit trains GPT, BERT, T5 and Mamba models": "vision_* dino_* img_h img_w patch_dim num_channels num_classes "
    "classes_fraction data_per_class_fraction head_lr_mult iter_per_epoch mask_factor mask_type no_data_sharding "
    "swin_backbone_type biencoder_* ict_head_size ict_load bert_load bert_embedder_type block_data_path "
    "embedding_path evidence_data_path indexer_batch_size indexer_log_interval query_in_block_prob retriever_* "
    "titles_data_path use_one_sent_docs sft sft_tokenizer_prompt_format heterogeneous_*",
    "": "apply_residual_connection_post_layernorm fp32_residual_connection fp16_lm_cross_entropy "
    "embedding_init_method_std init_method_xavier_uniform no_initialization data_parallel_random_init "
    "create_all_gather_group ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw "
    "ddp_reduce_scatter_with_fp32_accumulation no_gradient_reduce_div_fusion defer_embedding_wgrad_compute "
    "wgrad_deferral_limit deterministic_mode disable_symmetric_registration enable_experimental "
    "fake_process_group hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank "
    "hybrid_attention_ratio hybrid_mlp_ratio is_hybrid_model lazy_mpu_init local_rank nccl_communicator_config_path "
    "no_align_grad_reduce no_align_param_gather no_clone_scatter_output_in_embedding "
    "disable_clone_scatter_output_in_embedding no_scatter_gather_tensors_in_pipeline onnx_safe "
    "overlap_p2p_communication_warmup_flush overlap_param_gather_with_optimizer_step "
    "pipeline_model_parallel_comm_backend sharp_enabled_group use_sharp use_nccl_ub test_mode train_sync_interval "
    "use_legacy_models warmup yaml_cfg tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards "
    "use_mup mup_* optimizer_cuda_graph mlp_chunks_for_training freeze_all_layers mamba_training_ssm_states_dtype "
    "disable_align_grad_reduce ddp_param_name_patterns_for_fp32_local_accumulation no_use_layer_wise_param_layout "
    "logits_save_* logits_load_* vocab_extra_ids padded_vocab_size "
    "finetune pretrained_checkpoint save_retain_interval exit_duration_in_mins",
}
"""Why labkit lacks a flag -> the names of such flags; one that ends with `*` is the beginning of several."""
NEEDLESS: dict[str, str] = {
    "labkit's checkpoints have one format, which every layout can load (docs/checkpoints.md)": "ckpt_format "
    "ckpt_step ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save "
    "ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_load ckpt_fully_parallel_save "
    "no_ckpt_fully_parallel_save disable_ckpt_fully_parallel_save dist_ckpt_* use_dist_ckpt "
    "distrib_optim_fully_reshardable_mem_efficient auto_detect_ckpt_format no_save_optim no_save_rng no_load_optim "
    "no_load_rng load_main_params_from_ckpt use_checkpoint_args use_mp_args_from_checkpoint_args "
    "no_use_tokenizer_model_from_checkpoint_args disable_use_tokenizer_model_from_checkpoint_args "
    "use_persistent_ckpt_worker exit_on_missing_checkpoint non_persistent_* persistent_save_interval replication "
    "replication_factor replication_jump save_wgrads_interval save_dgrads_interval disable_msc enable_msc "
    "async_strategy async_ckpt_* verify_integrity ckpt_fully_parallel_load_exchange_algo "
    "ckpt_fully_parallel_save_process_group override_ckpt_iteration ckpt_fully_parallel_load_process_group "
    "no_ckpt_load_validate_sharding_integrity no_stream_ckpt_dequant disable_ckpt_load_validate_sharding_integrity "
    "disable_stream_ckpt_dequant use_checkpoint_opt_param_scheduler",
    "train.loggers sends numbers to Weights & Biases, and WANDB_PROJECT names the project there": "wandb_*",
    "docs/running.md says how labkit stops, restarts and finds slow ranks": "inprocess_* enable_ft_package "
    "calc_ft_timeouts ft_num_warmup_iters rerun_mode error_injection_rate error_injection_type check_for_spiky_loss "
    "check_for_large_grads check_weight_hash_across_dp_replicas_interval result_rejected_tracker_filename "
    "iterations_to_skip adlr_autoresume adlr_autoresume_interval exit_signal exit_signal_handler_for_dataloader "
    "straggler_* disable_straggler_on_startup distributed_timeout_seconds_after_init "
    "exit_signal_handler_for_training gpu_sniff_test_interval flight_recorder_* no_flight_recorder_* "
    "disable_flight_recorder_* fault_injector_*",
    "the file in data.tokenizer says everything about a tokenizer": "tokenizer_metadata tokenizer_special_tokens "
    "tokenizer_sentencepiece_legacy tokenizer_hf_use_fast tokenizer_hf_include_special_tokens legacy_tokenizer "
    "tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens trust_remote_code "
    "no_pad_vocab_size disable_pad_vocab_size no_tokenizer_sentencepiece_ignore_extra_whitespaces "
    "disable_tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast "
    "tokenizer_hf_no_include_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id chat_template",
    "a finished model is for labkit generate and labkit eval": "inference_* skip_train decode_only_cuda_graphs "
    "enable_chunked_prefill disable_chunked_prefill mlp_chunks_for_prefill max_tokens_to_oom "
    "nccl_all_reduce_for_prefill symmetric_ar_type use_legacy_static_engine output_bert_embeddings "
    "num_speculative_tokens no_inference_* use_same_sampling_seed_across_dp_ranks mamba_inference_*",
}
"""The same for flags of what is around the training: files of checkpoints, tokenizers, stops and restarts."""
IGNORED: dict[str, str] = {
    "labkit has no switches for single kernels": "no_masked_softmax_fusion no_bias_swiglu_fusion "
    "no_bias_dropout_fusion no_rope_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl no_persist_layer_norm "
    "moe_permute_fusion moe_router_fusion moe_use_legacy_grouped_gemm use_te_activation_func disable_jit_fuser "
    "disable_mamba_mem_eff_path disable_bf16_reduced_precision_matmul batch_invariant_mode flash_attention_version "
    "fused_residual_rmsnorm use_transformer_engine_op_fuser use_grouped_gemm_for_shared_expert "
    "use_grouped_gemm_for_dense_mlp attention_softmax_in_fp32",
    "every number that labkit logs is in metrics.jsonl of train.output_dir (docs/running.md)": "log_energy "
    "log_device_memory_used log_max_attention_logit log_memory_interval log_memory_to_tensorboard "
    "log_num_zeros_in_grad log_params_norm log_progress log_straggler log_throughput log_timers_to_tensorboard "
    "log_validation_ppl_to_tensorboard log_world_size_to_tensorboard no_log_loss_scale_to_tensorboard "
    "disable_log_loss_scale_to_tensorboard logging_level tensorboard_log_interval tensorboard_queue_size "
    "one_logger_* no_one_logger timing_log_option no_barrier_with_level_1_timing config_logger_dir app_tag_run_name "
    "app_tag_run_version moe_per_layer_logging record_memory_history memory_snapshot_path "
    "run_workload_inspector_server save_params_interval save_activations_interval save_tokens_per_expert_interval "
    "moe_routing_trace_* record_shapes nvtx_ranges pytorch_profiler_*",
    "labkit has no switches for how files of data are read": "num_workers num_dataset_builder_threads "
    "no_mmap_bin_files dataloader_type dataloader_fast_cache_load dataloader_defer_npy_index_mmap "
    "no_create_attention_mask_in_dataloader object_storage_cache_path",
    "": "manual_gc manual_gc_interval no_manual_gc_eval disable_manual_gc_eval empty_unused_memory_level "
    "te_rng_tracker no_async_tensor_model_parallel_allreduce disable_async_tensor_model_parallel_allreduce "
    "high_priority_stream_groups high_priority_a2a_comm_stream disable_gloo_process_groups fp8_interval",
    "labkit has one implementation of its models": "use_mcore_models",
    "the file in data.tokenizer says which tokenizer it is": "tokenizer_type",
    "without data.path labkit trains on a text of its own": "mock_data",
}
"""The same for flags that change neither a number nor a file of labkit, so the command line takes and ignores them."""
_WHY = {name: why for table in (LACKING, NEEDLESS, IGNORED) for why, names in table.items() for name in names.split()}
_BEGINNINGS = {name.removesuffix("*"): why for name, why in _WHY.items() if name.endswith("*")}


def is_ignored(name: str) -> bool:
    """Return True for a flag of `IGNORED`."""
    patterns = " ".join(IGNORED.values()).split()
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def advice(name: str) -> str:
    """Return why a flag of Megatron-LM is not a field, and what to do; empty for a name that is not such a flag."""
    if name in SWITCHES or name in NUMBERS:
        sets = [f"{field} = {value}" for field, value in SWITCHES.get(name, {}).items()]
        instead = {"group_query_attention": "model.kv_heads", CHUNK: "parallel.vpp", POSITIONS: "model.seq_length"}.get(
            name, " and ".join(sets)
        )
        return f"is a flag of the command line; here set {instead}"
    found = [why for beginning, why in _BEGINNINGS.items() if name.startswith(beginning)]
    if name in _WHY or found:
        why = _WHY[name] if name in _WHY else found[0]
        return f"this flag of Megatron-LM has no counterpart here{f': {why}' if why else ''}; leave it out"
    return ""


def derived(flags: Mapping[str, Any], config: Sections) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that flags set together with the rest of the configuration, and what is wrong with the flags.

    flags: the values of those that were given, by name.
    """
    values: dict[str, Any] = {}
    model, pp, chunk = config.model, config.parallel.pp, flags.get(CHUNK)
    if flags.get("swiglu") and model.ffn_hidden is None:  # two thirds of 4 x hidden, in multiples of 64
        values["model.ffn_hidden"] = int(4 * model.hidden * 2 / 3 / 64) * 64
    if flags.get("group_query_attention") and model.kv_heads is None:
        values["model.kv_heads"] = 1  # Megatron-LM's default of --num-query-groups
    rows, length = flags.get(POSITIONS), model.seq_length
    if rows is not None and model.position == "learned" and rows != length:
        rule = f"a table of learned positions has model.seq_length = {length} rows; leave it out, or set --seq-length"
        return values, [f"--max-position-embeddings {rows}: {rule}"]
    if chunk and model.layers % max(1, pp * chunk):
        rule = f"times parallel.pp = {pp} must divide model.layers = {model.layers}"
        return values, [f"--{CHUNK.replace('_', '-')} {chunk}: {rule}; change one of the three, or set parallel.vpp"]
    if chunk:
        values["parallel.vpp"] = model.layers // max(1, pp * chunk)
    return values, []
