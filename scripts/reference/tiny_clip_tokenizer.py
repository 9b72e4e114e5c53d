"""A tokenizer with the structure of CLIP's and a vocabulary of less than 600.

As CLIP's: the 256 bytes, the same bytes at the end of a word, merges, start and end of text. The id of "!" is 0,
which is what OWL pads with, and the end of text has the highest id, which is how the text half finds it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from transformers import CLIPTokenizer

MERGES = 80
WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"
TEXT = """a photo of a cat a dog a bus a car a person a tree a house a window a building a street a sky a camera a man
a woman a face a wheel a door a flower a rocket a red bus a small house a green tree a traffic light the temple a roof a
whisker a bicycle two people an old stone wall black white grass water boat bridge cloud"""


def byte_letters() -> list[str]:
    """One letter for each byte, in CLIP's order: printable bytes first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def learned_merges() -> list[tuple[str, str]]:
    """The most frequent pair first; of pairs that are as frequent, the first in the alphabet."""
    words = Counter(TEXT.split())
    pieces = {word: [*word[:-1], word[-1] + WORD_END] for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(pieces[word], pieces[word][1:]):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        pieces = {word: merged(parts, best) for word, parts in pieces.items()}
    return merges


def merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """
    >>> merged(["a", "b", "a", "b"], ("a", "b"))
    ['ab', 'ab']
    """
    result: list[str] = []
    for part in parts:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def build(pad_token: str, max_length: int) -> CLIPTokenizer:
    letters, merges = byte_letters(), learned_merges()
    tokens = [*letters, *(letter + WORD_END for letter in letters), *("".join(pair) for pair in merges), START, END]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(
        vocab=vocabulary,
        merges=merges,
        pad_token=pad_token,
        model_max_length=max_length,
        clean_up_tokenization_spaces=True,
    )


def save(tokenizer: CLIPTokenizer, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
