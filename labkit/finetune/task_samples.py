"""Examples as arrays of tokens: `[CLS] first text [SEP] second text [SEP]`, followed by padding.

If a pair is too long, the end of the second text is cut off, as in Megatron-LM. For RACE the first text is the question
with one option, of at most 128 tokens, and the second the article. For SQuAD the first text is the question, of at most
64 tokens, and the second a window of the passage. Windows begin every 128 tokens, as in the code of arXiv 1810.04805,
and overlap by half or more, so an answer that one window cuts off is whole in the next. The label of a window without
the whole answer is [CLS].

A sample has these arrays. C counts pairs (RACE 4, else 1), L labels (SQuAD 2: first and last token; else 1), S tokens.

| key                | shape  | meaning                                                 |
|--------------------|--------|---------------------------------------------------------|
| `tokens_BCS`       | [C, S] | token ids                                               |
| `types_BCS`        | [C, S] | 0 up to the first `[SEP]`, 1 up to the second, else 0    |
| `padding_mask_BCS` | [C, S] | 1 for tokens, 0 for padding                             |
| `labels_BL`        | [L]    | class, right pair, or first and last token of the answer |
| `index_B`          | []     | number of the sample                                    |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from labkit.config import DataConfig
from labkit.data.masked.bert_samples import special_tokens
from labkit.data.text import load_tokenizer, size_of
from labkit.finetune.task_files import Choice, Passage, TaskFiles

MOST_OF_QUESTION = {"race": 128, "squad1.1": 64, "squad2.0": 64}
"""Tokens of the first text that are kept."""
STRIDE = 128
"""Tokens from one window of a passage to the next, or half a window where that is less."""

Sample = dict[str, np.ndarray]


class Packer:
    """Turns pairs of texts into the arrays of a sample."""

    def __init__(self, tokenizer: str | None, length: int, vocab_size: int) -> None:
        """tokenizer: file of the tokenizer; None is the bundled one. length: tokens of a sample.

        Raises ValueError if the tokenizer has more tokens than the model.
        """
        self.length, self._tokenizer = length, load_tokenizer(tokenizer)
        self.cls, self.sep, _ = special_tokens(DataConfig(tokenizer=tokenizer))
        if (need := max(size_of(self._tokenizer), self.cls + 1, self.sep + 1)) > vocab_size:
            raise ValueError(
                f"tokenizer mismatch: {tokenizer or 'the bundled tokenizer'} and BERT's own tokens need {need} ids, "
                f"and the checkpoint's model has {vocab_size}; name the model's tokenizer with --tokenizer"
            )

    def ids(self, text: str, most: int | None = None) -> np.ndarray:
        """Return the token ids of a text, or only the first `most` of them."""
        return np.array(self._tokenizer.encode(text).ids[:most], dtype=np.int64)

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids [n], first character of each token and the one after its last [n, 2])."""
        encoding = self._tokenizer.encode(text)
        return np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def room(self, first: int) -> int:
        """Return how many tokens of a second text fit after a first text of `first` tokens."""
        return self.length - 3 - first

    def packed(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tokens, types, padding mask), each [S]; texts that are too long lose their ends."""
        first = first[: self.length - 3]
        second = second[: self.room(len(first))]
        tokens = np.concatenate([[self.cls], first, [self.sep], second, [self.sep]])
        types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
        rest = (0, self.length - len(tokens))
        return np.pad(tokens, rest), np.pad(types, rest), np.pad(np.ones(len(tokens), dtype=np.int64), rest)

    def sample(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], labels: Sequence[int], index: int) -> Sample:
        """Return the arrays of a sample of these pairs of token ids."""
        tokens, types, mask = (np.stack(each) for each in zip(*(self.packed(*pair) for pair in pairs)))
        made = {"tokens_BCS": tokens, "types_BCS": types, "padding_mask_BCS": mask}
        return made | {"labels_BL": np.array(labels), "index_B": np.array(index)}


@dataclass(eq=False)
class TaskSamples:
    """The samples of one split: `ordered(n)` is the n-th of the endless sequence epoch 0, epoch 1, ..."""

    name: str
    """Name of the split, for messages."""
    size: int
    """Samples of one epoch."""
    make: Callable[[int], Sample]
    """Makes sample `index`."""
    seed: int | None = None
    """Seed of the order, which is another one in each epoch; None is the order of the file."""
    _order: tuple[int, np.ndarray] = field(default=(-1, np.zeros(0, np.int64)), init=False, repr=False)

    def __len__(self) -> int:
        return self.size

    def ordered(self, position: int) -> Sample:
        """Return sample `position` of the sequence; it is the same in every layout."""
        epoch, place = divmod(position, self.size)
        if self.seed is None:
            return self.make(place)
        if self._order[0] != epoch:
            keys = np.random.PCG64([self.seed, epoch]).random_raw(self.size)
            self._order = epoch, np.argsort(keys, kind="stable")
        return self.make(int(self._order[1][place]))


def samples_of(
    files: TaskFiles, packer: Packer, split: str, windows: Windows | None, seed: int | None = None
) -> TaskSamples:
    """Return the samples of a split; that of the training examples is `train`.

    windows: windows of SQuAD; None for other tasks. seed: seed of the samples' order; None is the order of the file.
    """
    examples = files.train if split == "train" else files.splits[split]
    if windows is not None:
        return TaskSamples(split, len(windows.places), windows.sample, seed)
    most = MOST_OF_QUESTION.get(files.row)

    def choice(index: int) -> Sample:
        example: Choice = examples[index]
        seconds = {text: packer.ids(text) for text in {second for _, second in example.pairs}}
        pairs = [(packer.ids(first, most), seconds[second]) for first, second in example.pairs]
        return packer.sample(pairs, [example.label], index)

    return TaskSamples(split, len(examples), choice, seed)


def windows_of(files: TaskFiles, packer: Packer, examples: Sequence[Passage]) -> Windows | None:
    """Return the windows of SQuAD's passages; None for the other tasks."""
    return Windows(examples, packer, MOST_OF_QUESTION[files.row]) if files.outputs is None else None


@dataclass(frozen=True)
class Place:
    """A window of a passage."""

    passage: int
    """Number of the passage."""
    start: int
    """First token of the passage in the window."""
    end: int
    """Token of the passage after the window's last."""
    at: int
    """Position of the window's first token in the sample."""


class Windows:
    """The windows of passages."""

    def __init__(self, passages: Sequence[Passage], packer: Packer, most: int) -> None:
        """most: most tokens of a question; its end is cut off.

        Raises ValueError if samples are too short for a question and a window.
        """
        self._passages, self._packer = passages, packer
        if packer.room(most) < 1:
            raise ValueError(
                f"samples of {packer.length} tokens have no room after a question of {most}; raise --seq-length to "
                f"{most + 4} or more"
            )
        self._texts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._questions = [packer.ids(passage.question, most) for passage in passages]
        self.places: list[Place] = []
        for number, passage in enumerate(passages):
            if passage.context not in self._texts:
                self._texts[passage.context] = packer.located(passage.context)
            question, tokens = len(self._questions[number]), len(self._texts[passage.context][0])
            room = packer.room(question)
            stride = min(STRIDE, (room + 1) // 2)
            starts = range(0, max(tokens - room, 0) + stride, stride)
            self.places += [Place(number, start, min(start + room, tokens), question + 2) for start in starts]

    def sample(self, index: int) -> Sample:
        """Return the arrays of window `index`."""
        place = self.places[index]
        ids, _ = self._texts[self._passages[place.passage].context]
        pair = (self._questions[place.passage], ids[place.start : place.end])
        return self._packer.sample([pair], self._labels(place), index)

    def _labels(self, place: Place) -> tuple[int, int]:
        """Return the positions of the first answer's first and last token; [CLS] if the window lacks a part of it."""
        passage = self._passages[place.passage]
        if not passage.answers:
            return 0, 0
        text, begin = passage.answers[0]
        _, offsets = self._texts[passage.context]
        [inside] = np.nonzero((offsets[:, 1] > begin) & (offsets[:, 0] < begin + len(text)))
        if len(inside) == 0 or inside[0] < place.start or inside[-1] >= place.end:
            return 0, 0
        return int(inside[0]) - place.start + place.at, int(inside[-1]) - place.start + place.at

    def text(self, index: int, first: int, last: int) -> str:
        """Return the part of the passage from token `first` to token `last`, both counted from the start of window
        `index`."""
        place = self.places[index]
        context = self._passages[place.passage].context
        _, offsets = self._texts[context]
        return context[offsets[place.start + first, 0] : offsets[place.start + last, 1]].strip()
