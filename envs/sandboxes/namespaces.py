"""Command lines that start a program as PID 1 of its own namespaces.

Two ways to the same view: bubblewrap, and util-linux alone (``unshare`` and ``mount``). In
both the program gets its own user, mount, PID, IPC, UTS, network and cgroup namespace, no
capabilities, no_new_privs, user id 1000, and may not make user namespaces itself.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
INSIDE_UID = 1000
SHM_BYTES = 64 << 20
TOOLS = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap) or util-linux >= 2.38"
HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class View:
    """What a sandbox sees.

    Attributes:
      root: its private writable root; every mount point exists in it.
      etc: a prepared read-only /etc.
      env: the whole environment.
      binds: further (source, mount point name in the root, writable).
    """

    root: Path
    etc: Path
    env: Mapping[str, str]
    binds: Sequence[tuple[Path, str, bool]] = field(default_factory=tuple)


def system_mounts() -> dict[str, Path]:
    """Top-level system directories of this host: name -> real path."""
    return {name: Path("/", name).resolve() for name in SYSTEM if Path("/", name).is_dir()}


def mount_points(view_etc: Path) -> dict[str, Path | None]:
    """Everything mounted over the private root, as ``files.Tree.read_only`` takes it."""
    return {**system_mounts(), "etc": view_etc, "proc": None, "dev": None}


def which(name: str) -> str | None:
    return shutil.which(name, path=HOST_PATH)


def drop_to(uid: int | None, gid: int | None) -> list[str]:
    """The prefix that becomes an unprivileged user of the host (root only)."""
    if uid is None:
        return []
    setpriv = which("setpriv")
    if setpriv is None:
        raise FileNotFoundError(f"setpriv is missing: {TOOLS}")
    return [setpriv, f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs", "--"]


def bubblewrap(view: View, command: Sequence[str]) -> list[str]:
    """The bubblewrap command line for ``command``."""
    program = which("bwrap")
    if program is None:
        raise FileNotFoundError(f"bwrap is missing: {TOOLS}")
    argv = [
        program, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent",
        "--new-session", "--as-pid-1", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID),
        "--hostname", "sandbox", "--clearenv",
    ]  # fmt: skip
    for name, value in view.env.items():
        argv += ["--setenv", name, value]
    argv += ["--bind", str(view.root), "/"]
    for name, source in system_mounts().items():
        argv += ["--ro-bind", str(source), f"/{name}"]
    argv += ["--ro-bind", str(view.etc), "/etc", "--proc", "/proc", "--dev", "/dev"]
    argv += ["--size", str(SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]
    argv += ["--remount-ro", "/dev"]
    for source, name, writable in view.binds:
        argv += ["--bind" if writable else "--ro-bind", str(source), f"/{name}"]
    return [*argv, "--", *command]


# Runs as root of a fresh user namespace in fresh mount and PID namespaces. $1 is the root,
# then groups of: source, name, ro|rw; then --, then the command.
_SETUP = r"""
fail() { printf 'E%s\0' "cannot set up the sandbox: $1" >&2; exit 1; }
root=$1; shift
mount -n --bind -o nosuid,nodev "$root" "$root" && cd "$root" || fail "binding the root"
while [ "$1" != -- ]; do
  mount -n --bind -o "$3",nosuid,nodev "$1" "$2" || fail "binding $1"
  shift 3
done
shift
mount -n -t proc -o nosuid,nodev,noexec proc proc || fail "mounting /proc"
# The kernel lets only the host's root write /proc/sys/kernel/hostname; the tool may be absent.
hostname sandbox 2>/dev/null
mount -n -t tmpfs -o nosuid,mode=755,size=64k tmpfs dev || fail "mounting /dev"
mkdir dev/shm dev/pts
for node in null zero full random urandom tty; do
  : >"dev/$node" && mount -n --bind "/dev/$node" "dev/$node" || fail "binding /dev/$node"
done
mount -n -t devpts -o nosuid,noexec,newinstance,ptmxmode=0666,mode=620 devpts dev/pts ||
  fail "mounting /dev/pts"
mount -n -t tmpfs -o nosuid,nodev,mode=1777,size=@SHM@ tmpfs dev/shm || fail "mounting /dev/shm"
ln -s pts/ptmx dev/ptmx && ln -s /proc/self/fd dev/fd && ln -s fd/0 dev/stdin &&
  ln -s fd/1 dev/stdout && ln -s fd/2 dev/stderr || fail "linking in /dev"
mount -n -o remount,bind,ro,nosuid,nodev "$root/dev" || fail "remounting /dev"
for name in sys sysrq-trigger irq bus; do
  [ ! -w "proc/$name" ] || mount -n --bind -o ro "proc/$name" "proc/$name" || fail "/proc/$name"
done
mkdir -p .host && pivot_root . .host && cd / || fail "changing the root"
umount -n -l /.host && rmdir /.host || fail "leaving the old root"
exec "$@"
"""


def util_linux(view: View, command: Sequence[str]) -> list[str]:
    """The same view made by unshare, mount and pivot_root."""
    tools = {name: which(name) for name in ("unshare", "setpriv", "mount", "pivot_root")}
    if missing := [name for name, found in tools.items() if found is None]:
        raise FileNotFoundError(f"{', '.join(missing)} missing: {TOOLS}")
    binds = [str(view.root)]
    for name, source in system_mounts().items():
        binds += [str(source), name, "ro"]
    binds += [str(view.etc), "etc", "ro"]
    for path, name, writable in view.binds:
        binds += [str(path), name, "rw" if writable else "ro"]
    env = [f"{name}={value}" for name, value in view.env.items()]
    # A second user namespace gives the final user id and leaves every mount locked; the
    # limit is one more user namespace below the first, which is this one.
    inner = (
        "echo 1 >/proc/sys/user/max_user_namespaces && exec setpriv --no-new-privs -- "
        f'unshare --user --map-user={INSIDE_UID} --map-group={INSIDE_UID} -- "$@"'
    )
    return [
        str(tools["setpriv"]), "--no-new-privs", "--pdeathsig", "KILL", "--",
        str(tools["unshare"]), "--user", "--map-root-user", "--mount", "--pid", "--ipc", "--uts",
        "--net", "--cgroup", "--fork", "--kill-child", "--",
        "/bin/sh", "-c", _SETUP.replace("@SHM@", str(SHM_BYTES)), "sh", *binds, "--",
        "/bin/sh", "-c", inner, "sh", "env", "-i", *env, *command,
    ]  # fmt: skip


BUILDERS = {"bwrap": bubblewrap, "unshare": util_linux}


def counts_processes_per_namespace(release: str | None = None) -> bool:
    """Whether RLIMIT_NPROC counts per user namespace (Linux 5.14 and later)."""
    major, minor = (release or os.uname().release).split(".")[:2]
    digits = "".join(ch for ch in minor if ch.isdigit())
    return (int(major), int(digits or 0)) >= (5, 14)
