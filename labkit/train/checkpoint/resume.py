"""The choice of the checkpoint with which a run begins, and the fields that may differ from it. Needs no torch.

`checkpoint.load` says where to look:

    (nothing)   resume from checkpoint.dir if it holds a checkpoint, else start anew
    latest      resume from checkpoint.dir, which must hold one
    none        start anew; refused if checkpoint.dir holds checkpoints, since the two runs would mix
    PATH        a folder of checkpoints or one of its steps; checkpoint.dir comes first if it holds a checkpoint by now,
                so that a restarted run goes on from where it was. A step of checkpoint.dir itself comes first until
                the run has saved one

A resumed run may have another layout, precision, batch size, schedule or number of steps: each difference is said. It
must have the same model: fields of `MODEL_FIELDS` are refused one by one.
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
from labkit.train.checkpoint.step_folders import is_locked, newest_first, step_folder, steps_in

MODEL_FIELDS = tuple(name for name, spec in SPECS.items() if spec.of_model)
"""Fields whose declaration says `of_model`: they change the tensors of a model, or what it computes from them."""
_OF_THIS_LAUNCH = (
    "checkpoint.",
    "train.output_dir",
    "train.overwrite",
    "train.allow_oversubscription",
    "train.record_events",
    "parallel.distributed_timeout_minutes",
)
"""Fields whose difference says nothing about the training."""


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
        """The state after `step` steps, of which those behind this state read `samples` each."""
        return Progress(step, self.consumed_samples + (step - self.step) * samples, skipped_steps)


def to_try(config: RunConfig) -> list[Path]:
    """The checkpoints from which the run may begin, in the order in which it tries them; empty to start anew.

    Raises CheckpointError if `checkpoint.load` names nothing, or would mix two runs.
    """
    given = config.checkpoint
    own = newest_first(Path(given.dir)) if given.dir is not None else []
    if given.load == "none":
        if own:
            raise CheckpointError(
                f"checkpoint.load = 'none' starts a new run, and checkpoint.dir = {shown(given.dir, 200)} holds the "
                f"checkpoints of another, {own[0].name} the latest; name another checkpoint.dir, or remove them"
            )
        return []
    if given.load == "latest" and given.dir is None:
        raise CheckpointError("checkpoint.load = 'latest' needs the folder in checkpoint.dir, or give a path to load")
    if given.load == "latest" and not own:
        raise CheckpointError(
            f"checkpoint.load = 'latest': checkpoint.dir = {shown(given.dir, 200)} holds no checkpoint; name the "
            "folder that does, or leave checkpoint.load out to start anew"
        )
    if given.load in (None, "latest"):
        return own
    path = Path(given.load)
    if own and not (path.resolve() in _resolved_steps(own[0].parent) and not _repeats(own[0], config)):
        return own
    found = newest_first(path) or ([path] if (path / MANIFEST).exists() else [])
    if not found:
        raise CheckpointError(
            f"checkpoint.load = {shown(given.load, 200)} holds no checkpoint; name a folder with step_00000001 or "
            "similar in it, one of these, latest, or none"
        )
    return found


def _resolved_steps(folder: Path) -> list[Path]:
    return [step_folder(folder, step).resolve() for step in steps_in(folder)]


def _repeats(newest: Path, config: RunConfig) -> bool:
    """True if a run of this configuration saved the checkpoint, and so the same command was started again."""
    try:
        before = read_manifest(newest).config
    except CheckpointError:
        return False
    same_start = before.get("checkpoint", {}).get("load") == config.checkpoint.load
    return same_start and all(name.startswith(_OF_THIS_LAUNCH) for name, *_ in _changed(before, config.to_dict()))


def busy(config: RunConfig) -> str:
    """The sentence for a folder that another run has locked."""
    return (
        f"checkpoint.dir = {shown(config.checkpoint.dir, 200)}: another run saves its checkpoints there; name another "
        "folder, or wait until that run has ended"
    )


def problems(config: RunConfig) -> list[str]:
    """Sentences for everything that keeps the run from its checkpoints, as far as manifests and the lock tell."""
    given = config.checkpoint.dir
    if given is not None and is_locked(Path(given)):
        return [busy(config)]
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
    """A sentence for each field with which the checkpoint's model is another one than the configured."""
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
    """The configuration with the values for which None stands: key/value heads, decoder, widths of MLP and experts,
    heads and layers of a Mamba."""
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
    """`train.global_batch_size 16 -> 32` for each other field that has changed; the new values hold."""
    return [
        f"{name} {shown(old)} -> {shown(new)}"
        for name, old, new in _changed(manifest.config, config.to_dict())
        if name not in MODEL_FIELDS and not name.startswith(_OF_THIS_LAUNCH)
    ]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(field, value in the checkpoint, value now); fields that one of the two does not know are left out."""
    for section, values in before.items():
        for name, old in values.items():
            new = now.get(section, {}).get(name, old)
            if new != old:
                yield f"{section}.{name}", old, new


def same_layout(manifest: Manifest, config: RunConfig, world_size: int) -> bool:
    """True if every rank has the place that it had in the run that saved."""
    before, now = manifest.config.get("parallel"), config.to_dict()["parallel"]
    if before is None or manifest.world_size != world_size:
        return False
    return all(before.get(name) == value for name, value in now.items() if not name.startswith("distributed_"))


def continues_folder(config: RunConfig, manifest: Manifest | None) -> bool:
    """True if the run that saved the checkpoint of `manifest` wrote into the same `train.output_dir`.

    manifest: of the checkpoint from which the run resumes; None for a run that starts anew.
    """
    before = manifest and manifest.config.get("train", {}).get("output_dir")
    if not before or config.train.output_dir is None:
        return False
    return Path(before).absolute() == Path(config.train.output_dir).absolute()


def first_readable(config: RunConfig) -> Manifest | None:
    """The manifest with which the run will probably begin; tensors are not looked at."""
    with contextlib.suppress(CheckpointError):
        for path in to_try(config):
            with contextlib.suppress(CheckpointError):
                return read_manifest(path)
    return None
