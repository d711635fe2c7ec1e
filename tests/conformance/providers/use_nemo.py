"""NeMo Gym: the provider by its entry point, through NeMo Gym's own sandbox API. Ray and the rest of the gym are not installed."""
from __future__ import annotations

import tempfile
from pathlib import Path

from cases import PROBE, araises, case, main, prove, running
from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxResources, SandboxSpec, SandboxStatus
from nemo_gym.sandbox.providers.registry import create_provider, list_providers


@case("the provider")
async def provider() -> None:
    assert "dsec" in list_providers()
    made = create_provider({"dsec": {"capacity_wait": 10}})
    spec = SandboxSpec(
        image="bookworm", ttl_s=300, workdir="/srv", env={"A": "b"}, files={"/srv/given": "of the spec\n"}, metadata={"job": "42"},
        resources=SandboxResources(cpu=0.5, memory_mib=256), entrypoint=["sh", "-c", "echo began > /srv/entry; sleep 1000"],
    )  # fmt: skip
    handle = await made.create(spec)
    try:
        assert handle.provider_name == "dsec" and await made.status(handle) == SandboxStatus.RUNNING
        prove((await made.exec(handle, PROBE)).stdout, handle.sandbox_id)
        shown = running()[handle.sandbox_id]
        assert shown["labels"]["job"] == "42" and shown["limits"]["memory_mb"] == 256 and shown["limits"]["cpu_cores"] == 0.5
        got = await made.exec(handle, "echo $A; pwd; cat given; echo err >&2; exit 3")
        assert (got.stdout, got.stderr, got.return_code, got.error_type) == ("b\n/srv\nof the spec\n", "err\n", 3, None)
        assert (await made.exec(handle, "id -un; echo $X", user="nobody", env={"X": "y"}, cwd="/")).stdout == "nobody\ny\n"
        assert (await made.exec(handle, "until [ -s entry ]; do sleep 0.1; done; cat entry", timeout_s=20)).stdout == "began\n"
        late = await made.exec(handle, "sleep 60", timeout_s=0.5)
        assert late.return_code == 124 and late.error_type == "timeout"
        assert (await made.exec(handle, "true", cwd="/none")).error_type == "cwd_not_found"
        with tempfile.TemporaryDirectory() as here:
            Path(here, "up").write_bytes(bytes(range(256)))
            await made.upload_file(handle, Path(here, "up"), "/opt/new/file")
            await made.download_file(handle, "/opt/new/file", Path(here, "down", "file"))
            assert Path(here, "down", "file").read_bytes() == bytes(range(256))
        taken = await made.snapshot(handle)
        await made.exec(handle, "rm given")
        again = await made.create(SandboxSpec(provider_options={"snapshot_id": taken}))
        assert (await made.exec(again, "cat /srv/given")).stdout == "of the spec\n"
        await made.close(again)
        await made.delete_snapshot(taken)
        await made.delete_snapshot(taken)
        await made.pause(handle)
        await made.resume(handle)
        await araises(SandboxCreateError, made.create(SandboxSpec(image="none")), "layer_not_found")
        await araises(SandboxCreateError, made.create(SandboxSpec(resources=SandboxResources(gpu=1))), "gpu")
        await araises(SandboxCreateError, made.create(SandboxSpec(provider_options={"volumes": ["x"]})), "volumes")
    finally:
        await made.close(handle)
        assert await made.status(handle) == SandboxStatus.STOPPED and handle.sandbox_id not in running()
        await made.aclose()


main("nemo-gym")
