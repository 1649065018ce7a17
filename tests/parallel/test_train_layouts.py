"""`pretrain` on several ranks: determinism, agreement, files, schedules of one's own, errors that name the step."""

import json
import math

import pytest
from run_files import read_events

from labkit.cli.command_line import main
from labkit.config import RunConfig, presets
from labkit.launch import RankError, run
from labkit.schedules import Schedule, gpipe, one_f_one_b
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step
from labkit.train.reporting.measured import follows, pipeline_events


def small(**changes) -> RunConfig:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "steps": 2}
    return presets.tiny().override(shape | changes)


@pytest.mark.parametrize("schedule", [pytest.param("auto", marks=pytest.mark.sweep), "zbv"])
def test_the_same_layout_twice_is_bit_equal_with_dropout_and_all_ranks_report_the_same(schedule):
    dropout = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), 0.1)
    config = small(tp=2, pp=2, layers=4, **dropout, **{"schedule.name": schedule})
    first, second = run(pretrain, 4, config), run(pretrain, 4, config)
    assert [r.losses for r in first] == [r.losses for r in second]
    assert all(r.losses == first[0].losses for r in first)
    assert all(r.metrics == first[0].metrics for r in first)


def test_files_of_a_whole_world_and_why_its_steps_took_so_long(tmp_path, capsys):
    seen = []
    reports = {"output_dir": str(tmp_path), "timing_log_level": 2, "write_events": True, "loggers": ["tensorboard"]}
    results = run(pretrain, 4, small(tp=2, eval_steps=1, **reports), progress=seen.append)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == results[0].losses
    for name, (least, most) in lines[0]["timers"].items():
        assert 0 < least <= most, name
    assert {"step", "forward-backward", "forward", "backward", "collective"} <= set(lines[0]["timers"])
    events = read_events(tmp_path / "events.jsonl")
    assert [event for result in results for event in result.events] == sorted(events, key=lambda event: event.rank)
    assert {event.rank for event in events} == {0, 1, 2, 3}
    assert [report["step"] for report in seen if "steps" in report] == [1, 2]
    assert any("validation_loss" in report for report in seen)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "only rank 0 writes"

    assert main(["why", str(tmp_path), "--machine", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = {row["row"]: row["measured"] for row in found["rows"]}
    times = [line["timers"]["step"][1] for line in lines if "loss" in line]
    assert sum(seconds.values()) == pytest.approx(found["measured_seconds"]) == pytest.approx(sum(times) / len(times))
    assert min(seconds["gemm"], seconds["tp"], seconds["dp"], seconds["optimizer"]) > 0 and seconds["pp"] == 0


def test_a_schedule_of_ones_own_runs_in_its_order_and_gives_the_same_losses(tmp_path):
    """F0 F1 B1 B0 on the first stage: neither 1F1B nor GPipe."""
    own = Schedule.from_csv("0F0,0F1,0B1,0B0,0F2,0F3,0B2,0B3\n1F0,1F1,1B1,1B0,1F2,1B2,1F3,1B3\n")
    path = tmp_path / "own.csv"
    path.write_text(own.to_csv())
    usual = run(pretrain, 2, small(pp=2, precision="fp64"))
    config = small(pp=2, precision="fp64", **{"schedule.path": str(path)})
    changed = run(pretrain, 2, config)
    assert changed[0].losses == pytest.approx(usual[0].losses, rel=1e-13)
    assert follows(pipeline_events([r.events for r in changed]), own)
    assert follows(pipeline_events([r.events for r in usual]), one_f_one_b(2, 4))


def test_gpipe_by_name_and_batched_transfers():
    usual = run(pretrain, 2, small(pp=2, precision="fp64"))
    changed = run(
        pretrain, 2, small(pp=2, precision="fp64", **{"schedule.name": "gpipe", "schedule.batch_p2p_comm": True})
    )
    assert changed[0].losses == pytest.approx(usual[0].losses, rel=1e-13)
    assert follows(pipeline_events([r.events for r in changed]), gpipe(2, 4))


def test_even_odd_transfers_give_the_same_losses():
    usual, changed = (
        run(pretrain, 2, small(pp=2, precision="fp64", **{"schedule.batch_p2p_comm": value})) for value in (None, False)
    )
    assert changed[0].losses == usual[0].losses


def try_schedule(config: RunConfig, schedule: Schedule) -> str:
    with pytest.raises(ValueError) as error:
        pretrain(config, schedule=schedule)
    return str(error.value)


def test_a_schedule_that_does_not_fit_is_refused_on_every_rank():
    for message in run(try_schedule, 2, small(pp=2), one_f_one_b(2, 3)):
        assert "3 microbatches" in message
        assert "makes 4" in message
    forwards = Schedule("forwards", 2, 4, [["0F0", "0F1", "0F2", "0F3"], ["1F0", "1F1", "1F2", "1F3"]])
    for message in run(try_schedule, 2, small(pp=2), forwards):
        assert "no backward" in message


def pretrain_with_a_bad_batch(config: RunConfig) -> None:
    """The loss of the third step is not a number, on the only rank that computes it."""
    calls = iter(range(1000))

    def forward_step(data_iterator, model):
        output, loss = gpt_forward_step(data_iterator, model)
        bad = next(calls) == 2 * 4 + 1
        return output, lambda loss_BS: loss(loss_BS * math.nan if bad else loss_BS)

    pretrain(config, forward_step=forward_step)


def test_a_loss_that_is_not_finite_ends_every_rank_with_the_step_named():
    with pytest.raises(RankError, match="the loss is nan at step 3 ") as error:
        run(pretrain_with_a_bad_batch, 2, small(pp=2, steps=5))
    assert sorted(error.value.ranks) == [0, 1]


def collect(config: RunConfig) -> list:
    seen = []

    def forward_step(data_iterator, model):
        output, loss = gpt_forward_step(data_iterator, model)
        return output, lambda loss_BS, non_loss_data=False: loss_BS.shape if non_loss_data else loss(loss_BS)

    pretrain(config, forward_step=forward_step, process_non_loss_data=lambda data, step: seen.append((step, data)))
    return seen


def test_what_is_not_a_loss_reaches_one_of_the_ranks_that_compute_it():
    nothing, seen = run(collect, 2, small(pp=2, eval_steps=1))
    assert nothing == []
    assert seen == [(2, [(1, 16)] * 4)]
    on_a_v = run(collect, 4, small(pp=2, layers=4, global_batch_size=8, eval_steps=1, **{"schedule.name": "zbv"}))
    assert on_a_v == [[], seen, [], []], "the last replica of the first pipeline rank"


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_bf16_over_two_stages_follows_one_process(schedule):
    config = small(precision="bf16", steps=4, lr=3e-3, layers=4)
    staged = run(pretrain, 2, config.override({"pp": 2, "schedule.name": schedule}))
    assert staged[0].losses == pytest.approx(pretrain(config).losses, rel=2e-3)


class WhenGradientsMaySync:
    """Notes for each chunk, at each gradient of its last norm, whether the chunk would let a synchronisation start."""

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def on_model(self, groups, chunks, schedule) -> None:
        for chunk in chunks:
            norms = [module for name, module in chunk.named_modules() if name.endswith("norm")]
            notes: list[bool] = []
            norms[-1].weight.register_post_accumulate_grad_hook(
                lambda _, chunk=chunk, notes=notes: notes.append(chunk._may_sync)
            )
            self.seen.append(notes)

    def on_gradients(self, step, chunks) -> None: ...

    def on_update(self, step, chunks) -> None: ...


def watch(config: RunConfig) -> list[list[bool]]:
    observer = WhenGradientsMaySync()
    pretrain(config, observer=observer)
    return observer.seen


def test_every_chunk_may_synchronise_with_its_own_last_backward():
    """Without overlap; with it, reductions start at fixed places of the schedule and not in backwards."""
    config = small(pp=2, vpp=2, layers=4, steps=1, overlap_grad_reduce=False)
    assert run(watch, 2, config) == [[[False] * 3 + [True]] * 2] * 2


def pretrain_with_a_bad_test(config: RunConfig) -> None:
    """The very last forward passes raise, after the training and the validation."""
    calls = []

    def forward_step(data_iterator, model):
        calls.append(model.training)
        if calls.count(False) > config.num_microbatches(2):
            raise RuntimeError("bad sample")
        return gpt_forward_step(data_iterator, model)

    pretrain(config, forward_step=forward_step)


def test_a_test_that_fails_after_training_says_what_is_kept(tmp_path):
    with pytest.raises(RankError) as error:
        run(pretrain_with_a_bad_test, 2, small(tp=2, eval_steps=1, output_dir=str(tmp_path), write_events=True))
    text = str(error.value)
    assert "RuntimeError: bad sample" in text
    assert "done: 2 of 2 training steps" in text and str(tmp_path) in text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert {event.rank for event in read_events(tmp_path / "events.jsonl")} == {0, 1}
