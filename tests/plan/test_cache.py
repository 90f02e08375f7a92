import json
from dataclasses import asdict
from pathlib import Path

import pytest

from beamwright.errors import InputError
from beamwright.plan.machines import NAMED_PROFILES, default_cache_file, read_profile, write_profile

PROFILE = NAMED_PROFILES["h100"]


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "deep" / "profile.json"
    assert write_profile(PROFILE, file) == file
    assert read_profile(file) == PROFILE
    assert list(file.parent.iterdir()) == [file], "no partial file stays"


def test_writing_again_replaces(tmp_path):
    file = tmp_path / "profile.json"
    write_profile(PROFILE, file)
    write_profile(NAMED_PROFILES["t4"], file)
    assert read_profile(file).name == "t4"


def test_the_default_is_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_cache_file() == tmp_path / ".cache" / "beamwright" / "profile.json"
    write_profile(PROFILE)
    assert read_profile() == PROFILE


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_profile(PROFILE, tmp_path / "file" / "profile.json")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        json.dumps({**asdict(PROFILE), "extra": 1}),
        json.dumps({**asdict(PROFILE), "flops": "fast"}),
        json.dumps({**asdict(PROFILE), "flops": True}),
        json.dumps({**asdict(PROFILE), "flops": -1.0}),
        json.dumps({**asdict(PROFILE), "device_memory_bytes": 1.5}),
        json.dumps({**asdict(PROFILE), "link_share": 2.0}),
    ],
)
def test_a_broken_file_is_named_with_what_to_do(tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"profile\.json: not a hardware profile.*--probe"):
        read_profile(file)


def test_an_unreadable_file_is_named(tmp_path):
    file = tmp_path / "profile.json"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match="not a hardware profile"):
        read_profile(file)
