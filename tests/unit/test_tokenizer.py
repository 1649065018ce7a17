"""The tokenizer loses nothing, agrees with the bundled ids, and says what is wrong with a file."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import presets
from labkit.data import bundled_text, load_tokenizer
from labkit.data.cleaning import Cleaner, Rules
from labkit.data.indexed import IndexedDataset
from labkit.data.preparation import Recipe, prepare
from labkit.data.text import BUNDLED, END_OF_TEXT, bundled_tokens, encode, located_tokens, vocabulary_size
from labkit.evaluate.tasks import tokenizer_for
from labkit.finetune.task_samples import Packer


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_a_round_trip(text):
    tokenizer = load_tokenizer()
    ids = encode(tokenizer, text.replace(END_OF_TEXT, ""))
    assert ids[-1] == tokenizer.token_to_id(END_OF_TEXT)
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text.replace(END_OF_TEXT, "")


def test_bundled_ids_are_the_text_and_what_the_tokenizer_makes_of_it():
    tokenizer, tokens = load_tokenizer(), bundled_tokens()
    assert tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False) == bundled_text()
    np.testing.assert_array_equal(tokens, encode(tokenizer, bundled_text()))


def test_the_bundled_vocabularies_are_those_of_the_script(load_script):
    script = load_script("make_vocabularies")
    for name, content in script.files().items():
        assert (BUNDLED / name).read_bytes() == content.encode(), name
    ours, plain = load_tokenizer(BUNDLED / "vocab.json"), load_tokenizer()
    assert ours.encode(bundled_text()[:20_000]).ids == plain.encode(bundled_text()[:20_000]).ids


def test_tokens_that_a_tokenizer_adds_around_a_text_are_no_tokens_of_the_text(tmp_path):
    """As BERT's [CLS] and [SEP] and Llama's <s>: only the end of a document is added, where one is wanted."""
    from tokenizers.processors import TemplateProcessing

    made, text, path = load_tokenizer(), "the bug is in the code", str(tmp_path / "tokenizer.json")
    own = made.encode(text).ids
    made.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[(END_OF_TEXT, made.token_to_id(END_OF_TEXT))]
    )
    made.save(path)
    assert len(made.encode(text).ids) == len(own) + 2
    (tmp_path / "text.txt").write_text(text)
    prepare([tmp_path / "text.txt"], tmp_path / "out", Recipe(path, append_eod=False))
    found = [
        encode(load_tokenizer(path), text)[:-1],
        located_tokens(tmp_path / "text.txt", path)[1],
        IndexedDataset(tmp_path / "out")[0],
        Packer(path, 80, 2000).ids(text),
        Packer(path, 80, 2000).located(text)[0],
        tokenizer_for(SimpleNamespace(config=presets.tiny()), path).encode(text).ids,
    ]
    assert [list(ids) for ids in found] == [own] * len(found)
    for fewest, kept in ((len(own), text), (len(own) + 1, None)):
        assert Cleaner(Rules(tokenizer=path, min_tokens=fewest), [])(text) == kept


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vocabulary_needs_no_padding(tp):
    assert load_tokenizer().get_vocab_size() % (128 * tp) == 0


def test_the_size_that_is_known_without_the_library_is_the_bundled_one(tmp_path):
    assert vocabulary_size() == load_tokenizer().get_vocab_size()
    with pytest.raises(FileNotFoundError):
        vocabulary_size(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("package", "call", "said"),
    [
        ("tokenizers", "from labkit.data import load_tokenizer; load_tokenizer()", "pip install tokenizers"),
        ("yaml", "from labkit.config import presets; presets.tiny().to_yaml()", "pip install PyYAML"),
    ],
)
def test_a_package_that_is_not_installed_is_named_only_where_it_is_needed(package, call, said):
    """Training on the bundled ids needs neither; a text of one's own and YAML do."""
    hidden = f"import sys; sys.modules[{package!r}] = None\n"
    trains = """
from labkit.config import presets
import labkit.train.pretraining
from labkit.data.gpt_data import build_gpt_datasets
assert len(build_gpt_datasets(presets.tiny().override({'train.steps': 1}))[0])
print("until here")
"""
    done = subprocess.run([sys.executable, "-c", hidden + trains + call], capture_output=True, text=True, timeout=120)
    assert done.stdout == "until here\n", done.stderr
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stderr


def test_missing_tokenizer_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer .*nowhere\.json.: no such file"):
        load_tokenizer(tmp_path / "nowhere.json")


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe", b""])
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer: .* is not a tokenizer in the JSON format"):
        load_tokenizer(file)
