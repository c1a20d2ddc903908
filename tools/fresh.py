"""Runs make targets in a fresh clone on a clean Debian.

`python tools/fresh.py test demo` unpacks a minimal Debian below build/fresh, with Python, a C++
compiler, make and git, clones the current commit into it, and runs `make test`, then `make demo`
there as an ordinary user. Inherited from this machine are only the access to the package index
(name resolution, certificates, proxies, pip's configuration), whether this is CI, and $TESTS, the
arguments of pytest. Needs root and debootstrap.
"""

from __future__ import annotations

import ast
import configparser
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SUITE = "trixie"
PACKAGES = "python3,python3-venv,python3-dev,g++,make,git,ca-certificates"
USER = "newcomer"
CLONE = f"/home/{USER}/jaxkv"

REPOSITORY = Path(__file__).resolve().parent.parent
WORK = REPOSITORY / "build" / "fresh"
ROOT = WORK / "root"


def run(*command: str | Path) -> None:
    print("+", shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True)


def unpack_debian() -> None:
    """Recreates ROOT from an archive that the first run builds."""
    archive = WORK / f"{SUITE}.tar"
    WORK.mkdir(parents=True, exist_ok=True)
    remove_root()
    if not archive.exists():
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, ROOT)
        run("chroot", ROOT, "useradd", "--create-home", USER)
        run("tar", "-C", ROOT, "-cf", f"{archive}.part", ".")
        Path(f"{archive}.part").rename(archive)
    else:
        ROOT.mkdir()
        run("tar", "-C", ROOT, "-xf", archive)


def remove_root() -> None:
    # Another file system below it would be a mount that outlived its namespace.
    run("rm", "-rf", "--one-file-system", ROOT)


def pip_configuration() -> configparser.RawConfigParser:
    """pip's merged configuration files on this machine."""
    merged = configparser.RawConfigParser()
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section != ":env:":
            if not merged.has_section(section):
                merged.add_section(section)
            merged.set(section, key, ast.literal_eval(value))
    return merged


def local_paths(values: list[str]) -> list[Path]:
    """Files and folders named in configuration values."""
    words = [word for value in values for word in value.split()]
    paths = [Path(word) for word in words if word.startswith("/")]
    # The pages of an index on disk link to archives beside it.
    paths += [Path(word.removeprefix("file://")).parent for word in words if "file:///" in word]
    return [path for path in dict.fromkeys(paths) if path != Path("/") and path.exists()]


def copy_network_access(environment: dict[str, str]) -> list[Path]:
    """Copies the package index configuration into ROOT; returns folders to mount there."""
    configuration = pip_configuration()
    with open(ROOT / "etc" / "pip.conf", "w") as file:
        configuration.write(file)
    values = [
        value for section in configuration.sections() for _, value in configuration[section].items()
    ]
    named = local_paths([*values, *environment.values()])
    system = [
        Path(p) for p in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
    ]
    for path in (*system, *named):
        if path.is_file():
            copy = ROOT / path.relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return [path for path in named if path.is_dir()]


def inherited_environment() -> dict[str, str]:
    network = ("http_proxy", "https_proxy", "no_proxy", "ssl_cert_file", "requests_ca_bundle")
    return {
        name: value
        for name, value in os.environ.items()
        if name.lower() in network or name in ("CI", "TESTS") or name.startswith("PIP_")
    }


def clone() -> None:
    run("git", "clone", "--quiet", "--no-hardlinks", REPOSITORY, f"{ROOT}{CLONE}")
    run("chroot", ROOT, "chown", "-R", f"{USER}:{USER}", CLONE)


def run_inside(commands: list[str], environment: dict[str, str], folders: list[Path]) -> None:
    """Runs shell commands in ROOT. The mounts are in a separate namespace and end with it."""
    shared_memory = shlex.quote(str(ROOT / "dev/shm"))
    mounts = [
        f"mount -t proc proc {shlex.quote(str(ROOT / 'proc'))}",
        f"mkdir -p {shared_memory}",
        f"mount -t tmpfs -o mode=1777 shm {shared_memory}",
    ]
    for folder in folders:
        target = shlex.quote(f"{ROOT}{folder}")
        mounts += [
            f"mkdir -p {target}",
            f"mount --bind {shlex.quote(str(folder))} {target}",
            f"mount -o remount,bind,ro {target}",
        ]
    inside = [
        "env", "-i", f"HOME=/home/{USER}", "PATH=/usr/bin:/bin", "LANG=C.UTF-8",
        *(f"{name}={value}" for name, value in environment.items()),
        shutil.which("chroot") or "chroot", f"--userspec={USER}:{USER}", str(ROOT),
        "sh", "-exc", "\n".join([f"cd {CLONE}", *commands]),
    ]  # fmt: skip
    script = "\n".join([*mounts, f"exec {shlex.join(inside)}"])
    subprocess.run(["unshare", "--mount", "sh", "-ec", script], check=True)


def main(targets: list[str]) -> None:
    if os.geteuid() != 0:
        sys.exit(
            "make fresh must run as root: it makes device files, mounts /proc and calls chroot"
        )
    if not shutil.which("debootstrap"):
        sys.exit("make fresh needs debootstrap: apt-get install debootstrap")
    unpack_debian()
    environment = inherited_environment()
    folders = copy_network_access(environment)
    clone()
    try:
        run_inside([f"make {target}" for target in targets], environment, folders)
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"make fresh failed with exit code {error.returncode}; the clone is in {ROOT}{CLONE}"
        )
    remove_root()
    print(f"fresh clone on a clean Debian {SUITE}: make {' '.join(targets)} passed")


if __name__ == "__main__":
    main(sys.argv[1:])
