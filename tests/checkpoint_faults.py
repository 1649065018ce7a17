"""Planted faults of checkpoints: what a run finds again when it goes on, under its layout or another."""

from __future__ import annotations

from planting import Fault

RESUME = "tests/parallel/test_checkpoint_resume.py"
SKIPPED = f"{RESUME} -k skipped"
READ = f"{RESUME} -k every_sample"
STATES = f"{RESUME} -k random_states_of"
LOSSES = "tests/parallel/test_checkpoint_losses.py"

RESUMING = [
    Fault(
        "skipped steps count as AdamW updates after a resume",
        "Checkpoints._loaded",
        'training["step"] - training["skipped_steps"]',
        'training["step"]',
        SKIPPED,
    ),
    Fault(
        "skipped steps of earlier processes advance the learning rate",
        "watched",
        "resumed.skipped_steps",
        "0",
        SKIPPED,
    ),
    Fault(
        "a resumed run resets the loss scale",
        "Checkpoints._loaded",
        'scaler.restore(training.get("loss_scaler", {}))',
        "pass",
        SKIPPED,
    ),
    Fault(
        "moments are expected from a run that has skipped all its steps",
        "Checkpoints._mine",
        "progress.step > progress.skipped_steps",
        "progress.step > 0",
        SKIPPED,
    ),
    Fault(
        "consumed samples are computed as all steps times the last run's batch size",
        "Progress.after",
        "self.consumed_samples + (step - self.step) * samples",
        "step * samples",
        READ,
    ),
    Fault(
        "the checkpoint of a run that was asked to stop is one step early",
        "pretraining:train",
        "checkpoints.save_now(progress, pipeline.loss_scaler)",
        "checkpoints.save_now(resumed.after(step - 1, config.train.global_batch_size, 0), pipeline.loss_scaler)",
        f"{RESUME} -k asked_to_stop",
    ),
    Fault(
        "a resumed run starts again at the first sample",
        "batches:_microbatches",
        "consumed + own",
        "own",
        READ,
    ),
    Fault(
        "each validation continues where the previous one ended",
        "build_data_iterators",
        "partial(data_iterator, validation, config, groups)",
        "partial(iter, data_iterator(validation, config, groups))",
        READ,
    ),
    Fault(
        "derived random states forget the step",
        "RankState.derive_rng",
        'f"resumed after step {step}"',
        '"resumed"',
        STATES,
    ),
    Fault(
        "a different number of replicas counts as the same layout",
        "same_layout",
        "before is None or manifest.world_size != world_size",
        "before is None",
        STATES,
    ),
    Fault(
        "an equal number of ranks counts as the same layout",
        "same_layout",
        "before.get(name) == value",
        "True",
        STATES,
    ),
    Fault(
        "a resumed run resets Python's random state",
        "RankState.load_rng",
        "random.setstate((version, tuple(numbers), gauss))",
        "pass",
        f"{RESUME} -k cut_twice",
    ),
    Fault(
        "an asynchronous save writes the values of the next step",
        "Checkpoints.save",
        "self._staged(tensors) if asynchronous else {key: _on_host(values) for key, values in tensors.items()}",
        "{key: _on_host(values) for key, values in tensors.items()}",
        f"{RESUME} -k asynchronous_save_holds",
    ),
    Fault(
        "ranks write and read each other's experts",
        "placements",
        "groups.ep.rank * shape[0]",
        "(groups.ep.size - 1 - groups.ep.rank) * shape[0]",
        f"{LOSSES} -k experts",
    ),
    Fault(
        "ranks write and read each other's columns",
        "placements",
        "_cuts(record, shape, group.rank, group.size)",
        "_cuts(record, shape, group.size - 1 - group.rank, group.size)",
        f"{LOSSES} -k gpt",
    ),
    Fault(
        "the two moments are swapped in files",
        "RankState.pieces",
        "self._optimizer.adamw.state[part.master][moment]",
        "self._optimizer.adamw.state[part.master][MOMENTS[1 - MOMENTS.index(moment)]]",
        f"{LOSSES} -k torchs_names",
    ),
    Fault(
        "an evaluation leaves the biases of experts at zero",
        "RankWeights.whole_pieces",
        "yield from self._buffer_pieces()",
        "pass",
        f"{LOSSES} -k biases_of_experts",
    ),
    Fault(
        "the norm counts the copies of T5's positions",
        "counted_elements",
        "record.shared",
        'record.shared and record.copied_over != "pos_embd"',
        f"{LOSSES} -k t5",
    ),
]
