"""What a traced process wrote and synced, in which order: strace's output, read.

    trace = Trace(lines)
    trace.marks                       when the process wrote to the file named `marks`
    trace.unsynced(path, before)      why `path` might be gone or torn after a power cut then
    trace.first_sync(path, after)     when the next sync of it began

Times are line numbers. A write counts from its end and a sync from its beginning, so that what
another thread does meanwhile is never taken for synced.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,"
    "rename,renameat,renameat2,link,linkat,mkdir,mkdirat,truncate,ftruncate,fallocate,"
    "fsync,fdatasync,msync,mmap,io_uring_setup"
)
COMMAND = (
    "strace",
    "-f",
    "--seccomp-bpf",
    "-y",
    "-qq",
    "-s",
    "8",
    "-e",
    f"trace={CALLS}",
    "-e",
    "signal=none",
)

_LINE = re.compile(r"(?P<pid>\d+) +(?P<rest>.*)")
_FD = re.compile(r"^\d+<(?P<path>[^>]*)>")
_QUOTED = re.compile(r'"([^"]*)"')
_WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate"}
_COPIES = {"sendfile": 0, "copy_file_range": 2, "splice": 2}


@dataclass(frozen=True, slots=True)
class _Span:
    begin: int
    end: int


class Trace:
    """The lines of one run. Paths are absolute; files that others rename are not followed."""

    def __init__(self, lines: Iterable[str], marks: Path) -> None:
        """Read the trace of a process that writes to the file `marks`, one call a mark."""
        self.marks: list[int] = []
        self.strange: list[str] = []
        """Calls by which files may have changed in a way that this does not follow."""
        self._marks = str(marks)
        self._written: defaultdict[str, list[int]] = defaultdict(list)
        self._named: defaultdict[str, list[int]] = defaultdict(list)
        self._synced: defaultdict[str, list[_Span]] = defaultdict(list)
        begun: dict[str, tuple[int, str]] = {}
        for at, line in enumerate(lines):
            found = _LINE.match(line)
            if found is None:
                continue
            pid, rest = found["pid"], found["rest"]
            if rest.endswith("<unfinished ...>"):
                begun[pid] = at, rest.removesuffix("<unfinished ...>")
                continue
            begin = at
            if rest.startswith("<... "):
                begin, first = begun.pop(pid, (at, ""))
                rest = first + rest.partition("resumed>")[2]
            self._take(rest, _Span(begin, at))

    def _take(self, text: str, span: _Span) -> None:
        call, _, rest = text.partition("(")
        arguments, _, result = rest.rpartition(" = ")
        if result.startswith("-1"):
            return
        fd = _FD.match(arguments)
        if call in _WRITES and fd is not None:
            if fd["path"] == self._marks:
                self.marks.append(span.begin)
            self._written[fd["path"]].append(span.end)
        elif call in ("fsync", "fdatasync") and fd is not None:
            self._synced[fd["path"]].append(span)
        elif call in ("openat", "open", "creat"):
            self._open(call, arguments, span)
        elif call in ("rename", "renameat", "renameat2", "link", "linkat"):
            old, new = _QUOTED.findall(arguments)
            self._written[new] = list(self._written[old])
            self._synced[new] = list(self._synced[old])
            self._named[new].append(span.end)
        elif call in ("mkdir", "mkdirat"):
            self._named[_QUOTED.findall(arguments)[0]].append(span.end)
        elif call == "truncate":
            self._written[_QUOTED.findall(arguments)[0]].append(span.end)
        elif call in _COPIES:
            paths = re.findall(r"\d+<([^>]*)>", arguments)
            self._written[paths[min(1, len(paths) - 1) if _COPIES[call] else 0]].append(span.end)
        elif call == "io_uring_setup" or (
            call == "mmap" and "MAP_SHARED" in arguments and "PROT_WRITE" in arguments
        ):
            self.strange.append(text)

    def _open(self, call: str, arguments: str, span: _Span) -> None:
        (path, *_) = _QUOTED.findall(arguments)
        if call != "creat" and "O_CREAT" not in arguments:
            return
        # Where it existed before, this asks for one more sync than is needed, but for a file that
        # is opened so again and again: its name is new only once.
        if not self._named[path]:
            self._named[path].append(span.end)
        if call == "creat" or "O_TRUNC" in arguments:
            self._written[path].append(span.end)

    def first_sync(self, path: Path, after: int) -> int:
        """Return when the first sync of this file after `after` began."""
        return min(span.begin for span in self._synced[str(path)] if span.begin > after)

    def unsynced(self, path: Path, before: int) -> str:
        """Return what of this file or folder a power cut at `before` might lose, '' if nothing.

        That is its last bytes, or its name in the folder that holds it.
        """
        bytes_, name = self._written[str(path)], self._named[str(path)]
        if not self._is_synced(path, bytes_, before):
            return f"{path}: its bytes"
        if not self._is_synced(path.parent, name, before):
            return f"{path}: its name"
        return ""

    def made(self, path: Path) -> bool:
        """Return whether the process gave this name to anything."""
        return bool(self._named[str(path)])

    def _is_synced(self, path: Path, changes: list[int], before: int) -> bool:
        last = changes[bisect_left(changes, before) - 1] if changes and changes[0] < before else -1
        return last < 0 or any(
            last < span.begin and span.end < before for span in self._synced[str(path)]
        )
