"""The cores and the wait policy of this process, from made-up files and in real processes."""

import os
import subprocess
import sys

import pytest

from beamwright.cores import SPINS, cpu_quota, num_cores

V1 = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/pod/me", {"pod/cpu.max": "20000 100000", "pod/me/cpu.max": "900000 100000"}, 0.2),
        ("0::/on/the/host", {"cpu.max": "300000 100000"}, 3.0),
        ("1:cpuset:/\n0::/x", {"unified/x/cpu.max": "50000 50000"}, 1.0),
        ("4:cpu,cpuacct:/me", {"cpu,cpuacct/me/" + V1[0]: "-1", "cpu/me/" + V1[1]: "9"}, None),
        ("4:cpu:/me/a", {"cpu/me/" + V1[0]: "50000", "cpu/me/" + V1[1]: "20000"}, 2.5),
        ("4:cpuset:/", {"cpuset/" + V1[0]: "1", "cpuset/" + V1[1]: "1"}, None),
    ],
)
def test_cores_are_no_more_than_the_quota_of_the_control_groups(
    tmp_path, monkeypatch, group, files, quota
):
    mounted = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": group, **mounted}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert cpu_quota(tmp_path) == quota
    assert num_cores(tmp_path) == (64 if quota is None else -int(-quota // 1))


@pytest.mark.parametrize(
    ("first", "users", "spins"),
    [
        ("", {}, str(SPINS)),
        ("", {"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
        ("", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("sys.modules['torch'] = sys\n", {}, "None"),
    ],
)
def test_the_spin_is_short_unless_the_user_or_an_earlier_import_decides(first, users, spins):
    code = f"import os, sys\n{first}import beamwright\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    kept = {"PATH", "PYTHONPATH"} & os.environ.keys()
    environment = {name: os.environ[name] for name in kept} | users
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert found.split() == [spins]
