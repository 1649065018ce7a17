"""Megatron-LM: flags of `pretrain_gpt.py` and its siblings in a shell script, a list, or a YAML file.

Source: megatron/training/arguments.py and megatron/training/config of Megatron-LM. Most flags have a field of the same
name here, or an alias (`labkit.config.fields`), or are in `labkit.config.megatron_flags`, which the command line reads,
too. The table below has what only a converter can do.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from typing import Any

from labkit.config.fields import ALIASES, NOT_FIELDS, SPECS
from labkit.config.foreign.conversion import (
    ALREADY,
    ALWAYS,
    DIFFERS,
    LACKS,
    NO_MEANING,
    NOTHING,
    YOURS,
    Conversion,
    Note,
    Row,
    Stack,
    above_zero,
    differs,
    flat,
    lacks,
    pick,
    rows,
)
from labkit.config.foreign.shell_words import flags
from labkit.config.megatron_flags import CHUNK, IGNORED, LACKING, NEEDLESS, SWITCHES, derived
from labkit.config.run_config import RunConfig

PROGRAMS = {"pretrain_gpt.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5"} | dict.fromkeys(
    ("pretrain_mamba.py", "pretrain_hybrid.py"), "mamba"
)
"""Megatron-LM's programs -> our families."""
GPT2_VOCABULARY = 50257
"""Tokens of GPT2BPETokenizer, which is the default of pretrain_gpt.py."""
_OF_EVERY_RUN = {"--num-layers", "--hidden-size", "--num-attention-heads"}
_UNSAID = {
    "--adam-beta2": 0.999,
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--lr-decay-style": "linear",
    "--overlap-grad-reduce": False,
    "--eval-iters": 100,
    "--log-interval": 100,
}
"""Defaults of Megatron-LM that are not ours."""
_UNSAID_OF_EXPERTS = {
    "--moe-token-dispatcher-type": "allgather",
    "--moe-grouped-gemm": False,
    "--moe-router-dtype": "model",
}
_DERIVED = {
    "model.ffn_hidden": "--swiglu",
    "model.kv_heads": "--group-query-attention",
    "parallel.vpp": "--num-layers-per-virtual-pipeline-stage",
}
"""Field that `derived` sets -> the flag that it follows from."""
_UNSAID_OF_FP16 = {"--initial-loss-scale": 2.0**32}
_UNSAID_OF_FP8 = {"--fp8-amax-history-len": 1, "--fp8-amax-compute-algo": "most_recent"}


def _keys(contents: Any) -> dict[str, Any]:
    """Return the flags of a script, of a YAML file of flags, or of its part `MODEL_ARGS`."""
    if isinstance(contents, Mapping):
        part = contents.get("MODEL_ARGS")
        inside = flat(part if isinstance(part, Mapping) else contents)
        return {_flag(key): value for key, value in inside.items()}
    script = flags(contents)
    kept = {"the program": script.program} if script.program else {}
    return kept | ({"if and case": "skipped"} if script.skipped else {}) | script.values


def _flag(key: object) -> str:
    """Return `--num-layers` for `num_layers` or `language_model.num_layers`."""
    return f"--{str(key).rpartition('.')[2].lstrip('-').replace('_', '-')}"


def _derive(found: Conversion) -> None:
    """Read flags that say something together, defaults that are not ours, and all other flags."""
    given = found.keys
    switches = {name: given.get(_flag(name)) for name in ("swiglu", "group_query_attention")}
    chunk = found.number(_flag(CHUNK))
    unsaid = dict(_UNSAID) | (_UNSAID_OF_EXPERTS if "--num-experts" in given else {})
    unsaid |= _UNSAID_OF_FP16 if "--fp16" in given else {}
    unsaid |= _UNSAID_OF_FP8 if "--fp8-format" in given else {}
    _family(found)
    _model(found)
    _steps(found)
    _checkpoints(found)
    if re.fullmatch(r"[\d.]+,\s*0+(\.0*)?(,.*)?", str(given.get("--split"))):
        found.drop("--eval-", "--split keeps nothing for validation")
        del unsaid["--eval-iters"]
    found.assume(unsaid, "Megatron-LM")
    found.read(TABLE)
    switches[CHUNK] = chunk if "model.layers" in found.values else 0
    more, problems = derived(switches, RunConfig().replaced(found.values))
    found.problems += problems
    for name, value in more.items():
        found.set(name, value, _DERIVED[name])


def _checkpoints(found: Conversion) -> None:
    """Read where a run saves and what it loads; a folder that only the shell knows keeps its interval in the report."""
    save, load = found.keys.get("--save"), found.take("--load")
    if load is not None and load == save:
        found.note(ALWAYS, "--load", "a run resumes from the folder in which it saves")
    elif load is not None:
        why = "labkit reads no checkpoints of Megatron-LM, and resumes its own by checkpoint.load"
        found.note(DIFFERS, f"--load {load}", why)
    if "$" in str(save) and (interval := found.take("--save-interval")) is not None:
        found.note(YOURS, f"--save-interval {interval}", "set checkpoint.interval to it, together with checkpoint.dir")


def _family(found: Conversion) -> None:
    program = found.word("the program", "pretrain_gpt.py")
    pattern = found.take("--hybrid-layer-pattern") or found.take("--hybrid-override-pattern")
    family = PROGRAMS.get(program, "mamba" if pattern else "gpt")
    if program not in PROGRAMS:
        found.note(DIFFERS, program, "only Megatron's own pretrain_*.py programs are known; read as pretrain_gpt.py")
    found.set("model.family", family, program)
    if pattern:
        found.set("model.hybrid_override_pattern", pattern, "--hybrid-layer-pattern")
        found.set("model.layers", len(pattern), "--hybrid-layer-pattern")
        found.take("--num-layers")
    tokenizer = found.keys.get("--tokenizer-type", "GPT2BPETokenizer" if family == "gpt" else "the tokenizer")
    if "--vocab-size" not in found.keys and tokenizer == "GPT2BPETokenizer":
        found.set("model.vocab_size", GPT2_VOCABULARY, tokenizer)
    elif "--vocab-size" not in found.keys:
        found.note(YOURS, "model.vocab_size", f"Megatron-LM asks {tokenizer} for it; set it to its token count")


def _model(found: Conversion) -> None:
    given = found.keys
    if not given.get("--group-query-attention"):
        found.take("--num-query-groups")  # Megatron-LM does not read it then
    hidden, heads = (found.number(flag, keep=True) for flag in ("--hidden-size", "--num-attention-heads"))
    if (width := found.number("--kv-channels")) and width * heads != hidden:
        found.note(LACKS, "--kv-channels", "a head is model.hidden / model.heads wide")
    rows, rotary = found.take("--max-position-embeddings"), given.get("--position-embedding-type") in ("rope", "none")
    if not rotary and str(rows) not in ("None", str(given.get("--seq-length"))):
        found.note(DIFFERS, f"--max-position-embeddings {rows}", "the table of positions has model.seq_length rows")
    if given.get("--transformer-impl") == "transformer_engine":
        for flag in filter(found.take, ("--attention-backend", "--use-flash-attn")):
            found.note(DIFFERS, flag, "Transformer Engine chooses its kernels itself")
    biased = not given.get("--disable-bias-linear")
    exact = found.take("--no-bias-gelu-fusion", False) or not biased  # the fused kernel approximates by tanh
    if exact and not given.get("--swiglu"):
        found.set("model.activation", "gelu", "--no-bias-gelu-fusion" if biased else "--disable-bias-linear")


def _steps(found: Conversion) -> None:
    """Turn samples and fractions into steps."""
    if (batch := found.number("--global-batch-size", keep=True)) <= 0:
        batch = found.number("--micro-batch-size", 1, keep=True)
        found.set("train.global_batch_size", batch, "--micro-batch-size")
        found.note(YOURS, "--global-batch-size", "not given: micro batch x data parallelism; here that is 1")
    for samples, name in (
        ("--train-samples", "train.steps"),
        ("--lr-decay-samples", "optim.decay_steps"),
        ("--lr-warmup-samples", "optim.warmup_steps"),
    ):
        if (count := found.number(samples, None)) is not None:
            found.set(name, count // max(1, batch), f"{samples} / --global-batch-size")
    steps = found.number("--train-iters", found.values.get("train.steps", 0), keep=True)
    decay = found.number("--lr-decay-iters", found.values.get("optim.decay_steps", steps), keep=True)
    if (fraction := found.number("--lr-warmup-fraction", None)) is not None:
        found.set("optim.warmup_steps", int(fraction * decay), "--lr-warmup-fraction x decay steps")


_MOST_LAYERS = 10_000


def _layer_freq(found: Conversion, key: str, value: Any) -> None:
    """Read N, one layer of experts in N, or Megatron's list expression such as `([0]*1+[1]*3)*2`."""
    text = str(value)
    if text.isdecimal():
        if int(text) > _MOST_LAYERS:
            found.problems.append(f"{key} = {text}: one layer of experts in N needs an N of at most {_MOST_LAYERS:,}")
        else:
            found.set("moe.layer_freq", [1] + [0] * (int(text) - 1), key)
        return
    try:
        found.set("moe.layer_freq", _list_of(ast.parse(text, mode="eval").body), key)
    except (SyntaxError, ValueError):
        found.problems.append(f"{key} = {text}: is neither a number nor a list of 0 and 1 such as ([0]*1+[1]*3)*2")


def _list_of(node: ast.expr) -> Any:
    """Return the value of an expression of lists, integers, + and *. Raises ValueError for any other."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _list_of(node.left), _list_of(node.right)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and right in range(1000):
            return left * right
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
    elif isinstance(node, ast.List):
        return [_list_of(item) for item in node.elts]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(ast.unparse(node))


def _data(found: Conversion, key: str, value: Any) -> None:
    words = value if isinstance(value, list) else str(value).split()
    missing = [w for w in words if not os.path.isfile(f"{w}.idx") and not re.fullmatch(r"[\d.]+", w)]
    if missing and not os.path.isfile(missing[0]):
        found.note(YOURS, key, f"there is no {missing[0]}.idx here; set data.path, or data.blend for several")
    elif len(words) == 1:
        found.set("data.path", words[0], key)
    else:
        found.set("data.blend", words, key)


def _switch(sets: Mapping[str, str]) -> Row:
    """Return the row of a flag without a value, which sets these fields."""

    def row(found: Conversion, key: str, value: Any) -> None:
        for name, word in sets.items():
            pick(name, {True: word})(found, key, value)

    return row


def _known_to_the_command_line() -> dict[str, Row]:
    """Return the rows that follow from our fields and from what the command line knows of Megatron-LM's flags."""
    own = {spec.name: dotted for dotted, spec in SPECS.items()}
    found: dict[str, Row] = {_flag(name): dotted for name, dotted in (own | ALIASES).items()}
    found |= {_flag(name): differs(why) for name, why in NOT_FIELDS.items()}
    found |= {_flag(name): _switch(sets) for name, sets in SWITCHES.items()}
    for group, table in ((LACKS, LACKING), (NO_MEANING, NEEDLESS), (NO_MEANING, IGNORED)):
        found |= {_flag(name): Note(group, why) for why, names in table.items() for name in names.split()}
    return found


TABLE: dict[str, Row] = _known_to_the_command_line() | {
    "if and case": differs("conditions are not evaluated; the first branch of each was read"),
    "--attention-backend": pick(
        "model.attention_backend",
        {"auto": "fused", "fused": "cudnn", "flash": "flash", "unfused": "unfused", "local": "unfused"},
    ),
    "--onnx-safe": pick("model.activation", {True: "gelu"}),
    "--hidden-dropout": "model.hidden_dropout model.embedding_dropout",
    "--lr-decay-style": pick("optim.lr_schedule", {"WSD": "wsd"}, others=True),
    "--lr-wsd-decay-style": pick("optim.wsd_decay_style", {"minus_sqrt": "minus-sqrt"}, others=True),
    "--moe-layer-freq": _layer_freq,
    "--profile": pick("train.profile", {True: "nsys"}),
    "--most-recent-k": above_zero("checkpoint.keep"),
    "--data-path": _data,
    "--vocab-file": "data.tokenizer",
    "--optimizer": lacks("labkit has only AdamW", "adam"),
    "--rotary-percent": lacks("rotary embeddings rotate the whole head", 1.0, 1),
    "--tokenizer-type": Note(YOURS, "name a tokenizer file in data.tokenizer", ("NullTokenizer",)),
    **rows(ALREADY, "use-mcore-models no-position-embedding exit-signal-handler", "--{}"),
    **rows(
        NOTHING,
        "DDP-impl use-te enable-one-logger log-* tensorboard-* rerun-* ft-* adlr-* nccl-*",
        "--{}",
    ),
}
"""Flag -> row. The last rows are flags of other versions than the command line knows."""


def _is_megatron(contents: Any) -> bool:
    if isinstance(contents, str):
        return "--" in contents
    return isinstance(contents, Mapping) and (
        isinstance(contents.get("MODEL_ARGS"), Mapping) or bool(_OF_EVERY_RUN & {_flag(key) for key in contents})
    )


STACK = Stack("Megatron-LM", TABLE, _is_megatron, _keys, _derive)
