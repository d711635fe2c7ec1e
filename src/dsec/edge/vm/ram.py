"""The RAM of a guest that runs, as its monitor has it mapped: privately, over the file of its template."""
from __future__ import annotations

import array
import os

from dsec.edge.vm.files import copy_data
from libdsec.errors import Unavailable

_PAGE = 4096
_RUN = 256  # pages that are copied at once
_PRESENT, _SWAPPED, _FILE = 1 << 63, 1 << 62, 1 << 61  # bits of /proc/PID/pagemap


class Ram:
    """Of one monitor. Unavailable when it has none."""

    def __init__(self, pid: int, size: int) -> None:
        self._pid, self._size = pid, size
        try:
            with open(f"/proc/{pid}/maps") as maps:
                for line in maps:
                    parts = line.split(None, 5)
                    begin, end = (int(part, 16) for part in parts[0].split("-"))
                    if end - begin == size and len(parts) > 5 and "memfd:dsec-ram" in parts[5]:
                        self._at, self._range = begin, parts[0]
                        return
        except OSError as error:
            raise Unavailable(f"the machine is gone: {error.strerror}") from error
        raise Unavailable("the machine has no RAM of a template")

    def copy_shared(self, to: int) -> None:
        """What its template has. It may run meanwhile."""
        source = os.open(f"/proc/{self._pid}/map_files/{self._range}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            copy_data(source, to)
        finally:
            os.close(source)

    def copy_written(self, to: int) -> None:
        """What it wrote since. It must stand still."""
        pages = array.array("Q")
        with open(f"/proc/{self._pid}/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(self._at // _PAGE * 8)
            while len(pages) < self._size // _PAGE:
                pages.frombytes(pagemap.read(min(1 << 20, (self._size // _PAGE - len(pages)) * 8)))
        written = [i for i, page in enumerate(pages) if page & _SWAPPED or (page & _PRESENT and not page & _FILE)]
        memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            at = 0
            while at < len(written):
                end = at
                while end + 1 < len(written) and written[end + 1] == written[end] + 1 and end - at < _RUN - 1:
                    end += 1
                offset = written[at] * _PAGE
                os.pwrite(to, os.pread(memory, (end - at + 1) * _PAGE, self._at + offset), offset)
                at = end + 1
        finally:
            os.close(memory)
