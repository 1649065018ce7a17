"""The magic `%%ranks`, which runs a cell of a notebook on ranks. `%load_ext labkit` registers it.

    %%ranks 4
    x = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(x)
    x                                               # a value for each rank; equal ones are shown once

    ranks["x"]                                      # in a later cell of the notebook: the values of x, by rank

The ranks are those of the notebook's name `ranks`, a `labkit.launch.Ranks`; if there is none, the first `%%ranks N`
makes it. What a cell assigns stays on its rank until the ranks end. A name that no such cell has assigned has its
present value of the notebook, as it would in a function that is given to `Ranks.run`. As with `%%px` of ipyparallel,
`--out NAME` keeps the values of the last expression.
"""

from __future__ import annotations

import linecache
import symtable
import traceback
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.launch import pickling, rank_cells
from labkit.launch.by_rank import RankValues
from labkit.launch.failure_report import RankError
from labkit.launch.launcher import Ranks
from labkit.launch.rank_pool import RankPool

NAME = "ranks"
"""The notebook's name of the ranks."""


@magics_class
class RankMagics(Magics):
    """`%%ranks`, and `%ranks` for what needs no cell."""

    shell: InteractiveShell  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._pool: RankPool | None = None
        self._assigned: set[str] = set()
        """Names that cells have assigned on the ranks of `_pool`."""
        self._read: set[str] = set()
        """Names of the notebook that they have read. Their values are sent with each cell, because they may change."""

    @magic_arguments()
    @argument("world_size", nargs="?", help="number of ranks, such as 4 or {world_size}; default: those of `ranks`")
    @argument("--out", metavar="NAME", help="keep the values of the last expression, by rank, under this name")
    @argument("--timeout", type=float, metavar="SECONDS", help="longest that a rank may wait for others in this cell")
    @argument("--reset", action="store_true", help="first forget what earlier cells have assigned on the ranks")
    @argument("--close", action="store_true", help="end the ranks after this cell")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> RankValues | None:
        """Run a cell on ranks, show its output by rank, and return the values of its last expression."""
        arguments = parse_argstring(self.ranks, line)
        if cell is None and arguments.close and NAME not in self.shell.user_ns:
            return None
        if arguments.out is not None and not arguments.out.isidentifier():
            raise UsageError(f"--out {arguments.out}: is not a name")
        ranks = self._ranks(arguments.world_size)
        values = None
        try:
            if arguments.reset:
                ranks.run(rank_cells.reset)
                self._assigned, self._read = set(), set()
            if cell is not None:
                values = self._run(ranks, cell, arguments.timeout)
        finally:
            if arguments.close:
                ranks.close()
                self.shell.user_ns.pop(NAME, None)
        if values is None:
            return None
        if arguments.out is not None:
            self.shell.user_ns[arguments.out] = values
        silent = cell is not None and cell.rstrip().endswith(";")
        return None if silent or all(value is None for value in values) else values

    def _ranks(self, word: str | None) -> Ranks:
        """Return the notebook's ranks, or new ones. Raises UsageError if they are not as many as `word` says."""
        found = self.shell.user_ns.get(NAME)
        if word is not None and not word.isdecimal():
            raise UsageError(f"{word}: give the number of ranks, as in %%ranks 4 or %%ranks {{world_size}}")
        if found is None and word is None:
            raise UsageError("there are no ranks yet; give their number, as in %%ranks 4")
        if found is None:
            try:
                found = self.shell.user_ns[NAME] = Ranks(int(str(word)))
            except ValueError as error:
                raise UsageError(str(error)) from None
        if not isinstance(found, Ranks):
            raise UsageError(
                f"the notebook's name `{NAME}` is of type {type(found).__name__}, and %%ranks keeps its ranks there; "
                "give yours another name"
            )
        if word is not None and int(word) != found.world_size:
            raise UsageError(
                f"`{NAME}` has {found.world_size} ranks, not {word}; leave the number out, or end them first: "
                f"%ranks --close"
            )
        return found

    def _run(self, ranks: Ranks, cell: str, timeout: float | None) -> RankValues:
        """Run the cell; an error shows what the ranks say, without the frames of IPython and labkit."""
        file = f"In[{self.shell.displayhook.prompt_count}]"
        source = f"\n{cell}"  # its lines then have the numbers that they have below the line of the magic
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        if ranks._pool is not self._pool:
            self._assigned, self._read = set(), set()
        try:
            table = symtable.symtable(source, file, "exec")
            compile(source, file, "exec")
        except SyntaxError as error:
            raise UsageError(f"this cell is not Python:\n{''.join(traceback.format_exception_only(error))}") from None
        read = self._read | _read_names(table)
        notebook = set(self.shell.user_ns) - set(self.shell.user_ns_hidden) - {NAME}
        sent = {name: self.shell.user_ns[name] for name in sorted((read & notebook) - self._assigned)}
        try:
            values = ranks.run(rank_cells.execute, source, file, sent, timeout=timeout, together=True)
        except TypeError:
            raise UsageError(_cannot_be_sent(sent)) from None
        except RankError as error:
            # IPython shows these lines in place of a traceback, as it does for errors of ipyparallel's engines
            error._render_traceback_ = str(error).splitlines  # pyright: ignore[reportAttributeAccessIssue]
            raise
        self._pool, self._read = ranks._pool, read
        self._assigned |= {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
        return RankValues(values)


def _cannot_be_sent(values: dict[str, Any]) -> str:
    """Return which of these values of the notebook cannot travel, and what to do."""
    for name, value in values.items():
        try:
            pickling.pack(len, (value,))
        except TypeError as error:
            return f"{name} cannot be sent to the ranks: {error.__cause__}; make it there, in a cell of %%ranks"
    raise AssertionError("only values that cannot be pickled keep a cell from its ranks")


def _read_names(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a cell reads, in its functions and comprehensions as well."""
    outermost = table.get_type() == "module"
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (outermost or symbol.is_global())
    }
    return names.union(*map(_read_names, table.get_children()))
