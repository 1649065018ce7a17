"""Layers that are split over ranks, and data parallelism. The names of `labkit.comm` are here as well.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.comm.capturing import GraphCaptureError as GraphCaptureError
    from labkit.comm.capturing import is_graph_capturing as is_graph_capturing
    from labkit.comm.capturing import is_graph_warmup as is_graph_warmup
    from labkit.comm.collectives import Message as Message
    from labkit.comm.collectives import all_gather as all_gather
    from labkit.comm.collectives import all_gather_async as all_gather_async
    from labkit.comm.collectives import all_reduce as all_reduce
    from labkit.comm.collectives import all_reduce_async as all_reduce_async
    from labkit.comm.collectives import all_to_all as all_to_all
    from labkit.comm.collectives import all_to_all_async as all_to_all_async
    from labkit.comm.collectives import barrier as barrier
    from labkit.comm.collectives import batch as batch
    from labkit.comm.collectives import broadcast as broadcast
    from labkit.comm.collectives import broadcast_async as broadcast_async
    from labkit.comm.collectives import gather_objects as gather_objects
    from labkit.comm.collectives import irecv as irecv
    from labkit.comm.collectives import isend as isend
    from labkit.comm.collectives import reduce_scatter as reduce_scatter
    from labkit.comm.collectives import reduce_scatter_async as reduce_scatter_async
    from labkit.comm.fault_injection import delayed as delayed
    from labkit.comm.fault_injection import dropped as dropped
    from labkit.comm.group_plan import GROUP_KINDS as GROUP_KINDS
    from labkit.comm.group_plan import GROUP_TOKENS as GROUP_TOKENS
    from labkit.comm.group_plan import all_groups as all_groups
    from labkit.comm.group_plan import embedding_columns as embedding_columns
    from labkit.comm.group_plan import groups_of_rank as groups_of_rank
    from labkit.comm.group_plan import members_of_rank as members_of_rank
    from labkit.comm.groups import Group as Group
    from labkit.comm.groups import ParallelGroups as ParallelGroups
    from labkit.comm.groups import initialize_model_parallel as initialize_model_parallel
    from labkit.comm.groups import single_process_groups as single_process_groups
    from labkit.comm.in_flight import AllToAllInFlight as AllToAllInFlight
    from labkit.comm.in_flight import all_to_all_start as all_to_all_start
    from labkit.comm.ledger import CommLedger as CommLedger
    from labkit.comm.ledger import CommRecord as CommRecord
    from labkit.comm.ledger import comm_scope as comm_scope
    from labkit.comm.mixed_radix import MAX_LISTED_RANKS as MAX_LISTED_RANKS
    from labkit.comm.mixed_radix import decompose as decompose
    from labkit.comm.mixed_radix import prefix_product as prefix_product
    from labkit.comm.motion import Held as Held
    from labkit.comm.motion import Motion as Motion
    from labkit.comm.neighbours import exchange as exchange
    from labkit.comm.neighbours import recv_backward as recv_backward
    from labkit.comm.neighbours import recv_forward as recv_forward
    from labkit.comm.neighbours import send_backward as send_backward
    from labkit.comm.neighbours import send_backward_recv_backward as send_backward_recv_backward
    from labkit.comm.neighbours import send_backward_recv_forward as send_backward_recv_forward
    from labkit.comm.neighbours import send_forward as send_forward
    from labkit.comm.neighbours import (
        send_forward_backward_recv_forward_backward as send_forward_backward_recv_forward_backward,
    )
    from labkit.comm.neighbours import send_forward_recv_backward as send_forward_recv_backward
    from labkit.comm.neighbours import send_forward_recv_forward as send_forward_recv_forward
    from labkit.comm.p2p import P2PCommunicator as P2PCommunicator
    from labkit.comm.p2p import p2p_communicator as p2p_communicator
    from labkit.comm.p2p import second_communicator as second_communicator
    from labkit.comm.pending import Pending as Pending
    from labkit.comm.rank_generator import DEFAULT_ORDER as DEFAULT_ORDER
    from labkit.comm.rank_generator import RankGenerator as RankGenerator
    from labkit.comm.rank_generator import generate_masked_orthogonal_groups as generate_masked_orthogonal_groups
    from labkit.comm.rank_generator import (
        generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
    )
    from labkit.comm.rank_generator import rank_generators as rank_generators
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
