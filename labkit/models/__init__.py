"""Models written once for every layout, and their costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.models.bert.bert_model import BertModel as BertModel
    from labkit.models.chunks import ChunkSpec as ChunkSpec
    from labkit.models.chunks import build_model_chunk as build_model_chunk
    from labkit.models.chunks import build_model_chunks as build_model_chunks
    from labkit.models.convert import full_state_from_hugging_face as full_state_from_hugging_face
    from labkit.models.convert import full_state_to_hugging_face as full_state_to_hugging_face
    from labkit.models.footprint import Footprint as Footprint
    from labkit.models.full_state import gather_full_state as gather_full_state
    from labkit.models.full_state import load_full_state as load_full_state
    from labkit.models.gpt import GPTModel as GPTModel
    from labkit.models.hugging_face_config import config_to_hugging_face as config_to_hugging_face
    from labkit.models.hugging_face_config import model_config_from_hugging_face as model_config_from_hugging_face
    from labkit.models.hugging_face_config import moe_config_from_hugging_face as moe_config_from_hugging_face
    from labkit.models.kept_storages import kept_tensors as kept_tensors
    from labkit.models.kept_storages import running_line as running_line
    from labkit.models.kept_storages import storage_of as storage_of
    from labkit.models.lifetimes import Lifetimes as Lifetimes
    from labkit.models.live_bytes import LiveBytes as LiveBytes
    from labkit.models.saved_tensors import SavedTensors as SavedTensors
    from labkit.models.synthetic_load import SleepingStage as SleepingStage
    from labkit.models.synthetic_load import sleep_through as sleep_through
    from labkit.models.t5.t5_model import T5Model as T5Model
    from labkit.plan.activations import Share as Share
    from labkit.plan.activations import layer_activation_bytes as layer_activation_bytes
    from labkit.plan.activations import layer_parts as layer_parts
    from labkit.plan.activations import paper_layer_bytes as paper_layer_bytes
    from labkit.plan.stages import stage_contents as stage_contents
    from labkit.plan.stages import stage_layers as stage_layers

__all__, __getattr__, __dir__ = public_names(__name__)
