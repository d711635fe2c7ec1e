"""Bundles: files that a user of verifiers and prime-rl knows, and nothing else."""
from __future__ import annotations

from pathlib import Path

import pytest

from dsec.autotrain import bundle
from dsec.autotrain.author.choices import OPTIONS, Choices
from dsec.autotrain.author.expand import expand
from dsec.autotrain.bundle import BundleError
from dsec.autotrain.families import FAMILIES
from dsec.autotrain.spec import Spec

SPEC = Spec("calc")
FILES = expand(SPEC, Choices(FAMILIES["calc"].tools), 1)

# Keys of prime-rl's configuration as its models have them at commit 559b44772e471d1538537b8805cc77f3824a5e64 (2026-08-21) and, below
# `env`, of verifiers 0.4.0; what the taskset has of its own is not theirs.
KEYS = {
    "max_steps", "seq_len", "model.name", "orchestrator.batch_size", "orchestrator.group_size", "orchestrator.algo.type",
    "orchestrator.train.sampling.max_completion_tokens", "orchestrator.train.sampling.temperature", "orchestrator.train.source.name",
    "orchestrator.train.source.env.taskset.id", "orchestrator.train.source.env.agent.max_turns",
    "orchestrator.train.source.env.agent.harness.id", "orchestrator.train.source.env.agent.runtime.type", "trainer.optim.lr",
    "trainer.optim.max_norm", "trainer.optim.weight_decay", "trainer.scheduler.type", "trainer.scheduler.warmup_steps",
    "trainer.scheduler.decay_steps", "ckpt.interval",
}  # fmt: skip
OWN = {"orchestrator.train.source.env.taskset.level", "orchestrator.train.source.env.taskset.seed"}


def with_config(old: str, new: str) -> dict[str, bytes]:
    text = FILES["rl.toml"].decode()
    assert old in text
    return {**FILES, "rl.toml": text.replace(old, new).encode()}


def keys(value: object, at: str = "") -> set[str]:
    if isinstance(value, dict):
        return {key for name, inner in value.items() for key in keys(inner, f"{at}.{name}".lstrip("."))}
    if isinstance(value, list):
        return {key for inner in value for key in keys(inner, at)}
    return {at}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = bundle.parse(FILES)
    bundle.write(made, tmp_path / "job")
    again = bundle.read(tmp_path / "job")
    assert again.hash == made.hash and again.config == made.config and again.job == made.job
    assert (again.package, again.settings, again.rollouts) == ("calc_env", {"level": 2, "seed": 1}, 20 * 64)
    assert expand(SPEC, Choices(FAMILIES["calc"].tools), 1) == FILES, "the same choices give the same files"


def test_every_key_is_one_of_prime_rl() -> None:
    import tomllib

    assert keys(tomllib.loads(FILES["rl.toml"].decode())) == KEYS | OWN


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("max_steps = 20", "max_step = 20", "max_step"),
        ("lr = ", "learning_rate = ", "learning_rate"),
        ("group_size = 8", "group_size = 1", "group"),
        ("group_size = 8", "group_size = 7", "multiple"),
        ("lr = 0.0003", "lr = nan", "lr"),
        ("lr = 0.0003", "lr = 1e9", "lr"),
        ("temperature = 1.0", "temperature = 0.0", "temperature"),
        ("max_turns = 8", "max_turns = 0", "max_turns"),
        ('id = "calc_env"', 'id = "../../etc"', "package name"),
        ("max_steps = 20", "max_steps = ", "rl.toml"),
        ('type = "grpo"', 'type = "sft"', "not run here"),
    ],
)
def test_a_wrong_configuration_is_named(old: str, new: str, says: str) -> None:
    with pytest.raises(BundleError) as found:
        bundle.parse(with_config(old, new))
    assert found.value.code == "schema" and says in found.value.detail


def test_budgets() -> None:
    for old, new in (("max_steps = 20", "max_steps = 21"), ("seq_len = 96", "seq_len = 129")):
        with pytest.raises(BundleError) as found:
            bundle.parse(with_config(old, new))
        assert found.value.code == "budget"


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "env/../../up", "env/a\0b"])
def test_paths_stay_inside(path: str) -> None:
    with pytest.raises(BundleError):
        bundle.parse({**FILES, path: b""})


def test_size_and_special_files(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        bundle.parse({**FILES, "big": bytes(bundle.MOST_BYTES)})
    with pytest.raises(BundleError):
        bundle.parse({**FILES, **{f"many/{i}": b"" for i in range(bundle.MOST_FILES)}})
    bundle.write(bundle.parse(FILES), tmp_path)
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(BundleError):
        bundle.read(tmp_path)


def test_every_choice_makes_files() -> None:
    base = Choices(FAMILIES["calc"].tools)
    for name, options in OPTIONS.items():
        for option in options:
            chosen = base.but(**{name: option})
            assert Choices.of(chosen.indices()) == chosen
            assert "rl.toml" in expand(SPEC, chosen, 1)


def test_a_directory_that_is_no_bundle_is_not_walked(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(bundle.BundleError, match=r"has no job\.toml"):
        bundle.read(tmp_path)
