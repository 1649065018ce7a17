"""The configuration: documented fields, typed overrides, aliases, strict YAML in both directions, presets, numbers."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import re
import runpy
import subprocess
import sys
from pkgutil import resolve_name
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.comm.rank_generator import rank_generators
from labkit.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, choices, field, presets, rules
from labkit.config.fields import ALIASES, SPECS, resolve
from labkit.config.sections import REASONS, SECTIONS
from labkit.models.chunks import DTYPES
from labkit.models.core_attention import KERNELS
from labkit.parallel.mlp import ACTIVATIONS
from labkit.train.lr_schedule import STYLES, WSD_TAILS

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_field_has_its_string_and_every_section_a_docstring() -> None:
    assert [name for name, spec in SPECS.items() if not spec.doc.endswith((".", ";"))] == []
    assert all(cls.__doc__ for cls in SECTIONS.values())


def test_the_reference_page_is_that_of_the_fields() -> None:
    """A stale page is written here, so that nobody has to remember a script; what is left to do is to commit it."""
    made = runpy.run_path(str(ROOT / "scripts" / "make_config_reference.py"))
    stale = made["PAGE"].read_text(encoding="utf-8") != made["page"]()
    if stale and not os.environ.get("CI"):
        made["main"]()
    assert not stale, "docs/config.md was out of date; it is written now (not in CI): look at it, and commit it"
    assert all(f"`{name}`" in made["page"]() for name in (*SPECS, *ALIASES))


def test_every_word_of_a_table_stands_for_something_that_exists() -> None:
    """Rows name functions and classes as text, and other fields repeat the keys of a table in another package."""
    rows = [row for table in (choices.SCHEDULES, choices.FAMILIES, choices.DISPATCHERS) for row in table.values()]
    places = [place for row in rows for place in row if isinstance(place, str) and place.startswith("labkit.")]
    merged = sum(row.merged is not None for row in choices.SCHEDULES.values())
    assert len(places) == len(choices.SCHEDULES) + merged + 3 * len(choices.FAMILIES) + len(choices.DISPATCHERS)
    assert all(callable(resolve_name(place)) for place in places)
    for name, words in {
        "model.activation": ACTIVATIONS,
        "model.attention_backend": ["fused", *KERNELS, "unfused"],
        "optim.lr_schedule": STYLES,
        "optim.wsd_decay_style": WSD_TAILS,
        "optim.precision": DTYPES,
    }.items():
        assert set(SPECS[name].choices) == set(words), name


def test_every_number_has_a_range_and_every_table_entry_a_field() -> None:
    bounded = {name for name, spec in SPECS.items() if (spec.ge, spec.gt) != (None, None)}
    assert bounded == {name for name, spec in SPECS.items() if spec.kind in ("int", "float")}
    assert len(ALIASES) == sum(len(spec.aliases) for spec in SPECS.values()), "one field for one alias"
    assert all(spec.default is None for spec in SPECS.values() if spec.optional), "None is what `leave it out` means"
    assert not set(ALIASES) & {spec.name for spec in SPECS.values()}, "an alias must not shadow a field"


def test_every_need_names_a_field_and_its_words() -> None:
    needs = [(spec.dotted, *need.partition("=")) for spec in SPECS.values() for need in spec.needs]
    assert len(needs) > 50
    for name, other, words in [(name, other, words) for name, others, _, words in needs for other in others.split("|")]:
        allowed = {"bool": {"true", "false"}}.get(SPECS[other].kind, {*SPECS[other].choices, "null"})
        assert set(filter(None, words.split("|"))) <= allowed, name
        if not words:
            assert SPECS[other].optional or SPECS[other].kind == "int", "the advice is to set it, or to set it above"


def test_a_field_is_read_once_all_its_needs_hold() -> None:
    """The message names the first need that does not hold, and following it leads to a sound configuration."""
    config, seen = presets.tiny().override({"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}), []
    for change in ({"fp8": "hybrid", "fp8_recipe": "current"}, {"fp8_recipe": "delayed"}):
        (problem,) = config.problems()
        seen.append(problem.partition("has no effect ")[2])
        config = config.override(change)
    assert seen == [
        "with optim.fp8 = none; set that to e4m3 or hybrid, or leave this out",
        "with optim.fp8_recipe = current; set that to delayed, or leave this out",
    ]
    assert config.problems() == []


def test_a_refusal_gives_the_reason_of_the_need() -> None:
    assert set(REASONS) <= {need for spec in SPECS.values() for need in spec.needs}
    (problem,) = presets.tiny().override({"data_parallel": "naive", "distributed_optimizer": True}).problems()
    assert "no effect with optim.data_parallel = naive, which has no gradient buckets; set that to buck" in problem


@given(st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_rules_of_a_topic_that_is_not_asked_are_not_broken(random: Random) -> None:
    """`TOPICS` covers every field that can break a rule of its topic."""
    words = {
        "bool": (True, False),
        "int": (0, 1, 2, 3, 4, 8),
        "float": (0.0, 0.01, 0.5, 2.0),
        "str": ("tp-pp", "1,0,0"),
    }
    changes = {}
    for name in random.sample(list(SPECS), 8):
        spec = SPECS[name]
        lists = {"tuple[int, ...]": ((1,), (0, 1), (0,)), "tuple[str, ...]": ((), ("mlp",), ("moe",), ("attn",))}
        changes[name] = random.choice(spec.choices or lists.get(spec.kind) or words[spec.kind])
    config, world_size = presets.tiny().replaced(changes), random.choice((None, 1, 2, 4, 8))
    found = set(config.problems(world_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "TOPICS", dict.fromkeys(rules.TOPICS, ("",)))
        assert set(config.problems(world_size)) <= found


def test_defaults_and_presets_are_sound() -> None:
    assert RunConfig().problems() == []
    for name in presets.names():
        assert presets.get(name).problems() == [], name


@pytest.mark.parametrize("name", ["tiny", "llama_tiny", "tiny_moe", "mixtral_tiny", "deepseek_tiny"])
def test_tiny_presets_fit_every_layout(name: str) -> None:
    config = presets.get(name)
    assert config.model.layers == 8 and config.model.heads % 4 == 0 and (config.model.kv_heads or 8) % 4 == 0
    assert config.model.seq_length % 16 == 0 and config.model.vocab_size % (128 * 8) == 0
    assert config.num_microbatches(1) >= 16
    assert config.optim.eps == 1e-5 and config.optim.lr <= 1e-3
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for dp in (1, 2):
                layout = config.override({"tp": tp, "pp": pp, "sequence_parallel": tp > 1})
                assert layout.problems(tp * pp * dp) == []


def test_tiny_vocabulary_is_the_bundled_tokenizers() -> None:
    from labkit.data import load_tokenizer

    assert load_tokenizer().get_vocab_size() == presets.tiny().model.vocab_size


@pytest.mark.parametrize(
    ("table", "row", "billions"),
    [(presets.table1, "1.2B", 1.2), (presets.table1, "2.5B", 2.5), (presets.table1, "4.2B", 4.2),
     (presets.table1, "8.3B", 8.3), (presets.table2, "355M", 0.355), (presets.table2, "2.5B", 2.5),
     (presets.table2, "8.3B", 8.3)],
)  # fmt: skip
def test_paper_rows_have_the_papers_sizes(table, row: str, billions: float) -> None:
    m = table(row).model
    weights = 12 * m.layers * m.hidden**2 + (51200 + m.seq_length) * m.hidden  # matrices and embeddings
    assert weights / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("name", [name for name in presets.names() if name.startswith(("table1", "table2"))])
def test_paper_rows_are_trained_as_its_section_4_2_says(name: str) -> None:
    """fp16 with dynamic loss scaling, checkpoints after every layer, and the numbers of the training."""
    config = presets.get(name)
    m, o, t = config.model, config.optim, config.train
    assert (o.precision, o.loss_scale, m.recompute_granularity, m.recompute_num_layers) == ("fp16", None, "full", 1)
    assert (o.lr, o.min_lr, o.lr_schedule, o.warmup_steps, o.decay_steps) == (1.5e-4, 1e-5, "cosine", 3000, None)
    assert (t.steps, t.global_batch_size) == (300_000, 512 if name.startswith("table2") else 8)
    assert (o.weight_decay, o.clip_grad, m.init_std) == (0.01, 1.0, 0.02)
    assert {m.embedding_dropout, m.attention_dropout, m.hidden_dropout} == {0.1} and m.seq_length == 1024


def test_paper_batches_and_layouts() -> None:
    assert presets.table1("8.3B").train.global_batch_size == 8
    wide = presets.table1("8.3B", data_parallel=True)
    assert wide.problems(512) == [] and wide.data_parallel_size(512) == 64
    assert {row.hidden // row.heads for row in presets.TABLE_1.values()} == {96}
    with pytest.raises(ConfigError, match=r"1\.2B, 2\.5B, 4\.2B, 8\.3B"):
        presets.table1("9B")
    with pytest.raises(ConfigError, match='did you mean "llama_tiny"'):
        presets.get("lama_tiny")


@pytest.mark.parametrize(("alias", "dotted"), ALIASES.items())
def test_every_alias_sets_its_field_with_dash_and_underscore(alias: str, dotted: str) -> None:
    spec = SPECS[dotted]
    value = {"int": 2, "float": 0.5, "bool": True, "str": "x", "tuple[str, ...]": ["attn"], "tuple[int, ...]": [1, 0]}[
        spec.kind
    ]
    expected = RunConfig().override({dotted: value})
    assert RunConfig().override({alias: value}) == expected
    assert RunConfig().override({alias.replace("_", "-"): value}) == expected
    assert RunConfig().override({spec.section: {alias: value}}) == expected


def test_override_takes_bare_names_sections_and_whole_sections() -> None:
    config = RunConfig().override({"lr": 1, "parallel": {"tp": 2}, "model": ModelConfig(layers=6)})
    assert (config.optim.lr, config.parallel.tp, config.model.layers) == (1.0, 2, 6)
    assert isinstance(config.optim.lr, float)
    assert RunConfig().override({"params_dtype": "bfloat16"}).optim.precision == "bf16"
    assert RunConfig().override({"attention_backend": "local"}).model.attention_backend == "unfused"


def test_override_leaves_rules_between_fields_to_validate() -> None:
    config = presets.tiny().override({"parallel.tp": 3})
    with pytest.raises(ConfigError, match=r"model\.heads = 8: must be a multiple of parallel\.tp = 3"):
        config.validate()
    assert config.override({"parallel.tp": 4}).validate(4).parallel.tp == 4


def test_override_reports_everything_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        presets.tiny().override(
            {"paralel.tp": 3, "path": "x", "dp": 2, "lr": "fast", "optim": 3, "parallel.pp": 2, "pp": 4}
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for part in ('did you mean "parallel.tp"', "schedule.path, data.path", "takes the remaining ranks",
                 "optim.lr = 'fast'", "optim = 3", "parallel.pp: given twice"):  # fmt: skip
        assert part in text


def test_a_field_of_another_section_is_pointed_out() -> None:
    dotted, why = resolve("layers", "parallel")
    assert dotted is None and '"model.layers"' in why


def test_six_problems_make_one_error_with_six_lines() -> None:
    config = presets.tiny().override(
        {"tp": 3, "lr": -1.0, "order": "tp-xp", "model.activation": "relu", "micro_batch_size": 3, "pp": 3}
    )
    with pytest.raises(ConfigError) as caught:
        config.validate()
    names = sorted(problem.split(" = ")[0] for problem in caught.value.problems)
    assert names == ["model.activation", "model.heads", "model.layers", "optim.lr", "parallel.order",
                     "train.global_batch_size"]  # fmt: skip
    assert str(caught.value).startswith("the configuration: 6 problems\n") and str(caught.value).count("\n") == 6


def test_config_error_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"], source="f.yaml")))
    assert error.problems == ["a", "b"] and error.source == "f.yaml" and "2 problems" in str(error)


@pytest.mark.parametrize("write", [RunConfig.to_yaml, RunConfig.to_commented_yaml])
def test_yaml_round_trip_of_presets(tmp_path, write) -> None:
    for name in presets.names():
        path = tmp_path / f"{name}.yaml"
        path.write_text(write(presets.get(name)))
        assert RunConfig.from_yaml(path) == presets.get(name)


def test_comments_say_what_each_field_is() -> None:
    """Above every field its string and its values, above every section its docstring, and nothing else."""
    text = presets.tiny().to_commented_yaml()
    assert max(map(len, text.splitlines())) <= 100
    said: dict[str, str] = {}
    section, comment = "", []
    for line in filter(None, text.splitlines()):
        words = line.strip()
        if words.startswith("# "):
            comment.append(words[2:])
            continue
        name = words.partition(":")[0]
        if not line.startswith(" "):
            section, name = name, name
        elif line.startswith("  ") and line[2] not in " -":
            name = f"{section}.{name}"
        else:
            continue  # an item of a list
        said[name], comment = " ".join(comment), []
    docs = {name: " ".join(str(cls.__doc__).split()) for name, cls in SECTIONS.items()}
    assert said == {name: spec.help for name, spec in SPECS.items()} | docs
    assert said["model.heads"] == "Query heads; a head is hidden / heads wide. [>= 1]"
    bare = "".join(f"{line}\n" for line in text.splitlines() if line and not line.strip().startswith("#"))
    assert bare == presets.tiny().to_yaml()


def _values(dotted: str) -> st.SearchStrategy:
    """Sound values of one field by its type and range alone."""
    spec = SPECS[dotted]
    if spec.choices:
        return st.sampled_from(spec.choices)
    if spec.kind == "bool":
        return st.booleans()
    if spec.path:
        path = st.text("ab~/. \u2028", min_size=1, max_size=12).filter(lambda text: text.strip() and text[0] != "~")
        return st.lists(path, max_size=3).map(tuple) if spec.kind.startswith("tuple") else path
    if spec.kind == "tuple[str, ...]":
        return st.lists(st.text(max_size=5), max_size=3).map(tuple)
    if spec.kind == "tuple[int, ...]":
        return st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
    if spec.kind == "str":
        return st.text(max_size=12)
    if spec.kind == "int":
        return st.integers(0, 2**31 - 1)
    return st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_typed_value_survives_yaml(data) -> None:
    from labkit.config import yaml_text

    names = data.draw(st.lists(st.sampled_from(sorted(SPECS)), unique=True, max_size=8))
    config = RunConfig().replaced({name: data.draw(_values(name), label=name) for name in names})
    for text in (config.to_yaml(), config.to_commented_yaml()):
        values, problems = yaml_text.parse(text)
        assert problems == []
        assert RunConfig().replaced(values) == config


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [("optim: {lr: 1e-4}", "lr", 1e-4), ("optim: {lr: 1E-4}", "lr", 1e-4), ("optim: {lr: .5}", "lr", 0.5),
     ("optim: {lr: 3}", "lr", 3.0), ("lr: 1.e-3", "lr", 1e-3), ("learning: 1", None, None)],
)  # fmt: skip
def test_numbers_of_yaml(tmp_path, text: str, field: str | None, value: float | None) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    if field is None:
        with pytest.raises(ConfigError, match="line 1: 'learning': unknown field"):
            RunConfig.from_yaml(path)
    else:
        read = getattr(RunConfig.from_yaml(path).optim, field)
        assert read == value and isinstance(read, float)


def test_a_quoted_number_is_text(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text('parallel:\n  tp: "8"\n')
    with pytest.raises(ConfigError, match=r"line 2: parallel\.tp = '8': must be an integer, not text.*without quotes"):
        RunConfig.from_yaml(path)


def test_duplicate_keys_name_their_lines(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "parallel:\n  tp: 2\n  pp: 2\n  tp: 4\noptim: {lr: 1}\noptim: {lr: 2}\nnum_layers: 2\nmodel: {layers: 4}\n"
    )
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(path)
    text = str(caught.value)
    assert "line 4: 'parallel.tp': given twice, first in line 2" in text
    assert "line 6: 'optim': given twice, first in line 5" in text
    assert "line 8: model.layers: given twice, as num_layers and as model.layers" in text


def test_from_yaml_lists_reading_and_rules_together(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("parallel: {tp: 3}\nmodel: {heads: 8, hidden: 63}\ntrain: {stepz: 1}\n")
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(path)
    unknown, hidden, heads = caught.value.problems
    assert "line 3: 'train.stepz'" in unknown and hidden.startswith("model.hidden = 63") and "parallel.tp = 3" in heads
    assert str(path) in str(caught.value)


def test_from_yaml_lays_overrides_over_the_file(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("parallel: {tp: 3}\n")
    assert RunConfig.from_yaml(path, overrides={"tensor_model_parallel_size": 2}).parallel.tp == 2


def test_an_empty_file_is_the_defaults(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing set\nmodel:\n")
    assert RunConfig.from_yaml(path) == RunConfig()


def test_files_that_are_none(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        RunConfig.from_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is a folder; give a file"):
        RunConfig.from_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"data: {path: caf\xe9}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        RunConfig.from_yaml(tmp_path / "latin.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * 100_001)
    with pytest.raises(ConfigError, match="larger than 100,000 bytes"):
        RunConfig.from_yaml(tmp_path / "huge.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_yaml("a\0b")


_LAYOUT = {
    "tp": st.sampled_from([1, 2, 4]), "pp": st.sampled_from([1, 2, 3]), "cp": st.sampled_from([1, 2]),
    "ep": st.sampled_from([1, 2, 4]), "etp": st.sampled_from([None, 1, 2]),
    "order": st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join),
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries(_LAYOUT), st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 48]))
def test_layout_rules_agree_with_the_rank_generators(layout: dict, world_size: int) -> None:
    """A layout is refused here exactly if the generators of `labkit.parallel` refuse it."""
    from labkit.config.rules import layout_problems

    try:
        rank_generators(world_size=world_size, **layout)
        refused = False
    except ValueError:
        refused = True
    assert bool(layout_problems(ParallelConfig(**layout), world_size)) == refused


@pytest.mark.parametrize(
    ("world_size", "ok"),
    [(1, True), (2, True), (8191, True), (100_000, True), (1_000_000, True), (2**31 - 1, True), (2**31, False),
     (0, False), (-1, False), ("8", False), (True, False), (8.0, False), (2**80, False)],
)  # fmt: skip
def test_world_sizes(world_size, ok: bool) -> None:
    config = RunConfig(train=dataclasses.replace(RunConfig().train, global_batch_size=LARGE.get(world_size, 1)))
    found = config.problems(world_size)
    assert (found == []) == ok, found
    if not ok:
        assert any(p.startswith("world_size = ") for p in found)


LARGE = {w: w for w in (2, 8191, 100_000, 1_000_000, 2**31 - 1)}


def test_smallest_world_size_and_derived_numbers() -> None:
    assert ParallelConfig(tp=4, pp=2).smallest_world_size == 8
    assert ParallelConfig(tp=2, cp=3, pp=2, ep=4, etp=1).smallest_world_size == 24
    config = presets.tiny().override({"tp": 2, "pp": 2})
    assert (config.data_parallel_size(8), config.num_microbatches(8)) == (2, 8)


def test_layouts_that_no_model_trains_on_are_refused_when_they_are_read() -> None:
    config = presets.tiny().override({"split_rank": 1, "pp": 2})
    assert config.problems() == ["parallel.split_rank = 1: only a T5 has an encoder to split off; leave it out"]
    config = presets.tiny().override({"rank_offset": 2})
    assert config.problems(4) == ["parallel.rank_offset = 2: a run's first rank is rank 0; leave it out"]
    assert rules.layout_problems(ParallelConfig(split_rank=1, pp=2, rank_offset=2), 4) == [], "groups can"


def test_config_imports_no_torch() -> None:
    code = (
        "import sys, labkit.config as c; c.presets.tiny().validate();"
        "print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=12,
)
_KEYS = st.sampled_from([*SPECS, *ALIASES, "model", "parallel", "optim", "x", "data.path"]) | st.text(max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_KEYS, _PLAIN, max_size=6))
def test_fuzzed_values_give_a_config_or_a_config_error(changes: dict) -> None:
    try:
        config = RunConfig().override(changes)
        assert isinstance(config.problems(8), list)
    except ConfigError as error:
        assert error.problems


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=60)
    | st.text(alphabet="modelparti:{}[],&*!|>-'\"\n #?%@`~\t01e.", max_size=80)
    | st.binary(max_size=60)
)
def test_fuzzed_files_give_a_config_or_a_config_error(tmp_path_factory, content) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(RunConfig.from_yaml(path), RunConfig)
    except ConfigError as error:
        assert error.problems


# ---- fields of a script ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Every kind of field that a script may add."""

    alpha: float = field(1.0, "A number.", gt=0)
    words: tuple[str, ...] = field((), "A list.")
    most: int | None = field(None, "None is a value.", ge=1)
    mode: str = field("plain", "Words.", choices="plain other")
    on: bool = field(False, "Read in one mode alone.", needs="extra.mode=other")


def test_fields_of_a_script_are_like_all_others(tmp_path: pathlib.Path) -> None:
    config = presets.tiny().with_extra(Options)
    assert vars(config.extra) == {"alpha": 1.0, "words": (), "most": None, "mode": "plain", "on": False}
    changed = config.override({"extra.alpha": 2, "extra": {"words": ["a"], "most": 3}}).validate(4)
    assert isinstance(changed.extra.alpha, float) and changed.extra.words == ("a",) and config.extra.alpha == 1.0
    path = tmp_path / "config.yaml"
    for text in (changed.to_yaml(), changed.to_commented_yaml()):
        path.write_text(text, encoding="utf-8")
        assert RunConfig.from_yaml(path) == changed, "without the script as well"
        assert RunConfig.from_yaml(path).with_extra(Options).override({"extra.alpha": 0}).problems() == [
            "extra.alpha = 0.0: must be greater than 0"
        ]
    assert "  # A number. [> 0]\n  alpha: 2.0\n" in changed.to_commented_yaml()
    sent = pickle.loads(pickle.dumps(changed))
    assert hash(sent) == hash(changed) and len({sent, changed, config}) == 2
    assert sent == changed and sent.override({"extra.most": 0}).problems() == ["extra.most = 0: must be at least 1"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.extra.alpha = 3.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"extra.alpha": "1"}, "extra.alpha = '1': must be a number, not text; write it without quotes"),
        ({"extra.mode": "othr"}, "extra.mode = 'othr': must be one of plain, other; did you mean \"other\"?"),
        ({"extra": {"alpa": 1}}, 'extra.alpa = 1: unknown field; did you mean "extra.alpha"?'),
        (
            {"extra.on": True},
            "extra.on = True: has no effect with extra.mode = plain; set that to other, or leave this out",
        ),
    ],
)
def test_bad_values_of_a_script_are_refused_as_others(changes: dict[str, object], problem: str) -> None:
    assert presets.tiny().with_extra(Options).override(changes).problems() == [problem]
    assert presets.tiny().override(changes).with_extra(Options).problems() == [problem], "in whatever order"


@pytest.mark.parametrize(
    ("name", "kind", "default", "said"),
    [
        ("lr", float, field(1.0, "L."), "extra.lr has a name that the configuration knows"),
        ("a", float, field(0.0, "A.", gt=0), "extra.a has the default 0.0, which must be greater than 0"),
        ("a", float, dataclasses.field(), "extra.a needs a default"),
        ("a", complex, field(1j, "A."), "extra.a must be one of int, float"),
        ("a", float, field(1.0, "A.", aliases="b"), "and has no aliases"),
    ],
)
def test_fields_that_cannot_be_added_are_refused(name: str, kind: type, default: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"extra_args_provider: .*{re.escape(said)}"):
        presets.tiny().with_extra(dataclasses.make_dataclass("Own", [(name, kind, default)]))
    with pytest.raises(ValueError, match="extra_args_provider must be a dataclass"):
        presets.tiny().with_extra(print)  # type: ignore[arg-type]


def test_what_a_model_of_ones_own_is_changes_the_rules_of_its_stages() -> None:
    own = presets.tiny().override({"model_type": "encoder_and_decoder", "pp": 2, "decoder_layers": 4})
    (problem,) = own.problems()
    assert problem.startswith("parallel.split_rank = None: with parallel.pp = 2 ")
    assert own.override({"split_rank": 1}).problems(2) == []
    wrong = RunConfig().override({"family": "t5", "model_type": "encoder_or_decoder"}).problems()
    assert wrong == ["model.model_type = 'encoder_or_decoder': a T5 is an encoder and a decoder; leave it out"]
