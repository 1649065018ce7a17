"""Layout texts against megatron-core 0.16.1's parser: what we accept means the same there."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config.pipeline_layout import parse_layout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        reason="needs megatron-core",
    )

pytestmark = pytest.mark.oracle
LETTERS = {"embedding": "E", "decoder": "t", "loss": "L"}
UNIT = st.sampled_from(["t", "tt", "t*3", "(tt|)*2t", "(t|t)*3", "t,t", "t|t*2", "t||t", "|", "(|)*2", "t(|t)*2|"])


@given(st.lists(UNIT, min_size=1, max_size=5), st.sampled_from(["", "|"]), st.sampled_from(["", "|"]))
def test_stages_equal_megatron_cores(units: list[str], after: str, before: str) -> None:
    text = f"E{after}{'|'.join(units)}{before}L"
    parsed = theirs.PipelineParallelLayerLayout.parse_str_to_list(text)
    stages = ["".join(LETTERS[layer.name] for layer in stage) for stage in parsed]
    assert parse_layout(text) == stages
    if layers := "".join(stages).count("t"):
        theirs.PipelineParallelLayerLayout(text, len(stages)).validate_layer_layout(layers, mtp_num_layers=0)
