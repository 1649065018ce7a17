"""`labkit calibrate`: measure this machine, and write it as a machine on which `labkit plan` plans."""

from __future__ import annotations

from pathlib import Path

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.output import show
from labkit.config.errors import shown
from labkit.output_files import unwritable

_DEVICES = ("auto", "cpu", "cuda")


def execute(arguments: Arguments) -> int:
    """Measure, write the file and say what was found. Nothing is written if it is interrupted."""
    path = Path(arguments.options["out"])
    arguments.refuse(_problems(path, arguments))
    from labkit.train.calibration import calibrate

    try:
        found = calibrate(arguments.options["device"], say=lambda line: show(f"measuring: {line}"))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {path} was not written") from None
    found.write(path)
    show("\n".join(["", *_summary(found.values), *map(_advice, found.doubts),
                    f"written: {path} ({found.seconds:.0f} s); plan for it with --machine {path}"]))  # fmt: skip
    return 0


def _problems(path: Path, arguments: Arguments) -> list[str]:
    """Return what can be seen before anything is measured."""
    device, given = arguments.options["device"], f"--out {shown(str(path), 200)}"
    problems = []
    if device not in _DEVICES:
        problems.append(f"--device {shown(device)}: choose one of {', '.join(_DEVICES)}")
    elif device == "cuda":
        import torch

        if not torch.cuda.is_available():
            problems.append("--device cuda: torch sees no GPU; set it to cpu or auto")
    if path.suffix not in (".yaml", ".yml"):
        problems.append(f"{given}: its name ends with .yaml or .yml, by which --machine knows a file")
    if path.is_dir():
        problems.append(f"{given}: is a folder; name a file in it")
    elif path.exists() and not arguments.options["overwrite"]:
        problems.append(f"{given}: exists; --overwrite replaces it")
    elif why := unwritable(path.parent):
        problems.append(f"{given}: its folder {why}")
    return problems


def _summary(values: dict) -> list[str]:
    """Return the main numbers, in the units of data sheets."""
    level = values["levels"][0]
    bandwidth, latency = level["bandwidth"]["value"] / 1e9, level["latency"]["value"] * 1e6
    between = f"{bandwidth:,.2f} GB/s, from {latency:,.0f} us" if latency else "not measured, since there is one rank"
    peaks = ", ".join(f"{dtype} {entry['value'] / 1e9:,.0f}" for dtype, entry in values["peak_flops"].items())
    return [
        f"products, best of a rank   {peaks} GFLOP/s",
        f"memory, per rank           {values['memory_bandwidth']['value'] / 1e9:,.1f} GB/s",
        f"overhead per kernel        {_kernel_seconds(values) * 1e6:,.1f} us",
        f"overhead per step          {values['software']['default host']['value'] * 1e3:,.2f} ms",
        f"between ranks              {between}",
        f"interval of a prediction   +- {values['interval']['default']['value']:.0%}",
    ]


def _kernel_seconds(values: dict) -> float:
    return max(values["kernel_launch"]["value"], values["host_launch"]["value"])


def _advice(doubt: str) -> str:
    return f"{doubt}; the constants are too slow, so calibrate again on a quiet machine"


COMMAND = Command(
    name="calibrate",
    summary="Measure this machine and write it as a YAML file for `labkit plan --machine`; takes one to two minutes.",
    options=(
        Option("out", "str", "file of the machine", "this_machine.yaml", path="any"),
        Option("device", "str", "cpu, cuda, or auto: GPUs where torch sees any", "auto"),
        Option("overwrite", "bool", "replace the file if it exists", False),
    ),
    execute=execute,
    example="labkit calibrate --out my_laptop.yaml",
)
