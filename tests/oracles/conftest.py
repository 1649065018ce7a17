"""The way of a model of transformers through a checkpoint of ours and back; nobody patches torch in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.launch import preload

# Every optimizer of torch imports the one, megatron-core the other: two seconds in each rank, or once in the server.
preload("torch._dynamo", "torch._inductor.compile_fx")


@pytest.fixture(autouse=True)
def torch_stays_as_it_is() -> Iterator[None]:
    """`megatron_on_cpu` patches torch for good: imported here and not in a rank, it breaks later tests of others."""
    yield
    assert "megatron_on_cpu" not in sys.modules, "import megatron_on_cpu inside a function that `run` calls on a rank"


@pytest.fixture
def there_and_back(tmp_path: Path) -> Callable[[Any], Any]:
    """A function: their model -> their folder -> our checkpoint -> their folder -> the model that transformers loads.

    It has the same weights, bit for bit."""
    from labkit.models.full_shapes import full_shapes
    from labkit.train.checkpoint.exchange import Export, Import, export_folder, import_weights
    from labkit.train.checkpoint.shard_files import Reader

    def back(theirs: Any) -> Any:
        theirs.save_pretrained(tmp_path / "theirs")
        imported = Import(tmp_path / "theirs")
        assert {name: tuple(like.shape) for name, like in imported.likes.items()} == full_shapes(imported.model)
        import_weights(imported, tmp_path / "ours")
        reader = Reader(tmp_path / "ours" / "step_00000000")
        export_folder(Export(reader), tmp_path / "back", "model.safetensors")
        reader.close()
        again = type(theirs).from_pretrained(tmp_path / "back").eval()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name]), name
        return again

    return back
