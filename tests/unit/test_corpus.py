"""The bundled text: same bytes everywhere, and refusals of texts that are not texts."""

import hashlib
import subprocess
import sys

import pytest

from labkit.data import bundled_text
from labkit.data.text import BUNDLED, BUNDLED_SHA256, read_lines, read_text


@pytest.mark.parametrize("name", BUNDLED_SHA256)
def test_bundled_file_has_its_digest(name):
    assert hashlib.sha256((BUNDLED / name).read_bytes()).hexdigest() == BUNDLED_SHA256[name]


def test_bundled_text_is_the_jargon_file_from_a_to_z():
    text = bundled_text()
    assert 300_000 <= len(text.encode()) <= 1_500_000
    assert text.startswith("(TM)\n //\n") and "\nzorkmid\n" in text[-400:]
    assert "00-database" not in text  # dictfmt's own lines are gone
    provenance = (BUNDLED / "PROVENANCE.md").read_text()
    assert "in the public domain" in provenance and "Jargon File, version 4.4.7" in provenance


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_read_text_keeps_every_byte_but_the_mark(mark, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(mark + "a\r\nb\u2028c\n".encode())
    assert read_text(file) == "a\r\nb\u2028c\n"
    assert read_lines(file, "--prompts") == ["a", "b\u2028c"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\0", "\r"])
def test_only_a_newline_ends_a_line(separator, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes(f"12345{separator}b\n\n c ".encode())
    assert read_lines(file, "--prompts") == [f"12345{separator}b", "", " c "]


def test_an_empty_file_has_no_line(tmp_path):
    (tmp_path / "none.txt").write_bytes(b"\xef\xbb\xbf")
    assert read_lines(tmp_path / "none.txt", "--prompts") == []


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("utf-16", "0x00 at position 3"),
        ("utf-16-le", "0x00 at position 1"),
        ("utf-16-be", "0x00 at position 0"),
        ("utf-32", "0x00 at position 2"),
    ],
)
def test_texts_of_other_encodings_are_refused(encoding, said, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("plain text".encode(encoding))
    with pytest.raises(ValueError, match=rf"--path: .*text\.txt' is not UTF-8 \(byte {said}\)"):
        read_text(file, "--path")


def test_missing_text_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path .*nowhere\.txt.: no such file"):
        read_text(tmp_path / "nowhere.txt")


def test_text_that_is_not_utf8_names_byte_and_position(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"not UTF-8 \(byte 0xe9 at position 3\)"):
        read_text(file)


def test_importing_the_package_imports_no_torch():
    code = "import sys, labkit.data as d; d.bundled_text(); d.load_tokenizer(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
