"""How inputs are spoilt: bytes, values inside JSON, and pieces that hurt other programs."""

from __future__ import annotations

import copy
import random

SENTINEL = "headwise-fuzz-was-executed"
# what a parser, a template engine, an unpickler or a shell might run, and what might never end
PIECES = (
    "!!python/object/apply:os.system ['touch " + SENTINEL + "']",
    "!!python/object/new:type {args: ['z', [], {}]}",
    "!!python/name:os.system",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}",
    "cos\nsystem\n(S'touch " + SENTINEL + "'\ntR.",
    "$(touch " + SENTINEL + ")",
    "<script>alert(1)</script>",
    "../../../../etc/passwd",
    "\x00",
    "\ud800",
    "\\ud800",
    "\u2028",
    "\ufeff",
    "9" * 5000,
    "-" * 40,
    "(" * 300,
    "[" * 2000,
    "{" * 60,
    '{"a":' * 1500,
    "&a [*a, *a]",
    "&a {<<: *a}",
    "*a",
    "<<: *a",
    "? [a]\n: b",
    "2026-13-45",
    "2026-02-30T99:99:99Z",
    ".inf",
    ".nan",
    "NaN",
    "Infinity",
    "1e999",
    "-0",
    "0x" + "f" * 5000,
    "0b1",
    "1:61:61",
    "!!binary x",
    "!!timestamp x",
    "!!int ''",
    "!!float x",
    "!!set {a, b}",
    "!!omap [a: 1, a: 2]",
    "null",
    "~",
    "true",
    "[]",
    "{}",
    '""',
    "a: b: c",
    "%YAML 9.9\n---\n",
    "---\n---\n",
    "\t",
    "L0H0",
    "L0-1H0-3 & sick",
    "L999999999999999999H1",
    "all - all",
    "first_token_mass > 1e308",
    "entropy < -0",
    "band",
)
BOMB = "a: &a [1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 8)}]\n" for i in range(12)
)
VALUES = (None, True, -1, 0, 10**9, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../x")
VALUES += ([], {}, [[]], {"a": 1}, "\ud800", "9" * 400, [None], [1, "a"], [[0.5]], {"": {"": []}})


def spoilt_text(text: str, chance: random.Random) -> str:
    """A text with one to three faults."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        end = min(len(text), at + chance.choice((0, 1, 2, 8, 40)))
        new = chance.choice((_piece, _character, _nothing, _repeated, _swapped))
        text = text[:at] + new(text[at:end], chance) + text[end:]
        if len(text) > 200_000:
            return text[:200_000]
    return text


def _piece(_, chance):
    return chance.choice(PIECES)


def _character(_, chance):
    return chr(chance.choice((chance.randrange(32, 127), chance.randrange(0x300))))


def _nothing(_, chance):
    return ""


def _repeated(part, chance):
    return part * chance.choice((2, 3, 50))


def _swapped(part, chance):
    return part[::-1]


def spoilt_bytes(raw: bytes, chance: random.Random) -> bytes:
    """Bytes with one to three faults; they need not be UTF-8 any more."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw) + 1)
        end = min(len(raw), at + chance.choice((0, 1, 4, 30)))
        new = chance.choice((b"", chance.randbytes(2), b"\xff", b"\0", raw[at:end] * 2))
        raw = raw[:at] + new + raw[end:]
    return raw


def spoilt_body(body, chance: random.Random):
    """Parsed JSON or YAML with one value replaced, left out, or put where none was."""
    body = copy.deepcopy(body)
    inner, path = body, []
    while isinstance(inner, (dict, list)) and inner and (not path or chance.random() < 0.75):
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        path.append((inner, chance.choice(list(keys))))
        inner = inner[path[-1][1]]
    if not path:
        return chance.choice(VALUES)
    holder, key = path[-1]
    way = chance.randrange(4)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[chance.choice(("x", "", "schema", "model", "name", "../y"))] = chance.choice(VALUES)
    else:
        holder[key] = chance.choice(VALUES)
    return body
