"""The choice of the checkpoint with which a run begins, and the fields that may differ from it. Needs no torch.

`checkpoint.load` says where to look. The run's own checkpoints are those in the folder in which it saves:

    (nothing)   resume from the run's own checkpoints if there are any, else start anew
    latest      resume from the run's own, of which there must be one
    none        start anew; rejected if the folder holds checkpoints, since the two runs would mix
    PATH        a folder of a run, or of checkpoints, or one of its steps; the run's own come first if there are any by
                now, so that a restarted run goes on from where it was. A step among its own comes first until the run
                has saved one. The folder in which the run saves is the same as nothing, as in Megatron-LM

A resumed run may have another layout, precision, batch size, schedule or number of steps, and each difference is
reported. But it must have the same model, so any difference in a field of `MODEL_FIELDS` is an error that names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config import RunConfig
from labkit.config.errors import shown
from labkit.config.fields import SPECS
from labkit.train.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from labkit.train.checkpoint.step_folders import newest_first, step_folder, steps_in
from labkit.train.run_folder.contents import CHECKPOINTS, checkpoints_in, saves_into

MODEL_FIELDS = tuple(name for name, spec in SPECS.items() if spec.of_model)
"""Fields declared as `of_model`, because they change the tensors of a model or what it computes from them."""
OF_THIS_LAUNCH = (
    "checkpoint.",
    "train.output_dir",
    "train.overwrite",
    "train.allow_oversubscription",
    "train.record_events",
    "parallel.distributed_timeout_minutes",
)
"""Fields that belong to one launch of a run: a command may set them anew, and the training is the same."""


@dataclass(frozen=True)
class Progress:
    """The state of the training loop, the same on all ranks."""

    step: int = 0
    """Finished steps."""
    consumed_samples: int = 0
    """Training samples that these steps read."""
    skipped_steps: int = 0
    """Steps that changed no weight."""

    def after(self, step: int, samples: int, skipped_steps: int) -> Progress:
        """Return the state after `step` steps, of which those after this state read `samples` each."""
        return Progress(step, self.consumed_samples + (step - self.step) * samples, skipped_steps)


def to_try(config: RunConfig) -> list[Path]:
    """Return the checkpoints from which the run may begin, in the order in which it tries them; empty to start anew.

    Raises CheckpointError if `checkpoint.load` names nothing, or would mix two runs.
    """
    load, folder = config.checkpoint.load, saves_into(config)
    own = newest_first(folder) if folder is not None else []
    if load == "none" and own:
        raise CheckpointError(
            f"checkpoint.load = 'none' starts a new run, and {folder} holds the checkpoints of another, {own[0].name} "
            "the latest; name another folder, or remove them"
        )
    if load == "latest" and not own:
        found = "the run has no folder of checkpoints" if folder is None else f"{folder} holds no checkpoint"
        rule = "set checkpoint.dir to a folder with checkpoints, or leave checkpoint.load out to start anew"
        raise CheckpointError(f"checkpoint.load = 'latest': {found}; {rule}")
    if load in (None, "none", "latest"):
        return own
    path = Path(load)
    if own and not (path.resolve() in _resolved_steps(own[0].parent) and not _repeats(own[0], config)):
        return own
    found = newest_first(checkpoints_in(path)) or ([path] if (path / MANIFEST).exists() else [])
    if not found and not (folder is not None and path.resolve() == folder.resolve()):
        raise CheckpointError(
            f"checkpoint.load = {shown(load, 200)} holds no checkpoint; name the folder of a run, one with "
            "step_00000001 or similar in it, one of these steps, latest, or none"
        )
    return found


def _resolved_steps(folder: Path) -> list[Path]:
    return [step_folder(folder, step).resolve() for step in steps_in(folder)]


def _repeats(newest: Path, config: RunConfig) -> bool:
    """Return True if a run of this configuration saved the checkpoint, and so the same command was started again."""
    with contextlib.suppress(CheckpointError):
        return same_run(read_manifest(newest).config, config)
    return False


def same_run(before: Mapping[str, Any], config: RunConfig) -> bool:
    """Return True if runs of the two configurations begin and train alike, so that they are launches of one run."""
    same_start = before.get("checkpoint", {}).get("load") == config.checkpoint.load
    return same_start and all(name.startswith(OF_THIS_LAUNCH) for name, *_ in _changed(before, config.to_dict()))


def problems(config: RunConfig) -> list[str]:
    """Return a sentence for everything that keeps the run from its checkpoints, as far as manifests show."""
    try:
        paths = to_try(config)
    except CheckpointError as error:
        return [str(error)]
    failed = []
    for path in paths:
        try:
            return model_differences(read_manifest(path), config)
        except CheckpointError as error:
            failed.append(str(error))
    return failed


def model_differences(manifest: Manifest, config: RunConfig) -> list[str]:
    """Return a sentence for each field that makes the checkpoint's model differ from the configured one."""
    fields = [*MODEL_FIELDS]
    if config.model.position == "learned":
        fields.append("model.seq_length")  # the rows of the position table
    return [
        f"{name} = {shown(new)}: the checkpoint of step {manifest.step} has {shown(old)}, and resuming needs the same "
        f"model; set it to {shown(old)}, or start anew with checkpoint.load = none and another checkpoint.dir"
        for name, old, new in _changed(_spelled_out(manifest.config), _spelled_out(config.to_dict()))
        if name in fields
    ]


def _spelled_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the values that None stands for: key/value heads, decoder, widths of MLP and
    experts, heads and layers of a Mamba."""
    model, moe = dict(config.get("model", {})), dict(config.get("moe", {}))
    if model.get("family") == "t5" and model.get("decoder_layers") is None and "layers" in model:
        model["decoder_layers"] = model["layers"]
    if model.get("family") == "mamba" and {"layers", "hidden", "mamba_head_dim"} <= model.keys():
        if model.get("hybrid_override_pattern") is None:
            model["hybrid_override_pattern"] = "M" * model["layers"]
        if model.get("mamba_num_heads") is None:
            model["mamba_num_heads"] = 2 * model["hidden"] // model["mamba_head_dim"]
    if model.get("kv_heads") is None and "heads" in model:
        model["kv_heads"] = model["heads"]
    if model.get("ffn_hidden") is None and "hidden" in model:
        model["ffn_hidden"] = 4 * model["hidden"]
    if moe.get("ffn_hidden") is None and moe.get("num_experts"):
        moe["ffn_hidden"] = model.get("ffn_hidden")
    return {**config, "model": model, "moe": moe}


def other_differences(manifest: Manifest, config: RunConfig) -> list[str]:
    """Return `train.global_batch_size 16 -> 32` for each other field that has changed; the new values apply."""
    return [
        f"{name} {shown(old)} -> {shown(new)}"
        for name, old, new in _changed(manifest.config, config.to_dict())
        if name not in MODEL_FIELDS and not name.startswith(OF_THIS_LAUNCH)
    ]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value in the checkpoint, value now); fields that one of the two does not know are left out."""
    for section, values in before.items():
        for name, old in values.items():
            new = now.get(section, {}).get(name, old)
            if new != old:
                yield f"{section}.{name}", old, new


def same_layout(manifest: Manifest, config: RunConfig, world_size: int) -> bool:
    """Return True if every rank has the place that it had in the run that saved."""
    before, now = manifest.config.get("parallel"), config.to_dict()["parallel"]
    if before is None or manifest.world_size != world_size:
        return False
    return all(before.get(name) == value for name, value in now.items() if not name.startswith("distributed_"))


def continues_folder(config: RunConfig, checkpoint: Path, manifest: Manifest) -> bool:
    """Return True if a run that resumes from `checkpoint` goes on in the files of the run that saved it.

    It does if `train.output_dir` is the same folder, or contains the checkpoint, as in a copy of a run's folder.
    """
    if config.train.output_dir is None:
        return False
    folder, before = Path(config.train.output_dir).absolute(), manifest.config.get("train", {}).get("output_dir")
    within = checkpoint.absolute().parent in (folder, folder / CHECKPOINTS)
    return within or (before is not None and Path(before).absolute() == folder)


def will_continue(config: RunConfig) -> bool:
    """Return `continues_folder` of the checkpoint with which the run will probably begin, without reading tensors."""
    with contextlib.suppress(CheckpointError):
        for path in to_try(config):
            with contextlib.suppress(CheckpointError):
                return continues_folder(config, path, read_manifest(path))
    return False
