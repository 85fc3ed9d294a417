"""Files of SSH servers: by fsspec and paramiko, from hosts whose keys are known."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from effloop.data.remote.filesystems import FsspecStore
from effloop.data.remote.location import Location
from effloop.data.remote.manifest import RemoteFile
from effloop.data.remote.store import TIMEOUT_S, FetchError
from effloop.errors import optional_package

_REQUEST = 32 << 10  # bytes; what every server answers at once
_AHEAD = 64  # requests; 2 MiB on their way
_CONNECTIONS = 4  # OpenSSH's server refuses some where ten log in at the same time
_KNOWN = "~/.ssh/known_hosts"


class SftpStore(FsspecStore):
    """An SSH server: a connection for each thread, as two threads of one would wait for each other for ever."""

    def __init__(self, location: Location) -> None:
        self._paramiko = optional_package("paramiko", f"data.root: '{location.root}'", "paramiko")
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it says with a traceback what it raises
        super().__init__(location)
        self.at_once = _CONNECTIONS

    def _opened(self) -> Any:
        kind = self._checked
        return kind(**kind._get_kwargs_from_urls(self.location.place), skip_instance_cache=True)

    @cached_property
    def _checked(self) -> Any:
        """The class of fsspec's, which by itself takes any key for the host's, and waits for ever."""
        kind, store = self._core.get_filesystem_class("sftp"), self

        class Checked(kind):  # type: ignore[misc, valid-type]
            def _connect(self) -> None:
                self.client = store._connected(self.host, self.ssh_kwargs)
                self.ftp = self.client.open_sftp()
                self.ftp.get_channel().settimeout(TIMEOUT_S)

        return Checked

    def _connected(self, host: str, options: dict[str, Any]) -> Any:
        """A client that has logged in.

        Raises:
            FetchError: the host isn't known, or refuses that.
            Exception: paramiko's, or the system's.
        """
        paramiko, times = self._paramiko, ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
        client = paramiko.SSHClient()
        client.load_system_host_keys()
        client.set_missing_host_key_policy(_Unknown())
        try:
            client.connect(host, **dict.fromkeys(times, TIMEOUT_S), **options)
            return client
        except paramiko.BadHostKeyException:
            reason = f"its key is another one than {_KNOWN} has: it has a new one, or this is another machine"
        except paramiko.PasswordRequiredException as error:
            reason = f"{error}; load the key by ssh-add"
        except paramiko.AuthenticationException as error:
            reason = f"it refuses the login: {error}; name the user before the host, with @, and have the key in ~/.ssh"
        except BaseException:
            client.close()
            raise
        client.close()
        raise FetchError(reason, final=True)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        pieces = [(at, min(_REQUEST, stop - at)) for at in range(start, stop, _REQUEST)]
        try:
            with self._system.ftp.open(self._path(file.key), "rb") as opened:
                for piece, (_, size) in zip(opened.readv(pieces, _AHEAD), pieces, strict=True):
                    yield piece
                    if len(piece) < size:
                        return
        except Exception as error:
            raise self._refused(error) from None


class _Unknown:
    """What is done with a host whose key isn't known."""

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        """Refuse it."""
        raise FetchError(
            f"{_KNOWN} has no key of {hostname}; connect to it by ssh once, which shows the key and keeps it",
            final=True,
        )
