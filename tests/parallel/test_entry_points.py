"""The sources' three entry points: chosen by the layout, against one process, and what they refuse."""

import pytest
import torch
from pipeline_stages import SHAPE, Stage, forward_step, microbatches, reference

from labkit.config import ParallelConfig
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
    interleaved,
    one_f_one_b,
)

SIZES = {"seq_length": SHAPE[0], "micro_batch_size": SHAPE[1], "hidden_size": SHAPE[2], "dtype": torch.float64}
WITH, WITHOUT = forward_backward_pipelining_with_interleaving, forward_backward_pipelining_without_interleaving


class _Timers:
    """Counts what was started, by name and log level."""

    def __init__(self):
        self.started, self.stopped = set(), set()

    def __call__(self, name, log_level):
        timers = self

        class Timer:
            def start(self):
                timers.started.add((name, log_level))

            def stop(self):
                timers.stopped.add((name, log_level))

        return Timer()


def _step(pp, vpp, count, lengths=None, **arguments):
    """One step through the entry point of the layout; (reports, gradients by stage, what else was seen)."""
    groups = initialize_model_parallel(ParallelConfig(pp=pp, vpp=vpp))
    stages = [chunk * pp + groups.pp.rank for chunk in range(vpp)]
    chunks = [Stage(stage) for stage in stages]
    timers, func = _Timers(), get_forward_backward_func(groups=groups)
    reports = func(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches(count, lengths)) for _ in chunks],
        model=chunks,
        num_microbatches=count,
        groups=groups,
        timers=timers,
        **({} if arguments.get("variable_seq_lengths") else SIZES),
        **arguments,
    )
    gradients = {stage: [p.grad for p in chunk.parameters()] for stage, chunk in zip(stages, chunks, strict=True)}
    return reports, gradients, (func.__name__, timers.started, timers.stopped)


def _steps(pp, vpp, count, variants):
    return [_step(pp, vpp, count, **variant) for variant in variants]


def _hold_to_one_process(results, expected):
    losses, gradients = expected
    assert [report["loss"] for report in results[-1][0]] == pytest.approx(losses, rel=1e-12)
    assert all(not reports for reports, _, _ in results[:-1])
    for _, by_stage, _ in results:
        for stage, mine in by_stage.items():
            for a, b in zip(mine, gradients[stage], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


VARIANTS = [
    {"deallocate_pipeline_outputs": True},
    {"batch_p2p_comm": True},
    {"batch_p2p_comm": False},
    {"variable_seq_lengths": True, "dtype": torch.float64},
    {"variable_seq_lengths": True, "batch_p2p_comm": True, "dtype": torch.float64},
    {"variable_seq_lengths": True, "batch_p2p_comm": False, "dtype": torch.float64},
]
INTERLEAVED = [
    *VARIANTS,
    {"overlap_p2p_comm": True, "batch_p2p_comm": False},
]


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2)])
def test_every_variant_equals_one_process(pp, vpp, on_ranks):
    count = 9 if pp == 4 and vpp > 1 else 6
    variants = INTERLEAVED if vpp > 1 else VARIANTS
    if vpp > 1:  # 9 = 5 + 4 microbatches, 6 = 4 + 2
        variants = [{"microbatch_group_size_per_vp_stage": 5 if count == 9 else 4} | variant for variant in variants]
    by_rank = on_ranks(_steps, pp, pp, vpp, count, variants)
    expected = reference(pp * vpp, count)
    for number in range(len(variants)):
        results = [steps[number] for steps in by_rank]
        _hold_to_one_process(results, expected)
        name = {1: "without"}.get(vpp, "with")
        wanted = "forward_backward_no_pipelining" if pp == 1 else f"forward_backward_pipelining_{name}_interleaving"
        for _, _, (called, started, stopped) in results:
            assert called == wanted
            assert started == stopped == {("forward-backward", 1), ("forward-compute", 2), ("backward-compute", 2)}


def _lengths(pp, vpp, count):
    variants = [
        {"batch_p2p_comm": how, "variable_seq_lengths": True, "lengths": [2, 7, 3]} for how in (None, True, False)
    ]
    return [_step(pp, vpp, count, dtype=torch.float64, **variant) for variant in variants]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_lengths_that_vary_by_microbatch(pp, vpp, on_ranks):
    """Megatron-LM issues 5100 (hangs at four stages), 1451 (misorder at two by two), PR 5271 (crossed shapes)."""
    by_rank = on_ranks(_lengths, pp, pp, vpp, 8)
    for number in range(3):
        _hold_to_one_process([steps[number] for steps in by_rank], reference(pp * vpp, 8, lengths=[2, 7, 3]))


def _evaluated(pp, vpp, count):
    reports, gradients, _ = _step(pp, vpp, count, forward_only=True)
    assert all(g is None for grads in gradients.values() for g in grads)
    return reports, _step(pp, vpp, count, forward_only=True, collect_non_loss_data=True)[0]


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_forward_only(pp, vpp, on_ranks):
    reports, collected = on_ranks(_evaluated, pp, pp, vpp, 4)[-1]
    assert [report["loss"] for report in reports] == pytest.approx(reference(pp * vpp, 4)[0], rel=1e-12)
    assert [list(item) for item in collected] == [["sum"]] * 4


def _alone(function=forward_backward_no_pipelining, config=None, **arguments):
    given = {
        "forward_step_func": forward_step,
        "data_iterator": iter(microbatches(2)),
        "model": Stage(0),
        "num_microbatches": 2,
        "groups": single_process_groups(config),
    }
    return function(**(given | arguments))


TWO = {"model": [Stage(0), Stage(1)], "data_iterator": [None, None]}


@pytest.mark.parametrize(
    ("function", "arguments", "error", "needle"),
    [
        (WITHOUT, {"overlap_p2p_comm": True}, ValueError, "needs interleaving"),
        (WITHOUT, {"use_ring_exchange_p2p": True}, ValueError, "no ring_exchange"),
        (WITHOUT, {"param_sync_func": print}, ValueError, "only the interleaved schedule prefetches"),
        (WITHOUT, {"pg_collection": object()}, ValueError, "labkit's name for it is groups"),
        (WITHOUT, {"adjust_tensor_shapes_fn": print}, ValueError, "give tensor_shape"),
        (WITHOUT, {"first_val_step": True}, ValueError, "cast again, which labkit does after each update"),
        (WITHOUT, {"surprise": 1}, TypeError, "unexpected argument 'surprise'"),
        (WITHOUT, TWO, ValueError, "2 model chunks"),
        (WITHOUT, {"enable_autocast": True}, ValueError, r"enable_autocast=True needs .*: give dtype=torch.bfloat16"),
        (WITHOUT, {"seq_length": "6"}, ValueError, "seq_length = '6': must be an integer of at least 1"),
        (WITHOUT, {"micro_batch_size": 0}, ValueError, "micro_batch_size = 0: must be an integer of at least 1"),
        (WITHOUT, {"hidden_size": 1.5}, ValueError, "hidden_size = 1.5: must be an integer of at least 1"),
        (WITHOUT, {"grad_sync_func": 5}, ValueError, "grad_sync_func = 5: must be a function, or a list"),
        (WITHOUT, {"no_sync_func": "yes"}, ValueError, "no_sync_func = 'yes': must be a function, or a list"),
        (WITHOUT, {"no_sync_func": [print, 5]}, ValueError, "no_sync_func = .*: must be a function, or a list"),
        (
            WITHOUT,
            {"no_sync_func": [print, print]},
            ValueError,
            "no_sync_func: 2 functions were given for 1 model chunks",
        ),
        (WITHOUT, {"collect_non_loss_data": True}, ValueError, "set forward_only"),
        (WITHOUT, {"microbatch_group_size_per_vp_stage": 2}, ValueError, "no virtual stages"),
        (WITH, {}, ValueError, "list of two or more model chunks"),
        (WITH, {"model": torch.nn.ModuleList([Stage(0)])}, ValueError, "list of two or more model chunks"),
        (WITHOUT, TWO | {"model": torch.nn.ModuleList(TWO["model"])}, ValueError, "2 model chunks"),
        (WITH, TWO | {"data_iterator": None}, ValueError, "list of data iterators"),
        (WITH, TWO, ValueError, "nothing to interleave"),
        (WITH, TWO | {"decoder_seq_length": 4}, ValueError, "encoder-decoder cannot be interleaved"),
    ],
)
def test_what_the_entry_points_do_not_do_is_said(function, arguments, error, needle):
    with pytest.raises(error, match=needle):
        _alone(function, **arguments)


def _lists_and_others(pp, vpp, count):
    """Losses and gradients of one step, with lists, with a ModuleList and a tuple."""
    groups = initialize_model_parallel(ParallelConfig(pp=pp, vpp=vpp))
    results = []
    for chunks_as, iterators_as in ((list, list), (torch.nn.ModuleList, tuple)):
        chunks = chunks_as([Stage(chunk * pp + groups.pp.rank) for chunk in range(vpp)])
        reports = get_forward_backward_func(groups=groups)(
            forward_step_func=forward_step,
            data_iterator=iterators_as([iter(microbatches(count)) for _ in chunks]),
            model=chunks,
            num_microbatches=count,
            groups=groups,
            **SIZES,
        )
        results.append(([report["loss"] for report in reports], [p.grad for c in chunks for p in c.parameters()]))
    return results


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
def test_a_module_list_and_a_tuple_are_lists_too(pp, vpp, on_ranks):
    for (losses, gradients), (others, other_gradients) in on_ranks(_lists_and_others, pp, pp, vpp, 4):
        assert losses == others
        assert len(gradients) > 0 and all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))


def _refusals():
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    split = initialize_model_parallel(ParallelConfig(pp=2, split_rank=1))
    given = {"forward_step_func": forward_step, "groups": groups, "num_microbatches": 4, "dtype": torch.float64}
    one, two = given | {"model": Stage(0), "data_iterator": None}, given | TWO
    attempts = [
        lambda: get_forward_backward_func(),
        lambda: forward_backward_no_pipelining(**one),
        lambda: WITHOUT(**one),
        lambda: WITHOUT(**one, tensor_shape=SHAPE, decoder_seq_length=4),
        lambda: WITH(**two, tensor_shape=SHAPE, overlap_p2p_comm=True, batch_p2p_comm=True),
        lambda: WITH(**two, tensor_shape=SHAPE, use_ring_exchange_p2p=True),
        lambda: WITH(**two | {"num_microbatches": 1}, tensor_shape=SHAPE),
        lambda: WITH(**two | {"num_microbatches": 3}, tensor_shape=SHAPE),
        lambda: WITH(**two, tensor_shape=SHAPE, microbatch_group_size_per_vp_stage=1),
        lambda: WITH(**two | {"groups": split}, tensor_shape=SHAPE),
        lambda: WITH(**two, tensor_shape=SHAPE, grad_sync_func=[print]),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
    return messages


NEEDLES = ["give pp_size", "has 2 stages", "give tensor_shape", "set split_rank", "set one of them", "no ring_exchange",
           "1 microbatch on 2 pipeline ranks", "3 microbatches", "group", "cannot be interleaved",
           "grad_sync_func: 1 functions were given for 2 model chunks; give one function, or a list of 2"]  # fmt: skip


def test_what_does_not_fit_is_refused_before_anything_is_sent(on_ranks):
    for messages in on_ranks(_refusals, 2):
        for needle, message in zip(NEEDLES, messages, strict=True):
            assert needle in message


def test_the_layout_chooses():
    assert get_forward_backward_func(1, 1) is forward_backward_no_pipelining
    assert get_forward_backward_func(2) is get_forward_backward_func(2, 1) is WITHOUT
    assert get_forward_backward_func(2, 2) is WITH


# ---- gradient and parameter synchronisation ----


def _sync_log(pp, vpp, count, grad_sync, param_sync, lists):
    """What a step does, in order: `F0`, `B0` (chunk), `hold`/`go` of no_sync, `sync 1`, `gather 1`."""
    from contextlib import contextmanager

    groups = initialize_model_parallel(ParallelConfig(pp=pp, vpp=vpp))
    chunks = [Stage(chunk * pp + groups.pp.rank) for chunk in range(vpp)]
    log = []

    @contextmanager
    def no_sync():
        log.append("hold")
        yield
        log.append("go")

    def number(parameters):
        first = next(iter(parameters))
        return next(i for i, chunk in enumerate(chunks) if chunk.linear.weight is first)

    def step(iterator, model):
        output, loss_func = forward_step(iterator, model)
        chunk = chunks.index(model)
        log.append(f"F{chunk}")
        output.register_hook(lambda gradient: log.append(f"B{chunk}"))
        return output, loss_func

    def each(word):
        call = lambda parameters: log.append(f"{word} {number(parameters)}")  # noqa: E731
        return [call] * vpp if lists else call

    get_forward_backward_func(groups=groups)(
        forward_step_func=step,
        data_iterator=[iter(microbatches(count)) for _ in chunks],
        model=chunks,
        num_microbatches=count,
        groups=groups,
        no_sync_func=no_sync,
        grad_sync_func=each("sync") if grad_sync else None,
        param_sync_func=each("gather") if param_sync else None,
        **SIZES,
    )
    return log


def _megatrons_log(schedule, rank, grad_sync, param_sync):
    """What megatron-core's interleaved loop does, told by its rules: virtual microbatch k counts the forwards or the
    backwards of a rank; gradients of the chunk that ended at k - rank are synchronised after k, parameters of the chunk
    after the one that begins at k + rank are gathered before k, chunks 0 and 1 before everything."""
    actions = schedule.actions(rank)
    chunk_of = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
    last = schedule.num_microbatches - 1
    rows = {kind: [a for a in actions if a.kind == kind] for kind in "FB"}
    log, seen, done = ["hold"], {"F": 0, "B": 0}, set()
    log += ["gather 0", "gather 1"] if param_sync else []
    for action in actions:
        kind, chunk, k = action.kind, chunk_of[action.stage], seen[action.kind]
        seen[kind] += 1
        ahead, behind = k + rank, k - rank
        if kind == "F":
            if param_sync and ahead < len(rows["F"]) and rows["F"][ahead].microbatch == 0:
                following = chunk_of[rows["F"][ahead].stage] + 1
                log += [f"gather {following}"] if 1 < following < len(chunk_of) else []
            log.append(f"F{chunk}")
            continue
        ends = action.microbatch == last
        log += ["go"] if ends and not grad_sync else []
        log.append(f"B{chunk}")
        if grad_sync and behind >= 0 and rows["B"][behind].microbatch == last:
            complete = chunk_of[rows["B"][behind].stage]
            done.add(complete)
            log += ["go", f"sync {complete}", "hold"]
        elif ends and not grad_sync:
            log.append("hold")
    if grad_sync:
        log += ["go", *(f"sync {chunk}" for chunk in sorted(chunk_of.values()) if chunk not in done)]
    else:
        log.append("go")
    return log


def _without_empty_blocks(log):
    """A `hold` with nothing but `go` after it, and one next to another, mean nothing: only who runs inside counts."""
    inside, told = False, []
    for word in log:
        if word in ("hold", "go"):
            inside = word == "hold"
        else:
            told.append(f"{word} held" if inside and word[0] == "B" else word)
    return told


@pytest.mark.parametrize(("pp", "vpp", "count"), [(2, 2, 4), (2, 3, 6), (4, 2, 8)])
@pytest.mark.parametrize("grad_sync", [False, True])
def test_synchronisation_is_where_megatron_puts_it(pp, vpp, count, grad_sync, on_ranks):
    schedule = interleaved(pp, vpp, count)
    for lists in (False, True):
        for rank, log in enumerate(on_ranks(_sync_log, pp, pp, vpp, count, grad_sync, True, lists)):
            wanted = _megatrons_log(schedule, rank, grad_sync, True)
            assert _without_empty_blocks(log) == _without_empty_blocks(wanted)
            assert log.count("hold") == log.count("go")


@pytest.mark.parametrize("grad_sync", [False, True])
def test_without_interleaving_the_first_rank_leaves_it_to_its_hooks(grad_sync, on_ranks):
    for rank, log in enumerate(on_ranks(_sync_log, 4, 4, 1, 5, grad_sync, False, False)):
        kinds = [action.kind for action in one_f_one_b(4, 5).actions(rank)]
        row = [f"{kind}0" for kind in kinds]
        if grad_sync and rank > 0:
            assert log == ["hold", *row, "go", "sync 0"]
        else:
            assert log == ["hold", *row[:-1], "go", row[-1]]
