#!/bin/sh
# Imports the image of the Docker tests from a statically linked busybox: no registry, no Python.
set -eu
image=${1:-jaxagent-test:busybox}
busybox=$(command -v busybox) || { echo "busybox is missing: apt-get install busybox-static" >&2; exit 1; }
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/bin" "$root/etc" "$root/root" "$root/tmp" "$root/home" "$root/proc" "$root/dev" "$root/sys"
chmod 1777 "$root/tmp"
cp "$busybox" "$root/bin/busybox"
for applet in $("$busybox" --list); do
  [ "$applet" = busybox ] || ln -sf busybox "$root/bin/$applet"
done
printf 'root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nagent:x:1000:\n' >"$root/etc/group"
tar -C "$root" -c . | docker import \
  --change 'ENV PATH=/bin' --change 'ENV FROM_IMAGE=yes' --change 'CMD ["/bin/sh"]' - "$image"
