"""96 prompts of 1,000 to 2,000 tokens for measuring drafts: docs, code, and chat about them.

The pieces are of the texts in `prompts.py`, cut at fixed places: the same on every machine with
the same Python. Chat prompts end where the model is to answer, in its own chat format.

The first eight of each kind were measured before the others were chosen (their mean number of
accepted drafts was too uncertain: standard error 3.0). The others follow a rule, so that nobody
chose them by their result: docs and code at equal distances, every topic or module of a list.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import prompts

MIN_TOKENS, MAX_TOKENS = 1000, 2000

# first character, tokens
_FIRST_DOCS = (
    *((20_000, 1000), (75_000, 1150), (130_000, 1300), (185_000, 1450)),
    *((240_000, 1600), (295_000, 1750), (350_000, 1900), (405_000, 2000)),
)
_FIRST_CODE = (
    *((10_000, 1000), (450_000, 1150), (900_000, 1300), (1_500_000, 1450)),
    *((2_200_000, 1600), (2_900_000, 1750), (3_500_000, 1900), (4_100_000, 2000)),
)

#: 24 more at equal distances, of so many tokens in turn.
_MORE = 24
_LENGTHS = (1000, 1200, 1400, 1600, 1800, 2000)


class Chat(NamedTuple):
    """A piece of text (topics of Python's reference, or a module), and three turns about it."""

    source: str
    num_chars: int
    request: str
    answer: str
    question: str


_FIRST_CHATS = (
    Chat(
        "with context-managers",
        5000,
        "I am new to Python. Read this page of the reference first, I have questions about it.",
        "I have read the page. It explains how the with statement calls __enter__ and __exit__ of "
        "a context manager, so that cleaning up happens even when the block raises. Ask away.",
        "What happens when __exit__ returns a true value? Explain it in a few sentences and show a "
        "small example of my own class that suppresses a ValueError.",
    ),
    Chat(
        "try",
        5200,
        "Here is part of the language reference on exceptions. Keep it in mind.",
        "Thank you, I will keep it in mind. It covers except clauses, except*, else and finally.",
        "In which order do the else and the finally clause run, and when is else left out? Give "
        "me a list of the cases.",
    ),
    Chat(
        "import",
        5600,
        "We are going to talk about how modules are imported. This is the reference:",
        "Understood: first the module is found and loaded, then names are bound in the namespace.",
        "Summarise the rules for 'from module import *' for somebody who has to review code, and "
        "say why many projects forbid it.",
    ),
    Chat(
        "typesmapping",
        5000,
        "Please read the documentation of dict below.",
        "Done. A dict maps hashable keys to values and remembers the order of insertion.",
        "Write a function that merges two dictionaries of lists, joining the lists of equal keys. "
        "Use only methods that are described on this page.",
    ),
    Chat(
        "comparisons",
        6000,
        "I would like to understand comparisons in Python. The reference says:",
        "It says that all comparisons have the same priority, that they can be chained, and how "
        "values of the built-in types compare.",
        "So is 'a < b < c' the same as 'a < b and b < c'? And what about 'a != b != c'? Answer "
        "with examples.",
    ),
    Chat(
        "heapq.py",
        4600,
        "Below is the start of a module of the standard library. What is it for?",
        "It implements a heap queue, also called a priority queue: a list whose smallest element "
        "is always at index 0, with functions to push and pop in logarithmic time.",
        "Show me how I would use it to get the ten longest words of a large text file without "
        "sorting all words.",
    ),
    Chat(
        "textwrap.py",
        5200,
        "Have a look at this source file, please.",
        "This is the module textwrap. Its class TextWrapper breaks paragraphs into lines of a "
        "given width; wrap, fill, shorten and dedent are conveniences built on it.",
        "I want every line but the first indented by four spaces. Which options do I set, and "
        "what does the code do with long words? Quote the lines that matter.",
    ),
    Chat(
        "bisect.py",
        3900,
        "Review the following Python code for me.",
        "The code keeps lists sorted: the functions find an insertion point by binary search, "
        "either to the left or to the right of equal elements, and can insert at that point.",
        "Write unit tests for it with the unittest module. Cover an empty list, equal elements "
        "and the key argument.",
    ),
)

#: Topics and modules for 24 more, each with the next of the questions below.
_SOURCES = (
    *("assignment", "attribute-access", "calls", "compound", "customization", "debugger"),
    *("execmodel", "formatstrings", "identifiers", "naming", "numeric-types", "objects"),
    *("argparse.py", "ast.py", "calendar.py", "configparser.py", "csv.py", "difflib.py"),
    *("enum.py", "fractions.py", "functools.py", "glob.py", "shelve.py", "statistics.py"),
)
_QUESTIONS = (
    "Summarise what you have read in five sentences for a colleague.",
    "Which three mistakes do beginners make here? Give a short example of each.",
    "Write a small program that uses what is described here, and explain each step.",
    "What would you ask in an exam about this? Write four questions with their answers.",
)


def _more_chats() -> Iterator[Chat]:
    for i, source in enumerate(_SOURCES):
        yield Chat(
            source,
            4400,
            "Please read the following text.",
            "I have read it. What would you like to know?",
            _QUESTIONS[i % len(_QUESTIONS)],
        )


class Prompt(NamedTuple):
    """kind: "docs", "code" or "chat". token_ids: of the model whose tokenizer was given."""

    name: str
    kind: str
    token_ids: list[int]


def build(tokenizer: Any) -> list[Prompt]:
    """All prompts for a tokenizer with a chat template. Raises ValueError for a wrong length."""
    found = []
    texts = (("docs", prompts.docs(), _FIRST_DOCS), ("code", prompts.code(), _FIRST_CODE))
    for kind, text, first in texts:
        for i, (start, num_tokens) in enumerate((*first, *_more_places(len(text)))):
            ids = tokenizer(text[start : start + 10 * num_tokens]).input_ids[:num_tokens]
            found.append(Prompt(f"{kind}-{i}", kind, ids))
    for i, chat in enumerate((*_FIRST_CHATS, *_more_chats())):
        found.append(Prompt(f"chat-{i}", "chat", _chat_ids(tokenizer, chat)))
    for prompt in found:
        if not MIN_TOKENS <= len(prompt.token_ids) <= MAX_TOKENS:
            raise ValueError(f"{prompt.name} has {len(prompt.token_ids)} tokens")
    return found


def _more_places(num_chars: int) -> list[tuple[int, int]]:
    """First character and tokens of each, the whole text divided into equal parts."""
    return [
        (num_chars * i // (_MORE + 1), _LENGTHS[i % len(_LENGTHS)]) for i in range(1, _MORE + 1)
    ]


def _chat_ids(tokenizer: Any, chat: Chat) -> list[int]:
    if chat.source.endswith(".py"):
        piece = Path(sysconfig.get_path("stdlib"), chat.source).read_text("utf-8")
    else:
        piece = "\n\n".join(prompts.topic(name) for name in chat.source.split())
    turns = [
        {"role": "user", "content": f"{chat.request}\n\n{piece[: chat.num_chars]}"},
        {"role": "assistant", "content": chat.answer},
        {"role": "user", "content": chat.question},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
