"""The tiny model: the same bytes on every machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vllm_sched.cli.main import main
from vllm_sched.errors import UsageError
from vllm_sched.workers import tiny_model


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_model_is_written_once_and_identical_on_two_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for machine in ("one", "two"):
        monkeypatch.setenv("VLLM_SCHED_CACHE", str(tmp_path / machine))
        made.append(tiny_model.tiny_model())
    assert made[0] != made[1]
    assert digest(made[0]) == digest(made[1])
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= digest(made[0]).keys()
    with monkeypatch.context() as patched:
        patched.setattr(tiny_model, "_write_weights", None)  # a second write would fail
        assert tiny_model.tiny_model() == made[1]
    assert [p.name for p in (tmp_path / "two").iterdir()] == [made[1].name]
    monkeypatch.setitem(tiny_model.RECIPE, "seed", 1)
    changed = digest(tiny_model.tiny_model())
    assert changed["model.safetensors"] != digest(made[1])["model.safetensors"]


def test_model_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_SCHED_CACHE", "cache")
    monkeypatch.setattr(tiny_model, "_write_weights", lambda _: None)
    assert tiny_model.loadable("tiny").startswith(str(tmp_path / "cache"))
    assert tiny_model.loadable("cache") == str(tmp_path / "cache")
    assert tiny_model.loadable("some/model") == "some/model"


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SCHED_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny_model, "_write_weights", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_model.tiny_model()
    assert not list(tmp_path.iterdir())


def test_tokenizer_uses_the_whole_vocabulary_and_round_trips() -> None:
    folder = tiny_model.tiny_model()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == size == tiny_model.VOCABULARY
    text = "a long prompt, naïve and 北京 too"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>hi<|end|><|assistant|>"


def test_unwritable_cache_is_reported_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_SCHED_CACHE", str(tmp_path / "file" / "cache"))
    assert main(["serve", "tiny", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file") in line
    assert line.endswith("set VLLM_SCHED_CACHE to a writable folder")


def test_missing_home_directory_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VLLM_SCHED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert main(["compare", "--rounds", "1"]) == 2
    assert "home directory" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_full_disk_is_reported_with_the_folder(
    file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = tiny_model._write

    def write_to_a_full_disk(folder: Path) -> None:
        (folder / file).symlink_to("/dev/full")
        write(folder)

    monkeypatch.setenv("VLLM_SCHED_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny_model, "_write", write_to_a_full_disk)
    full = rf"can't be stored in {tmp_path}: No space left on device; set VLLM_SCHED_CACHE"
    with pytest.raises(UsageError, match=full):
        tiny_model.tiny_model()
    assert list(tmp_path.iterdir()) == []
