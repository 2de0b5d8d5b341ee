"""Errors that are the user's to mend, and the suggestion of a close name.

Everything a user can get wrong (a flag, a file, a folder, a checkpoint) raises `UserError`: one line that says what was
given, what is allowed and what to do. The command line prints that line and exits with code 2. Broken invariants of our
own stay `assert`s, with a traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A fault of the input, told in one line; the command line exits with code 2."""


class UserNotice(UserWarning):
    """Something the user should know that stops nothing; the command line prints it as a note."""


def unknown_name(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not in `allowed`, with the nearest allowed name when one is near.

    >>> str(unknown_name("method", "dmdt", ["autoregressive", "dmtd"]))
    "unknown method 'dmdt' (allowed: autoregressive, dmtd); did you mean 'dmtd'?"
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {given!r} (allowed: {', '.join(names)}){hint}")
