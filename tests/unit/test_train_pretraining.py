"""`pretrain` on one process: the four steps, its files, validation, determinism, and what it refuses."""

import json
import math

import pytest
import torch
from run_files import read_events

from labkit.comm.groups import single_process_groups
from labkit.config import RunConfig, presets
from labkit.data import build_gpt_datasets
from labkit.data.gpt_data import GPTDataset
from labkit.events import active_recorder
from labkit.launch import torchrun
from labkit.models.chunks import build_model_chunk, build_model_chunks
from labkit.train import pretrain
from labkit.train.forward_step import forward_step_of, gpt_forward_step, masked_loss


def small(**changes) -> RunConfig:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "steps": 3}
    return presets.tiny().override(shape | changes)


def test_losses_fall_and_metrics_say_what_happened():
    result = pretrain(small(steps=8, lr=3e-3, warmup_steps=2, global_batch_size=8))
    assert len(result.losses) == 8
    assert result.losses[-1] < result.losses[0] - 0.1
    assert [line["step"] for line in result.metrics] == list(range(1, 9))
    assert [line["learning_rate"] for line in result.metrics[:3]] == pytest.approx([0.0, 1.5e-3, 3e-3])
    for line, loss in zip(result.metrics, result.losses):
        assert line["loss"] == loss
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] == pytest.approx(8 * 16 / line["timers"]["step"][1])
        assert line["skipped_steps"] == 0


def test_the_first_loss_is_that_of_a_uniform_guess():
    config = small(steps=1)
    assert pretrain(config).losses[0] == pytest.approx(math.log(config.model.vocab_size), abs=0.1)


def test_the_same_run_twice_is_bit_equal_with_dropout():
    config = small(hidden_dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
    assert pretrain(config).losses == pretrain(config).losses
    assert pretrain(config).losses != pretrain(config.override({"seed": 5})).losses


def test_accumulating_microbatches_gives_the_step_of_one_large_batch():
    changes = {"precision": "fp64", "global_batch_size": 8, "steps": 4}
    many = pretrain(small(micro_batch_size=1, **changes)).losses
    one = pretrain(small(micro_batch_size=8, **changes)).losses
    assert many == pytest.approx(one, rel=1e-12)


def test_fused_gradient_accumulation_changes_nothing_but_rounding():
    fused = pretrain(small(precision="fp64", gradient_accumulation_fusion=True)).losses
    plain = pretrain(small(precision="fp64", gradient_accumulation_fusion=False)).losses
    assert fused == pytest.approx(plain, rel=1e-12)


def test_bf16_follows_fp32():
    changes = {"steps": 8, "lr": 3e-3, "global_batch_size": 8}
    bf16, fp32 = (pretrain(small(precision=precision, **changes)).losses for precision in ("bf16", "fp32"))
    assert bf16 == pytest.approx(fp32, rel=0.02)
    assert bf16[-1] < bf16[0] - 0.1


def test_validation_at_its_interval_and_at_the_end_then_the_test_split():
    result = pretrain(small(steps=5, eval_interval=2, eval_steps=2))
    assert [step for step, _ in result.series("validation_loss")] == [2, 4, 5]
    assert [step for step, _ in result.series("test_loss")] == [5]


def test_without_a_test_share_the_run_ends_with_its_validation():
    result = pretrain(small(steps=2, eval_steps=1, **{"data.split": "95,5,0"}))
    assert len(result.losses) == 2 and len(result.series("validation_loss")) == 1
    assert result.series("test_loss") == []


@pytest.mark.parametrize("short", ["train", "valid", "test"])
def test_a_split_that_is_needed_and_too_short_is_refused_before_training(short):
    tokens = torch.arange(400).numpy() % 7
    splits = tuple(
        GPTDataset(tokens[:16] if name == short else tokens, 16, name=name) for name in ("train", "valid", "test")
    )
    with pytest.raises(ValueError, match=f"the {short} split is empty"):
        pretrain(
            small(eval_steps=1), datasets_provider=lambda _: splits, forward_step=lambda *_: pytest.fail("trained")
        )


def test_a_test_that_fails_leaves_the_losses_and_says_where(tmp_path):
    def forward_step(data_iterator, model):
        calls.append(model.training)
        if len(calls) > 3 * 4 + 4:
            raise RuntimeError("bad sample")
        return gpt_forward_step(data_iterator, model)

    calls = []
    with pytest.raises(RuntimeError, match="bad sample") as error:
        pretrain(
            small(eval_steps=1, output_dir=str(tmp_path), log_interval=2, write_events=True), forward_step=forward_step
        )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 3] and "validation_loss" in lines[-1]
    [note] = error.value.__notes__
    assert "done: 3 of 3 training steps" in note and str(tmp_path) in note and f"{lines[1]['loss']:.4f}" in note
    assert {event.kind for event in read_events(tmp_path / "events.jsonl")} >= {"forward", "backward"}


def test_validation_changes_no_training_step():
    quiet = pretrain(small(steps=4, hidden_dropout=0.1))
    asked = pretrain(small(steps=4, hidden_dropout=0.1, eval_interval=1, eval_steps=1))
    assert asked.losses == quiet.losses


def test_validation_loss_is_the_mean_over_the_split():
    """With a learning rate of 0 the model stays as drawn, so the loss can be computed from it directly."""
    config = small(steps=1, lr=0.0, eval_steps=2, global_batch_size=2, precision="fp64")
    result = pretrain(config)
    model = build_model_chunks(config, single_process_groups())[0].eval()
    valid = build_gpt_datasets(config)[1]
    samples = torch.stack([torch.from_numpy(valid[index]) for index in range(4)])
    with torch.no_grad():
        expected = model(samples[:, :-1], labels_BS=samples[:, 1:]).mean().item()
    assert result.series("validation_loss")[0][1] == pytest.approx(expected, rel=1e-12)
    assert result.series("validation_perplexity")[0][1] == pytest.approx(math.exp(expected), rel=1e-12)


FAMILIES = ("tiny", "llama_tiny", "tiny_moe", "bert_tiny", "mamba_tiny", "t5_tiny")
DROPOUT = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), 0.1)


@pytest.mark.parametrize("preset", FAMILIES)
def test_what_belongs_to_training_alone_changes_no_evaluation(preset):
    """At a learning rate of 0: smoothing, dropout, the losses and the jitter of routers."""
    plain = presets.get(preset).override({"steps": 1, "lr": 0.0, "eval_steps": 1, "global_batch_size": 2})
    terms = {"label_smoothing": 0.1, **(DROPOUT if plain.model.family != "mamba" else {"hidden_dropout": 0.1})}
    if plain.moe.num_experts:
        terms |= {"z_loss_coeff": 0.1, "input_jitter": 0.1}
    quiet, asked = pretrain(plain), pretrain(plain.override(terms))
    for name in ("validation_loss", "validation_perplexity", "test_loss", "test_perplexity"):
        assert asked.series(name) == quiet.series(name) != []
    assert asked.losses != quiet.losses


def masked(preset, mask_of, spoil=lambda loss_BS, mask_BS: loss_BS):
    """The family's forward step, with another loss mask and another loss of each token."""
    family = presets.get(preset).model.family
    key = "loss_mask" if family == "t5" else "loss_mask_BS"

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        batch[key] = mask_of(batch[key])
        output, loss = forward_step_of(family)(iter([batch]), model)
        if family == "bert":
            return (spoil(output[0], batch[key]), output[1]), loss
        return spoil(output, batch[key]), loss

    return forward_step


@pytest.mark.parametrize("preset", ["tiny", "bert_tiny", "t5_tiny"])
def test_an_infinite_loss_of_a_masked_token_does_not_enter(preset):
    def every_third(mask_BS):
        return mask_BS * (torch.arange(mask_BS.shape[1]) % 3 > 0)

    config = presets.get(preset).override({"steps": 2, "global_batch_size": 2, "eval_steps": 1})
    usual = pretrain(config, forward_step=masked(preset, every_third))
    spoiled = pretrain(
        config, forward_step=masked(preset, every_third, lambda loss, mask: loss.masked_fill(mask == 0, math.inf))
    )
    for name in ("loss", "grad_norm", "validation_loss"):
        assert spoiled.series(name) == usual.series(name) != []


@pytest.mark.parametrize("changes", [{}, {"calculate_per_token_loss": True}])
def test_a_batch_without_a_loss_token_has_no_loss_and_says_so(changes, tmp_path, capsys):
    """The second of three, and the validation: not 0, which would be a perfect prediction."""
    calls = []

    def mask_of(mask_BS):
        calls.append(None)
        return mask_BS * (len(calls) <= 4 or 8 < len(calls) <= 12)

    config = small(output_dir=str(tmp_path), eval_steps=1, **changes)
    result = pretrain(config, forward_step=masked("tiny", mask_of))
    assert [math.isnan(loss) for loss in result.losses] == [False, True, False]
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "no token of this batch counts for the loss" in line] == told[-3:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines if "grad_norm" in line] == [False, True, False]
    assert [line["validation_loss"] for line in lines if "validation_loss" in line] == [None]


def test_a_microbatch_without_a_masked_word_has_no_part_in_the_mean_over_words():
    """Of a BERT. Each second microbatch has none."""
    calls = []

    def mask_of(mask_BS):
        calls.append(None)
        return mask_BS * (len(calls) % 2)

    changes = {"steps": 1, "micro_batch_size": 2, "global_batch_size": 8, "lr": 0.0}
    for binary_head in (True, False):
        config = presets.bert_tiny().override({**changes, "bert_binary_head": binary_head})
        [line] = pretrain(config, forward_step=masked("bert_tiny", mask_of)).metrics
        assert line["lm_loss"] == pytest.approx(math.log(config.model.vocab_size), rel=0.05)
        if not binary_head:
            assert line["loss"] == pytest.approx(line["lm_loss"])


def test_process_non_loss_data_gets_what_the_loss_function_returns():
    seen = []

    def forward_step(data_iterator, model):
        output, loss = gpt_forward_step(data_iterator, model)

        def with_argmax(loss_BS, non_loss_data=False):
            return loss_BS.argmax().item() if non_loss_data else loss(loss_BS)

        return output, with_argmax

    pretrain(
        small(steps=2, eval_interval=1, eval_steps=1),
        forward_step=forward_step,
        process_non_loss_data=lambda collected, step: seen.append((step, len(collected))),
    )
    assert seen == [(1, 4), (2, 4)]


@pytest.mark.parametrize("name", ["process_non_loss_data", "process_non_loss_data_func"])
def test_the_default_loss_function_gives_the_loss_of_every_token(name):
    seen = []
    config = small(steps=2, eval_steps=1, lr=0.0, precision="fp64")
    pretrain(config, **{name: lambda collected, step: seen.append((step, collected))})
    [(step, collected)] = seen
    assert step == 2 and len(collected) == 4
    model = build_model_chunks(config, single_process_groups())[0].eval()
    sample = torch.from_numpy(build_gpt_datasets(config)[1][4])[None]  # the batch after the four that were validated
    with torch.no_grad():
        expected = model(sample[:, :-1], labels_BS=sample[:, 1:])
    torch.testing.assert_close(collected[0]["loss_BS"], expected)
    assert not collected[0]["loss_BS"].requires_grad and collected[0]["loss_mask_BS"].shape == (1, 16)


def test_collecting_what_is_no_loss_changes_no_training_step():
    """No dropout in it, no draw from the random states, and training mode afterwards."""
    changes = {"steps": 4, "eval_interval": 1, "eval_steps": 1, "global_batch_size": 2}
    modes = []

    def forward_step(data_iterator, model):
        modes.append(model.training)
        return gpt_forward_step(data_iterator, model)

    quiet = pretrain(small(**changes, **DROPOUT))
    asked = pretrain(
        small(**changes, **DROPOUT), forward_step=forward_step, process_non_loss_data=lambda collected, step: None
    )
    assert asked.losses == quiet.losses
    assert modes == [True, True, False, False, False, False] * 4 + [False, False]


def test_two_names_of_one_argument_are_refused():
    with pytest.raises(ValueError, match="another name of process_non_loss_data_func; give only one"):
        pretrain(small(), process_non_loss_data=print, process_non_loss_data_func=print)


def test_providers_take_the_place_of_data_and_model():
    config = small()
    tokens = torch.arange(400).numpy() % 7
    splits = tuple(GPTDataset(tokens, 16, name=name) for name in ("train", "valid", "test"))
    built = []

    def model_provider(config, groups, **stage):
        built.append(build_model_chunk(config, groups, **stage))
        return built[-1]

    result = pretrain(config, datasets_provider=lambda _: splits, model_provider=model_provider)
    assert len(built) == 1
    assert all(hasattr(p, "main_grad") for p in built[0].parameters())
    assert len(result.losses) == 3


def test_parameters_keep_no_grad_and_scaled_groups_move_more():
    """With lr_mult 0 on the MLPs only the rest of the model moves."""
    config = small(steps=2)
    built, before = [], {}

    def model_provider(config, groups, **stage):
        built.append(build_model_chunk(config, groups, **stage))
        before.update({name: p.detach().clone() for name, p in built[0].named_parameters()})
        return built[-1]

    pretrain(config, model_provider=model_provider, scale_lr_cond=lambda name, _: ".mlp.fc" in name, lr_mult=0.0)
    for name, param in built[0].named_parameters():
        assert param.grad is None
        assert torch.equal(param, before[name]) == (".mlp.fc" in name), name


def test_files(tmp_path):
    result = pretrain(small(output_dir=str(tmp_path), timing_log_level=1, eval_steps=1, write_events=True))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 3]
    assert [line["loss"] for line in lines[:3]] == result.losses
    assert set(lines[0]["timers"]) == {"step", "forward-backward", "finalize-grads", "optimizer"}
    events = read_events(tmp_path / "events.jsonl")
    assert events == result.events
    assert {"step", "optimizer", "forward-backward"} <= {event.name for event in events}
    assert [event.step for event in events if event.name == "step"] == [1, 2, 3]
    inside = [event.step for event in events if event.name == "0B0"]
    assert inside == [1, 2, 3], "each Event says its step"
    trained = max(event.end for event in events if event.name == "step")
    assert {event.step for event in events if event.start >= trained} == {3}, "a validation belongs to the step before"
    numbers = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [number["step"] for number in numbers if number["tag"] == "loss"] == [1, 2, 3]


def test_a_run_writes_no_events_unless_it_is_asked_to(tmp_path):
    """They are 0.5 MB a step; what stays in memory is for who calls `pretrain`."""
    result = pretrain(small(output_dir=str(tmp_path)))
    names = [".lock", "config.yaml", "metrics.jsonl", "run.json", "scalars.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert {event.step for event in result.events} == {1, 2, 3}


def test_events_that_are_written_need_not_be_kept(tmp_path):
    result = pretrain(small(output_dir=str(tmp_path), record_events=False, write_events=True))
    assert result.events == []
    assert {event.step for event in read_events(tmp_path / "events.jsonl")} == {1, 2, 3}


def test_events_of_some_steps_are_recorded_in_these_alone(tmp_path):
    plan = {"output_dir": str(tmp_path), "write_events": True, "event_interval": 2, "steps": 5}
    seen = []

    def forward_step(iterator, model):
        seen.append(active_recorder() is not None)
        return gpt_forward_step(iterator, model)

    result = pretrain(small(**plan, record_events=False), forward_step=forward_step)
    written = read_events(tmp_path / "events.jsonl")
    assert [event.step for event in written if event.name == "step"] == [2, 4]
    each = len(seen) // 5
    assert [all(seen[step * each : (step + 1) * each]) for step in range(5)] == [False, True, False, True, False]
    assert len(result.metrics) == 5
    kept = pretrain(small(**plan, overwrite=True))
    assert [event.step for event in kept.events if event.name == "step"] == [1, 2, 3, 4, 5]


def test_without_recording_nothing_is_kept_but_timers_still_add_up():
    result = pretrain(small(record_events=False, timing_log_level=2))
    assert result.events == []
    assert result.metrics[-1]["timers"]["forward"][0] > 0


def test_memory_holds_the_last_steps_and_the_file_holds_all(tmp_path):
    result = pretrain(small(steps=5, keep_event_steps=2, output_dir=str(tmp_path), write_events=True))
    written = read_events(tmp_path / "events.jsonl")
    assert [event.name for event in written].count("step") == 5
    assert [event.name for event in result.events].count("step") == 2
    assert result.events == written[-len(result.events) :]


def test_a_crash_keeps_what_was_written(tmp_path):
    with pytest.raises(FloatingPointError):
        pretrain(small(steps=5, output_dir=str(tmp_path), write_events=True), forward_step=poisoned(2, math.nan))
    events = read_events(tmp_path / "events.jsonl")
    assert [event.name for event in events].count("step") == 3
    assert [event.name for event in events].count("0F0") == 3
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_log_interval_thins_the_lines_not_the_losses():
    result = pretrain(small(steps=5, log_interval=2))
    assert [line["step"] for line in result.metrics] == [2, 4, 5]
    assert len(result.losses) == 5


def poisoned(step_to_fail: int, value: float):
    calls = iter(range(1000))

    def forward_step(data_iterator, model):
        output, loss = gpt_forward_step(data_iterator, model)
        factor = value if next(calls) // 4 == step_to_fail else 1.0
        return output, lambda loss_BS: loss(loss_BS * factor)

    return forward_step


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_one_error_that_names_the_step(value):
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) at step 3 "):
        pretrain(small(steps=5), forward_step=poisoned(2, value))


def test_a_gradient_that_is_not_finite_may_skip_the_step(tmp_path):
    """The loss is finite; its gradient is not, as where a square root meets 0."""
    calls = iter(range(1000))
    built = []

    def forward_step(data_iterator, model):
        output, loss = gpt_forward_step(data_iterator, model)
        bad = next(calls) // 4 == 1

        def with_infinite_slope(loss_BS):
            return loss(loss_BS + torch.sqrt(0.0 * loss_BS) if bad else loss_BS)

        return output, with_infinite_slope

    def model_provider(config, groups, **stage):
        built.append(build_model_chunk(config, groups, **stage))
        return built[-1]

    config = small(steps=3, output_dir=str(tmp_path), on_not_finite="skip")
    result = pretrain(config, forward_step=forward_step, model_provider=model_provider)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    second = json.loads(lines[1], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert second["grad_norm"] is None and second["not_finite"] == {"grad_norm": str(result.metrics[1]["grad_norm"])}
    assert [line["skipped_steps"] for line in result.metrics] == [0, 1, 1]
    assert not math.isfinite(result.metrics[1]["grad_norm"])
    assert all(torch.isfinite(p).all() for p in built[0].parameters())


def test_masked_loss_counts_only_what_the_mask_keeps():
    loss_sum, tokens, report = masked_loss(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[2.0, 100.0, 4.0]]))
    assert (loss_sum.item(), tokens.item()) == (6.0, 2.0)
    assert (report["loss_sum"].item(), report["tokens"].item()) == (6.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.tp": 2}, "world"),
        ({"parallel.cp": 2}, "world_size"),
        ({"parallel.cp": 2, "attention_dropout": 0.1}, "attention_dropout.*parallel.cp = 1"),
        ({"schedule.path": "/nowhere/mine.csv"}, r"schedule\.path.*mine\.csv"),
        ({"vocab_size": 100}, "tokenizer mismatch"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        pretrain(small(**changes))


def test_a_rank_of_torchrun_joins_the_others_with_the_configs_backend_and_timeout(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    joined = []
    monkeypatch.setattr(torchrun, "_join", lambda *settings: joined.append(settings))
    pretrain(small(distributed_backend="gloo", distributed_timeout_minutes=3.0))
    assert joined == [("gloo", "auto", False, 180.0)]


def test_nothing_records_where_nobody_wants_events():
    seen = []

    def forward_step(data_iterator, model):
        seen.append(active_recorder())
        return gpt_forward_step(data_iterator, model)

    result = pretrain(small(record_events=False, timing_log_level=1), forward_step=forward_step)
    assert set(seen) == {None}
    assert result.metrics[0]["timers"]["forward-backward"][0] > 0
