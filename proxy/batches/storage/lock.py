"""The lock of a folder: of all routers and processes that share it, one runs the lines."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # by another; the last as NFS may say it


class FolderLock:
    """A lock on a file in the folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lane.lock"
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process holds it."""
        return self._file is not None

    @property
    def is_lost(self) -> bool:
        """Whether the locked file left the folder: another process may lock a new one."""
        if self._file is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return True

    def take(self) -> bool:
        """Take it, unless another has it; whether it is held. Raises `OSError`."""
        if self._file is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(file)
                if error.errno in LOCKED:
                    return False
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            self._file = file
        return True

    def release(self) -> None:
        """Let another have it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
