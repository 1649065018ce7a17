"""Planted faults of CUDA graphs: what a replay forgets, and what a capture leaves behind."""

from __future__ import annotations

from planting import Fault

PLANS, POOL = "tests/unit/test_graphs_buffers.py", "tests/unit/test_graphs_pool.py"
IDS, SHAPES = "tests/parallel/test_graphs_iteration_ids.py", "tests/unit/test_graphs_shapes.py"
TRAINING, RANKS = "tests/unit/test_graphs_training.py", "tests/parallel/test_graphs_training_ranks.py"

GRAPHS: list[Fault] = [
    Fault(
        "a replay does not wait for gathered parameters",
        "train/layer_graphs.py",
        "            self._helper.cuda_graph_set_manual_hooks()\n",
        "",
        f"{RANKS} -k buckets",
    ),
    Fault(
        "ids of a captured iteration are never compared with the vocabulary",
        "graphs/full_iteration.py",
        "        self._ids.replayed()\n",
        "",
        f"{IDS} -k tp2",
    ),
    Fault(
        "graphs of other shapes are captured for the rank's old sequence length",
        "train/layer_graphs.py",
        "            self._helper.recapture(seq_length=length, micro_batch_size=batch)\n",
        "            self._helper.recapture(micro_batch_size=batch)\n",
        f"{SHAPES} -k whatever_the_lengths",
    ),
    Fault(
        "a recapture takes the first rank's row of the schedule",
        "graphs/helper.py",
        "pp_rank = self.pp_rank if pp_rank is None else pp_rank",
        "pp_rank = pp_rank or 0",
        "tests/unit/test_graphs_helper.py",
    ),
    Fault(
        "all microbatches replay the graphs of the first",
        "graphs/graphable.py",
        "self.cuda_graphs[self.layer.current_microbatch % len(self.cuda_graphs)]",
        "self.cuda_graphs[0]",
        f"{RANKS} -k interleaved",
    ),
    Fault(
        "a captured backward replaces the first gradient of the capture's step, and of no other",
        "graphs/surroundings.py",
        "record.has_gradient = record.added_elsewhere = True",
        "record.has_gradient = record.added_elsewhere = False",
        f"{TRAINING} -k those_without",
    ),
    Fault(
        "warm-up and capture draw from the random states of the run",
        "graphs/surroundings.py",
        "            torch.set_rng_state(before)\n",
        "            pass\n",
        f"{TRAINING} -k dropout",
    ),
    Fault(
        "a static input is given back one step before its backward",
        "graphs/buffers.py",
        "read_last[use.virtual_microbatch] - early_release)",
        "read_last[use.virtual_microbatch] - early_release - 1)",
        f"{TRAINING} -k those_without",
    ),
    Fault(
        "outputs are given back before the backward is captured",
        "graphs/capture.py",
        "        captured.outputs = tuple(outputs)\n",
        "        captured.outputs = outputs = tuple(make_weak_ref(outputs, self.backend))\n",
        f"{TRAINING} -k those_without",
    ),
    Fault(
        "weights are cast to fp8 at capture and never again",
        "graphs/helper.py",
        "    linear.plan.gemms.refresh_weight(linear.weight)\n",
        "    pass\n",
        f"{TRAINING} -k fp8",
    ),
    Fault(
        "a capture leaves what it counted",
        "graphs/counters.py",
        "                tensor.copy_(value)\n",
        "                pass\n",
        f"{TRAINING} -k fp8",
    ),
    Fault(
        "the first replay of an iteration draws what comes after the capture's numbers",
        "graphs/full_iteration.py",
        "        states.restore(self._rng)\n",
        "",
        f"{TRAINING} -k iteration",
    ),
    Fault(
        "reports of an iteration are those of the last replay",
        "graphs/full_iteration.py",
        "return tree_map_only(Tensor, torch.clone, self._results)",
        "return self._results",
        f"{TRAINING} -k iteration",
    ),
    Fault(
        "an iteration reads parameters before they are gathered",
        "train/step_graphs.py",
        "    finish_param_sync(chunks)\n    for chunk",
        "    for chunk",
        f"{RANKS} -k those_without",
    ),
    Fault(
        "microbatches have each other's graphs",
        "graphs/helper.py",
        "sample_index(counts, self.num_microbatches, chunk, position, microbatch)\n                    for",
        "sample_index(counts, self.num_microbatches, chunk, position, self.num_microbatches - 1 - microbatch)\n"
        "                    for",
        f"{RANKS} -k interleaved",
    ),
    Fault(
        "weight gradients of a split backward are never replayed",
        "graphs/graphed.py",
        "deferred([parameter for parameter, _ in captured.late], partial(self._weight_gradients, flight))\n",
        "pass\n",
        f"{TRAINING} -k split",
    ),
    Fault(
        "a plan takes the buffer that was given back last",
        "graphs/buffers.py",
        "queue.popleft() if queue",
        "queue.pop() if queue",
        f"{PLANS} -k free_longest",
    ),
    Fault(
        "layers of all signatures share one queue of buffers",
        "graphs/buffers.py",
        "            queue = free.get(wanted[use])\n",
        "            queue = next(iter(free.values()), None)\n",
        f"{PLANS} -k signature",
    ),
    Fault(
        "the checker of plans compares only the first two lives of a buffer",
        "graphs/buffers.py",
        "pairwise(sorted(lives, key=lambda life: life[1]))",
        "pairwise(sorted(lives, key=lambda life: life[1])[:2])",
        f"{PLANS} -k later_lives",
    ),
    Fault(
        "the predicted pool forgets the gradient that is sent to another rank",
        "graphs/pool.py",
        "live, sent = live - sent, above",
        "live, sent = live - above, 0",
        f"{POOL} -k small_pipeline",
    ),
    Fault(
        "a frame counts as taken over what no graph had before",
        "graphs/pool.py",
        "ranges[place][0] < life.end",
        "ranges[place][0] <= life.end",
        f"{POOL} -k neighbours",
    ),
    Fault(
        "warm-up of a GPU's graphs runs on another stream than their capture",
        "graphs/local.py",
        "        stream = pool.stream\n",
        "        stream = torch.cuda.Stream()\n",
        "tests/unit/test_graphs_local.py -k warm_up_runs",
    ),
    Fault(
        "after a failed capture no other one sets the generators right",
        "graphs/failed_capture.py",
        "            _capture_something(generators)\n",
        "",
        "tests/unit/test_graphs_failed_capture.py -k goes_on",
    ),
    Fault(
        "what a failed capture claims of its pool is never given back",
        "graphs/failed_capture.py",
        "    _spent.add(tuple(handle))\n    torch._C._cuda_releasePool(device, handle)\n",
        "    _spent.add(tuple(handle))\n",
        "tests/unit/test_graphs_failed_capture.py -k hundred",
    ),
    Fault(
        "a graph is reset while others of its stream are alive",
        "graphs/capture_streams.py",
        "        if self._alive:\n            return\n",
        "",
        "tests/unit/test_graphs_capture_streams.py -k together",
    ),
]
