"""`labkit checkpoint push` and `pull` against a server on loopback that speaks the Hub's protocol.

The protocol is that of huggingface_hub, whose requests are answered as its documentation describes; nothing here was
tried against huggingface.co itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from safetensors.torch import load_file

TOKEN = "hf_" + "x" * 34
COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Repositories in memory: name -> file -> bytes. What is stored by hash waits in `blobs`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, code: int, body: Any = b"", **heads: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **heads}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = b""
            while size := int(self.rfile.readline(), 16):
                pieces += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return pieces
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _may(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self._body()
        if not self._may():
            self._answer(401, {"error": "Invalid user token"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.server.repositories:
                self._answer(
                    409, {"error": "You already created this model repo", "url": f"{self.server.address}/{name}"}
                )
                return
            self.server.repositories[name] = {}
            self.server.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            self._answer(200, {"url": f"{self.server.address}/{name}", "name": name, "id": "1"})
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            self._answer(200, {"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {"oid": each["oid"], "size": each["size"], "authenticated": True,
                 "actions": {"upload": {"href": f"{self.server.address}/blob/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]  # fmt: skip
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            files = self.server.repositories[found[1]]
            for line in body.decode().splitlines():
                change = json.loads(line)
                if change["key"] == "file":
                    files[change["value"]["path"]] = base64.b64decode(change["value"]["content"])
                elif change["key"] == "lfsFile":
                    files[change["value"]["path"]] = self.server.blobs[change["value"]["oid"]]
            address = f"{self.server.address}/{found[1]}/commit/{COMMIT}"
            self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""})
        else:
            self._answer(404, {"error": f"no {path}"})

    def do_PUT(self) -> None:
        content, oid = self._body(), self.path.rpartition("/")[2]
        self.server.blobs[oid] = content
        self._answer(200 if hashlib.sha256(content).hexdigest() == oid else 400)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        known = self.server.repositories
        if (found := re.fullmatch(r"/api/models/(.+?)/tree/(.+)", path)) and found[1] in known:
            files = known[found[1]].items()
            oids = {name: hashlib.sha1(content).hexdigest() for name, content in files}
            self._answer(200, [{"type": "file", "path": n, "size": len(c), "oid": oids[n]} for n, c in files])
        elif found := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            if found[1] not in known or not self._may():
                self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            elif found[2] not in (None, "main", COMMIT):
                self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            else:
                siblings = [{"rfilename": name} for name in known[found[1]]]
                self._answer(200, {"id": found[1], "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif (found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)) and found[3] in known.get(found[1], {}):
            content = known[found[1]][found[3]]
            tag = hashlib.sha256(content).hexdigest()
            self._answer(200, content, ETag=f'"{tag}"', X_Repo_Commit=COMMIT, X_Linked_Size=str(len(content)))
        else:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps and its checkpoint."""
    folder = tmp_path_factory.mktemp("hub") / "run"
    words = ["--train.steps", "2", "--checkpoint.dir", str(folder), "--checkpoint.interval", "1"]
    command = [sys.executable, "-m", "labkit.cli", "train", "--preset", "tiny", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


def labkit(hub: Hub, home: Path, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    command = [sys.executable, "-m", "labkit.cli", "checkpoint", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_checkpoint_goes_to_the_hub_and_comes_back_with_the_same_weights(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    pushed = labkit(hub, tmp_path, "push", str(checkpoint), "me/tiny", "--private")
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout == f"step_00000002 is at {hub.address}/me/tiny/commit/{COMMIT}\n"
    files = hub.repositories["me/tiny"]
    assert set(files) >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"} and hub.private["me/tiny"]
    pulled = labkit(hub, tmp_path, "pull", str(tmp_path / "mine"), "me/tiny")
    assert pulled.returncode == 0, pulled.stderr
    assert "labkit train --config f.yaml --checkpoint.load" in pulled.stdout
    exported = tmp_path / "again.safetensors"
    assert labkit(hub, tmp_path, "export", str(tmp_path / "mine"), str(exported)).returncode == 0
    before = tmp_path / "before.safetensors"
    before.write_bytes(files["model.safetensors"])
    ours, theirs = load_file(exported), load_file(before)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_card_says_what_was_trained_and_loads_in_transformers(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle that loads what the card says")
    assert labkit(hub, tmp_path, "push", str(checkpoint), "me/card", "--step", "1").returncode == 0
    files = hub.repositories["me/card"]
    card = files["README.md"].decode()
    head, _, text = card.removeprefix("---\n").partition("\n---\n")
    assert head == "library_name: transformers\npipeline_tag: text-generation\ntags: [labkit, megatron]"
    pull = "labkit checkpoint pull runs/mine me/card"
    for words in ("for 1 step on\n1 rank", "has no license until", pull, "`tokenizer.json`", "Versions: python "):
        assert words in text, text
    assert str(checkpoint) not in card, "no path of this machine"
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    count = int(re.search(r"of ([\d,]+) parameters", text)[1].replace(",", ""))  # pyright: ignore[reportOptionalSubscript]
    assert count == model.num_parameters()
    assert len(transformers.AutoTokenizer.from_pretrained(folder)("the old cat").input_ids) > 0


@pytest.mark.parametrize(
    ("words", "token", "said"),
    [
        (("push", "{run}", "me/tiny"), "hf_wrong", "push of "),
        (("push", "{run}", "not a name"), TOKEN, "not a name"),
        (("pull", "{new}", "me/none"), TOKEN, "there is no such repository, or your token may not see it"),
        (("pull", "{new}", "me/pickled"), TOKEN, "me/pickled has no safetensors files; pickled weights are not read"),
        (("pull", "{new}", "me/tiny2", "--revision", "old"), TOKEN, "there is no such revision"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    hub: Hub, checkpoint: Path, tmp_path: Path, words: tuple[str, ...], token: str, said: str
) -> None:
    hub.repositories |= {"me/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"}, "me/tiny2": {}}
    places = {"run": str(checkpoint), "new": str(tmp_path / "new")}
    found = labkit(hub, tmp_path, *(word.format(**places) for word in words), token=token)
    assert found.returncode == 1 and said in found.stderr and len(found.stderr.splitlines()) <= 2, found.stderr
    assert "Traceback" not in found.stderr and not (tmp_path / "new").exists()


def test_no_hub_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    class Nobody:
        address = "http://127.0.0.1:1"

    found = labkit(Nobody(), tmp_path, "pull", str(tmp_path / "new"), "me/tiny")  # pyright: ignore[reportArgumentType]
    assert found.returncode == 1 and "the Hub was not reached" in found.stderr, found.stderr


def test_a_tokenizer_that_is_gone_is_told_before_anything_is_sent(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    from labkit.cli.checkpoints.hub import tokenizer_files
    from labkit.train.checkpoint.manifest import CheckpointError

    with pytest.raises(CheckpointError, match="is not there any more"):
        tokenizer_files({"data": {"tokenizer": str(tmp_path / "gone.json")}})
    names = ("gpt2-vocab.json", "gpt2-merges.txt", "tokenizer_config.json")
    for name in names:
        (tmp_path / name).write_text("{}")
    assert {path.name for path in tokenizer_files({"data": {"tokenizer": str(tmp_path / names[0])}})} == set(names)
