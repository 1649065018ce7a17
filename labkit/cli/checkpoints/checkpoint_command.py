"""`labkit checkpoint`: list and verify the checkpoints of a run; weights in Hugging Face's form, to files and Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from labkit.cli.arguments import Action, Arguments, Command, Option
from labkit.cli.command_line import CommandFailedError
from labkit.cli.output import folded, loading, room, show, table
from labkit.config.errors import counted, shown
from labkit.output_files import unwritable
from labkit.train.checkpoint.inventory import FACTS, checkpoints_at, chosen, row_of, size_words, strays
from labkit.train.checkpoint.manifest import MANIFEST, CheckpointError
from labkit.train.checkpoint.step_folders import latest_step, remains_in, step_folder
from labkit.train.run_folder.contents import checkpoints_in

if TYPE_CHECKING:
    from labkit.train.checkpoint.exchange import Export
    from labkit.train.checkpoint.shard_files import Reader

WEIGHTS = "model.safetensors"
"""Name of the file of weights in a folder that transformers can load."""
DTYPES = ("fp32", "bf16", "fp16")
"""Values of --dtype."""


def execute(arguments: Arguments) -> int:
    """Check the words and options of the action, and perform it."""
    action, words = arguments.action(COMMAND)
    return action.do(arguments, *map(Path, words))


def _list(arguments: Arguments, folder: Path) -> int:
    """One line for each checkpoint."""
    rows, latest = [row_of(path) for path in _found(arguments, folder)], latest_step(checkpoints_in(folder))
    lines: list[tuple[str, ...]] = [("checkpoint", *FACTS, "state")]
    for row in rows:
        state = f"damaged: {row.damage}" if row.damage else "complete"
        mark = ", latest" if latest is not None and row.folder.name == step_folder(folder, latest).name else ""
        lines.append((row.folder.name, *(row.facts or [""] * len(FACTS)), state + mark))
    print("\n".join(table(lines, width=room())))
    return 0


def _verify(arguments: Arguments, folder: Path) -> int:
    """Read every byte of each checkpoint; fail and name each file and tensor that has changed since it was written."""
    bad = []
    for path in _found(arguments, folder):
        problems = list(_problems(path))
        bad += problems
        if problems:
            show(f"{path}: damaged")
    for cut in remains_in(checkpoints_in(folder)):
        show(f"{cut}: a checkpoint that was never finished; no run reads it, and the next run here removes it")
    if bad:
        raise CommandFailedError("\n  ".join([counted(len(bad), "problem"), *bad]))
    return 0


def _problems(path: Path) -> Iterator[str]:
    """Yield a sentence for each problem of one checkpoint. If there is none, print a line that says so."""
    from labkit.train.checkpoint.shard_files import Reader

    try:
        reader = Reader(path)
    except CheckpointError as error:
        yield str(error)
        return
    stored, problems = reader.manifest, reader.problems()
    reader.close()
    problems += [f"{path / name} does not belong to the checkpoint; remove it" for name in strays(path, stored)]
    yield from problems
    if not problems:
        size = size_words(sum(file.size for file in stored.files.values()))
        state = " with the optimizer's state" if any(name.startswith("exp_avg.") for name in stored.tensors) else ""
        files, tensors = counted(len(stored.files), "file"), counted(len(stored.tensors), "tensor")
        show(f"{path}: good, {files}, {tensors}{state}, {size}")


def _chosen(arguments: Arguments, folder: Path) -> Path:
    """Return the checkpoint of --step, or the last one. Raises ConfigError if there is none."""
    try:
        return chosen(folder, arguments.options["step"])
    except CheckpointError as error:
        arguments.refuse([str(error)])
        raise


def _export(arguments: Arguments, folder: Path, out: Path) -> int:
    """Write the weights of one checkpoint in Hugging Face's names."""
    options = arguments.options
    as_file = out.suffix == ".safetensors" and not out.is_dir()
    target = out if as_file else out / WEIGHTS
    arguments.refuse(_in_the_way(out, target, as_file=as_file, overwrite=options["overwrite"]))
    from labkit.train.checkpoint.exchange import export_folder, export_weights

    path = _chosen(arguments, folder)
    try:
        loading(path)
        export, _ = _export_of(path, options["dtype"])
        written = export_weights(export, target) if as_file else export_folder(export, out, WEIGHTS)
    except (CheckpointError, OSError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        raise CommandFailedError(f"export of {path} to {target}: {why}") from error
    beside = "" if as_file else ", with config.json"
    size = size_words(written.size)
    show(f"{target}: {counted(len(export.likes), 'tensor')} of a {export.family}, {size}, from {path.name}{beside}")
    return 0


def _export_of(path: Path, dtype: str | None) -> tuple[Export, Reader]:
    """Return what is exported of a checkpoint. Raises CheckpointError for one that is damaged."""
    from labkit.train.checkpoint.exchange import PRECISIONS, Export
    from labkit.train.checkpoint.shard_files import Reader

    reader = Reader(path)
    if problems := reader.problems():
        raise CheckpointError(f"{'; '.join(problems[:3])}; choose another checkpoint with --step")
    return Export(reader, PRECISIONS.get(dtype or "")), reader


def _in_the_way(out: Path, target: Path, *, as_file: bool, overwrite: bool) -> list[str]:
    """Return the problems of the place to which the weights will be exported."""
    name = shown(str(out), 200)
    if as_file and not out.parent.is_dir():
        return [f"OUT {name}: there is no folder {shown(str(out.parent), 200)}; make it first"]
    if not as_file and out.exists() and not out.is_dir():
        return [f"OUT {name}: is a file; give a folder, or a name that ends with .safetensors"]
    if (target.parent / MANIFEST).exists():
        return [f"OUT {name}: is inside a checkpoint, whose files must not change; choose another folder"]
    there = [path for path in (target, out / "config.json") if path.exists()]
    if there and not overwrite:
        return [f"OUT {shown(str(there[0]), 200)}: exists; --overwrite replaces it"]
    problem = unwritable(target.parent)
    return [f"OUT {name}: {problem}"] if problem else []


def _import(arguments: Arguments, folder: Path, source: Path) -> int:
    """Write a model's weights as a checkpoint, and print its fields as YAML for the configuration of a run."""
    from labkit.config import yaml_text
    from labkit.train.checkpoint.exchange import Import, import_weights

    if folder.exists() and not folder.is_dir():
        arguments.refuse([f"DIR {shown(str(folder), 200)}: is a file; give a folder"])
    if problem := unwritable(folder):
        arguments.refuse([f"DIR {shown(str(folder), 200)}: {problem}"])
    try:
        manifest = import_weights(Import(source), folder)
    except CheckpointError as error:
        arguments.refuse([str(error)])
        raise
    except OSError as error:
        raise CommandFailedError(f"import to {folder}: {error}") from error
    size = size_words(sum(file.size for file in manifest.files.values()))
    tensors = counted(len(manifest.tensors), "tensor")
    start = [
        f"{tensors}, {size}. Save this as f.yaml, then start a run from these weights with",
        f"  labkit train --config f.yaml --checkpoint.load {quote(str(folder))}",
    ]
    pickled = sorted(source.glob("pytorch_model*.bin"))
    start += [f"{file} is pickled: neither read nor compared with the safetensors files next to it" for file in pickled]
    columns = room()
    for line in folded("\n".join(start), width=columns and columns - 2):
        print(f"# {line}")
    print(yaml_text.dump(manifest.config), end="")
    return 0


def _push(arguments: Arguments, folder: Path, repository: Path) -> int:
    """Upload the weights of one checkpoint, its tokenizer and a model card to the Hugging Face Hub."""
    from labkit.cli.checkpoints.hub import push

    options = arguments.options
    path = _chosen(arguments, folder)
    try:
        loading(path)
        export, reader = _export_of(path, options["dtype"])
        address = push(export, reader.manifest, str(repository), private=options["private"], weights=WEIGHTS)
    except CheckpointError as error:
        raise CommandFailedError(f"push of {path} to {repository}: {error}") from error
    show(f"{path.name} is at {address}")
    return 0


def _pull(arguments: Arguments, folder: Path, repository: Path) -> int:
    """Download a model from the Hugging Face Hub and write its weights as a checkpoint, as import does."""
    import tempfile

    from labkit.cli.checkpoints.hub import pull

    with tempfile.TemporaryDirectory(prefix="labkit-pull-") as name:
        try:
            source = pull(str(repository), arguments.options["revision"], Path(name))
        except CheckpointError as error:
            raise CommandFailedError(f"pull of {repository}: {error}") from error
        return _import(arguments, folder, source)


def _found(arguments: Arguments, folder: Path) -> list[Path]:
    try:
        return checkpoints_at(folder)
    except CheckpointError as error:
        arguments.refuse([str(error)])
        raise


ACTIONS: dict[str, Action] = {
    "list": Action(_list, "DIR"),
    "verify": Action(_verify, "DIR"),
    "export": Action(_export, "DIR OUT", ("step", "dtype", "overwrite")),
    "import": Action(_import, "DIR SOURCE"),
    "push": Action(_push, "DIR REPO", ("step", "dtype", "private")),
    "pull": Action(_pull, "DIR REPO", ("revision",)),
}

COMMAND = Command(
    name="checkpoint",
    summary="Checkpoints of a run: `list DIR` shows them, `verify DIR` reads every byte, `export DIR OUT` writes the "
    "weights in Hugging Face's names (OUT.safetensors, or a folder with config.json), and `import DIR SOURCE` makes a "
    "checkpoint from a model's folder or safetensors file. `push DIR REPO` and `pull DIR REPO` do the same with the "
    "Hugging Face Hub (HF_TOKEN, HF_ENDPOINT). DIR is the folder of a run, or of its checkpoints; verify, export and "
    "push also take one step.",
    options=(
        Option("step", "int", "export or push the checkpoint of this step", ge=0, unset="default: the latest"),
        Option("dtype", "str", "type of the exported weights", choices=DTYPES, unset="default: as stored"),
        Option("overwrite", "bool", "export over existing files", False),
        Option("private", "bool", "make the repository of a push private, if it is new", False),
        Option("revision", "str", "branch, tag or commit to pull", unset="default: main"),
    ),
    execute=execute,
    example="labkit checkpoint export runs/a model.safetensors --dtype bf16",
    words="ACTION DIR [OUT|SOURCE|REPO]",
    paths=True,
    actions=ACTIONS,
)
