"""How annotations are checked in the tests: by beartype, with an int where a float is asked for.

PEP 484 and mypy allow that int. Of a list beartype looks at one item at random, so that a check
against it would fail in some runs and pass in others.
"""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
