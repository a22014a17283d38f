"""The rows that this host's leader gave to workers, by the names that all hosts use."""

from __future__ import annotations

from proxy.processes.ipc_messages import WorkersChanged


class WorkerNames:
    """Names and rows; a worker at another address has another name."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.limits: dict[str, int] = {}  # max_requests
        self._by_name: dict[str, str] = {}  # by the name in the fleet file

    def apply(self, changes: WorkersChanged) -> list[str]:
        """Apply the leader's changes; return the names that have new rows."""
        names = {worker.spec.name for worker in changes.known}
        for removed in [
            *changes.removed,
            *(self._by_name.keys() - names if changes.complete else ()),
        ]:
            self._forget(self._by_name.get(removed, ""))
        added = []
        for worker in changes.known:
            spec, row = worker.spec, worker.row
            name = f"{spec.name} {spec.url}"
            if (before := self._by_name.get(spec.name, name)) != name or row is None:
                self._forget(before)
            if row is None:
                continue
            if self.rows.get(name) != row:
                self._forget(name)
                self._forget(self.names.get(row, ""))
                self.rows[name], self.names[row] = row, name
                self._by_name[spec.name] = name
                added.append(name)
            if spec.max_requests is None:
                self.limits.pop(name, None)
            else:
                self.limits[name] = spec.max_requests
        return added

    def _forget(self, name: str) -> None:
        row = self.rows.pop(name, None)
        if row is not None:
            del self.names[row]
        self.limits.pop(name, None)
        for short in [short for short, long in self._by_name.items() if long == name]:
            del self._by_name[short]
