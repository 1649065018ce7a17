"""What ranks say to each other: groups, collectives, messages, and the ledger that counts them.

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
    from labkit.comm.motion_of_sum import all_reduce_in_motion as all_reduce_in_motion
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

__all__, __getattr__, __dir__ = public_names(__name__)
