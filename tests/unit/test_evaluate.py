"""Windows, texts, passages and records of evaluations, and what their commands refuse; oracles hold the numbers."""

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labkit.cli import main
from labkit.cli.checkpoints.eval_command import evaluate_on_rank, line_of
from labkit.config import presets
from labkit.data import load_tokenizer
from labkit.evaluate import CheckpointModel, Records, Sampling, Task, evaluate, generate, tasks
from labkit.evaluate.lambada import Accuracy, Passage, passage_of, read_passages, score_passages
from labkit.evaluate.model import layout_problems
from labkit.evaluate.sampling import NO_TOKEN, Sampler, within_top_p
from labkit.evaluate.wikitext import detokenized, original_words, perplexity_of, score_windows, window_starts
from labkit.launch import info, run
from labkit.train import pretrain

TINY = presets.tiny().override(
    {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 16, "global_batch_size": 1, "steps": 2, "interval": 1}
)
TEXT = " = Bug = \n\n A bug in the machine 's code , found by a well @-@ known hacker ( 1947 ) . \n" * 3


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    pretrain(TINY.override({"checkpoint.dir": str(folder), "eval_steps": 0}))
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "wiki.txt").write_text(TEXT)
    return str(tmp_path / "wiki.txt")


@pytest.mark.parametrize("tokens", [2, 3, 16, 17, 18, 32, 33, 100])
@pytest.mark.parametrize(("seq_length", "stride"), [(16, 16), (16, 5), (16, 1), (7, 3)])
def test_windows_score_every_token_but_the_first_once(tokens, seq_length, stride):
    scored = []
    for start in window_starts(tokens, seq_length, stride):
        labels = range(start + 1, min(start + seq_length, tokens - 1) + 1)
        scored += labels if start == 0 else [at for at in labels if at > start + seq_length - stride]
    assert scored == list(range(1, tokens))


def test_an_infinite_loss_that_is_not_scored_does_not_enter():
    """Windows of 4 at stride 2, over 7 tokens: of the second window only the last two positions count."""
    losses = [torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[math.inf, math.inf, 5, 6]])]
    model = SimpleNamespace(seq_length=4, device="cpu", losses=lambda *_: losses.pop(0))
    assert score_windows(model, list(range(7)), stride=2, micro_batch_size=1) == [(10.0, 4), (11.0, 2)]


def test_windows_that_score_nothing_are_refused():
    with pytest.raises(ValueError, match="stride = 17: must be from 1 to the model's sequence of 16 tokens"):
        window_starts(100, 16, 17)
    with pytest.raises(ValueError, match="the text has 1 token; "):
        window_starts(1, 16, 4)


@pytest.mark.parametrize(
    ("tokenised", "written"),
    [
        ("a 12 @,@ 345 @.@ 5 m well @-@ known house", "a 12,345.5 m well-known house"),
        ("he came , saw ; and won : all . then", "he came, saw; and won: all. then"),
        ("the dogs ' tails wag", "the dogs' tails wag"),
        ("the dog 's tail wags", "the dog's tail wags"),
        ("( 1947 – 1950 ) and [ see ] and { this }", "(1947 – 1950) and [see] and {this}"),
        ('the " Great War " is', 'the "Great War" is'),
        (" = = Head = = \n text \n", " == Head ==\ntext\n"),
        ("at 20 ° C", "at 20°C"),
    ],
)
def test_text_is_written_as_people_write_it(tokenised, written):
    assert detokenized(tokenised) == written


def test_words_are_counted_as_megatron_counts_them_in_wikitexts_form():
    wikitext = " \n = Robert Boulter = \n \n Robert Boulter is an actor . \n He had a role @-@ play . \n "
    assert original_words(wikitext) == len(wikitext.strip().split(" ")) == len(wikitext.split()) + 3
    assert original_words("two words\nand two\n\nmore  words\n") == 6


def test_perplexity_by_hand():
    found = perplexity_of([(2.0, 2), (6.0, 2)], tokens=5, original_words=3)
    assert (found.loss, found.token_perplexity) == (2.0, math.exp(2.0))
    assert found.perplexity == pytest.approx(math.exp(8 / 3))
    assert found.adjusted_perplexity == pytest.approx(math.exp(2.0 * 4 / 2))
    assert found.standard_error == pytest.approx(math.sqrt(2 * (2**2 + 2**2)) / 4)
    assert perplexity_of([(2.0, 2), (5.0, 2)], tokens=5, original_words=3).standard_error == pytest.approx(0.75)
    low, high = found.interval
    assert math.log(high) - math.log(found.perplexity) == pytest.approx(1.96 * found.standard_error * 4 / 3)
    assert low < found.perplexity < high
    broken = perplexity_of([(math.nan, 2), (6.0, 2)], tokens=5, original_words=3)
    assert all(map(math.isnan, (broken.perplexity, broken.adjusted_perplexity, broken.token_perplexity)))


def test_perplexities_beyond_e20_are_told_as_e20():
    """As Megatron's: `math.exp(min(20, loss))`; below it nothing is changed."""
    found = perplexity_of([(200.0, 2), (230.0, 2)], tokens=5, original_words=3)
    most = math.exp(20.0)
    assert (found.perplexity, found.adjusted_perplexity, found.token_perplexity, found.interval[1]) == (most,) * 4
    below = perplexity_of([(19.9, 1)], tokens=2, original_words=1)
    assert math.exp(19.9) == below.perplexity == below.adjusted_perplexity == below.token_perplexity < most


def test_wilsons_interval_of_a_published_example():
    """10 of 100: 0.0552 to 0.1744 (Brown, Cai and DasGupta, Interval Estimation for a Binomial Proportion, 2001)."""
    assert Accuracy(10, 100).interval == pytest.approx((0.0552, 0.1744), abs=1e-4)
    for passages in range(1, 99):  # rounding leaves no -0.0, and no share outside 0 to 1
        low, high = Accuracy(0, passages).interval[0], Accuracy(passages, passages).interval[1]
        assert str(low)[0] != "-" and low < 1e-12 and 1 - 1e-12 < high <= 1


def test_the_target_is_the_last_word_or_the_last_token():
    encode = load_tokenizer().encode
    strict, loose = (passage_of("the hacker knew the metasyntax", encode, strict=how) for how in (True, False))
    assert strict.target == encode(" metasyntax").ids and len(strict.target) > 1
    assert strict.context == encode("the hacker knew the").ids
    assert loose.context + loose.target == encode("the hacker knew the metasyntax").ids and len(loose.target) == 1
    with pytest.raises(ValueError, match="fewer than two words"):
        passage_of("alone", encode)

    def letters(text):
        return SimpleNamespace(ids=[*map(ord, text)], offsets=[(i, i + 1) for i in range(len(text))])

    fewest = passage_of("ab", letters, strict=False)
    assert (fewest.context, fewest.target) == ([ord("a")], [ord("b")]), "two tokens are the fewest"
    with pytest.raises(ValueError, match="fewer than two tokens"):
        passage_of("a", letters, strict=False)


@pytest.mark.parametrize(
    "line", ["the bug", "7", "[1]", '"text"', "null", '{"test": "a b"}', '{"text": 5}', '{"text": null}']
)
def test_a_line_that_is_no_passage_is_named(line, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: no passage; each line must be JSON as"):
        read_passages(tmp_path / "a.jsonl", load_tokenizer().encode)


@pytest.mark.parametrize("target", [1, 2, 15])
def test_a_passage_loses_its_beginning_only_where_it_is_too_long(target):
    """A model of 16 tokens reads 16 of a passage's 17 and predicts the last. This one says the first token it reads."""

    def choose(tokens_BS, positions_BP, choice):
        assert tokens_BS.shape[1] <= 16
        return choice(torch.nn.functional.one_hot(tokens_BS[:, :1], 9).expand(-1, positions_BP.shape[1], -1))

    model = SimpleNamespace(seq_length=16, device="cpu", choose=choose)
    passages = [Passage([5] + [7] * (length - target - 1), [5] * target) for length in (16, 17, 18, 19)]
    for batch in (1, 4):
        assert score_passages(model, passages, micro_batch_size=batch) == [True, True, False, False]
    with pytest.raises(ValueError, match="a target of 16 tokens does not fit the model's sequence of 16"):
        score_passages(model, [Passage([5], [5] * 16)])


def test_a_passage_of_one_word_is_named_by_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "alone"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the passage has fewer than two words"):
        read_passages(tmp_path / "a.jsonl", load_tokenizer().encode)


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """Two layers with weights so large that every token that attention reads, and every position, matters."""
    folder = tmp_path_factory.mktemp("strong")
    pretrain(TINY.override({"checkpoint.dir": str(folder), "eval_steps": 0, "init_std": 0.5, "layers": 2, "steps": 1}))
    return CheckpointModel(folder, precision="fp64")


def test_the_cache_of_keys_and_values_changes_no_token(strong):
    """Each token as a forward over the whole text so far gives it, without cache and padding, before and afterwards."""
    prompts = [[5, 6, 7, 8, 9, 10], [300], [7, 900, 41]]

    def by_whole_forwards(prompt):
        ids = list(prompt)
        for _ in range(9):
            chosen = strong.choose(
                torch.tensor([ids]), torch.tensor([[len(ids) - 1]]), lambda logits: logits.argmax(-1)
            )
            ids.append(int(chosen[0, 0]))
        return ids[len(prompt) :]

    expected = list(map(by_whole_forwards, prompts))
    assert generate(strong, prompts, max_new_tokens=9) == expected
    assert [generate(strong, [prompt], max_new_tokens=9)[0] for prompt in prompts] == expected
    assert list(map(by_whole_forwards, prompts)) == expected, "a generation leaves nothing behind"
    assert len({tuple(ids) for ids in expected}) == 3 and min(len({*ids}) for ids in expected) > 3


class Cut(Exception):
    pass


@pytest.mark.parametrize("name", ["wikitext", "lambada"])
def test_an_evaluation_that_was_cut_goes_on(name, run_folder, tmp_path, text, monkeypatch):
    path = text
    if name == "lambada":
        path = str(tmp_path / "passages.jsonl")
        (tmp_path / "passages.jsonl").write_text('{"text": "the bug is in the code"}\n' * 7)
    task = Task(name=name, path=path, stride=4, micro_batch_size=2)
    model = CheckpointModel(run_folder)
    whole = evaluate(model, task)
    monkeypatch.setattr(tasks, "KEEP_EVERY", 0.0)
    seen = []

    def cut_after_two(values):
        seen.append(values["step"])
        if values["step"] == 4:
            raise Cut

    monkeypatch.setattr(tasks.info, "report_progress", cut_after_two)
    with pytest.raises(Cut):
        evaluate(model, task, Records(tmp_path / "rows.jsonl"))
    assert not (tmp_path / "rows.jsonl").exists() and (tmp_path / "rows.jsonl.partial").exists()
    monkeypatch.setattr(tasks.info, "report_progress", lambda values: seen.append(values["step"]))
    resumed = evaluate(model, task, Records(tmp_path / "rows.jsonl"))
    assert seen[:4] == [2, 4, 4, 6], "the second batch was under way when it was cut"
    assert resumed == whole
    assert not (tmp_path / "rows.jsonl.partial").exists()
    seen.clear()
    assert evaluate(model, task, Records(tmp_path / "rows.jsonl")) == whole and seen == []
    other = Task(name=name, path=path, stride=5, micro_batch_size=2)
    evaluate(model, other, Records(tmp_path / "rows.jsonl"))
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2, "another setting is another row"


def twice_with_own_disk(run_folder, folder, task):
    """Each rank has records of its own. The second time rank 0 has the row, and rank 1 has none."""
    own = str(folder / f"rank{info.rank_info().rank}.jsonl")
    return [evaluate_on_rank([str(run_folder / "step_00000002")], {"tp": 2}, task, own) for _ in range(2)]


def test_all_ranks_do_what_rank_0_finds(run_folder, tmp_path, text):
    task = {"name": "wikitext", "path": text, "stride": 8}
    found = run(twice_with_own_disk, 2, run_folder, tmp_path, task, device="cpu", timeout=30)
    rows = Records(tmp_path / "rank0.jsonl").rows
    assert len(rows) == 1 and found == [[rows, rows]] * 2 and not (tmp_path / "rank1.jsonl").exists()


@pytest.mark.parametrize("padded", [False, True])
def test_a_score_of_experts_with_a_capacity_does_not_depend_on_the_batch(padded, tmp_path, text):
    """In training the tokens of a batch compete for the places of an expert, and padding takes places too."""
    capacity = {"capacity_factor": 0.5, "drop_policy": "position", "pad_to_capacity": padded}
    small = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "init_std": 0.5}
    run = {"global_batch_size": 1, "steps": 1, "eval_steps": 0, "checkpoint.dir": str(tmp_path / "run")}
    pretrain(presets.tiny_moe().override(small | capacity | run))
    model = CheckpointModel(tmp_path / "run", precision="fp64")
    tasks_of_a_batch = [Task(name="wikitext", path=text, stride=4, micro_batch_size=batch) for batch in (1, 4)]
    alone, together = (evaluate(model, task)["perplexity"] for task in tasks_of_a_batch)
    assert alone == pytest.approx(together, rel=1e-12)
    prompts = [[5, 6, 7, 8, 9, 10], [300], [7, 900, 41]]
    made = [generate(model, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=6) == made
    two = SimpleNamespace(tp=SimpleNamespace(size=2), pp=SimpleNamespace(size=1), world_size=2)
    assert layout_problems(model.config.override({"tp": 2}), two) == []


@pytest.mark.parametrize("line", ["no json", "[]", "[" * 100_000])
def test_rows_of_another_file_are_refused(line, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"{{}}\n{line}\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2, is not a row of results; name another file"):
        Records(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "rows.jsonl.partial").write_text(line)
    assert Records(tmp_path / "rows.jsonl").done({}) == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("ending", ["", ".partial"])
def test_what_is_no_file_is_refused_before_the_evaluation(ending, make, tmp_path):
    make(tmp_path / f"rows.jsonl{ending}")
    with pytest.raises(ValueError, match=rf"--out: '.*rows\.jsonl{ending}' is not a regular file; name another file"):
        Records(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("before", ["", '{"key": 1}', '{"key": 1}\n', '{"key": 1}\r\n'])
def test_a_row_begins_on_a_line_of_its_own(before, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(before.encode())
    for key in (2, 3):
        Records(tmp_path / "rows.jsonl").add({"key": key})
    expected = [1, 2, 3] if before else [2, 3]
    assert [row["key"] for row in Records(tmp_path / "rows.jsonl").rows] == expected


def test_numbers_that_json_lacks_are_not_written(tmp_path):
    records = Records(tmp_path / "rows.jsonl")
    records.keep({}, [[math.nan, 1]])
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.add({"perplexity": math.inf})
    assert list(tmp_path.iterdir()) == []


def test_rows_are_cut_at_newlines_alone(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + '{"key": "a\u2028b"}\r\n{"key": 2}\n'.encode())
    assert [row["key"] for row in Records(tmp_path / "rows.jsonl").rows] == ["a\u2028b", 2]
    (tmp_path / "rows.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"--out: .*rows\.jsonl' is not UTF-8"):
        Records(tmp_path / "rows.jsonl")


def test_passages_are_cut_at_newlines_alone(tmp_path):
    path = tmp_path / "passages.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"text": "the\u2028bug bites"}\r\n\n{"text": "it runs"}\n'.encode())
    encode = load_tokenizer().encode
    assert read_passages(path, encode) == [passage_of(text, encode) for text in ("the\u2028bug bites", "it runs")]
    for line, said in (
        ('{"text": "a \\ud800"}', "line 1: has half a surrogate pair, U+D800"),
        ('{"text": "a b", "text": "c d"}', "line 1: has the field 'text' twice, as 'a b' and as 'c d'; remove one"),
        ("[" * 9999, "no passage"),
    ):
        path.write_text(line)
        with pytest.raises(ValueError, match=re.escape(said)):
            read_passages(path, encode)


def test_a_text_without_a_word_is_refused(run_folder, tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n \n")
    with pytest.raises(ValueError, match=r"blank\.txt has no words"):
        evaluate(CheckpointModel(run_folder), Task(name="wikitext", path=str(tmp_path / "blank.txt")))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("penalty", [1.0, 1e-38])
def test_a_temperature_near_zero_takes_the_most_likely_token(temperature, penalty):
    logits = torch.tensor([[1.0, 30.0, 2.0, -5.0, 29.0], [-4.0, -3.0, -2.0, -1.0, -8.0]])
    seen = torch.tensor([[True] * 5, [False] * 5])
    for choice in ({}, {"top_k": 3}, {"top_p": 0.5}):
        sampler = Sampler(Sampling(temperature=temperature, repetition_penalty=penalty, **choice))
        assert sampler(logits, seen).tolist() == [1, 3]


def test_p_of_one_leaves_out_no_token():
    """Though the probabilities of the first tokens already add up to 1 after rounding."""
    logits = torch.tensor([[0.0, -200.0, -300.0]])
    assert torch.equal(within_top_p(logits, 1.0), logits)


def test_equal_tokens_share_the_draws_at_any_temperature():
    drawn = [
        Sampler(Sampling(temperature=1e-38, seed=seed))(torch.tensor([[5.0, 1.0, 5.0]])).item() for seed in range(40)
    ]
    assert set(drawn) == {0, 2}


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(temperature=1, top_p=0.5)])
def test_logits_that_are_not_finite_choose_no_token_and_score_nothing(wrong, sampling, run_folder, text, tmp_path):
    logits = torch.tensor([[1.0, 3.0, wrong], [1.0, 3.0, -math.inf]])
    assert Sampler(sampling)(logits).tolist()[0] == NO_TOKEN and 0 <= Sampler(sampling)(logits).tolist()[1] < 2
    model = CheckpointModel(run_folder)
    for weight in model.chunk.parameters():
        weight.data.fill_(math.nan)
    (tmp_path / "a.jsonl").write_text('{"text": "the bug is in the code"}\n')
    for work in (
        lambda: generate(model, [[5]], max_new_tokens=3, sampling=sampling),
        lambda: evaluate(model, Task(name="wikitext", path=text, stride=4)),
        lambda: evaluate(model, Task(name="lambada", path=str(tmp_path / "a.jsonl"))),
    ):
        with pytest.raises(ValueError, match="the logits are not finite"):
            work()


def test_prompts_that_cannot_be_continued_are_refused(run_folder):
    model = CheckpointModel(run_folder)
    for prompts, new, words in (
        ([], 1, "at least one prompt"),
        ([[1], []], 1, "prompt 2 has no token"),
        ([[]], 1, "the prompt has no token"),
        ([[1]], 0, "max_new_tokens is 0"),
        ([[1], [1] * 10], 7, "prompt 2 and 7 new tokens are 17 tokens in all; the model's sequence has 16"),
        ([[1] * 10], 7, "the prompt and 7 new tokens .*: shorten the prompt, or ask for fewer tokens$"),
        ([[1] * 16], None, "the prompt and 1 new token are 17 tokens in all; .*: shorten the prompt$"),
        ([[1] * 17], 1, "the prompt and 1 new token are 18 tokens in all; .*: shorten the prompt$"),
        ([[1, 1024]], 1, "1024"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(model, prompts, max_new_tokens=new)


def test_without_a_number_a_prompt_gets_what_fits(run_folder):
    model = CheckpointModel(run_folder)  # a sequence of 16
    assert [len(ids) for ids in generate(model, [[5], [1] * 10])] == [6, 6]
    assert len(generate(model, [[5] * 15])[0]) == 1


def test_a_sample_ends_with_the_token_that_ends_it(run_folder):
    model = CheckpointModel(run_folder)
    free = generate(model, [[5, 6], [7]], max_new_tokens=12)
    assert [len(ids) for ids in free] == [12, 12]
    for end in {*free[0], *free[1]}:
        cut = [ids[: ids.index(end) + 1] if end in ids else ids for ids in free]
        assert generate(model, [[5, 6], [7]], max_new_tokens=12, end=end) == cut
        other = 1023 - (end == 1023)
        assert (
            other in {*free[0], *free[1]} or generate(model, [[5, 6], [7]], max_new_tokens=12, end=[other, end]) == cut
        )


def test_a_large_penalty_repeats_no_token_of_a_prompt_or_of_its_continuation(run_folder):
    """Each prompt for itself: the padding of the shorter one is no token that occurred."""
    model, prompts = CheckpointModel(run_folder), [[5, 6, 7, 8], [7]]
    made = generate(model, prompts, max_new_tokens=8, sampling=Sampling(repetition_penalty=1e6))
    for prompt, ids in zip(prompts, made):
        assert len({*prompt, *ids}) == len(prompt) + 8
        assert generate(model, [prompt], max_new_tokens=8, sampling=Sampling(repetition_penalty=1e6)) == [ids]
    plain = generate(model, prompts, max_new_tokens=8)
    assert any(len({*prompt, *ids}) < len(prompt) + 8 for prompt, ids in zip(prompts, plain)), "without it some repeat"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, "temperature = -1"),
        ({"top_k": 5}, "temperature = 0 takes the most likely token"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p = 0\.0 must be greater than 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**63}, "seed = 9223372036854775808 must be at most"),
        ({"top_p": None, "repetition_penalty": "1"}, "top_p = None must be a number.*; repetition_penalty = '1' must"),
    ],
)
def test_bad_sampling_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**wrong)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eval --path FILE --checkpoint RUN", "no task named: give one of wikitext, lambada"),
        ("eval wikitex --path FILE --checkpoint RUN", 'did you mean "wikitext"?'),
        ("eval wikitext --checkpoint RUN", "--path: give the file to score"),
        ("eval wikitext --path FILE", "--checkpoint: give the folder"),
        ("eval wikitext --path FILE --checkpoint RUN --loose", "--loose: only lambada reads it"),
        ("eval lambada --path FILE --checkpoint RUN --stride 3", "--stride: only wikitext reads it"),
        ("eval wikitext --path FILE --checkpoint RUN --all --step 1", "--all and --step: give one of the two"),
        ("eval wikitext --path FILE --checkpoint RUN --step 9", "has no checkpoint of step 9"),
        ("eval wikitext --path none --checkpoint RUN", "--path 'none': no such file; give an existing file\n"),
        ("generate a\udcff --checkpoint RUN", r"'a\xff': a prompt is UTF-8 text, and this has the byte 0xff"),
        ("generate a --checkpoint none", "none is not a folder"),
        ("generate a --checkpoint RUN --precision fp8", "--precision 'fp8': must be one of"),
    ],
)
def test_bad_requests_are_refused_before_any_rank_starts(line, words, run_folder, text, capsys, monkeypatch):
    monkeypatch.setattr("labkit.launch.run", lambda *_, **__: pytest.fail("ranks were started"))
    words_of_line = [{"FILE": text, "RUN": str(run_folder)}.get(word, word) for word in line.split()]
    assert main(words_of_line) == 2
    assert words in capsys.readouterr().err


def test_a_text_of_one_window_has_no_interval_and_perplexities_have_as_many_digits():
    row = {"checkpoint": "a", "perplexity": 26300.4, "low": 26300.4, "high": 26300.4, "original_words": 9}
    row |= {"task": "wikitext", "adjusted_perplexity": 12.0, "token_perplexity": 1234.5, "tokens": 12}
    said = (
        "a: perplexity 26,300 by 9 words; Megatron's adjusted perplexity 12.00; perplexity per token 1,234, 12 tokens"
    )
    assert line_of(row) == said
    assert line_of(row | {"low": 9.5, "high": 12.25}).startswith("a: perplexity 26,300 (95%: 9.500 to 12.25) by")


def test_rows_of_all_checkpoints_and_a_text_on_the_terminal(run_folder, text, tmp_path, capsys):
    given = ["--path", text, "--checkpoint", str(run_folder), "--all", "--json", "--stride", "4"]
    assert main(["eval", "wikitext", *given]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert main(["generate", "the bug", "--checkpoint", str(run_folder), "--max-new-tokens", "5", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["generate", "the bug", "--checkpoint", str(run_folder), "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == f"the bug{made['text']}\n"


def test_numbers_of_a_line_have_commas_and_names():
    words = {
        "task": "wikitext",
        "checkpoint": "step_1",
        "low": 999.94,
        "high": 485165195.4,
        "adjusted_perplexity": 21843.2,
    }
    assert line_of(
        {**words, "perplexity": 1234.5, "token_perplexity": 684.26, "original_words": 1, "tokens": 1200}
    ) == (
        "step_1: perplexity 1,234 (95%: 999.9 to 485,165,195) by 1 word; Megatron's adjusted perplexity 21,843; "
        "perplexity per token 684.3, 1,200 tokens"
    )
    scores = {
        "task": "lambada",
        "checkpoint": "step_1",
        "accuracy": 0.0,
        "low": Accuracy(0, 5).interval[0],
        "high": 0.4345,
    }
    assert line_of({**scores, "right": 0, "passages": 5}) == "step_1: 0.00% right (95%: 0.00 to 43.45), 0 of 5 passages"


def test_a_damaged_checkpoint_is_named(run_folder, tmp_path, text, capsys):
    import shutil

    shutil.copytree(run_folder, tmp_path / "run")
    shard = tmp_path / "run" / "step_00000002" / "rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["eval", "wikitext", "--path", text, "--checkpoint", str(tmp_path / "run")]) == 1
    assert "rank_00000.safetensors" in capsys.readouterr().err
