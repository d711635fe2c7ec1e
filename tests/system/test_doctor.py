"""The doctor on this machine: it finds what is there, says how to get what is not, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec import doctor
from dsec.linux import limits, probes, swap
from dsec.linux.tools import Tools

pytestmark = pytest.mark.root


def test_this_machine_can_run_sandboxes(tmp_path: Path) -> None:
    found = doctor.diagnose(tmp_path / "state")
    assert [check for check in found if check.level == doctor.FATAL and not check.ok] == []
    assert all(check.ok or check.fix for check in found) and len({check.name for check in found}) == len(found)
    assert not any(tmp_path.iterdir())
    doctor.ensure_runtime(tmp_path / "state")


def test_missing_tools_are_named_with_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(tmp_path)
    monkeypatch.setattr(Tools, "find", lambda self, name: None)
    with pytest.raises(doctor.RuntimeMissing, match=r"mkfs\.erofs: not installed \(apt-get install erofs-utils") as caught:
        doctor.ensure_runtime(tmp_path, tools)
    assert {check.name for check in caught.value.checks} == {"mkfs.erofs", "mkfs.btrfs"}


def test_a_failing_probe_says_why(tmp_path: Path) -> None:
    assert "No such file" in str(probes.run("seccomp", str(tmp_path / "absent")))
    assert "failed" in str(probes.run("erofs_file", "/bin/false", str(tmp_path)))
    assert "No such file" in str(probes.run("pre_content", str(tmp_path / "absent")))
    assert not any(tmp_path.iterdir())


def test_how_remote_layers_load_is_said(tmp_path: Path) -> None:
    """This kernel has both ways. On tmpfs there are no events: the finding says what is used instead."""
    found = {check.name: check for check in doctor.diagnose(tmp_path / "state")}
    assert found["pre-content events"].ok and found["FUSE"].ok and "not needed" in found["FUSE"].detail
    found = {check.name: check for check in doctor.diagnose("/dev/shm")}
    events = found["pre-content events"]
    assert not events.ok and events.level == doctor.INFO and events.detail.endswith("; FUSE is used") and "6.14" in events.fix
    assert found["FUSE"].ok and "use it" in found["FUSE"].detail


def test_swap_that_is_off_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "active", list)
    found = {check.name: check for check in doctor.diagnose(tmp_path / "state", own_swap=False)}["swap"]
    assert not found.ok and found.level == doctor.INFO and found.fix
    assert found.detail == "none, and memory.swap is off: a pause leaves anonymous memory where it is"
    found = {check.name: check for check in doctor.diagnose(tmp_path / "state")}["swap"]
    assert found.ok and "the node can make a file" in found.detail
    monkeypatch.setattr(swap, "active", lambda: [swap.Area("/dev/theirs", "partition", 64 << 20, 0)])
    found = {check.name: check for check in doctor.diagnose(tmp_path / "state", own_swap=False)}["swap"]
    assert found.ok and found.detail == "/dev/theirs: 0 of 64 MiB used"


def test_each_limit_says_for_how_many_sandboxes_it_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.name: check for check in doctor.diagnose(tmp_path / "state")}
    for name in ("open files", "tasks", "namespaces at once", "mounts"):
        assert " sandboxes" in found[name].detail and "enough for" in found[name].detail
    assert "for all sandboxes together" in found["inotify inside"].detail
    small = [limits.Room("cgroups", 12, "a = 40", "raise a"), limits.Room("cgroups", 7000, "b = 9000", "raise b")]
    monkeypatch.setattr(limits, "rooms", lambda: iter(small))
    found = {check.name: check for check in doctor.diagnose(tmp_path / "state")}
    assert (found["cgroups 1"].ok, found["cgroups 1"].detail, found["cgroups 1"].fix) == (False, "a = 40: enough for 12 sandboxes", "raise a")
    assert found["cgroups 2"].ok and not found["cgroups 2"].fix
