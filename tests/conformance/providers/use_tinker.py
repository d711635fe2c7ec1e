"""tinker-cookbook: its interface, on a sandbox. What the interface itself needs is installed; torch and the rest of the cookbook are not."""
from __future__ import annotations

from cases import PROBE, araises, case, main, prove, running
from tinker_cookbook.sandbox import SandboxInterface, SandboxTerminatedError
from tinker_cookbook.sandbox.sandbox_interface import SandboxResource

from dsec.faces.tinker import DsecSandbox


@case("the interface")
async def interface() -> None:
    box = await DsecSandbox.create(memory_mb=256, env={"A": "b"}, workdir="/srv")
    resource = SandboxResource(box)
    try:
        assert isinstance(box, SandboxInterface)
        prove((await box.run_command(PROBE)).stdout, box.sandbox_id)
        got = await box.run_command("echo $A; pwd; echo err >&2; exit 3")
        assert (got.stdout, got.stderr, got.exit_code) == ("b\n/srv\n", "err\n", 3) and got.metrics["ending"] == "exited"
        assert (await box.run_command("pwd", workdir="/usr")).stdout == "/usr\n"
        assert (await box.run_command("true", workdir="/none")).exit_code == 126
        late = await box.run_command("echo begun; sleep 60", timeout=1)
        assert late.exit_code == 124 and late.stdout == "begun\n" and "timeout" in late.stderr
        assert len((await box.run_command("head -c 1000000 /dev/zero | tr '\\0' A")).stdout) == 128 << 10
        assert len((await box.run_command("head -c 1000 /dev/zero | tr '\\0' A", max_output_bytes=10)).stdout) == 10
        eaten = await box.run_command("python3 -c 'x = bytearray(1 << 30)'")
        assert eaten.exit_code == 137 and "memory limit" in eaten.stderr
        assert (await box.write_file("/opt/a/run.sh", "echo ran\n", executable=True)).exit_code == 0
        assert (await box.run_command("/opt/a/run.sh; stat -c %a /opt/a/run.sh")).stdout == "ran\n755\n"
        assert (await box.write_file("/opt", "x")).exit_code == 1 and (await box.read_file("/none")).exit_code == 1
        assert (await box.write_file("/opt/b", b"0123456789")).exit_code == 0 and (await box.read_file("/opt/b", max_bytes=4)).stdout == "0123"
        await resource.send_heartbeat()
    finally:
        await resource.cleanup()
    assert box.sandbox_id not in running()
    await araises(SandboxTerminatedError, box.run_command("true"))


main("tinker-cookbook")
