"""What a tokenizer's file stores besides its vocabulary: none of it is believed unseen, and its ids are its own."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from labkit.cli import main
from labkit.data import IndexedDataset, load_tokenizer
from labkit.data.text import BUNDLED, RARE, end_tokens, located_tokens, size_of, vocabulary_size
from labkit.evaluate.continuation import Continuation
from labkit.evaluate.lambada import passage_of
from labkit.finetune.task_samples import Packer

MARK = b"\xef\xbb\xbf"
"""UTF-8's byte order mark."""


def llama(*words: str) -> Tokenizer:
    """Llama's form: a ▁ before the text and for each blank, bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted({letter for word in words for letter in word})
    merges = []
    for word in words:
        for length in range(len(word)):
            left, right = f"▁{word[:length]}", word[length]
            if left + right not in pieces:
                pieces.append(left + right)
                merges.append((left, right))
    ids = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def words(vocabulary: dict[str, int]) -> Tokenizer:
    """Whole words alone, with these ids."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def saved(tokenizer: Tokenizer, folder) -> str:
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


# ---- the stored state ----

TEXT = "the old cat sat on a warm mat " * 60


def test_stored_truncation_padding_template_and_dropout_do_not_touch_a_text(tmp_path):
    plain = llama("the", "old", "cat", "sat", "mat")
    stored = llama("the", "old", "cat", "sat", "mat")
    stored.enable_truncation(16)
    stored.enable_padding(pad_id=1, length=2000)
    stored.model.dropout = 0.5
    stored.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    path = saved(stored, tmp_path)
    expected = plain.encode(TEXT, add_special_tokens=False).ids
    assert load_tokenizer(path).encode(TEXT).ids == expected
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': TEXT})}\n{json.dumps({'text': 'a mat'})}\n")
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "a"), "--tokenizer", path]) == 0
    long, short = IndexedDataset(tmp_path / "a")
    assert long.tolist() == [*expected, 2] and short.tolist() == [*plain.encode("a mat").ids, 2]
    (tmp_path / "a.txt").write_text(TEXT)
    assert located_tokens(tmp_path / "a.txt", path)[1].tolist() == expected
    assert Packer(path, 32, 1024).ids(TEXT).tolist() == expected


GAPS = {"<unk>": 0, "a": 3, "b": 70_000}


def test_ids_with_gaps_are_counted_by_the_largest(tmp_path, capsys):
    path = saved(words(GAPS), tmp_path)
    assert vocabulary_size(path) == 70_001
    (tmp_path / "a.txt").write_text("a b b")
    assert main(["data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "a"), "--tokenizer", path]) == 0
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.dtype == np.int32 and dataset[0].tolist() == [3, 70_000, 70_000]
    with pytest.raises(ValueError, match=r"need 70003 ids, and the checkpoint's model has 1024"):
        Packer(path, 32, 1024)
    train = ["train", "--preset", "tiny", "--data.path", str(tmp_path / "a.txt"), "--data.tokenizer", path]
    assert main(train) == 2
    assert "has 70001 tokens (the largest id plus 1), model.vocab_size is 1024" in capsys.readouterr().err


def test_added_tokens_count_with_the_ids_that_the_library_gives_them(tmp_path):
    tokenizer = words({"<unk>": 0, "a": 9})
    tokenizer.add_special_tokens(["</s>"])
    path = saved(tokenizer, tmp_path)
    assert vocabulary_size(path) == size_of(tokenizer) == 1 + max(tokenizer.get_vocab().values())


@pytest.mark.parametrize(("vocabulary", "said"), [({}, "has no token"), ({"a": 2**31}, "has the id 2,147,483,648")])
def test_a_vocabulary_whose_ids_no_dataset_can_store_is_refused(vocabulary, said, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}}))
    with pytest.raises(ValueError, match=said):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("names", "files", "expected"),
    [
        (["</s>"], {}, [1]),
        (["<|im_end|>"], {}, [1]),
        (["<|eot_id|>", "<|end_of_text|>"], {}, [2, 1]),
        (["[SEP]"], {}, [1]),
        (["[SEP]", "</s>"], {}, [2]),
        (["<stop>", "</s>"], {}, [2]),
        (["<stop>", "</s>"], {"tokenizer_config.json": {"eos_token": "<stop>"}}, [1]),
        (["<stop>", "</s>"], {"tokenizer_config.json": {"eos_token": {"content": "<stop>"}}}, [1]),
        (["<stop>", "</s>"], {"special_tokens_map.json": {"eos_token": "<stop>"}}, [1]),
        (["<stop>", "</s>"], {"generation_config.json": {"eos_token_id": [1, 2]}}, [1, 2]),
        (["<stop>", "</s>"], {"config.json": {"eos_token_id": 1}}, [1]),
        (["<stop>", "</s>"], {"tokenizer_config.json": {"eos_token": None}}, [2]),
        (["<stop>", "</s>"],
         {"tokenizer_config.json": {"eos_token": "</s>"}, "special_tokens_map.json": {"eos_token": "<stop>"},
          "generation_config.json": {"eos_token_id": 1}}, [2, 1]),
        ([*"bcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO", "</s>"], {"generation_config.json": {"eos_token_id": 41}}, [41]),
        (["<stop>"], {}, []),
    ],
)  # fmt: skip
def test_the_end_of_text_is_what_the_files_say(names, files, expected, tmp_path):
    path = saved(words({name: number for number, name in enumerate(["a", *names])}), tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(MARK + json.dumps(content).encode())
    assert end_tokens(load_tokenizer(path), path) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config", '{"eos_token": "</s>"}', "names the end token '</s>', which the tokenizer does not"),
        ("tokenizer_config", "[1]", "cannot be read"),
        ("tokenizer_config", r'{"eos_token": "\ud800"}', "half a surrogate pair"),
        *(("tokenizer_config", f'{{"eos_token": {value}}}', "must be text") for value in ("5", "false", "[]", "{}")),
        *(
            (
                "generation_config",
                f'{{"eos_token_id": {value}}}',
                f"names the end token {end}, which the tokenizer does",
            )
            for value, end in (("-1", -1), ("1", 1), ("[0, 7]", 7), (str(10**30), 10**30), (str(2**32), 2**32))
        ),
        ("config", '{"eos_token_id": 9}', "names the end token 9"),
        ("tokenizer_config", '{"eos_token": "a", "eos_token": "b"}', "has the field 'eos_token' twice, as 'a' and as"),
        *(
            ("generation_config", f'{{"eos_token_id": {value}}}', "must be an integer or a list of integers")
            for value in ('"0"', "true", "0.0", "[[0]]", '{"a": 0}')
        ),
    ],
)
def test_a_file_beside_a_tokenizer_that_contradicts_it_is_refused(name, content, said, tmp_path):
    path = saved(words({"a": 0}), tmp_path)
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=f"{name}.json.*{said}"):
        end_tokens(load_tokenizer(path), path)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="[UNK]"),
        models.BPE({"a": 0}, [], unk_token="<unk>"),
        models.Unigram([("a", -1.0)]),
        models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
        models.BPE({f"<0x{byte:02X}>": byte for byte in range(255)}, [], byte_fallback=True),
        models.BPE(dict(zip([RARE, *(f"<0x{byte:02X}>" for byte in range(256))], range(257))), []),  # bytes unused
    ],
)
def test_a_tokenizer_without_its_token_for_unknown_text_is_refused(model, tmp_path):
    """The library raises at the first such text, without the file's name, or a BPE leaves it out: `aXb` is `ab`."""
    path = saved(Tokenizer(model), tmp_path)
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*tokenizer\.json' cannot encode what its vocabulary does"):
        load_tokenizer(path)


@pytest.mark.parametrize("form", ["pre_tokenizer", "normalizer", "sequence", "vocab.json"])
def test_a_byte_level_tokenizer_has_all_bytes(form, tmp_path):
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    part = normalizers.ByteLevel() if form == "normalizer" else pre_tokenizers.ByteLevel(add_prefix_space=False)
    for left in (symbols, [each for each in symbols if each != "!"]):
        ids = {symbol: number for number, symbol in enumerate(left)}
        tokenizer = Tokenizer(models.BPE(ids, []))
        if form == "normalizer":
            tokenizer.normalizer = part
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([part]) if form == "sequence" else part
        path = saved(tokenizer, tmp_path)
        if form == "vocab.json":
            path = tmp_path / "vocab.json"
            path.write_text(json.dumps(ids))
            (tmp_path / "merges.txt").write_text("")
        if left is symbols:
            tokens = load_tokenizer(path).encode("!\U0002a6a5").tokens
            assert tokens == ["!", *map(chr, (0xF0, 0xAA, 0x13C, 0xA5))]
            continue
        with pytest.raises(ValueError, match=r"it lacks 1 of the 256 bytes, such as '!'"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("vocab.json", '{"a": 0, "ZZ": true}', "the token 'ZZ' has the id True, which is not an integer"),
        ("vocab.json", '{"a": 0, "ZZ": 1.0}', "the token 'ZZ' has the id 1.0, which is not an integer"),
        ("vocab.json", '{"a": 0, "b": 1, "a": 2}', "has the field 'a' twice, as 0 and as 2; remove one"),
        ("vocab.json", '{"a": 0, "ZZ": 0}', "has 2 tokens with the id 0, such as '"),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": "a"}}',
         "has 2 tokens with the id 0, such as '"),
        ("tokenizer.json", '{"normalizer": null, "model": {}, "normalizer": {"type": "NFC"}}',
         "has the field 'normalizer' twice, as None and as {'type"),
    ],
)  # fmt: skip
def test_a_vocabulary_says_each_thing_once(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match=f"data.tokenizer: .*{name}.*{said}"):
        load_tokenizer(tmp_path / name)


# ---- lines and bytes of the files ----


def test_only_a_newline_ends_a_line_of_a_vocabulary(tmp_path):
    """bert-base-chinese has a token that is U+2028 alone."""
    tokens = ["[UNK]", "\u2028", "a", "\u2029", "\x0c", "\x0b", "\x85", "\x1c", "\x1d", "\x1e", "b\u2028c", ""]
    for end, mark in (("\n", b""), ("\r\n", MARK)):
        (tmp_path / "vocab.txt").write_bytes(mark + end.join([*tokens, ""]).encode())
        found = load_tokenizer(tmp_path / "vocab.txt").get_vocab()
        assert found == {token: number for number, token in enumerate(tokens)}


def test_byte_order_marks_are_no_part_of_a_tokenizer(tmp_path):
    text = "A hacker's bug: ünï\u2028code"
    expected = load_tokenizer().encode(text).ids
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        content = (BUNDLED / name).read_bytes()
        (tmp_path / name).write_bytes(MARK + content.replace(b"\n", b"\r\n"))
    assert load_tokenizer(tmp_path / "vocab.json").encode(text).ids == expected
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(text).ids == expected


def test_a_stored_case_is_not_guessed(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\nparis\n")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(tmp_path / "vocab.txt").encode("Paris paris").ids == [0, 1]


@pytest.mark.parametrize(
    ("name", "option"),
    [("vocab.txt", each) for each in ("do_lower_case", "strip_accents", "tokenize_chinese_chars")]
    + [("vocab.json", "add_prefix_space")],
)
@pytest.mark.parametrize("given", ['"false"', "0", "[]"])
def test_an_option_of_a_tokenizer_is_true_or_false(name, option, given, tmp_path):
    for file in (name, "merges.txt"):
        (tmp_path / file).write_bytes((BUNDLED / file).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(f'{{"{option}": {given}}}')
    with pytest.raises(ValueError, match=f"tokenizer_config.json.*{option} is .*, and must be true or false"):
        load_tokenizer(tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"{option}": true, "{option}": false}}')
    with pytest.raises(ValueError, match=f"tokenizer_config.json.*has the field '{option}' twice"):
        load_tokenizer(tmp_path / name)


# ---- pieces of a text are not its text ----


def byte_level() -> Tokenizer:
    return load_tokenizer()


def word_pieces() -> Tokenizer:
    return load_tokenizer(BUNDLED / "vocab.txt")


def metaspace() -> Tokenizer:
    tokenizer = words({"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "▁": 4, "</s>": 5})
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


KINDS = {"byte-level": byte_level, "llama": lambda: llama("the", "cat"), "pieces": word_pieces, "meta": metaspace}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("the cat's日é😀\u2028\n.")), cut=st.integers(0, 60))
def test_a_continuation_is_the_text_of_all_without_the_prompts(kind, text, cut):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text).ids
    prompt, new = ids[: min(cut, len(ids))], ids[min(cut, len(ids)) :]
    while new and tokenizer.decode(prompt).endswith("\ufffd"):  # no prompt ends inside a character
        prompt, new = [*prompt, new[0]], new[1:]
    growing = Continuation(tokenizer.decode, prompt)
    pieces = [growing.add(token) for token in new]
    assert tokenizer.decode(prompt) + "".join(pieces) + growing.rest() == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces), "a piece shows whole characters"


def test_bytes_that_make_no_character_leave_the_text_before_them():
    tokenizer = llama("cat")
    first, second, third = tokenizer.encode("日").ids[1:]
    growing = Continuation(tokenizer.decode, tokenizer.encode("cat").ids)
    assert [growing.add(token) for token in (first, second, third)] == ["", "", "日"]
    assert growing.add(first) == "" and growing.rest() == "\ufffd"


@pytest.mark.parametrize("gap", [" ", "\n", "  ", "\t", "\u2028", "\r\n"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_word_is_a_part_of_its_passage(kind, gap):
    """As lm-evaluation-harness cuts it, `_encode_pair`: the tokens of the whole behind those of the context."""
    tokenizer = KINDS[kind]()
    passage = passage_of(f"the cat the{gap}cats\n", tokenizer.encode)
    whole, context = tokenizer.encode("the cat the cats").ids, tokenizer.encode("the cat the").ids
    assert (passage.context, passage.target) == (context, whole[len(context) :])


def test_a_token_with_a_part_of_the_last_word_is_predicted():
    """Here the context's own tokens are none of the passage's: `▁the▁cats` is one token."""
    tokenizer = llama("a", "the▁cats")
    passage = passage_of("a the cats", tokenizer.encode)
    assert [tokenizer.id_to_token(token) for token in passage.context + passage.target] == ["▁a", "▁the▁cats"]
    assert len(passage.target) == 1
