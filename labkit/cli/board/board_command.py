"""`labkit board`: take scores from the notebooks of a room, and show on a page who has solved what."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import signal
import socket
import sqlite3
from pathlib import Path

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.board.store import Store
from labkit.cli.grading.copies import exercise_names
from labkit.cli.output import show
from labkit.config.errors import shown
from labkit.output_files import unwritable

LOOPBACK = "127.0.0.1"


def execute(arguments: Arguments) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    options = arguments.options
    path, token = Path(options["file"]).resolve(), options["token"] or secrets.token_urlsafe(9)
    problems: list[str] = []
    if why := unwritable(path.parent):
        problems.append(f"--file {shown(options['file'], 200)}: its folder {why}")
    if not re.fullmatch(r"[\w-]{8,64}", token, re.ASCII):
        problems.append("--token: must have 8 to 64 letters, digits, - or _, so that it can stand in an address")
    arguments.refuse(problems)

    try:
        store = Store(path, set(exercise_names()))
    except sqlite3.Error as error:
        arguments.refuse([f"--file {shown(options['file'], 200)}: cannot be used as a board ({error})"])
        raise
    try:
        listening = socket.create_server((options["host"], options["port"]))
    except OSError as error:
        arguments.refuse([f"--host {options['host']} --port {options['port']}: {error.strerror or error}"])
        raise
    try:
        asyncio.run(serve(listening, store, token))
    finally:
        store.close()
    show(f"scores are in {path}; start it again with --file {options['file']} --token {token}")
    return 0


async def serve(listening: socket.socket, store: Store, token: str) -> None:
    """Serve a board on a socket that listens, until a signal asks it to end."""
    from tornado.httpserver import HTTPServer

    from labkit.cli.board.server import LARGEST, application

    logging.getLogger("tornado").setLevel(logging.CRITICAL)  # a refused post is an answer, not an event
    server = HTTPServer(application(store, token), max_body_size=LARGEST, max_header_size=LARGEST)
    listening.setblocking(False)
    server.add_socket(listening)
    host, port = listening.getsockname()[:2]
    for line in directions(host, port, token):
        show(line)
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    await done.wait()
    server.stop()


def directions(host: str, port: int, token: str) -> list[str]:
    """Return what the teacher reads: the page, and the line that learners paste."""
    addresses = [host] if host not in ("0.0.0.0", "::") else addresses_here()
    lines = [f"board: http://{_bracketed(addresses[0])}:{port}/?token={token}"]
    lines += ["learners paste, before `labkit lab`:"]
    lines += [f"  export LABKIT_BOARD=http://{token}@{_bracketed(address)}:{port}" for address in addresses]
    if host in (LOOPBACK, "localhost", "::1"):
        lines.append("only this machine reaches it; --host 0.0.0.0 opens it to the room")
    return lines


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def addresses_here() -> list[str]:
    """Return this machine's addresses in its network, the one of the default route first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: a datagram socket only looks up the route
            return [probe.getsockname()[0]]
        except OSError:
            return [LOOPBACK]


COMMAND = Command(
    name="board",
    summary="Show on a page in the room who has solved which exercise, as it happens. Notebooks post to it if "
    "LABKIT_BOARD names it; learners get two words as a name. Without --host only this machine reaches it.",
    options=(
        Option("host", "str", "address to listen on, such as 0.0.0.0 for everybody in the room", LOOPBACK),
        Option("port", "int", "port to listen on; 0 takes a free one", 8765, ge=0, le=65535),
        Option("file", "str", "file that keeps the scores; a restart goes on with it", "board.sqlite", path="any"),
        Option("token", "str", "word without which nobody posts or sees anything", unset="default: a random one"),
    ),
    execute=execute,
    example="labkit board --host 0.0.0.0",
)
