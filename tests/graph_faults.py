"""Planted faults of CUDA graphs: what a replay forgets, and what a capture leaves behind."""

from __future__ import annotations

from planting import Fault

PLANS, POOL = "tests/unit/test_graphs_buffers.py", "tests/unit/test_graphs_pool.py"
IDS, SHAPES = "tests/parallel/test_graphs_iteration_ids.py", "tests/unit/test_graphs_shapes.py"
TRAINING, RANKS = "tests/unit/test_graphs_training.py", "tests/parallel/test_graphs_training_ranks.py"

GRAPHS: list[Fault] = [
    Fault(
        "a replay does not wait for gathered parameters",
        "LayerGraphs._capture_if_due",
        "self.helper.cuda_graph_set_manual_hooks()",
        "",
        f"{RANKS} -k buckets",
    ),
    Fault(
        "ids of a captured iteration are never compared with the vocabulary",
        "FullIterationGraph.__call__",
        "self._ids.replayed()",
        "",
        f"{IDS} -k tp2",
    ),
    Fault(
        "graphs of new shapes are captured for the rank's old sequence length",
        "LayerGraphs._capture_if_due",
        "self.helper.recapture(seq_length=length, micro_batch_size=batch)",
        "self.helper.recapture(micro_batch_size=batch)",
        f"{SHAPES} -k whatever_the_lengths",
    ),
    Fault(
        "a recapture takes the first rank's row of the schedule",
        "CudaGraphHelper.recapture",
        "self.pp_rank if pp_rank is None else pp_rank",
        "pp_rank or 0",
        "tests/unit/test_graphs_helper.py",
    ),
    Fault(
        "all microbatches replay the graphs of the first",
        "GraphableMegatronModule.run_cuda_graph",
        "self.layer.current_microbatch % len(self.cuda_graphs)",
        "0",
        f"{RANKS} -k interleaved",
    ),
    Fault(
        "a captured backward replaces the first gradient of the capture's step, and of no other",
        "parameters_put_aside",
        "record.has_gradient = record.added_elsewhere = True",
        "record.has_gradient = record.added_elsewhere = False",
        f"{TRAINING} -k those_without",
    ),
    Fault(
        "warm-up and capture draw from the random states of the run",
        "random_states_kept.put_back",
        "torch.set_rng_state(before)",
        "pass",
        f"{TRAINING} -k dropout",
    ),
    Fault(
        "a static input is returned one step before its backward",
        "plan_buffers",
        "read_last[use.virtual_microbatch] - early_release",
        "read_last[use.virtual_microbatch] - early_release - 1",
        f"{TRAINING} -k those_without",
    ),
    Fault(
        "outputs are returned before the backward is captured",
        "_Capture._forward",
        "captured.outputs = tuple(outputs)",
        "captured.outputs = outputs = tuple(make_weak_ref(outputs, self.backend))",
        f"{TRAINING} -k those_without",
    ),
    Fault(
        "weights are cast to fp8 at capture and never again",
        "_refresh_float8",
        "linear.plan.gemms.refresh_weight(linear.weight)",
        "pass",
        f"{TRAINING} -k fp8",
    ),
    Fault(
        "a capture doesn't restore the counters",
        "counters_kept",
        "tensor.copy_(value)",
        "pass",
        f"{TRAINING} -k fp8",
    ),
    Fault(
        "the first replay of an iteration continues the capture's random numbers",
        "FullIterationGraph._capture",
        "states.restore(self._rng)",
        "",
        f"{TRAINING} -k iteration",
    ),
    Fault(
        "reports of an iteration are those of the last replay",
        "FullIterationGraph.__call__",
        "tree_map_only(Tensor, torch.clone, self._results)",
        "self._results",
        f"{TRAINING} -k iteration",
    ),
    Fault(
        "an iteration reads parameters before they are gathered",
        "_make_parameters_ready",
        "finish_param_sync(chunks)",
        "",
        f"{RANKS} -k those_without",
    ),
    Fault(
        "microbatches use each other's graphs",
        "CudaGraphHelper.create_cudagraphs",
        "sample_index(counts, self.num_microbatches, chunk, position, microbatch)",
        "sample_index(counts, self.num_microbatches, chunk, position, self.num_microbatches - 1 - microbatch)",
        f"{RANKS} -k interleaved",
    ),
    Fault(
        "weight gradients of a split backward are never replayed",
        "GraphedCallable.replay_backward",
        "deferred([parameter for parameter, _ in captured.late], partial(self._weight_gradients, flight))",
        "pass",
        f"{TRAINING} -k split",
    ),
    Fault(
        "a plan reuses the buffer that was returned last",
        "_first_in_first_out",
        "queue.popleft()",
        "queue.pop()",
        f"{PLANS} -k free_longest",
    ),
    Fault(
        "layers of all signatures share one queue of buffers",
        "_first_in_first_out",
        "free.get(wanted[use])",
        "next(iter(free.values()), None)",
        f"{PLANS} -k signature",
    ),
    Fault(
        "the checker of plans compares only the first two lives of a buffer",
        "_refuse_two_lives",
        "sorted(lives, key=lambda life: life[1])",
        "sorted(lives, key=lambda life: life[1])[:2]",
        f"{PLANS} -k later_lives",
    ),
    Fault(
        "the predicted pool forgets the gradient that is sent to another rank",
        "predict_pool",
        "live - sent, above",
        "live - above, 0",
        f"{POOL} -k small_pipeline",
    ),
    Fault(
        "a block counts as reused although it only borders on an earlier one",
        "_on",
        "ranges[place][0] < life.end",
        "ranges[place][0] <= life.end",
        f"{POOL} -k neighbours",
    ),
    Fault(
        "warm-up of a GPU's graphs runs on another stream than their capture",
        "LocalBackend.warming_up",
        "stream = pool.stream",
        "stream = torch.cuda.Stream()",
        "tests/unit/test_graphs_local.py -k warm_up_runs",
    ),
    Fault(
        "after a failed capture no later capture repairs the generators",
        "repair_process",
        "_capture_something(generators)",
        "",
        "tests/unit/test_graphs_failed_capture.py -k goes_on",
    ),
    Fault(
        "the pool memory of a failed capture is never returned",
        "_allocation_ended",
        "_spent.add(tuple(handle))\ntorch._C._cuda_releasePool(device, handle)",
        "_spent.add(tuple(handle))",
        "tests/unit/test_graphs_failed_capture.py -k hundred",
    ),
    Fault(
        "a graph is reset while others of its stream are alive",
        "PoolMates.leave",
        "if self._alive:\n    return",
        "",
        "tests/unit/test_graphs_capture_streams.py -k together",
    ),
]
