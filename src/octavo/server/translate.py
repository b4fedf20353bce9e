"""Routes of other protocols are chats in other words; refusals must use the words of the client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from octavo.errors import RequestError


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """A RequestError about one of our fields (keys) leaves as one about the client's (values)."""
    try:
        yield
    except RequestError as error:
        rename(error, names)
        raise


def rename(error: RequestError, names: Mapping[str, str]) -> None:
    """The same for an error that exists already. Parts of a field ("messages[0].role") follow it."""
    field, _, _ = (error.param or "").partition(".")
    field, _, _ = field.partition("[")
    theirs = names.get(field)
    if theirs is None or error.param is None:
        return
    error.param = theirs + error.param[len(field) :]
    error.message = error.message.replace(field, theirs, 1)
    error.args = (error.message,)
