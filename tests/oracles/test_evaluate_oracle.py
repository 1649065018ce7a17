"""Perplexity, LAMBADA, sampling and generation beside plain loops over transformers' models with the same weights."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.cli import main
from labkit.comm.collectives import gather_objects
from labkit.data import load_tokenizer
from labkit.evaluate import CheckpointModel, Sampling, generate
from labkit.evaluate.lambada import Passage, passage_of, score_passages
from labkit.evaluate.sampling import Sampler, penalised, within_top_k, within_top_p
from labkit.evaluate.wikitext import detokenized, perplexity_of, score_windows
from labkit.launch import run

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.oracle

LENGTH = 48
PLAIN = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 40,
         "max_position_embeddings": LENGTH}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 4, "n_embd": 48, "n_head": 4, "n_positions": LENGTH}),
    "llama": ("LlamaForCausalLM", PLAIN | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    "mixtral": ("MixtralForCausalLM",
                PLAIN | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
LAYOUTS: dict[str, dict[str, int]] = {"one rank": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}
TEXT = Path(__file__).parents[2] / "labkit" / "data" / "bundled" / "jargon.txt"
PASSAGES = (
    "A hacker is somebody who enjoys exploring the details of programmable systems",
    "The term bug was used for a defect in a machine long before the first computers",
    "Foo is the canonical metasyntactic variable and its companion is always called bar " * 4,
)


@pytest.fixture(scope="module", params=MODELS)
def both(request, tmp_path_factory) -> tuple[Any, str]:
    """(a model of transformers with random weights, the folder with our checkpoint of it)."""
    kind, options = MODELS[request.param]
    torch.manual_seed(3)
    made_config = getattr(transformers, kind).config_class(vocab_size=1024, initializer_range=0.3, **options)
    made_config._experts_implementation = "eager"  # the grouped product of transformers knows no float64
    theirs = getattr(transformers, kind)(made_config).eval()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder / "hf")
    assert main(["checkpoint", "import", str(folder / "ours"), str(folder / "hf")]) == 0
    return theirs, str(folder / "ours")


PLACES = (0, 1, 20, LENGTH - 1)


def encode(text: str) -> list[int]:
    return load_tokenizer().encode(text).ids


PROMPTS = [encode(text)[:8] for text in PASSAGES[:2]] + [encode(PASSAGES[2])[:3]]


def everything(folder: str, layout: dict[str, int], tokens: list[int]) -> dict[str, Any]:
    """In a rank: all that is compared, computed by labkit."""
    model = CheckpointModel(folder, layout, precision="fp64")
    passages = [
        passage_of(text, load_tokenizer().encode, strict=strict) for text in PASSAGES for strict in (True, False)
    ]
    seen: list[list[int | None]] = []
    logits: list[list[list[float]]] = []

    def keep(logits_BPV: torch.Tensor) -> torch.Tensor:
        logits.extend(logits_BPV.tolist())
        return logits_BPV.argmax(-1)

    model.choose(torch.tensor(tokens[:LENGTH])[None], torch.tensor([PLACES]), keep)
    drawn = Sampling(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=5)
    return {
        "logits": next(filter(None, gather_objects(logits, model.groups.world))),  # the last stage has them
        "blocks": score_windows(model, tokens, stride=7, micro_batch_size=3),
        "lambada": score_passages(model, passages, micro_batch_size=4),
        "greedy": generate(model, PROMPTS, max_new_tokens=20, on_tokens=seen.append),
        "seen": seen,
        "penalised": generate(model, PROMPTS, max_new_tokens=20, sampling=Sampling(repetition_penalty=1.3)),
        "drawn": generate(model, PROMPTS, max_new_tokens=20, sampling=drawn),
        "alike": generate(model, [PROMPTS[0], PROMPTS[0]], max_new_tokens=5),
    }


def their_losses(theirs: Any, tokens: list[int], stride: int) -> tuple[float, int]:
    """(sum of losses, scored tokens): a plain loop, a window at a time."""
    total, scored, end = 0.0, 0, 1
    for start in range(0, len(tokens), stride):
        piece = torch.tensor(tokens[start : start + LENGTH + 1])
        with torch.no_grad():
            logits = theirs(piece[None, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none")
        new = start + len(piece) - end  # tokens behind those that earlier windows scored
        total, scored, end = total + float(losses[len(losses) - new :].sum()), scored + new, end + new
        if end == len(tokens):
            return total, scored
    raise AssertionError("some token was never scored")


def their_right(theirs: Any, context: list[int], target: list[int]) -> bool:
    ids = torch.tensor([(context + target)[-LENGTH - 1 :]])
    with torch.no_grad():
        return theirs(ids[:, :-1]).logits[0].argmax(-1)[-len(target) :].tolist() == target


def their_text(theirs: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    made = theirs.generate(
        rows, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )
    return made[:, longest:].tolist()


def test_every_layout_computes_what_transformers_computes(both):
    theirs, folder = both
    theirs.double()
    tokens = encode(TEXT.read_text()[20_000:20_800])
    found = {}
    for name, layout in LAYOUTS.items():
        results = run(everything, math.prod(layout.values()), folder, layout, tokens, device="cpu")
        assert all(result == results[0] for result in results), "every rank returns the same"
        found[name] = results[0]
    total, scored = their_losses(theirs, tokens, 7)
    passages = [
        passage_of(text, load_tokenizer().encode, strict=strict) for text in PASSAGES for strict in (True, False)
    ]
    right = [their_right(theirs, passage.context, passage.target) for passage in passages]
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens[:LENGTH])[None]).logits[:, PLACES]
    greedy = their_text(theirs, PROMPTS)
    penalised_text = their_text(theirs, [PROMPTS[2]], repetition_penalty=1.3)[0]
    words = len(TEXT.read_text()[20_000:20_800].split())
    for name, ours in found.items():
        result = perplexity_of(ours["blocks"], tokens=len(tokens), original_words=words)
        assert (result.scored, len(tokens)) == (scored, scored + 1), name
        assert result.loss_sum == pytest.approx(total, rel=1e-7), name  # their rotary tables are fp32
        assert result.perplexity == pytest.approx(math.exp(min(20, total / words))), name
        torch.testing.assert_close(torch.tensor(ours["logits"]).double(), logits, rtol=1e-5, atol=1e-5, msg=name)
        assert ours["lambada"] == right, name
        assert ours["greedy"] == greedy == [list(ids) for ids in zip(*ours["seen"])], name
        assert ours["penalised"][2] == penalised_text, name
        assert ours["drawn"] == found["one rank"]["drawn"], f"{name}: draws do not depend on the layout"
        assert ours["alike"][0] == ours["alike"][1] == greedy[0][:5], name
    assert found["one rank"]["drawn"] != greedy


def test_a_target_that_the_model_predicts_is_right(both):
    """Random weights predict no word of a person; so the target here is what the model says."""
    theirs, folder = both
    theirs.double()
    model = CheckpointModel(folder, precision="fp64")
    said = their_text(theirs, [PROMPTS[0]])[0]
    passages = [Passage(PROMPTS[0], said[:3]), Passage(PROMPTS[0], [*said[:2], (said[2] + 1) % 1024])]
    assert score_passages(model, passages) == [True, False]


def test_logits_are_cut_as_transformers_cuts_them():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter_(1, ids, True)
    logits_of = transformers.generation.logits_process
    for k in (1, 3, 50):
        assert torch.equal(within_top_k(logits, k), logits_of.TopKLogitsWarper(k)(ids, logits))
    for p in (0.05, 0.5, 0.95):
        assert torch.equal(within_top_p(logits, p), logits_of.TopPLogitsWarper(p)(ids, logits))
    for penalty in (0.5, 1.7):
        expected = logits_of.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
        assert torch.equal(penalised(logits, seen, penalty), expected)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampler, counts = Sampler(Sampling(temperature=0.5, top_k=3)), torch.zeros(4)
    for _ in range(4000):
        counts[sampler(logits)] += 1
    expected = torch.tensor([2.0, 1.0, 0.0, -math.inf]).div(0.5).softmax(0)
    assert counts[3] == 0
    sigma = (expected * (1 - expected) / 4000).sqrt()
    assert bool(((counts / 4000 - expected).abs() <= 4 * sigma).all()), counts


def test_the_commands_print_what_the_library_computes(both, tmp_path, capsys):
    theirs, folder = both
    theirs.float()
    text = tmp_path / "wiki.txt"
    text.write_text(" = Jargon = \n\n The hacker 's dog , a @-@ well @-@ known one , sat . " * 20)
    passages = tmp_path / "lambada.jsonl"
    passages.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in PASSAGES))
    tokenizer = str(TEXT.parent / "tokenizer.json")
    common = ["--checkpoint", folder, "--tokenizer", tokenizer, "--json"]
    out = ["--out", str(tmp_path / "rows.jsonl")]
    assert main(["eval", "wikitext", "--path", str(text), "--stride", "16", *common, *out]) == 0
    row = json.loads(capsys.readouterr().out)
    tokens = encode(detokenized(text.read_text()))
    total, scored = their_losses(theirs, tokens, 16)
    assert row["loss"] == pytest.approx(total / scored, abs=1e-4)
    assert row["tokens"] == len(tokens) and row["original_words"] == len(text.read_text().split())
    assert main(["eval", "wikitext", "--path", str(text), "--stride", "16", *common, *out]) == 0
    assert json.loads(capsys.readouterr().out) == row
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1, "a finished row is read, not computed again"
    assert main(["eval", "lambada", "--path", str(passages), "--loose", *common]) == 0
    row = json.loads(capsys.readouterr().out)
    loose = [passage_of(passage, load_tokenizer().encode, strict=False) for passage in PASSAGES]
    assert row["right"] == sum(their_right(theirs, p.context, p.target) for p in loose) and row["passages"] == 3
    assert main(["generate", PASSAGES[0], "--max-new-tokens", "20", *common]) == 0
    row = json.loads(capsys.readouterr().out)
    end = load_tokenizer().token_to_id("<|endoftext|>")
    expected = theirs.generate(
        torch.tensor([encode(PASSAGES[0])]), max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=end
    )
    assert row["tokens"] == expected[0, len(encode(PASSAGES[0])) :].tolist()
    assert row["text"] == load_tokenizer().decode(row["tokens"])


# ---- a model that is always right, with a tokenizer as Llama's ----

SENTENCE = "the old cat sat on a warm mat"


@pytest.fixture(scope="module")
def reciting(tmp_path_factory) -> tuple[Any, Path]:
    """(transformers' tokenizer, folder of our checkpoint): a Llama that knows one sentence by heart, then `</s>`."""
    folder = tmp_path_factory.mktemp("reciting")
    letters = [f"<0x{byte:02X}>" for byte in range(256)] + sorted(set(SENTENCE.replace(" ", "▁")))
    tokens, merges = ["<unk>", "<s>", "</s>", *letters], []
    words = [f"▁{word}" for word in SENTENCE.split()]
    for word in words:
        merges += [(word[:end], word[end]) for end in range(1, len(word)) if word[: end + 1] not in tokens]
        tokens += [word[: end + 1] for end in range(1, len(word)) if word[: end + 1] not in tokens]
    ids = {token: number for number, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    blank, fuse = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse()
    strip, fallback = tokenizers.decoders.Strip(" ", 1, 0), tokenizers.decoders.ByteFallback()
    made.decoder = tokenizers.decoders.Sequence([blank, fallback, fuse, strip])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    # the embedding tells a token by its place, no layer changes it, and the head has the next token's
    options = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(
        vocab_size=len(tokens), intermediate_size=8, max_position_embeddings=64, tie_word_embeddings=False, **options
    )
    model = transformers.LlamaForCausalLM(config)
    head, place = model.lm_head.weight, model.model.embed_tokens.weight
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.dim() == 1 else 0.0)
        place.copy_(torch.eye(*place.shape))
        for token, following in pairwise([*(ids[word] for word in words), ids["</s>"]]):
            head[following, token] = 1.0
    model.save_pretrained(folder)
    assert main(["checkpoint", "import", str(folder / "ours"), str(folder)]) == 0
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>")
    return (model, theirs), folder


def of_command(capsys: Any, folder: Path, *words: str) -> str:
    capsys.readouterr()
    common = ["--checkpoint", str(folder / "ours"), "--tokenizer", str(folder / "tokenizer.json")]
    code = main([*words, *common])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def test_a_text_goes_on_with_its_blank_and_stops_at_its_own_end(reciting, tmp_path, capsys):
    (model, theirs), folder = reciting
    prompt, rest = "the old cat sat on", " a warm mat"
    encoded = theirs(prompt, add_special_tokens=False, return_tensors="pt")
    made = model.generate(encoded["input_ids"], max_new_tokens=20, do_sample=False, eos_token_id=theirs.eos_token_id)[0]
    assert theirs.decode(made, skip_special_tokens=True) == prompt + rest
    options = ["--max-new-tokens", "20"]
    assert of_command(capsys, folder, "generate", prompt, *options) == f"{prompt}{rest}\n"
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbf" + f"{prompt}\r\nthe old\r\n\u2028 the\x0cold cat\r\n".encode())
    prompts = [prompt, "the old", "\u2028 the\x0cold cat"]
    rests = [rest, f" cat sat on{rest}", f" sat on{rest}"]
    lines = of_command(capsys, folder, "generate", "--prompts", str(file), *options)
    assert lines == "".join(f"{before}{behind}\n" for before, behind in zip(prompts, rests))
    rows = of_command(capsys, folder, "generate", "--prompts", str(file), "--json", *options).split("\n")[:-1]
    assert [(row["prompt"], row["text"], row["ended"]) for row in map(json.loads, rows)] == [
        (before, behind, True) for before, behind in zip(prompts, rests)
    ]
    assert json.loads(rows[0])["tokens"] == made[encoded["input_ids"].shape[1] :].tolist()


def test_a_model_that_is_always_right_has_every_last_word(reciting, tmp_path, capsys):
    passages = [SENTENCE, "the old cat sat on a warm\nmat", "sat on\n\na", "the\u2028old", " the old  \t cat \n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    for options in ([], ["--loose"]):
        row = of_command(
            capsys, reciting[1], "eval", "lambada", "--path", str(tmp_path / "a.jsonl"), "--json", *options
        )
        right = len(passages) if not options else sum(" ".join(text.split()) == text.strip() for text in passages)
        assert json.loads(row)["right"] == right and json.loads(row)["passages"] == len(passages)


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (["the old cat " * 40], None, "tokens in all; the model's sequence has 64"),
        (["the \udcff"], None, "a prompt is UTF-8 text, and this has the byte 0xff"),
        ([], b"", "is empty; write one prompt per line"),
        ([], b"the old\ncaf\xe9", "--prompts: "),
        ([], "the old".encode("utf-16"), "is not UTF-8 (byte 0x00"),
    ],
)
def test_prompts_that_are_refused_print_nothing(words, content, said, reciting, tmp_path, capsys):
    given = list(words)
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
        given = ["--prompts", str(tmp_path / "prompts.txt")]
    folder = reciting[1]
    common = ["--checkpoint", str(folder / "ours"), "--tokenizer", str(folder / "tokenizer.json")]
    capsys.readouterr()
    assert main(["generate", *given, *common]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and "Traceback" not in printed.err
