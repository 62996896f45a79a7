#!/bin/sh
# Makes the Docker tests runnable: installs what is missing (as root), starts a daemon without
# networking if none answers, and imports the test image. Running it again does nothing.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
log=${DOCKERD_LOG:-/tmp/dockerd.log}

missing=
for pair in dockerd:docker.io busybox:busybox-static bwrap:bubblewrap unshare:util-linux; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || [ -x "/usr/sbin/${pair%%:*}" ] || missing="$missing ${pair#*:}"
done
if [ -n "$missing" ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "missing:$missing; install them as root" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
fi

if ! docker info >/dev/null 2>&1; then
  if [ "$(id -u)" != 0 ]; then
    echo "no Docker daemon answers, and only root can start one" >&2
    exit 1
  fi
  # No image is pulled and no container has a network, so no bridge and no iptables.
  nohup dockerd --iptables=false --ip6tables=false --bridge=none >"$log" 2>&1 &
  tries=0
  until docker info >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -gt 120 ]; then
      echo "the Docker daemon did not start; the end of $log:" >&2
      tail -n 20 "$log" >&2
      exit 1
    fi
    sleep 0.5
  done
fi

image=${JAXAGENT_TEST_IMAGE:-jaxagent-test:busybox}
docker image inspect "$image" >/dev/null 2>&1 || sh "$here/tests/docker/build_image.sh" "$image"
echo "docker $(docker version --format '{{.Server.Version}}'), image $image"
