"""A minimal /etc: what programs need to run, nothing that tells about the host."""

import shutil
from pathlib import Path

from envs.sandboxes.namespaces import INSIDE_UID

_WRITTEN = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        f"agent:x:{INSIDE_UID}:{INSIDE_UID}::/home/agent:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": f"root:x:0:\nagent:x:{INSIDE_UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "shells": "/bin/sh\n/bin/bash\n",
}
# The loader's cache, Debian's links to the chosen awk, vi and so on, and public constants.
_COPIED = (
    "alternatives", "bash.bashrc", "ca-certificates.conf", "debian_version", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "magic", "mime.types", "os-release", "profile", "protocols",
    "services", "ssl/certs", "ssl/openssl.cnf", "terminfo",
)  # fmt: skip


def build_etc(target: Path) -> None:
    """Writes the directory that every sandbox of a factory sees read-only as /etc."""
    target.mkdir(mode=0o755)
    for name in _COPIED:
        source, copy = Path("/etc", name), target / name
        try:
            copy.parent.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, symlinks=True)
            elif source.exists():
                shutil.copy(source, copy, follow_symlinks=True)
        except (OSError, shutil.Error):
            continue  # Not readable to this user: the sandbox does without.
    for name, text in _WRITTEN.items():
        (target / name).write_text(text)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
