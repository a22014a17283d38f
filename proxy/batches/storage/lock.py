"""File lock that elects the one process that schedules a folder's batches."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

# Another process holds the lock; NFS reports EACCES.
LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderLock:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "lane.lock"
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        return self._file is not None

    @property
    def is_lost(self) -> bool:
        """True if the locked file was removed or replaced.

        Another process may then lock a new file.
        """
        if self._file is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return True

    def acquire(self) -> bool:
        """Try to take the lock; return True if this process holds it.

        Raises `OSError`.
        """
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
        if self._file is not None:
            os.close(self._file)
            self._file = None
