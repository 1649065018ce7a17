"""`%%ranks` in a shell of this process: names, values, output, errors, and what is left of its ranks."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from labkit.launch import RankError
from labkit.launch.by_rank import RankValues

SETUP = "%load_ext labkit\nimport torch, torch.distributed as dist\nscale = 3\ndef scaled(x):\n    return scale * x\n"


@pytest.fixture(scope="module")
def shell(living: Callable[[], list[int]]) -> Iterator[InteractiveShell]:
    """A shell with the magic and two ranks."""
    shell = InteractiveShell.instance()
    shell.run_cell(SETUP).raise_error()
    yield shell
    shell.run_cell("%ranks --close").raise_error()
    assert living() == []
    InteractiveShell.clear_instance()


@pytest.fixture
def run(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> Callable[[str], SimpleNamespace]:
    """Run a cell of these lines; return its value, its error, and what a person sees of it."""

    def one(cell: str) -> SimpleNamespace:
        capsys.readouterr()
        result = shell.run_cell(textwrap.dedent(cell), store_history=True)
        shown = capsys.readouterr()
        return SimpleNamespace(value=result.result, error=result.error_in_exec, out=shown.out, err=shown.err)

    return one


def test_names_live_on_the_ranks_and_come_back_by_rank(run) -> None:
    assert "are no ranks yet; give their number, as in %%ranks 4" in run("%%ranks\n1").err
    first = run("%%ranks 2\nx = torch.full((2,), 1.0 + dist.get_rank())\ndist.all_reduce(y := x.clone())\nx")
    assert isinstance(first.value, RankValues) and [value.tolist() for value in first.value] == [[1, 1], [2, 2]]
    assert "[rank 0] tensor([1., 1.])\n[rank 1] tensor([2., 2.])" in first.out
    assert run("%%ranks\ny.tolist()").out.endswith("[both ranks] [3.0, 3.0]\n")
    assert [value.tolist() for value in run("ranks['y']").value] == [[3, 3], [3, 3]]
    assert "no cell of %%ranks has assigned 'z' on rank 0, 1" in str(run("ranks['z']").error)
    assert run("%%ranks --out kept\nx[0].item();").value is None
    assert run("kept").value == [1, 2]


def test_other_names_have_the_notebooks_present_value(run) -> None:
    run("%%ranks 2\ndef twice(x):\n    return 2 * scaled(x) + offset")
    run("offset, scale = 1, 3")
    assert run("%%ranks\ntwice(1)").value == [7, 7]
    run("offset, scale = 2, 4")
    assert run("%%ranks\ntwice(1)").value == [10, 10]
    run("%%ranks\nscale = 100")
    assert run("%%ranks\nscale").value == [100, 100] and run("scale").value == 4, "each side has its own by now"
    assert run("%%ranks --reset\nscale").value == [4, 4]
    assert (
        "lock cannot be sent to the ranks: cannot pickle"
        in run("import _thread; lock = _thread.allocate_lock()\n%ranks --reset\n").err + run("%%ranks\nlock").err
    )


def test_output_is_shown_by_rank_and_once_where_it_is_equal(run) -> None:
    shown = run("%%ranks 2\nprint('same')\nprint('both')")
    assert (shown.out, shown.value) == ("[both ranks] same\n[both ranks] both\n", None)
    assert run("%%ranks\nprint(dist.get_rank())").out == "[rank 0] 0\n[rank 1] 1\n"
    assert run("%%ranks\nif dist.get_rank(): print('alone')").out == "[rank 1] alone\n"
    assert "ProcessGroup" in run("%%ranks\ndist.group.WORLD").out, "what cannot leave its rank comes as its repr"


def test_an_error_names_the_rank_and_the_line_of_the_cell(run, shell, living) -> None:
    run("%%ranks 2\nstays = 1")
    failed = run("%%ranks\nif dist.get_rank() == 1:\n    raise ValueError('boom')")
    assert isinstance(failed.error, RankError) and failed.error.ranks == [1]
    number = shell.execution_count - 1
    assert f'File "In[{number}]", line 3, in <module>\n      raise ValueError' in failed.out
    assert "rank 1 of 2 raised ValueError: boom" in failed.out and "magic.py" not in failed.out + str(failed.error)
    assert run("%%ranks\nstays").value == [1, 1]
    hung = run(
        "%%ranks --timeout 1\nif dist.get_rank() == 0:\n    dist.barrier()\nelse:\n    import time; time.sleep(60)"
    )
    assert "rank 0 of 2 waited for rank 1" in hung.out and ":5)" in hung.out and living() == []
    again = run("%%ranks\nstays")
    assert "new ranks started" in again.out and "NameError: name 'stays' is not defined" in again.out


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%ranks two\n1", "two: give the number of ranks, as in %%ranks 4 or %%ranks {world_size}"),
        ("%%ranks 3\n1", "`ranks` has 2 ranks, not 3; leave the number out, or end them first: %ranks --close"),
        ("%%ranks --frobnicate\n1", "unrecognized arguments: --frobnicate"),
        ("%%ranks --out 2x\n1", "--out 2x: is not a name"),
        ("%%ranks\nif True\n    1", "line 2\n    if True\n           ^\nSyntaxError: expected"),
    ],
)
def test_what_cannot_be_is_one_message(run, cell: str, said: str) -> None:
    run("%%ranks 2\n")
    assert said in (shown := run(cell)).err and "Traceback" not in shown.out + shown.err


def test_a_name_of_another_type_is_left_alone(run, shell) -> None:
    mine = shell.user_ns.pop("ranks", None)
    run("ranks = [0, 1]")
    assert "the notebook's name `ranks` is of type list" in run("%%ranks 2\n1").err
    assert run("ranks").value == [0, 1]
    shell.user_ns["ranks"] = mine


def test_numbers_of_impossible_launches_are_rejected_before_any_process(shell, run) -> None:
    mine = shell.user_ns.pop("ranks", None)
    assert "world_size must be between 1 and 512" in run("%%ranks 1000\n1").err and "ranks" not in shell.user_ns
    shell.user_ns["ranks"] = mine


def test_import_of_labkit_needs_no_ipython() -> None:
    code = "import sys, labkit.launch.launcher; assert 'IPython' not in sys.modules and labkit.load_ipython_extension"
    subprocess.run([sys.executable, "-c", code], check=True)
