"""Checkpoints to the Hugging Face Hub and back: `labkit checkpoint push` and `pull`.

A push has what `labkit checkpoint export` writes, the tokenizer of the run and a model card, in one commit. A pull
takes a model's files, from whoever made them, and imports them. The Hub's address and token are those of the library:
HF_ENDPOINT, and HF_TOKEN or `hf auth login`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.cli.checkpoints.model_card import model_card
from labkit.data.text import BUNDLED
from labkit.train.checkpoint.exchange import Export, export_folder
from labkit.train.checkpoint.manifest import CheckpointError, Manifest

NEEDED = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json", "vocab.*", "merges.txt"]
"""Files of a model that a pull takes; pickled weights and code stay where they are."""


def push(export: Export, manifest: Manifest, repository: str, *, private: bool, weights: str) -> str:
    """Upload a checkpoint with its tokenizer and card, and return the address of the commit.

    Raises CheckpointError with the Hub's words, and before anything is sent for a tokenizer that isn't there.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-push-") as name, _told():
        from huggingface_hub import HfApi

        folder = Path(name)
        files = [_copied(path, folder) for path in tokenizer_files(manifest.config)]
        export_folder(export, folder, weights)
        (folder / "README.md").write_text(model_card(export, manifest, repository, files), encoding="utf-8")
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Step {manifest.step}, trained with labkit"
        )
        return str(done.commit_url)


def pull(repository: str, revision: str | None, folder: Path) -> Path:
    """Download the files of a model into `folder`, and return it. Raises CheckpointError with the Hub's words."""
    with _told():
        from huggingface_hub import snapshot_download

        found = Path(snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=NEEDED))
    if not any(found.glob("*.safetensors")):
        raise CheckpointError(f"{repository} has no safetensors files; pickled weights are not read")
    return found


def tokenizer_files(config: dict[str, Any]) -> list[Path]:
    """Return the files of the tokenizer that a run read; of the bundled one if its configuration names none."""
    given = config.get("data", {}).get("tokenizer")
    first = Path(given) if given else BUNDLED / "tokenizer.json"
    if not first.is_file():
        raise CheckpointError(f"the run's tokenizer {first} is not there any more; without it the model says nothing")
    beside = [first.parent / name for name in ("tokenizer_config.json", "special_tokens_map.json")] if given else []
    merges = (
        [first.with_name(first.name.replace("vocab.json", "merges.txt"))] if first.name.endswith("vocab.json") else []
    )
    return [first, *(path for path in [*beside, *merges] if path.is_file())]


def _copied(path: Path, folder: Path) -> str:
    """Copy a file of a tokenizer under the name that transformers looks for, and return this name."""
    kinds = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")
    name = next((kind for kind in kinds if path.name.endswith(kind)), "tokenizer.json")
    shutil.copyfile(path, folder / name)
    return name


@contextmanager
def _told() -> Iterator[None]:
    """Turn what the library raises into a CheckpointError with the cause in one line."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"there is no such repository, or your token may not see it ({_line(error)})") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"there is no such revision ({_line(error)})") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalTokenNotFoundError) as error:
        raise CheckpointError(_line(error)) from error
    except (httpx.HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise CheckpointError(f"the Hub was not reached ({_line(error)})") from error


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
