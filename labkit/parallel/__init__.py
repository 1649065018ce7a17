"""Layers that are split over ranks, and data parallelism. The names of `labkit.comm` are here as well.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.comm import *  # noqa: F403
    from labkit.parallel.context.ring_plan import gathered_plan as gathered_plan
    from labkit.parallel.context.zigzag import get_batch_on_this_cp_rank as get_batch_on_this_cp_rank
    from labkit.parallel.context.zigzag import zigzag_positions as zigzag_positions
    from labkit.parallel.context.zigzag import zigzag_split as zigzag_split
    from labkit.parallel.data_parallel.bucket_layout import Bucket as Bucket
    from labkit.parallel.data_parallel.bucket_layout import BucketLayout as BucketLayout
    from labkit.parallel.data_parallel.bucket_layout import ParameterSpec as ParameterSpec
    from labkit.parallel.data_parallel.bucket_layout import Piece as Piece
    from labkit.parallel.data_parallel.bucket_layout import default_bucket_size as default_bucket_size
    from labkit.parallel.data_parallel.bucket_layout import pieces_of_rank as pieces_of_rank
    from labkit.parallel.data_parallel.bucket_layout import plan_buckets as plan_buckets
    from labkit.parallel.data_parallel.bucket_layout import shard_range as shard_range
    from labkit.parallel.data_parallel.distributed_data_parallel import (
        DistributedDataParallel as DistributedDataParallel,
    )
    from labkit.parallel.data_parallel.distributed_data_parallel import wrap_model_chunks as wrap_model_chunks
    from labkit.parallel.data_parallel.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
    from labkit.parallel.data_parallel.grad_buffers import GradBucket as GradBucket
    from labkit.parallel.data_parallel.grad_buffers import GradBuffer as GradBuffer
    from labkit.parallel.data_parallel.grad_buffers import Reduction as Reduction
    from labkit.parallel.data_parallel.grad_buffers import own_part as own_part
    from labkit.parallel.data_parallel.gradients import finalize_model_grads as finalize_model_grads
    from labkit.parallel.data_parallel.naive import NaiveDataParallel as NaiveDataParallel
    from labkit.parallel.deallocation import custom_backward as custom_backward
    from labkit.parallel.deallocation import deallocate_output_tensor as deallocate_output_tensor
    from labkit.parallel.layers import ColumnParallelLinear as ColumnParallelLinear
    from labkit.parallel.layers import RowParallelLinear as RowParallelLinear
    from labkit.parallel.mappings import copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region
    from labkit.parallel.mappings import gather_from_sequence_parallel_region as gather_from_sequence_parallel_region
    from labkit.parallel.mappings import (
        gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
    )
    from labkit.parallel.mappings import (
        reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
    )
    from labkit.parallel.mappings import (
        reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
    )
    from labkit.parallel.mappings import scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region
    from labkit.parallel.mappings import (
        scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
    )
    from labkit.parallel.mlp import ParallelMLP as ParallelMLP
    from labkit.parallel.parameters.parameter_record import ParameterRecord as ParameterRecord
    from labkit.parallel.parameters.parameter_record import record_of as record_of
    from labkit.parallel.parameters.weights import gather_expert_parameter as gather_expert_parameter
    from labkit.parallel.parameters.weights import gather_parameter as gather_parameter
    from labkit.parallel.parameters.weights import make_expert_parameter as make_expert_parameter
    from labkit.parallel.parameters.weights import make_parameter as make_parameter
    from labkit.parallel.random import RngTracker as RngTracker
    from labkit.parallel.random import model_parallel_seed as model_parallel_seed
    from labkit.parallel.recompute import CheckpointWithoutOutput as CheckpointWithoutOutput
    from labkit.parallel.recompute import checkpoint as checkpoint
    from labkit.parallel.recompute import once as once
    from labkit.parallel.recompute import will_run_again as will_run_again
    from labkit.parallel.vocab.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from labkit.parallel.vocab.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from labkit.parallel.vocab.token_ids import TokenIdError as TokenIdError
    from labkit.parallel.vocab.token_ids import check_token_ids as check_token_ids
    from labkit.parallel.vocab.token_ids import token_ids_checked_late as token_ids_checked_late
    from labkit.parallel.vocab.vocab_parallel import VocabParallelEmbedding as VocabParallelEmbedding
    from labkit.parallel.vocab.vocab_parallel import padded_vocab_size as padded_vocab_size
    from labkit.parallel.vocab.vocab_parallel import parallel_lm_logits as parallel_lm_logits
    from labkit.parallel.weight_grad_store import WeightGradStore as WeightGradStore

__all__, __getattr__, __dir__ = public_names(__name__)
