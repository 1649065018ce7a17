"""The tokenizer loses nothing, agrees with the bundled ids, and says what is wrong with a file."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.data import bundled_text, load_tokenizer
from labkit.data.corpus import bundled_tokens
from labkit.data.tokenizer import END_OF_TEXT, encode


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


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vocabulary_needs_no_padding(tp):
    assert load_tokenizer().get_vocab_size() % (128 * tp) == 0


def test_missing_tokenizer_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer: no file at .*nowhere\.json"):
        load_tokenizer(tmp_path / "nowhere.json")


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe", b""])
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer: .* is not a tokenizer in the JSON format"):
        load_tokenizer(file)
