"""How long a bucket wants to be left alone: of an answer obstore tells the status, and not the header `Retry-After`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from http.client import HTTPException
from threading import Lock
from urllib.error import HTTPError
from urllib.request import Request

from effloop.data.remote.answers import opener, retry_after

_THROTTLED = re.compile(r"status code: (?:429|503)\b")
_PLAIN_URL = re.compile(r"Error performing (?:GET|HEAD) (\S+) in ")
_EVERY_S = 5.0
_TIMEOUT_S = 10.0
_SKIP_SIGNATURE = ("AWS_SKIP_SIGNATURE", "AZURE_SKIP_SIGNATURE", "GOOGLE_SKIP_SIGNATURE")


class Throttle:
    """Asks a bucket that has answered 429 or 503 for one byte, by a request whose answer is seen whole.

    However many threads are told so, it is asked once in five seconds, and none of them before the pause is over. A
    signed URL is a secret for the minute that it is valid: it is in no message.

    Args:
        signed: key of a file, or nothing for the bucket -> a signed URL of it.
    """

    def __init__(self, signed: Callable[[str], str]) -> None:
        self._signed, self._lock = signed, Lock()
        self._next = self._until = 0.0

    def pause_s(self, said: str, key: str) -> float | None:
        """Seconds that the bucket wants to be left alone; None if it doesn't say.

        Args:
            said: what obstore says of the answer.
            key: of the file.
        """
        if not _THROTTLED.search(said):
            return None
        with self._lock:
            now = time.monotonic()
            if now >= max(self._next, self._until):
                seconds = self._ask(said, key)
                now = time.monotonic()
                self._next, self._until = now + _EVERY_S, now + (seconds or 0)
            return self._until - now if now < self._until else None

    def _ask(self, said: str, key: str) -> float | None:
        try:
            plain = any(os.environ.get(name, "").lower() in ("1", "true", "on", "yes", "y") for name in _SKIP_SIGNATURE)
            found = _PLAIN_URL.search(said)
            url = found[1] if plain and found else self._signed(key)
            request = Request(url, headers={"User-Agent": "effloop", "Range": "bytes=0-0"})  # noqa: S310
            opener().open(request, timeout=_TIMEOUT_S).close()
        except HTTPError as error:
            error.close()
            return retry_after(error.headers) if error.code in (429, 503) else None
        except (OSError, HTTPException, ValueError):
            pass
        return None
